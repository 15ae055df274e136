"""Plugins: Python files named by --plugin that add metrics, evaluations and sinks to a run from outside.

A plugin has any of these functions at its top level (examples/plugin.py has all three):

    def step_metrics(metrics: dict) -> dict
        On rank 0, for the metrics of each training step: numbers to log with them, under keys of its own. It is given
        what the host knows, and the next step waits for it.
    def evaluate(model, context: EvaluationContext) -> dict
        On all ranks, every --validate_every steps, of the averaged weights in evaluation mode: numbers to log. Pairs
        (sum, count) are added up over ranks and divided; of other values rank 0's is taken. It must not call
        collectives, since an error on one rank would leave the others waiting in them.
    def sinks(run_folder: Path, config: TrainingConfig) -> list[Sink]
        On rank 0, once: objects that take what is logged (training/sinks.py), each on a thread of its own.

A plugin that cannot be imported is refused before the run begins. Later a function that fails is reported once and
dropped, and the run continues; one that hangs in `evaluate` ends it by --collective_timeout.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from data.loader import ValidationSet
from data.special_tokens import SpecialTokens, special_tokens
from training.config import ConfigError, TrainingConfig
from training.inputs import Inputs
from training.sinks import BackgroundSink

if TYPE_CHECKING:
    from training.state import TrainState

FUNCTIONS = ("step_metrics", "evaluate", "sinks")
_ERRORS = (Exception, SystemExit)  # of a plugin; Ctrl-C is not its own


@dataclass(frozen=True)
class EvaluationContext:
    """What `evaluate` may look at. held_out: the rows of --valid_path, None without. special: special.ids["bos"] begins
    a text, and so on."""

    step: int
    config: TrainingConfig
    tokenizer: Tokenizer
    held_out: ValidationSet | None
    device: torch.device
    rank: int
    world_size: int
    special: SpecialTokens


@dataclass
class Plugin:
    """One file's functions by name; those that have failed are gone."""

    path: str
    content: str
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def drop(self, name: str, why: str, say: Callable[[str], object]) -> None:
        """Leave out a function from here on."""
        self.functions.pop(name, None)
        say(f"note: --plugin {self.path}: {name} {why}; the run continues without it")


class Plugins:
    """The plugins of a run."""

    def __init__(self, paths: Sequence[str] = ()):
        """Import the files. Raises ConfigError."""
        self._plugins = [_import(path) for path in paths]

    @property
    def content(self) -> str:
        """A text that is the same where all files hold the same."""
        return " ".join(plugin.content for plugin in self._plugins)

    @property
    def has_evaluations(self) -> bool:
        """Whether any has an evaluation; the same on all ranks."""
        return any("evaluate" in plugin.functions for plugin in self._plugins)

    def with_step_metrics(self, metrics: dict[str, Any], say: Callable[[str], object]) -> dict[str, Any]:
        """A training step's metrics and what plugins add to them."""
        found = dict(metrics)
        for plugin in self._plugins:
            if (function := plugin.functions.get("step_metrics")) is not None:
                try:
                    found |= _numbers(function(dict(metrics)), found)
                except _ERRORS as error:
                    plugin.drop("step_metrics", f"failed ({_describe(error, plugin.path)})", say)
        return found

    def open_sinks(
        self, run_folder: Path, config: TrainingConfig, say: Callable[[str], object]
    ) -> list[BackgroundSink]:
        """All sinks, at work from here on."""
        opened = []
        for plugin in self._plugins:
            if (function := plugin.functions.get("sinks")) is not None:
                try:
                    sinks = list(function(run_folder, config))
                except _ERRORS as error:
                    plugin.drop("sinks", f"failed ({_describe(error, plugin.path)})", say)
                    continue
                for sink in sinks:
                    name = f"{type(sink).__name__} of --plugin {plugin.path}"
                    opened.append(BackgroundSink(name, lambda sink=sink: sink, say))
        return opened

    def evaluate(self, state: TrainState, inputs: Inputs, say: Callable[[str], object]) -> dict[str, Any]:
        """What plugins measure of the averaged weights, as a line of metrics; {} where there is nothing. Called by all
        ranks, which agree on what has failed on any of them."""
        world, found = state.world, {}
        tokenizer = Tokenizer.from_str(inputs.tokenizer_text)
        of_rank = (inputs.held_out, world.device, world.rank, world.size)
        special = special_tokens(inputs.tokenizer_text, inputs.config.special_tokens or "")
        context = EvaluationContext(state.step, inputs.config, tokenizer, *of_rank, special)
        line = {"step": state.step, "stats/tokens": inputs.plan.tokens_before(state.step)}
        for plugin in self._plugins:
            if (function := plugin.functions.get("evaluate")) is None:
                continue
            own = _measure(function, state, context, plugin.path)
            everyone = world.all_gather_objects(own, f"results of --plugin {plugin.path}")
            failed = next((rank for rank, (problem, _) in enumerate(everyone) if problem), None)
            if failed is not None:
                where = f" on rank {failed}" * (world.size > 1)
                plugin.drop("evaluate", f"failed{where} ({everyone[failed][0]})", say)
                continue
            try:
                found |= _numbers(_combined([values for _, values in everyone]), {**line, **found})
            except ValueError as error:  # alike on all ranks, which have the same values here
                plugin.drop("evaluate", f"failed ({error})", say)
        return {**line, **found} if found else {}


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """What the console says of `Plugins.evaluate`."""
    found = [f"{key} {value:.4g}" for key, value in metrics.items() if key not in ("step", "stats/tokens")]
    return f"step {metrics['step']:>6}  plugins: {', '.join(found)}"


