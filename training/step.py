"""One optimizer step: forward and backward passes of its micro-batches, all_reduce, clipping, optimizer, average.

Its metrics are read from the device one step late, so that the host never waits for it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from data.counter_rng import signed
from data.loader import BatchBuilder, RowBatch, StepBatch
from data.masking import fingerprint
from data.plan import DataPlan, StepPlan
from data.wording import ranks_text
from model_config import ModelConfig
from training.config import ConfigError, TrainingConfig
from training.distributed import World, now, on_main, seconds_between
from training.errors import NonFiniteError
from training.inputs import Inputs
from training.loss import COLUMNS, CORRECT, COUNT, LOSS, SQUARED_LOG_Z, loss_weights
from training.metric_logger import MetricLogger, RankStatistics
from training.optimizers import set_rates
from training.rank_checks import DivergenceError, RankCheck, begin_check
from training.schedules import average_decay, decay_factor, mean_decay, rate_at, values_at
from training.state import TrainState
from training.summary import flops_per_token, memory_estimate, missing_kernels, peak_flops

if TYPE_CHECKING:
    from training.saves import Saver

_ESTIMATE_ERROR = 0.1  # of the memory estimate: tests/test_memory.py


def train_step(
    state: TrainState, batch: StepBatch, targets: Sequence[float], config: TrainingConfig, plan: DataPlan
) -> InFlightStep:
    """Forward, backward and update for one global batch.

    batch: this rank's rows. targets: those of the whole global batch by objective (rank_checks.Agreed), by which losses
    are divided, so that gradients are sums over micro-batches and ranks.
    """
    world, step, rows = state.world, batch.plan.step, batch.plan.objective_rows
    weights = loss_weights(rows, targets, config.token_weighted_loss, plan.objectives)
    prints = torch.zeros((), dtype=torch.int64, device=world.device) if config.data_fingerprint else None

    state.forward_backward.begin(signed(plan.step_key(step)), weights.per_target)
    micro_batches = list(batch.micro_batches(world.device))
    passes = max(len(micro_batches), batch.passes if state.gradients.layers.modules else 0)
    for number in range(passes):
        micro_batch, counts = micro_batches[min(number, len(micro_batches) - 1)], number < len(micro_batches)
        model_inputs = state.forward_backward(micro_batch, last=number == passes - 1, counts=counts)
        if prints is not None and model_inputs is not None and counts:
            prints += fingerprint(model_inputs, micro_batch.row_keys)

    done = step + 1
    wants_norms = config.log_stats_every and done % config.log_stats_every == 0
    extra = norms_by_role(state) if wants_norms else {}
    rates = _set_schedules(state, config)
    spiked, words, grad_norm = _find_spike(state, batch, targets) if state.spikes is not None else (False, "", None)
    if spiked:
        assert isinstance(grad_norm, torch.Tensor)
    else:
        state.before_update()
        grad_norm = state.optimizer_step()
    state.gradients.zero()
    state.count_step(updated=not spiked)

    # Everything below is queued on the device and read a step later: nothing here waits.
    sums = state.forward_backward.sums
    local_sums = torch.cat((sums.flatten(), grad_norm.to(sums.dtype).view(1)))
    metrics = {
        "step": done,
        **rates,
        "stats/global_batch_size": batch.plan.rows,
        "stats/seq_length": batch.plan.seq_length,
        "stats/mask_p": batch.plan.mask_p,
        "stats/tokens": plan.tokens_before(done),
        **{f"stats/{each.name}_rows": count for each, count in zip(plan.objectives, rows, strict=True)},
    }
    if world.device.type == "cuda":
        metrics["stats/peak_memory_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
    if prints is not None:
        prints = to_host(world.all_reduce(prints, "fingerprints"))
    all_sums = to_host(world.all_reduce(local_sums.clone(), "losses"))
    extra = {name: to_host(value) for name, value in extra.items()}
    every = config.check_ranks_every
    check = begin_check(state, world) if every and done % every == 0 else None
    finished = now(world.device)  # after the copies, which are read once it has passed
    return InFlightStep(
        batch.plan, metrics, tuple(targets), weights.per_objective, all_sums, local_sums, prints, extra, finished,
        check, spiked, words, state.gradients.filled, state.forward_backward.sources,
    )  # fmt: skip


def _set_schedules(state: TrainState, config: TrainingConfig) -> dict[str, float]:
    """Give optimizer and averages their rates for the step to come; returns these as metrics."""
    begun = state.starts["schedule"]
    at, length = state.step - begun, config.planned_length - begun
    rate, values = rate_at(config, state.step, begun, config.learning_rate), values_at(config, state.step, begun)
    factor = decay_factor(at, length, config.weight_decay, config.weight_decay_end)
    if "weight_decay" in values:
        factor = values["weight_decay"] / config.weight_decay
    set_rates(state.optimizer, rate, factor, values)
    state.ema.decay = average_decay(at + 1, values.get("ema_decay", config.ema_decays[0]), bool(config.ema_warmup))
    for name, average in state.averages.items():
        if name == "tail":
            average.decay = mean_decay(max(1, state.step + 1 - state.starts["tail"]))
        else:
            average.decay = average_decay(at + 1, float(name), bool(config.ema_warmup))
    return {"stats/learning_rate": rate, **{f"stats/{name}": value for name, value in values.items()}}


def _find_spike(state: TrainState, batch: StepBatch, targets: Sequence[float]) -> tuple[bool, str, torch.Tensor]:
    """Whether this step is a spike, a sentence about it, and the norm of the gradients; waits for the device. Raises on
    all ranks: DivergenceError where they differ, NonFiniteError where too many steps in a row are not finite."""
    assert state.spikes is not None
    world = state.world
    norm = state.optimizer_step.gradient_norm()
    local_sums = torch.cat((state.forward_backward.sums.flatten(), norm.to(torch.float64).view(1)))
    sums = world.to_host(world.all_reduce(local_sums.clone(), "losses"))
    objectives = batch.plan.objectives
    losses = sums[:-1].view(-1, COLUMNS)[: len(objectives), LOSS].tolist()
    figures = {
        f"{each.name} loss": loss / count
        for each, loss, count in zip(objectives, losses, targets, strict=True)
        if count
    }
    figures["gradient norm"] = float(sums[-1]) / world.size
    spiked, words = state.spikes.judge(batch.plan.seq_length, figures)
    if not all(map(math.isfinite, figures.values())):
        error = _non_finite(batch.plan, local_sums, world)
        if isinstance(error, DivergenceError) or state.spikes.hopeless():
            raise error
    return spiked, words, norm


def answer_spike(
    state: TrainState, step: InFlightStep, rolls_back: bool, saver: Saver | None, log: MetricLogger
) -> None:
    """Say what became of a step that is a spike (--spike_policy), and count it; with `rolls_back`, return all ranks to
    the last checkpoint. Raises NonFiniteError on all ranks where that has been tried too often."""
    guard = state.spikes
    if guard is None:
        return
    answer = "its update is left out"
    if step.spiked and rolls_back:
        state.world.progress.in_step = False
        checkpoint = on_main(state.world, lambda: saver and saver.last_checkpoint())
        if checkpoint is not None and not guard.returns_to(checkpoint.step):
            raise NonFiniteError(f"step {state.step}: {step.words}, after as many returns to {checkpoint.path} as help")
        if checkpoint is not None:
            state.return_to(checkpoint)
            answer = f"the run returns to the state of {checkpoint.path.name} and goes on with the data after the spike"
        else:
            answer += ", as there is no checkpoint yet"
    if step.words:
        log.say(f"note: step {state.step}: {step.words}" + f"; {answer}" * step.spiked)
    step.metrics.update({"stats/spikes": guard.spikes, "stats/rollbacks": guard.rollbacks})


def warm_up(state: TrainState, builder: BatchBuilder, split: str, local_batch_size: int) -> str:
    """Compile for every row length and ratio still to come, so that no step has to; returns what was done, in words.

    Takes micro-batches as large as any that will come, and so also shows before the first step whether they fit into
    the device's memory.
    """
    began, plan, world = time.monotonic(), builder.plan, state.world
    arguments = (world.rank, world.size, split, local_batch_size)
    first = builder.step(state.step, *arguments).batch
    largest = [builder.like(first, step, *arguments) for step in plan.largest_steps(state.step)]
    state.forward_backward.warm_up(part for batch in largest for part in _first_and_fullest(batch, world.device))
    lengths = ", ".join(str(length) for length in sorted({batch.plan.seq_length for batch in largest}))
    return f"compiled for rows of {lengths} tokens in {time.monotonic() - began:.1f} s"


def fit_micro_batch(state: TrainState, inputs: Inputs, split: str) -> Inputs:
    """With --local_batch_size auto, `inputs` with the largest micro-batch that fits into all ranks' devices.

    Each try is `warm_up` beside room for what is still to come; one that does not fit is followed by one an eighth
    smaller. The first is what the estimate does not rule out. Raises ConfigError where not even a row fits.
    """
    if inputs.config.local_batch_size:
        return inputs
    world, captures = state.world, state.forward_backward.captures
    rows, tries = -(-inputs.config.global_batch_size // world.size), 0
    capacity = int(world.all_gather(torch.tensor([device_bytes(world.device)]), "memory of devices").min())
    missing = missing_kernels(inputs.config, inputs.model_config, world.device)
    absent = {name for name, reason in missing.items() if reason}
    while True:
        config = dataclasses.replace(inputs.config, local_batch_size=rows)
        sizes = (config, inputs.model_config, inputs.plan, state.parameters, absent, world.size, split)
        if rows == 1 or memory_estimate(*sizes) * (1 - _ESTIMATE_ERROR) <= capacity:
            tries += 1
            fits = state.step == config.max_steps or _fits(state, inputs.builder, split, rows)
            if bool(world.all_gather(torch.tensor([int(fits)]), "what fits into memory").all()):
                break
            state.forward_backward.forget(captures)
        if rows == 1:
            raise ConfigError(
                "--local_batch_size auto: not even a row fits into the device; take --activation_checkpointing layer, "
                "--sharding full on several ranks, or a smaller model"
            )
        rows = max(1, rows * 7 // 8)
    if world.is_main:
        length = config.seq_length
        print(f"--local_batch_size auto: {rows} rows of {length} tokens fit (try {tries}): {rows * length:,} tokens")
    return dataclasses.replace(inputs, config=config)


def _fits(state: TrainState, builder: BatchBuilder, split: str, rows: int) -> bool:
    """Whether the largest micro-batches of so many rows fit beside moments, a validation's copy of the weights, and a
    tenth of the device for what nobody counts."""
    device = state.world.device
    own = sum(average.numel() for average in state.ema.state_dict().values())
    still = 4 * own + (0 if state.optimizer.state else 8 * own) + device_bytes(device) // 10
    try:
        room = torch.empty(still, dtype=torch.uint8, device=device)
        warm_up(state, builder, split, rows)
        del room
    except torch.OutOfMemoryError:
        return False
    return not state.forward_backward.lacks_memory


def device_bytes(device: torch.device) -> int:
    """The memory of a CUDA device."""
    return torch.cuda.get_device_properties(device).total_memory


def _first_and_fullest(batch: StepBatch, device: torch.device) -> list[RowBatch]:
    """A micro-batch of masked rows, where there are some, and one with as many targets as any."""
    parts = list(batch.micro_batches(device))
    fullest = max(range(len(parts)), key=lambda i: parts[i].targets.sum())
    return [parts[i] for i in sorted({0, fullest})]


# What a step leaves on the device


@dataclass(frozen=True)
class InFlightStep:
    """A step whose numbers may still be on their way from the device.

    metrics: what the host knows of it already. targets: from rank_checks.Agreed.
    objective_weight: what a mean over each objective weighs in the loss.
    sums, fingerprint, extra: on the host, in memory that the device fills; to be read after `finished`.
    sources: names of a mix's, whose losses are told apart. sums: float64 [4 * objectives * (1 + sources) + 1],
    `sums_by_objective`, `sums_by_source` and the norm of the gradients, added up over ranks: a norm
    is each rank's own, and one that a single rank finds bad ends the run on all.
    local_sums: the same of this rank alone, on the device, to find out which rank a bad value comes from.
    filled: when this rank's own backward passes had ended, and it began to wait for the others, if there are any.
    spiked: whether its update was left out (--spike_policy). words: about that, or about a new level.
    """

    plan: StepPlan
    metrics: dict[str, Any]
    targets: tuple[float, ...]
    objective_weight: tuple[float, ...]
    sums: torch.Tensor
    local_sums: torch.Tensor
    fingerprint: torch.Tensor | None
    extra: dict[str, torch.Tensor]
    finished: torch.cuda.Event | float
    check: RankCheck | None = None
    spiked: bool = False
    words: str = ""
    filled: torch.cuda.Event | float | None = None
    sources: tuple[str, ...] = ()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, under way. Reading a tensor on the device would wait for all that is queued there,
    the next step included."""
    return tensor.to("cpu", non_blocking=True)


