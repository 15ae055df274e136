"""A task for fine-tuning, its files, and what is checked in the files of every form of task."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.counter_rng import fold
from evaluation.generation import UsageError

# Forms of tasks: a label for texts; SuperGLUE's others (finetune_superglue.py); labels for words; embeddings of texts.
TEXTS, WORDS, CHOICES, QUESTIONS, RECORD = "texts", "words", "choices", "questions", "record"
TAGS, EMBEDDINGS = "tags", "embeddings"
CONLL = (".conll", ".conllu")
_SETTINGS = {"texts", "label", "kind", "metric", "labels", "positive", "class_weights", "separator"}
_FIELD = re.compile(r"\{(\w+)\}")
_KINDS = ("classification", "regression", EMBEDDINGS)

Rows = list[tuple[int, dict[str, Any]]]  # numbers of lines, from 1, and the objects in them


class TaskError(UsageError):
    """A task cannot be used; the message is one sentence with the file, the line and the remedy."""


@dataclass(frozen=True)
class Examples:
    """Texts of each example, and labels [n]: int64 classes, float64 numbers, or objects: int64 arrays of words' tags.
    groups: int64 [n], the question or query that an answer belongs to. details: what else a form needs of each."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    groups: np.ndarray | None = None
    details: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: np.ndarray) -> Examples:
        """The examples at `indices`, in that order."""
        groups = None if self.groups is None else self.groups[indices]
        details = None if self.details is None else [self.details[index] for index in indices]
        return Examples([self.texts[index] for index in indices], self.labels[indices], groups, details)


@dataclass(frozen=True)
class Task:
    """One task. classes: the labels' names in the order of their numbers; empty for regression. positive: whose F1.

    weights: of the classes in the loss; () for 1. test: examples without labels. separator: what stands between words
    that have labels."""

    name: str
    classes: tuple[str, ...]
    positive: int
    metric: str
    train: Examples
    valid: Examples
    form: str = TEXTS
    weights: tuple[float, ...] = ()
    test: Examples | None = None
    separator: str = " "

    @property
    def chosen_by(self) -> str:
        """The measure that decides on held-out examples; those of embeddings have no scores."""
        return "accuracy" if self.form == EMBEDDINGS else self.metric

    def balanced(self) -> Task:
        """With classes that weigh n / (classes x examples of the class): each has the same sum."""
        if not self.classes or self.form == CHOICES:
            return self
        flat = np.concatenate(list(self.train.labels)) if self.form == TAGS else self.train.labels
        counts = np.maximum(1, np.bincount(flat, minlength=len(self.classes)))
        return replace(self, weights=tuple((len(flat) / (len(counts) * counts)).tolist()))


def find_tasks(folder: Path) -> list[tuple[str, Path, Path]]:
    """Name, train and validation file of each task: subfolders with train.jsonl, or files NAME.train.jsonl. .conll and
    .conllu stand for .jsonl, too. Raises TaskError where there is none, or one has no validation file."""
    if not folder.is_dir():
        raise TaskError(f"--tasks is {folder}: there is no such folder.")
    found = []
    for suffix in (".jsonl", *CONLL):
        found += [(path.parent.name, path, sibling(path, "valid")) for path in sorted(folder.glob(f"*/train{suffix}"))]
        for path in sorted(folder.glob(f"*.train{suffix}")):
            found.append((path.name.removesuffix(f".train{suffix}"), path, sibling(path, "valid")))
    if not found:
        raise TaskError(f"--tasks is {folder}: it holds no NAME/train.jsonl and no NAME.train.jsonl.")
    for name, train, valid in found:
        if not valid.is_file():
            raise TaskError(f"{valid}: is missing; task {name} has {train.name} and needs this file to report on.")
    repeated = [name for name, count in Counter(name for name, *_ in found).items() if count > 1]
    if repeated:
        raise TaskError(f"--tasks is {folder}: task {repeated[0]} is there twice, as a folder or as files; remove one.")
    return found


def sibling(train: Path, part: str, suffix: str = "") -> Path:
    """The file of another part of a task, such as valid.jsonl or NAME.task.json; it need not be there."""
    begin, found, _ = train.name.rpartition("train.")
    return train.with_name(f"{begin if found else ''}{part}{suffix or train.suffix}")


