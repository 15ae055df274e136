"""Positions of a run in any unit: `25%`, `500` steps, `10Mt` tokens, `1Mw` words, `2e` epochs; and the step of each.

Tokens are all tokens of the rows of all objectives. An epoch is the corpus' tokens once, whichever objective reads
them: after ten epochs each token has been seen ten times in all. Words are counted when a corpus is tokenised and
stand in its manifest; so many tokens of a stream are so many words as the corpus has for each of its tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # flags are also parsed where there is no NumPy
    from data.batch_schedule import BatchSchedule

FORMS = (
    "give a fraction of the run (0.25 or 25%), steps (500), tokens (10Mt), words (1Mw) or epochs (2e); k, M, G and T "
    "are thousands, millions, ..."
)
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_UNITS = {"t": "tokens", "w": "words", "e": "epochs", "%": "fraction", "": "steps"}
_LETTERS = {unit: letter for letter, unit in _UNITS.items()}
_MOST = 10_000  # amounts in a range
_MOST_STEPS = 1 << 24  # of which a plan is made
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d*)?|\.\d+)([kMGBT]?)([twe%]?)")


class PositionError(ValueError):
    """A position cannot be used; the message says why and what would be right."""


class BehindTheEnd(PositionError):
    """A position that a run does not reach."""


@dataclass(frozen=True)
class Position:
    """A place in a run, or a length of it: `value`, exact, in `unit`: fraction, steps, tokens, words or epochs."""

    value: Fraction
    unit: str

    def __str__(self) -> str:
        if self.unit == "fraction":
            return f"{float(self.value * 100):g}%"
        return number_text(self.value) + _LETTERS[self.unit]


def number_text(value: Fraction | int) -> str:
    """A number as `parse_position` reads it: 1500k, 10M, 0.5; the largest suffix with which it is whole."""
    for suffix in "TGMk":
        if value and value % _FACTORS[suffix] == 0:
            return f"{value // _FACTORS[suffix]}{suffix}"
    return str(value) if Fraction(value).denominator == 1 else repr(float(value))


def parse_position(text: str) -> Position:
    """The position that a text names, such as `0.25`, `25%`, `500`, `10Mt`, `162_000_000t`, `1Mw` or `0.5e`.

    A number without a unit is a number of steps where it is whole, and a fraction where it has a decimal point.
    Raises PositionError (a ValueError)."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise PositionError(f"{text!r} is no position in a run; {FORMS}")
    digits, suffix, letter = match.groups()
    unit, number = _UNITS[letter], Fraction(digits.replace("_", "")) * _FACTORS[suffix]
    if unit == "fraction" or (unit == "steps" and not suffix and "." in digits):
        if suffix:
            raise PositionError(f"{text!r} is no position in a run; {FORMS}")
        unit, number = "fraction", number / 100 if letter else number
        if number > 1:
            raise PositionError(f"{text!r} is more than the whole run; {FORMS}")
    if unit != "fraction" and unit != "epochs" and number.denominator != 1:
        raise PositionError(f"{text!r} is no whole number of {unit}; {FORMS}")
    return Position(number, unit)


def parse_amount(text: str, unit: str) -> Position:
    """So many tokens, words or epochs, more than none: `10M`, `0.5`; the unit's own letter may follow (`10Mt`). Raises
    PositionError."""
    letter = _LETTERS[unit]
    amount = parse_position(text.strip().removesuffix(letter) + letter)
    if not amount.value:
        raise PositionError(f"{text!r} is no {unit} at all; {FORMS}")
    return amount


