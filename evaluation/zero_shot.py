"""The zero-shot tasks of BabyLM's evaluation pipeline (2025, 2026) that choose between texts, in its folder layout.

An item has choices, each a completion behind a prefix; its score is the log-probability of the completion's tokens.
BLiMP, the supplement and WUG score whole sentences (no prefix); EWoK, entity tracking and COMPS completions. The first
choice is the right one; a WUG item has people's share of the first choice instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data.counter_rng import fold
from evaluation.finetune_metrics import spearman
from evaluation.minimal_pairs import accuracies, as_json
from evaluation.pair_accuracy import (
    Accuracy,
    Grouped,
    correctness,
    mean_accuracy,
    mean_of_paradigms,
    members_of,
    read_lines,
    read_pairs,
    text_of,
)
from evaluation.token_log_probs import SpecialIds, TokenizedSentences, encode_sentences
from training.config import ConfigError

READING = "reading"
# The beginnings of the names of folders and files, and the names of their tasks in BabyLM's results.
_TASKS = {
    "blimp": "blimp", "supplement": "blimp", "ewok": "ewok", "entity_tracking": "entity_tracking", "comps": "comps",
    "wug_adj": "wug_adj", "wug_past": "wug_past", READING: READING,
}  # fmt: skip
_NO_AGES = (
    "age of acquisition is of several checkpoints and by a definition of ours, since BabyLM's code for it is broken: "
    "evaluation/age_of_acquisition.py"
)
_LEFT_OUT = {
    "glue": "fine-tuning, by evaluation/finetune.py",
    "superglue": "fine-tuning, by evaluation/finetune.py",
    "cdi": _NO_AGES,
    "aoa": _NO_AGES,
}
_EWOK_FIELDS = ("ContextType", "ContextDiff", "TargetDiff")
_Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Item:
    """Choices between completions [C], each behind its prefix [C].

    paradigm: what the pipeline calls UID; results are means over these, in each part first. share: people's share of
    the first choice; None where the first is right. shown: what the model reads before each prefix, as examples."""

    paradigm: str
    prefixes: tuple[str, ...]
    completions: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    share: float | None = None
    shown: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The whole texts of the choices."""
        return tuple(prefix + completion for prefix, completion in zip(self.prefixes, self.completions, strict=True))


@dataclass(frozen=True)
class Dataset:
    """A folder of a task. For reading times `path` is the CSV file, and there are no items."""

    task: str
    name: str
    path: Path
    items: tuple[Item, ...] = ()


# Reading


def find_datasets(folder: Path, flag: str) -> tuple[list[Dataset], list[str]]:
    """All datasets in a folder, at any depth, and a line for each thing in it that is left out. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{flag} {folder} is not a folder; give one with BabyLM's tasks, such as blimp_filtered/")
    found: list[Dataset] = []
    notes: list[str] = []
    for path, begins in _named(folder):
        if begins in _LEFT_OUT:
            notes.append(f"{path.name} is left out: {_LEFT_OUT[begins]}")
        elif not begins:
            notes.append(f"{path} is left out: its name begins as that of no task ({', '.join(_TASKS)})")
        else:
            found.append(_read_dataset(_TASKS[begins], path, flag))
    if not found:
        raise ConfigError(f"{flag} {folder} holds no task; names of their folders begin with {', '.join(_TASKS)}")
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag} {folder} holds {name} twice; give one of the folders, fast or full")
    return found, notes


def _named(path: Path) -> Iterator[tuple[Path, str]]:
    """Folders and files of tasks at and below `path`, with how their names begin; files of no task with ""."""
    names = sorted({*_TASKS, *_LEFT_OUT}, key=len, reverse=True)
    begins = next((name for name in names if path.name.lower().startswith(name)), "")
    is_data = path.suffix in (".jsonl", ".csv")
    if (begins and (path.is_dir() or is_data)) or is_data:
        yield path, begins
    elif path.is_dir():
        for inside in sorted(path.iterdir()):
            if not inside.name.startswith("."):
                yield from _named(inside)


def left_out(path: Path) -> str:
    """Why a file at this path inside of the pipeline's folder is of no zero-shot task; "" where it may be of one."""
    begun = (why for part in path.parts for name, why in _LEFT_OUT.items() if part.lower().startswith(name))
    return next(begun, "")


