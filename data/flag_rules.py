"""Rules of single flags, what makes a value of a flag's text, and the fields that hold what is known of a flag."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from data.positions import PositionError, parse_amount, parse_amounts, parse_position


class Rule(NamedTuple):
    """A test of a flag's value, and what to say of one that fails it."""

    holds: Callable[[Any], bool]
    text: str


def as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


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
DECAYS = Rule(lambda values: all(map(DECAY.holds, as_tuple(values))), DECAY.text)
RISING = Rule(_rises, "it must be rising numbers above 0 and at most 1, such as 0.7,0.9")
LENGTH = Rule(
    lambda value: isinstance(value, str) or 0 <= value <= 1,
    "it must be a fraction between 0 and 1, or steps (500), tokens (10Mt), words (1Mw) or epochs (2e)",
)
SPAN = Rule(
    lambda text: not text or bool((found := re.fullmatch(r"(\d+):(\d+)", text)) and 0 < int(found[1]) <= int(found[2])),
    "give the first and the last of some steps, such as 10:13",
)
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


def decays(text: str) -> float | tuple[float, ...]:
    """One number, or several, of which no two are the same."""
    found = float_list(text)
    if not found or len({*found}) < len(found):
        raise ValueError(text)
    return next(iter(found)) if len(found) == 1 else found


def int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def text_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def factors(texts: Iterable[str]) -> dict[str, float]:
    """{"embedding": 0.5} of ("embedding=0.5",). Raises ValueError."""
    pairs = [text.partition("=") for text in texts]
    return {name.strip(): float(value) for name, _, value in pairs}


def _by_role(limit: float, wanted: str) -> Rule:
    def holds(texts: tuple[str, ...]) -> bool:
        try:
            return all(0 <= value < limit for value in factors(texts).values())
        except ValueError:
            return False

    return Rule(holds, f"give {wanted}")


FACTORS = _by_role(math.inf, "factors of at least 0 by role, such as embedding=0.5,head=2")
DECAYS_BY_ROLE = _by_role(1.0, "values of at least 0 and below 1 by role, such as embedding=0.8,head=0.95")


def amount(text: str) -> str:
    """A number with a suffix such as 10M, as text: its unit is the flag's."""
    return text.strip()


def length(text: str) -> float | str:
    """A part of the run: a fraction as a number, another position as text that data/positions.py reads."""
    try:
        position = parse_position(text)
    except PositionError:
        return float(text)  # such as 1e-2
    return float(position.value) if position.unit == "fraction" else str(position)


def rows(text: str) -> int:
    """A number of rows; 0 for as many as fit ("auto")."""
    return 0 if text == "auto" else int(text)


decays.__name__ = "different decays such as 0.999,0.9999,"
rows.__name__ = "number of rows, or auto,"
length.__name__ = "part of the run"
amount.__name__ = "number"
float_list.__name__ = "comma-separated numbers"  # in argparse's errors
int_list.__name__ = "comma-separated whole numbers"
text_list.__name__ = "comma-separated texts"


# Fields


class Group(NamedTuple):
    """A group of flags in the help. fixed: by default, its flags must not change when a run is resumed."""

    title: str
    fixed: bool


GROUPS = {
    "files": Group("files and folders", fixed=False),
    "objective": Group("objectives and masking", fixed=True),
    "batches": Group("batches and rows", fixed=True),
    "optimization": Group("optimization", fixed=True),
    "logs": Group("validation, checkpoints, logs", fixed=False),
    "jobs": Group("SLURM jobs and ranks", fixed=False),
    "hardware": Group("hardware", fixed=False),
}


class Later(NamedTuple):
    """A flag that there was not always."""

    before: Any  # what runs did that began before there was such a flag
    now: Any  # what new runs do where it is not given
    note: str  # for those who resume a run from before; "" where it goes on as a new one would


def flag(
    group: str,
    default: Any,
    text: str,
    *rules: Rule,
    choices: tuple[str, ...] | None = None,
    kind: Callable[[str], Any] | None = None,
    fixed: bool | None = None,
    path: bool = False,
    later: Later | None = None,
) -> Any:
    """A field that becomes a flag. kind: where the default does not show it. fixed: where the group does not."""
    metadata = {
        "help": text,
        "group": group,
        "rules": rules,
        "choices": choices,
        "kind": kind or type(default),
        "fixed": GROUPS[group].fixed if fixed is None else fixed,
        "path": path,
        "later": later,
    }
    return dataclasses.field(default=default, metadata=metadata)


def budget(unit: str, text: str) -> Any:
    """A flag that gives the run's length in another unit than steps; what a resume compares is its --max_steps."""
    return flag("optimization", "", text, amount_of(unit), kind=amount, fixed=False)


def problem(name: str, spec: dataclasses.Field, value: Any) -> str:
    """What a flag's own rules have against a value, as a sentence; "" where they hold."""
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    if isinstance(value, float) and not math.isfinite(value):
        return f"--{name} is {shown!r}; it must be a finite number"
    return next((f"--{name} is {shown!r}; {rule.text}" for rule in spec.metadata["rules"] if not rule.holds(value)), "")
