"""Results: what the scripts of evaluation/ have measured, read from the JSON files that their --output writes.

Reports and model cards show them. A file is known by its keys; one of another program has no results.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.atomic_io import json_object

_LARGEST = 20_000_000  # bytes of a result file that is read
_PREDICTIONS = "predictions.json"  # BabyLM's, beside results of evaluation/babylm.py
_PHENOMENON = "linguistics_term"  # BLiMP's name for it
_LOWER_IS_BETTER = ("perplexity", "word perplexity")
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Result:
    """A figure and, where there is one, its 95 % interval.

    name: SUITE or SUITE/PART, as the metrics of a run call it; a task that was fine-tuned for; a text. mode: masked,
    causal or fused, "" of a fine-tuned model. low, high: None without an interval. items: what it is over, 0 where
    unknown. spread: the standard deviation over `seeds` trainings, None of one."""

    name: str
    mode: str
    measure: str
    value: float
    low: float | None = None
    high: float | None = None
    items: int = 0
    spread: float | None = None
    seeds: int = 0
    form: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError, ValueError or OverflowError for what is no number: anybody may have written the file."""
        numbers = [self.value, self.items, self.seeds, self.low, self.high, self.spread]
        if any(isinstance(each, str) or math.isnan(float(each)) for each in numbers if each is not None):
            raise ValueError(f"{self.name}: a result that is no number")

    @property
    def lower_is_better(self) -> bool:
        return self.measure in _LOWER_IS_BETTER

    @property
    def whole(self) -> bool:
        """Whether it is of a whole suite rather than of a part."""
        return not (self.mode and "/" in self.name)

    def text(self, value: float | None = None) -> str:
        """Its value, or another of this measure, for people: perplexities as they are, others in percent."""
        value = self.value if value is None else value
        return f"{value:,.2f}" if self.lower_is_better else f"{100 * value:.1f}"

    @property
    def interval(self) -> str:
        """Its interval, or the spread over seeds, for people; "" where neither is known."""
        if self.low is not None and self.high is not None:
            return f"[{self.text(self.low)}, {self.text(self.high)}]"
        return f"± {self.text(self.spread)} over {self.seeds} seeds" if self.spread is not None else ""