def _read_dataset(task: str, path: Path, flag: str) -> Dataset:
    suffix = ".csv" if task == READING else ".jsonl"
    files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{flag}: folder {path} holds no {suffix} file")
    if task == READING:
        if len(files) > 1:
            raise ConfigError(f"{flag}: folder {path} holds {len(files)} CSV files; leave the one of reading times")
        return Dataset(task, files[0].stem, files[0])
    items: list[Item] = []
    for file in files:
        items += read_items(task, file, flag)
    return Dataset(task, path.stem, path, tuple(items))


def read_items(task: str, file: Path, flag: str) -> list[Item]:
    """The items of a file. Raises ConfigError."""
    if task == "blimp":
        pairs = read_pairs(file, flag)
        uids = [str(pair.fields.get("UID", pair.paradigm)) for pair in pairs]
        return [Item(uid, ("", ""), (p.good, p.bad), p.fields) for uid, p in zip(uids, pairs, strict=True)]
    return [_FORMATS[task](value, file.stem, where) for where, value in read_lines(file, flag, "item")]


def _ewok(value: dict[str, Any], stem: str, where: str) -> Item:
    context = text_of(value, "Context1", where, may_be_empty=True)
    targets = tuple(f" {text_of(value, key, where)}" for key in ("Target1", "Target2"))
    fields = {key: value[key] for key in _EWOK_FIELDS if key in value}
    return Item(str(value.get("Domain", stem)), (context,) * 2, targets, fields)


def _entity_tracking(value: dict[str, Any], stem: str, where: str) -> Item:
    prefix, options = text_of(value, "input_prefix", where, may_be_empty=True), value.get("options")
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(o, str) and o for o in options):
        raise ConfigError(f'{where}: "options" must be a list of two texts or more, the right one first')
    if "numops" not in value:
        raise ConfigError(f'{where}: "numops" is missing; it must be a number of operations')
    number = str(value["numops"])
    return Item(f"{stem}_{number}_ops", (prefix,) * len(options), tuple(options), {"numops": number}, part=stem)


def _comps(value: dict[str, Any], stem: str, where: str) -> Item:
    keys = ("prefix_acceptable", "prefix_unacceptable")
    prefixes = tuple(text_of(value, key, where, may_be_empty=True) for key in keys)
    return Item(stem, prefixes, (f" {text_of(value, 'property_phrase', where)}",) * 2)


def _wug(value: dict[str, Any], stem: str, where: str) -> Item:
    sentences = tuple(text_of(value, "sentences", where).split("\t"))
    try:
        share = float(value["ratio"])
    except (KeyError, TypeError, ValueError):
        share = math.nan
    if len(sentences) < 2 or not all(map(str.strip, sentences)):
        raise ConfigError(f'{where}: "sentences" must be two sentences or more with tabs between them')
    if not math.isfinite(share):
        raise ConfigError(f'{where}: "ratio" is {value.get("ratio")!r}; it must be a number')
    return Item(stem, ("",) * len(sentences), sentences, share=share)


_FORMATS: dict[str, Callable[[dict[str, Any], str, str], Item]] = {
    "ewok": _ewok, "entity_tracking": _entity_tracking, "comps": _comps, "wug_adj": _wug, "wug_past": _wug,
}  # fmt: skip


