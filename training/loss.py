"""Loss of all objectives: sums over targets, divided by what was counted over the whole global batch; its spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import median
from typing import Any

import numpy as np
import torch

from data.counter_rng import fold_torch
from data.loader import RowBatch
from data.masking import IGNORE_INDEX, MaskingOptions, ModelInputs
from data.objectives import OBJECTIVES, Objective, numbers_of
from model_protocol import PretrainingModel
from ops.dropout import DropoutKeys
from ops.rope import VarlenSizes

_DROPOUT = 201  # purpose of a row's dropout key, among the purposes in data/masking.py

_WINDOW, _FEWEST = 128, 32  # updates that a step is compared with; with fewer, it is compared with none
_LEAST_DEVIATION = 0.01  # of the median
_MOST_IN_A_ROW = 5
_MOST_RETURNS = 3  # to the same checkpoint

# Columns of the sums that a micro-step returns, one line per objective.
LOSS, SQUARED_LOG_Z, CORRECT, COUNT = range(4)
COLUMNS = 4


@dataclass(frozen=True)
class LossWeights:
    """What one target of each objective weighs in a global batch, and what a mean over an objective weighs."""

    per_target: tuple[float, ...]
    per_objective: tuple[float, ...]


def loss_weights(
    rows: Sequence[int], targets: Sequence[float], token_weighted: bool, objectives: Sequence[Objective] = OBJECTIVES
) -> LossWeights:
    """Weights for a global batch with `rows` and `targets` by objective, or what these weigh together.

    An objective's mean weighs its fraction of rows, or of targets with `token_weighted`, times its weight in the table;
    without targets it weighs nothing (its rows still count in the others' fractions, as the ratio is one of rows).
    """
    parts = targets if token_weighted else rows
    total = max(1, sum(parts))
    means = [
        part / total * objective.weight if count else 0.0
        for objective, part, count in zip(objectives, parts, targets, strict=True)
    ]
    per_target = [weight / max(1, count) for weight, count in zip(means, targets, strict=True)]
    return LossWeights(tuple(per_target), tuple(means))


def target_positions(labels: torch.Tensor, slots: int) -> torch.Tensor:
    """Flat positions of labels that are not IGNORE_INDEX, in order, in `slots` slots: int64 [slots].

    There must be enough slots; those left over hold positions without meaning. As the number is known on the host,
    this never makes the host wait for the device, unlike `nonzero`.
    """
    wanted = labels.flatten() != IGNORE_INDEX
    place = torch.arange(wanted.numel(), device=labels.device)
    # Those that are not wanted share a last slot, cut off below. What is left over differs from slot to slot, so that
    # gradients of many of them do not queue up for one position.
    slot = torch.where(wanted, wanted.cumsum(0) - 1, slots)
    return torch.arange(slots + 1, device=labels.device).scatter_(0, slot, place)[:slots]


def sums_by_objective(scores, objective: torch.Tensor, objectives: Sequence[Objective] = OBJECTIVES) -> torch.Tensor:
    """Sums of `score_targets` and the count of targets, float64: a line for each objective, columns as above.
    objective: the number of each target's; anything else is left out."""
    columns = _columns(scores)
    lines = [(columns * (objective == line).double()[:, None]).sum(0) for line in range(len(objectives))]
    return torch.stack(lines)


def sums_by_source(
    scores, objective: torch.Tensor, source: torch.Tensor, sources: int, objectives: Sequence[Objective]
) -> torch.Tensor:
    """As `sums_by_objective`, with a line for each objective of each of so many sources; source: of each target."""
    lines = sources * len(objectives)
    line = torch.where(objective < 0, lines, source * len(objectives) + objective)
    columns = _columns(scores)
    return columns.new_zeros(lines + 1, COLUMNS).index_add_(0, line, columns)[:lines]


def _columns(scores) -> torch.Tensor:
    loss, squared_log_z, correct = (score.detach().double() for score in scores)
    return torch.stack([loss, squared_log_z, correct, torch.ones_like(loss)], dim=1)


def dropout_keys(batch: RowBatch, step_key: torch.Tensor) -> DropoutKeys:
    """Dropout keys of a micro-batch, from its rows' keys and the step's."""
    return DropoutKeys(rows=fold_torch(batch.row_keys, _DROPOUT), step=step_key)


def varlen_sizes(batch: RowBatch, objectives: tuple[Objective, ...] = OBJECTIVES) -> VarlenSizes:
    """Sizes of a micro-batch, as a loader gives it, for rotary attention."""
    causal = batch.documents[list(numbers_of(lambda each: each.causal, objectives))].sum(axis=0)  # of each row
    rows, documents = int(np.count_nonzero(causal)), int(causal.sum())
    return VarlenSizes((len(batch) - rows, rows), (int(batch.documents.sum()) - documents, documents))


def score_targets(
    model: PretrainingModel, inputs: ModelInputs, slots: int, keys: DropoutKeys | None, sizes: VarlenSizes | None = None
):
    """Scores of a micro-batch's targets in `slots` slots, and their objectives: int64 [slots], -1 where unused."""
    positions = target_positions(inputs.labels, slots)
    logits = model(inputs.input_ids, inputs.document_ids, inputs.causal, positions, keys, sizes)
    labels = inputs.labels.flatten()[positions]
    used = torch.arange(slots, device=labels.device) < (inputs.labels != IGNORE_INDEX).sum()
    objective = inputs.objective[torch.div(positions, inputs.labels.shape[1], rounding_mode="floor")]
    return model.score(logits, labels.where(used, 0)), objective.where(used, -1)


def hybrid_loss(
    model: PretrainingModel,
    batch: RowBatch,
    options: MaskingOptions,
    per_target: Sequence[torch.Tensor | float],
    z_loss_weight: float,
    step_key: torch.Tensor,
    slots: int | None = None,
    sizes: VarlenSizes | None = None,
) -> tuple[torch.Tensor, torch.Tensor, ModelInputs]:
    """A micro-batch's part of the global batch's loss, its `sums_by_objective`, with those by source behind them where
    rows tell theirs, and the inputs it was computed on.

    per_target: LossWeights.per_target; RowBatch.target_weights are factors of it, in the sums, too.
    slots, sizes: room for targets in the head and for documents, as many as there are if None.
    Parts of all micro-batches and ranks add up to the loss of the global batch, and so do their gradients. A
    micro-batch without targets contributes zero.
    """
    inputs = batch.inputs(options)
    slots = int(batch.targets.sum()) if slots is None else slots
    sizes = varlen_sizes(batch, options.objectives) if sizes is None else sizes
    scores, objective = score_targets(model, inputs, slots, dropout_keys(batch, step_key), sizes)
    weight = reduce(add, [(objective == line) * weight for line, weight in enumerate(per_target)])
    row, parts = None, []
    if batch.target_weights is not None or batch.sources is not None:
        row = torch.div(target_positions(inputs.labels, slots), inputs.labels.shape[1], rounding_mode="floor")
    if batch.sources is not None:  # unlike those by objective, not weighted
        parts = [sums_by_source(scores, objective, batch.sources[row], len(options.sources), options.objectives)]
    if batch.target_weights is not None:
        own = batch.target_weights[row]
        scores = (scores[0] * own, scores[1] * own, scores[2])
    loss = (weight * (scores[0] + z_loss_weight * scores[1])).sum()
    return loss, torch.cat((sums_by_objective(scores, objective, options.objectives), *parts)), inputs


class SpikeGuard:
    """Finds the steps that --spike_policy is for, from figures that are the same on all ranks.

    A figure (the mean loss of an objective, or the norm of the gradients before clipping) is a spike where it is not
    finite, or exceeds the median of the last 128 updates by more than `threshold` deviations: 1.4826 times their median
    absolute deviation, as of a normal distribution (Rousseeuw and Croux 1993, section 1), at least 1 % of the median.
    Fewer than 32 updates, or those of another row length, say nothing. Spikes do not count as updates; after five in a
    row the next one is taken for a new level, where it is finite, and the comparison begins anew.
    """

    def __init__(self, threshold: float, saved: Mapping[str, Any] | None = None) -> None:
        """saved: `to_json` of the checkpoint that a run resumes from."""
        self._threshold = threshold
        self.spikes = self.rollbacks = 0
        self._in_a_row = self._returns = self._returned_to = 0
        self.restore(saved or {})
        if saved is not None:
            self.spikes, self.rollbacks = saved["spikes"], saved["rollbacks"]
            self._in_a_row, self._returns, self._returned_to = saved["state"]

    def to_json(self) -> dict[str, Any]:
        """All that it knows."""
        return {
            "spikes": self.spikes,
            "rollbacks": self.rollbacks,
            "state": [self._in_a_row, self._returns, self._returned_to],
            "row_length": self._row_length,
            "window": {name: list(values) for name, values in self._window.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Compare with the updates before a checkpoint again, to whose state a run has returned."""
        self._row_length = saved.get("row_length", 0)
        self._window = {name: deque(values, _WINDOW) for name, values in saved.get("window", {}).items()}

    def judge(self, row_length: int, figures: Mapping[str, float]) -> tuple[bool, str]:
        """Whether a step with these figures is a spike, and a sentence where it is, or is taken for a new level."""
        if row_length != self._row_length:
            self._row_length, self._window = row_length, {}
        found = [words for name, value in figures.items() if (words := self._excess(name, value))]
        finite = all(map(math.isfinite, figures.values()))
        if found and (self._in_a_row < _MOST_IN_A_ROW or not finite):
            self._in_a_row += 1
            self.spikes += 1
            return True, found[0]
        if found:
            self._window = {}
            found = [f"{found[0]}, but so had the {_MOST_IN_A_ROW} steps before: taken for a new level"]
        self._in_a_row = 0
        for name, value in figures.items():
            self._window.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        return False, found[0] if found else ""

    def hopeless(self) -> bool:
        """Whether more steps in a row were spikes than a new level explains."""
        return self._in_a_row > _MOST_IN_A_ROW

    def returns_to(self, step: int) -> bool:
        """Count a return to a checkpoint; whether there were not too many to the same one."""
        self._returns = self._returns + 1 if step == self._returned_to else 1
        self._returned_to = step
        self.rollbacks += self._returns <= _MOST_RETURNS
        return self._returns <= _MOST_RETURNS

    def _excess(self, name: str, value: float) -> str:
        known = self._window.get(name, ())
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if len(known) < _FEWEST:
            return ""
        middle = median(known)
        deviation = max(1.4826 * median(abs(other - middle) for other in known), _LEAST_DEVIATION * abs(middle))
        excess = (value - middle) / deviation if deviation else 0.0
        if excess <= self._threshold:
            return ""
        return f"the {name} is {value:.4g}, {excess:.0f} deviations above the median of {middle:.4g}"
