"""Groups of runs, such as seeds of one recipe: which runs belong together, their scores, means and significance."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from report.charts import is_set, pair_names
from report.metrics import ReportError, objectives
from report.runs import Run
from report.tables import flattened
from training.config import FIELDS

# Flags that say where and how a run is made, not what: the same training on any hardware.
_OPERATION = ("logs", "jobs", "hardware")
_NOT_THE_RECIPE = ("name", "output_dir", "resume", "checkpoint_filename", "seed", "local_batch_size", "hybrid_split")
# What a file's name tells need not be told again by each key that is in it.
_ALSO_TOLD = {"model": "flags.config_file", "data": "flags.train_path"}
_SHORT_HASH = 8


@dataclass(frozen=True)
class Score:
    """A figure that runs are compared by. values: by the number of the run; percent: fractions, to be shown times 100.
    set: of a part of a suite, such as one of BLiMP's phenomena, the mode and the suite that it belongs to."""

    name: str
    values: dict[int, float]
    lower_is_better: bool = False
    percent: bool = False
    set: tuple[str, str] | None = None


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, by their numbers. settings: what distinguishes it from the other groups, by dotted name."""

    settings: dict[str, Any]
    runs: tuple[int, ...]

    @property
    def label(self) -> str:
        """The values of its settings."""
        return " · ".join(shown(value) for value in self.settings.values()) or "all"


def shown(value: Any) -> str:
    """A setting's value as text; of a path the end."""
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:_SHORT_HASH]
    return text.rstrip("/").rsplit("/", 1)[-1] or "none"


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Runs with the same settings, in order of first appearance; seeds and what does not change training do not count.
    by: only these settings count (learning_rate, model.hidden_size). Raises ReportError for one that no run has."""
    every = [flattened(run.config) for run in runs]
    names = list(dict.fromkeys(name for settings in every for name in settings))
    if by:
        wanted = [name if "." in name else f"flags.{name}" for name in by]
        for name in wanted:
            if name not in names:
                raise ReportError(f"--by {name.removeprefix('flags.')}: no run has such a setting.")
        names = wanted
    else:
        names = [name for name in names if _matters(name)]
    names = [name for name in names if len({_key(name, settings.get(name)) for settings in every}) > 1]
    found: dict[tuple[str, ...], list[int]] = {}
    for number, settings in enumerate(every):
        found.setdefault(tuple(_key(name, settings.get(name)) for name in names), []).append(number)
    told = [name for name in names if not any(_ALSO_TOLD.get(name.split(".")[0]) == other for other in names)]
    return [Group({name: every[of[0]].get(name) for name in told}, tuple(of)) for of in found.values()]


def _matters(name: str) -> bool:
    section, _, flag = name.partition(".")
    if section == "data":
        return flag == "identity"
    if section == "model":
        return True
    return flag not in _NOT_THE_RECIPE and (flag not in FIELDS or FIELDS[flag].metadata["group"] not in _OPERATION)


def _key(name: str, value: Any) -> str:
    """What makes two values of a setting the same: of files their names, wherever they lie."""
    flag = name.removeprefix("flags.")
    return shown(value) if flag in FIELDS and FIELDS[flag].metadata["path"] else json.dumps(value, sort_keys=True)


def scores_of(runs: Sequence[Run]) -> list[Score]:
    """The newest held-out losses and zero-shot scores that two runs or more have, or the only run."""
    found = []
    for objective in objectives([run.metrics for run in runs]):
        keys = (f"valid/ema_{objective}_loss", f"valid/{objective}_loss")
        for key, name in zip(keys, (f"{objective} loss, EMA", f"{objective} loss"), strict=True):
            values = {n: value for n, run in enumerate(runs) if (value := run.metrics.last(key)) is not None}
            if values:
                found.append(Score(name, values, lower_is_better=True))
                break
    modes, names = pair_names(list(runs))
    for name in names:
        for mode in modes:
            values = {n: run.pairs[mode, name] for n, run in enumerate(runs) if (mode, name) in run.pairs}
            suite = None if is_set(name) else (mode, name.split("/")[0])
            title = f"{name}, {mode}" if suite is None else name.split("/", 1)[1]
            found.append(Score(title, values, percent=True, set=suite))
    for each in (result for run in runs for result in run.results):
        title = ", ".join(filter(None, (each.name, each.measure, each.mode)))
        if title not in {score.name for score in found}:
            key = (each.name, each.mode, each.measure)
            values = {
                n: of.value for n, run in enumerate(runs) for of in run.results if (of.name, of.mode, of.measure) == key
            }
            found.append(Score(title, values, each.lower_is_better, percent=not each.lower_is_better))
    return [score for score in found if score.values]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error; None of a single value."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value that two samples (two values or more each) have one mean, their variances unequal."""
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    difference = abs(statistics.fmean(first) - statistics.fmean(second))
    if not sum(errors):
        return float(not difference)
    t = difference / math.sqrt(sum(errors))
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (first, second), strict=True))
    # Student's density over 0 .. t by Simpson's rule, with x = sqrt(freedom) * tan(angle): cos(angle)^(freedom - 1).
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end, pieces = math.atan(t / math.sqrt(freedom)), 1000
    heights = [math.cos(end * i / pieces) ** (freedom - 1) for i in range(pieces + 1)]
    weighted = sum(h * (1 if i in (0, pieces) else 4 if i % 2 else 2) for i, h in enumerate(heights))
    return max(0.0, 1 - 2 * scale * weighted * end / pieces / 3)
