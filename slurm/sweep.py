"""Sweeps over flags: the product of values as runs with names, and tables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath


class SweepError(ValueError):
    """A sweep cannot be used; the message says what would be right."""


def safe_name(text: str) -> str:
    """`text` with `_` for every character that file names, shells or SLURM's file patterns treat specially."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text)


@dataclass(frozen=True)
class Axis:
    """One swept flag: its values as the command line takes them, and as the names of runs show them."""

    flag: str
    values: tuple[str, ...]
    labels: tuple[str, ...]


def make_axis(flag: str, values: Sequence[str]) -> Axis:
    """The axis of a flag and its values. Raises SweepError where two of them could not be told apart."""
    if not values:
        raise SweepError(f"--sweep {flag}= has no values; write --sweep {flag}=VALUE,VALUE")

    def label(value: str) -> str:
        return safe_name(value.replace(",", "+")) or "none"

    # configs/small.json is called small.json, unless two values would then have one name.
    for shorten in (lambda value: PurePath(value).name if "/" in value else value, lambda value: value):
        labels = tuple(label(shorten(value)) for value in values)
        if len(set(labels)) == len(labels):
            return Axis(flag, tuple(values), labels)
    raise SweepError(f"--sweep {flag}={','.join(values)} would give two runs the same name; give each value once")


def parse_axis(text: str, holds_list: Callable[[str], bool]) -> Axis:
    """The axis that `FLAG=VALUE,VALUE` asks for; values of a flag that `holds_list` are lists, joined by colons.
    `length_milestones=0.7:0.9,0.5,:` has three values: two milestones, one, and none. Raises SweepError."""
    flag, equals, values = text.partition("=")
    flag = flag.strip().lstrip("-").replace("-", "_")
    if not equals or not flag:
        raise SweepError(f"--sweep {text!r} is not FLAG=VALUE,VALUE (such as learning_rate=1e-2,5e-3)")
    parts = [part.strip() for part in values.split(",")]
    if not all(parts):
        raise SweepError(f"--sweep {text!r} has an empty value between its commas")
    if holds_list(flag):
        parts = [",".join(member for member in part.split(":") if member) for part in parts]
    return make_axis(flag, parts)


def combinations(axes: Sequence[Axis]) -> list[tuple[dict[str, str], str]]:
    """Every combination of values, the last axis changing fastest, each with the suffix of its run's name."""
    flags = [axis.flag for axis in axes]
    for flag in flags:
        if flags.count(flag) > 1:
            raise SweepError(f"--sweep {flag} is given twice; put all its values into one")
    found = []
    for choice in itertools.product(*(list(zip(axis.values, axis.labels, strict=True)) for axis in axes)):
        values = {flag: value for flag, (value, _) in zip(flags, choice, strict=True)}
        found.append((values, "".join(f"-{flag}={label}" for flag, (_, label) in zip(flags, choice, strict=True))))
    return found


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; one that is empty in every row is left out."""
    texts = [[str(cell) for cell in row] for row in rows]
    kept = [column for column in range(len(header)) if any(row[column] for row in texts)]
    lines = [[header[column] for column in kept], *([row[column] for column in kept] for row in texts)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(kept))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
