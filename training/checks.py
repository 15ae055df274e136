"""Rows of slurm/doctor.py's table, and the words in them. The checks: machine_checks.py, run_checks.py, trial.py.

Most checks come in two parts: `measure_...` runs on every rank and returns facts that JSON can hold, and `judge_...`
turns all ranks' facts, by rank, into rows of the table. Nothing prints: checkup.py runs them and prints the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


def size_text(count: float) -> str:
    """A number of bytes for people."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def time_text(seconds: float) -> str:
    """A duration for people."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if minutes < 2:
        return f"{seconds:.3g} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def count(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`, `3 micro-batches`."""
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("ch") else "s")


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def by_value(facts: Facts, key: str) -> dict[Any, list[int]]:
    """The values of a fact with the ranks that have them."""
    found: dict[Any, list[int]] = {}
    for rank, values in facts.items():
        found.setdefault(values[key], []).append(rank)
    return found


def spread(found: Mapping[Any, list[int]]) -> str:
    return "; ".join(f"{value} on ranks {ranks_text(ranks)}" for value, ranks in found.items())
