"""The table of slurm/doctor.py: its rows. The checks: doctor_machine.py, doctor_run.py, doctor_steps.py.

Most checks come in two parts: `measure_...` runs on every rank and returns facts that JSON can hold, and `judge_...`
turns all ranks' facts, by rank, into rows of the table. Nothing prints: doctor_ranks.py runs them and prints the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.wording import ranks_text

OK, WARN, FAIL, SKIP = "OK", "WARN", "FAIL", "SKIP"


@dataclass(frozen=True)
class Row:
    """One line of the table. detail: may have several lines. remedy: what to do. facts: numbers for --json."""

    check: str
    result: str
    detail: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


Facts = Mapping[int, dict[str, Any]]  # by rank


def by_value(facts: Facts, key: str) -> dict[Any, list[int]]:
    """The values of a fact with the ranks that have them."""
    found: dict[Any, list[int]] = {}
    for rank, values in facts.items():
        found.setdefault(values[key], []).append(rank)
    return found


def spread(found: Mapping[Any, list[int]]) -> str:
    return "; ".join(f"{value} on ranks {ranks_text(ranks)}" for value, ranks in found.items())