def with_examples(dataset: Dataset, shots: int, seed: int, separator: str) -> Dataset:
    """A dataset whose items stand behind `shots` others of their paradigm with the right choice and a separator each.

    Which ones is a function of the seed and the item's place. Of WUG, where no choice is right, none; nor of reading.
    Raises ConfigError where a paradigm has too few items."""
    if not shots or any(item.share is not None for item in dataset.items):
        return dataset
    members = members_of(item.paradigm for item in dataset.items)
    found = []
    for index, item in enumerate(dataset.items):
        others = [other for other in members[item.paradigm] if dataset.items[other].texts != item.texts]
        if len(others) < shots:
            raise ConfigError(
                f"--shots is {shots}, and {dataset.name} has {len(others)} other items of {item.paradigm}; give fewer"
            )
        key = fold(fold(seed, 5), index)
        drawn = sorted(others, key=lambda other, key=key: fold(key, other))[:shots]
        found.append(replace(item, shown="".join(dataset.items[other].texts[0] + separator for other in drawn)))
    return replace(dataset, items=tuple(found))


# Scores and results


def encode_items(items: Sequence[Item], tokenizer: Tokenizer, special: SpecialIds) -> TokenizedSentences:
    """All choices of all items, one after the other."""
    texts = [item.shown + text for item in items for text in item.texts]
    contexts = [len(item.shown) + len(prefix) for item in items for prefix in item.prefixes]
    return encode_sentences(tokenizer, texts, special, contexts)


def by_item(items: Sequence[Item], sums: np.ndarray) -> np.ndarray:
    """The scores of `encode_items`' sentences as float64 [items, most choices], -inf where an item has fewer."""
    counts = np.array([len(item.completions) for item in items])
    table = np.full((len(items), counts.max()), -np.inf)
    table[np.arange(counts.max()) < counts[:, None]] = sums
    return table


def results(items: Sequence[Item], scores: np.ndarray) -> dict[str, Any]:
    """What a dataset gives, as JSON: accuracies with intervals, or Spearman's rho with people's shares."""
    shares = [item.share for item in items if item.share is not None]
    if shares:
        rho = spearman(first_log_odds(scores), np.array(shares))
        low, high = spearman_interval(rho, len(shares))
        return {"spearman": rho, "low": low, "high": high, "items": len(shares)}
    right = correctness(scores)
    official = scores.argmax(axis=1) == 0  # of equal ones, its script takes the first
    found = {"ties": int(((right > 0) & (right < 1)).sum()), **accuracies(items, right)}
    return {**found, "mean": as_json(mean_of_parts(items, right)), "official": mean_of_parts(items, official).value}


def mean_of_parts(items: Sequence[Item], right: np.ndarray) -> Accuracy:
    """The mean over parts of the mean over paradigms in each; right: [n], 0 to 1."""
    parts = members_of(item.part for item in items)
    of: list[tuple[Sequence[Grouped], list[int]]] = [([items[i] for i in part], part) for part in parts.values()]
    return mean_accuracy([mean_of_paradigms(members, right[index]) for members, index in of])


def first_log_odds(scores: np.ndarray) -> np.ndarray:
    """Log-odds [n] of the first choice under the softmax over the choices' scores [n, C], which rounding never ties."""
    return scores[:, 0] - np.logaddexp.reduce(scores[:, 1:], axis=1)


def spearman_interval(rho: float, n: int) -> tuple[float, float]:
    """95 %, by Fisher's z with the variance of Bonett and Wright (2000): (1 + rho^2 / 2) / (n - 3)."""
    if n <= 3:
        return -1.0, 1.0
    z, half = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, rho))), _Z * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def predictions(items: Sequence[Item], scores: np.ndarray) -> dict[str, Any]:
    """BabyLM's predictions.json: by UID the chosen text of each item, of equal ones the first."""
    found: dict[str, Any] = {}
    shares = np.exp(-np.logaddexp(0, -first_log_odds(scores)))
    for item, line, share in zip(items, scores, shares, strict=True):
        lines = found.setdefault(item.paradigm, {"predictions": []})["predictions"]
        chosen = int(line.argmax())
        entry = {"id": f"{item.paradigm}_{len(lines)}", "pred": item.prefixes[chosen] + item.completions[chosen]}
        lines.append(entry if item.share is None else {**entry, "prob": float(share)})
    return found