def parse_amounts(text: str, unit: str) -> list[Position]:
    """Amounts and ranges of them, rising and each once: `1M..10M/1M,20M` is 1M, 2M, ... 10M and 20M; "" is none. Raises
    PositionError."""
    found: set[Fraction] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        ends, _, step = part.partition("/")
        first, dots, last = ends.partition("..")
        if bool(dots) != bool(step):
            raise PositionError(f"{part!r} is no range; give it as FIRST..LAST/STEP, such as 10M..100M/10M")
        low = parse_amount(first, unit).value
        high, every = (parse_amount(last, unit).value, parse_amount(step, unit).value) if dots else (low, Fraction(1))
        if not 1 <= (count := (high - low) // every + 1) <= _MOST:
            raise PositionError(f"{part!r} has {max(0, count):,} amounts; give a range of 1 to {_MOST:,}")
        found.update(low + number * every for number in range(count))
    return [Position(value, unit) for value in sorted(found)]


def checkpoint_name(amount: Position) -> str:
    """Name of the checkpoint at so many words, tokens or epochs: `chck_1M` (BabyLM's form), `chck_10Mt`, `chck_2e`."""
    millions = amount.value / 10**6
    if amount.unit == "words":
        return f"chck_{millions}M" if millions.denominator == 1 else f"chck_{number_text(amount.value)}"
    return f"chck_{amount}"


class Exposure(NamedTuple):
    """What a corpus holds, by which tokens are counted in epochs and in words.

    tokens_per_epoch: of a stream, special tokens and repeats counted. words_per_token: None where they are not known,
    because of `without_words`: the file or folder that does not say how many it has."""

    tokens_per_epoch: int
    words_per_token: Fraction | None
    without_words: str = ""

    def tokens_of(self, amount: Position) -> int:
        """The tokens with which so many tokens, words or epochs are used up, rounded up. Raises PositionError."""
        if amount.unit == "words":
            return ceil(amount.value / self.known_words_per_token())
        if amount.unit == "epochs":
            return ceil(amount.value * self.tokens_per_epoch)
        assert amount.unit == "tokens", amount
        return ceil(amount.value)

    def words_in(self, tokens: int) -> int:
        """Words in so many tokens of the streams, rounded down. Raises PositionError where words are not known."""
        return int(tokens * self.known_words_per_token())

    def known_words_per_token(self) -> Fraction:
        if not self.words_per_token:
            raise PositionError(
                f"words are not known: {self.without_words} has no number of words in a manifest; tokenise its text "
                "with preprocessing/tokenize_corpus.py, or count in tokens"
            )
        return self.words_per_token


def step_of(position: Position, schedule: BatchSchedule, exposure: Exposure) -> int:
    """The first step (0 .. max_steps) before which so much has been used; of a fraction, the first not before it. A
    pure function of the batch schedule. Raises BehindTheEnd, and PositionError for words that are not known."""
    if position.unit == "fraction":
        return ceil(position.value * schedule.max_steps)
    if position.unit == "steps":
        step, whole = int(position.value), f"{schedule.max_steps:,} steps"
    else:
        step = bisect_left(schedule.token_sums, exposure.tokens_of(position))
        whole = f"{schedule.tokens_before(schedule.max_steps):,} tokens"
    if step > schedule.max_steps:
        raise BehindTheEnd(f"{position} lies behind the end of the run, which has {whole}")
    return step


def step_after(step: int, length: Position, schedule: BatchSchedule, exposure: Exposure) -> int:
    """The first step before which so much has been used since `step`; of a fraction, the end of a run of which the
    steps from `step` on are that part. Raises PositionError, of tokens, words and epochs also behind the end."""
    if not length.value or (length.unit == "fraction" and length.value == 1):
        raise PositionError(f"{length} of a run do not lie behind its step {step:,}")
    if length.unit == "fraction":
        return ceil(step / (1 - length.value))
    if length.unit == "steps":
        return step + int(length.value)
    tokens = schedule.tokens_before(step) + exposure.tokens_of(length)
    return step_of(Position(Fraction(tokens), "tokens"), schedule, exposure)


def length_in_steps(length: Position, schedule: BatchSchedule, exposure: Exposure, at_end: bool) -> int:
    """The fewest steps, first or last ones of the run (`at_end`), that use so much. Raises PositionError."""
    if not at_end or length.unit in ("fraction", "steps"):
        return step_of(length, schedule, exposure)
    left = schedule.tokens_before(schedule.max_steps) - exposure.tokens_of(length)
    if left < 0:
        raise PositionError(f"{length} is more than the run, which has {schedule.tokens_before(schedule.max_steps):,} "
                            "tokens")  # fmt: skip
    return schedule.max_steps - (bisect_right(schedule.token_sums, left) - 1)


def steps_for(tokens: int, schedule: Callable[[int], BatchSchedule]) -> int:
    """The smallest number of steps of a run that uses so many tokens (1 or more) up. schedule: the batch schedule of a
    run of so many steps; batches of 0 tokens end the search in a PositionError."""

    def enough(steps: int) -> bool:
        return schedule(steps).tokens_before(steps) >= tokens

    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_STEPS:
            raise PositionError(f"{tokens:,} tokens are more than {_MOST_STEPS:,} steps; raise --global_batch_size")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    # Each step's rows are rounded, so that a run may have a few rows less than one that is a step shorter.
    return min((steps for steps in range(max(1, high - 8), high) if enough(steps)), default=high)
