"""Learning rate, momentum, decays as pure functions of the step, so that there is nothing to checkpoint.

A course is a shape by its name, or points `POSITION:VALUE, ...`, such as "0:0 linear, 500:1, 80%:1 linear, 100%:0": a
value holds until the next point, or leads to it where `linear` or `exponential` stands behind it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from data.positions import Position, PositionError, parse_position

if TYPE_CHECKING:
    from training.config import TrainingConfig

_FLOOR = 0.1  # the cosine ends, and the cool-down starts, at this fraction of the peak
_FIRST = 1 / 25  # of the peak: where one_cycle begins


class Lengths(NamedTuple):
    """Of a run and of its parts, in steps. square_root: the shape of wsd's decay."""

    max_steps: int
    warmup: int
    cooldown: int
    decay: int
    square_root: bool = False

    def progress(self, step: int) -> float:
        """From 0 at the end of the warm-up to 1 at the end of the run."""
        return (step - self.warmup) / (self.max_steps - self.warmup)


def _cosine(step: int, of: Lengths) -> float:
    """As published: a cosine that would reach a tenth at the end of the run, and a linear cool-down from a tenth to 0.

    The cosine runs on to max_steps, not to the cool-down, so that the rate makes a small jump down where that starts.
    """
    if step >= of.max_steps - of.cooldown:
        return _FLOOR * (of.max_steps - step) / of.cooldown
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * of.progress(step)))


def _wsd(step: int, of: Lengths) -> float:
    """Warm-up, stable, decay: to 0 over the last `decay` steps, linear or as 1 - sqrt(x) (Hägele et al. 2024, arXiv
    2405.18392, section 3)."""
    x = max(0.0, 1 - (of.max_steps - step) / of.decay) if of.decay else 0.0
    return 1 - (math.sqrt(x) if of.square_root else x)


def _one_cycle(step: int, of: Lengths) -> float:
    """A cosine up over the warm-up, from a 25th, and one down to 0 (Smith and Topin, arXiv 1708.07120)."""
    if step < of.warmup:
        return _FIRST + (1 - _FIRST) * 0.5 * (1 - math.cos(math.pi * step / of.warmup))
    return 0.5 * (1 + math.cos(math.pi * of.progress(step)))


# What --schedule may name: the rate as a fraction of its peak, of steps before the end. All but one_cycle rise linearly
# from 0 over the warm-up.
SCHEDULES: dict[str, Callable[[int, Lengths], float]] = {
    "cosine": _cosine,
    "linear": lambda step, of: 1 - of.progress(step),
    "polynomial": lambda step, of: (1 - of.progress(step)) ** 2,
    "constant": lambda step, of: 1.0,
    "wsd": _wsd,
    "one_cycle": _one_cycle,
}


OPEN_ENDED = ("constant", "wsd")  # before the decay, steps do not depend on where the run ends


def steps_of(length: float | str, max_steps: int) -> int:
    """A part of the run in whole steps: a fraction of it, or a number of steps as text."""
    return int(length) if isinstance(length, str) else int(max_steps * length)


def learning_rate(
    step: int,
    max_steps: int,
    peak: float,
    warmup_proportion: float | str,
    cooldown_proportion: float | str,
    schedule: str = "cosine",
    decay_proportion: float | str = 0.0,
    decay_shape: str = "linear",
) -> float:
    """Learning rate of optimizer step `step`, counted from 0; 0 from `max_steps` on.

    schedule: one of SCHEDULES, or points with fractions of the peak; the default is the published one, equal to
    golden/schedule.npz to the last digit.
    cooldown_proportion is the cosine's alone, decay_proportion and decay_shape (linear or sqrt) are for wsd.
    """
    warmup, cooldown, decay = (
        steps_of(length, max_steps) for length in (warmup_proportion, cooldown_proportion, decay_proportion)
    )
    of = Lengths(max_steps, warmup, cooldown, decay, decay_shape == "sqrt")
    if step >= max_steps:
        return 0.0
    if schedule not in SCHEDULES:
        return peak * value_at(schedule, step, max_steps)
    if step < of.warmup and schedule != "one_cycle":
        return peak * (step / of.warmup)
    return peak * SCHEDULES[schedule](step, of)


