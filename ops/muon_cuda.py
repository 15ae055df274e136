"""Newton-Schulz for stacks of bfloat16 on CUDA: products that are symmetric by their lower halves, in a Triton kernel.

With A = X X^T, a step X <- (a I + b A + c A^2) X = P X needs three products and no pass between them: I enters before P
is rounded, which loses less than P without it does. Of rectangular X, on which most of the work would be done, several
steps are taken together, Q X with Q = P' P, since all that is made of A commutes: A' = P A P. By rounding, A' is no
more than about X' X'^T, so that it is made of X again after three steps (the errors: tests/test_muon.py).
Only where Triton is, which comes with torch's CUDA wheels.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ops.muon import COEFFICIENTS, TILE

_DEPTH, _WARPS, _STAGES = 64, 4, 3  # fastest of those in benchmarks/README.md: two blocks share a processor


def orthogonalised(stack: Tensor, scales: Tensor) -> Tensor:
    """`ops.muon.newton_schulz` of bfloat16 matrices [S, m, n], each times its scale [S], which gives it norm 1."""
    tall, x = stack.size(1) > stack.size(2), stack
    for steps in (1, 1, 1, 1, 1) if stack.size(1) == stack.size(2) else (3, 2):
        of_first = scales if x is stack else None
        gram = _product(x, x, tall=tall, scales=of_first, power=2)
        q = _product(gram, gram, polynomial=True, scales=of_first if steps == 1 else None)
        p = q
        for left in reversed(range(steps - 1)):
            gram = _product(_product(p, gram), p)
            p = _product(gram, gram, polynomial=True)
            q = _product(p, q, scales=None if left else of_first)
        x = torch.bmm(x, q) if tall else torch.bmm(q, x)
    return x


def _product(
    x: Tensor, y: Tensor, tall: bool = False, polynomial: bool = False, scales: Tensor | None = None, power: int = 1
) -> Tensor:
    """x y^T of matrices whose product is symmetric (tall: x^T y), or a I + b x + c x x^T, times scales^power."""
    size, depth = reversed(x.shape[1:]) if tall else x.shape[1:]
    out = x.new_empty(len(x), size, size)
    strides = (1, size) if tall else (depth, 1)
    tiles = size // TILE
    grid = (tiles * (tiles + 1) // 2, len(x))
    _symmetric[grid](  # pyright: ignore[reportIndexIssue]
        x, y, out, out if scales is None else scales, size, depth, *strides, *COEFFICIENTS,
        polynomial, 0 if scales is None else power, TILE, _DEPTH, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


@triton.jit
def _symmetric(
    x, y, out, scales, size, depth, row_stride, depth_stride, a, b, c,
    POLYNOMIAL: tl.constexpr, POWER: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A block makes tile (i, j), j <= i, of one product and stores it on both sides of the diagonal."""
    i, j, matrix = tl.full((), 0, tl.int32), tl.program_id(0), tl.program_id(1).to(tl.int64)
    while j > i:
        i += 1
        j -= i
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    places = tl.arange(0, DEPTH) * depth_stride
    x_tile = x + matrix * size * depth + rows[:, None] * row_stride + places[None, :]
    y_tile = y + matrix * size * depth + columns[None, :] * row_stride + places[:, None]
    result = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, depth, DEPTH):
        result = tl.dot(tl.load(x_tile), tl.load(y_tile), result)
        x_tile += DEPTH * depth_stride
        y_tile += DEPTH * depth_stride
    place = matrix * size * size
    if POLYNOMIAL:
        result = c * result + b * tl.load(x + place + rows[:, None] * size + columns[None, :]).to(tl.float32)
        result += tl.where(rows[:, None] == columns[None, :], a, 0.0)
    if POWER > 0:
        scale = tl.load(scales + matrix)
        result *= scale * scale if POWER == 2 else scale
    tile = result.to(tl.bfloat16)
    tl.store(out + place + rows[:, None] * size + columns[None, :], tile)
    if i > j:
        tl.store(out + place + columns[:, None] * size + rows[None, :], tl.trans(tile))
