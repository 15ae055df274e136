"""Sentence embeddings: pairs (anchor, positive) or triples with a negative, and what is learnt and measured of them.

An embedding is the mean of the states of a text's row. The loss is the cross-entropy of each anchor's own positive
among all positives and negatives of its batch, by cosine / 0.05 (SimCSE: Gao et al., 2021, equations 1 and 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.finetune_metrics import REGRESSION, pearson, spearman
from evaluation.finetune_task import (
    EMBEDDINGS,
    Examples,
    Rows,
    Task,
    TaskError,
    check_fields,
    chosen_metric,
    fields_in,
    fill,
    read_numbers,
)

_TEMPERATURE = 0.05
_TRIPLE = ("anchor", "positive", "negative")
_SCORED = ("sentence1", "sentence2")


def read_embeddings(name: str, files: Sequence[tuple[Path, Rows]], settings: Mapping[str, Any]) -> Task:
    """A task of train and validation; the latter may have scored pairs (sentence1, sentence2, score) instead."""
    if len(files) > 2:
        raise TaskError(f"{files[2][0]}: embeddings have no predictions for a test file; leave it out.")
    (train, rows), (valid, held) = files
    fields = [field for field in _TRIPLE if field in {*rows[0][1], *_TRIPLE[:2]}]
    trained = tuple(settings.get("texts") or (f"{{{field}}}" for field in fields))
    if len(trained) < 2:
        raise TaskError(f'{train}: embeddings are learnt from two texts or three; "texts" in task.json has one.')
    scored = {*_SCORED, "score"} <= held[0][1].keys()
    measured = tuple(f"{{{field}}}" for field in _SCORED) if scored else trained
    examples = []
    for path, lines, templates in ((train, rows, trained), (valid, held, measured)):
        numbers = {"score"} if scored and path is valid else set()
        check_fields(path, lines, path, set(lines[0][1]), fields_in(templates), numbers)
        labels = read_numbers(path, lines, "score") if numbers else np.zeros(len(lines), dtype=np.int64)
        examples.append(Examples([fill(templates, row) for _, row in lines], labels))
    known = REGRESSION if scored else ("accuracy",)
    metric = chosen_metric(train, settings, known[-1], known, "embeddings")
    return Task(name, (), 0, metric, examples[0], examples[1], EMBEDDINGS)


def contrastive_loss(embeddings: Tensor) -> Tensor:
    """The mean over anchors; embeddings [B, K, D] of an anchor, its positive and K - 2 negatives."""
    unit = F.normalize(embeddings.float(), dim=-1)
    candidates = unit[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives, then all negatives
    own = torch.arange(len(unit), device=unit.device)
    return F.cross_entropy(unit[:, 0] @ candidates.T / _TEMPERATURE, own)


def embedding_measures(embeddings: np.ndarray, scores: np.ndarray | None) -> dict[str, float]:
    """Of scored pairs the correlations of their cosine with the scores [n]; else how often the own positive is nearest.
    embeddings [n, K, D]. An anchor's nearest is sought among the positives of all n; a tie is wrong."""
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
    if scores is not None:
        cosine = (unit[:, 0] * unit[:, 1]).sum(axis=-1)
        return {"pearson": pearson(cosine, scores), "spearman": spearman(cosine, scores)}
    right = 0
    for begin in range(0, len(unit), 1024):
        similar = unit[begin : begin + 1024, 0] @ unit[:, 1].T
        own = similar[np.arange(len(similar)), begin + np.arange(len(similar))]
        right += int(((similar >= own[:, None]).sum(axis=1) == 1).sum())
    return {"accuracy": right / len(unit)}
