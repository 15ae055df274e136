"""Learning rate and decay of the average as pure functions of the step, so that there is nothing to checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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

    schedule: one of SCHEDULES; the default is the published one, equal to golden/schedule.npz to the last digit.
    cooldown_proportion is the cosine's alone, decay_proportion and decay_shape (linear or sqrt) are for wsd.
    """
    warmup, cooldown, decay = (
        steps_of(length, max_steps) for length in (warmup_proportion, cooldown_proportion, decay_proportion)
    )
    of = Lengths(max_steps, warmup, cooldown, decay, decay_shape == "sqrt")
    if step >= max_steps:
        return 0.0
    if step < of.warmup and schedule != "one_cycle":
        return peak * (step / of.warmup)
    return peak * SCHEDULES[schedule](step, of)


def in_words(config: TrainingConfig) -> list[str]:
    """The course of the learning rate: its name, and where it turns."""
    steps = config.max_steps
    found = [f"{config.schedule}, warm-up to step {steps_of(config.warmup_proportion, steps)}"]
    if config.schedule == "cosine":
        found.append(f"cool-down from step {steps - steps_of(config.cooldown_proportion, steps)}")
    if config.schedule == "wsd":
        found.append(f"{config.decay_shape} decay from step {steps - steps_of(config.decay_proportion, steps)}")
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
