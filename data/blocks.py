"""Blocks: the corpus in pieces that are read from front to back, for `--order blocks`.

The documents of a shard, in stored order and wrapped as `<s> tokens </s>`, are cut every `size` tokens, wherever that
is; what goes on in a block of its own opens with one more `<s>`, as a row does. An epoch then uses blocks in a keyed
order where it otherwise uses documents, and rows are shuffled within windows of it (data/row_shuffle.py). Where blocks
lie follows from the numbers of documents and tokens of each shard, so nothing is read at the start, however large the
corpus is, and while rows come from some blocks those of the next window are read ahead.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.counter_rng import Permutation, fold
from data.documents import Documents, Walk, ranges
from data.remote_shards import fetch_all

_WALK = -3  # purpose of the key that orders the blocks of a sampled source
_MOST_BOUNDARIES = 1 << 24  # of documents that are remembered, 4 bytes each


@dataclass(frozen=True)
class BlockOrder:
    """size: tokens of a block. window: tokens, about, within which rows are shuffled."""

    size: int
    window: int


class Blocks:
    """Blocks by their number; in place of `Documents`, what the epochs of a corpus are made of."""

    def __init__(self, documents: Documents, size: int, seed: int) -> None:
        self._documents, self._size, self._seed = documents, size, seed
        self._specials = documents.specials_per_document
        shards = documents.shards
        self._shard_lengths = np.array([s.num_tokens + s.num_documents * self._specials for s in shards])
        self._shard_blocks = np.cumsum([0, *-(-self._shard_lengths // size)])  # first block of each shard
        ends = np.searchsorted(documents.shard_documents, [*documents.first_documents, documents.num_documents])
        self.first_documents = self._shard_blocks[ends[:-1]]  # first block of each source
        self.counts = np.diff(self._shard_blocks[ends])  # blocks of each source
        within = np.concatenate([[0], np.cumsum(self._shard_lengths)]) + self._shard_blocks
        within[1:] -= np.cumsum(np.diff(self._shard_blocks) > 0)  # a shard's first block opens with its document
        self.source_tokens: list[int] = np.diff(within[ends]).tolist()
        self.walk = lru_cache(maxsize=None)(self._build_walk)
        self._boundaries: dict[int, tuple[int, np.ndarray]] = {}
        self._remembered = 0

    def lengths(self, blocks: np.ndarray) -> np.ndarray:
        """Tokens of blocks, special ones included; int64 [n]."""
        shard, local = self._place(blocks)
        return np.minimum(self._size, self._shard_lengths[shard] - local * self._size) + (local > 0)

    def _place(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each block, and its number there."""
        shard = np.searchsorted(self._shard_blocks, blocks, side="right") - 1
        return shard, blocks - self._shard_blocks[shard]

    def _build_walk(self, number: int) -> Walk:
        count = int(self.counts[number])
        permutation = Permutation(fold(fold(self._seed, _WALK), number), count)
        order = self.first_documents[number] + permutation(np.arange(count))
        return Walk(permutation, np.cumsum(self.lengths(order)))

    def walked_tokens(self, number: int, uses: int) -> int:
        """Tokens of the first `uses` blocks of the walk through source `number`."""
        passes, rest = divmod(uses, int(self.counts[number]))
        return passes * self.source_tokens[number] + (int(self.walk(number).block_ends[rest - 1]) if rest else 0)

    # Reading

    def _table(self, block: int) -> tuple[int, np.ndarray]:
        """Documents of the shard that begin before a block, and where others do, counted from the block's cut;
        int32, its end included."""
        found = self._boundaries.get(block)
        if found is None:
            shard_number, local = (int(each[0]) for each in self._place(np.array([block])))
            shard, specials = self._documents.opened(shard_number), self._specials
            begin = local * self._size
            end = min(begin + self._size, int(self._shard_lengths[shard_number]))
            offsets, every = shard.offsets, range(shard.num_documents + 1)
            first = bisect_left(every, begin, key=lambda document: int(offsets[document]) + document * specials)
            last = bisect_right(every, end, first, key=lambda document: int(offsets[document]) + document * specials)
            begins = offsets[first:last].astype(np.int64) + np.arange(first, last) * specials - begin
            if self._remembered + len(begins) > _MOST_BOUNDARIES:
                self._boundaries.clear()
                self._remembered = 0
            found = self._boundaries[block] = first, begins.astype(np.int32)
            self._remembered += len(begins)
        return found

    def read(self, tokens: np.ndarray, targets: np.ndarray, blocks: np.ndarray, firsts: np.ndarray, counts: np.ndarray):
        """Copy parts of blocks to `tokens` int32: `counts` tokens of each of `blocks`, from its token `firsts` on, to
        each of `targets`; all int64 [n].

        Returns what of it is stored tokens: places in `tokens`, positions in the corpus, lengths, and the part."""
        documents, specials = self._documents, self._specials
        order = np.argsort(blocks)
        shard, local = self._place(blocks[order])
        begin, opened = firsts[order], local > 0
        alone = opened & (begin == 0)  # the part opens with the block's own <s>
        tokens[targets[order[alone]]] = documents.bos_id
        target, end = targets[order] + alone, begin + counts[order] - opened
        begin = begin - opened + alone  # counted from the block's cut

        # Of each part: how many documents begin before it (in the shard) and in it, and where.
        before, inside, closed, begins = self._begins_in(blocks[order], begin, end)
        part = np.repeat(np.arange(len(order)), inside + 1)  # of each of its pieces of a document
        piece = ranges(np.zeros(len(order), np.int64), inside + 1)
        starts, ends = np.repeat(begin, inside + 1), np.repeat(end, inside + 1)
        starts[piece > 0] = begins
        ends[piece < inside[part]] = begins
        closes = (piece < inside[part]) | closed[part]
        shift = target[part] - begin[part]  # from places in the block to places in `tokens`
        tokens[(starts + shift)[piece > 0]] = documents.bos_id
        first, last = starts + (piece > 0), ends
        if documents.eos_id is not None:
            last = ends - closes
            tokens[(last + shift)[closes & (last >= begin[part])]] = documents.eos_id
        some = np.flatnonzero(last > first)
        first, lengths, part, shift = first[some], (last - first)[some], part[some], shift[some]
        document = before[part] + piece[some] - 1  # in the shard
        in_shard = local[part] * self._size + first - document * specials - 1
        sources = documents.shard_tokens[shard[part]] + in_shard
        documents.read(tokens, first + shift, sources, lengths)
        return first + shift, sources, lengths, order[part]

    def _begins_in(self, blocks: np.ndarray, begin: np.ndarray, end: np.ndarray):
        """Documents that begin before and in each part [begin, end) of a block, whether one ends with the part, and
        where those in it begin; `blocks` ascending."""
        before, inside, after = (np.empty(len(blocks), np.int64) for _ in range(3))
        cuts = [*np.flatnonzero(np.diff(blocks, prepend=-1)).tolist(), len(blocks)]
        numbers, found = blocks.tolist(), [np.empty(0, np.int32)]
        for number in range(len(cuts) - 1):
            here = slice(cuts[number], cuts[number + 1])
            first, begins = self._table(numbers[cuts[number]])
            low, high = begins.searchsorted(begin[here]), begins.searchsorted(end[here])
            before[here], inside[here] = first + low, high - low
            after[here] = begins.searchsorted(end[here], side="right") - high
            found += [begins[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        return before, inside, after > 0, np.concatenate(found)

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Have the tokens of blocks read into memory without waiting for them; may run in a thread of its own."""
        wanted, locals_ = self._place(np.fromiter(blocks, np.int64))
        remote = [self._documents.shards[number] for number in dict.fromkeys(wanted.tolist())]
        fetch_all([shard for shard in remote if shard.remote is not None])
        for shard_number, local in zip(wanted.tolist(), locals_.tolist(), strict=True):
            shard = self._documents.shards[shard_number]
            share = shard.num_tokens / max(1, int(self._shard_lengths[shard_number]))  # of tokens that are stored
            first, count = int(local * self._size * share), int(self._size * share) + 1
            with suppress(OSError):  # what is wrong is said where it is read
                descriptor = os.open(shard.path, os.O_RDONLY)
                try:
                    begin, length = shard.bytes_of(first, count)
                    os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)
