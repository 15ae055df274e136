"""Data plan, what is in global batch `step`: pure functions of the run's configuration, the same on any hardware.

Rows are numbered from 0 in the order in which they are used. Row n has one objective by exact integer rounding:
objectives with a fraction of their own (data/objectives.py) come first, what they leave is masked or causal by the
hybrid ratio (data/ratio_schedule.py), and causal rows are divided as --causal_rows says. Each objective reads its own
stream to the end, so prefix sums over the schedules (data/batch_schedule.py) tell which rows a step holds; they are
used in a shuffled order (data/row_shuffle.py). The mask probability is linear over the run (GPT-BERT, arXiv
2410.24159).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import mul
from typing import TypeVar

import numpy as np

from data.batch_schedule import BatchSchedule
from data.counter_rng import fold, fold_numpy
from data.mask_rates import SCHEDULED, MaskRates
from data.masking import RowRates
from data.objectives import OBJECTIVES, Objective, row_fractions
from data.ratio_schedule import RatioPoint, RatioSchedule

# What a random number is for; part of every key, so that no two purposes share random numbers.
_ORDER, _ROW, _STEP = 1, 2, 3

_Rows = TypeVar("_Rows", int, np.ndarray)


def _set_aside(rows: _Rows, fractions: Iterable[Fraction]) -> tuple[_Rows, list[_Rows]]:
    """Of a first `rows` rows those that are left when each of others has taken its fraction, and those of each. Each
    takes its part of what the ones before it have left, so that no row is taken twice."""
    taken, unclaimed = [], Fraction(1)
    for fraction in fractions:
        part = fraction / unclaimed if fraction else fraction
        taken.append(rows * part.numerator // part.denominator)
        rows, unclaimed = rows - taken[-1], unclaimed * (1 - part)
    return rows, taken


def _divided(causal: _Rows, taken: list[_Rows], objectives: tuple[Objective, ...]) -> list[_Rows]:
    """A run's first rows of all objectives but the masked one, where the ratio leaves `causal` to them."""
    causal, parts = _set_aside(causal, [each.part for each in objectives[2:]])
    return [causal, *(part + other for part, other in zip(parts, taken, strict=True))]


