"""SuperGLUE's tasks that are no label of a text (Wang et al., 2019, sections 3 and 4.1): COPA, MultiRC, ReCoRD, WiC.

As its baselines have them: COPA's choices stand each behind premise and question, and a softmax over their scores
chooses; each answer of MultiRC and each entity in the gap of ReCoRD is judged by itself, and ReCoRD's most likely one
is the answer; WiC's head also sees the marked words. The official files, which nest passages, questions and answers,
and the flat ones of the `datasets` library are read.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluation.finetune_task import CHOICES, QUESTIONS, RECORD, TEXTS, WORDS

_ASKED = {"cause": "What was the CAUSE of this?", "effect": "What happened as a RESULT?"}  # COPA's own words
SPANS = ("start1", "end1", "start2", "end2")
_GAP = "@placeholder"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def form_of(row: Mapping[str, Any]) -> str:
    """Which form a task has by the fields of its first line; "texts" for those that are labels of texts."""
    fields = row.keys()
    if {"word", "sentence1", "sentence2", *SPANS} <= fields:
        return WORDS
    if {"premise", "choice1", "choice2"} <= fields:
        return CHOICES
    if isinstance(row.get("passage"), dict) and "questions" in row["passage"]:
        return QUESTIONS
    if {"paragraph", "question", "answer"} <= fields and isinstance(row.get("idx"), dict):
        return QUESTIONS
    return RECORD if {"passage", "qas"} <= fields or {"passage", "query", "entities"} <= fields else TEXTS


def misplaced(row: Mapping[str, Any]) -> str:
    """What is wrong with the places of WiC's word in its two sentences; "" where nothing is."""
    for number, (begin, end) in enumerate(zip(SPANS[::2], SPANS[1::2], strict=True), start=1):
        places, text = (row[begin], row[end]), row[f"sentence{number}"]
        if not all(isinstance(place, int) for place in places) or not 0 <= row[begin] < row[end] <= len(text):
            return f"{begin} and {end} are {row[begin]!r} and {row[end]!r}, which are no characters of sentence{number}"
    return ""


def expand(form: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows for the head in a line of a file, each with "_group" and what else its form needs under names with "_".
    Raises KeyError, TypeError, ValueError or IndexError for a line of another form."""
    if form == CHOICES:
        return [{**row, "premise": f"{row['premise']} {_ASKED.get(row.get('question', ''), '')}".strip()}]
    return _answers(row) if form == QUESTIONS else _entities(row)


def _answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each answer of each question; those of a question are a group."""
    if isinstance(row.get("passage"), dict):
        found = []
        for question in row["passage"]["questions"]:
            for answer in question["answers"]:
                idx = {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]}
                texts = {
                    "paragraph": row["passage"]["text"],
                    "question": question["question"],
                    "answer": answer["text"],
                }
                label = {"label": answer["label"]} if "label" in answer else {}
                found += _answers({**texts, **label, "idx": idx})
        return found
    return [{**row, "_group": (row["idx"]["paragraph"], row["idx"]["question"])}]


def _entities(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each entity in the gap of each query, the entity in its place; those of a query are a group."""
    found = []
    if "qas" in row:
        text = row["passage"]["text"]
        names = [text[each["start"] : each["end"] + 1] for each in row["passage"]["entities"]]  # the end is included
        for asked in row["qas"]:
            answers = [answer["text"] for answer in asked["answers"]] if "answers" in asked else None
            found += _filled(text, asked["query"], names, answers, asked["idx"])
        return found
    idx = row["idx"]["query"] if isinstance(row.get("idx"), dict) else row.get("idx", id(row))
    return _filled(row["passage"], row["query"], row["entities"], row.get("answers") or None, idx)


def _filled(text: str, query: str, names: Sequence[str], answers: Sequence[str] | None, idx: Any) -> list[dict]:
    if _GAP not in query:
        raise ValueError(f'the query has no "{_GAP}"')
    return [
        {
            "passage": text,
            "query": query.replace(_GAP, name),
            "idx": idx,
            "_group": (idx,),
            "_answer": name,
            **({} if answers is None else {"label": name in answers, "_credit": answer_credit(name, answers)}),
        }
        for name in dict.fromkeys(names)
    ]


def answer_credit(guess: str, answers: Sequence[str]) -> tuple[float, float]:
    """F1 of the words and exact match of a guess, the best over `answers`, as SQuAD 1.1 and ReCoRD count. Case,
    punctuation and articles do not count (Rajpurkar et al., 2016, section 6)."""
    guessed, f1, exact = _words(guess), 0.0, 0.0
    for truth in map(_words, answers):
        common = sum((Counter(guessed) & Counter(truth)).values())
        f1, exact = max(f1, 2 * common / max(1, len(guessed) + len(truth))), max(exact, float(guessed == truth))
    return f1, exact


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def grouped_measures(
    form: str, outputs: np.ndarray, labels: np.ndarray, groups: np.ndarray, credit: np.ndarray
) -> dict:
    """What SuperGLUE reports beside the measures of rows, from scores [n, 2] of rows in groups [n].

    Of MultiRC: `em`, the fraction of questions with all answers judged right, and `f1_em`, the mean of it and F1 over
    all answers (F1a). Of ReCoRD, by credit [n, 2]: `f1` and `em` of each query's most likely entity, and their mean."""
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    if form == QUESTIONS:
        right = outputs.argmax(axis=1) == labels
        hits = 2 * np.sum((outputs.argmax(axis=1) == 1) & (labels == 1))
        marked = np.sum(outputs.argmax(axis=1) == 1) + np.sum(labels == 1)
        f1, em = float(hits / marked) if marked else 0.0, float(np.mean([right[rows].all() for rows in members]))
    else:
        chosen = [rows[(outputs[rows, 1] - outputs[rows, 0]).argmax()] for rows in members]
        f1, em = credit[chosen].mean(axis=0).tolist()
    return {"f1": f1, "em": em, "f1_em": (f1 + em) / 2}
