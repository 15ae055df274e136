"""Row shuffle: the order in which the rows of a stream are used.

A stream goes through the documents in a random order, but a document may be a book: consecutive rows come from one
text, and a whole batch may. Batches are to be samples of the corpus, so the rows of each stretch of the stream are
used in a keyed pseudo-random order. A stretch lies within one epoch and has rows of one length, so every token is
still used exactly once per epoch, also where rows grow in the middle of one. Nothing is stored.

In an order of blocks (data/blocks.py) an epoch has several such stretches, equal windows of the stream.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from data.corpus import Corpus
from data.counter_rng import Permutation, fold
from data.epochs import Epochs


class RowShuffle:
    """Positions of rows in the stream of one objective."""

    def __init__(
        self, epochs: Epochs | Corpus, key: int, spans: list[tuple[int, int, int]], window: int | None = None
    ) -> None:
        """key: of the stream. spans: first token, end and row length of its parts, as DataPlan.spans gives them.
        window: tokens, about, of a stretch; None: a stretch is a whole epoch."""
        self._epochs, self._key = epochs, fold(key, -1)  # data/stream.py folds in epochs, from 0
        self._window = window
        self._spans = [span for span in spans if span[1] > span[0]]

    def positions(self, first: int, count: int) -> np.ndarray:
        """Stream positions of the first tokens of `count` rows, int64 [count]. first: how many tokens the rows used
        before hold, which is where they would begin without shuffling. All are of one length."""
        if not count:
            return np.empty(0, np.int64)
        # The part of the stream with these rows, [begin, end) in tokens, and the rows' numbers within it.
        begin, end, length = self._spans[bisect_right(self._spans, first, key=lambda span: span[0]) - 1]
        row = first_row = (first - begin) // length
        end_row, found = first_row + count, []
        while row < end_row:
            epoch = self._epochs.epoch_of(begin + row * length)
            # Rows [low, high) that begin in this stretch. -(-a // b) rounds up: the row that begins in the one before
            # and ends in this one belongs to that.
            key, bounds = self._stretch(epoch, begin + row * length)
            bounds = [bound - begin for bound in bounds]
            low, high = max(0, -(-bounds[0] // length)), -(-min(bounds[1], end - begin) // length)
            # Keyed by `begin` too: where the row length changes in the middle of an epoch, that has two stretches.
            permutation = Permutation(fold(key, begin), high - low)
            until = min(high, end_row)
            found.append(low + permutation(np.arange(row - low, until - low)))
            row = until
        return begin + np.concatenate(found) * length

    def _stretch(self, epoch: int, position: int) -> tuple[int, tuple[int, int]]:
        """Key, first token and end of the stretch of the stream that holds a position of an epoch."""
        begin, end = (self._epochs.tokens_before_epoch(epoch + i) for i in (0, 1))
        key = fold(self._key, epoch)
        if self._window is None:
            return key, (begin, end)
        length, windows = end - begin, max(1, round((end - begin) / self._window))
        number = (position - begin) * windows // length
        return fold(key, number), (begin - (-length * number // windows), begin - (-length * (number + 1) // windows))

    def window(self, position: int) -> tuple[int, int]:
        """First token and end of the stretch that holds a position."""
        return self._stretch(self._epochs.epoch_of(position), position)[1]
