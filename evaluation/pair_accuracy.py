"""Minimal-pair accuracy: does the model find the acceptable sentence of two more probable?

Files hold a JSON object a line with `sentence_good` and `sentence_bad`, as BLiMP (Warstadt et al., 2020) and its BabyLM
supplement do; other fields are kept for grouping. A sentence's score is the sum of its tokens' log-probabilities
(token_log_probs.py): `causal`, `masked` (each token masked in turn), or `fused`, the mean of both, which is their
average in log space token by token. A pair is right where the good sentence's score is above the other's, and half
right where both are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from evaluation.token_log_probs import SpecialIds, TokenizedSentences, encode_sentences
from training.config import ConfigError

OBJECTIVES = ("masked", "causal")
MODES = (*OBJECTIVES, "fused")
PHENOMENON = "linguistics_term"  # BLiMP's name for it
_SENTENCES = ("sentence_good", "sentence_bad")
_MOST_VALUES = 24  # a field with more distinct values in a set is an identifier, not a group
_Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Pair:
    """Two sentences. paradigm: the name of the file. fields: its other fields."""

    paradigm: str
    good: str
    bad: str
    fields: Mapping[str, Any]

    @property
    def phenomenon(self) -> str:
        """What BLiMP calls the linguistic phenomenon; the paradigm where a pair does not say."""
        return str(self.fields.get(PHENOMENON, self.paradigm))


@dataclass(frozen=True)
class PairSet:
    """The pairs of a file or of a folder of files, such as all of BLiMP."""

    name: str
    pairs: tuple[Pair, ...]


class Grouped(Protocol):
    """What results are grouped by: a pair, or another item with choices."""

    @property
    def paradigm(self) -> str: ...

    @property
    def fields(self) -> Mapping[str, Any]: ...


class Accuracy(NamedTuple):
    """A fraction in 0..1 with its 95 % interval, and the number of pairs it is of."""

    value: float
    low: float
    high: float
    pairs: int


# Reading


def read_pair_sets(paths: Sequence[str | Path], flag: str) -> list[PairSet]:
    """The sets at `paths`: a file is one, and so is every folder with .jsonl files, also inside a given folder. flag:
    named in errors. Raises ConfigError, a sentence with file and line."""
    sets: list[PairSet] = []
    for path in map(Path, paths):
        files = sorted(path.rglob("*.jsonl"))
        if path.is_dir() and not files:
            raise ConfigError(f"{flag}: folder {path} holds no .jsonl file; give files with sentence pairs")
        sets += pair_sets(path, files, flag)
    refuse_twice([found.name for found in sets], flag, "sets of pairs")
    return sets


def pair_sets(path: Path, files: Sequence[Path], flag: str) -> list[PairSet]:
    """A file as one set, or each folder that some of `files`, in a folder, are in. Raises ConfigError."""
    if not path.is_dir():
        return [PairSet(path.stem, tuple(read_pairs(path, flag)))]
    found = []
    for folder in sorted({file.parent for file in files}):
        pairs = tuple(pair for file in files if file.parent == folder for pair in read_pairs(file, flag))
        name = path.resolve().name if folder == path else folder.relative_to(path).as_posix()
        found.append(PairSet(name, pairs))
    return found


def refuse_twice(names: Sequence[str], flag: str, things: str) -> None:
    """Raises ConfigError where two of `things` have one name."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag}: two {things} are called {name!r}; rename one of the files or folders")


def read_pairs(path: Path, flag: str) -> list[Pair]:
    """The pairs of a file. Raises ConfigError."""
    pairs = []
    for where, value in read_lines(path, flag, "pair"):
        good, bad = (text_of(value, key, where) for key in _SENTENCES)
        fields = {key: content for key, content in value.items() if key not in _SENTENCES}
        pairs.append(Pair(path.stem, good, bad, fields))
    return pairs


def read_lines(path: Path, flag: str, thing: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with where it stands, for errors. Raises ConfigError. thing: what a line holds.
    A line with another value than an object counts as an empty one."""
    found = [(where, value if isinstance(value, dict) else {}) for where, value in json_values(path, flag)]
    if not found:
        raise ConfigError(f"{flag}: {path} holds no {thing}")
    return found


def json_values(path: Path, flag: str) -> Iterator[tuple[str, Any]]:
    """The values of a file with JSON a line, each with where it stands, for errors. Raises ConfigError."""
    for number, line in enumerate(read_text(path, flag).split("\n"), 1):
        if line.strip():
            where = f"{flag}: {path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not valid JSON ({error})") from None
            yield where, value


def read_text(path: Path, flag: str) -> str:
    """The UTF-8 text of a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {path} is not UTF-8 text (byte {error.start})") from None


def text_of(value: Mapping[str, Any], key: str, where: str, may_be_empty: bool = False) -> str:
    """The text under a key of a line. Raises ConfigError where there is none."""
    text = value.get(key)
    if not isinstance(text, str) or not (text.strip() or may_be_empty):
        found = f"is {text!r}" if key in value else "is missing"
        raise ConfigError(f'{where}: "{key}" {found}; it must be a sentence')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f'{where}: "{key}" has half a surrogate pair') from None
    return text


