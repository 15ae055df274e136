"""The residual stream: what sublayers read, normalised, and add to, with or without averaging over depth.

    x' = x + dropout(update)                                      LTG-BERT
    x' = the depth-weighted average that ops/depth_average.py defines     GPT-BERT

Here are the reference implementation and the choice; the CUDA kernels are in ops/residual_cuda.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import residual_cuda
from ops.depth_average import BufferedAverages, PlainAverages
from ops.dropout import DropoutStates, drop_tokens
from ops.reference import reference_chosen
from ops.residual_cuda import FusedResidualStream


def residual_stream(
    embeddings: Tensor, eps: float | None, sublayers: int, alphas: Sequence[Tensor] | None = None
) -> ResidualStream | FusedResidualStream:
    """The stream of one forward pass over so many sublayers: by the kernels where `use_kernel` says so.

    The other arguments are those of ResidualStream.
    """
    if eps is not None and use_kernel(embeddings, sublayers):
        return FusedResidualStream(embeddings, eps, sublayers, alphas)
    return ResidualStream(embeddings, eps, alphas)


def use_kernel(embeddings: Tensor, sublayers: int) -> bool:
    """Whether embeddings [B, T, D] go through the CUDA kernels: under bf16 autocast on CUDA, not while compiling.

    HYBRID_REFERENCE=residual in the environment keeps the reference (ops/reference.py).
    """
    device = embeddings.device
    if device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return False
    if torch.get_autocast_dtype("cuda") != torch.bfloat16 or reference_chosen("residual"):
        return False
    if torch.compiler.is_compiling():
        return _traced()
    return residual_cuda.available(device, embeddings.size(-1), sublayers)


def _traced() -> bool:
    """Say that none of a model's kernels are used when it is compiled as a whole. Always False."""
    warnings.warn(
        "torch.compile over the whole model leaves out the CUDA kernels for attention, residual stream and norms and "
        "is several times slower; use training.forward_backward.compile_layers(model) instead",
        stacklevel=2,
    )
    return False


# Runs while torch.compile traces, as nothing else there does. This is what torch.compiler.assume_constant_result does,
# which imports the compiler: half of all import time.
_traced._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class ResidualStream:
    """The stream of one forward pass. `x`: its present value [B, T, D]."""

    def __init__(self, embeddings: Tensor, eps: float | None, alphas: Sequence[Tensor] | None = None) -> None:
        """embeddings [B, T, D]; eps of layer norms, None where sublayers have norms of their own; alphas: for sublayer
        k a vector [k + 2], or None for plain sums."""
        self._eps, self._averages = eps, None
        if alphas is not None:
            form = PlainAverages if torch.compiler.is_compiling() else BufferedAverages
            self._averages = form(alphas, embeddings)
        self.x = embeddings if self._averages is None else self._averages.first()

    def normalised(self) -> Tensor:
        """Layer norm of x without weights (x itself without eps), [B, T, D]: what the next sublayer reads."""
        return self.x if self._eps is None else F.layer_norm(self.x, self.x.shape[-1:], eps=self._eps)

    def add(self, update: Tensor, p: float, states: DropoutStates | None, site: int) -> None:
        """Add a sublayer's output `update` [B, T, D], of which a fraction p is dropped (at site, by states)."""
        update = drop_tokens(update, p, states, site)
        self.x = self.x + update if self._averages is None else self._averages.next(self.x, update)
