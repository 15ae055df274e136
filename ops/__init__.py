"""Attention and dropout: plain PyTorch references that fused kernels must reproduce."""
