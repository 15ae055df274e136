"""Checks of batches and steps for slurm/doctor.py: rows by rank, memory, and a few real optimizer steps."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from data.loader import StepBatch, micro_batch_rows, micro_batches
from data.objectives import KNOWN_NAMES
from data.plan import rows_of_rank
from data.wording import count, size_text, time_text
from slurm.doctor_machine import seconds_left
from slurm.doctor_run import count_parameters
from slurm.doctor_table import OK, WARN, Measurements, Row
from training import summary
from training.distributed import World
from training.environment import Environment
from training.inputs import Inputs, choose_split
from training.rank_checks import begin_agreement
from training.state import TrainState
from training.step import AsyncStepMetrics, train_step
from training.summary import flops_per_token, memory_estimate

# Beyond these a row is WARN.
_IDLE = 0.1  # fraction of a step for which ranks wait for others, or of a rank's micro-batches that holds no row
_FULL_MEMORY = 0.95  # fraction of a device's memory that a step reached

LONG_STEP = 60.0  # seconds: steps on a CPU that would take longer are tried with one row


# Batches


def ends_of_lengths(inputs: Inputs, start: int = 0) -> list[tuple[int, int]]:
    """First and last step of each row length, from `start` on."""
    ends: dict[int, tuple[int, int]] = {}
    for step in range(min(start, inputs.config.max_steps - 1), inputs.config.max_steps):
        length = inputs.plan.step(step).seq_length
        ends[length] = (ends.get(length, (step, step))[0], step)
    return list(ends.values())


def assess_batch(inputs: Inputs, world_size: int) -> Row:
    """How global batches fall to ranks and micro-batches. Raises ConfigError where the rows cannot be divided."""
    split = choose_split(inputs.config, inputs.plan, world_size)
    config = inputs.config
    lines, notes, numbers = [f"for {count(world_size, 'rank')}, split {split}:"], [], []
    for step in sorted({step for ends in ends_of_lengths(inputs) for step in ends}):
        plan = inputs.plan.step(step)
        rows = [sum(map(len, rows_of_rank(plan, rank, world_size, split))) for rank in range(world_size)]
        most, least = max(rows), min(rows)
        pieces, per = micro_batches(plan, most, world_size, config.local_batch_size, config.seq_length)
        last = most - (pieces - 1) * per
        a_rank = f"{most}" if most == least else f"{least}-{most}"
        sizes = f"{per}" if last == per else f"{per}, the last {last}" if pieces > 1 else f"{last} (room for {per})"
        lines.append(
            f"step {step:>6}: {plan.rows:>6,} x {plan.seq_length:<4} -> {a_rank} a rank in "
            f"{count(pieces, 'micro-batch')} of {sizes}"
        )
        numbers.append({"step": step, "rows": plan.rows, "most": most, "least": least, "micro_batches": pieces})
        if split == "rows" and most * world_size > (1 + _IDLE) * plan.rows:
            notes.append(f"step {step}: ranks with {least} rows wait for those with {most}")
        if pieces > 1 and 2 * last < per and pieces * per - most > _IDLE * pieces * per:
            notes.append(f"step {step}: the last of {pieces} micro-batches holds {last} of {per} rows")
    hidden = len(notes) - 3
    lines += notes[:3] + ([f"and {hidden} more"] if hidden > 0 else [])
    remedy = "a --global_batch_size that ranks x --local_batch_size divides uses them fully" if notes else ""
    return Row("batch", WARN if notes else OK, "\n".join(lines), remedy, {"split": split, "steps": numbers})


def assess_memory(inputs: Inputs, measured: Measurements, device: torch.device, world_size: int) -> Row:
    """The estimate against the devices; the real step below measures."""
    config, model, parameters = inputs.config, inputs.model_config, count_parameters(inputs)
    absent = {name for name, reason in summary.missing_kernels(config, model, device).items() if reason}
    split = choose_split(inputs.config, inputs.plan, world_size)
    need = memory_estimate(config, model, inputs.plan, parameters, absent, world_size, split)
    sizes = [own["gpu"]["total"] for own in measured.values() if own["gpu"]]
    of = f" of {size_text(min(sizes))}" if sizes else ""
    detail = f"tensors of about {size_text(need)}{of} a device for {parameters:,} parameters (estimate)"
    if not sizes:
        return Row("memory", OK, detail, numbers={"estimate": need})
    fits = need < min(sizes)
    remedy = "" if fits else "lower --local_batch_size: it changes speed alone"
    return Row("memory", OK if fits else WARN, detail, remedy, {"estimate": need, "total": min(sizes)})


# Real steps


@dataclass(frozen=True)
class StepTrial:
    """Real steps to try: for how many ranks, how they split rows, from which step of the run, whether with one row."""

    inputs: Inputs
    world_size: int
    split: str
    start: int
    one_row: bool = False

    def micro_batch(self, step: int) -> tuple[int, int]:
        """Rows of the largest micro-batch of a step, and the largest number of micro-batches of a rank."""
        config, plan = self.inputs.config, self.inputs.plan.step(step)
        per, most = (
            micro_batch_rows(config.local_batch_size, config.seq_length, plan.seq_length),
            -(-plan.rows // self.world_size),
        )
        return min(per, most), -(-most // per)


def expected_seconds(trial: StepTrial, device: torch.device) -> float:
    """Roughly how long `measure_steps` will take on a CPU; 0 on a GPU."""
    if device.type != "cpu":
        return 0.0
    a = torch.ones(1024, 1024)
    torch.mm(a, a)
    start = time.perf_counter()
    torch.mm(a, a)
    rate = 2 * 1024**3 / (time.perf_counter() - start) / 3  # a training step reaches about a third of that
    flops = 0.0
    for _, step in ends_of_lengths(trial.inputs, trial.start):
        length, (rows, count) = trial.inputs.plan.step(step).seq_length, trial.micro_batch(step)
        turns, at = 6 if count > 1 else 2, trial.inputs.plan.step(step)
        per_token = flops_per_token(trial.inputs.model_config, at)
        flops += turns * rows * length * per_token
    return flops / rate


def _pieces(trial: StepTrial, world: World, step: int) -> list[StepBatch]:
    """The micro-batch of this rank's `step` with the most targets, and two together where every rank has two."""
    # A single process stands for the last of the planned ranks: where ranks differ in their objective it is a causal
    # one, with the most targets and so the largest head.
    rank = world.rank if world.size == trial.world_size else trial.world_size - 1
    batch = trial.inputs.builder.step(step, rank, trial.world_size, trial.split, trial.inputs.config.local_batch_size)
    rows, per = batch.batch, batch.rows_per_micro_batch

    def part(begin: int, end: int) -> StepBatch:
        return dataclasses.replace(batch, batch=rows.slice(begin, end))

    starts = range(0, max(1, len(rows) - per + 1), per)
    begin = max(starts, key=lambda start: int(rows.targets[:, start : start + per].sum()))
    if trial.one_row:
        return [part(begin, begin + 1)]
    pieces = [part(begin, begin + per)]
    if all(world.all_gather_objects(len(rows) >= 2 * per, "row counts")):
        double = begin if begin + 2 * per <= len(rows) else begin - per
        pieces.append(part(double, double + 2 * per))
    return pieces


