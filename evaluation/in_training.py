"""Evaluations during training: validation, samples, plugins, zero-shot suites, when due, until a stop request.

metrics.jsonl has a line of each kind; a resume first measures those that its step lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evaluation.pair_accuracy import MODES
from evaluation.samples import sample_texts
from evaluation.suites import ZeroShot
from evaluation.validation import validation_line, validation_metrics
from training.inputs import Inputs
from training.metric_logger import MetricLogger
from training.plugins import Plugins, evaluation_line
from training.schedules import due
from training.state import TrainState
from training.stopping import Abandoned, until_stop

STEP, VALIDATION, PLUGINS, ZERO_SHOT = "step", "validation", "plugins", "zero-shot"  # kinds of lines in metrics.jsonl
_PREFIXES = {STEP: ("train/loss",), VALIDATION: ("valid/",), ZERO_SHOT: tuple(f"eval/{mode}/" for mode in MODES)}


def kind_of(line: Mapping[str, Any]) -> str:
    """What a line of metrics.jsonl is of; what nobody else logs is of plugins, which name their keys themselves."""
    kinds = (kind for kind, prefixes in _PREFIXES.items() if any(key.startswith(prefixes) for key in line))
    return next(kinds, PLUGINS)


class Evaluations:
    """What is measured between the steps of a run. All ranks take part."""

    def __init__(self, inputs: Inputs, zero_shot: ZeroShot | None, plugins: Plugins, wanted: Callable[[], bool]):
        """wanted: whether this rank wants to stop; evaluations then end at their next batch."""
        self._inputs, self._zero_shot, self._plugins, self._wanted = inputs, zero_shot, plugins, wanted

    def due(self, step: int) -> tuple[str, ...]:
        """The kinds of evaluations that follow on step `step`."""
        config = self._inputs.config
        kinds = (
            (VALIDATION, self._inputs.held_out is not None, config.validate_every),
            (PLUGINS, self._plugins.has_evaluations, config.validate_every),
            (ZERO_SHOT, self._zero_shot is not None, config.evaluate_every),
        )
        return tuple(kind for kind, wanted, every in kinds if wanted and due(step, every, config.max_steps))

    def owed(self, step: int, lines: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Of what is due at the step that a run resumes from, what its last start has not measured, ended by a stop.
        lines: of that step in metrics.jsonl. At a step that another run has made, a branch owes nothing."""
        measured = {kind_of(line) for line in lines}
        return tuple(kind for kind in self.due(step) if kind not in measured) if STEP in measured else ()

    def measure(self, kinds: tuple[str, ...], state: TrainState, log: MetricLogger) -> bool:
        """Measure and log these; False where a stop request has ended them, on all ranks alike."""
        if not kinds:
            return True
        with state.gradients.layers.whole():
            return self._measure(kinds, state, log)

    def _measure(self, kinds: tuple[str, ...], state: TrainState, log: MetricLogger) -> bool:
        inputs, config = self._inputs, self._inputs.config
        held_out, tokens = inputs.held_out, inputs.plan.tokens_before(state.step)
        try:
            if VALIDATION in kinds and held_out is not None:
                found = validation_metrics(state, inputs, self._wanted)
                log.log(found)
                log.say(validation_line(found))
                texts = (held_out.corpus, inputs.tokenizer_text, config)
                if config.validation_samples:
                    with state.ema.swapped_in(state.model):  # by all ranks, though one samples
                        log.log_samples(lambda: sample_texts(state, *texts, self._wanted))
            if PLUGINS in kinds:
                for plugins in until_stop([self._plugins], state.world, self._wanted):
                    found = plugins.evaluate(state, inputs, log.say)
                    log.log(found or {"step": state.step, "stats/tokens": tokens})  # so that a resume owes nothing
                    if found:
                        log.say(evaluation_line(found))
            if ZERO_SHOT in kinds and self._zero_shot is not None:
                found = self._zero_shot.measure(state, tokens, self._wanted)
                log.log(found)
                log.say(self._zero_shot.line(found))
        except Abandoned:
            log.say(f"step {state.step:>6}  evaluation ended by a stop request; a resume begins with it")
            return False
        return True
