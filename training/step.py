"""One optimizer step: forward and backward passes of its micro-batches, all-reduce, clipping, optimizer, average."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from data.counter_rng import signed
from data.loader import BatchBuilder, RowBatch, StepBatch
from data.masking import fingerprint
from data.objectives import OBJECTIVE_NAMES
from data.plan import DataPlan
from training.config import TrainingConfig
from training.distributed import World
from training.loss import loss_weights
from training.rank_checks import begin_check
from training.schedules import average_decay, learning_rate
from training.state import TrainState
from training.step_metrics import InFlightStep, norms_by_role, now, to_host


def agree(world: World, batch: StepBatch | None, wants_stop: bool, step: int) -> tuple[list[int], bool, bool]:
    """Targets of the global batch by objective, whether any rank wants to stop, and whether all have their rows.

    batch: this rank's rows of global batch `step`, None where they are not ready. Summed by the hosts.
    """
    world.progress.step = step + 1
    targets = [0] * len(OBJECTIVE_NAMES) if batch is None else batch.targets.tolist()
    counts = torch.tensor([*targets, int(wants_stop), int(batch is None)])
    *targets, stops, missing = world.all_reduce(counts, "target counts").tolist()
    world.progress.in_step = stops == 0  # a save may take longer than a step
    return targets, stops > 0, missing == 0


def train_step(
    state: TrainState, batch: StepBatch, targets: Sequence[int], config: TrainingConfig, plan: DataPlan
) -> InFlightStep:
    """Forward, backward and update for one global batch.

    batch: this rank's rows. targets: of the whole global batch by objective (`agree`), by which losses are divided, so
    that gradients are sums over micro-batches and ranks.
    """
    world, step, rows = state.world, batch.plan.step, batch.plan.objective_rows
    weights = loss_weights(rows, targets, config.token_weighted_loss)
    prints = torch.zeros((), dtype=torch.int64, device=world.device) if config.data_fingerprint else None

    state.forward_backward.begin(signed(plan.step_key(step)), weights.per_target)
    micro_batches = list(batch.micro_batches(world.device))
    for number, micro_batch in enumerate(micro_batches):
        model_inputs = state.forward_backward(micro_batch, last=number == len(micro_batches) - 1)
        if prints is not None and model_inputs is not None:
            prints += fingerprint(model_inputs, micro_batch.row_keys)

    done = step + 1
    wants_norms = config.log_stats_every and done % config.log_stats_every == 0
    extra = norms_by_role(state.model) if wants_norms else {}
    rate = learning_rate(
        step, config.max_steps, config.learning_rate, config.warmup_proportion, config.cooldown_proportion
    )
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.ema.decay = average_decay(done, config.ema_decay, bool(config.ema_warmup))
    grad_norm = state.optimizer_step()
    state.gradients.zero()
    state.step = done

    # Everything below is queued on the device and read a step later: nothing here waits.
    sums = state.forward_backward.sums
    local_sums = torch.cat((sums.flatten(), grad_norm.to(sums.dtype).view(1)))
    metrics = {
        "step": done,
        "stats/learning_rate": rate,
        "stats/global_batch_size": batch.plan.rows,
        "stats/seq_length": batch.plan.seq_length,
        "stats/mask_p": batch.plan.mask_p,
        "stats/tokens": plan.tokens_before(done),
        **{f"stats/{name}_rows": count for name, count in zip(OBJECTIVE_NAMES, rows, strict=True)},
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
        batch.plan, metrics, weights.per_objective, all_sums, local_sums, prints, extra, finished, check
    )


def warm_up(state: TrainState, builder: BatchBuilder, split: str, local_batch_size: int) -> str:
    """Compile for every row length that is still to come, so that no step has to; returns what was done, in words.

    Takes micro-batches as large as any that will come, and so also shows before the first step whether they fit into
    the device's memory.
    """
    began, plan, world = time.monotonic(), builder.plan, state.world
    spans = [(max(a, state.step), b) for a, b in pairwise(plan.length_changes()) if b > state.step]
    arguments = (world.rank, world.size, split, local_batch_size)
    first = builder.step(state.step, *arguments).batch
    largest = [builder.like(first, plan.largest_step(*span), *arguments) for span in spans]
    state.forward_backward.warm_up(part for batch in largest for part in _first_and_fullest(batch, world.device))
    lengths = ", ".join(str(batch.plan.seq_length) for batch in largest)
    return f"compiled for rows of {lengths} tokens in {time.monotonic() - began:.1f} s"


def _first_and_fullest(batch: StepBatch, device: torch.device) -> list[RowBatch]:
    """A micro-batch of masked rows, where there are some, and one with as many targets as any."""
    parts = list(batch.micro_batches(device))
    fullest = max(range(len(parts)), key=lambda i: parts[i].targets.sum())
    return [parts[i] for i in sorted({0, fullest})]
