"""Runs for benchmarks without any download: shards of random tokens, a tokenizer of the right size, flags, rates."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from data.shards import tokenizer_hash, write_shard
from training.metric_logger import read_metrics

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


def run_flags(inputs: Path, config: str | Path, output: Path, **flags: object) -> list[str]:
    """Flags of a training run on `write_inputs`, in rows of one length, that leaves nothing but metrics; and others."""
    plain = {
        "train_path": inputs / "train.shard", "config_file": config, "tokenizer_path": inputs / "tokenizer.json",
        "output_dir": output, "length_milestones": "", "batch_reduction": 1, "save_every": 0, "validate_every": 0,
        "wandb_mode": "disabled",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in (plain | flags).items()]


def read_rates(run: Path, skip: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run's metrics say of the steps after `skip`, and their lines."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] > skip]
    rates = [line["stats/tokens_per_second"] for line in lines]
    tokens = [line["stats/global_batch_size"] * line["stats/seq_length"] for line in lines]
    waits = [line["stats/loader_wait_seconds"] for line in lines]
    found = {
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "peak_memory_gib": max(line.get("stats/peak_memory_gib", 0.0) for line in lines),
        "loader_wait_fraction": statistics.median(
            wait * rate / size for wait, rate, size in zip(waits, rates, tokens, strict=True)
        ),
    }
    return found, lines
