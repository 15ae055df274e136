"""What forms of tasks do differently: the rows of an example, its loss, and what is measured of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from data.special_tokens import SpecialTokens, special_tokens
from evaluation.finetune_embeddings import contrastive_loss, embedding_measures
from evaluation.finetune_metrics import measures
from evaluation.finetune_superglue import SPANS, grouped_measures
from evaluation.finetune_tags import OUTSIDE, first_pieces, row_pieces, tag_measures
from evaluation.finetune_task import CHOICES, EMBEDDINGS, QUESTIONS, RECORD, TAGS, TEXTS, WORDS, Examples, Task
from evaluation.generation import UsageError

_IGNORED = -100  # the label of a token that is not the first of a word
Outputs = list[np.ndarray]  # of each example: scores [outputs]; of choices [C, 1], words [T, tags], embeddings [K, D]


@dataclass(frozen=True)
class Encoded:
    """Rows of token ids, `per` for each example, one after the other; labels [n] on the CPU.

    cut: how many rows had to be cut to fit. Of words' labels an example is a stretch of a sentence, and `words` says of
    each which sentence it is of and, for its words, their numbers there and the columns of their first tokens. spans:
    columns [begin, end) of WiC's words."""

    rows: list[list[int]]
    labels: Tensor
    cut: int
    per: int = 1
    words: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    spans: list[list[tuple[int, int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows) // self.per

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example's longest row, times its rows."""
        rows, per = self.rows, self.per
        return [per * max(map(len, rows[first : first + per])) for first in range(0, len(rows), per)]


def outputs_of(task: Task) -> int:
    """How many scores the head gives."""
    return 1 if task.form == CHOICES else max(1, len(task.classes))


def encode(
    examples: Examples,
    tokenizer: Tokenizer,
    max_length: int,
    special: SpecialTokens | None = None,
    form: str = TEXTS,
    separator: str = " ",
) -> Encoded:
    """Rows `<s> text </s>` or `<s> first </s> second </s>`; the longer text of a row that does not fit loses its end.

    Words with labels are cut into several rows instead. Raises UsageError where the tokenizer lacks these tokens, or
    WiC's word is cut off."""
    ids = (special or special_tokens(tokenizer.to_str())).ids
    if "bos" not in ids or "eos" not in ids:
        raise UsageError(
            "the model's tokenizer has no tokens for bos and eos, which rows of fine-tuning begin and end with."
        )
    if form == TAGS:
        return _encode_words(examples, tokenizer, max_length, ids["bos"], ids["eos"], separator)
    texts, per = examples.texts, 1
    if form == CHOICES:  # (premise, choice, choice): a row for each choice
        texts, per = [(first, each) for first, *choices in texts for each in choices], len(texts[0]) - 1
    elif form == EMBEDDINGS:
        texts, per = [(each,) for one in texts for each in one], len(texts[0])
    start, end, rows, cut, spans = ids["bos"], ids["eos"], [], 0, []
    encodings = iter(tokenizer.encode_batch([text for each in texts for text in each], add_special_tokens=False))
    for number, each in enumerate(texts):
        found = [next(encodings) for _ in each]
        parts, room = [encoding.ids for encoding in found], max_length - 1 - len(each)
        cut += sum(map(len, parts)) > room
        if len(parts) == 2:
            parts[0] = parts[0][: max(room - len(parts[1]), room - room // 2)]
            parts[1] = parts[1][: room - len(parts[0])]
        else:
            parts[0] = parts[0][:room]
        if form == WORDS:
            assert examples.details is not None
            places = [examples.details[number][name] for name in SPANS]
            spans.append(_columns(found, parts, places, each))
        rows.append([start, *(token for part in parts for token in (*part, end))])
    return Encoded(rows, torch.from_numpy(examples.labels), cut, per, spans=spans)


def _columns(found: list[Encoding], parts: list[list[int]], places: list[int], texts: Sequence[str]) -> list:
    """Columns [begin, end) in a row of two texts of the tokens with characters of each text's word."""
    columns, base = [], 1
    for number, (encoding, part) in enumerate(zip(found, parts, strict=True)):
        begin, end = places[2 * number : 2 * number + 2]
        own = [n for n, (a, b) in enumerate(encoding.offsets[: len(part)]) if max(a, begin) < min(b, end)]
        if not own:
            raise UsageError(
                f"the word at characters {begin} to {end} of {texts[number][:60]!r} has no token within --max_length."
            )
        columns.append((base + own[0], base + own[-1] + 1))
        base += len(part) + 1
    return columns


def _encode_words(
    examples: Examples, tokenizer: Tokenizer, max_length: int, start: int, end: int, separator: str
) -> Encoded:
    rows, labels, words, cut = [], [], [], 0
    encodings = tokenizer.encode_batch([separator.join(each) for each in examples.texts], add_special_tokens=False)
    for sentence, encoding in enumerate(encodings):
        pieces = first_pieces(encoding.offsets, examples.texts[sentence], separator)
        stretches = row_pieces(pieces, len(encoding.ids), max_length - 2)
        cut += len(stretches) > 1
        for begin, stop in stretches:
            inside = {n: piece for n, piece in enumerate(pieces) if piece is not None and begin <= piece < stop}
            own = list(inside)
            row = [start, *encoding.ids[begin:stop], end]
            rows.append(row)
            words.append((sentence, own, [piece + 1 - begin for piece in inside.values()]))
            label = np.full(len(row), _IGNORED)
            label[words[-1][2]] = examples.labels[sentence][own]
            labels.append(torch.from_numpy(label))
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED)
    return Encoded(rows, padded, cut, words=words)


def loss_of(task: Task, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The loss of a batch: outputs as of `Outputs` behind [B], labels of the examples where the outputs are."""
    if task.form == EMBEDDINGS:
        return contrastive_loss(outputs)
    if task.form == CHOICES:
        return F.cross_entropy(outputs[..., 0], labels)
    if task.form == TAGS:
        flat = labels[:, : outputs.shape[1]].flatten()
        total = F.cross_entropy(outputs[:, : labels.shape[1]].flatten(0, 1), flat, weights, reduction="sum")
        weight = (flat >= 0).sum() if weights is None else (weights[flat.clamp(min=0)] * (flat >= 0)).sum()
        return total / weight.clamp(min=1e-6)  # a row may have no word
    if not task.classes:
        return F.mse_loss(outputs[:, 0], labels)
    return F.cross_entropy(outputs, labels, weights)


def task_measures(task: Task, outputs: Outputs, encoded: Encoded, examples: Examples) -> dict[str, float]:
    """All measures of a task from the outputs of the rows of `examples`."""
    labels = examples.labels
    if task.form == TAGS:
        return tag_measures(predicted_tags(task, outputs, encoded, examples), list(labels), task.classes)
    every = np.stack(outputs)
    if task.form == EMBEDDINGS:
        return embedding_measures(every, labels if labels.dtype == np.float64 else None)
    if task.form == CHOICES:
        return {"accuracy": float((every[..., 0].argmax(axis=1) == labels).mean())}
    if not task.classes:
        return measures(every[:, 0], labels, 0, 0)
    found = measures(every, labels, len(task.classes), task.positive)
    if task.form in (QUESTIONS, RECORD):
        assert examples.groups is not None
        assert examples.details is not None
        credit = np.array([each.get("_credit", (0, 0)) for each in examples.details])
        found |= grouped_measures(task.form, every, labels, examples.groups, credit)
    return found


def predicted_tags(task: Task, outputs: Outputs, encoded: Encoded, examples: Examples) -> list[np.ndarray]:
    """The predicted tag of every word of every sentence; a word without a token is outside, or has the first tag."""
    default = task.classes.index(OUTSIDE) if OUTSIDE in task.classes else 0
    found = [np.full(len(words), default) for words in examples.texts]
    for (sentence, own, columns), scores in zip(encoded.words, outputs, strict=True):
        found[sentence][own] = scores[columns].argmax(axis=1)
    return found
