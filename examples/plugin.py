"""A plugin: a metric, an evaluation and a sink of your own, without a change of the suite.

    python train_single_gpu.py ... --plugin examples/plugin.py

training/plugins.py says what each function is given, and when.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training.plugins import EvaluationContext
from training.sinks import Sink

PROMPTS = ("The", "It was", "In the house", "They said that")


def step_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Rows trained on per second."""
    return {"plugin/rows_per_second": metrics["stats/tokens_per_second"] / metrics["stats/seq_length"]}


def evaluate(model: Any, context: EvaluationContext) -> dict[str, tuple[float, int]]:
    """How sure the model is of the next token: the entropy of its prediction in nats, mean over prompts."""
    total, count = 0.0, 0
    for prompt in PROMPTS[context.rank :: context.world_size]:  # each rank takes some; their sums are added up
        ids = context.tokenizer.encode(prompt, add_special_tokens=False).ids
        tokens = torch.tensor([[context.special.ids["bos"], *ids]], device=context.device)
        hidden = model.encode(tokens, torch.zeros_like(tokens), True)  # one document, read causally: [1, T, D]
        log_p = model.predict(hidden[0, -1]).float().log_softmax(-1)
        total, count = total - float((log_p.exp() * log_p).sum()), count + 1
    return {"plugin/next_token_entropy": (total, count)}


class LossTable(Sink):
    """loss.csv in the run folder, for a spreadsheet."""

    def __init__(self, run_folder: Path):
        self._file = (run_folder / "loss.csv").open("a", encoding="utf-8")

    def metrics(self, record: dict[str, Any]) -> None:
        if "train/loss" in record:
            self._file.write(f"{record['step']},{record['train/loss']:.4f}\n")

    def close(self, failed: bool) -> None:
        self._file.close()


def sinks(run_folder: Path, config: Any) -> list[Sink]:
    return [LossTable(run_folder)]
