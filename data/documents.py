"""Documents in shards, by their number: where they lie, their tokens, and the keyed walk through those of a source."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from threading import Lock, RLock

import numpy as np
import torch

from data.atomic_io import allow_open_files
from data.counter_rng import Permutation, fold
from data.node_memory import SHARED_FROM, shared_array
from data.offsets_table import tables_beside
from data.shards import REMAKE, Shard, ShardError
from data.stop_event import check_stop, in_threads

IndexMap = Callable[[np.ndarray], np.ndarray]

BLOCK = 16  # documents per entry of an index of lengths: a row that is read looks at about so many
_CHUNK = 1 << 15  # documents handled at once while an index is built: they stay in the processor's cache
_THREADS = 16  # at most, that build an index; twice the chunk then, so that they meet less often
_GATHERS_FROM = 4  # threads
_DROP_BYTES = 1 << 32  # release mapped pages after about so many bytes were mapped
_FAULT_BYTES = 64 << 10  # that Linux maps around an access
_MOST_MAPPED = 1 << 14  # shards, of two maps each; Linux allows a process 65,530 (vm.max_map_count)
_FEW_PIECES = 4  # a shard: copied one by one
_IN_MEMORY_SECONDS = 2e-4  # longer takes a piece that is read from a disk which the system does not count
UNSCORED = np.int32(1 << 30)  # added to a token that its shard's marks take out of the targets
OCCURRENCE_SHIFT = 46  # an origin is (times the document was used before) << 46 | position in the corpus
_BUILDING = RLock()
_SAMPLE = -2  # purpose of the key that orders sampled sources


@dataclass(frozen=True)
class Walk:
    """The keyed order in which the documents of a source are used, over and over."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: stored tokens up to the end of each block of BLOCK documents


