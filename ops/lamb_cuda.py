"""CUDA kernels of clipping, LAMB and the average of the weights, in three passes over memory.

    update = FusedLamb()
    norm = update([(settings, tensors), ...], max_norm, average_decay)      one element for each group of parameters

does what the reference does, `clip_gradients`, `Lamb.step` and `Ema.update` one after the other, except that gradients
stay unclipped.
The source is ops/cuda/lamb.cu, compiled by NVRTC (ops/nvrtc.py); float32, any sizes and addresses. Its passes read g,
then g m v w, then m v w a, and move 52 bytes an element, where the separate calls move 140. Deterministic, without
atomics. Nothing here waits for the device: when tensors have moved since the call before, as gradients do, a new table
of addresses is copied there from page-locked memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ops import nvrtc
from ops.nvrtc import Module

_SOURCE = Path(__file__).parent / "cuda" / "lamb.cu"
_THREADS, _CHUNK = 256, 4096  # as in the source


class Settings(NamedTuple):
    """What a group's step depends on besides its tensors. step: counts from 1, this one included."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int


class Tensors(NamedTuple):
    """A group's tensors, parameter by parameter. averages: None where a parameter has none."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    averages: Sequence[Tensor | None]


def obstacle(device: torch.device) -> str:
    """Why a device cannot run the kernels; "" where it can. Compiles nothing."""
    return nvrtc.obstacle(device, capability=0)


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run there: no obstacle, compiled and loaded. Warns where they should run but do not load."""
    consequence = "the optimizer runs without its CUDA kernels, more slowly"
    return not obstacle(device) and nvrtc.loads(lambda: _module(nvrtc.number_of(device)), consequence)


def fits(tensor: Tensor) -> bool:
    """Whether the kernels can work on a tensor: plain float32 on a CUDA device, without gaps."""
    return tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()


