"""Wording: sizes, durations, counts and ranges of numbers as people write them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


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


def interval_text(value: float, low: float, high: float, digits: int = 1) -> str:
    """`81.3 [79.0, 83.4]`."""
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell; `left`: columns whose cells begin at its left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.ljust(w) if n in left else cell.rjust(w) for n, (cell, w) in cells).rstrip())
    return lines


def ranks_text(ranks: Iterable[int], separator: str = ", ") -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6; of any numbers. With the separator "," as sbatch --array takes them."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return separator.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
