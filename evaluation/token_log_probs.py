"""Token log-probabilities of many sentences: causal, or each token masked in turn.

The model reads a sentence as `<s> tokens` and predicts the *next* token under both objectives: a token that is replaced
by `<mask>` is read from the output before it; the sum over tokens is then the pseudo-log-likelihood of Salazar et al.
(2020). `</s>` is read where it is asked for, and never scored. Documents never attend to each other, so sentences share
rows of one fixed shape; what stands beside a sentence changes nothing but rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.distributed import World
from training.stopping import until_stop

# What the model is called with: input_ids, document_ids, causal, target_positions, as LTGBert.forward.
Model = Callable[[Tensor, Tensor, bool, Tensor], Tensor]
_SPECIAL = -1  # the word that <s> and </s> belong to
_LABELS_AT_ONCE = 4096
_SIZES = 64  # of the labels of a batch


@dataclass(frozen=True)
class TokenizedSentences:
    """Token ids of S sentences, one after the other.

    ids: int64 [N]. words: int64 [N], the number of the word that each token belongs to. starts: int64 [S + 1].
    first, scored: int64 [S]; tokens first[s] .. scored[s] of sentence s are scored, maybe none; those before, of which
    token 0 is `<s>`, are only read."""

    ids: np.ndarray
    words: np.ndarray
    starts: np.ndarray
    first: np.ndarray
    scored: np.ndarray

    def __len__(self) -> int:
        return len(self.scored)

    @property
    def counts(self) -> np.ndarray:
        """How many tokens of each sentence are scored, int64 [S]."""
        return np.maximum(self.scored - self.first + 1, 0)


@dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens. eos is None where no `</s>` closes a text, as in pretraining with --no-document_end."""

    bos: int
    eos: int | None
    pad: int
    mask: int


