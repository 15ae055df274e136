"""Muon and NorMuon: momentum made orthogonal, scales by row, cautious weight decay.

PyTorch on stacks [S, m, n] of equal matrices: a few batched products for all layers at once, and nothing waits for the
device. On CUDA training takes the same steps by ops/lamb_cuda.py, and its products by ops/muon_cuda.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.lamb import Lamb

# Of the quintic iteration, with the number of its steps: K. Jordan, "Muon" (kellerjordan.github.io/posts/muon, 2024).
# Its slope at 0 is large; singular values end between about 0.7 and 1.2, not at 1, which does no harm.
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
_EPS = 1e-7  # of norms; as in torch.optim.Muon
TILE = 128  # of ops/muon_cuda.py, which needs Triton to be imported
ROW_BETA = 0.95  # of NorMuon's mean squares: the beta2 of its paper
RMS = 0.2  # of an update at rate 1, AdamW's usual one: Liu et al. 2025, arXiv 2502.16982, section 2.2


def working_dtype(device: torch.device) -> torch.dtype:
    """In which matrices are multiplied: bfloat16 is enough, and fast on a GPU; a CPU is faster in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def newton_schulz(matrices: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows (columns, of tall ones), about, of each of [S, m, n], in its dtype.

    With X = U S V^T scaled to norm 1, each step takes X to a X + (b A + c A^2) X, A = X X^T, which keeps U and V and
    drives S to 1; tall ones to a X + X (b A + c A^2), A = X^T X, so that nothing is transposed in memory. A matrix of
    zeros stays one.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices / torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(STEPS):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if tall else torch.baddbmm(x, factor, x, beta=a)
    return x


@cache
def obstacle(device: torch.device, *sides: int) -> str:
    """Why ops/muon_cuda.py has no products for matrices with these sides on a device; "" where it has."""
    if odd := [side for side in sides if side % TILE]:
        return f"a side of a matrix is {odd[0]} and not a multiple of {TILE}"
    return nvrtc.obstacle(device, capability=9) or ("there is no Triton" if find_spec("triton") is None else "")


def orthogonalised(updates: Tensor, scales: Tensor) -> Tensor:
    """`newton_schulz` of bfloat16 matrices [S, m, n] on CUDA, which scales [S] give norm 1, as fast as can be there."""
    if obstacle(updates.device, *updates.shape[1:]):
        return newton_schulz(updates * scales.view(-1, 1, 1).to(updates.dtype))
    return import_module("ops.muon_cuda").orthogonalised(updates, scales)


def matched_scale(shape: tuple[int, int]) -> float:
    """By which orthogonal matrices [m, n] get entries of the root mean square 0.2: 0.2 sqrt(max(m, n))."""
    return RMS * math.sqrt(max(shape))


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
    return (scales / norms).mul(RMS * math.sqrt(directions[0].numel())).unsqueeze(-1)


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


def by_shape(parameters: list[Any], group: dict[str, Any]) -> dict[tuple[int, int], list[Any]]:
    """Some parameters of a group of matrices by the shape of their projections."""
    counts, found = dict(zip(group["params"], group["projections"], strict=True)), {}
    for parameter in parameters:
        found.setdefault((parameter.size(0) // counts[parameter], parameter.size(1)), []).append(parameter)
    return found


class Muon(Lamb):
    """Muon (Jordan et al., 2024) or NorMuon (Li et al., arXiv 2510.05491) for groups of matrices; others as they say.

        M = momentum M + (1 - momentum) G,   D = newton_schulz((1 - momentum) G + momentum M)
        W = W - lr (scale D + weight_decay W),   scale so that the entries of scale D have the root mean square 0.2

    NorMuon divides each row of D (an output neuron) by the root of a running mean of its squares first. With that scale
    rates and weight decay are about AdamW's (arXiv 2502.16982).

    A group is one of matrices if it has "projections": how many projections lie one above the other in each of its
    parameters, which are orthogonalised one by one. Other groups take LAMB's step, or with "trust" False AdamW's.
    """

    def __init__(
        self, params: Iterable[Any], momentum: float = 0.95, by_row: bool = False, cautious: bool = False, **rest: Any
    ) -> None:
        """by_row: NorMuon. cautious: weight decay of matrices only where the update agrees. rest: as for Lamb."""
        super().__init__(params, **rest)
        self.momentum, self.by_row, self.cautious = momentum, by_row, cautious

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """What is kept of each parameter of a group once it has taken a step."""
        if "projections" not in group:
            return super().entries(group)
        return ("momentum", "row_square") if self.by_row else ("momentum",)

    def matrix_moments(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor] | list[None]]:
        """Momentum and, of NorMuon, mean squares of rows; zeros of a matrix that never took a step."""
        squares = self._kept("row_square", parameters, by_row=True) if self.by_row else [None] * len(parameters)
        return self._kept("momentum", parameters), squares

    @torch.no_grad()
    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take a step with parameters of a group, which have gradients: matrices of one shape all at once."""
        if "projections" not in group:
            return super().update(parameters, group)
        momenta = self._kept("momentum", parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momentum = group.get("momentum", self.momentum)  # of the group, where it moves
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, momenta, momentum)
        of = dict(zip(parameters, updates, strict=True))
        for shape, same in by_shape(parameters, group).items():
            self._descend(same, [of[parameter] for parameter in same], shape, group)
        return None

    def _descend(
        self, parameters: list[Tensor], updates: list[Tensor], shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """One step of parameters whose projections all have `shape`, along their updates made orthogonal."""
        rows = [parameter.size(0) for parameter in parameters]
        dtype = working_dtype(parameters[0].device)
        stack = torch.empty(sum(rows), shape[1], dtype=dtype, device=parameters[0].device)
        torch._foreach_copy_(stack.split(rows), updates)
        directions = newton_schulz(stack.view(-1, *shape))
        scales: Tensor | float = matched_scale(shape)
        if self.by_row:
            kept = self._kept("row_square", parameters, by_row=True)
            second = torch.cat(kept)
            scales = row_scales(directions, second.view(-1, shape[0]), ROW_BETA, group["eps"])
            torch._foreach_copy_(kept, second.split(rows))
        weights = torch.cat(parameters)
        stacked = weights.view(-1, *shape)
        descend(stacked, directions, scales, group["lr"], group["weight_decay"], self.cautious)
        torch._foreach_copy_(parameters, weights.split(rows))
