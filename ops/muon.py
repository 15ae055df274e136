"""Muon's step for stacks of equal matrices: momentum made orthogonal, NorMuon's scales, cautious weight decay.

Pure PyTorch on [S, m, n]: a few batched products for all layers at once, and nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of the quintic iteration, with the number of its steps: K. Jordan, "Muon" (kellerjordan.github.io/posts/muon, 2024).
# Its slope at 0 is large; singular values end between about 0.7 and 1.2, not at 1, which does no harm.
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
_EPS = 1e-7  # of norms; as in torch.optim.Muon
_RMS = 0.2  # of an update at rate 1, AdamW's usual one: Liu et al. 2025, arXiv 2502.16982, section 2.2


def working_dtype(device: torch.device) -> torch.dtype:
    """In which matrices are multiplied: bfloat16 is enough, and fast on a GPU; a CPU is faster in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def newton_schulz(matrices: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows (columns, of tall ones), about, of each of [S, m, n], in its dtype.

    With X = U S V^T scaled to norm 1, each step takes X to a X + (b A + c A^2) X, A = X X^T, which keeps U and V and
    drives S to 1. A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


def matched_scale(directions: Tensor) -> float:
    """By which orthogonal [S, m, n] get entries of the root mean square 0.2: 0.2 sqrt(max(m, n))."""
    return _RMS * math.sqrt(max(directions.shape[-2:]))


def row_scales(directions: Tensor, second: Tensor, beta: float, eps: float) -> Tensor:
    """NorMuon's scales [S, m, 1] of directions [S, m, n] (arXiv 2510.05491, algorithm 1): all neurons move as far.

    second [S, m]: running mean of each row's mean square, updated in place. Rows are divided by its root, and then each
    matrix gets entries of the root mean square 0.2. A start at zero needs no correction: it cancels.
    """
    columns = directions.size(-1)
    squares = torch.linalg.vector_norm(directions, dim=-1, dtype=torch.float32).square() / columns
    second.lerp_(squares, 1 - beta)
    scales = 1 / (second.sqrt() + eps)
    norms = (squares * scales.square()).sum(dim=-1, keepdim=True).mul(columns).sqrt().clamp(min=_EPS)
    return (scales / norms).mul(_RMS * math.sqrt(directions[0].numel())).unsqueeze(-1)


def descend(
    weights: Tensor, directions: Tensor, scales: Tensor | float, rate: float, weight_decay: float, cautious: bool
) -> None:
    """weights [S, m, n] -= rate (scales directions + weight_decay weights), in place.

    cautious: no decay of entries that the update moves away from 0 (Chen et al. 2025, arXiv 2510.12402, algorithm 1).
    scales: above 0, one number or [S, m, 1].
    """
    if weight_decay > 0 and cautious:
        weights.addcmul_(weights, weights * directions > 0, value=-rate * weight_decay)
    elif weight_decay > 0:
        weights.mul_(1 - rate * weight_decay)
    if isinstance(scales, Tensor):
        weights.addcmul_(directions, scales, value=-rate)
    else:
        weights.add_(directions, alpha=-rate * scales)