def rate_at(config: TrainingConfig, step: int, begun: int = 0, peak: float = 1.0, schedule: str = "") -> float:
    """Learning rate, as a multiple of its peak, of a run's `step`. begun: the step at which its schedule begins.

    schedule: the shape (default: the run's). Over its last --anneal_steps the rate falls from what it would be at their
    first one to 0, as --decay_shape says.
    """

    def planned(step: int) -> float:
        return learning_rate(
            step - begun, config.planned_length - begun, peak, config.warmup_proportion, config.cooldown_proportion,
            schedule or config.schedule, config.decay_proportion, config.decay_shape,
        )  # fmt: skip

    steps = steps_of(config.anneal_steps, config.max_steps)
    x = 1 - (config.max_steps - step) / steps if steps else 0.0
    if x <= 0:
        return planned(step)
    return planned(config.max_steps - steps) * (1 - (math.sqrt(x) if config.decay_shape == "sqrt" else x))


def in_words(config: TrainingConfig) -> list[str]:
    """The course of the learning rate: its name, and where it turns; what else has one."""
    steps = config.planned_length
    found = [config.schedule]
    if config.schedule in SCHEDULES:
        found[0] += f", warm-up to step {steps_of(config.warmup_proportion, steps)}"
    if config.schedule == "cosine":
        found.append(f"cool-down from step {steps - steps_of(config.cooldown_proportion, steps)}")
    if config.schedule == "wsd":
        found.append(f"{config.decay_shape} decay from step {steps - steps_of(config.decay_proportion, steps)}")
    if annealed := steps_of(config.anneal_steps, config.max_steps):
        begin = config.max_steps - annealed
        found.append(f"{config.decay_shape} from {rate_at(config, begin):.3g} of the peak at step {begin} to 0")
    return found + [f"{name} {course}" for name, course in parse_courses(config.value_schedules).items()]


# Courses by points, and of other values


class Point(NamedTuple):
    """From `position` on, `value`; way: how it goes on to the next point's, "" where it holds."""

    position: Position
    value: float
    way: str


FORM = (
    'give POSITION:VALUE, ..., such as "0:0 linear, 500:1, 80%:1 linear, 100%:0"; "linear" or "exponential" behind a '
    "value leads to the next point, else it holds"
)
# What --value_schedules may name, and the least and (but for itself) the largest value.
VALUES = {
    "weight_decay": (0.0, math.inf), "momentum": (0.0, 1.0), "beta1": (0.0, 1.0), "beta2": (0.0, 1.0),
    "ema_decay": (0.0, 1.0),
}  # fmt: skip
_NUMBER = r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
_POINT = re.compile(rf"([^:]+):\s*({_NUMBER})\s*(linear|exponential)?")
_SHAPE = re.compile(rf"(\w+):\s*({_NUMBER})\s*\.\.\s*({_NUMBER})")


@cache
def parse_points(text: str) -> tuple[Point, ...]:
    """The points that a text names. Raises ValueError with a sentence to stand behind the flag and its value."""
    points = []
    for part in text.split(","):
        match = _POINT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is no point of a course; {FORM}")
        points.append(Point(parse_position(match[1]), float(match[2]), match[3] or ""))
    if points[0].position.value:
        raise ValueError(f"a course begins with its value at 0, such as 0:1; {FORM}")
    if points[-1].way:
        raise ValueError(f"{points[-1].way} leads from {points[-1].position} to no other point; add one, as 100%:0")
    if any(0 in (a.value, b.value) for a, b in pairwise(points) if a.way == "exponential"):
        raise ValueError("a course that is exponential cannot begin or end at 0; take a small value")
    return tuple(points)


def in_steps(text: str, step_of: Callable[[Position], int]) -> str:
    """The same points with tokens, words and epochs in steps. Raises ValueError, PositionError among others."""
    found, places = [], []
    for position, value, way in parse_points(text):
        places.append(step_of(position))
        position = position if position.unit == "fraction" else Position(Fraction(places[-1]), "steps")
        found.append(f"{position}:{value!r} {way}".rstrip())
    if odd := next((part for (a, b), part in zip(pairwise(places), found[1:], strict=True) if b <= a), ""):
        raise PositionError(f"{odd!r} is not behind the point before it")
    return ", ".join(found)


