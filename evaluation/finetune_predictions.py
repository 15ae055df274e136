"""Predictions for test servers, each task's in its own form: GLUE's TSV, SuperGLUE's JSON lines, CoNLL columns.

Files are called as the servers want them (CoLA.tsv, BoolQ.jsonl), those of other tasks NAME.jsonl or NAME.conll. RTE,
which both have, gets both. Labels that are numbers get the servers' names, in the order of the `datasets` library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic_io import write_atomically
from evaluation.finetune_forms import Encoded, Outputs, predicted_tags
from evaluation.finetune_task import CHOICES, EMBEDDINGS, QUESTIONS, RECORD, TAGS, Examples, Task

_GLUE = {
    "cola": "CoLA", "sst2": "SST-2", "sst-2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "sts-b": "STS-B", "qqp": "QQP",
    "mnli": "MNLI-m", "mnli-m": "MNLI-m", "mnli-mm": "MNLI-mm", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI",
    "ax": "AX",
}  # fmt: skip
_SUPERGLUE = {
    "boolq": "BoolQ", "cb": "CB", "copa": "COPA", "multirc": "MultiRC", "record": "ReCoRD", "rte": "RTE", "wic": "WiC",
    "wsc": "WSC",
}  # fmt: skip
_ENTAILED = ("entailment", "not_entailment")
_THREE = ("entailment", "neutral", "contradiction")
_NAMES = {
    "mnli": _THREE, "mnli-m": _THREE, "mnli-mm": _THREE, "ax": _THREE, "qnli": _ENTAILED, "rte": _ENTAILED,
    "cb": ("entailment", "contradiction", "neutral"), "boolq": ("false", "true"), "wic": ("false", "true"),
    "wsc": ("False", "True"),
}  # fmt: skip


def write_predictions(folder: Path, task: Task, outputs: Outputs, encoded: Encoded) -> list[Path]:
    """Write what the model answers to the task's test examples; returns the files. Raises OSError."""
    assert task.test is not None
    assert task.form != EMBEDDINGS
    name, files = task.name.lower(), {}
    if task.form == TAGS:
        files[f"{task.name}.conll"] = _columns(task, predicted_tags(task, outputs, encoded, task.test), task.test)
    else:
        answers, known = _answers(task, np.stack(outputs)), task.form in (QUESTIONS, RECORD)
        if name in _GLUE and not known:
            lines = (f"{idx}\t{answer}" for idx, answer in answers)
            files[f"{_GLUE[name]}.tsv"] = "\n".join(["index\tprediction", *lines, ""])
        if name in _SUPERGLUE or name not in _GLUE:
            rows = _by_question(answers) if task.form == QUESTIONS else [{"idx": i, "label": a} for i, a in answers]
            files[f"{_SUPERGLUE.get(name, task.name)}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_atomically(folder / file, text.encode())
    return [folder / file for file in files]


def _answers(task: Task, outputs: np.ndarray) -> list[tuple[Any, Any]]:
    """Index and answer of each example, of ReCoRD of each query."""
    test = task.test
    assert test is not None
    assert test.details is not None
    indices = [each.get("idx", number) for number, each in enumerate(test.details)]
    if task.form == RECORD:
        assert test.groups is not None
        odds, best = outputs[:, 1] - outputs[:, 0], []
        for group in np.unique(test.groups):
            rows = np.flatnonzero(test.groups == group)
            best.append(rows[odds[rows].argmax()])
        return [(indices[row], test.details[row]["_answer"]) for row in best]
    if not task.classes:
        return list(zip(indices, [f"{value:.3f}" for value in outputs[:, 0]], strict=True))
    chosen = (outputs[..., 0] if task.form == CHOICES else outputs).argmax(axis=1).tolist()
    if task.form in (CHOICES, QUESTIONS):
        return list(zip(indices, chosen, strict=True))
    names, official = list(task.classes), _NAMES.get(task.name.lower(), ())
    if names == [str(number) for number in range(len(official))]:
        names = list(official)
    elif official == _NAMES["wsc"]:
        names = [each.capitalize() for each in names]
    return list(zip(indices, [names[number] for number in chosen], strict=True))


def _by_question(answers: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """MultiRC's answers under their questions and passages."""
    found: dict[Any, dict[Any, list]] = {}
    for idx, label in answers:
        of = found.setdefault(idx["paragraph"], {}).setdefault(idx["question"], [])
        of.append({"idx": idx["answer"], "label": label})
    return [
        {"idx": passage, "passage": {"questions": [{"idx": q, "answers": a} for q, a in questions.items()]}}
        for passage, questions in found.items()
    ]


def _columns(task: Task, tags: list[np.ndarray], test: Examples) -> str:
    """A word and its tag a line, an empty line behind each sentence."""
    sentences = (
        "".join(f"{word}\t{task.classes[number]}\n" for word, number in zip(words, numbers, strict=True))
        for words, numbers in zip(test.texts, tags, strict=True)
    )
    return "".join(f"{sentence}\n" for sentence in sentences)
