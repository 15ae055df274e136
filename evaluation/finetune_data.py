"""Tasks for fine-tuning: JSONL files of texts and labels, checked line by line before anything is trained."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.counter_rng import fold
from evaluation.finetune_metrics import CLASSIFICATION, REGRESSION
from evaluation.generation import UsageError

# How the texts of a task are made from a row's fields: the first of these whose fields the rows have. They are those
# of GLUE and SuperGLUE; task.json's "texts" gives others.
TEMPLATES = (
    ("{word}: {sentence1}", "{sentence2}"),
    ("{sentence1}", "{sentence2}"),
    ("{premise}", "{hypothesis}"),
    ("{question1}", "{question2}"),
    ("{question}", "{sentence}"),
    ("{paragraph}", "{question} {answer}"),
    ("{passage}", "{question}"),
    ("{text}", "{span2_text} refers to {span1_text}."),
    ("{sentence}",),
    ("{text}",),
)
# Fields of tasks that no label of a text solves, and what these are.
_OTHER_FORMS = (
    ({"choice1", "choice2"}, "a choice between texts, as in COPA"),
    ({"query", "entities"}, "a gap to be filled from a list, as in ReCoRD"),
    ({"context", "answers"}, "an answer to be found in a text, as in SQuAD"),
    ({"tokens"}, "a label for each word, as in tagging"),
)
# The measure by which a task of this name is reported; others by accuracy or, where labels are numbers, spearman.
USUAL_METRICS = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "spearman", "sts-b": "spearman"}

_SETTINGS = {"texts", "label", "kind", "metric", "labels", "positive"}
_FEWEST_TRAIN, _FEWEST_VALID, _MOST_CLASSES = 10, 2, 200
_FIELD = re.compile(r"\{(\w+)\}")


class TaskError(UsageError):
    """A task cannot be used; the message is one sentence with the file, the line and the remedy."""


@dataclass(frozen=True)
class Examples:
    """Texts, one or two for each example, and labels [n]: int64 classes, or float64 numbers."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: np.ndarray) -> Examples:
        """The examples at `indices`, in that order."""
        return Examples([self.texts[index] for index in indices], self.labels[indices])


@dataclass(frozen=True)
class Task:
    """One task. classes: the labels' names in the order of their numbers; empty for regression. positive: whose F1."""

    name: str
    classes: tuple[str, ...]
    positive: int
    metric: str
    train: Examples
    valid: Examples


def find_tasks(folder: Path) -> list[tuple[str, Path, Path, Path]]:
    """Name, train, valid and settings file of each task: subfolders with train.jsonl, or files NAME.train.jsonl.

    Raises TaskError where there is none, or one has no validation file.
    """
    if not folder.is_dir():
        raise TaskError(f"--tasks is {folder}: there is no such folder.")
    found = [
        (path.parent.name, path, path.with_name("valid.jsonl"), path.with_name("task.json"))
        for path in sorted(folder.glob("*/train.jsonl"))
    ]
    for path in sorted(folder.glob("*.train.jsonl")):
        name = path.name.removesuffix(".train.jsonl")
        found.append((name, path, path.with_name(f"{name}.valid.jsonl"), path.with_name(f"{name}.task.json")))
    if not found:
        raise TaskError(f"--tasks is {folder}: it holds no NAME/train.jsonl and no NAME.train.jsonl.")
    for name, train, valid, _ in found:
        if not valid.is_file():
            raise TaskError(f"{valid}: is missing; task {name} has {train.name} and needs this file to report on.")
    repeated = [name for name, count in Counter(name for name, *_ in found).items() if count > 1]
    if repeated:
        raise TaskError(f"--tasks is {folder}: task {repeated[0]} is there both as a folder and as files; remove one.")
    return found


def read_task(name: str, train: Path, valid: Path, settings_path: Path | None = None) -> Task:
    """The task in two JSONL files, with the settings of a task.json where there is one. Raises TaskError."""
    settings = _read_settings(settings_path) if settings_path and settings_path.exists() else {}
    files = [(train, _rows(train, _FEWEST_TRAIN)), (valid, _rows(valid, _FEWEST_VALID))]
    first, field = files[0][1][0][1], settings.get("label", "label")
    templates = _templates(train, set(first), settings)
    text_fields = {found for template in templates for found in _FIELD.findall(template)}
    for path, rows in files:
        _check_fields(path, rows, train, set(first), text_fields, field)
    labels = [row[field] for _, row in files[0][1]]
    kind = settings.get("kind", "regression" if all(isinstance(v, float) for v in labels) else "classification")
    classes = _classes(train, labels, settings) if kind == "classification" else ()
    examples = []
    for path, rows in files:
        numbers = _class_numbers(path, rows, field, classes, train) if classes else _floats(path, rows, field)
        if (path is train or not classes) and len(np.unique(numbers)) < 2:
            raise TaskError(f"{path}: every example has the same label; there is nothing to learn or to measure.")
        examples.append(Examples([_fill(templates, row) for _, row in rows], numbers))
    _check_counts(train, examples[0].labels, classes)
    where = settings_path if settings_path and "metric" in settings else train
    metric = settings.get("metric") or USUAL_METRICS.get(name.lower(), "accuracy" if classes else "spearman")
    known = CLASSIFICATION if classes else REGRESSION
    if metric not in known:
        raise TaskError(f'{where}: metric "{metric}" does not fit {kind}; choose among {", ".join(known)}.')
    positive = _label_name(settings.get("positive", classes[-1] if classes else ""))
    if classes and positive not in classes:
        raise TaskError(f'{settings_path}: "positive" is {positive}; the labels are {", ".join(classes)}.')
    return Task(name, classes, classes.index(positive) if classes else 0, metric, *examples)


