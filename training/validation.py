"""Validation: loss, perplexity and accuracy on held-out rows, of the weights and of their average."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from data.loader import ValidationSet, micro_batch_rows
from data.objectives import OBJECTIVE_NAMES
from training.distributed import World
from training.forward_backward import padded_targets
from training.inputs import Inputs
from training.loss import score_targets, sums_by_objective
from training.state import TrainState
from training.stopping import until_stop


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; its own mode is restored."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def validate(
    model: nn.Module,
    held_out: ValidationSet,
    world: World,
    local_batch_size: int,
    autocast: bool,
    prefix: str,
    suffix: str = "",
    wanted: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Metrics `PREFIXmasked_lossSUFFIX`, the same with `perplexity` and `accuracy`, and all of them for each objective.

    Masked: 15 % of tokens, with masks that never change. The model's mode is restored.
    wanted: whether this rank wants to stop; all ranks then raise Abandoned at the next batch.
    """
    sums = torch.zeros(len(OBJECTIVE_NAMES), 4, dtype=torch.float64, device=world.device)
    rows = micro_batch_rows(local_batch_size, held_out.seq_length, held_out.seq_length)
    batches = (held_out.batches(objective, world.rank, world.size, rows) for objective in range(len(OBJECTIVE_NAMES)))
    with evaluation_mode(model):
        for batch in until_stop(chain.from_iterable(batches), world, wanted):
            inputs = batch.to(world.device).inputs(held_out.options)
            with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=autocast):
                # Of few sizes, so that the allocator finds again what it had before.
                slots = padded_targets(int(batch.targets.sum()), inputs.labels.numel(), ())
                scores, which = score_targets(model, inputs, slots, None)
            sums += sums_by_objective(scores, which)
    metrics = {}
    totals = world.to_host(world.all_reduce(sums, "validation losses")).tolist()
    for name, (loss, _, correct, count) in zip(OBJECTIVE_NAMES, totals, strict=True):
        if count:
            metrics[f"{prefix}{name}_loss{suffix}"] = loss / count
            metrics[f"{prefix}{name}_perplexity{suffix}"] = math.exp(min(loss / count, 700.0))
            metrics[f"{prefix}{name}_accuracy{suffix}"] = correct / count
    return metrics


def validation_metrics(state: TrainState, inputs: Inputs, wanted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Validation of the weights and of their average.

    Rows have the run's first length, so that all validations compare; once training's rows have grown to their final
    length, held-out rows of that length are measured, too, as `valid/masked_loss_512`. wanted: as in `validate`.
    """
    config, held_out, longest = inputs.config, inputs.held_out, inputs.held_out_longest
    assert held_out is not None
    sets = [(held_out, config.local_batch_size, "")]
    if longest is not None and inputs.plan.step(max(0, state.step - 1)).seq_length == longest.seq_length:
        rows = micro_batch_rows(config.local_batch_size, config.seq_length, longest.seq_length)
        sets.append((longest, rows, f"_{longest.seq_length}"))

    def measure(prefix: str) -> dict[str, float]:
        found, autocast = {}, bool(config.mixed_precision)
        for each, batch_rows, suffix in sets:
            found |= validate(state.model, each, state.world, batch_rows, autocast, prefix, suffix, wanted)
        return found

    metrics = measure("valid/")
    with state.ema.swapped_in(state.model):
        metrics |= measure("valid/ema_")
    return {"step": state.step, "stats/tokens": inputs.plan.tokens_before(state.step), **metrics}


def validation_line(metrics: dict[str, Any]) -> str:
    """What the console says of `validation_metrics`."""

    def losses(suffix: str) -> str:
        return ", ".join(
            f"{name} {metrics[f'valid/{name}_loss{suffix}']:.3f} (EMA {metrics[f'valid/ema_{name}_loss{suffix}']:.3f})"
            for name in OBJECTIVE_NAMES
            if f"valid/{name}_loss{suffix}" in metrics
        )

    line = f"step {metrics['step']:>6}  validation loss: {losses('')}"
    longer = re.compile(rf"valid/(?:{'|'.join(OBJECTIVE_NAMES)})_loss_(\d+)")
    lengths = {found[1] for key in metrics if (found := longer.fullmatch(key))}
    return "; ".join([line, *(f"in rows of {length}: {losses(f'_{length}')}" for length in sorted(lengths))])
