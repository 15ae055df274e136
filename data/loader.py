"""Data loader, batches ahead of the device: a background thread reads and packs the rows of the coming steps.

Only token ids, row keys and counts travel to the device; masks and document boundaries are computed there (masking.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from data.corpus import Corpus
from data.documents import UNSCORED
from data.mask_rates import SCHEDULED, MaskRates
from data.masking import PADDING, MaskingOptions, ModelInputs, RowRates, build_inputs, row_counts, target_weights
from data.mix_plan import MixPlan
from data.objectives import numbers_of
from data.plan import DataPlan, RowRange, StepPlan, rows_of_rank
from data.reading import row_ends
from data.row_shuffle import RowShuffle
from data.stop_event import stop_event
from data.stream import TokenStream

_CLOSE_SECONDS = 5.0
# Fields of RowBatch that go to the device.
TENSORS = ("tokens", "row_keys", "objective", "mask_counts", "origins", "target_weights", "scored", "ends", "sources")
WEIGHT_UNITS = 1 << 23  # in which sums of weights are exact: float32 numbers from 1 on are multiples of 1 / this
_COUNTS = ("targets", "documents")  # and those that the host keeps


@dataclass(frozen=True)
class RowBatch:
    """R rows of T tokens. Tensors lie on the CPU until `to` moves them; the counts are known on the host at once.

    tokens: int32 [R, T+1] (see masking.py), `<s>` in the first column with MaskingOptions.row_start. row_keys: int64
    [R]. objective: int64 [R], numbers in the run's objectives. mask_counts: int64 [R]. origins: int64 [R, T+1] or None.
    target_weights: float32 [R], what each target of a row weighs beside others of its objective, or None where all
    weigh 1. scored: bool [R, T+1], the tokens that are targets of objectives with all targets, or None for all. ends:
    int32 [R, T] of data/reading.py, or None in runs without rows that look ahead. sources: int64 [R], of a mix of
    several the source of a row's first token, else None. On the host, of each row by objective, int64 [objectives, R]:
    targets, and documents, as many as the row touches or more; none in the lines of other objectives than the row's.
    """

    tokens: torch.Tensor
    row_keys: torch.Tensor
    objective: torch.Tensor
    mask_counts: torch.Tensor
    origins: torch.Tensor | None
    target_weights: torch.Tensor | None
    scored: torch.Tensor | None
    ends: torch.Tensor | None
    sources: torch.Tensor | None
    targets: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def _map(self, function) -> RowBatch:
        tensors = {name: getattr(self, name) for name in TENSORS}
        return replace(self, **{name: None if t is None else function(t) for name, t in tensors.items()})

    def pin(self) -> RowBatch:
        """A copy in page-locked memory, from which copies to a CUDA device run asynchronously."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> RowBatch:
        """A copy on `device`; asynchronous from page-locked memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def slice(self, begin: int, end: int) -> RowBatch:
        """Rows `begin` .. `end - 1`."""
        counts: dict[str, Any] = {name: getattr(self, name)[:, begin:end] for name in _COUNTS}
        return replace(self._map(lambda tensor: tensor[begin:end]), **counts)

    def has_masks(self, options: MaskingOptions) -> bool:
        """Whether there are rows in which spans are masked, be it none of their tokens."""
        return bool(self.documents[list(numbers_of(lambda each: each.mask, options.objectives))].any())

    def inputs(self, options: MaskingOptions) -> ModelInputs:
        """Model inputs and labels, computed on the device of the tensors."""
        tensors = (self.tokens, self.row_keys, self.objective, self.mask_counts)
        more = (self.origins, self.scored, self.ends)
        return build_inputs(*tensors, options, *more, draw_masks=self.has_masks(options))


@dataclass(frozen=True)
class StepBatch:
    """A rank's rows of global batch `plan.step`; `rows` counts its rows by objective as `targets` does its targets."""

    plan: StepPlan
    batch: RowBatch
    rows_per_micro_batch: int
    passes: int = 0  # micro-batches of the rank that has most of them

    @property
    def targets(self) -> np.ndarray:
        """Targets of this rank by objective; int64 [objectives]."""
        return self.batch.targets.sum(axis=1)

    @property
    def target_weights(self) -> np.ndarray:
        """What these weigh together, in units of 1 / WEIGHT_UNITS; int64 [objectives]."""
        weights = self.batch.target_weights
        units = 1.0 if weights is None else weights.numpy().astype(np.float64)
        return (self.batch.targets * np.int64(WEIGHT_UNITS) * units).astype(np.int64).sum(axis=1)

    def micro_batches(self, device: torch.device) -> Iterator[RowBatch]:
        """The rank's rows on `device`, in pieces of at most rows_per_micro_batch."""
        batch, size = self.batch.to(device), self.rows_per_micro_batch
        cuts = [*range(0, len(batch), size), len(batch)]
        if len(cuts) > 2 and len(batch) % size == 1 and size > 2:
            cuts[-2] -= 1  # torch.compile would specialise on a single row
        for begin, end in pairwise(cuts):
            yield batch.slice(begin, end)