def norms_by_role(state: TrainState) -> dict[str, torch.Tensor]:
    """Norms of parameters and of their gradients (before clipping), by the part of the model."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in state.model.named_parameters():
        groups.setdefault(state.model.role_of(name), []).append(parameter)
    norms, owned, divided = {}, state.gradients.owned, state.gradients.layers.matrices
    gradients = [
        [p.grad for p in parameters if p.grad is not None and (owned is None or p in owned)]
        for parameters in groups.values()
    ]
    of_gradients = [torch.nn.utils.get_total_norm(group) for group in gradients] if owned is None else ()
    weights = [[p.detach() for p in of if not divided or p in (owned or ())] for of in groups.values()]
    of_weights = state.gradients.norms(weights) if divided else map(torch.nn.utils.get_total_norm, weights)
    both = zip(groups, of_weights, of_gradients or state.gradients.norms(gradients), strict=True)
    for role, of_parameters, of_gradient in both:
        norms[f"stats/parameter_norm/{role}"] = of_parameters
        norms[f"stats/grad_norm/{role}"] = of_gradient
    return norms


# Metrics, one step late


class AsyncStepMetrics:
    """Turns steps into metrics one step late on CUDA, so that the host reads them while the device computes the next.
    All ranks read the same sums at the same point of the program: what follows from a bad value is agreed."""

    def __init__(self, world: World, model_config: ModelConfig, log_stats_every: int = 0):
        self._world, self._model_config = world, model_config
        self._ranks = RankStatistics(world) if world.size > 1 and log_stats_every else None
        self._every = log_stats_every
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
                seconds = seconds_between(self._last, pending.finished)
            record = self._metrics(pending, seconds)
            if self._ranks is not None and pending.filled is not None:
                record.update(self._ranks.gathered())  # of the step before this one
                self._ranks.add(seconds_between(self._last, pending.filled), seconds, record)
                if record["step"] % self._every == 0:
                    self._ranks.begin_gathering()
            self._last = pending.finished
            records.append(record)
        return records

    def _metrics(self, pending: InFlightStep, seconds: float) -> dict[str, Any]:
        """The metrics.jsonl line of a step. Raises on all ranks: DivergenceError where they differ, NonFiniteError
        where a loss or the norm is bad."""
        if pending.check is not None:
            pending.check.verify(self._world)
        record = dict(pending.metrics)
        objectives = pending.plan.objectives
        sums, *by_source = pending.sums[:-1].view(-1, len(objectives), COLUMNS).tolist()
        norm = float(pending.sums[-1]) / self._world.size
        finite = all(math.isfinite(line[LOSS]) for line in sums) and math.isfinite(norm)
        if not finite and not pending.spiked:
            raise _non_finite(pending.plan, pending.local_sums, self._world)
        total = z_total = correct = count = 0.0
        parts = zip(objectives, sums, pending.targets, pending.objective_weight, strict=True)
        for objective, part, targets, weight in parts:
            if part[COUNT] == 0:
                continue
            mean = part[LOSS] / targets
            record[f"train/{objective.name}_loss"] = mean
            record[f"train/{objective.name}_accuracy"] = part[CORRECT] / part[COUNT]
            total += weight * mean
            z_total += weight * part[SQUARED_LOG_Z] / targets
            correct, count = correct + part[CORRECT], count + part[COUNT]
        for source, lines in zip(pending.sources, by_source, strict=True):
            of_each = zip(objectives, lines, strict=True)
            record |= {f"train/{source}/{o.name}_loss": line[LOSS] / line[COUNT] for o, line in of_each if line[COUNT]}
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


def _non_finite(plan: StepPlan, local_sums: torch.Tensor, world: World) -> NonFiniteError | DivergenceError:
    """An error that says which rank and objective a bad value came from; called by all ranks."""
    everyone = world.all_gather_objects(local_sums.tolist(), "losses")  # of each rank as `sums`
    step, number = plan.step + 1, len(plan.objectives)
    bad = [
        f"rank {rank}, {objective.name} objective: the summed loss is {loss}"
        for rank, sums in enumerate(everyone)
        for objective, loss in zip(plan.objectives, sums[LOSS : number * COLUMNS : COLUMNS], strict=True)
        if not math.isfinite(loss)
    ]
    norms = {rank: sums[-1] for rank, sums in enumerate(everyone) if not math.isfinite(sums[-1])}
    if bad:
        return NonFiniteError(f"step {step}: {'; '.join(bad)}")
    text = f"step {step}: all losses are finite but the gradient norm is {next(iter(norms.values()))}"
    if len(norms) == world.size:
        return NonFiniteError(text)
    return DivergenceError(f"{text} on rank {ranks_text(norms)} alone, though of the same sums: its device is faulty")
