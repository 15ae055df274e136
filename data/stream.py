"""Token streams: a corpus, epoch after epoch, read as one endless stream of tokens.

Each epoch has a keyed pseudo-random order of its own. Any ranges of tokens are read in time that does not depend on
where they lie. Every document is wrapped as `<s> tokens </s>` on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.corpus import Corpus
from data.counter_rng import Permutation, fold
from data.documents import BLOCK, OCCURRENCE_SHIFT, ranges
from data.epochs import Epochs

_INDICES = 4  # kept of each stream's epochs: a range may touch the end of one and the next


@dataclass(frozen=True)
class EpochIndex:
    """Where documents lie in one epoch of a stream; half a byte or so per document."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: tokens up to the end of each BLOCK documents, or of each of data/blocks.py


class TokenStream:
    """The corpus, epoch after epoch, each epoch in its own keyed order (or stored order where `key` is None). epochs:
    what is in each; where left out, the corpus' own."""

    def __init__(self, corpus: Corpus, key: int | None, epochs: Epochs | None = None):
        self.corpus, self._key, self._epochs = corpus, key, epochs or corpus.epochs

    def _index(self, epoch: int) -> EpochIndex:
        """The index of an epoch, built where no stream of this key has built it lately."""
        known, name = self._epochs.indices, (self._key, epoch)
        index = known.pop(name, None) or self._build_index(epoch)
        known[name] = index  # the last of them
        while len(known) > _INDICES:
            del known[next(iter(known))]
        return index

    def _order(self, permutation: Permutation, index: np.ndarray) -> np.ndarray:
        return index if self._key is None else permutation(index)

    def _build_index(self, epoch: int) -> EpochIndex:
        corpus, epochs = self.corpus, self._epochs
        count = epochs.documents_in(epoch)
        permutation = Permutation(fold(self._key or 0, epoch), count)
        if corpus.blocks is not None:
            blocks = epochs.documents_of(epoch, self._order(permutation, np.arange(count)))[0]
            return EpochIndex(permutation, np.cumsum(corpus.blocks.lengths(blocks)))
        order = permutation if self._key is not None else None
        extra = corpus.specials_per_document
        name = corpus.content_name("index", self._key, epoch, extra, corpus.seed, epochs.content(epoch))
        ends = corpus.block_ends(count, lambda slots: epochs.documents_of(epoch, slots)[0], order, extra, name)
        return EpochIndex(permutation, ends)

    def read(self, position: int, count: int, *, origins: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens `position` .. `position + count - 1` of the stream.

        Returns tokens (int32 [count]) and, on request, origins (int64 [count]): for a stored token
        uses << OCCURRENCE_SHIFT | its position in the corpus, where `uses` counts earlier appearances of its document
        in this stream; 0 for the `<s>` and `</s>` that the stream adds."""
        tokens, found_origins = [], []
        while count > 0:
            epoch = self._epochs.epoch_of(position)
            begin, end = self._epochs.tokens_before_epoch(epoch), self._epochs.tokens_before_epoch(epoch + 1)
            take = min(count, end - position)
            part, part_origins = self._read_epoch(epoch, np.array([position - begin]), take, origins)
            tokens.append(part[0])
            found_origins.append(None if part_origins is None else part_origins[0])
            position += take
            count -= take
        if len(tokens) == 1:
            return tokens[0], found_origins[0]
        return np.concatenate(tokens), np.concatenate(found_origins) if origins else None

    def read_rows(
        self, positions: np.ndarray, count: int, *, origins: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`read` of `count` tokens at each of `positions`, int64 [n]: tokens int32 [n, count], origins or None."""
        tokens = np.empty((len(positions), count), np.int32)
        all_origins = np.empty((len(positions), count), np.int64) if origins else None
        left = np.arange(len(positions))
        while len(left):
            epoch = self._epochs.epoch_of(int(positions[left[0]]))
            begin, end = self._epochs.tokens_before_epoch(epoch), self._epochs.tokens_before_epoch(epoch + 1)
            here = (positions[left] >= begin) & (positions[left] < end)
            rows, left = left[here], left[~here]
            inside = positions[rows] + count <= end
            for row in rows[~inside]:  # at most a few: the last row of an epoch goes on in the next
                found, found_origins = self.read(int(positions[row]), count, origins=origins)
                tokens[row] = found
                if all_origins is not None and found_origins is not None:
                    all_origins[row] = found_origins
            rows = rows[inside]
            if len(rows):
                tokens[rows], found_origins = self._read_epoch(epoch, positions[rows] - begin, count, origins)
                if all_origins is not None and found_origins is not None:
                    all_origins[rows] = found_origins
        return tokens, all_origins

    def _read_epoch(self, epoch: int, begins: np.ndarray, count: int, want_origins: bool):
        """`read_rows` for ranges that lie within one epoch; `begins` [n] count from the epoch's first token.

        In the comments: n ranges, B blocks of the index, D documents in them, P pairs of a range and a document."""
        corpus, index = self.corpus, self._index(epoch)
        if corpus.blocks is not None:
            return self._read_blocks(epoch, index, begins, count, want_origins)
        # All documents of every block that a range touches, in the order of the epoch. The index knows the ends of
        # blocks alone, so the lengths of these D documents are looked up and added up below.
        first_blocks = np.searchsorted(index.block_ends, begins, side="right")  # [n]
        last_blocks = np.searchsorted(index.block_ends, begins + count, side="left")
        blocks = np.unique(ranges(first_blocks, last_blocks - first_blocks + 1))  # [B], ascending, perhaps with gaps
        order = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()  # [D] indices of documents in the epoch
        if (blocks[-1] + 1) * BLOCK > index.permutation.size:  # the last block may be cut short
            order = order[order < index.permutation.size]
        documents, uses, _ = self._epochs.documents_of(epoch, self._order(index.permutation, order))
        starts, lengths = corpus.spans(documents)  # [D]
        wrapped = lengths + corpus.specials_per_document
        firsts = np.arange(len(blocks)) * BLOCK  # of each block, in `order`
        before = np.cumsum(wrapped) - wrapped  # tokens of the documents in front, blocks without gaps between them
        skipped = np.where(blocks > 0, index.block_ends[blocks - 1], 0) - before[firsts]  # [B] tokens in the gaps
        ends = before + wrapped + np.repeat(skipped, np.diff(firsts, append=len(order)))  # [D] in the epoch

        # Pairs of a range and a document that overlap, in the order of the output.
        low = np.searchsorted(ends, begins, side="right")  # [n] first document that ends behind the range's beginning
        overlapping = np.searchsorted(ends, begins + count, side="left") + 1 - low
        document = ranges(low, overlapping)  # [P] into `documents`
        row = np.repeat(np.arange(len(begins)), overlapping)  # [P]
        opens = (ends - wrapped)[document] - begins[row]  # [P] column of the <s>; negative where it lies before the row
        closes = ends[document] - begins[row] - 1  # [P] column of its last token; behind the row from `count` on

        # Stored tokens lie behind `opens` and, where there is a </s>, before `closes`: the columns [after_bos, until)
        # of a row. A pair without any, such as of an empty document, is left out of what is read.
        after_bos, until = np.maximum(opens + 1, 0), np.minimum(closes + (corpus.eos_id is None), count)
        some = np.flatnonzero(until > after_bos)
        targets, lengths = (row * count + after_bos)[some], (until - after_bos)[some]  # in the flat output
        sources = (starts[document] - opens - 1 + after_bos)[some]  # in the concatenation of all shards
        tokens = np.empty(len(begins) * count, np.int32)
        corpus.read(tokens, targets, sources, lengths)
        corpus.count_mapped(len(document), len(tokens))
        bos = (row * count + opens)[opens >= 0]
        tokens[bos] = corpus.bos_id
        if corpus.eos_id is not None:
            tokens[(row * count + closes)[closes < count]] = corpus.eos_id
        if not want_origins:
            return tokens.reshape(-1, count), None
        origins = np.zeros(len(tokens), np.int64)
        origins[ranges(targets, lengths)] = ranges(sources + (uses[document[some]] << OCCURRENCE_SHIFT), lengths)
        return tokens.reshape(-1, count), origins.reshape(-1, count)

    def _read_blocks(self, epoch: int, index: EpochIndex, begins: np.ndarray, count: int, want_origins: bool):
        """`_read_epoch` of an epoch that is made of blocks."""
        blocks, ends = self.corpus.blocks, index.block_ends
        assert blocks is not None
        low = np.searchsorted(ends, begins, side="right")  # [n] first block that ends behind the range's beginning
        overlapping = np.searchsorted(ends, begins + count, side="left") + 1 - low
        slots = ranges(low, overlapping)  # [P] pairs of a range and a block
        row = np.repeat(np.arange(len(begins)), overlapping)
        block, uses, _ = self._epochs.documents_of(epoch, self._order(index.permutation, slots))
        opens = ends[slots] - blocks.lengths(block) - begins[row]  # column of the block's beginning
        first, until = np.maximum(opens, 0), np.minimum(ends[slots] - begins[row], count)
        tokens = np.empty(len(begins) * count, np.int32)
        targets, sources, lengths, pair = blocks.read(tokens, row * count + first, block, first - opens, until - first)
        self.corpus.count_mapped(len(lengths), len(tokens))
        if not want_origins:
            return tokens.reshape(-1, count), None
        origins = np.zeros(len(tokens), np.int64)
        origins[ranges(targets, lengths)] = ranges(sources + (uses[pair] << OCCURRENCE_SHIFT), lengths)
        return tokens.reshape(-1, count), origins.reshape(-1, count)

    def blocks_of(self, begin: int, end: int) -> list[int]:
        """The blocks of tokens `begin` .. `end - 1`, which lie in one epoch, in the order of the stream."""
        epoch = self._epochs.epoch_of(begin)
        index, before = self._index(epoch), self._epochs.tokens_before_epoch(epoch)
        low, high = np.searchsorted(index.block_ends, [begin - before, end - before], side="right").tolist()
        slots = np.arange(low, min(high + 1, index.permutation.size))
        return self._epochs.documents_of(epoch, self._order(index.permutation, slots))[0].tolist()