def micro_batch_rows(local_batch_size: int, seq_length: int, row_length: int) -> int:
    """Rows of `row_length` tokens in a micro-batch that holds `local_batch_size` rows of `seq_length` tokens."""
    return max(1, local_batch_size * seq_length // row_length)


def micro_batches(
    plan: StepPlan, rows: int, world_size: int, local_batch_size: int, seq_length: int
) -> tuple[int, int]:
    """How many micro-batches each of `world_size` ranks computes in a step at most, and of how many rows a rank's are.
    Ranks that have more `rows` than others (`rows_of_rank`), since these cost less, take a few more at a time."""
    size = micro_batch_rows(local_batch_size, seq_length, plan.seq_length)
    passes = -(-plan.rows // (world_size * size))
    return passes, max(size, -(-rows // passes))


def _pack(
    tokens, keys, objective: int, rates: RowRates, options: MaskingOptions, origins, marked: bool, sources=None
) -> RowBatch:
    """Rows of one objective (tokens [R, T+1], keys [R], origins [R, T+1] or None) with their target counts.

    marked: whether UNSCORED is added to some tokens. sources: [R] or None. Writes `<s>` into the rows' first column,
    which no row owns."""
    scored = tokens < UNSCORED if marked else None
    if scored is not None:
        tokens = tokens - UNSCORED * ~scored
    if options.row_start:
        tokens[:, 0] = options.bos_id
    of, ends = options.objectives[objective], None
    if any(each.looks_ahead for each in options.objectives):
        ends = row_ends(of, tokens, keys, options)
    targets = np.zeros((len(options.objectives), len(tokens)), np.int64)
    masked, targets[objective] = row_counts(of, tokens, keys, rates, options, scored, ends)
    weights = target_weights(of, tokens, masked, options)
    documents = np.zeros_like(targets)
    documents[objective] = np.count_nonzero(tokens[:, 1:-1] == options.bos_id, axis=1) + 2  # a row's start, its padding
    return RowBatch(
        tokens=torch.from_numpy(tokens),
        row_keys=torch.from_numpy(keys),
        objective=torch.full((len(tokens),), objective),
        mask_counts=torch.from_numpy(masked),
        origins=None if origins is None else torch.from_numpy(origins),
        target_weights=None if weights is None else torch.from_numpy(weights),
        scored=None if scored is None else torch.from_numpy(scored),
        ends=None if ends is None else torch.from_numpy(ends),
        sources=None if sources is None else torch.from_numpy(sources),
        targets=targets,
        documents=documents,
    )


class ReadAhead:
    """Threads that read what is needed later, each piece of work once; they know of the last `kept`."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._begun: dict[tuple[int, int], threading.Thread] = {}

    def is_new(self, name: tuple[int, int]) -> bool:
        """Whether no work was begun under a name."""
        return name not in self._begun

    def start(self, name: tuple[int, int], work: Callable[[], None]) -> None:
        """Do some work, after what was begun under this first number: what is needed first has the link to itself."""
        before = [thread for (objective, _), thread in self._begun.items() if objective == name[0]]

        def in_turn() -> None:
            for thread in before:
                thread.join()
            work()

        self._begun[name] = threading.Thread(target=in_turn, name="read ahead", daemon=True)
        self._begun[name].start()
        while len(self._begun) > self._kept:
            del self._begun[next(iter(self._begun))]


class BatchBuilder:
    """Builds any rank's rows of any step; holds the streams and nothing that changes a result."""

    def __init__(self, corpus: Corpus, plan: DataPlan, options: MaskingOptions):
        self.corpus, self.plan, self.options = corpus, plan, options
        keys = [plan.stream_key(objective) for objective in range(len(plan.objectives))]
        self.mix = MixPlan(corpus, plan)
        epochs = self.mix.epochs
        self._streams = [TokenStream(corpus, key, of) for key, of in zip(keys, epochs, strict=True)]
        window = corpus.block_order.window if corpus.block_order else None
        self._orders = [RowShuffle(epochs[n], key, plan.spans(n), window) for n, key in enumerate(keys)]
        self._ahead = ReadAhead(2 * len(keys))  # this window and the next

    def rows(self, step: StepPlan, wanted: RowRange) -> RowBatch:
        """The rows of one objective."""
        positions = self._positions(step, wanted)
        # With the first token of the row that follows in the stream, which is the last target.
        several, even = len(self.options.sources) > 1, self.options.even
        tokens, origins = self._streams[wanted.objective].read_rows(
            positions, step.seq_length + 1, origins=even or several
        )
        keys = self.plan.row_keys(wanted.objective, positions)
        sources = self.corpus.sources_of(origins[:, 1:]) if several and origins is not None else None
        origins = origins if even else None
        return _pack(tokens, keys, wanted.objective, step.rates, self.options, origins, self.corpus.has_marks, sources)

    def _positions(self, step: StepPlan, wanted: RowRange) -> np.ndarray:
        """Where the rows begin in their stream."""
        order, first = self._orders[wanted.objective], step.position[wanted.objective]
        if self.corpus.blocks is None:
            return order.positions(first + wanted.first * step.seq_length, len(wanted))
        # In the order of the stream each rank reads its part of a window's blocks, whichever step it is.
        rows = step.objective_rows[wanted.objective]
        positions = np.sort(order.positions(first, rows))[wanted.first : wanted.last]
        begin, end = order.window(int(positions[0]))
        for name in (begin, end):  # this window, if it is the first, and the next
            if self._ahead.is_new((wanted.objective, name)):
                begin, end = order.window(name)
                low, high = (begin + (end - begin) * row // rows for row in (wanted.first, wanted.last))
                blocks = self._streams[wanted.objective].blocks_of(low, high)
                self._ahead.start((wanted.objective, name), partial(self.corpus.blocks.read_ahead, blocks))
        return positions

    def step(self, step: int, rank: int, world_size: int, split: str, local_batch_size: int) -> StepBatch:
        """The rows of `rank` in global batch `step`."""
        plan = self.plan.step(step)
        parts = [self.rows(plan, wanted) for wanted in rows_of_rank(plan, rank, world_size, split)]
        return self._step_batch(plan, parts, world_size, local_batch_size)

    def like(
        self, batch: RowBatch, step: int, rank: int, world_size: int, split: str, local_batch_size: int
    ) -> StepBatch:
        """A batch of the shapes that `step` gives `rank`, made of the tokens of `batch`: nothing is read."""
        plan, parts = self.plan.step(step), []
        for wanted in rows_of_rank(plan, rank, world_size, split):
            shape = (len(wanted), plan.seq_length + 1)
            origins = None if batch.origins is None else np.resize(batch.origins.numpy(), shape)
            tokens, keys = np.resize(batch.tokens.numpy(), shape), np.resize(batch.row_keys.numpy(), len(wanted))
            if batch.scored is not None:
                tokens = tokens + UNSCORED * ~np.resize(batch.scored.numpy(), shape)
            marked = batch.scored is not None
            sources = None if batch.sources is None else np.resize(batch.sources.numpy(), len(wanted))
            parts.append(_pack(tokens, keys, wanted.objective, plan.rates, self.options, origins, marked, sources))
        return self._step_batch(plan, parts, world_size, local_batch_size)

    def _step_batch(self, plan: StepPlan, parts: list[RowBatch], world_size: int, local_batch_size: int) -> StepBatch:
        batch = parts[0] if len(parts) == 1 else _concatenate(parts)
        passes, size = micro_batches(plan, len(batch), world_size, local_batch_size, self.plan.seq_length)
        return StepBatch(plan, batch, size, passes)


def _concatenate(parts: list[RowBatch]) -> RowBatch:
    def join(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    counts: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts], axis=1) for name in _COUNTS}
    return RowBatch(**{name: join(name) for name in TENSORS}, **counts)


class Loader:
    """Iterates over the step batches of one rank from `start_step` on, prepared by a background thread.

    depth: steps prepared ahead. waited: seconds the consumer has spent waiting for data so far; late: for the
    step that comes next.
    An error in the thread is raised by the next call; `close` stops the thread, also while it builds an index."""

    def __init__(
        self,
        builder: BatchBuilder,
        *,
        rank: int,
        world_size: int,
        split: str,
        local_batch_size: int,
        start_step: int = 0,
        end_step: int | None = None,
        pin_memory: bool = False,
        depth: int = 2,
    ):
        self._builder, self._pin = builder, pin_memory
        self._arguments = (rank, world_size, split, local_batch_size)
        self._steps = range(start_step, builder.plan.max_steps if end_step is None else end_step)
        self._queue: queue.Queue = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._next: StepBatch | None = None  # seen, but not taken
        self._ended = False
        self.waited = self.late = self._waited_before = 0.0
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        stop_event.set(self._stopped)  # of this thread alone
        try:
            for step in self._steps:
                item = self._builder.step(step, *self._arguments)
                self._put(replace(item, batch=item.batch.pin()) if self._pin else item)
                if self._stopped.is_set():
                    return
            self._put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(error)

    def _put(self, item) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def peek(self, seconds: float | None = None) -> StepBatch | None:
        """The next step, again and again until `advance`; None after the last, or if it takes more than `seconds`."""
        if self._next is None and not self._ended:
            start = time.perf_counter()
            try:
                item = self._queue.get(timeout=seconds)
                self._ended = item is None
            except queue.Empty:
                item = None
            seconds = time.perf_counter() - start
            self.waited += seconds
            self.late = self.late + seconds if item is None else 0.0
            if isinstance(item, BaseException):
                raise item
            self._next = item
        return self._next

    def advance(self) -> float:
        """Go on to the step after the one seen; returns the seconds that the consumer has waited for that one."""
        self._next = None
        waited, self._waited_before = self.waited - self._waited_before, self.waited
        return waited

    def __iter__(self) -> Iterator[StepBatch]:
        while (batch := self.peek()) is not None:
            self.advance()
            yield batch

    def close(self) -> None:
        """Stop the thread and wait for it; one that hangs in a file system is left behind and ends with the process."""
        self._stopped.set()
        self._thread.join(_CLOSE_SECONDS)


@dataclass(frozen=True)
class ValidationSet:
    """All rows of a held-out corpus in stored order, with masks that are always the same.

    corpus: the documents. seq_length: tokens per row. mask_p, mask_rates: masked fraction. seed: of the masks.
    rows: how many of the set's rows to use, spread evenly over it; None uses all."""

    corpus: Corpus
    options: MaskingOptions
    seq_length: int
    mask_p: float = 0.15
    mask_rates: MaskRates = SCHEDULED
    seed: int = 0
    rows: int | None = None

    @property
    def total_rows(self) -> int:
        """Rows in the whole set; the last may be padded."""
        return -(-(self.corpus.tokens_before_epoch(1) - 1) // self.seq_length)

    @property
    def used_rows(self) -> int:
        """Rows that are evaluated."""
        return self.total_rows if self.rows is None else min(self.rows, self.total_rows)

    def in_rows_of(self, seq_length: int) -> ValidationSet:
        """The same set in rows of `seq_length` tokens; where a part of it is used, about as many tokens."""
        rows = None if self.rows is None else max(1, self.rows * self.seq_length // seq_length)
        return replace(self, seq_length=seq_length, rows=rows)

    def batches(self, objective: int, rank: int, world_size: int, batch_rows: int) -> Iterator[RowBatch]:
        """This rank's rows, `batch_rows` at a time; all ranks together hold every row once."""
        # Fixed keys for everybody: runs with different seeds are validated on the same masks.
        stream, length = TokenStream(self.corpus, None), self.seq_length
        end = self.corpus.tokens_before_epoch(1)
        begin_row, end_row = self.used_rows * rank // world_size, self.used_rows * (rank + 1) // world_size
        plan = DataPlan(1, length, 1, batch_reduction=1, seed=self.seed, milestones=())
        for first in range(begin_row, end_row, batch_rows):
            numbers = np.arange(first, min(first + batch_rows, end_row)) * self.total_rows // self.used_rows
            begins = numbers * length
            tokens = np.full((len(numbers), length + 1), PADDING, np.int32)
            whole = begins + length < end
            tokens[whole] = stream.read_rows(begins[whole], length + 1)[0]
            if not whole[-1]:  # the set's last row
                tokens[-1, : end - begins[-1]] = stream.read(int(begins[-1]), int(end - begins[-1]))[0]
            keys = plan.row_keys(objective, begins)
            rates = RowRates(self.mask_rates, self.mask_p)
            yield _pack(tokens, keys, objective, rates, self.options, None, self.corpus.has_marks)