def split(examples: Examples, classes: int, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """The rest of the training examples, and a held-out part with `fraction` of each class, one at least.

    A pure function of its arguments; both parts keep the file's order.
    """
    held_out = np.zeros(len(examples), dtype=bool)
    groups = examples.labels if classes else np.zeros(len(examples), dtype=np.int64)
    key = fold(fold(seed, 1), len(examples))
    for group in np.unique(groups):
        members = sorted(np.flatnonzero(groups == group).tolist(), key=lambda index: fold(key, index))
        held_out[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    return examples.subset(np.flatnonzero(~held_out)), examples.subset(np.flatnonzero(held_out))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read as JSON ({error}).") from None
    if not isinstance(settings, dict) or settings.keys() - _SETTINGS:
        raise TaskError(f"{path}: must be a JSON object with keys among {', '.join(sorted(_SETTINGS))}.")
    texts = settings.get("texts", ["{x}"])
    if not (isinstance(texts, list) and len(texts) in (1, 2) and all(isinstance(t, str) for t in texts)):
        raise TaskError(f'{path}: "texts" must be one or two strings such as "{{sentence}}".')
    if settings.get("kind", "regression") not in ("classification", "regression"):
        raise TaskError(f'{path}: "kind" is {settings["kind"]!r}; choose "classification" or "regression".')
    for key in ("label", "metric"):
        if not isinstance(settings.get(key, ""), str):
            raise TaskError(f'{path}: "{key}" is {settings[key]!r}; it must be a string.')
    labels = settings.get("labels", [0, 1])
    if not isinstance(labels, list) or len(set(map(_label_name, labels))) != len(labels) or len(labels) < 2:
        raise TaskError(f'{path}: "labels" must be a list of two or more different labels.')
    return settings


def _rows(path: Path, fewest: int) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and object of every line that is not blank."""
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise TaskError(f"{path}:{number}: is not JSON ({error}).") from None
                if not isinstance(row, dict):
                    raise TaskError(f"{path}:{number}: is not a JSON object with texts and a label.")
                rows.append((number, row))
    except UnicodeDecodeError:
        raise TaskError(f"{path}: is not UTF-8 text; convert it, for example with iconv.") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}).") from None
    if len(rows) < fewest:
        raise TaskError(f"{path}: has {len(rows)} examples; a task needs at least {fewest} there.")
    return rows


def _templates(path: Path, fields: set[str], settings: dict[str, Any]) -> tuple[str, ...]:
    if "texts" in settings:
        return tuple(settings["texts"])
    for templates in TEMPLATES:
        if all(field in fields for text in templates for field in _FIELD.findall(text)):
            return templates
    for having, form in _OTHER_FORMS:
        if having <= fields:
            raise TaskError(
                f"{path}:1: the fields {', '.join(sorted(having))} ask for {form}, and only labels of whole texts are "
                'learnt here; leave the task out (--only names the others), or give "texts" in task.json.'
            )
    raise TaskError(
        f"{path}:1: the fields {', '.join(sorted(fields))} hold no text under a known name (sentence; sentence1 and "
        'sentence2; ...); rename them, or give "texts" in task.json.'
    )


def _check_fields(path: Path, rows: list, train: Path, fields: set[str], texts: set[str], label: str) -> None:
    """Every row has the fields of the first training row, and those that texts are made of are strings."""
    for number, row in rows:
        missing = sorted((texts | {label}) - row.keys()) or sorted(fields - row.keys())
        if missing:
            raise TaskError(f'{path}:{number}: has no field "{missing[0]}"; every line needs the same fields.')
        extra = sorted(row.keys() - fields)
        if extra:
            raise TaskError(f'{path}:{number}: has a field "{extra[0]}" that the first line of {train} lacks.')
        for field in sorted(texts):
            if not isinstance(row[field], str):
                raise TaskError(f"{path}:{number}: {field} is {json.dumps(row[field])[:40]}; a text must be a string.")


def _fill(templates: tuple[str, ...], row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(_FIELD.sub(lambda match: row[match[1]], template) for template in templates)


def _label_name(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _classes(path: Path, labels: list[Any], settings: dict[str, Any]) -> tuple[str, ...]:
    if "labels" in settings:
        return tuple(_label_name(value) for value in settings["labels"])
    names = {_label_name(value) for value in labels}
    if len(names) > _MOST_CLASSES:
        raise TaskError(
            f"{path}: has {len(names)} different labels; where they are numbers to predict, set "
            '"kind": "regression" in task.json.'
        )
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in labels)
    return tuple(sorted(names, key=(lambda name: int(name)) if whole else (lambda name: name)))


def _class_numbers(path: Path, rows: list, field: str, classes: tuple[str, ...], train: Path) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(classes)}
    found = []
    for line, row in rows:
        if not isinstance(row[field], str | int | float) or _label_name(row[field]) not in numbers:
            raise TaskError(
                f"{path}:{line}: {field} is {json.dumps(row[field])}; the labels"
                f"{'' if path == train else f' of {train}'} are {', '.join(classes)}."
            )
        found.append(numbers[_label_name(row[field])])
    return np.array(found, dtype=np.int64)


def _floats(path: Path, rows: list, field: str) -> np.ndarray:
    for line, row in rows:
        value = row[field]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"{path}:{line}: {field} is {json.dumps(value)}; regression needs a finite number.")
    return np.array([row[field] for _, row in rows], dtype=np.float64)


def _check_counts(train: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    """Each class has an example to learn from and one to hold out."""
    for number, count in enumerate(np.bincount(labels, minlength=len(classes)).tolist() if classes else []):
        if count < 2:
            raise TaskError(
                f"{train}: label {classes[number]} occurs {'once' if count else 'never'}; each needs two examples, one "
                "to learn from and one to choose settings on."
            )
