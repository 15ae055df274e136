"""Documents in shards, by their number: where they lie, their tokens, and the keyed walk through those of a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Event

import numpy as np

from data.counter_rng import Permutation, fold
from data.shards import Shard

IndexMap = Callable[[np.ndarray], np.ndarray]
BLOCK = 16  # documents per entry of an index of lengths: a row that is read looks at about so many
_CHUNK = 1 << 18  # documents handled at once while an index is built
_DROP_BYTES = 1 << 30  # release mapped pages after about so many bytes were mapped
_FAULT_BYTES = 64 << 10  # that Linux maps around an access
UNSCORED = np.int32(1 << 30)  # added to a token that its shard's marks take out of the targets
OCCURRENCE_SHIFT = 46  # an origin is (times the document was used before) << 46 | position in the corpus
_SAMPLE = -2  # purpose of the key that orders sampled sources

# Set by a thread that may have to end while an index is built: then building raises IndexStopped.
stop_event: ContextVar[Event | None] = ContextVar("stop_event", default=None)


class IndexStopped(RuntimeError):
    """The thread that builds an index was told to end."""


@dataclass(frozen=True)
class Walk:
    """The keyed order in which the documents of a source are used, over and over."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: stored tokens up to the end of each block of BLOCK documents


class Documents:
    """Documents of one or more sources, addressed by a running number.

    counts: documents of each source, which follow each other in `shards`. bos_id, eos_id: ids that open and close each
    document; eos_id None leaves the end unmarked. seed: of the walks.
    """

    def __init__(self, shards: Sequence[Shard], counts: Sequence[int], bos_id: int, eos_id: int | None, seed: int):
        self.shards, self.bos_id, self.eos_id, self._seed = list(shards), bos_id, eos_id, seed
        self.specials_per_document = 1 + (eos_id is not None)
        # First document, and first token, of each shard.
        self._shard_documents = np.cumsum([0, *(shard.num_documents for shard in self.shards)])
        self._shard_tokens = np.cumsum([0, *(shard.num_tokens for shard in self.shards)])
        self.num_tokens = int(self._shard_tokens[-1])
        ends = np.cumsum([0, *counts])
        self.num_documents = int(ends[-1])
        self.counts, self.first_documents = np.array(counts), ends[:-1]  # of each source
        self.walk = lru_cache(maxsize=None)(self._build_walk)
        self._bytes_mapped = 0

    @cached_property
    def has_marks(self) -> bool:
        """Whether any token may be no target."""
        return any(shard.has_marks for shard in self.shards)

    @cached_property
    def source_tokens(self) -> list[int]:
        """Tokens of each source, special ones included."""
        ends = np.diff([self.tokens_before(int(first)) for first in (*self.first_documents, self.num_documents)])
        return (ends + self.counts * self.specials_per_document).tolist()

    # Documents by their number in the corpus

    def tokens_before(self, document: int) -> int:
        """Stored tokens in front of `document` (0 .. num_documents)."""
        shard = int(np.searchsorted(self._shard_documents, document, side="right")) - 1
        if shard == len(self.shards):
            return self.num_tokens
        return int(self._shard_tokens[shard]) + int(self.shards[shard].offsets[document - self._shard_documents[shard]])

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start (in the concatenation of all shards) and length of each document; int64 [n] both."""
        order, shard_of, groups, local = _by_shard(self._shard_documents, documents)
        starts, ends = np.empty(len(documents), np.int64), np.empty(len(documents), np.int64)
        after = local + 1
        for number, begin, end in groups:
            shard = self.shards[number]
            shard.check_size()
            starts[begin:end] = shard.offsets[local[begin:end]]
            ends[begin:end] = shard.offsets[after[begin:end]]
        ends -= starts
        if order is None:
            return starts, ends
        result = np.empty((2, len(documents)), np.int64)
        result[0, order], result[1, order] = starts + self._shard_tokens[shard_of], ends
        return result[0], result[1]

    def read(self, tokens: np.ndarray, targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray) -> None:
        """Copy stored tokens to `tokens` int32: so many (`lengths`) from each of `sources` to each of `targets`.

        sources: in the concatenation of all shards. All int64 [n], lengths above 0, no piece in two shards. Tokens that
        are no targets by their shard's marks come with UNSCORED added.
        """
        order, shard_of, groups, local = _by_shard(self._shard_tokens, sources)
        if order is not None:
            targets, lengths = targets[order], lengths[order]
        for number, first, length in zip(shard_of.tolist(), local.tolist(), lengths.tolist(), strict=True):
            self.shards[number].prefetch(first, length)  # of all at once: the disk is not asked piece by piece
        source, ends = ranges(local, lengths), [0, *np.cumsum(lengths).tolist()]
        found = np.empty(len(source), np.int32)
        for number, first, last in groups:
            wanted = source[ends[first] : ends[last]]
            found[ends[first] : ends[last]] = self.shards[number].tokens[wanted]
            if self.shards[number].has_marks:
                found[ends[first] : ends[last]] += UNSCORED * ~self.shards[number].scored(wanted)
        tokens[ranges(targets, lengths)] = found

    def count_mapped(self, documents: int, tokens: int) -> None:
        """Note that so many documents and tokens were read here and there; unmaps them once that adds up."""
        self._bytes_mapped += tokens * self.shards[0].dtype.itemsize + documents * _FAULT_BYTES
        if self._bytes_mapped > _DROP_BYTES:
            self.drop_cache()

    def drop_cache(self) -> None:
        """Give mapped pages back to the system; the page cache keeps them, this process stops counting them."""
        for shard in self.shards:
            shard.drop_cache()
        self._bytes_mapped = 0

    # The walk through a source

    def walked_tokens(self, number: int, uses: int) -> int:
        """Tokens, special ones included, of the first `uses` documents of the walk through source `number`."""
        passes, rest = divmod(uses, int(self.counts[number]))
        total = passes * self.source_tokens[number]
        if rest:
            walk, block = self.walk(number), rest // BLOCK
            left = walk.permutation(np.arange(block * BLOCK, rest)) + self.first_documents[number]
            total += int(walk.block_ends[block - 1] if block else 0) + int(self.spans(left)[1].sum())
            total += rest * self.specials_per_document
        return total

    def _build_walk(self, number: int) -> Walk:
        count, first = int(self.counts[number]), self.first_documents[number]
        permutation = Permutation(fold(fold(self._seed, _SAMPLE), number), count)
        return Walk(permutation, self.block_ends(count, lambda index: first + index, permutation.inverse))

    def block_ends(self, count: int, documents: IndexMap, order: IndexMap, extra: int = 0) -> np.ndarray:
        """Tokens up to the end of each block of BLOCK documents in an order, `extra` added for each: int64 [blocks].

        documents, order: functions from 0 .. count-1, in pieces, to the documents and to their index in the order. Fast
        where these documents follow each other as stored. Raises IndexStopped.
        """
        sums, stop = np.zeros(-(-count // BLOCK), np.int64), stop_event.get()
        for start in range(0, count, _CHUNK):
            if stop is not None and stop.is_set():
                raise IndexStopped
            index = np.arange(start, min(start + _CHUNK, count))
            np.add.at(sums, order(index) // BLOCK, self.spans(documents(index))[1] + extra)
        return np.cumsum(sums)


def _by_shard(
    firsts: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray, list[tuple[int, int, int]], np.ndarray]:
    """`values` (documents or positions in the corpus) sorted by shard; `firsts` [shards + 1]: the first of each shard.

    Returns their order (None: as they are), the shard of each in that order, (shard, begin, end) for each shard that
    occurs, and the values in that order, counted from the first of their shard.
    """
    if len(firsts) == 2 or not len(values):
        return None, np.zeros(len(values), np.int64), [(0, 0, len(values))], values
    shard_of = np.searchsorted(firsts, values, side="right") - 1
    order = np.argsort(shard_of.astype(np.uint16) if len(firsts) < 1 << 16 else shard_of, kind="stable")  # radix sort
    shard_of = shard_of[order]
    begins = np.flatnonzero(np.diff(shard_of, prepend=-1))
    pieces = [*zip(shard_of[begins].tolist(), begins.tolist(), [*begins[1:].tolist(), len(values)], strict=True)]
    return order, shard_of, pieces, values[order] - firsts[shard_of]


def ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first, first + 1, ... (count of them) for each pair, one range after the other."""
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
