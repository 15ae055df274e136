"""Operators of models and optimizer: reference implementations in PyTorch, and the CUDA kernels that reproduce them."""
