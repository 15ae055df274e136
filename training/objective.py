"""Loss of the hybrid objective: sums over targets, divided by what was counted over the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from data.hashing import fold_torch
from data.loader import RowBatch
from data.masking import IGNORE_INDEX, MaskingOptions, ModelInputs
from data.plan import CAUSAL, MASKED
from ops.dropout import DropoutKeys

_DROPOUT = 201  # purpose of a row's dropout key, among the purposes in data/masking.py

# Columns of the sums that a micro-step returns, one line per objective.
LOSS, SQUARED_LOG_Z, CORRECT, COUNT = range(4)


@dataclass(frozen=True)
class LossWeights:
    """What one target of each objective weighs in a global batch, and what a mean over an objective weighs."""

    per_target: tuple[float, float]
    share: tuple[float, float]


def loss_weights(rows: tuple[int, int], targets: tuple[int, int], token_weighted: bool) -> LossWeights:
    """Weights for a global batch with `rows` and `targets` by objective (masked, causal).

    An objective's mean weighs its share of rows, or of targets with `token_weighted`; without targets it weighs
    nothing (its rows still count in the other's share, as the ratio is one of rows).
    """
    parts = targets if token_weighted else rows
    total = max(1, sum(parts))
    share = [part / total if count else 0.0 for part, count in zip(parts, targets, strict=True)]
    per_target = [weight / max(1, count) for weight, count in zip(share, targets, strict=True)]
    return LossWeights((per_target[0], per_target[1]), (share[0], share[1]))


def target_positions(labels: torch.Tensor, count: int) -> torch.Tensor:
    """Flat positions of the `count` labels that are not IGNORE_INDEX, in order; int64 [count].

    The count is known on the host, so unlike `nonzero` this never makes the host wait for the device.
    """
    wanted = labels.flatten() != IGNORE_INDEX
    place = torch.arange(wanted.numel(), device=labels.device)
    slot = torch.where(
        wanted, wanted.cumsum(0) - 1, count
    )  # those that are not wanted share a last slot, cut off below
    return torch.zeros(count + 1, dtype=torch.int64, device=labels.device).scatter_(0, slot, place)[:count]


def target_scores(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, squared log-partition and correctness of each target; logits [N, V], labels [N] -> float32 [N]."""
    logits = logits.float()
    log_z = logits.logsumexp(dim=-1)
    loss = log_z - logits.gather(1, labels[:, None])[:, 0]
    return loss, log_z.square(), (logits.argmax(dim=-1) == labels).float()


def sums_by_objective(scores, causal: torch.Tensor) -> torch.Tensor:
    """Sums of `target_scores` and the count of targets, [2, 4] float64: lines masked and causal, columns as above."""
    loss, squared_log_z, correct = (score.detach().double() for score in scores)
    columns = torch.stack([loss, squared_log_z, correct, torch.ones_like(loss)], dim=1)
    flags = causal.double()[:, None]
    return torch.stack([(columns * (1 - flags)).sum(0), (columns * flags).sum(0)])


def dropout_keys(batch: RowBatch, step_key: torch.Tensor) -> DropoutKeys:
    """Dropout keys of a micro-batch, from its rows' keys and the step's."""
    return DropoutKeys(rows=fold_torch(batch.row_keys, _DROPOUT), step=step_key)


def evaluate(model: nn.Module, inputs: ModelInputs, count: int, keys: DropoutKeys | None):
    """Scores of a micro-batch's `count` targets and the objective of each (bool [count], True for causal)."""
    positions = target_positions(inputs.labels, count)
    logits = model(inputs.input_ids, inputs.document_ids, inputs.causal, positions, keys)
    labels = inputs.labels.flatten()[positions]
    causal = inputs.causal[torch.div(positions, inputs.labels.shape[1], rounding_mode="floor")]
    return target_scores(logits, labels), causal


def training_loss(
    model: nn.Module, batch: RowBatch, options: MaskingOptions, weights: LossWeights, z_loss_weight: float, step_key
) -> tuple[torch.Tensor, torch.Tensor, ModelInputs]:
    """A micro-batch's part of the global batch's loss, its sums [2, 4], and the inputs it was computed on.

    Parts of all micro-batches and ranks add up to the loss of the global batch, and so do their gradients. A
    micro-batch without targets contributes zero.
    """
    inputs = batch.inputs(options)
    scores, causal = evaluate(model, inputs, int(batch.targets.sum()), dropout_keys(batch, step_key))
    weight = torch.where(causal, weights.per_target[CAUSAL], weights.per_target[MASKED])
    loss = (weight * (scores[0] + z_loss_weight * scores[1])).sum()
    return loss, sums_by_objective(scores, causal), inputs
