"""Labels for words (NER, POS): files in CoNLL's columns or JSON lines, and entity F1 as seqeval counts it.

A CoNLL file has a word a line, its columns between white space, and an empty line behind each sentence; the word is in
the first column and its tag in the last (`.conllu`: FORM and UPOS, ranges and empty nodes left out). JSON lines have
`tokens` and `tags` (or `ner_tags`, `pos_tags`, `labels`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.finetune_task import (
    TAGS,
    Examples,
    Rows,
    Task,
    TaskError,
    check_number,
    chosen_metric,
    class_weights,
    label_name,
    read_lines,
)

TAG_FIELDS = ("tags", "ner_tags", "pos_tags", "labels")
OUTSIDE = "O"
_ENTITY_TAG = re.compile(r"[BIESLU]-.+")
_SAME = str.maketrans("LU", "ES")  # BILOU's names for the last and the only word


def read_conll(path: Path, fewest: int) -> Rows:
    """The number of the first line, from 1, and {"tokens", "tags"} of every sentence. Raises TaskError."""
    rows: Rows = []
    universal, words, tags, first = path.suffix == ".conllu", [], [], 1
    for number, line in enumerate([*read_lines(path), ""], start=1):
        columns = line.split("\t") if universal else line.split()
        if not line.strip() or columns[0] == "-DOCSTART-":
            if words:
                rows.append((first, {"tokens": words, "tags": tags}))
            words, tags, first = [], [], number + 1
            continue
        if universal and (line.startswith("#") or not columns[0].isdigit()):
            continue
        if len(columns) < (4 if universal else 2):
            raise TaskError(f"{path}:{number}: has {len(columns)} column(s); a line holds a word and, last, its tag.")
        words.append(columns[1] if universal else columns[0])
        tags.append(columns[3] if universal else columns[-1])
    check_number(path, rows, fewest)
    return rows


def read_tags(name: str, files: Sequence[tuple[Path, Rows]], settings: Mapping[str, Any]) -> Task:
    """The task of train, validation and, where there is a third file, test. Raises TaskError."""
    train, first = files[0][0], files[0][1][0][1]
    field = settings.get("label") or next((key for key in TAG_FIELDS if key in first), "tags")
    given = settings.get("labels")
    for number, (path, rows) in enumerate(files):
        _check_words(path, rows, field if number < 2 else None)
    seen = sorted({_tag_name(tag, given) for _, row in files[0][1] for tag in row[field]})
    classes = tuple(map(label_name, given or seen))
    known = ("f1", "precision", "recall", "accuracy") if has_entities(classes) else ("accuracy",)
    metric = chosen_metric(train, settings, known[0], known, "these tags")
    numbers, examples = {tag: number for number, tag in enumerate(classes)}, []
    for index, (path, rows) in enumerate(files):
        labels = np.empty(len(rows), dtype=object)
        for place, (line, row) in enumerate(rows):
            tags = [_tag_name(tag, given) for tag in row[field]] if index < 2 else classes[:1] * len(row["tokens"])
            if unknown := [tag for tag in tags if tag not in numbers]:
                raise TaskError(f"{path}:{line}: {field} has {unknown[0]}; the tags are {', '.join(classes)[:200]}.")
            labels[place] = np.array([numbers[tag] for tag in tags])
        examples.append(Examples([tuple(row["tokens"]) for _, row in rows], labels))
    weights, test = class_weights(train, classes, settings), examples[2] if len(examples) > 2 else None
    separator = settings.get("separator", " ")
    return Task(name, classes, 0, metric, examples[0], examples[1], TAGS, weights, test, separator)


def _check_words(path: Path, rows: Rows, field: str | None) -> None:
    """Every row has words, and a tag for each in the field. Raises TaskError."""
    for number, row in rows:
        words, tags = row.get("tokens"), row.get(field or "")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise TaskError(f'{path}:{number}: "tokens" must be a list of words that are not empty.')
        if field and not (isinstance(tags, list) and len(tags) == len(words)):
            raise TaskError(f'{path}:{number}: "{field}" must be a list of {len(words)} tags, one for each word.')


def _tag_name(tag: Any, names: Sequence[Any] | None) -> str:
    """A tag's name; whole numbers count the "labels" of task.json where these are names."""
    if names and isinstance(tag, int) and tag not in names and 0 <= tag < len(names):
        return label_name(names[tag])
    return label_name(tag)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Entities (type, first word, last word) in tags of IOB1, IOB2, IOE, IOBES or BILOU, as seqeval finds them.

    An entity goes on where I- or E- of its type follows on B- or I-; whatever else does not begin with O begins one, so
    that I- after O is an entity (seqeval 1.2.2, its default mode; conlleval of CoNLL-2000)."""
    found, begin, before, kind = set(), 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        letter, _, name = tag.partition("-")
        letter = letter.translate(_SAME)
        inside = letter in ("I", "E") and before in ("B", "I") and name == kind
        if before != OUTSIDE and not inside:
            found.add((kind, begin, index - 1))
        if letter != OUTSIDE and not inside:
            begin = index
        before, kind = letter, name
    return found


def has_entities(classes: Sequence[str]) -> bool:
    """Whether tags are those of entities: O, and others with B-, I- and so on."""
    others = [name for name in classes if name != OUTSIDE]
    return OUTSIDE in classes and bool(others) and all(map(_ENTITY_TAG.fullmatch, others))


def tag_measures(predicted: Sequence[np.ndarray], gold: Sequence[np.ndarray], classes: Sequence[str]) -> dict:
    """Accuracy by word; where tags are of entities also their precision, recall and F1 over all sentences together."""
    right = np.concatenate([a == b for a, b in zip(predicted, gold, strict=True)])
    found = {"accuracy": float(right.mean())}
    if has_entities(classes):
        counts: Counter[str] = Counter()
        for one, other in zip(predicted, gold, strict=True):
            ours, theirs = (entities([str(classes[number]) for number in tags]) for tags in (one, other))
            counts.update(ours=len(ours), theirs=len(theirs), both=len(ours & theirs))
        total = counts["ours"] + counts["theirs"]
        found["f1"] = 2 * counts["both"] / total if total else 0.0
        found["precision"] = counts["both"] / counts["ours"] if counts["ours"] else 0.0
        found["recall"] = counts["both"] / counts["theirs"] if counts["theirs"] else 0.0
    return found


def first_pieces(offsets: Sequence[tuple[int, int]], words: Sequence[str], separator: str) -> list[int | None]:
    """For each of `words`, joined by `separator`, its first token by the tokens' offsets [n] in characters. A word's
    first token is the first with a character of the word; None where the tokenizer made nothing of it."""
    found: list[int | None] = []
    begin = token = 0
    for word in words:
        end = begin + len(word)
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        own = (n for n in range(token, len(offsets)) if offsets[n][1] > max(begin, offsets[n][0]))
        here = next(own, None)
        found.append(here if here is not None and offsets[here][0] < end else None)
        begin = end + len(separator)
    return found


def row_pieces(pieces: Sequence[int | None], tokens: int, room: int) -> list[tuple[int, int]]:
    """Stretches [first token, end) of at most `room` tokens for the rows of a sentence, cut before first pieces. A word
    of more tokens than that is cut inside."""
    starts = sorted({piece for piece in pieces if piece is not None} | {0})
    found, begin = [], 0
    while tokens - begin > room:
        end = max((start for start in starts if begin < start <= begin + room), default=begin + room)
        found.append((begin, end))
        begin = end
    return [*found, (begin, tokens)]