# Scoring


def encode_pairs(pairs: Iterable[Pair], tokenizer: Tokenizer, special: SpecialIds) -> TokenizedSentences:
    """Both sentences of each pair, the good one first."""
    return encode_sentences(tokenizer, [text for pair in pairs for text in (pair.good, pair.bad)], special)


def in_modes(scores: Mapping[str, np.ndarray], modes: Iterable[str]) -> dict[str, np.ndarray]:
    """Scores by mode, from those of the objectives: fused is the mean of both."""
    return {mode: (scores["masked"] + scores["causal"]) / 2 if mode == "fused" else scores[mode] for mode in modes}


def objectives(modes: Iterable[str]) -> list[str]:
    """The objectives whose scores `modes` need."""
    needed = {part for mode in modes for part in (("masked", "causal") if mode == "fused" else (mode,))}
    return [name for name in MODES if name in needed]


def chosen_modes(mode: str, known: tuple[str, ...] = MODES) -> tuple[str, ...]:
    """The modes of a flag's value, which may be "all" of those that are known."""
    return known if mode == "all" else (mode,)


# Results


def correctness(scores: np.ndarray) -> np.ndarray:
    """How far the first of C choices wins: 1 where it has the highest score, 1 / k where k share it, else 0. [..., C]
    -> [...]; of a pair of sentences the good one is the first."""
    best = scores == scores.max(axis=-1, keepdims=True)
    return best[..., 0] / np.maximum(best.sum(axis=-1), 1)  # NaN is best nowhere


def accuracy(right: np.ndarray) -> Accuracy:
    """Mean of [n], each 0 to 1, with Wilson's (1927) score interval, which also holds near 0 and 1."""
    n, p = len(right), float(right.mean())
    centre, scale = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n), _Z / (1 + _Z**2 / n)
    half = scale * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return Accuracy(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), n)


def mean_accuracy(accuracies: Sequence[Accuracy]) -> Accuracy:
    """Mean of independent accuracies; its interval is recovered from theirs (MOVER: Zou and Donner, 2008)."""
    k, p = len(accuracies), sum(s.value for s in accuracies) / len(accuracies)
    below = math.sqrt(sum((s.value - s.low) ** 2 for s in accuracies)) / k
    above = math.sqrt(sum((s.high - s.value) ** 2 for s in accuracies)) / k
    return Accuracy(p, max(0.0, p - below), min(1.0, p + above), sum(s.pairs for s in accuracies))


def by_group(names: Sequence[str], right: np.ndarray) -> dict[str, Accuracy]:
    """The fraction of right pairs ([n], each 0 to 1) under each of names [n], in order of first appearance."""
    return {name: accuracy(right[index]) for name, index in members_of(names).items()}


def members_of(names: Iterable[str]) -> dict[str, list[int]]:
    """The numbers of what has each name, in order of first appearance."""
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(name, []).append(index)
    return members


def mean_of_paradigms(pairs: Sequence[Grouped], right: np.ndarray) -> Accuracy:
    """The headline number of BLiMP: every file weighs the same."""
    return mean_accuracy(list(by_group([pair.paradigm for pair in pairs], right).values()))


def grouping_fields(pairs: Sequence[Grouped]) -> list[str]:
    """Fields that put pairs into groups: text or yes/no, a few values, and other groups than the files."""
    fields = list(dict.fromkeys(key for pair in pairs for key in pair.fields))
    found = []
    for field in fields:
        having = [pair for pair in pairs if field in pair.fields]
        if not all(isinstance(pair.fields[field], str | bool) for pair in having):
            continue
        values = {pair.fields[field] for pair in having}
        splits = len({(pair.fields[field], pair.paradigm) for pair in having}) > len({p.paradigm for p in having})
        joins = len(values) < len({pair.paradigm for pair in having})
        if 1 < len(values) <= min(_MOST_VALUES, len(having) // 2) and (splits or joins):
            found.append(field)
    return found
