"""Rows of slurm/doctor.py's table. The checks: doctor_machine.py, doctor_run.py, doctor_steps.py.

Most checks come in two parts: `measure_...` runs on every rank and returns values that JSON can hold, and `assess_...`
turns the measurements of all ranks into rows of the table. Nothing prints: doctor_ranks.py runs them and prints the
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.wording import ranks_text

OK, WARN, FAIL, SKIP = "OK", "WARN", "FAIL", "SKIP"


@dataclass(frozen=True)
class Row:
    """One row of the table. detail: may have several lines. remedy: what to do. numbers: for --json."""

    check: str
    result: str
    detail: str
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


Measurements = Mapping[int, Any]  # by rank


def by_value(measured: Measurements, key: str) -> dict[Any, list[int]]:
    """The values under `key`, each with the ranks that have it."""
    found: dict[Any, list[int]] = {}
    for rank, values in measured.items():
        found.setdefault(values[key], []).append(rank)
    return found


def spread(found: Mapping[Any, list[int]]) -> str:
    """`a on ranks 0-1; b on ranks 2`."""
    return "; ".join(f"{value} on ranks {ranks_text(ranks)}" for value, ranks in found.items())