@dataclass(frozen=True)
class StepPlan:
    """Global batch `step`. objectives: those of the run, in the order in which all else is listed by objective.

    seq_length: tokens per row. rows: rows in the batch. first_row: number of its first row in the run.
    objective_rows: rows of each objective among them.
    mask_p: the expected fraction of a masked row's tokens that is masked. rates: that of each row.
    position: for each objective, where its first row is in its stream's row order (data/row_shuffle.py), in tokens.
    ratio, ratio_carry: row i of those left to the ratio is masked where
        floor((ratio_carry + (i+1)*ratio) / denominator) exceeds floor((ratio_carry + i*ratio) / denominator).
    target_cost: of DataPlan."""

    step: int
    seq_length: int
    rows: int
    first_row: int
    objective_rows: tuple[int, ...]
    position: tuple[int, ...]
    objectives: tuple[Objective, ...]
    mask_p: float
    rates: RowRates
    ratio: int
    ratio_carry: int
    denominator: int
    target_cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in the global batch."""
        return self.rows * self.seq_length

    def among(self, rows: int) -> tuple[int, ...]:
        """Rows of each objective among the first `rows` rows of the batch."""
        fractions, first = [each.rows for each in self.objectives[2:]], self.first_row
        left_before, _ = _set_aside(first, fractions)

        def of_run(rows: int) -> tuple[int, ...]:
            left, taken = _set_aside(rows, fractions)
            masked = (self.ratio_carry + (left - left_before) * self.ratio) // self.denominator
            return masked, *_divided(left - masked, taken, self.objectives)

        return tuple(end - begin for begin, end in zip(of_run(first), of_run(first + rows), strict=True))

    def objective_of(self, row: int) -> int:
        """The objective's number of row `row` (0 .. rows-1) of the batch."""
        before, after = self.among(row), self.among(row + 1)
        return next(number for number in range(len(before)) if after[number] > before[number])


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one objective in a step: the `first`-th to before the `last`-th of that objective."""

    objective: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class DataPlan:
    """The data schedule of a run. Units: rows, tokens, optimizer steps; `milestones` are fractions of max_steps.

    hybrid_schedule: the masked fraction of rows at each step, in place of the constant or evenly moving one that
    hybrid_numerator, hybrid_denominator and hybrid_numerator_end name.
    open_end: the order of rows does not depend on where the run ends, so that a longer one goes on without repeating.
    earlier_ends: steps at which runs that this one goes on from were to end; rows before stay in their order.
    mask_rates: how the rates of rows are drawn.
    objectives: data.objectives.run_objectives of the run.
    target_cost: what a target costs, in the model's head, beside what each token costs; decides which rank computes a
    row, and nothing else."""

    max_steps: int
    seq_length: int
    global_batch_size: int
    batch_reduction: float = 4.0
    hybrid_numerator: int = 15
    hybrid_denominator: int = 16
    hybrid_numerator_end: int | None = None
    mask_p_start: float = 0.3
    mask_p_end: float = 0.15
    milestones: tuple[float, ...] = (0.7, 0.9)
    seed: int = 42
    hybrid_schedule: RatioSchedule | None = None
    open_end: bool = False
    earlier_ends: tuple[int, ...] = ()
    mask_rates: MaskRates = SCHEDULED
    objectives: tuple[Objective, ...] = OBJECTIVES
    target_cost: float = 0.0
    schedule: BatchSchedule = field(init=False, repr=False, compare=False)
    ratios: RatioSchedule = field(init=False, repr=False, compare=False)
    _row_sums: np.ndarray = field(init=False, repr=False, compare=False)
    _denominator: int = field(init=False, repr=False, compare=False)
    _ratios: list[int] = field(init=False, repr=False, compare=False)
    _ratio_sums: list[int] = field(init=False, repr=False, compare=False)
    _objective_rows: np.ndarray = field(init=False, repr=False, compare=False)
    _token_sums: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = (self.max_steps, self.seq_length, self.global_batch_size, self.batch_reduction, self.milestones)
        schedule = BatchSchedule(*sizes)
        row_sums = np.concatenate([[0], np.cumsum(schedule.rows)])
        first_left, taken = _set_aside(row_sums, [each.rows for each in self.objectives[2:]])
        left = np.diff(first_left)
        ratios = self.hybrid_schedule or self._evenly_moving_ratio()
        # Python integers: exact however long the run is.
        denominator, numerators = ratios.denominator, ratios.numerators(self.max_steps)
        ratio_sums = [0, *accumulate(count * ratio for count, ratio in zip(left.tolist(), numerators, strict=True))]
        masked = np.array([total // denominator for total in ratio_sums], dtype=np.int64)
        objective_rows = np.diff(np.stack([masked, *_divided(first_left - masked, taken, self.objectives)]), axis=1)
        token_sums = np.cumsum(objective_rows * self.seq_length * schedule.factors, axis=1)
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "ratios", ratios)
        object.__setattr__(self, "_row_sums", row_sums)
        object.__setattr__(self, "_denominator", denominator)
        object.__setattr__(self, "_ratios", numerators)
        object.__setattr__(self, "_ratio_sums", ratio_sums)
        object.__setattr__(self, "_objective_rows", objective_rows)
        object.__setattr__(self, "_token_sums", np.pad(token_sums, ((0, 0), (1, 0))))

    def _evenly_moving_ratio(self) -> RatioSchedule:
        start = Fraction(self.hybrid_numerator, self.hybrid_denominator)
        if self.hybrid_numerator_end is None:
            return RatioSchedule((RatioPoint(0, start),))
        return RatioSchedule.linear(start, Fraction(self.hybrid_numerator_end, self.hybrid_denominator), self.max_steps)

    def step(self, step: int) -> StepPlan:
        """The plan of global batch `step` (0 .. max_steps-1), found without looking at the steps before it."""
        if not 0 <= step < self.max_steps:
            raise ValueError(f"step {step} lies outside the run's 0 .. {self.max_steps - 1}")
        p = self.mask_p_start + (self.mask_p_end - self.mask_p_start) * (step / self.max_steps)
        rates = RowRates(self.mask_rates, p)
        return StepPlan(
            step=step,
            seq_length=self.seq_length * int(self.schedule.factors[step]),
            rows=int(self.schedule.rows[step]),
            first_row=int(self._row_sums[step]),
            objective_rows=tuple(self._objective_rows[:, step].tolist()),
            position=tuple(self._token_sums[:, step].tolist()),
            objectives=self.objectives,
            mask_p=self.mask_rates.mean(p),
            rates=rates,
            ratio=self._ratios[step],
            ratio_carry=self._ratio_sums[step],
            denominator=self._denominator,
            target_cost=self.target_cost,
        )

    def tokens_before(self, step: int) -> int:
        """Tokens in all global batches before `step` (0 .. max_steps), all objectives together."""
        return self.schedule.tokens_before(step)

    def objective_tokens_before(self, step: int) -> list[int]:
        """Tokens of each objective in all global batches before `step` (0 .. max_steps)."""
        return self._token_sums[:, step].tolist()

    def objective_tokens(self, objective: int) -> int:
        """Tokens that the whole run reads from an objective's stream."""
        return int(self._token_sums[objective][-1])

    @property
    def smallest_batch(self) -> int:
        """Rows in the smallest global batch of the run."""
        return int(self.schedule.rows.min())

    def shape_spans(self) -> list[tuple[int, int]]:
        """First step and end of the stretches of the run in which row length and ratio, or its ramp, stay the same."""
        cuts = {*self.length_changes(), *(point.step for point in self.ratios.points if point.step < self.max_steps)}
        return [(begin, end) for begin, end in pairwise(sorted(cuts)) if begin < end]

    def largest_steps(self, first: int) -> list[int]:
        """Of the steps from `first` on, the one with most rows of each row length and ratio; in order. Of a ramp of the
        ratio also its ends, where objectives have most rows."""
        found: dict[tuple, int] = {}
        for begin, end in self.shape_spans():
            begin = max(begin, first)
            if begin >= end:
                continue
            ends = {begin, end - 1} if self._ratios[begin] != self._ratios[end - 1] else set()
            for step in sorted({begin + int(self.schedule.rows[begin:end].argmax()), *ends}):
                key = (int(self.schedule.factors[step]), self._ratios[step])
                if key not in found or self.schedule.rows[step] > self.schedule.rows[found[key]]:
                    found[key] = step
        return sorted(found.values())

    @property
    def longest_row(self) -> int:
        """Largest row length of the run in tokens."""
        return self.seq_length * int(self.schedule.factors[-1])

    def stream_key(self, objective: int) -> int:
        """Key of the order of documents, and of rows, in an objective's stream."""
        return fold(fold(self.seed, _ORDER), objective)

    def length_changes(self) -> list[int]:
        """Step 0, every step whose rows are longer than those of the step before, and max_steps."""
        return [0, *(np.flatnonzero(np.diff(self.schedule.factors)) + 1).tolist(), self.max_steps]

    def spans(self, objective: int) -> list[tuple[int, int, int]]:
        """First token, end and row length of each part of an objective's stream whose rows are shuffled by themselves:
        they have one length, and are all before an earlier end or all behind it."""
        sums, lengths = self._token_sums[objective], self.seq_length * self.schedule.factors
        cuts = sorted({*self.length_changes(), *(step for step in self.earlier_ends if step < self.max_steps)})
        spans = [(int(sums[a]), int(sums[b]), int(lengths[a])) for a, b in pairwise(cuts)]
        return [*spans[:-1], (spans[-1][0], 1 << 62, spans[-1][2])] if self.open_end else spans

    def row_keys(self, objective: int, positions: np.ndarray) -> np.ndarray:
        """One 64-bit key per row, from which its masks and its dropout derive; int64 [n]. positions: of the rows' first
        tokens in the stream of their objective, int64 [n]."""
        return fold_numpy(fold(fold(self.seed, _ROW), objective), positions).view(np.int64)

    def step_key(self, step: int) -> int:
        """64-bit key for randomness that all rows of a step share (dropout on the position table)."""
        return fold(fold(self.seed, _STEP), step)


