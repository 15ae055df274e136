"""Inputs for benchmarks without any download: shards of random tokens and a tokenizer of the right size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from data.shards import tokenizer_hash, write_shard

_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", *(f"<special_{i}>" for i in range(11)))
_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")


def write_inputs(folder: Path, vocab_size: int, tokens: int, mean_length: int = 400) -> Path:
    """`tokenizer.json` and `train.shard` with about `tokens` tokens of exponentially long documents in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*_SPECIAL, *(f"w{i}" for i in range(vocab_size - len(_SPECIAL)))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "special": True, **dict.fromkeys(_MATCHING, False)}
            for i, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    generator = np.random.default_rng(0)
    lengths = 1 + generator.exponential(mean_length - 1, size=tokens // mean_length).astype(int)
    # Word frequencies fall like Zipf's law, as in text.
    stream = 16 + (generator.pareto(1.0, int(lengths.sum())) * 20).astype(np.int64) % (vocab_size - 16)
    documents = np.split(stream, np.cumsum(lengths)[:-1])
    key = tokenizer_hash(folder / "tokenizer.json")
    write_shard(folder / "train.shard", documents, tokenizer_hash=key, vocab_size=vocab_size)
    return folder