@dataclass(frozen=True)
class BatchShape:
    """The fixed shape of what the model is given: `rows` rows of `length` tokens."""

    rows: int
    length: int

    def holding(self, longest: int) -> BatchShape:
        """The same number of tokens, in rows long enough for a sentence of `longest` tokens."""
        rows, length = self.rows, self.length
        while length < longest:
            rows, length = max(1, rows // 2), 2 * length
        return BatchShape(rows, length)


@dataclass(frozen=True)
class Scorer:
    """A model in evaluation mode on world.device, and how it is run. shape: rows grow where a sentence is longer.
    autocast: bf16. wanted: whether this rank wants to stop; all ranks then raise Abandoned at the next batch."""

    model: Model
    special: SpecialIds
    world: World
    shape: BatchShape
    autocast: bool = False
    wanted: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class _Documents:
    """Documents to fill rows with: the first `lengths` tokens of `sentences`, with token `masked` masked (0: none)."""

    sentences: np.ndarray
    lengths: np.ndarray
    masked: np.ndarray

    def take(self, index: np.ndarray | slice) -> _Documents:
        return _Documents(self.sentences[index], self.lengths[index], self.masked[index])


@dataclass(frozen=True)
class _Batch:
    """input_ids, document_ids: int64 [rows, length]. positions: int64 [M], flat, of the outputs that score. labels:
    int64 [M]. scored: int64 [M], the index in TokenizedSentences.ids of each scored token."""

    input_ids: Tensor
    document_ids: Tensor
    positions: Tensor
    labels: Tensor
    scored: Tensor

    def to(self, device: torch.device) -> _Batch:
        tensors = (self.input_ids, self.document_ids, self.positions, self.labels, self.scored)
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return _Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def encode_sentences(
    tokenizer: Tokenizer, texts: Sequence[str], special: SpecialIds, contexts: Sequence[int] | None = None
) -> TokenizedSentences:
    """Tokenise texts; words are what the tokenizer's pre-tokeniser cuts a text into.

    contexts: of how many characters at the beginning of each text the tokens are only read (default: none). A token
    that has characters on both sides is scored, as one of " word" is."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    end = [] if special.eos is None else [special.eos]
    lengths = np.array([1 + len(encoding.ids) + len(end) for encoding in encodings], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    ids, words = np.empty(starts[-1], np.int64), np.full(starts[-1], _SPECIAL, np.int64)
    for encoding, start, stop in zip(encodings, starts[:-1], starts[1:], strict=True):
        ids[start:stop] = [special.bos, *encoding.ids, *end]
        own = range(-2, -2 - len(encoding.ids), -1)  # a token that the tokenizer puts into no word is one by itself
        named = [alone if word is None else word for word, alone in zip(encoding.word_ids, own, strict=True)]
        words[start + 1 : stop - len(end)] = named
    first = np.ones(len(encodings), np.int64)
    for index, characters in enumerate(contexts or ()):
        if characters:
            first[index] += bisect_right([stop for _, stop in encodings[index].offsets], characters)
    return TokenizedSentences(ids, words, starts, first, lengths - 1 - len(end))


def encode_ids(rows: Sequence[list[int]], first: Sequence[int], special: SpecialIds, behind: int) -> TokenizedSentences:
    """Sentences of given ids, `<s>` first: tokens first[s] and on are scored but for the `behind` last ones."""
    end = [] if special.eos is None else [special.eos]
    flat = np.array([number for row in rows for number in (*row, *end)], np.int64)
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), (lengths + len(end)).cumsum()])
    return TokenizedSentences(flat, np.arange(len(flat)), starts, np.array(first, np.int64), lengths - 1 - behind)


def joined(parts: Sequence[TokenizedSentences]) -> TokenizedSentences:
    """The sentences of all parts, so that they can share batches."""
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    ids, words, first, scored = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "words", "first", "scored")
    )
    return TokenizedSentences(ids, words, starts, first, scored)


def count_tokens(sentences: TokenizedSentences, causal: bool) -> int:
    """Tokens that the model reads to score `sentences`."""
    return int(_documents(sentences, causal).lengths.sum())


@torch.no_grad()
def token_scores(
    scorer: Scorer,
    sentences: TokenizedSentences,
    *,
    causal: bool,
    word_l2r: bool = False,
    temperatures: tuple[float, ...] = (1.0,),
    best: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> np.ndarray:
    """Log-probability of every scored token at each temperature, float32 [K, N]; 0 for tokens that are not scored.

    word_l2r: mask the sub-words of the same word that follow the masked token too (PLL-word-l2r: Kauf and Ivanova,
    2023), so that a word's first part is not given away by the rest. temperatures: logits are divided by them.
    best: one line more, 1 where no token is more probable than the scored one, else 0. progress: called with the
    number of tokens read after each batch. All ranks share the work and get the result."""
    documents, world = _documents(sentences, causal), scorer.world
    shape = scorer.shape.holding(int(documents.lengths.max(initial=1)))
    order = np.argsort(-documents.lengths, kind="stable")  # the longest first
    mine = documents.take(order[world.rank :: world.size])
    scores = torch.zeros(len(temperatures) + best, len(sentences.ids), device=world.device)
    for part in until_stop(_batches(mine, shape), world, scorer.wanted):
        batch = _assemble(sentences, *part, shape, scorer.special, causal, word_l2r).to(world.device)
        with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=scorer.autocast):
            logits = scorer.model(batch.input_ids, batch.document_ids, causal, batch.positions)
        scores[: len(temperatures), batch.scored] = log_probabilities(logits, batch.labels, temperatures).float()
        if best:
            label = logits.gather(1, batch.labels[:, None])[:, 0]
            scores[-1, batch.scored] = (label == logits.amax(dim=1)).float()
        progress(int(part[0].lengths.sum()))
    total = world.all_reduce(scores, "sentence scores")
    return world.to_host(total).numpy()  # where the host waits for the device


def sentence_sums(sentences: TokenizedSentences, scores: np.ndarray) -> np.ndarray:
    """Sums [K, S] float64 of `token_scores` [K, N] over each sentence."""
    return np.add.reduceat(scores.astype(np.float64), sentences.starts[:-1], axis=1)


def log_probabilities(logits: Tensor, labels: Tensor, temperatures: tuple[float, ...]) -> Tensor:
    """log softmax(logits / t) at the labels for each temperature t; logits [M, V], labels [M] -> [K, M]."""
    if len(logits) > _LABELS_AT_ONCE:  # else the float32 copies of a causal batch may be all that does not fit
        parts = zip(logits.split(_LABELS_AT_ONCE), labels.split(_LABELS_AT_ONCE), strict=True)
        return torch.cat([log_probabilities(*part, temperatures) for part in parts], dim=1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    found = logits.gather(1, labels[:, None])[:, 0]
    return torch.stack([found / t - (logits if t == 1 else logits / t).logsumexp(-1) for t in temperatures])


def _documents(sentences: TokenizedSentences, causal: bool) -> _Documents:
    if causal:  # the last scored token is only predicted
        having = np.flatnonzero(sentences.counts)
        return _Documents(having, sentences.scored[having], np.zeros_like(having))
    owner, number = _count_up(sentences.counts)
    return _Documents(owner, np.diff(sentences.starts)[owner], sentences.first[owner] + number)


def _count_up(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [n]: the index of each of the counted things and its number among them, both [sum(counts)]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)


def _batches(documents: _Documents, shape: BatchShape) -> Iterator[tuple[_Documents, np.ndarray]]:
    """Batches of documents, each with the flat index of its first token in [rows, length]. documents come by length.
    Rows take documents of one length alone: as many as fit."""
    row, rows = np.zeros(len(documents.lengths), np.int64), 0
    column = np.zeros_like(row)
    lengths, first, counts = np.unique(-documents.lengths, return_index=True, return_counts=True)
    for length, begin, count in zip(-lengths, first, counts, strict=True):
        fitting = shape.length // int(length)
        number = np.arange(count)
        row[begin : begin + count] = rows + number // fitting
        column[begin : begin + count] = number % fitting * length
        rows += -(-int(count) // fitting)
    for first_row in range(0, rows, shape.rows):
        part = slice(*np.searchsorted(row, [first_row, first_row + shape.rows]))
        yield documents.take(part), (row[part] - first_row) * shape.length + column[part]


def _assemble(
    sentences: TokenizedSentences,
    documents: _Documents,
    base: np.ndarray,
    shape: BatchShape,
    special: SpecialIds,
    causal: bool,
    word_l2r: bool,
) -> _Batch:
    """The tensors of a batch; base: flat index of each document's first token."""
    owner, offset = _count_up(documents.lengths)
    starts = sentences.starts[documents.sentences]
    source, target = starts[owner] + offset, base[owner] + offset  # in the sentences' ids, in the flat batch
    ids = sentences.ids[source]
    if causal:
        wanted = offset + 1 >= sentences.first[documents.sentences][owner]
        positions, scored = target[wanted], source[wanted] + 1  # output i predicts token i + 1
    else:
        hidden = offset == documents.masked[owner]
        scored = starts + documents.masked
        if word_l2r:
            hidden |= (offset > documents.masked[owner]) & (sentences.words[source] == sentences.words[scored][owner])
        ids = np.where(hidden, special.mask, ids)
        positions = base + documents.masked - 1
    input_ids = np.full(shape.rows * shape.length, special.pad, np.int64)
    document_ids = np.full(shape.rows * shape.length, -1, np.int64)
    input_ids[target], document_ids[target] = ids, owner
    # The last one is repeated up to one of few sizes, so that the allocator reuses the blocks of earlier batches.
    repeats = (0, -len(positions) % -(-shape.rows * shape.length // _SIZES))
    positions, scored = np.pad(positions, repeats, mode="edge"), np.pad(scored, repeats, mode="edge")
    arrays = (
        input_ids.reshape(shape.rows, shape.length),
        document_ids.reshape(shape.rows, shape.length),
        positions,
        sentences.ids[scored],
        scored,
    )
    return _Batch(*(torch.from_numpy(array) for array in arrays))
