"""Objectives: the ways in which a row is learned from, as a table that one edits.

Sizes and names all over the program follow from a run's objectives: the plan of rows, inputs and labels, counts of
targets, sums of losses, metrics (`train/NAME_loss`, `valid/NAME_accuracy`, `stats/NAME_rows`), estimates of memory.
A run has those of OBJECTIVES and, behind them, the CAUSAL_KINDS that its --causal_rows names. The number of an
objective is part of the keys of its rows and of its stream, so new ones go to the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
    prefix, block: causal, but for a prefix of each document, or blocks of so many tokens, that are read in both
    directions (data/reading.py). A token that the output before it sees is a target only if hidden, and in blocks no
    other is hidden.
    part: its fraction of the rows that the hybrid ratio leaves to causal ones; "causal" has those that no other has."""

    name: str
    causal: bool
    mask: float
    all_targets: bool
    rows: Fraction = Fraction(0)
    weight: float = 1.0
    prefix: bool = False
    block: int = 0
    part: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if not self.mask and not self.all_targets:
            raise ValueError(
                f"objective {self.name!r} hides no tokens and has no other targets: it would learn nothing"
            )

    def mask_fraction(self, mask_p: float) -> float:
        """The fraction of its rows' tokens that is hidden where the step's mask probability is `mask_p`."""
        return min(1.0, self.mask * mask_p)

    @property
    def looks_ahead(self) -> bool:
        """Whether its rows are causal in part, so that each token has an end up to which it sees what is ahead."""
        return self.prefix or self.block > 0

    def target_fraction(self, mask_p: float) -> float:
        """The expected fraction of its rows' positions that have a target."""
        if self.looks_ahead:
            unseen = 1 / self.block if self.block else 0.5  # of prefixes of any length
            return unseen + (1 - unseen) * self.mask_fraction(mask_p)
        return 1.0 if self.all_targets else self.mask_fraction(mask_p)


OBJECTIVES = (
    Objective("masked", causal=False, mask=1.0, all_targets=False),
    Objective("causal", causal=True, mask=0.0, all_targets=True),
)
OBJECTIVE_NAMES = tuple(objective.name for objective in OBJECTIVES)
MASKED, CAUSAL = 0, 1  # the two that --hybrid_numerator and --hybrid_denominator divide rows between


# What --causal_rows may put beside "causal" or in its place.
CAUSAL_KINDS = (
    # Prefix language modelling (Raffel et al. 2020, arXiv 1910.10683, sections 3.2.1 and 3.3.1).
    Objective("prefix", causal=True, mask=0.0, all_targets=True, prefix=True),
    # Block diffusion (Arriola et al. 2025, arXiv 2503.09573) as far as one pass over a row goes: data/reading.py.
    Objective("blocks", causal=True, mask=1.0, all_targets=True, block=1),
    # Mask-enhanced autoregressive prediction (Zhuang et al. 2025, arXiv 2502.07490): causal with masked inputs.
    Objective("meap", causal=True, mask=1.0, all_targets=True),
)
KNOWN_NAMES = (*OBJECTIVE_NAMES, *(kind.name for kind in CAUSAL_KINDS))  # of all runs of this program


def run_objectives(causal_rows: str) -> tuple[Objective, ...]:
    """A run's objectives, where --causal_rows is `causal_rows`. Raises ValueError, to be read behind flag and value."""
    parts, sizes = dict[str, int](), dict[str, int]()
    for item in causal_rows.split(","):
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?(?:=(\d+))?", item.strip())
        name, size, part = match.groups() if match else (item.strip(), None, None)
        if match is None or name not in ("causal", *(kind.name for kind in CAUSAL_KINDS)):
            raise ValueError(f"{name!r} is none of causal, prefix, blocks:SIZE and meap, alone or as NAME=PARTS,...")
        if (name == "blocks") != (size is not None) or size == "0":
            raise ValueError("blocks need their size in tokens, such as blocks:16, and nothing else has one")
        if name in parts or part == "0":
            raise ValueError(f"{name} is there twice, or has no part of the rows; name each once, with 1 part or more")
        parts[name], sizes[name] = int(part or 1), int(size or 0)
    total = sum(parts.values())
    chosen = [kind for kind in CAUSAL_KINDS if kind.name in parts]
    added = [replace(kind, block=sizes[kind.name], part=Fraction(parts[kind.name], total)) for kind in chosen]
    return *OBJECTIVES, *added


def causal_parts(objectives: tuple[Objective, ...]) -> str:
    """What a run's rows are that are not masked, in words, where they are not just causal."""
    kinds = [each for each in objectives if each.part]
    causal = 1 - sum(each.part for each in kinds)
    parts = [f"{each.part} {each.name}" + f" of {each.block} tokens" * bool(each.block) for each in kinds]
    return f" (of the others {' and '.join([*[f'{causal} causal'] * bool(causal), *parts])})" if kinds else ""


def numbers_of(wanted: Callable[[Objective], object], objectives: tuple[Objective, ...]) -> tuple[int, ...]:
    """Numbers of the objectives for which `wanted` is true."""
    return tuple(number for number, objective in enumerate(objectives) if wanted(objective))


def added_objectives() -> list[dict[str, Any]]:
    """The table beside masked and causal as JSON, for a checkpoint; a run continues with the one it began with."""
    later = {"prefix": False, "block": 0, "part": Fraction(0)}  # not in the records of before there were such fields
    return [
        {key: value for key, value in asdict(each).items() if key not in later or value != later[key]}
        | {"rows": str(each.rows)}
        for each in OBJECTIVES[2:]
    ]


def row_fractions(ratio: Fraction, objectives: tuple[Objective, ...]) -> tuple[Fraction, ...]:
    """Each objective's fraction of all rows, where `ratio` of the rows that others leave are masked."""
    others = objectives[2:]
    left = 1 - sum(each.rows for each in others)
    causal = left * (1 - ratio)
    parts = [each.rows + causal * each.part for each in others]
    return left * ratio, causal * (1 - sum(each.part for each in others)), *parts
