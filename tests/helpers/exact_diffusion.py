"""Masked diffusion by its definition: a small model, a corpus, and the bound from all sets of hidden tokens."""

from __future__ import annotations

from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import torch

from data.corpus import Corpus
from data.shards import write_shard
from model import ModelConfig
from model_extra import GPTBert


def corpus_of(folder: Path, *documents: list[int]) -> Corpus:
    folder.mkdir(exist_ok=True)
    write_shard(folder / "x.shard", [np.array(document) for document in documents], "ab" * 32, 300)
    return Corpus(folder / "x.shard", tokenizer_hash=None, bos_id=1, eos_id=2)


def sharp_model(vocab_size: int) -> GPTBert:
    """A model whose losses differ much from one set of hidden tokens to the other."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = ModelConfig(**sizes, vocab_size=vocab_size, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = GPTBert(config, torch.Generator().manual_seed(3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    return model


def loss_of_hidden(model: GPTBert, document: list[int], hidden: tuple[int, ...]) -> dict[int, float]:
    """The loss of each hidden token of `<s> document </s>`, which sees the others."""
    row = [1, *(4 if place in hidden else token for place, token in enumerate(document)), 2]
    ids = torch.tensor([row])
    with torch.no_grad():
        logits = model.predict(model.encode(ids, torch.zeros_like(ids), torch.tensor([False])))[0].double()
    return {place: -logits[place].log_softmax(-1)[document[place]].item() for place in hidden}


def exact_bound(model: GPTBert, document: list[int]) -> float:
    """Equation 14 of LLaDA, with all sets of hidden tokens: nats for the whole document."""
    places = range(len(document))
    return sum(
        sum(loss_of_hidden(model, document, hidden).values()) / k / comb(len(document), k)
        for k in range(1, len(document) + 1)
        for hidden in combinations(places, k)
    )
