"""Data plan, what is in global batch `step`: pure functions of the run's configuration, the same on any hardware.

A run trains on rows, numbered from 0 in the order in which they are used. Row n is masked or causal by exact integer
rounding of the hybrid ratio, and each objective reads its own token stream to the end, so that prefix sums over the
schedules tell which rows a step holds (rows are used in a shuffled order, data/row_shuffle.py): seeking is free and
there is no loader state.

Schedules follow the published GPT-BERT training (arXiv 2410.24159; tests/golden/schedule.npz pins them), with
x = step / max_steps:
  row length       seq_length * f with f = 1, 2, 4: doubled where (step + 1) / max_steps reaches a milestone (0.7, 0.9)
  rows             int(g / reduction * (1 - x) + g * x + 0.5) with g = global_batch_size / f
  mask probability linear from mask_p_start to mask_p_end
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from data.counter_rng import fold, fold_numpy

MASKED, CAUSAL = 0, 1
OBJECTIVES = ("masked", "causal")

# What a random number is for; part of every key, so that no two purposes share random numbers.
_ORDER, _ROW, _STEP = 1, 2, 3


def rows_at(step: int, max_steps: int, global_batch_size: float, batch_reduction: float) -> int:
    """Rows in the global batch at `step` (published batch-size schedule).

    global_batch_size: rows at the end of the run, were they as long as those at `step`.
    """
    x = step / max_steps
    return int(global_batch_size / batch_reduction * (1 - x) + global_batch_size * x + 0.5)


def length_factor_at(step: int, max_steps: int, milestones: tuple[float, ...]) -> int:
    """By how much rows are longer than seq_length at `step`: 1, 2, 4, ... (published sequence-length schedule)."""
    return 2 ** sum((step + 1) / max_steps >= milestone for milestone in milestones)


def mask_probability_at(step: int, max_steps: int, start: float, end: float) -> float:
    """Fraction of tokens that are masked at `step`: linear from `start` to `end`."""
    return start + (end - start) * (step / max_steps)


@dataclass(frozen=True)
class StepPlan:
    """Global batch `step`.

    seq_length: tokens per row. rows: rows in the batch. first_row: number of its first row in the run.
    masked_rows: masked rows among them; the others are causal.
    position: for each objective, where its first row is in its stream's row order (data/row_shuffle.py), in tokens.
    ratio, ratio_carry: row i of the batch is masked where floor((ratio_carry + (i+1)*ratio) / denominator) exceeds
        floor((ratio_carry + i*ratio) / denominator).
    """

    step: int
    seq_length: int
    rows: int
    first_row: int
    masked_rows: int
    position: tuple[int, int]
    mask_p: float
    ratio: int
    ratio_carry: int
    denominator: int

    @property
    def tokens(self) -> int:
        """Tokens in the global batch."""
        return self.rows * self.seq_length

    def masked_among(self, rows: int) -> int:
        """Masked rows among the first `rows` rows of the batch."""
        return (self.ratio_carry + rows * self.ratio) // self.denominator - self.ratio_carry // self.denominator

    def objective_of(self, row: int) -> int:
        """MASKED or CAUSAL for row `row` (0 .. rows-1) of the batch."""
        return MASKED if self.masked_among(row + 1) > self.masked_among(row) else CAUSAL


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
    """The data schedule of a run. Units: rows, tokens, optimizer steps; `milestones` are fractions of max_steps."""

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
    _rows: np.ndarray = field(init=False, repr=False, compare=False)
    _factors: np.ndarray = field(init=False, repr=False, compare=False)
    _row_sums: np.ndarray = field(init=False, repr=False, compare=False)
    _ratio_sums: list[int] = field(init=False, repr=False, compare=False)
    _token_sums: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = range(self.max_steps)
        factors = [length_factor_at(step, self.max_steps, self.milestones) for step in steps]
        rows = [
            rows_at(step, self.max_steps, self.global_batch_size / factor, self.batch_reduction)
            for step, factor in zip(steps, factors, strict=True)
        ]
        # Python integers: exact however long the run is.
        ratio_sums = [0, *accumulate(count * self._ratio(step) for step, count in enumerate(rows))]
        masked_sums = np.array([total // self._denominator for total in ratio_sums], dtype=np.int64)
        masked = np.diff(masked_sums)
        factor_array = np.array(factors, dtype=np.int64)
        lengths = self.seq_length * factor_array
        row_array = np.array(rows, dtype=np.int64)
        per_objective = np.stack([masked * lengths, (row_array - masked) * lengths])
        object.__setattr__(self, "_rows", row_array)
        object.__setattr__(self, "_factors", factor_array)
        object.__setattr__(self, "_row_sums", np.concatenate([[0], np.cumsum(row_array)]))
        object.__setattr__(self, "_ratio_sums", ratio_sums)
        object.__setattr__(self, "_token_sums", np.pad(np.cumsum(per_objective, axis=1), ((0, 0), (1, 0))))

    @property
    def _denominator(self) -> int:
        """Denominator of every step's ratio, so that sums of rows x ratio stay integers."""
        return self.hybrid_denominator * (1 if self._constant_ratio else self.max_steps)

    @property
    def _constant_ratio(self) -> bool:
        return self.hybrid_numerator_end in (None, self.hybrid_numerator)

    def _ratio(self, step: int) -> int:
        """Fraction of masked rows at `step` in units of 1 / _denominator."""
        if self.hybrid_numerator_end is None or self._constant_ratio:
            return self.hybrid_numerator
        return self.hybrid_numerator * (self.max_steps - step) + self.hybrid_numerator_end * step

    def step(self, step: int) -> StepPlan:
        """The plan of global batch `step` (0 .. max_steps-1), found without looking at the steps before it."""
        if not 0 <= step < self.max_steps:
            raise ValueError(f"step {step} lies outside the run's 0 .. {self.max_steps - 1}")
        ratio_sums = self._ratio_sums
        return StepPlan(
            step=step,
            seq_length=self.seq_length * length_factor_at(step, self.max_steps, self.milestones),
            rows=int(self._rows[step]),
            first_row=int(self._row_sums[step]),
            masked_rows=ratio_sums[step + 1] // self._denominator - ratio_sums[step] // self._denominator,
            position=(int(self._token_sums[MASKED][step]), int(self._token_sums[CAUSAL][step])),
            mask_p=mask_probability_at(step, self.max_steps, self.mask_p_start, self.mask_p_end),
            ratio=self._ratio(step),
            ratio_carry=ratio_sums[step],
            denominator=self._denominator,
        )

    def tokens_before(self, step: int) -> int:
        """Tokens in all global batches before `step` (0 .. max_steps), both objectives together."""
        return int(self._token_sums[:, step].sum())

    def objective_tokens(self, objective: int) -> int:
        """Tokens that the whole run reads from an objective's stream."""
        return int(self._token_sums[objective][-1])

    @property
    def smallest_batch(self) -> int:
        """Rows in the smallest global batch of the run."""
        return int(self._rows.min())

    def largest_step(self, begin: int, end: int) -> int:
        """The step with most rows among `begin` .. `end` - 1."""
        return begin + int(self._rows[begin:end].argmax())

    @property
    def longest_row(self) -> int:
        """Largest row length of the run in tokens."""
        return self.seq_length * length_factor_at(self.max_steps - 1, self.max_steps, self.milestones)

    def stream_key(self, objective: int) -> int:
        """Key of the order of documents, and of rows, in an objective's stream."""
        return fold(fold(self.seed, _ORDER), objective)

    def length_changes(self) -> list[int]:
        """Step 0, every step whose rows are longer than those of the step before, and max_steps."""
        return [0, *(np.flatnonzero(np.diff(self._factors)) + 1).tolist(), self.max_steps]

    def spans(self, objective: int) -> list[tuple[int, int, int]]:
        """First token, end and row length of each part of an objective's stream whose rows have one length."""
        sums, lengths = self._token_sums[objective], self.seq_length * self._factors
        return [(int(sums[a]), int(sums[b]), int(lengths[a])) for a, b in pairwise(self.length_changes())]

    def row_keys(self, objective: int, positions: np.ndarray) -> np.ndarray:
        """One 64-bit key per row, from which its masks and its dropout derive; int64 [n].

        positions: of the rows' first tokens in the stream of their objective, int64 [n].
        """
        return fold_numpy(fold(fold(self.seed, _ROW), objective), positions).view(np.int64)

    def step_key(self, step: int) -> int:
        """64-bit key for randomness that all rows of a step share (dropout on the position table)."""
        return fold(fold(self.seed, _STEP), step)