def resolve_split(
    split: str,
    world_size: int,
    ratios: Collection[Fraction] | None,
    objectives: tuple[Objective, ...] = OBJECTIVES,
) -> str:
    """`rows` or `ranks` for the flag --hybrid_split `auto`, `rows` or `ranks`.

    ratios: RatioSchedule.phases, the fractions of masked rows that there are in the run; None where they move evenly.
    `ranks` gives each rank one objective at a time, which needs for each of these fractions and each objective a whole
    number of ranks. Raises ValueError where `ranks` is asked for and impossible."""
    fractions = [fraction for ratio in ratios or () for fraction in row_fractions(ratio, objectives)]
    broken = next((fraction for fraction in fractions if world_size % fraction.denominator), None)
    possible = ratios is not None and broken is None
    if split == "ranks" and not possible:
        why = "the ratio changes evenly" if ratios is None else f"{broken} of {world_size} ranks is no whole number"
        raise ValueError(f"--hybrid_split ranks is not possible because {why}; use --hybrid_split rows (or auto)")
    if split == "auto":
        return "ranks" if possible else "rows"
    return split


def _cut(plan: StepPlan, index: int, parts: int) -> list[int]:
    """Rows of each objective before part `index`, where all rows, one objective after the other, are cut into `parts`
    pieces of the same cost."""
    costs = [1 + plan.target_cost * each.target_fraction(plan.mask_p) for each in plan.objectives]
    left = sum(map(mul, plan.objective_rows, costs)) * index / parts
    found = []
    for rows, cost in zip(plan.objective_rows, costs, strict=True):
        found.append(min(rows, round(left / cost)))
        left = max(0.0, left - rows * cost)
    return found


