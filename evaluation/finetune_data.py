"""Tasks of texts and labels, and of SuperGLUE, checked line by line before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.finetune_embeddings import read_embeddings
from evaluation.finetune_metrics import CLASSIFICATION, REGRESSION
from evaluation.finetune_superglue import SPANS, expand, form_of, misplaced
from evaluation.finetune_tags import read_conll, read_tags
from evaluation.finetune_task import (
    CHOICES,
    CONLL,
    EMBEDDINGS,
    QUESTIONS,
    RECORD,
    TEXTS,
    WORDS,
    Examples,
    Rows,
    Task,
    TaskError,
    check_fields,
    chosen_metric,
    class_weights,
    fields_in,
    fill,
    label_name,
    read_numbers,
    read_rows,
    read_settings,
)

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
    ("{passage}", "{query}"),
    ("{premise}", "{choice1}", "{choice2}"),
    ("{text}", "{span2_text} refers to {span1_text}."),
    ("{sentence}",),
    ("{text}",),
)
# The measure by which a task of this name is reported; others by accuracy or, where labels are numbers, spearman.
USUAL_METRICS = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "spearman", "sts-b": "spearman"}

_FEWEST_TRAIN, _FEWEST_VALID, _MOST_CLASSES = 10, 2, 200
_DETAILS = ("idx", "_group", "_answer", "_credit", *SPANS)  # of a row, beside its texts and label
_SQUAD = {"context", "answers"}  # fields of a task that no label of a text solves


def read_task(name: str, train: Path, valid: Path, settings_path: Path | None = None, test: Path | None = None) -> Task:
    """The task in two files, with the settings of a task.json and a test file without labels. Raises TaskError."""
    settings = read_settings(settings_path) if settings_path and settings_path.exists() else {}
    paths = [train, valid, *([test] if test else [])]
    fewest = (_FEWEST_TRAIN, _FEWEST_VALID, 1)
    files = [
        (path, (read_conll if path.suffix in CONLL else read_rows)(path, least))
        for path, least in zip(paths, fewest, strict=False)
    ]
    first = files[0][1][0][1]
    if "tokens" in first and "texts" not in settings:
        return read_tags(name, files, settings)
    if settings.get("kind") == EMBEDDINGS or ("texts" not in settings and {"anchor", "positive"} <= first.keys()):
        return read_embeddings(name, files, settings)
    form = TEXTS if "texts" in settings else form_of(first)
    if form not in (TEXTS, WORDS):
        files = [(path, _expanded(path, form, rows)) for path, rows in files]
        first = files[0][1][0][1]
    return _read_texts(name, form, files, set(first), settings, settings_path)


def _read_texts(
    name: str, form: str, files: list[tuple[Path, Rows]], fields: set[str], settings: dict, where: Path | None
) -> Task:
    train, field, examples = files[0][0], settings.get("label", "label"), []
    templates = ("{sentence1}", "{sentence2}") if form == WORDS else _templates(train, fields, settings)
    text_fields = fields_in(templates)
    for path, rows in files[:2]:
        check_fields(path, rows, train, fields, text_fields, {field})
    labels = [row[field] for _, row in files[0][1]]
    kind = settings.get("kind", "regression" if all(isinstance(v, float) for v in labels) else "classification")
    classes = _classes(train, labels, settings) if kind == "classification" else ()
    for path, rows in files[:2]:
        numbers = _class_numbers(path, rows, field, classes, train) if classes else read_numbers(path, rows, field)
        if (path is train or not classes) and len(np.unique(numbers)) < 2:
            raise TaskError(f"{path}: every example has the same label; there is nothing to learn or to measure.")
        examples.append(_examples(path, templates, rows, numbers, form))
    _check_counts(train, examples[0].labels, classes)
    test = None
    for path, rows in files[2:]:
        check_fields(path, rows, path, set(rows[0][1]), text_fields, set())
        test = _examples(path, templates, rows, np.zeros(len(rows), dtype=np.int64), form)
    usual = USUAL_METRICS.get(name.lower(), "accuracy" if classes else "spearman")
    known = CLASSIFICATION if classes else REGRESSION
    if form in (QUESTIONS, RECORD, CHOICES):
        usual, known = ("accuracy", ("accuracy",)) if form == CHOICES else ("f1_em", ("f1_em", "f1", "em", "accuracy"))
    if form in (QUESTIONS, RECORD, CHOICES) and len(classes) != 2:
        raise TaskError(f"{train}: has {len(classes)} labels; {form} of SuperGLUE has two, one for wrong and right.")
    metric = chosen_metric(train, settings, usual, known, kind)
    positive = label_name(settings.get("positive", classes[-1] if classes else ""))
    if classes and positive not in classes:
        raise TaskError(f'{where}: "positive" is {positive}; the labels are {", ".join(classes)}.')
    number = classes.index(positive) if classes else 0
    weights, (first, second) = class_weights(train, classes, settings), examples
    return Task(name, classes, number, metric, first, second, form, weights, test)


def _examples(path: Path, templates: tuple[str, ...], rows: Rows, labels: np.ndarray, form: str) -> Examples:
    texts = [fill(templates, row) for _, row in rows]
    details = [{key: row[key] for key in row if key in _DETAILS} for _, row in rows]
    if form == WORDS:
        for number, row in rows:
            if reason := misplaced(row):
                raise TaskError(f"{path}:{number}: {reason}.")
    groups = None
    if form in (QUESTIONS, RECORD):
        numbers = {group: number for number, group in enumerate(dict.fromkeys(each["_group"] for each in details))}
        groups = np.array([numbers[each["_group"]] for each in details])
    return Examples(texts, labels, groups, details)


def _expanded(path: Path, form: str, rows: Rows) -> Rows:
    found = []
    for number, row in rows:
        try:
            found += [(number, each) for each in expand(form, row)]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise TaskError(
                f"{path}:{number}: is not in the form of the first line, {form} of SuperGLUE "
                f"({type(error).__name__}: {error})."
            ) from None
    return found


def _templates(path: Path, fields: set[str], settings: dict[str, Any]) -> tuple[str, ...]:
    if "texts" in settings:
        return tuple(settings["texts"])
    for templates in TEMPLATES:
        if fields_in(templates) <= fields:
            return templates
    if fields >= _SQUAD:
        raise TaskError(
            f"{path}:1: the fields answers, context ask for an answer to be found in a text, as in SQuAD, which the "
            'exported model learns with transformers (examples/README.md); leave the task out, or give "texts" in '
            "task.json."
        )
    raise TaskError(
        f"{path}:1: the fields {', '.join(sorted(fields))} hold no text under a known name (sentence; sentence1 and "
        'sentence2; ...); rename them, or give "texts" in task.json.'
    )


def _classes(path: Path, labels: list[Any], settings: dict[str, Any]) -> tuple[str, ...]:
    if "labels" in settings:
        return tuple(label_name(value) for value in settings["labels"])
    names = {label_name(value) for value in labels}
    if len(names) > _MOST_CLASSES:
        raise TaskError(
            f"{path}: has {len(names)} different labels; where they are numbers to predict, set "
            '"kind": "regression" in task.json.'
        )
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in labels)
    return tuple(sorted(names, key=(lambda name: int(name)) if whole else (lambda name: name)))


def _class_numbers(path: Path, rows: Rows, field: str, classes: tuple[str, ...], train: Path) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(classes)}
    found = []
    for line, row in rows:
        if not isinstance(row[field], str | int | float) or label_name(row[field]) not in numbers:
            raise TaskError(
                f"{path}:{line}: {field} is {json.dumps(row[field])}; the labels"
                f"{'' if path == train else f' of {train}'} are {', '.join(classes)}."
            )
        found.append(numbers[label_name(row[field])])
    return np.array(found, dtype=np.int64)


def _check_counts(train: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    """Each class has an example to learn from and one to hold out."""
    for number, count in enumerate(np.bincount(labels, minlength=len(classes)).tolist() if classes else []):
        if count < 2:
            raise TaskError(
                f"{train}: label {classes[number]} occurs {'once' if count else 'never'}; each needs two examples, one "
                "to learn from and one to choose settings on."
            )
