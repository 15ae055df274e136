"""Checksums of the bits of many tensors: equal tensors have equal sums, and one flipped bit changes a sum.

    sums = BitSums()(tensors)      int64, one for each tensor

A sum is that of the tensor's bit patterns as signed integers, element i times 2 (i mod 256) + 1, modulo 2^64. A flipped
bit changes it by an odd number times a power of two, and what moves or flips in several places changes it but by rare
chance. Sums of integers do not depend on their order: the result is exact, on any device.

On CUDA a kernel (ops/cuda/bit_sums.cu) reads all float32 tensors in one pass; elsewhere its reference implementation in
PyTorch gives the same numbers, tensor by tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ops import nvrtc
from ops.lamb_cuda import chunk_table, fits
from ops.nvrtc import Module

_SOURCE = Path(__file__).parent / "cuda" / "bit_sums.cu"
_THREADS = 256  # as in the source, whose chunks are those of ops/cuda/lamb.cu
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class BitSums:
    """The sums, with the kernel's tables of where the tensors are."""

    def __init__(self) -> None:
        self._known: list[int] = []

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sums int64 [len(tensors)] on the tensors' device, which is not waited for."""
        tensors = [tensor.detach() for tensor in tensors]
        if not tensors:
            return torch.zeros(0, dtype=torch.int64)
        if not all(map(fits, tensors)) or not available(tensors[0].device):
            return torch.stack([reference_sum(tensor) for tensor in tensors])
        device = tensors[0].device
        known = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.numel())]
        if known != self._known:
            chunks, _ = chunk_table(known[1::2])
            addresses = torch.tensor(known, dtype=torch.int64).view(-1, 2).t().contiguous()
            self._addresses, self._chunks = (
                table.pin_memory().to(device, non_blocking=True) for table in (addresses, chunks)
            )
            self._known = known
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        params = _Params(*(t.data_ptr() for t in (*self._addresses, self._chunks, sums)))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            _module(device.index).launch("bit_sums", len(self._chunks), _THREADS, params, stream)
        return sums


def reference_sum(tensor: Tensor) -> Tensor:
    """The sum of one tensor, in PyTorch; int64 []."""
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    # Elements with the same weight are those with the same i mod 256, the columns of a matrix and what is left over.
    rows = len(bits) // _THREADS
    lanes = bits[: rows * _THREADS].view(rows, _THREADS).sum(0, dtype=torch.int64)  # [256]
    rest = bits[rows * _THREADS :]
    lanes[: len(rest)] += rest
    return (lanes * torch.arange(1, 2 * _THREADS, 2, device=tensor.device)).sum()


@cache
def available(device: torch.device) -> bool:
    """Whether the kernel runs there: no obstacle, compiled and loaded. Warns where it should run but does not load."""
    consequence = "checksums of the weights are formed without their CUDA kernel, in milliseconds"
    return not nvrtc.obstacle(device, capability=0) and nvrtc.loads(
        lambda: _module(nvrtc.number_of(device)), consequence
    )


class _Params(ctypes.Structure):
    """Field by field what `struct Params` in the source is."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tensors", "sizes", "chunks", "sums")]


@cache
def _module(device: int) -> Module:
    return Module(_SOURCE, [], device)
