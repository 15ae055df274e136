"""CUDA kernels of clipping, LAMB, Muon and the average of the weights, in three passes over memory.

    update = FusedLamb()
    norm = update([(settings, tensors), ...], max_norm, average_decay)      one element for each group of parameters

does what the reference does, `clip_gradients`, `Lamb.step` or `Muon.step`, and `Ema.update` one after the other, except
that gradients stay unclipped. Between the passes over matrices that Muon updates are the products of ops/muon_cuda.py.
The source is ops/cuda/lamb.cu, compiled by NVRTC (ops/nvrtc.py); float32, any sizes and addresses. Its passes read g,
then g m v w, then m v w a, and move 52 bytes an element, where the separate calls move 140. Deterministic, without
atomics. Nothing here waits for the device: when tensors have moved since the call before, as gradients do, a new table
of addresses is copied there from page-locked memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops import muon, nvrtc
from ops.lamb import Lamb
from ops.nvrtc import FLOAT, INT32, INT64, POINTER, Module, Params, fields

_SOURCE = Path(__file__).parent / "cuda" / "lamb.cu"
_THREADS, _CHUNK = 256, 4096  # as in the source


class Settings(NamedTuple):
    """What a group's step depends on besides its tensors. step: counts from 1, this one included.

    trust: whether there is a trust ratio for each tensor, with weight decay.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    trust: bool = True
    shape = None


class MatrixSettings(NamedTuple):
    """The same of Muon's step with matrices of one shape, as many one above the other in each parameter as fit into it.

    by_row: NorMuon. cautious: as of `ops.muon.Muon`.
    """

    shape: tuple[int, int]
    lr: float
    momentum: float
    eps: float
    weight_decay: float
    by_row: bool
    cautious: bool


