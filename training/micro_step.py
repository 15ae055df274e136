"""Forward and backward pass of one micro-batch, on one CUDA device recorded once and replayed as a CUDA graph.

A micro-step is more than a thousand kernels, many of them shorter than the time the host needs to launch them. A graph
launches all of them at once. What changes from one replay to the next lies in tensors that are copied into the graph's
own: tokens, keys, weights of targets. What decides the kernels is the key by which graphs are kept: the shape of the
batch, whether masks are drawn, and the places for targets in the head, of which there are a few sizes.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from data.loader import TENSORS, RowBatch
from data.masking import MaskingOptions, ModelInputs
from data.plan import MASKED
from model import ModelConfig
from training.config import TrainingConfig
from training.distributed import World
from training.objective import training_loss
from training.parallel import Gradients

_SIZES = 32  # of the head's places for targets, between none and all positions
_GRAPHS = 16  # kept; the one unused for longest goes first


def records_graphs(config: TrainingConfig, model: ModelConfig, world: World) -> bool:
    """Whether a run's micro-steps are recorded: compiled ones on CUDA devices.

    Not with rotary positions, whose kernels want the number of documents as a shape, nor with fingerprints of batches,
    which need the inputs. HYBRID_CUDA_GRAPHS=0 in the environment keeps every run from it, for comparing and debugging.
    """
    wanted = os.environ.get("HYBRID_CUDA_GRAPHS", "1") != "0" and bool(config.compile) and not config.data_fingerprint
    return wanted and world.device.type == "cuda" and model.position_embedding == "relative"


def choose_slots(count: int, positions: int, known: Iterable[int]) -> int:
    """Places in the head for `count` of `positions` targets: of the `known` sizes, if one is little too large."""
    unit = -(-positions // _SIZES)
    enough = [slots for slots in known if count <= slots <= count + 2 * unit]
    return min(enough) if enough else min(positions, (count // unit + 2) * unit)


class MicroSteps:
    """Runs micro-batches: adds their gradients to `gradients` and their sums to `sums` (float64 [2, 4])."""

    def __init__(
        self,
        model: nn.Module,
        gradients: Gradients,
        options: MaskingOptions,
        z_loss_weight: float,
        device: torch.device,
        mixed_precision: bool,
        record: bool,
    ) -> None:
        """record: with CUDA graphs; `gradients` must then stay in their places."""
        self._model, self._gradients, self._options, self._z_loss_weight = model, gradients, options, z_loss_weight
        self._device, self._mixed_precision, self.records = device, mixed_precision, record
        self.sums = torch.zeros(2, 4, dtype=torch.float64, device=device)
        self._weights = torch.zeros(2, device=device)
        self._step_key = torch.zeros((), dtype=torch.int64, device=device)
        self._graphs: dict[Any, _Recording | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if record else None

    def begin(self, step_key: int, per_target: tuple[float, float]) -> None:
        """Begin a step: its dropout key (int64), and what a target of each objective weighs."""
        self.sums.zero_()
        self._step_key.fill_(step_key)  # filled there: a copy from the host would wait
        for weight, value in zip(self._weights, per_target, strict=True):
            weight.fill_(value)

    def __call__(self, batch: RowBatch, last: bool) -> ModelInputs | None:
        """One micro-step; returns the inputs it was computed on, or None where it was a replay.

        last: of a step; gradients are then summed over ranks.
        """
        count = int(batch.targets.sum())
        if not self.records or not count:
            return self._run(batch, None, last)
        kind = (batch.tokens.shape, batch.origins is None, bool(batch.targets[MASKED].any()))
        known = [slots for *other, slots in self._graphs if tuple(other) == kind]
        slots = choose_slots(count, batch.tokens[:, 1:].numel(), known)
        key = (*kind, slots)
        if key not in self._graphs:  # the first time, compilers and libraries do what cannot be recorded
            self._graphs[key] = None
            return self._run(batch, slots, last)
        recording = self._graphs.pop(key)
        if recording is None:
            try:
                recording = self._record(batch, slots)
            except RuntimeError as problem:  # nothing of it has run
                reason = str(problem).splitlines()[0]
                warnings.warn(f"micro-steps run without CUDA graphs, slower for short rows: {reason}", stacklevel=2)
                self.records = False
                self._graphs.clear()
                return self._run(batch, slots, last)
        self._graphs[key] = recording  # now the newest
        if len(self._graphs) > _GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        recording.replay(batch)
        if last:
            self._gradients.sum_replayed(recording.marks)
        return None

    def warm_up(self, batches: Iterable[RowBatch]) -> None:
        """Compile what such micro-batches need, without a trace in gradients; ranks exchange nothing.

        Compilers make of a size that has changed once a variable. So the first batch is taken with a row less, too, as
        the last of a step may be, which also changes the number of targets.
        """
        for number, batch in enumerate(batches):
            for part in (batch, batch.slice(0, len(batch) - 1)) if number == 0 and len(batch) > 2 else (batch,):
                if count := int(part.targets.sum()):
                    self._run(part, choose_slots(count, part.tokens[:, 1:].numel(), ()), last=False)
        self._gradients.zero()

    def _run(self, batch: RowBatch, slots: int | None, last: bool) -> ModelInputs:
        loss, inputs = self._forward(batch, slots)
        with self._gradients.summed() if last else nullcontext():
            loss.backward()
        return inputs

    def _forward(self, batch: RowBatch, slots: int | None) -> tuple[torch.Tensor, ModelInputs]:
        per_target = (self._weights[0], self._weights[1])
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._mixed_precision):
            loss, part, inputs = training_loss(
                self._model, batch, self._options, per_target, self._z_loss_weight, self._step_key, slots
            )
        self.sums += part
        return loss, inputs

    def _record(self, batch: RowBatch, slots: int) -> _Recording:
        own = dataclasses.replace(batch, **{name: _clone(getattr(batch, name)) for name in TENSORS})
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the loader's, may do as they like meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss, _ = self._forward(own, slots)
            with self._gradients.marked() as marks:
                loss.backward()
        return _Recording(graph, own, marks)


@dataclasses.dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # what the graph reads
    marks: list[torch.cuda.Event]  # see Gradients.marked

    def replay(self, batch: RowBatch) -> None:
        for name in TENSORS:
            if (tensor := getattr(self.batch, name)) is not None:
                tensor.copy_(getattr(batch, name))
        self.graph.replay()


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
