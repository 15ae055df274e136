"""Epochs: which documents are in which epoch of a stream, and how often they were used before.

A stream has one or more stages; in each, an epoch uses every source by its repeat of that stage. All stages walk
through a source together: a later stage goes on where the one before it stopped. Nothing here depends on what was read
before: any epoch of any stage is found by arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from data.counter_rng import permute_each
from data.documents import Documents

if TYPE_CHECKING:
    from data.blocks import Blocks
    from data.stream import EpochIndex

_MANY = 1 << 14  # documents of each source: a table for each of their permutations pays


@dataclass(frozen=True)
class Stage:
    """From token `begin` of a stream on, an epoch uses each source so many times (0: not at all)."""

    begin: int
    repeats: tuple[Fraction, ...]


@dataclass(frozen=True)
class _Part:
    """Epochs of one stage. used: documents of each walk before. rates: documents an epoch of each source.

    length: epochs until the stage ends, exact; of an epoch that it cuts, the part holds so much of each source.
    limits: documents of each walk that must not be passed, None: any number."""

    begin: int
    first_epoch: int
    used: tuple[int, ...]
    rates: tuple[Fraction, ...]
    length: Fraction | None
    limits: tuple[int, ...] | None = None

    def uses_after(self, epochs: Fraction | int) -> tuple[int, ...]:
        """Documents of each walk used after so many epochs of this part: rate x epochs, rounded half up."""
        if self.length is not None:
            epochs = min(epochs, self.length)
        # An epoch of less than half a document: rounded up, so that the first one holds some.
        up = sum(int(rate + Fraction(1, 2)) for rate in self.rates) == 0
        uses = [
            used + (ceil(rate * epochs) if up else int(rate * epochs + Fraction(1, 2)))
            for used, rate in zip(self.used, self.rates, strict=True)
        ]
        return tuple(uses if self.limits is None else map(min, uses, self.limits))


class Epochs:
    """The epochs of a stream, numbered through all stages."""

    def __init__(
        self,
        documents: Documents | Blocks,
        stages: Sequence[Stage],
        keyed: Sequence[bool],
        end: int | None = None,
        limits: tuple[int, ...] | None = None,
        used: tuple[int, ...] | None = None,
    ):
        """documents: or blocks. stages: the first begins at 0. keyed: whether a walk is in a keyed order, or as stored.

        end: where the run ends, in tokens; behind it, the last stage goes on. What a stage reads of a source, to its
        end, is a contiguous part of the walk, so that no document is ahead of another by more than one use. None: the
        last stage has no end; its epochs are whole.
        limits: documents of each walk that are not passed before `end`. Raises ValueError where they are too few.
        used: documents of each walk before the first stage, 0 where left out."""
        self._documents = documents
        self._keyed = np.array(keyed)
        self._tokens_walked = lru_cache(maxsize=1 << 14)(documents.walked_tokens)
        self._parts: list[_Part] = []
        epoch, used = 0, used or (0,) * len(keyed)
        for stage, stop in zip(stages, [*(stage.begin for stage in stages[1:]), end], strict=True):
            rates = tuple(r * int(n) for r, n in zip(stage.repeats, documents.counts, strict=True))
            part = _Part(stage.begin, epoch, used, rates, None, None if stop is None else limits)
            if stop is not None and stop > stage.begin:
                part = replace(part, length=self._length(part, stop - stage.begin))
                assert part.length is not None
                epoch, used = epoch + ceil(part.length), part.uses_after(part.length)
            if stop is None or stop > stage.begin:  # a stage without steps leaves nothing behind
                self._parts.append(part)
            if stop is not None and stage is stages[-1]:
                self._parts.append(_Part(stop, epoch, used, rates, None))
        self.tokens_before_epoch = lru_cache(maxsize=256)(self._count_tokens)
        self.uses_before = lru_cache(maxsize=8)(self._count_uses)
        self.indices: dict[tuple[int | None, int], EpochIndex] = {}  # of its streams, by key and epoch

    def _tokens(self, part: _Part, epochs: Fraction | int) -> int:
        """Tokens of so many epochs of a part."""
        after = enumerate(zip(part.used, part.uses_after(epochs), strict=True))
        return sum(self._tokens_walked(n, b) - self._tokens_walked(n, a) for n, (a, b) in after if b > a)

    def _length(self, part: _Part, tokens: int) -> Fraction:
        """The smallest number of epochs of an endless part with so many tokens, to a document of each source."""
        low, high = 0, 1
        while (found := self._tokens(part, high)) < tokens:
            if part.limits is not None and part.uses_after(high) == tuple(
                limit if rate else used for limit, rate, used in zip(part.limits, part.rates, part.used, strict=True)
            ):
                raise ValueError(f"{found:,} of {tokens:,} tokens")
            low, high = high, 2 * high
        pieces = 1 << (4 * (int(sum(part.rates)) + 1)).bit_length()  # of an epoch
        low, high = low * pieces, high * pieces  # fewer than `tokens` at low, or none
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._tokens(part, Fraction(middle, pieces)) < tokens else (low, middle)
        return Fraction(high, pieces)

    def _part_of(self, epoch: int) -> _Part:
        return self._parts[bisect_right(self._parts, epoch, key=lambda part: part.first_epoch) - 1]

    def _count_uses(self, epoch: int) -> np.ndarray:
        part = self._part_of(epoch)
        return np.array(part.uses_after(epoch - part.first_epoch))

    def _count_tokens(self, epoch: int) -> int:
        """Tokens, special ones included, that the stream has delivered when `epoch` (from 0) begins."""
        part = self._part_of(epoch)
        return part.begin + self._tokens(part, epoch - part.first_epoch)

    def epoch_of(self, position: int) -> int:
        """The epoch that holds the stream's token number `position`."""
        number = bisect_right(self._parts, position, key=lambda part: part.begin) - 1
        low = self._parts[number].first_epoch
        if number + 1 < len(self._parts):
            high = self._parts[number + 1].first_epoch
        else:
            high = low + 1
            while self.tokens_before_epoch(high) <= position:
                low, high = high, 2 * high - self._parts[number].first_epoch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.tokens_before_epoch(middle) <= position else (low, middle)
        return low

    def uses_at_end(self) -> tuple[int, ...]:
        """Documents of each walk used when the run ends."""
        return self._parts[-1].used

    def content(self, epoch: int) -> list[list[int]]:
        """Numbers that decide which documents an epoch of a corpus has."""
        counts = self._documents.counts
        return [each.tolist() for each in (counts, self._keyed, self.uses_before(epoch), self.uses_before(epoch + 1))]

    def documents_in(self, epoch: int) -> int:
        """Documents in an epoch, repeats counted."""
        return int((self.uses_before(epoch + 1) - self.uses_before(epoch)).sum())

    def documents_of(self, epoch: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document behind each slot of an epoch, how often it was used before, and its source; int64 [n] each. An
        epoch's slots are the uses of the first source in it, then those of the next, ..."""
        documents, before = self._documents, self.uses_before(epoch)
        ends = np.cumsum(self.uses_before(epoch + 1) - before)
        sources = np.searchsorted(ends, [slots.min(), slots.max()], side="right") if len(slots) else [0, 0]
        if sources[0] == sources[1]:  # numbers instead of arrays of them
            source_of = np.full(len(slots), number := sources[0])
        else:
            source_of = number = np.searchsorted(ends, slots, side="right")
        firsts = ends - np.diff(ends, prepend=0)  # of each source, among the slots
        walked = slots + (before - firsts)[number]
        if sources[0] == sources[1] and len(slots):  # a part of one pass, as most are, needs no division of each
            most, count = int(walked.max()) // (size := int(documents.counts[number])), int(walked.min()) // size
            uses = np.full(len(slots), most) if most == count else walked // size
        else:
            uses = walked // documents.counts[number]
        local = walked - uses * documents.counts[number]
        walks = np.flatnonzero(self._keyed & (np.bincount(np.atleast_1d(number), minlength=len(ends)) > 0)).tolist()
        if len(walks) == 1 or len(slots) > _MANY * len(walks):
            for walk in walks:
                here = np.flatnonzero(source_of == walk)
                local[here] = documents.walk(walk).permutation(local[here])
        elif walks:  # of many sources some documents each
            place = np.full(len(ends), -1)
            place[walks] = np.arange(len(walks))
            here = np.flatnonzero(place[source_of] >= 0)
            permutations = [documents.walk(walk).permutation for walk in walks]
            local[here] = permute_each(permutations, place[source_of[here]], local[here])
        return documents.first_documents[number] + local, uses, source_of

    def source_tokens(self, position: int) -> np.ndarray:
        """Tokens of each source before `position`, float64 [sources], special ones included; they add up to it.

        Exact where a stage or a whole epoch ends (to what the end cuts off a document); within an epoch, all sources
        are as far as the epoch is, as they are on average."""
        total = np.zeros(len(self._keyed))
        for part, following in zip(self._parts, [*self._parts[1:], None], strict=True):
            stop = position if following is None else min(position, following.begin)
            if stop <= part.begin:
                break
            epoch = self.epoch_of(stop - 1)
            begin, inside = self._walked(epoch), self._walked(epoch + 1) - self._walked(epoch)
            fraction = (stop - self.tokens_before_epoch(epoch)) / inside.sum()
            total += begin - self._walked_at(part.used) + inside * fraction
        return total

    def _walked(self, epoch: int) -> np.ndarray:
        return self._walked_at(self.uses_before(epoch).tolist())

    def _walked_at(self, uses: Sequence[int]) -> np.ndarray:
        return np.array([self._tokens_walked(number, count) for number, count in enumerate(uses)], np.float64)