def _measure(
    function: Callable[..., Any], state: TrainState, context: EvaluationContext, path: str
) -> tuple[str, dict[str, Any]]:
    """What failed on this rank, "" where nothing did, and the result. The model is left as it was."""
    was_training = state.model.training
    try:
        with state.ema.swapped_in(state.model), torch.no_grad():
            return "", _plain(function(state.model.eval(), context))
    except _ERRORS as error:
        return _describe(error, path), {}
    finally:
        state.model.train(was_training)


def _plain(result: Any) -> dict[str, Any]:
    """A result as Python's own numbers, or pairs of them. Raises ValueError."""
    if not isinstance(result, dict):
        raise ValueError(f"it returned {result!r:.50} instead of a dict")
    found: dict[str, Any] = {}
    for key, value in result.items():
        values = value if isinstance(value, tuple) else (value,)
        if not isinstance(key, str) or len(values) not in (1, 2) or not all(isinstance(v, Real) for v in values):
            raise ValueError(f"it returned {value!r:.50} as {key!r}: keys are text and values numbers of the host")
        found[key] = tuple(map(float, values)) if isinstance(value, tuple) else float(value)
    return found


def _combined(everyone: list[dict[str, Any]]) -> dict[str, float]:
    """Results of all ranks as one: pairs (sum, count) as means, without those of nothing. Raises ValueError."""
    kinds = [{key: type(value) for key, value in values.items()} for values in everyone]
    if any(each != kinds[0] for each in kinds):
        raise ValueError("ranks returned different keys, or numbers and pairs")
    found: dict[str, float] = {}
    for key, value in everyone[0].items():
        if not isinstance(value, tuple):
            found[key] = value
        elif count := sum(values[key][1] for values in everyone):
            found[key] = sum(values[key][0] for values in everyone) / count
    return found


def _numbers(result: Any, taken: Mapping[str, Any]) -> dict[str, float]:
    """A result as plain numbers under keys that are not `taken`. Raises ValueError."""
    found = _plain(result)
    if both := found.keys() & taken.keys():
        raise ValueError(f"it returned {min(both)!r}, which is logged already")
    if pairs := [key for key, value in found.items() if isinstance(value, tuple)]:
        raise ValueError(f"it returned a pair as {pairs[0]!r}; it must be a number")
    return found


def _import(path: str) -> Plugin:
    """Run a plugin's file. Raises ConfigError."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--plugin {path!r} cannot be read: {error.strerror}") from error
    module = ModuleType(f"plugin_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses, for one, look for the names in it
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except _ERRORS as error:
        raise ConfigError(f"--plugin {path!r} cannot be imported: {_describe(error, path)}") from error
    functions = {name: getattr(module, name) for name in FUNCTIONS if callable(getattr(module, name, None))}
    if not functions:
        raise ConfigError(f"--plugin {path!r} has none of the functions {', '.join(FUNCTIONS)}")
    return Plugin(path, hashlib.sha256(source).hexdigest()[:12], functions)


def _describe(error: BaseException, path: str) -> str:
    """An error and the line of the plugin's file that it comes from, in one line of text."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    where = f"line {lines[-1]}: " if lines else ""
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())[:200]
    return f"{where}{type(error).__name__}: {message}"