@dataclass(frozen=True)
class ResultFile:
    """What a file holds. kind: the evaluation, in words. model: as its command was given it. weights: trained, ema or
    ema_NAME; "" where the file does not say."""

    kind: str
    model: str
    weights: str
    results: tuple[Result, ...]

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint in a run folder that was measured; "" where the run folder was given."""
        folder = Path(self.model)
        return folder.name if folder.parent.name == _CHECKPOINTS else ""

    @property
    def run_folder(self) -> Path:
        """The folder of the run that was measured, or what else was."""
        folder = Path(self.model)
        return folder.parent.parent if self.checkpoint else folder

    def is_of(self, checkpoint: Path, newest: bool) -> bool:
        """Whether it is of this checkpoint; newest: of its run, which a run folder stands for."""
        if not self.checkpoint:
            return newest
        named = checkpoint.parent / self.checkpoint  # a link, maybe
        return os.path.realpath(named) == os.path.realpath(checkpoint)


def find_results(folder: Path) -> list[Path]:
    """The files of a run folder that may hold results: JSON files in it, and at any depth in its evaluation/."""
    return sorted([*folder.glob("*.json"), *(p for p in folder.glob("evaluation/**/*.json") if p.name != _PREDICTIONS)])


def given_results(path: Path) -> list[Path]:
    """The files that may hold results at a path: itself, or the JSON files of a folder."""
    return sorted(p for p in path.rglob("*.json") if p.name != _PREDICTIONS) if path.is_dir() else [path]


def read_results(path: Path) -> ResultFile | None:
    """The results in a file; None where it has none of the forms that scripts here write."""
    content = json_object(path, _LARGEST)
    try:
        kind, found = _read(content)
        results = tuple(found)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None  # another program's file, which happens to have such keys
    if not results:
        return None
    weights = content.get("weights", "")
    if "ema" in content:  # of evaluation/finetune.py: whether averaged, or the name of a further average
        weights = f"ema_{content['ema']}" if isinstance(content["ema"], str) else "ema" if content["ema"] else "trained"
    return ResultFile(kind, str(content.get("model", "")), str(weights), results)


def _read(content: Mapping[str, Any]) -> tuple[str, Iterator[Result]]:
    if isinstance(content.get("sets"), dict):
        return "minimal pairs", _choices(content["sets"], "")
    if isinstance(content.get("datasets"), dict):
        shots = content.get("shots", 0)
        return "BabyLM", _choices(content["datasets"], f"-{shots}shot" if shots else "")
    if isinstance(content.get("suites"), dict):
        return "SyntaxGym", _syntax_gym(content["suites"])
    if isinstance(content.get("tasks"), dict):
        return "fine-tuning", _fine_tuned(content["tasks"])
    if isinstance(content.get("texts"), int):
        return "LAMBADA", _lambada(content)
    return "perplexity", _perplexity(content.get("texts") or {})


def _accuracy(name: str, mode: str, entry: Mapping[str, Any]) -> Result:
    value = float(entry["accuracy"])
    if not 0 <= value <= 1:
        raise ValueError("an accuracy is no fraction")
    return Result(name, mode, "accuracy", value, entry.get("low"), entry.get("high"), entry.get("pairs", 0))


def _choices(datasets: Mapping[str, Any], suffix: str) -> Iterator[Result]:
    """Of evaluation/minimal_pairs.py and evaluation/babylm.py."""
    for name, of in datasets.items():
        for mode, entry in of["modes"].items():
            called = f"{name}{suffix}"
            if "mean" in entry:
                yield _accuracy(called, mode, entry["mean"])
                parts = entry.get("groups", {}).get(_PHENOMENON) or entry.get("paradigms", {})
                for part, found in parts.items():
                    yield _accuracy(f"{called}/{part}", mode, found)
            elif "spearman" in entry:
                yield Result(
                    called, mode, "Spearman's rho", entry["spearman"], entry["low"], entry["high"], of["items"]
                )
            for part in ("eye_tracking", "self_paced"):
                if part in entry:
                    gain, low, high = (entry[part][key] for key in ("gain", "low", "high"))
                    yield Result(f"{called}_{part}", mode, "gain in R2", gain, low, high, of["items"])


def _syntax_gym(suites: Mapping[str, Any]) -> Iterator[Result]:
    modes: dict[str, list[Result]] = {}
    for name, of in suites.items():
        for mode, entry in of.items():
            modes.setdefault(mode, []).append(_accuracy(f"syntaxgym/{name}", mode, entry["mean"]))
    for mode, found in modes.items():
        mean = sum(each.value for each in found) / len(found)
        # The interval of a mean of independent accuracies, from theirs (MOVER: Zou and Donner, 2008).
        bounds = ([each.low or 0.0 for each in found], [each.high or 0.0 for each in found])
        below, above = (math.dist(of, [each.value for each in found]) / len(found) for of in bounds)
        yield Result("syntaxgym", mode, "accuracy", mean, mean - below, mean + above, sum(each.items for each in found))
        yield from found


def _lambada(content: Mapping[str, Any]) -> Iterator[Result]:
    for mode in ("masked", "causal"):
        if mode in content:
            yield _accuracy("lambada", mode, content[mode]["accuracy"])
            yield Result("lambada", mode, "word perplexity", content[mode]["perplexity"], items=content["texts"])


def _perplexity(texts: Mapping[str, Any]) -> Iterator[Result]:
    for path, of in texts.items():
        for mode in ("masked", "causal"):
            if mode in of:
                name = Path(path).name
                yield Result(name, mode, "perplexity", float(of[mode]["perplexity"]), items=of["tokens"])


def _fine_tuned(tasks: Mapping[str, Any]) -> Iterator[Result]:
    for name, of in tasks.items():
        for measure, found in of["measures"].items():
            seeds, items = len(found["values"]), of["valid_examples"]
            spread, form = found["deviation"], of.get("form", "")
            yield Result(name, "", measure, found["mean"], items=items, spread=spread, seeds=seeds, form=form)