class Tensors(NamedTuple):
    """A group's tensors, parameter by parameter. averages: None where a parameter has none.

    first, second: moments; of matrices the momentum, and NorMuon's mean squares of rows or None.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor | None]
    averages: Sequence[Tensor | None]


def begin_groups(optimizer: Lamb, averages: dict[Any, Tensor]) -> Iterator[tuple[Settings | MatrixSettings, Tensors]]:
    """Begin a step of all groups: what the kernels are given of each parameter that has a gradient.

    averages: by parameter, of which these are taken out.
    """
    for group in optimizer.param_groups:
        group["step"] += 1
        own: list[Any] = [parameter for parameter in group["params"] if parameter.grad is not None]
        usual = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        if "projections" in group:
            assert isinstance(optimizer, muon.Muon)
            usual |= {"by_row": optimizer.by_row, "cautious": optimizer.cautious}
            usual["momentum"] = group.get("momentum", optimizer.momentum)
            of_shapes = muon.by_shape(own, group).items()
            parts = [
                (MatrixSettings(shape, **usual), same, optimizer.matrix_moments(same)) for shape, same in of_shapes
            ]
        else:
            usual |= {"betas": group["betas"], "step": group["step"], "trust": group.get("trust", True)}
            parts = [(Settings(**usual), own, optimizer.moments(own))]
        for settings, same, moments in parts:
            gradients = [parameter.grad for parameter in same]
            yield settings, Tensors(same, gradients, *moments, [averages.pop(parameter) for parameter in same])


def obstacle(device: torch.device, matrices: bool = False) -> str:
    """Why a device cannot run the kernels (those of Muon, too); "" where it can. Compiles nothing."""
    return nvrtc.obstacle(device, capability=8 if matrices else 0)


@cache
def available(device: torch.device, matrices: bool = False) -> bool:
    """Whether the kernels (of Muon, too) run there: no obstacle, compiled and loaded. Warns where they should, and do
    not load."""
    consequence = "the optimizer runs without its CUDA kernels, more slowly"
    return not obstacle(device, matrices) and nvrtc.loads(lambda: _module(nvrtc.number_of(device)), consequence)


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
        self._known: tuple[list[tuple[int, ...]], list[int], list[int]] = ([], [], [])
        self._gradients_known: list[int] = []

    @torch.no_grad()
    def __call__(
        self, groups: Sequence[tuple[Settings | MatrixSettings, Tensors]], max_norm: float, average_decay: float
    ) -> Tensor:
        """Update weights, moments and averages in place; returns the norm of all gradients, a tensor on the device.

        max_norm: gradients count as if scaled down to this total norm (infinity: as they are). Every tensor must
        satisfy `fits`, all of a parameter must have its size (mean squares one a row), and all lie on one device.
        Raises ValueError otherwise.
        """
        groups = [(settings, tensors) for settings, tensors in groups if len(tensors.weights)]
        if not groups:
            return torch.zeros(())
        device = groups[0][1].weights[0].device
        self._update_tables(groups, device)
        clip = torch.empty(2, device=device)
        tables = {"tensors": self._table, "gradients": self._gradients, "chunks": self._chunks, "spans": self._spans}
        scratch = {"squares": self._squares, "sums": self._sums, "clip": clip, "trust": self._trust}
        sizes = {"n_chunks": len(self._chunks), "max_norm": max_norm, "average_step": 1 - average_decay}
        params = _Params(**tables, **scratch, **sizes)
        launch = partial(_module(device.index).launch, threads=_THREADS, params=params)
        with torch.cuda.device(device):
            launch("gradient_squares", len(self._chunks))
            launch("gradient_norm", 1)
            tensor = 0
            for settings, tensors in groups:
                count = len(tensors.weights)
                if isinstance(settings, MatrixSettings):
                    count = sum(weight.numel() for weight in tensors.weights) // math.prod(settings.shape)
                first = self._first_chunks[tensor]
                blocks = self._first_chunks[tensor + count] - first
                params.set(first_tensor=tensor, first_chunk=first)
                params.set_group(settings)
                if not blocks:
                    pass
                elif isinstance(settings, MatrixSettings):
                    _step_matrices(settings, params, self._trust[tensor : tensor + count], blocks, launch)
                elif settings.weight_decay > 0 and settings.trust:
                    launch("moments", blocks)
                    launch("trust_ratios", count)
                    launch("apply", blocks)
                else:
                    launch("moments_and_apply", blocks)
                tensor += count
        return clip[0]

    def _update_tables(self, groups: Sequence[tuple[Settings | MatrixSettings, Tensors]], device: torch.device) -> None:
        """Bring the tables up to date with where the tensors are now."""
        weights = [tensor for _, group in groups for tensor in group.weights]
        gradients = [tensor for _, group in groups for tensor in group.gradients]
        moments = [pair for _, group in groups for pair in zip(group.first, group.second, strict=True)]
        averages = [tensor for _, group in groups for tensor in group.averages]
        shapes = [settings.shape for settings, group in groups for _ in group.weights]
        sizes = [weight.numel() for weight in weights]
        parts = [size // math.prod(shape) if shape else 1 for size, shape in zip(sizes, shapes, strict=True)]
        tensors = [(w, *of, a) for w, of, a in zip(weights, moments, averages, strict=True)]
        known = [tuple(0 if each is None else each.data_ptr() for each in four) for four in tensors]
        if (known, sizes, parts) != self._known:
            table, self._parts = [], list[tuple[int, int]]()
            for k, (four, size, shape, count) in enumerate(zip(tensors, sizes, shapes, parts, strict=True)):
                lengths = (size, size, size // shape[1] if shape else size, size)
                _check(four, lengths, device)
                for part in range(count):  # a matrix, or all of a tensor: the fields of `struct Tensor`
                    places = zip(known[k], lengths, strict=True)
                    own = [place and place + 4 * part * (length // count) for place, length in places]
                    table.append([*own, size // count])
                    self._parts.append((k, 4 * part * (size // count)))
            self._table = _to_device(torch.tensor(table, dtype=torch.int64), device)
            chunks, spans = chunk_table([size for *_, size in table])
            self._first_chunks = [*spans[:, 0].tolist(), len(chunks)]
            self._chunks, self._spans = _to_device(chunks, device), _to_device(spans, device)
            self._squares = torch.empty(len(chunks), device=device)
            self._sums = torch.empty(len(chunks), 2, device=device)
            self._trust = torch.empty(len(table), device=device)
            self._known, self._gradients_known = (known, sizes, parts), []
        moved = [gradient.data_ptr() for gradient in gradients]
        if moved != self._gradients_known:
            _check(gradients, sizes, device)
            places = torch.tensor([moved[k] + offset for k, offset in self._parts], dtype=torch.int64)
            self._gradients = _to_device(places, device)
            self._gradients_known = moved


def _step_matrices(
    settings: MatrixSettings, params: _Params, scales: Tensor, blocks: int, launch: Callable[[str, int], None]
) -> None:
    """The step of a group of matrices. scales: [matrices] of their updates' norms, to be filled."""
    count, (rows, columns) = len(scales), settings.shape
    stack = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=scales.device)
    params.stack, params.n_matrices = stack.data_ptr(), count
    launch("momenta", blocks)
    launch("trust_ratios", count)
    directions = muon.orthogonalised(stack, scales)
    params.stack = directions.data_ptr()
    of_rows = torch.empty(2, count, rows, device=scales.device)
    params.scales = of_rows.data_ptr() if settings.by_row else 0
    if settings.by_row:
        launch("row_squares", -(-count * rows // (_THREADS // 32)))
        launch("row_scales", count)
    launch("descend", blocks)


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


class _Params(Params):
    """Field by field what `struct Params` in the source is."""

    _fields_ = (
        fields(POINTER, "tensors gradients chunks spans squares sums clip trust")
        + fields(INT32, "n_chunks first_chunk first_tensor")
        + fields(FLOAT, "max_norm first_step second_step beta2 first_correction second_correction eps weight_decay lr")
        + fields(FLOAT, "average_step")
        + fields(POINTER, "stack scales")
        + fields(INT64, "rows columns")
        + fields(INT32, "n_matrices")
        + fields(FLOAT, "momentum_step row_step scale")
        + fields(INT32, "cautious")
    )

    def set_group(self, settings: Settings | MatrixSettings) -> None:
        """Set what differs from group to group; launches copy it, so that it may change afterwards."""
        self.set(eps=settings.eps, weight_decay=settings.weight_decay, lr=settings.lr)
        if isinstance(settings, MatrixSettings):
            rows, columns = settings.shape
            self.set(first_step=1 - settings.momentum, momentum_step=settings.momentum, row_step=1 - muon.ROW_BETA)
            self.set(rows=rows, columns=columns, cautious=settings.cautious)
            self.set(scale=muon.RMS if settings.by_row else muon.matched_scale(settings.shape))
        else:
            (beta1, beta2), step = settings.betas, settings.step
            self.set(first_step=1 - beta1, second_step=1 - beta2, beta2=beta2)
            self.set(first_correction=1 / (1 - beta1**step), second_correction=1 / math.sqrt(1 - beta2**step))


@cache
def _module(device: int) -> Module:
    return Module(_SOURCE, [], device)