def _timed_step(
    state: TrainState, inputs: Inputs, world: World, batch: StepBatch, log: AsyncStepMetrics
) -> tuple[float, dict[str, float]]:
    """Seconds of one optimizer step, and the mean loss of each objective in it."""
    start = time.perf_counter()
    targets = begin_agreement(world, batch, False, state.step, len(inputs.plan.objectives))().targets
    records = (
        log.push(train_step(state, batch, targets, inputs.config, inputs.plan)) + log.flush()
    )  # waits for the device
    seconds = time.perf_counter() - start
    losses = {name: records[-1].get(f"train/{name}_loss") for name in KNOWN_NAMES}
    return seconds, {name: loss for name, loss in losses.items() if loss is not None}


def measure_steps(trial: StepTrial, world: World) -> dict[str, Any]:
    """Real optimizer steps on a model of its own, at every row length still to come, in the run's order.

    For each length the seconds of a micro-batch and those of the rest of a step; the loss and the peak memory. Raises
    NonFiniteError as training would. In a world of several ranks, all of them call this together.
    """
    inputs, on_cuda = trial.inputs, world.device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    lasts = [step for _, step in ends_of_lengths(inputs, trial.start)]
    start = time.perf_counter()
    state = TrainState.create(inputs.config, inputs.model_config, inputs.builder.options, world)
    log = AsyncStepMetrics(world, inputs.model_config)
    lengths, losses, rows, first = {}, {}, 0, 0.0
    for step in lasts[-1:] if trial.one_row else lasts:
        times = []
        for piece in _pieces(trial, world, step):
            seconds = 0.0
            for _ in range(1 if trial.one_row else 4 if on_cuda else 2):  # the first compiles, or fills caches
                seconds, losses = _timed_step(state, inputs, world, piece, log)
                first = first or time.perf_counter() - start
            times.append(seconds)
            rows = len(piece.batch) // len(times)
        one, micro = times[0], times[0]
        if trial.one_row:
            micro = one * trial.micro_batch(step)[0]
        elif len(times) > 1:
            micro = min(max(times[1] - one, 0.0), one)
        rest = max(0.0, one - micro)
        lengths[str(inputs.plan.step(step).seq_length)] = {"micro_batch": micro, "rest": rest}
    found = {"losses": losses, "first": first, "lengths": lengths, "rows": rows, "peak": None, "total": None}
    last = inputs.config.max_steps - 1
    building = time.perf_counter()
    inputs.builder.step(last, 0, trial.world_size, trial.split, inputs.config.local_batch_size)
    plan = inputs.plan.step(last)
    found["build_rate"] = -(-plan.rows // trial.world_size) * plan.seq_length / (time.perf_counter() - building)
    if on_cuda:
        found["peak"] = torch.cuda.max_memory_allocated(world.device)
        found["total"] = torch.cuda.mem_get_info(world.device)[1]
        del state
        torch.cuda.empty_cache()
    return found


def assess_steps(measured: Measurements, trial: StepTrial, environment: Environment) -> list[Row]:
    """The step that was made, how long the run will take, and whether the loader keeps up."""
    duration = _assess_duration(measured, trial, environment)
    return [_assess_step(measured, trial), duration, _assess_loader(measured, trial, duration)]


def _assess_step(measured: Measurements, trial: StepTrial) -> Row:
    """Losses, time and memory of the last real step."""
    config, length = trial.inputs.config, trial.inputs.plan.longest_row
    kind = f"{'bf16' if config.mixed_precision else 'fp32'}{', compiled' if config.compile else ''}"
    first = max(found["first"] for found in measured.values())
    losses = ", ".join(f"{name} loss {loss:.2f}" for name, loss in measured[0]["losses"].items())
    detail = f"{measured[0]['rows']} x {length} tokens, {kind}: {losses}, first step {time_text(first)}"
    result, remedy = OK, ""
    if trial.one_row:
        detail += f"; with one row, as a full micro-batch would take over {time_text(LONG_STEP)} here"
    peaks = {rank: found["peak"] for rank, found in measured.items() if found["peak"]}
    if peaks:
        worst = max(peaks, key=lambda rank: peaks[rank])
        total = measured[worst]["total"]
        detail += f", peak {size_text(peaks[worst])} of {size_text(total)}"
        if peaks[worst] > _FULL_MEMORY * total:
            result, remedy = WARN, "lower --local_batch_size: it changes speed alone, and memory may fragment"
    numbers = {str(rank): found for rank, found in measured.items()}
    return Row("training step", result, detail, remedy, numbers)


def _assess_duration(measured: Measurements, trial: StepTrial, environment: Environment) -> Row:
    """The time of the remaining steps, each at the pace of the slowest rank, against the job's time limit."""
    config, plan = trial.inputs.config, trial.inputs.plan
    length = plan.longest_row
    seconds = 0.0
    for step in range(trial.start, config.max_steps):
        key = str(plan.step(step).seq_length)
        times = [found["lengths"].get(key, found["lengths"][str(length)]) for found in measured.values()]
        seconds += trial.micro_batch(step)[1] * max(t["micro_batch"] for t in times) + max(t["rest"] for t in times)
    tokens = plan.tokens_before(config.max_steps) - plan.tokens_before(trial.start)
    rate = tokens / seconds
    detail = f"about {time_text(seconds)} for {count(config.max_steps - trial.start, 'step')} at {rate:,.0f} tokens/s, "
    detail += "without validation and saving"
    if len(measured) < trial.world_size:
        detail += f"; as if all {trial.world_size} ranks were like this process, and all_reduce were free"
    left, starts = seconds_left(environment), 1
    result, remedy = OK, ""
    if left is not None:
        starts = max(1, -int(-seconds // max(left, 1.0)))
        if starts > 1:
            detail += f"; the job ends in {time_text(left)}: {starts - 1} more starts of that length are needed"
            result, remedy = WARN, "submit with requeueing, or a longer --time"
        else:
            detail += f"; fits the job, which ends in {time_text(left)}"
    numbers = {"seconds": seconds, "tokens_per_second": rate, "starts": starts}
    return Row("duration", result, detail, remedy, numbers)


def _assess_loader(measured: Measurements, trial: StepTrial, duration: Row) -> Row:
    """Tokens a second that the slowest rank's loader makes against those that training takes."""
    build = min(found["build_rate"] for found in measured.values())
    need = duration.numbers["tokens_per_second"] / trial.world_size
    detail = f"builds {build:,.0f} tokens/s a rank, training takes {need:,.0f}"
    slow = build < need
    remedy = "more cores a rank (--cpus-per-task), or shards on a faster file system" if slow else ""
    return Row("loader", WARN if slow else OK, detail, remedy, {"build_rate": build})
