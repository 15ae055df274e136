"""Ratio schedule: the fraction of rows that is masked at each step, in phases, ramps and repetitions; exact fractions.

In words it is a list of `POSITION:NUM/DEN`, such as "0:1/1, 25%:0/1": all rows are masked in the first quarter of the
run, and causal afterwards. A position is any of data/positions.py. Behind NUM/DEN, or in its place, may stand `linear`:
from there the fraction moves linearly to that of the next point ("0:1/1, 50%:linear, 100%:0/1"; "0:1/1 linear,
100%:0/1"). `POSITION:repeat` at the end says that the points before it come again and again ("0:1/1, 1e:0/1,
2e:repeat" alternates epochs).

`auto` is one ratio for the whole run, from how often it repeats its corpus: `ratio_for`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, pairwise
from math import lcm
from typing import NamedTuple

from data.positions import Position, PositionError, parse_position

FORM = (
    'it must be POSITION:NUM/DEN, ..., such as "0:1/1, 25%:0/1" (masked rows first, causal ones from a quarter of the '
    'run on); "linear" behind or instead of NUM/DEN leads evenly to the next point, "POSITION:repeat" begins anew'
)
_VALUE = re.compile(r"(?:(\d+)/(\d+))?\s*(linear|repeat)?")


class Entry(NamedTuple):
    """A point as it is written. ratio: None where it is that of the point before."""

    position: Position
    ratio: Fraction | None
    linear: bool
    repeat: bool


class RatioScheduleError(ValueError):
    """A schedule cannot be used; the message says why, to be read behind the flag and its value."""


@dataclass(frozen=True)
class RatioPoint:
    """From `step` on, the fraction `ratio` of rows is masked; with `linear` it moves evenly to the next point's."""

    step: int
    ratio: Fraction
    linear: bool = False


@dataclass(frozen=True)
class RatioSchedule:
    """The masked fraction of the rows that the hybrid ratio divides, at each step. points: the first at step 0, rising;
    one behind the last step of the run is where a ramp leads to."""

    points: tuple[RatioPoint, ...]

    @classmethod
    def linear(cls, start: Fraction, end: Fraction, max_steps: int) -> RatioSchedule:
        """From `start` evenly to `end`, which would be reached at step `max_steps`."""
        if start == end:
            return cls((RatioPoint(0, start),))
        return cls((RatioPoint(0, start, linear=True), RatioPoint(max_steps, end)))

    @property
    def _ramps(self) -> list[tuple[RatioPoint, RatioPoint]]:
        return [(a, b) for a, b in pairwise(self.points) if a.linear and a.ratio != b.ratio]

    @property
    def denominator(self) -> int:
        """A common denominator of the fractions of all steps."""
        return lcm(*(point.ratio.denominator for point in self.points)) * lcm(
            *(b.step - a.step for a, b in self._ramps)
        )

    def numerators(self, max_steps: int) -> list[int]:
        """The fraction at each step of the run, in units of 1 / `denominator`."""
        unit, found = self.denominator, []
        for a, b in pairwise((*self.points, RatioPoint(max(max_steps, self.points[-1].step), self.points[-1].ratio))):
            low, high = (int(point.ratio * unit) for point in (a, b))
            steps = min(b.step, max_steps) - a.step
            # `unit` is a multiple of the ramp's length, so that each division leaves nothing.
            rise = (high - low) // (b.step - a.step) if a.linear and high != low else 0
            found += range(low, low + rise * steps, rise) if rise else [low] * steps
        return found

    def phases(self) -> tuple[Fraction, ...] | None:
        """The fractions of its phases; None where there are ramps."""
        return None if self._ramps else tuple(sorted({point.ratio for point in self.points}))

    def __str__(self) -> str:
        """In words, with steps: `15/16`, `1/1 until step 250, then 0/1`, `1/1 evenly to 0/1 at step 500`."""
        parts = [f"{self.points[0].ratio.numerator}/{self.points[0].ratio.denominator}"]
        for a, b in pairwise(self.points):
            ratio = f"{b.ratio.numerator}/{b.ratio.denominator}"
            ramp = a.linear and a.ratio != b.ratio
            parts.append(f" evenly to {ratio} at step {b.step:,}" if ramp else f" until step {b.step:,}, then {ratio}")
        shown = 6
        more = len(parts) - shown
        return "".join(parts[:shown]) + f" and {more} further changes" * (more > 0)


