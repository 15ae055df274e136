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
from data.objectives import KNOWN_NAMES
from model_protocol import PretrainingModel
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
    model: PretrainingModel,
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
    wanted: whether this rank wants to stop; all ranks then raise Abandoned at the next batch."""
    objectives = held_out.options.objectives
    sums = torch.zeros(len(objectives), 4, dtype=torch.float64, device=world.device)
    rows = micro_batch_rows(local_batch_size, held_out.seq_length, held_out.seq_length)
    batches = (held_out.batches(objective, world.rank, world.size, rows) for objective in range(len(objectives)))
    with evaluation_mode(model):
        for batch in until_stop(chain.from_iterable(batches), world, wanted):
            inputs = batch.to(world.device).inputs(held_out.options)
            with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=autocast):
                # Of few sizes, so that the allocator finds again what it had before.
                slots = padded_targets(int(batch.targets.sum()), inputs.labels.numel())
                scores, which = score_targets(model, inputs, slots, None)
            sums += sums_by_objective(scores, which, objectives)
    metrics = {}
    totals = world.to_host(world.all_reduce(sums, "validation losses")).tolist()
    for objective, (loss, _, correct, count) in zip(objectives, totals, strict=True):
        if count:
            name = f"{prefix}{objective.name}"
            metrics[f"{name}_loss{suffix}"] = loss / count
            metrics[f"{name}_perplexity{suffix}"] = math.exp(min(loss / count, 700.0))
            metrics[f"{name}_accuracy{suffix}"] = correct / count
    return metrics


def validation_metrics(state: TrainState, inputs: Inputs, wanted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Validation of the weights and of their average. wanted: as in `validate`.

    Rows have the run's first length, so that all validations compare; once training's rows have grown to their final
    length, held-out rows of that length are measured, too, as `valid/masked_loss_512`. Of several sets, each has its
    own `valid/NAME/masked_loss`, and the first is `valid/masked_loss`, too."""
    config, grown, sets = inputs.config, inputs.grown_rows, []
    for name, held_out in inputs.held_out_sets.items():
        prefix = f"valid/{name}/" if name else "valid/"
        sets.append((held_out, config.local_batch_size, prefix, ""))
        if grown is not None and inputs.plan.step(max(0, state.step - 1)).seq_length == grown:
            rows = micro_batch_rows(config.local_batch_size, config.seq_length, grown)
            sets.append((held_out.in_rows_of(grown), rows, prefix, f"_{grown}"))

    def measure(weights: str) -> dict[str, float]:
        found, autocast = {}, bool(config.mixed_precision)
        for each, rows, prefix, suffix in sets:
            found |= validate(state.model, each, state.world, rows, autocast, prefix + weights, suffix, wanted)
        return found

    metrics = measure("")
    for prefix, average in {"ema_": state.ema, **{f"ema-{n}_": a for n, a in state.begun_averages.items()}}.items():
        with average.swapped_in(state.model):
            metrics |= measure(prefix)
    first = sets[0][2].removeprefix("valid/")  # of several, the first is also what a run with a single set has
    metrics |= {key.replace(first, "", 1): value for key, value in metrics.items() if first and f"valid/{first}" in key}
    return {"step": state.step, "stats/tokens": inputs.plan.tokens_before(state.step), **metrics}


def validation_line(metrics: dict[str, Any]) -> str:
    """What the console says of `validation_metrics`."""

    def losses(prefix: str, suffix: str) -> str:
        keys = {name: f"{name}_loss{suffix}" for name in KNOWN_NAMES if f"{prefix}{name}_loss{suffix}" in metrics}
        marks = [match[1] for key in metrics if (match := further.fullmatch(key))]
        return ", ".join(
            f"{name} {metrics[prefix + key]:.3f} (EMA {metrics[f'{prefix}ema_{key}']:.3f}"
            + "".join(f", {mark} {metrics[f'{prefix}ema-{mark}_{key}']:.3f}" for mark in dict.fromkeys(marks))
            + ")"
            for name, key in keys.items()
        )

    further = re.compile(r"valid/ema-([^_/]+)_\w+_loss")
    known = re.compile(rf"valid/(?:([^/]+)/)?(?:{'|'.join(KNOWN_NAMES)})_loss(?:_(\d+))?")
    found = [match for key in metrics if (match := known.fullmatch(key))]
    lengths = sorted({match[2] for match in found if match[2]}, key=int)
    parts = []
    for name in dict.fromkeys(match[1] for match in found if match[1]) or [""]:
        prefix = f"valid/{name}/" if name else "valid/"
        longer = "".join(f"; in rows of {length}: {losses(prefix, f'_{length}')}" for length in lengths)
        parts.append(f"{name}: " * bool(name) + losses(prefix, "") + longer)
    return f"step {metrics['step']:>6}  validation loss: {' | '.join(parts)}"
