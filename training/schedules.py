"""Learning rate and decay of the average as pure functions of the step, so that there is nothing to checkpoint."""

import math

_FLOOR = 0.1  # the cosine ends, and the cool-down starts, at this fraction of the peak


def learning_rate(
    step: int, max_steps: int, peak: float, warmup_proportion: float, cooldown_proportion: float
) -> float:
    """Learning rate of optimizer step `step`, counted from 0; 0 from `max_steps` on.

    Linear from 0 to `peak` over the first int(max_steps * warmup_proportion) steps, then a cosine that would reach a
    tenth of the peak at max_steps, and over the last int(max_steps * cooldown_proportion) steps linear from a tenth of
    the peak to 0. As published, the cosine runs on to max_steps, not to the cool-down: the rate makes a small jump
    down where the cool-down starts. Equal to golden/schedule.npz to the last digit.
    """
    warmup, cooldown = int(max_steps * warmup_proportion), int(max_steps * cooldown_proportion)
    if step >= max_steps:
        return 0.0
    if step < warmup:
        return peak * (step / warmup)
    if step >= max_steps - cooldown:
        return peak * (_FLOOR * (max_steps - step) / cooldown)
    progress = (step - warmup) / (max_steps - warmup)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def average_decay(done: int, decay: float, warm_up: bool) -> float:
    """Decay of the average of the weights at the update that makes `done` steps, counted from 1.

    With warm_up it rises as (1 + done) / (10 + done) up to `decay` (0.999: after 8,990 steps), so that the average is
    one over about the last ninth of the steps done, and what it started from is soon forgotten.
    """
    return min(decay, (1 + done) / (10 + done)) if warm_up else decay


def due(step: int, every: int, max_steps: int) -> bool:
    """Whether something that happens every `every` steps (0: never), and at the end, happens after `step` steps."""
    return step == max_steps or (every > 0 and step % every == 0)