def parse_schedule(text: str) -> list[Entry]:
    """The points that a text names. Raises ValueError, PositionError among others, on what is no schedule."""
    entries = []
    for part in text.split(","):
        place, _, value = (piece.strip() for piece in part.partition(":"))
        match = _VALUE.fullmatch(value) if value else None
        if match is None or (match[1] and match[3] == "repeat"):
            raise RatioScheduleError(f"{part.strip()!r} is no point of it; {FORM}")
        numerator, denominator, word = match.groups()
        if numerator and not 0 < int(denominator) >= int(numerator):
            raise RatioScheduleError(f"{numerator}/{denominator} is no fraction of rows; give 0/1 to 1/1")
        ratio = Fraction(int(numerator), int(denominator)) if numerator else None
        entries.append(Entry(parse_position(place), ratio, word == "linear", word == "repeat"))
    first, last = entries[0], entries[-1]
    if first.ratio is None or first.position.value:
        raise RatioScheduleError("it must begin with the ratio at 0, such as 0:1/1")
    if any(entry.repeat for entry in entries[:-1]):
        raise RatioScheduleError("nothing may follow POSITION:repeat, which goes on to the end of the run")
    if last.linear:
        raise RatioScheduleError(f"{last.position}:linear leads to no other point; add one, such as 100%:0/1")
    if last.repeat and any(entry.position.unit != last.position.unit for entry in entries[1:]):
        raise RatioScheduleError(f"with {last.position}:repeat, all its positions are counted in {last.position.unit}")
    return entries


def ratio_for(repetitions: float) -> Fraction:
    """The masked fraction of rows for a run that reads each token `repetitions` times, with both objectives together.

    Causal models gain from about 16 repetitions of a text and overfit afterwards, masked ones go on learning, and both
    objectives beat one ("Dual-objective language models", arXiv 2512.14549, 50 models): mostly causal rows up to 16
    repetitions, later as many as let the causal objective see each token 16 times; in 64ths. That a masked eighth is
    kept at few repetitions is our choice."""
    causal = min(56, max(1, round(64 * 16 / repetitions)))
    return Fraction(64 - causal, 64)


def _unrolled(entries: Sequence[Entry]) -> Iterator[tuple[int, Entry]]:
    """The points with the number of their repetition, without end where they repeat."""
    *pattern, last = entries
    if not last.repeat:
        yield from ((0, entry) for entry in entries)
        return
    value, unit = last.position.value, last.position.unit
    for number in count():
        for entry in pattern:
            yield number, entry._replace(position=Position(entry.position.value + number * value, unit))


def resolve_schedule(entries: Sequence[Entry], max_steps: int, step_of: Callable[[Position], int]) -> RatioSchedule:
    """The schedule of a run of `max_steps`. step_of: the step of a position, 0 .. max_steps; raises PositionError for
    one behind the end. Raises ValueError, PositionError among others, where the schedule does not fit into the run."""
    points: list[RatioPoint] = []
    for number, entry in _unrolled(entries):
        try:
            step = step_of(entry.position)
        except PositionError:
            if not number:
                raise
            step = max_steps + 1  # of a repetition that the end of the run cuts off
        if points and step <= points[-1].step:
            raise RatioScheduleError(
                f"{entry.position} is step {step:,}, not behind step {points[-1].step:,} before it"
            )
        leads_here = bool(points) and points[-1].linear
        if number and step > max_steps and leads_here:
            raise RatioScheduleError(f"the run ends within the ramp from step {points[-1].step:,}; let it end with one")
        if step >= max_steps and not leads_here:
            if number:
                break
            raise RatioScheduleError(f"what begins at {entry.position} is never used: the run has {max_steps:,} steps")
        ratio = points[-1].ratio if entry.ratio is None else entry.ratio
        points.append(RatioPoint(step, ratio, entry.linear))
        if number and step == max_steps:
            break
    return RatioSchedule(tuple(points))
