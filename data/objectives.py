"""Objectives: the ways in which a row is learned from, as a table that one edits.

Sizes and names all over the program follow from OBJECTIVES: the plan of rows, inputs and labels, counts of targets,
sums of losses, metrics (`train/NAME_loss`, `valid/NAME_accuracy`, `stats/NAME_rows`), estimates of memory. The number
of an objective is part of the keys of its rows and of its stream, so new ones go to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Objective:
    """One way to learn from a row. Raises ValueError on what cannot be.

    name: in metrics. causal: tokens attend only to those before them; otherwise to all of their document.
    mask: the fraction of its rows' tokens that is hidden from the model, as a multiple of the step's mask probability.
    all_targets: every token is a target, or else the hidden ones. Always scored: output i against token i + 1.
    rows: its fraction of all rows; 0 for the first two, which get what the others leave, by --hybrid_numerator.
    weight: factor of its mean loss in the run's loss, beside its fraction of rows.
    """

    name: str
    causal: bool
    mask: float
    all_targets: bool
    rows: Fraction = Fraction(0)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.mask and not self.all_targets:
            raise ValueError(
                f"objective {self.name!r} hides no tokens and has no other targets: it would learn nothing"
            )

    def mask_fraction(self, mask_p: float) -> float:
        """The fraction of its rows' tokens that is hidden where the step's mask probability is `mask_p`."""
        return min(1.0, self.mask * mask_p)

    def target_fraction(self, mask_p: float) -> float:
        """The expected fraction of its rows' positions that have a target."""
        return 1.0 if self.all_targets else self.mask_fraction(mask_p)


OBJECTIVES = (
    Objective("masked", causal=False, mask=1.0, all_targets=False),
    Objective("causal", causal=True, mask=0.0, all_targets=True),
)
OBJECTIVE_NAMES = tuple(objective.name for objective in OBJECTIVES)
MASKED, CAUSAL = 0, 1  # the two that --hybrid_numerator and --hybrid_denominator divide rows between


def numbers_of(wanted: Callable[[Objective], object]) -> tuple[int, ...]:
    """Numbers of the objectives for which `wanted` is true."""
    return tuple(number for number, objective in enumerate(OBJECTIVES) if wanted(objective))


CAUSAL_ATTENTION = numbers_of(lambda objective: objective.causal)
MASKING = numbers_of(lambda objective: objective.mask)
NOT_MASKING = numbers_of(lambda objective: not objective.mask)
ALL_TARGETS = numbers_of(lambda objective: objective.all_targets)


def added_objectives() -> list[dict[str, Any]]:
    """The objectives beside masked and causal as JSON, for a checkpoint; a run continues with those it began with."""
    return [{**asdict(objective), "rows": str(objective.rows)} for objective in OBJECTIVES[2:]]


def row_fractions(ratio: Fraction) -> tuple[Fraction, ...]:
    """Each objective's fraction of all rows, where `ratio` of the rows that others leave are masked."""
    fixed = [objective.rows for objective in OBJECTIVES[2:]]
    left = 1 - sum(fixed)
    return left * ratio, left * (1 - ratio), *fixed