def split(examples: Examples, classes: int, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """The rest of the training examples, and a held-out part with `fraction` of each class, one at least. Examples with
    groups stay together. A pure function of its arguments; both parts keep the file's order."""
    if examples.groups is not None:
        numbers = np.unique(examples.groups)
        _, held = split(Examples([()] * len(numbers), numbers), 0, fraction, seed)
        inside = np.isin(examples.groups, held.labels)
        return examples.subset(np.flatnonzero(~inside)), examples.subset(np.flatnonzero(inside))
    held_out = np.zeros(len(examples), dtype=bool)
    groups = examples.labels if classes else np.zeros(len(examples), dtype=np.int64)
    key = fold(fold(seed, 1), len(examples))
    for group in np.unique(groups):
        members = sorted(np.flatnonzero(groups == group).tolist(), key=lambda index: fold(key, index))
        held_out[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    return examples.subset(np.flatnonzero(~held_out)), examples.subset(np.flatnonzero(held_out))


# Reading


def read_settings(path: Path) -> dict[str, Any]:
    """A task.json. Raises TaskError."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read as JSON ({error}).") from None
    if not isinstance(settings, dict) or settings.keys() - _SETTINGS:
        raise TaskError(f"{path}: must be a JSON object with keys among {', '.join(sorted(_SETTINGS))}.")
    texts = settings.get("texts", ["{x}"])
    if not (isinstance(texts, list) and len(texts) in (1, 2, 3) and all(isinstance(t, str) for t in texts)):
        raise TaskError(f'{path}: "texts" must be one or two strings such as "{{sentence}}" (three of embeddings).')
    if len(texts) == 3 and settings.get("kind") != EMBEDDINGS:
        raise TaskError(f'{path}: "texts" are three, which takes "kind": "embeddings"; give one or two.')
    if settings.get("kind", "regression") not in _KINDS:
        raise TaskError(f'{path}: "kind" is {settings["kind"]!r}; choose among {", ".join(_KINDS)}.')
    for key in ("label", "metric", "separator"):
        if not isinstance(settings.get(key, ""), str):
            raise TaskError(f'{path}: "{key}" is {settings[key]!r}; it must be a string.')
    labels = settings.get("labels", [0, 1])
    if not isinstance(labels, list) or len(set(map(label_name, labels))) != len(labels) or len(labels) < 2:
        raise TaskError(f'{path}: "labels" must be a list of two or more different labels.')
    if not isinstance(settings.get("class_weights", {}), dict):
        raise TaskError(f'{path}: "class_weights" must be an object of numbers by label.')
    return settings


def read_rows(path: Path, fewest: int) -> Rows:
    """Line number, from 1, and object of every line of JSON that is not blank. Raises TaskError."""
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskError(f"{path}:{number}: is not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise TaskError(f"{path}:{number}: is not a JSON object with texts and a label.")
        rows.append((number, row))
    check_number(path, rows, fewest)
    return rows


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises TaskError."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read().split("\n")
    except UnicodeDecodeError:
        raise TaskError(f"{path}: is not UTF-8 text; convert it, for example with iconv.") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}).") from None


def check_number(path: Path, rows: Rows, fewest: int) -> None:
    """Raises TaskError where a file has too few examples."""
    if len(rows) < fewest:
        raise TaskError(f"{path}: has {len(rows)} examples; a task needs at least {fewest} there.")


def check_fields(path: Path, rows: Rows, train: Path, fields: set[str], texts: set[str], labels: set[str]) -> None:
    """Every row has the fields of the first training row, and those that texts are made of are strings."""
    for number, row in rows:
        missing = sorted((texts | labels) - row.keys()) or sorted(fields - row.keys())
        if missing:
            raise TaskError(f'{path}:{number}: has no field "{missing[0]}"; every line needs the same fields.')
        extra = sorted(row.keys() - fields)
        if extra:
            raise TaskError(f'{path}:{number}: has a field "{extra[0]}" that the first line of {train} lacks.')
        for field in sorted(texts):
            if not isinstance(row[field], str):
                raise TaskError(f"{path}:{number}: {field} is {json.dumps(row[field])[:40]}; a text must be a string.")


def fields_in(templates: Iterable[str]) -> set[str]:
    """The fields of rows that templates of texts such as "{premise} {question}" name."""
    return {field for template in templates for field in _FIELD.findall(template)}


def fill(templates: Iterable[str], row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that templates make of a row."""
    return tuple(_FIELD.sub(lambda match: row[match[1]], template) for template in templates)


def label_name(value: Any) -> str:
    """A label as text."""
    return value if isinstance(value, str) else json.dumps(value)


def read_numbers(path: Path, rows: Rows, field: str) -> np.ndarray:
    """The finite numbers in a field, float64 [n]. Raises TaskError."""
    for line, row in rows:
        value = row[field]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"{path}:{line}: {field} is {json.dumps(value)}; regression needs a finite number.")
    return np.array([row[field] for _, row in rows], dtype=np.float64)


def class_weights(train: Path, classes: tuple[str, ...], settings: Mapping[str, Any]) -> tuple[float, ...]:
    """The weights of "class_weights" in task.json, 1 for classes that it leaves out; () without it."""
    given = settings.get("class_weights", {})
    for name, weight in given.items():
        if name not in classes or isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise TaskError(
                f'{sibling(train, "task", ".json")}: "class_weights" has {name}: {weight!r}; it takes numbers above 0 '
                f"by label, and the labels are {', '.join(classes) or 'numbers'}."
            )
    return tuple(float(given.get(name, 1)) for name in classes) if given else ()


def chosen_metric(train: Path, settings: Mapping[str, Any], usual: str, known: tuple[str, ...], kind: str) -> str:
    """The measure that a task is reported by. Raises TaskError for one that does not fit."""
    metric = settings.get("metric", usual)
    if metric not in known:
        where = sibling(train, "task", ".json") if "metric" in settings else train
        raise TaskError(f'{where}: metric "{metric}" does not fit {kind}; choose among {", ".join(known)}.')
    return metric
