"""Metrics of training steps, read from the device one step late, so that the host never waits for it."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from data.objectives import OBJECTIVE_NAMES
from data.plan import StepPlan
from data.wording import ranks_text
from model_config import ModelConfig
from model_protocol import PretrainingModel
from training.distributed import World
from training.errors import NonFiniteError
from training.loss import CORRECT, COUNT, LOSS, SQUARED_LOG_Z
from training.rank_checks import DivergenceError, RankCheck
from training.summary import flops_per_token, peak_flops


@dataclass(frozen=True)
class InFlightStep:
    """A step whose numbers may still be on their way from the device.

    metrics: what the host knows of it already. objective_weight: what a mean over each objective weighs in the loss.
    sums, fingerprint, extra: on the host, in memory that the device fills; to be read after `finished`.
    sums: float64 [4 * objectives + 1], `sums_by_objective` and the norm of the gradients, added up over ranks: a norm
    is each rank's own, and one that a single rank finds bad ends the run on all.
    local_sums: the same of this rank alone, on the device, to find out which rank a bad value comes from.
    """

    plan: StepPlan
    metrics: dict[str, Any]
    objective_weight: tuple[float, ...]
    sums: torch.Tensor
    local_sums: torch.Tensor
    fingerprint: torch.Tensor | None
    extra: dict[str, torch.Tensor]
    finished: torch.cuda.Event | float
    check: RankCheck | None = None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, under way. Reading a tensor on the device would wait for all that is queued there,
    the next step included."""
    return tensor.to("cpu", non_blocking=True)


def norms_by_role(model: PretrainingModel) -> dict[str, torch.Tensor]:
    """Norms of parameters and of their gradients (before clipping), by the part of the model."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        role = next((role for key, role in model.roles.items() if key in name), "other")
        groups.setdefault(role, []).append(parameter)
    norms = {}
    for role, parameters in groups.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms[f"stats/parameter_norm/{role}"] = torch.nn.utils.get_total_norm([p.detach() for p in parameters])
        norms[f"stats/grad_norm/{role}"] = torch.nn.utils.get_total_norm(gradients)
    return norms


def now(device: torch.device) -> torch.cuda.Event | float:
    """The present moment in the device's own order of events."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - begin


class AsyncStepMetrics:
    """Turns steps into metrics one step late on CUDA, so that the host reads them while the device computes the next.

    All ranks read the same sums at the same point of the program: what follows from a bad value is agreed.
    """

    def __init__(self, world: World, model_config: ModelConfig):
        self._world, self._model_config = world, model_config
        self._pending: deque[InFlightStep] = deque()
        self._lag = 1 if world.device.type == "cuda" else 0
        self._peak = peak_flops(world.device)
        self._last = now(world.device)

    def restart_clock(self) -> None:
        """Leave the time since the last step (validation, saving) out of tokens per second."""
        self._last = now(self._world.device)

    def push(self, pending: InFlightStep, loader_wait_seconds: float = 0.0) -> list[dict[str, Any]]:
        """Take a step; returns the metrics of steps that are due."""
        pending.metrics["stats/loader_wait_seconds"] = loader_wait_seconds
        self._pending.append(pending)
        return self._read(self._lag)

    def flush(self) -> list[dict[str, Any]]:
        """Metrics of all steps so far."""
        return self._read(0)

    def _read(self, leave: int) -> list[dict[str, Any]]:
        records = []
        while len(self._pending) > leave:
            pending = self._pending.popleft()
            with self._world.waiting("device synchronization"):
                seconds = _seconds(self._last, pending.finished)
            self._last = pending.finished
            records.append(self._metrics(pending, seconds))
        return records

    def _metrics(self, pending: InFlightStep, seconds: float) -> dict[str, Any]:
        """The metrics.jsonl line of a step.

        Raises on all ranks: DivergenceError where they differ, NonFiniteError where a loss or the norm is bad.
        """
        if pending.check is not None:
            pending.check.verify(self._world)
        record = dict(pending.metrics)
        sums = pending.sums[:-1].view(len(OBJECTIVE_NAMES), -1).tolist()
        norm = float(pending.sums[-1]) / self._world.size
        if not all(math.isfinite(line[LOSS]) for line in sums) or not math.isfinite(norm):
            _raise_non_finite(pending, self._world)
        total = z_total = correct = count = 0.0
        for name, part, weight in zip(OBJECTIVE_NAMES, sums, pending.objective_weight, strict=True):
            if part[COUNT] == 0:
                continue
            mean = part[LOSS] / part[COUNT]
            record[f"train/{name}_loss"] = mean
            record[f"train/{name}_accuracy"] = part[CORRECT] / part[COUNT]
            total += weight * mean
            z_total += weight * part[SQUARED_LOG_Z] / part[COUNT]
            correct, count = correct + part[CORRECT], count + part[COUNT]
        record["train/loss"], record["train/z_loss"] = total, z_total
        record["train/perplexity"] = math.exp(min(total, 700.0))
        record["train/accuracy"] = correct / max(1.0, count)
        record["stats/grad_norm"] = norm
        rate = pending.plan.tokens / max(seconds, 1e-9)
        record["stats/tokens_per_second"] = rate
        if self._peak is not None:
            flops = flops_per_token(self._model_config, pending.plan)
            record["stats/mfu"] = rate * flops / (self._peak * self._world.size)
        if pending.fingerprint is not None:
            record["data/fingerprint"] = f"{int(pending.fingerprint) & (1 << 64) - 1:016x}"
        record.update({name: float(value) for name, value in pending.extra.items()})
        return record


def _raise_non_finite(pending: InFlightStep, world: World) -> NoReturn:
    """Say which rank and objective a bad value came from; called by all ranks."""
    everyone = world.all_gather_objects(pending.local_sums.tolist(), "losses")  # of each rank as `sums`
    columns = len(everyone[0]) // len(OBJECTIVE_NAMES)
    bad = [
        f"rank {rank}, {name} objective: the summed loss is {loss}"
        for rank, sums in enumerate(everyone)
        for name, loss in zip(OBJECTIVE_NAMES, sums[LOSS:-1:columns], strict=True)
        if not math.isfinite(loss)
    ]
    norms = {rank: sums[-1] for rank, sums in enumerate(everyone) if not math.isfinite(sums[-1])}
    step = pending.metrics["step"]
    if bad:
        raise NonFiniteError(f"step {step}: {'; '.join(bad)}")
    text = f"step {step}: all losses are finite but the gradient norm is {next(iter(norms.values()))}"
    if len(norms) == world.size:
        raise NonFiniteError(text)
    raise DivergenceError(f"{text} on rank {ranks_text(norms)} alone, though of the same sums: its device is faulty")