def courses_in_steps(config: TrainingConfig, step_of: Callable[[Position], int]) -> dict[str, str]:
    """--schedule and --value_schedules with positions in fractions and steps alone. Raises ValueError: a sentence."""
    found = {"schedule": config.schedule, "value_schedules": config.value_schedules}
    flag = "schedule"
    try:
        if config.schedule not in SCHEDULES:
            found[flag] = in_steps(config.schedule, step_of)
        flag, parts = "value_schedules", parse_courses(config.value_schedules)
        parts |= {name: in_steps(course, step_of) for name, course in parts.items() if not _SHAPE.fullmatch(course)}
        found[flag] = "; ".join(f"{name}={course}" for name, course in parts.items())
    except ValueError as error:
        raise ValueError(f"--{flag} is {getattr(config, flag)!r}; {error}") from None
    return found


def value_at(text: str, step: int, length: int) -> float:
    """The value of points, in fractions and steps, at a step of a schedule of `length` steps."""
    points = parse_points(text)
    places = [float(at.value) * (length if at.unit == "fraction" else 1) for at, _, _ in points]
    number = bisect_right(places, step) - 1
    _, value, way = points[number]
    if not way:
        return value
    x, end = (step - places[number]) / (places[number + 1] - places[number]), points[number + 1].value
    return value + (end - value) * x if way == "linear" else value * (end / value) ** x


def parse_courses(text: str) -> dict[str, str]:
    """{"momentum": "0:0.85 linear, 300:0.95"} of "momentum=0:0.85 linear, 300:0.95; ...". Raises ValueError."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, course = (piece.strip() for piece in part.partition("="))
        if name not in VALUES or name in found:
            raise ValueError(f"{part!r} names nothing that moves; give {', '.join(VALUES)}, each once")
        shape = _SHAPE.fullmatch(course)
        if shape and shape[1] not in SCHEDULES:
            raise ValueError(f"{shape[1]!r} in {part!r} is no shape; choose {', '.join(SCHEDULES)}")
        values = map(float, shape.groups()[1:]) if shape else (point.value for point in parse_points(course))
        low, high = VALUES[name]
        if odd := [value for value in values if not low <= value < high]:
            below = f" and below {high:g}" * (high < math.inf)
            raise ValueError(f"{name} of {odd[0]:g} is not at least {low:g}{below}")
        found[name] = course
    return found


def values_at(config: TrainingConfig, step: int, begun: int = 0) -> dict[str, float]:
    """What --value_schedules gives for a run's `step`, by name. begun: as in `rate_at`."""
    found = {}
    for name, course in parse_courses(config.value_schedules).items():
        if shape := _SHAPE.fullmatch(course):
            rest, peak = float(shape[2]), float(shape[3])
            found[name] = rest + (peak - rest) * rate_at(config, step, begun, schedule=shape[1])
        else:
            found[name] = value_at(course, step - begun, config.planned_length - begun)
    return found


def decay_factor(step: int, max_steps: int, first: float, last: float) -> float:
    """Weight decay of step `step` as a multiple of its `first`; linear to `last`, constant if that is below 0."""
    return 1.0 if last < 0 else 1 + (last / first - 1) * (step / max_steps)


def average_decay(done: int, decay: float, warm_up: bool) -> float:
    """Decay of the average of the weights at the update that makes `done` steps, counted from 1.

    With warm_up it rises as (1 + done) / (10 + done) up to `decay` (0.999: after 8,990 steps), so that the average is
    one over about the last ninth of the steps done, and what it started from is soon forgotten.
    """
    return min(decay, (1 + done) / (10 + done)) if warm_up else decay


def mean_decay(count: int) -> float:
    """The decay at which an average that takes in its `count`-th weights becomes the mean of all of them."""
    return 1 - 1 / count


def due(step: int, every: int, max_steps: int) -> bool:
    """Whether something that happens every `every` steps (0: never), and at the end, happens after `step` steps."""
    return step == max_steps or (every > 0 and step % every == 0)
