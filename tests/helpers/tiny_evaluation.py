"""A tiny hybrid model, the score of a text by its definition, and BabyLM's files, for the tests of evaluation/."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from evaluation.token_log_probs import SpecialIds
from helpers.tiny_runs import TEXT, train_on
from model import ModelConfig
from model_extra import GPTBert
from training.checkpoint import write_checkpoint
from training.distributed import World
from training.environment import Environment

WORLD = World(0, 1, torch.device("cpu"), Environment("none"))
SPECIAL = SpecialIds(bos=1, eos=None, pad=3, mask=4)
MODES = ("masked", "causal", "fused")


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


@cache
def enlarged() -> tuple[GPTBert, Tokenizer]:
    """A model with weights enlarged so that scores differ widely, and its tokenizer."""
    tokenizer = train_on(TEXT, 300)
    return tiny_model(tokenizer.get_vocab_size(), scale=2), tokenizer


def checkpoint_of(folder: Path, model: GPTBert, tokenizer: Tokenizer, step: int = 7, ema: bool = False) -> Path:
    """A checkpoint of a run folder; ema: with averaged weights of zero, which find all texts of a length alike."""
    files = {"config.json": json.dumps(model.config.to_dict()).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    weights = model.state_dict()
    averaged = {"ema": {name: torch.zeros_like(value) for name, value in weights.items()}} if ema else {}
    return write_checkpoint(folder / "checkpoints", step, {"model": weights, **averaged}, {"flags": {}}, files)


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


@cache
def brute(model: GPTBert, tokenizer: Tokenizer, prefix: str, completion: str, mode: str) -> float:
    """A completion's log-probability: the tokens with a character in it."""
    if mode == "fused":
        return sum(brute(model, tokenizer, prefix, completion, part) for part in ("masked", "causal")) / 2
    encoding = tokenizer.encode(prefix + completion, add_special_tokens=False)
    first = next(i for i, (_, end) in enumerate(encoding.offsets) if end > len(prefix))
    scored = range(first, len(encoding.ids))
    return reference(model, encoding.ids, encoding.word_ids, mode, eos=False, only=scored)[0]


@torch.no_grad()
def brute_word(model: GPTBert, tokenizer: Tokenizer, text: str, word: str, mode: str) -> float:
    """A word's surprisal: its tokens one by one, masked with two more masks behind."""
    total, row = 0.0, [1, *tokenizer.encode(text, add_special_tokens=False).ids]
    for token in tokenizer.encode(f" {word}" if text else word, add_special_tokens=False).ids:
        inputs = torch.tensor([row + ([4, 4, 4] if mode == "masked" else [])])
        hidden = model.encode(inputs, torch.zeros_like(inputs), mode == "causal")
        total -= float(model.predict(hidden[0, len(row) - 1]).log_softmax(-1)[token])
        row = [*row, token]
    return total


def write_lines(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


EWOK = {"Domain": "space", "Context2": "x", "ContextType": "direct", "ContextDiff": "a", "TargetDiff": "b"}
PAIR = {"sentence_good": "The list holds.", "sentence_bad": "The lists holds."}
PLACES = [
    ("", "The", "", ""),
    ("The", "function", "", "The"),
    ("The function", "returns", "The", "function"),
    ("The function returns", "naïve", "The function", "returns"),
    ("The function returns naïve", "words", "The function returns", "naïve"),
    ("The list", "holds", "The", "list"),
    ("The list holds the", "length", "The list holds", "the"),
    ("A list of naïve words of the", "function", "A list of naïve words of", "the"),
]


def write_pipeline(folder: Path) -> Path:
    """All formats in BabyLM's layout: ties, empty contexts, rare characters, more tokens than positions, several lines
    of a UID."""
    write_lines(folder / "blimp_filtered/a.jsonl", [{**PAIR, "UID": "one", "field": "syntax"}, {**PAIR, "UID": "two"}])
    same = {"sentence_good": "a 東京", "sentence_bad": "a 東京"}
    write_lines(folder / "supplement_filtered/b.jsonl", [PAIR, same])
    ewok = [
        {**EWOK, "Context1": "The list is old.", "Target1": "It holds words.", "Target2": "It holds naïve 𝔘."},
        {**EWOK, "Context1": "", "Target1": "The cat", "Target2": "The function of"},
        {**EWOK, "Context1": "The list " * 36 + "of", "Target1": "naïve words.", "Target2": "the length."},
        {**EWOK, "Domain": "time", "Context1": "Length of", "Target1": "the list.", "Target2": "the list."},
    ]
    write_lines(folder / "ewok_filtered/space.jsonl", ewok)
    options = ["the list.", "the words.", "a function.", "nothing.", "the length of."]
    for stem in ("regular", "ambiref"):
        lines = [{"input_prefix": f"Box {n} {stem} holds ", "options": options[n:] + options[:n], "numops": n % 2}
                 for n in range(2)]  # fmt: skip
        write_lines(folder / f"entity_tracking/{stem}.jsonl", lines)
    phrase = {"prefix_acceptable": "The list", "prefix_unacceptable": "A naïve 東京", "property_phrase": "holds words."}
    write_lines(folder / "comps/comps_base.jsonl", [phrase, {**phrase, "prefix_acceptable": ""}])
    write_lines(folder / "comps/comps_wugs.jsonl", [{**phrase, "property_phrase": "returns the length"}])
    wug = [{"sentences": f"The {n} list\tThe {n} words hold", "ratio": n / 7} for n in range(5)]
    write_lines(folder / "wug_adj_nominalization/wug_adj_nominalization.jsonl", wug)
    write_lines(folder / "wug_past_tense/wug_past_tense.jsonl", wug[::-1])
    (folder / "reading").mkdir()
    generator = np.random.default_rng(0)
    with (folder / "reading/reading_data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item", "word", "prev_item", "prev_word", "Subtlex_log10", "RTfirstfix", "RTgopast",
                         "self_paced_reading_time"])  # fmt: skip
        for number in range(48):
            frequency = "NA" if number == 41 else 1 + number % 5
            writer.writerow([*PLACES[number % len(PLACES)], frequency, *generator.uniform(100, 300, 3).round(3)])
    write_lines(folder / "glue_filtered/boolq.jsonl", [{"label": 1}])
    write_lines(folder / "cdi_childes/cdi.jsonl", [{"word": "cat"}])
    return folder
