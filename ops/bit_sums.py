"""Checksums of the bits of many tensors: equal tensors have equal sums, and one flipped bit changes a sum.

A sum is that of the tensor's bit patterns as signed integers, element i times 2 (i mod 256) + 1, modulo 2^64. A flipped
bit changes it by an odd number times a power of two, and what moves or flips in several places changes it but by rare
chance. Sums of integers do not depend on their order: the result is exact, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LANES = 256
_PART = 2**14 * _LANES  # elements that are summed at once, of which there is a copy in int64 meanwhile
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums int64 [len(tensors)] on the tensors' device, which is not waited for."""
    return torch.stack([_bit_sum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)


def _bit_sum(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    # Elements with the same weight are those with the same i mod 256: the columns of matrices, and what is left over.
    whole = len(bits) // _LANES * _LANES
    lanes, rest = torch.zeros(_LANES, dtype=torch.int64, device=tensor.device), bits[whole:]
    for part in bits[:whole].split(_PART):
        lanes += part.view(-1, _LANES).sum(0, dtype=torch.int64)
    lanes[: len(rest)] += rest
    return (lanes * torch.arange(1, 2 * _LANES, 2, device=tensor.device)).sum()
