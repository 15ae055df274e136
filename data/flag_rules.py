"""Rules of single flags, and what makes a value of a flag's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from data.positions import PositionError, parse_amount, parse_amounts


class Rule(NamedTuple):
    """A test of a flag's value, and what to say of one that fails it."""

    holds: Callable[[Any], bool]
    text: str


def at_least(least: int, reason: str = "") -> Rule:
    return Rule(lambda value: value >= least, f"it must be at least {least}" + f": {reason}" * bool(reason))


def _rises(values: tuple[float, ...]) -> bool:
    """Whether values are distinct, in order, above 0 and at most 1."""
    return list(values) == sorted(set(values)) and all(0 < value <= 1 for value in values)


REQUIRED = Rule(bool, "it is required")
FOLDER_NAME = Rule(lambda value: "/" not in value and value not in (".", ".."), "it names a folder: no slashes")
POSITIVE = Rule(lambda value: value > 0, "it must be above 0")
FRACTION = Rule(lambda value: 0 <= value <= 1, "it is a fraction and must be between 0 and 1")
DECAY = Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")
RISING = Rule(_rises, "it must be rising numbers above 0 and at most 1, such as 0.7,0.9")
STEPS = Rule(lambda values: all(step >= 1 for step in values), "steps count from 1")


def amount_of(unit: str) -> Rule:
    """Of text: left out, or an amount in a unit of data/positions.py."""

    def holds(value: str) -> bool:
        try:
            return not value or bool(parse_amount(value, unit))
        except PositionError:
            return False

    return Rule(holds, f"it is a number of {unit} above 0, such as 0.5, 10 or 100M (k, M, G, T: thousands, ...)")


def amounts_of(unit: str) -> Rule:
    """Of text: amounts and ranges of them in a unit of data/positions.py, or none."""

    def holds(value: str) -> bool:
        try:
            return parse_amounts(value, unit) is not None
        except PositionError:
            return False

    return Rule(holds, f"it has numbers of {unit} above 0 and ranges FIRST..LAST/STEP, such as 1M..10M/1M,20M")


def float_list(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part.strip())


def int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def text_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def amount(text: str) -> str:
    """A number with a suffix such as 10M, as text: its unit is the flag's."""
    return text.strip()


amount.__name__ = "number"
float_list.__name__ = "comma-separated numbers"  # in argparse's errors
int_list.__name__ = "comma-separated whole numbers"
text_list.__name__ = "comma-separated texts"
