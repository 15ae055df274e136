"""One optimizer step, and the numbers it leaves behind."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn

from data.counter_rng import signed
from data.loader import RowBatch, StepBatch
from data.masking import fingerprint
from data.plan import CAUSAL, MASKED, OBJECTIVES
from model import LTGBert
from ops.bit_sums import BitSums
from training.distributed import World
from training.ema import Ema
from training.errors import NonFiniteError
from training.forward_backward import ForwardBackward
from training.gradients import GradientBuckets
from training.loss import CORRECT, COUNT, LOSS, SQUARED_LOG_Z, loss_weights
from training.rank_checks import DivergenceError, RankCheck, begin_check
from training.schedules import average_decay, learning_rate
from training.setup import Inputs
from training.summary import flops_per_token, peak_flops, target_share
from training.update import OptimizerStep
from training.wording import ranks_text


@dataclass
class TrainState:
    """All that training changes. `step` counts optimizer steps done."""

    step: int
    model: LTGBert
    gradients: GradientBuckets
    optimizer: torch.optim.Optimizer
    ema: Ema
    update: OptimizerStep
    forward_backward: ForwardBackward
    bit_sums: BitSums = field(default_factory=BitSums)


@dataclass(frozen=True)
class InFlightStep:
    """A step whose numbers may still be on their way from the device.

    sums, fingerprint, extra: on the host, in memory that the device fills; to be read after `finished`.
    sums: float64 [9], the objectives' [2, 4] and the norm of the gradients, added up over ranks: a norm is each rank's
    own, and one that a single rank finds bad ends the run on all.
    local_sums: the same of this rank alone, on the device, to find out which rank a bad value comes from.
    """

    facts: dict[str, Any]
    share: tuple[float, float]
    sums: torch.Tensor
    local_sums: torch.Tensor
    fingerprint: torch.Tensor | None
    extra: dict[str, torch.Tensor]
    tokens: int
    finished: torch.cuda.Event | float
    check: RankCheck | None = None


# One step


def agree(world: World, batch: StepBatch | None, wants_stop: bool) -> tuple[tuple[int, int], bool, bool]:
    """Targets of the global batch by objective, whether any rank wants to stop, and whether all have their rows.

    batch: this rank's rows, None where they are not ready. Summed by the hosts.
    """
    targets = [0, 0] if batch is None else batch.targets.tolist()
    facts = torch.tensor([*targets, int(wants_stop), int(batch is None)])
    masked, causal, stops, missing = world.all_reduce(facts, "target counts").tolist()
    return (masked, causal), stops > 0, missing == 0


def warm_up(state: TrainState, inputs: Inputs, world: World, split: str) -> str:
    """Compile for every row length that is still to come, so that no step has to; returns what was done, in words.

    Takes micro-batches as large as any that will come, and so also shows before the first step whether they fit into
    the device's memory.
    """
    began, plan = time.monotonic(), inputs.plan
    spans = [(max(a, state.step), b) for a, b in pairwise(plan.length_changes()) if b > state.step]
    arguments = (world.rank, world.size, split, inputs.config.local_batch_size)
    first = inputs.builder.step(state.step, *arguments).batch
    largest = [inputs.builder.like(first, plan.largest_step(*span), *arguments) for span in spans]
    state.forward_backward.warm_up(part for batch in largest for part in _first_and_fullest(batch, world.device))
    lengths = ", ".join(str(batch.plan.seq_length) for batch in largest)
    return f"compiled for rows of {lengths} tokens in {time.monotonic() - began:.1f} s"


def _first_and_fullest(batch: StepBatch, device: torch.device) -> list[RowBatch]:
    """A micro-batch of masked rows, where there are some, and one with as many targets as any."""
    parts = list(batch.micro_batches(device))
    fullest = max(range(len(parts)), key=lambda i: parts[i].targets.sum())
    return [parts[i] for i in sorted({0, fullest})]


def train_step(
    state: TrainState, inputs: Inputs, world: World, batch: StepBatch, targets: tuple[int, int]
) -> InFlightStep:
    """Forward, backward and update for one global batch."""
    config, plan, step = inputs.config, inputs.plan, batch.plan.step
    rows = (batch.plan.masked_rows, batch.plan.rows - batch.plan.masked_rows)
    weights = loss_weights(rows, targets, config.token_weighted_loss)
    prints = torch.zeros((), dtype=torch.int64, device=world.device) if config.data_fingerprint else None

    run = state.forward_backward
    run.begin(signed(plan.step_key(step)), weights.per_target)
    micro_batches = list(batch.micro_batches(world.device))
    for number, micro_batch in enumerate(micro_batches):
        model_inputs = run(micro_batch, last=number == len(micro_batches) - 1)
        if prints is not None and model_inputs is not None:
            prints += fingerprint(model_inputs, micro_batch.row_keys)

    done = step + 1
    wants_stats = config.log_stats_every and done % config.log_stats_every == 0
    extra = _norms_by_role(state.model) if wants_stats else {}
    rate = learning_rate(
        step, config.max_steps, config.learning_rate, config.warmup_proportion, config.cooldown_proportion
    )
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.ema.decay = average_decay(done, config.ema_decay, bool(config.ema_warmup))
    grad_norm = state.update()
    state.gradients.zero()
    state.step = done

    local_sums = torch.cat((run.sums.flatten(), grad_norm.to(run.sums.dtype).view(1)))
    facts = {
        "step": done,
        "stats/learning_rate": rate,
        "stats/global_batch_size": batch.plan.rows,
        "stats/seq_length": batch.plan.seq_length,
        "stats/mask_p": batch.plan.mask_p,
        "stats/tokens": plan.tokens_before(done),
        "stats/masked_rows": rows[MASKED],
        "stats/causal_rows": rows[CAUSAL],
    }
    if world.device.type == "cuda":
        facts["stats/peak_memory_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
    if prints is not None:
        prints = _to_host(world.all_reduce(prints, "fingerprints"))
    sums = _to_host(world.all_reduce(local_sums.clone(), "losses"))
    extra = {name: _to_host(value) for name, value in extra.items()}
    every = config.check_ranks_every
    check = begin_check(state, world) if every and done % every == 0 else None
    finished = _now(world.device)  # after the copies, which are read once it has passed
    return InFlightStep(facts, weights.share, sums, local_sums, prints, extra, batch.plan.tokens, finished, check)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, under way. Reading a tensor on the device would wait for all that is queued there,
    the next step included."""
    return tensor.to("cpu", non_blocking=True)