def resolve_split(split: str, world_size: int, numerator: int, denominator: int, constant: bool = True) -> str:
    """`rows` or `ranks` for the flag --hybrid_split `auto`, `rows` or `ranks`.

    `ranks` gives each rank one objective, which needs a constant ratio whose denominator divides the world size (after
    the fraction is reduced: 2/4 runs on two ranks). Raises ValueError where `ranks` is asked for and impossible.
    """
    possible = constant and (numerator * world_size) % denominator == 0
    if split == "ranks" and not possible:
        why = f"{numerator}/{denominator} of {world_size} ranks is no whole number" if constant else "the ratio changes"
        raise ValueError(f"--hybrid_split ranks is not possible because {why}; use --hybrid_split rows (or auto)")
    if split == "auto":
        return "ranks" if possible else "rows"
    return split


def _slice(total: int, index: int, parts: int) -> tuple[int, int]:
    """Bounds of part `index` when 0 .. total is cut into `parts` pieces whose sizes differ by at most one."""
    return total * index // parts, total * (index + 1) // parts


def rows_of_rank(plan: StepPlan, rank: int, world_size: int, split: str) -> list[RowRange]:
    """The rows of `plan` that `rank` trains on: at most one range per objective, masked first.

    All ranks together hold every row once; their numbers of rows differ by at most one. `split` is `rows` or `ranks`
    (from `resolve_split`).
    """
    causal_rows = plan.rows - plan.masked_rows
    if split == "ranks":
        masked_ranks = world_size * plan.ratio // plan.denominator
        if rank < masked_ranks:
            ranges = [RowRange(MASKED, *_slice(plan.masked_rows, rank, masked_ranks))]
        else:
            ranges = [RowRange(CAUSAL, *_slice(causal_rows, rank - masked_ranks, world_size - masked_ranks))]
    else:
        begin, end = _slice(plan.rows, rank, world_size)
        masked = plan.masked_among(begin), plan.masked_among(end)
        ranges = [RowRange(MASKED, *masked), RowRange(CAUSAL, begin - masked[0], end - masked[1])]
    return [found for found in ranges if len(found)]