def _slice(total: int, index: int, parts: int) -> tuple[int, int]:
    """Bounds of part `index` when 0 .. total is cut into `parts` pieces whose sizes differ by at most one."""
    return total * index // parts, total * (index + 1) // parts


def rows_of_rank(plan: StepPlan, rank: int, world_size: int, split: str) -> list[RowRange]:
    """The rows of `plan` that `rank` trains on: a range per objective at most, in the table's order, causal ones last.

    All ranks together hold every row once. `split` is `rows` or `ranks` (from `resolve_split`). Their numbers of rows
    differ by at most one; but with `ranks` and a `target_cost` ranks have rows that cost the same, so that a rank in
    the middle may have two objectives."""
    ranges: list[RowRange] = []
    if split == "ranks" and plan.target_cost:
        bounds = zip(_cut(plan, rank, world_size), _cut(plan, rank + 1, world_size), strict=True)
        ranges = [RowRange(number, *of) for number, of in enumerate(bounds)]
    elif split == "ranks":
        first = 0  # rank of the objective
        for number, fraction in enumerate(row_fractions(Fraction(plan.ratio, plan.denominator), plan.objectives)):
            ranks = int(world_size * fraction)
            if first <= rank < first + ranks:
                ranges.append(RowRange(number, *_slice(plan.objective_rows[number], rank - first, ranks)))
            first += ranks
    else:
        begin, end = (plan.among(row) for row in _slice(plan.rows, rank, world_size))
        ranges = [RowRange(number, *bounds) for number, bounds in enumerate(zip(begin, end, strict=True))]
    return sorted(filter(len, ranges), key=lambda each: plan.objectives[each.objective].causal)