_ROLES = {  # by a part of the parameter's name
    "embedding": "embedding",
    "attention_layers": "attention",
    "mlp_layers": "mlp",
    "dwa": "dwa",
    "classifier": "head",
}


def _norms_by_role(model: nn.Module) -> dict[str, torch.Tensor]:
    """Norms of parameters and of their gradients (before clipping), by the part of the model."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        role = next((role for key, role in _ROLES.items() if key in name), "other")
        groups.setdefault(role, []).append(parameter)
    norms = {}
    for role, parameters in groups.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms[f"stats/parameter_norm/{role}"] = torch.nn.utils.get_total_norm([p.detach() for p in parameters])
        norms[f"stats/grad_norm/{role}"] = torch.nn.utils.get_total_norm(gradients)
    return norms


# Numbers


def _now(device: torch.device) -> torch.cuda.Event | float:
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

    def __init__(self, inputs: Inputs, world: World):
        self._inputs, self._world = inputs, world
        self._pending: deque[InFlightStep] = deque()
        self._lag = 1 if world.device.type == "cuda" else 0
        self._peak = peak_flops(world.device)
        self._last = _now(world.device)

    def restart_clock(self) -> None:
        """Leave the time since the last step (validation, saving) out of tokens per second."""
        self._last = _now(self._world.device)

    def push(self, pending: InFlightStep) -> list[dict[str, Any]]:
        """Take a step; returns the metrics of steps that are due."""
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
        record = dict(pending.facts)
        sums, norm = pending.sums[:-1].view(2, 4).tolist(), float(pending.sums[-1]) / self._world.size
        if not all(math.isfinite(line[LOSS]) for line in sums) or not math.isfinite(norm):
            _raise_non_finite(pending, self._world)
        total = z_total = correct = count = 0.0
        for objective, name in enumerate(OBJECTIVES):
            part = sums[objective]
            if part[COUNT] == 0:
                continue
            mean = part[LOSS] / part[COUNT]
            record[f"train/{name}_loss"] = mean
            record[f"train/{name}_accuracy"] = part[CORRECT] / part[COUNT]
            total += pending.share[objective] * mean
            z_total += pending.share[objective] * part[SQUARED_LOG_Z] / part[COUNT]
            correct, count = correct + part[CORRECT], count + part[COUNT]
        record["train/loss"], record["train/z_loss"] = total, z_total
        record["train/perplexity"] = math.exp(min(total, 700.0))
        record["train/accuracy"] = correct / max(1.0, count)
        record["stats/grad_norm"] = norm
        rate = pending.tokens / max(seconds, 1e-9)
        record["stats/tokens_per_second"] = rate
        if self._peak is not None:
            step, length = record["step"] - 1, record["stats/seq_length"]
            flops = flops_per_token(self._inputs.model_config, length, target_share(self._inputs, step))
            record["stats/mfu"] = rate * flops / (self._peak * self._world.size)
        if pending.fingerprint is not None:
            record["data/fingerprint"] = f"{int(pending.fingerprint) & (1 << 64) - 1:016x}"
        record.update({name: float(value) for name, value in pending.extra.items()})
        return record


def _raise_non_finite(pending: InFlightStep, world: World) -> NoReturn:
    """Say which rank and objective a bad value came from; called by all ranks."""
    everyone = world.all_gather_objects(pending.local_sums.tolist(), "losses")  # of each rank as `sums`
    losses = [[sums[:4][LOSS], sums[4:][LOSS]] for sums in everyone]
    bad = [
        f"rank {rank}, {OBJECTIVES[objective]} objective: the summed loss is {losses[rank][objective]}"
        for rank in range(world.size)
        for objective in (MASKED, CAUSAL)
        if not math.isfinite(losses[rank][objective])
    ]
    norms = {rank: sums[-1] for rank, sums in enumerate(everyone) if not math.isfinite(sums[-1])}
    step = pending.facts["step"]
    if bad:
        raise NonFiniteError(f"step {step}: {'; '.join(bad)}")
    text = f"step {step}: all losses are finite but the gradient norm is {next(iter(norms.values()))}"
    if len(norms) == world.size:
        raise NonFiniteError(text)
    raise DivergenceError(f"{text} on rank {ranks_text(norms)} alone, though of the same sums: its device is faulty")
