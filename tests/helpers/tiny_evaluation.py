"""A tiny hybrid model, and the score of a sentence by its definition, for the tests of evaluation/."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from model import ModelConfig
from model_extra import GPTBert


def tiny_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, vocab_size=vocab_size,
        max_position_embeddings=64, position_bucket_size=8,
    )  # fmt: skip


def tiny_model(vocab_size: int, scale: float = 1.0) -> GPTBert:
    """Random weights, `scale` times those that training starts with."""
    model = GPTBert(tiny_config(vocab_size), torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


@torch.no_grad()
def reference(
    model: GPTBert,
    ids: list[int],
    words: list[int],
    mode: str,
    *,
    eos: bool,
    temperatures: Sequence[float] = (1.0,),
    only: Sequence[int] | None = None,
) -> list[float]:
    """Log-probability of a sentence at each temperature by its definition: one mask at a time, in float64.

    only: the tokens that are scored (default: all).
    """
    if next(model.parameters()).dtype != torch.float64:
        model = copy.deepcopy(model).double()
    totals = [0.0] * len(temperatures)
    for i in range(len(ids)) if only is None else only:
        row = [1, *ids, *([2] if eos else [])]
        if mode == "causal":
            row = row[: i + 1]
        else:
            later = [j for j in range(i, len(ids)) if j == i or (mode == "word_l2r" and words[j] == words[i])]
            for j in later:
                row[1 + j] = 4
        inputs = torch.tensor([row])
        hidden = model.encode(inputs, torch.zeros_like(inputs), mode == "causal")
        logits = model.predict(hidden[0, i])
        for k, t in enumerate(temperatures):
            totals[k] += float((logits / t).log_softmax(-1)[ids[i]])
    return totals