def chunk_table(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Chunks int32 [C, 2] (tensor, number of the chunk in it) and spans int32 [P, 2] (first chunk, how many)."""
    counts = torch.tensor([-(-size // _CHUNK) for size in sizes], dtype=torch.int64)
    first = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    number = torch.arange(len(owner)) - first[owner]
    return torch.stack((owner, number), 1).int(), torch.stack((first, counts), 1).int()


class FusedLamb:
    """The kernels together with their tables of addresses and their scratch memory for one model on one device."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._gradients_known: list[int] = []

    @torch.no_grad()
    def __call__(self, groups: Sequence[tuple[Settings, Tensors]], max_norm: float, average_decay: float) -> Tensor:
        """Update weights, moments and averages in place; returns the norm of all gradients, a tensor on the device.

        max_norm: gradients count as if scaled down to this total norm (infinity: as they are). A group with weight
        decay has a trust ratio for each tensor, one without has none. Every tensor must satisfy `fits`, all of a
        parameter must have its size, and all lie on one device. Raises ValueError otherwise.
        """
        groups = [(settings, tensors) for settings, tensors in groups if len(tensors.weights)]
        if not groups:
            return torch.zeros(())
        device = groups[0][1].weights[0].device
        self._update_tables([tensors for _, tensors in groups], device)
        clip = torch.empty(2, device=device)
        module, stream = _module(device.index), torch.cuda.current_stream(device).cuda_stream
        params = _Params(
            *(t.data_ptr() for t in (self._table, self._gradients, self._chunks, self._spans)),
            *(t.data_ptr() for t in (self._squares, self._sums, clip, self._trust)),
            n_chunks=len(self._chunks),
            max_norm=max_norm,
            average_step=1 - average_decay,
        )
        with torch.cuda.device(device):
            module.launch("gradient_squares", len(self._chunks), _THREADS, params, stream)
            module.launch("gradient_norm", 1, _THREADS, params, stream)
            tensor = 0
            for settings, tensors in groups:
                count = len(tensors.weights)
                first, blocks = self._first_chunks[tensor], self._first_chunks[tensor + count]
                blocks -= first
                _set(params, settings, tensor, first)
                if not blocks:
                    pass
                elif settings.weight_decay > 0:
                    module.launch("moments", blocks, _THREADS, params, stream)
                    module.launch("trust_ratios", count, _THREADS, params, stream)
                    module.launch("apply", blocks, _THREADS, params, stream)
                else:
                    module.launch("moments_and_apply", blocks, _THREADS, params, stream)
                tensor += count
        return clip[0]

    def _update_tables(self, groups: Sequence[Tensors], device: torch.device) -> None:
        """Bring the tables up to date with where the tensors are now."""
        weights, gradients, first, second = (
            [tensor for group in groups for tensor in part(group)]
            for part in (lambda g: g.weights, lambda g: g.gradients, lambda g: g.first, lambda g: g.second)
        )
        averages = [average for group in groups for average in group.averages]
        sizes = [weight.numel() for weight in weights]
        known = [tensor.data_ptr() for tensor in (*weights, *first, *second)]
        known += [0 if average is None else average.data_ptr() for average in averages] + sizes
        if known != self._known:
            for tensors in (weights, first, second, averages):
                _check(tensors, sizes, device)
            # Lines of weights, moments, averages and sizes, transposed: tensor by tensor the fields of `struct Tensor`.
            self._table = _to_device(torch.tensor(known, dtype=torch.int64).view(5, len(weights)).t(), device)
            chunks, spans = chunk_table(sizes)
            self._first_chunks = [*spans[:, 0].tolist(), len(chunks)]
            self._chunks, self._spans = _to_device(chunks, device), _to_device(spans, device)
            self._squares = torch.empty(len(chunks), device=device)
            self._sums = torch.empty(len(chunks), 2, device=device)
            self._trust = torch.empty(len(weights), device=device)
            self._known = known
        moved = [gradient.data_ptr() for gradient in gradients]
        if moved != self._gradients_known:
            _check(gradients, sizes, device)
            self._gradients = _to_device(torch.tensor(moved, dtype=torch.int64), device)
            self._gradients_known = moved


def _check(tensors: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device) -> None:
    for tensor, size in zip(tensors, sizes, strict=True):
        if tensor is None:
            continue
        if not fits(tensor) or tensor.numel() != size or tensor.device != device:
            raise ValueError(
                f"fused LAMB was given {tensor.dtype} {list(tensor.shape)} on {tensor.device} where it needs dense "
                f"float32 of {size} elements on {device}"
            )


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it; torch keeps the page-locked original until the copy is done."""
    return table.contiguous().pin_memory().to(device, non_blocking=True)


# Field by field what `struct Params` in the source is.


class _Params(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("tensors", "gradients", "chunks", "spans")]
        + [(name, ctypes.c_void_p) for name in ("squares", "sums", "clip", "trust")]
        + [(name, ctypes.c_int32) for name in ("n_chunks", "first_chunk", "first_tensor")]
        + [(name, ctypes.c_float) for name in ("max_norm", "first_step", "second_step", "beta2")]
        + [(name, ctypes.c_float) for name in ("first_correction", "second_correction", "eps", "weight_decay", "lr")]
        + [("average_step", ctypes.c_float)]
    )


def _set(params: _Params, settings: Settings, first_tensor: int, first_chunk: int) -> None:
    """Set what differs from group to group; launches copy the parameters, so they may change afterwards."""
    (beta1, beta2), step = settings.betas, settings.step
    values = {
        "first_chunk": first_chunk,
        "first_tensor": first_tensor,
        "first_step": 1 - beta1,
        "second_step": 1 - beta2,
        "beta2": beta2,
        "first_correction": 1 / (1 - beta1**step),
        "second_correction": 1 / math.sqrt(1 - beta2**step),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "lr": settings.lr,
    }
    for name, value in values.items():
        setattr(params, name, value)


@cache
def _module(device: int) -> Module:
    return Module(_SOURCE, [], device)