class Documents:
    """Documents of one or more sources, addressed by a running number.

    counts: documents of each source, which follow each other in `shards`. bos_id, eos_id: ids that open and close each
    document; eos_id None leaves the end unmarked. seed: of the walks."""

    def __init__(self, shards: Sequence[Shard], counts: Sequence[int], bos_id: int, eos_id: int | None, seed: int):
        self.shards, self.bos_id, self.eos_id, self.seed = list(shards), bos_id, eos_id, seed
        self.specials_per_document = 1 + (eos_id is not None)
        # First document, and first token, of each shard.
        self.shard_documents = np.cumsum([0, *(shard.num_documents for shard in self.shards)])
        self.shard_tokens = np.cumsum([0, *(shard.num_tokens for shard in self.shards)])
        self.num_tokens = int(self.shard_tokens[-1])
        ends = np.cumsum([0, *counts])
        self.num_documents = int(ends[-1])
        self.counts, self.first_documents = np.array(counts), ends[:-1]  # of each source
        self._walk = lru_cache(maxsize=None)(self._build_walk)
        self._threads = 1 if self.num_documents < SHARED_FROM else min(_THREADS, len(os.sched_getaffinity(0)))
        self._bytes_mapped, self._in_memory = 0, False
        self._most_open = min(allow_open_files(len(self.shards)), _MOST_MAPPED)  # a mapped file keeps a descriptor
        self._opened: dict[int, None] = {}  # shards, the last used last, where not all may be open

    @cached_property
    def has_marks(self) -> bool:
        """Whether any token may be no target."""
        return any(shard.has_marks for shard in self.shards)

    @cached_property
    def source_tokens(self) -> list[int]:
        """Tokens of each source, special ones included."""
        of_shards = np.searchsorted(self.shard_documents, [*self.first_documents, self.num_documents])
        return (np.diff(self.shard_tokens[of_shards]) + self.counts * self.specials_per_document).tolist()

    # Documents by their number in the corpus

    @cached_property
    def starts(self) -> np.ndarray:
        """Stored tokens in front of each document, and of all: int64 [num_documents + 1]. Raises IndexStopped. Of a
        large corpus, shared by the processes of a node."""
        return shared_array(self.content_name("starts"), self.num_documents + 1, self._fill_starts, check_stop)

    def content_name(self, *what: object) -> str:
        """A name for something computed from document lengths and `what` else; "" of a small corpus."""
        if self.num_documents < SHARED_FROM:
            return ""
        return hashlib.sha256(repr(([shard.content_hash for shard in self.shards], what)).encode()).hexdigest()

    def _fill_starts(self, starts: np.ndarray) -> None:
        def fill(number: int) -> None:
            check_stop()
            shard, first = self.shards[number], int(self.shard_documents[number])
            part = starts[first : first + shard.num_documents]
            table = tables.get(shard.path.parent)
            if table is not None and shard in table:
                table.read_offsets(shard, part)
            else:
                shard.read_offsets(part)
            if len(part) and (part[0] or not 0 <= part[-1] <= shard.num_tokens):
                raise ShardError(f"{shard.path}: its document offsets are damaged; {REMAKE}")
            part += self.shard_tokens[number]

        with tables_beside(self.shards) as tables:
            in_threads(fill, range(len(self.shards)), self._threads)
        starts[-1] = self.num_tokens

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start (in the concatenation of all shards) and length of each document; int64 [n] both."""
        starts = self.starts[documents]
        return starts, self.starts[documents + 1] - starts

    def read(self, tokens: np.ndarray, targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray) -> None:
        """Copy stored tokens to `tokens` int32: so many (`lengths`) from each of `sources` to each of `targets`.

        sources: in the concatenation of all shards. All int64 [n], lengths above 0, no piece in two shards. Tokens that
        are no targets by their shard's marks come with UNSCORED added."""
        order = np.argsort(sources)
        sources, targets, lengths = sources[order], targets[order], lengths[order]
        shard_of = np.searchsorted(self.shard_tokens, sources, side="right") - 1
        begins = np.flatnonzero(np.diff(shard_of, prepend=-1))  # pieces at which another shard begins
        local = sources - self.shard_tokens[shard_of]
        reads, start = _reads_of_this_thread(), time.perf_counter()
        cuts = [*begins[:: self._most_open].tolist(), len(sources)]  # as many shards at once as may be open
        for first, last in pairwise(cuts):
            here = slice(first, last)
            self._read(tokens, shard_of[here], targets[here], local[here], lengths[here])
        seconds = time.perf_counter() - start
        self._in_memory = _reads_of_this_thread() == reads and seconds < _IN_MEMORY_SECONDS * len(sources)

    def _read(
        self, tokens: np.ndarray, shard_of: np.ndarray, targets: np.ndarray, local: np.ndarray, lengths: np.ndarray
    ) -> None:
        """`read` from a few shards, pieces in their order; `local`: in each piece's shard."""
        begins = np.flatnonzero(np.diff(shard_of, prepend=-1)).tolist()
        groups = [*zip(shard_of[begins].tolist(), begins, [*begins[1:], len(local)], strict=True)]
        opened = {number: self.opened(number) for number, _first, _last in groups}
        firsts, counts = local.tolist(), lengths.tolist()
        if not self._in_memory:  # ask for all at once, so that the disk is not asked piece by piece
            for number, first, count in zip(shard_of.tolist(), firsts, counts, strict=True):
                opened[number].prefetch(first, count)
        if not self.has_marks and len(local) < _FEW_PIECES * len(groups):
            for number, target, first, count in zip(shard_of.tolist(), targets.tolist(), firsts, counts, strict=True):
                tokens[target : target + count] = opened[number].tokens[first : first + count]
            return
        source, ends = ranges(local, lengths), [0, *np.cumsum(lengths).tolist()]
        found = np.empty(len(source), np.int32)
        for number, first, last in groups:
            wanted = source[ends[first] : ends[last]]
            found[ends[first] : ends[last]] = opened[number].tokens[wanted]
            if opened[number].has_marks:
                found[ends[first] : ends[last]] += UNSCORED * ~opened[number].scored(wanted)
        tokens[ranges(targets, lengths)] = found

    def opened(self, number: int) -> Shard:
        """A shard whose file is mapped; those that were not used for longest make room."""
        shard = self.shards[number]
        if len(self.shards) > self._most_open:
            self._opened.pop(number, None)
            self._opened[number] = None
            while len(self._opened) > self._most_open:
                oldest = next(iter(self._opened))
                del self._opened[oldest]
                self.shards[oldest].close()
        if shard.remote is not None and not shard.path.exists():  # it made room in the cache
            shard.close()
        shard.check_size()
        return shard

    def count_mapped(self, documents: int, tokens: int) -> None:
        """Note that so many documents and tokens were read here and there; unmaps them once that adds up."""
        self._bytes_mapped += tokens * self.shards[0].dtype.itemsize + documents * _FAULT_BYTES
        if self._bytes_mapped > _DROP_BYTES < self.num_tokens * self.shards[0].dtype.itemsize:
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

    def walk(self, number: int) -> Walk:
        """The walk through a source; built once, whichever thread asks first. Raises IndexStopped."""
        with _BUILDING:
            return self._walk(number)

    def _build_walk(self, number: int) -> Walk:
        count, first = int(self.counts[number]), self.first_documents[number]
        permutation = Permutation(fold(fold(self.seed, _SAMPLE), number), count)
        return Walk(permutation, self.block_ends(count, lambda slots: first + slots, permutation))

    def block_ends(
        self, count: int, documents: IndexMap, order: Permutation | None, extra: int = 0, name: str = ""
    ) -> np.ndarray:
        """Tokens up to the end of each block of BLOCK documents in an order, `extra` added for each: int64 [blocks].

        order: from 0 .. count-1 to slots, None: as they are. documents: from slots to documents; on few threads fast
        where these follow each other as stored. name: of `content_name`. Raises IndexStopped."""

        def fill(sums: np.ndarray) -> None:
            lock, total, chunk = Lock(), torch.from_numpy(sums), _CHUNK << (self._threads > 1)

            def work(start: int) -> None:
                check_stop()
                index = np.arange(start, min(start + chunk, count))
                if order is None or self._threads >= _GATHERS_FROM:
                    # Lengths from here and there: twice the work, but threads share all of it.
                    lengths = self.spans(documents(index if order is None else order(index)))[1] + extra
                    begins = np.arange(0, len(index), BLOCK)
                    sums[start // BLOCK : start // BLOCK + len(begins)] = np.add.reduceat(lengths, begins)
                    return
                # As they are stored, added here and there, which one thread does at a time.
                lengths = torch.from_numpy(self.spans(documents(index))[1] + extra)
                blocks = torch.from_numpy(order.inverse(index) // BLOCK)
                with lock:  # np.add.at would keep the others from computing meanwhile
                    total.index_add_(0, blocks, lengths)

            assert len(self.starts)  # before threads ask for it
            in_threads(work, range(0, count, chunk), self._threads)
            np.cumsum(sums, out=sums)

        return shared_array(name, -(-count // BLOCK), fill, check_stop)


def _reads_of_this_thread() -> int:
    """Reads from disks that the system has begun for this thread so far."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first, first + 1, ... (count of them) for each pair, one range after the other."""
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
