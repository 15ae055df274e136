"""Layer norm of a gated value, layer_norm(value * gelu(gate)) without weights: the reference and the choice of kernels.

A feed-forward sublayer (GEGLU; Shazeer, 2020, with NormFormer's norm) and GPT-BERT's gated attention both have it
between two matrix products, other GLUs value * activation(gate) alone. The CUDA kernels are in ops/gated_norm_cuda.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import gated_norm_cuda
from ops.gated_norm_cuda import fused_gated_norm, fused_gated_pair, fused_gated_pair_norm
from ops.reference import reference_chosen


def gated_norm(value: Tensor, gate: Tensor, eps: float, approximate: str) -> Tensor:
    """The formula as it stands, for tensors [..., D]; `approximate` is gelu's, "none" or "tanh"."""
    return F.layer_norm(value * F.gelu(gate, approximate=approximate), value.shape[-1:], eps=eps)


def gated_pair_norm(pair: Tensor, eps: float, approximate: str) -> Tensor:
    """The same of value and gate side by side, [..., 2 D] -> [..., D]."""
    value, gate = pair.chunk(2, dim=-1)
    return gated_norm(value, gate, eps, approximate)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. (2021)
}


def gated_pair(pair: Tensor, activation: str) -> Tensor:
    """value * activation(gate) of both side by side, [..., 2 D] -> [..., D]; one of ACTIVATIONS."""
    value, gate = pair.chunk(2, dim=-1)
    return value * ACTIVATIONS[activation](gate)


class GatedNorm(NamedTuple):
    """An implementation: `separate` is `gated_norm`, `paired` is `gated_pair_norm`, and `plain` is `gated_pair`."""

    separate: Callable[[Tensor, Tensor, float, str], Tensor]
    paired: Callable[[Tensor, float, str], Tensor]
    plain: Callable[[Tensor, str], Tensor]


REFERENCE = GatedNorm(gated_norm, gated_pair_norm, gated_pair)
KERNEL = GatedNorm(fused_gated_norm, fused_gated_pair_norm, fused_gated_pair)


def choose_gated_norm(device: torch.device, width: int) -> GatedNorm:
    """The implementation for rows of `width` on a device, to be chosen outside of what torch.compile traces."""
    return KERNEL if use_kernel(device, width) else REFERENCE


def use_kernel(device: torch.device, width: int) -> bool:
    """Whether rows of `width` go through the CUDA kernels: under bf16 autocast on CUDA, not while compiling.

    (Training compiles sublayers, which are given the choice: training/forward_backward.py.) HYBRID_REFERENCE=norm in
    the environment keeps the reference (ops/reference.py).
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return autocast and not reference_chosen("norm") and gated_norm_cuda.available(device, width)
