"""Metrics of runs: reading metrics.jsonl, finished or still growing, and making long or noisy series drawable."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data.atomic_io import json_lines

_LARGEST = 1e100  # a value beyond is a gap, like one that is not finite: sums of such overflow
MAX_POINTS = 4000  # a line of more points than pixels is averaged down to this many, so that long runs draw at once
_FIRST_OBJECTIVES = ("masked", "causal")
_NO_OBJECTIVES = {"z"}  # train/z_loss is a regulariser


class ReportError(ValueError):
    """Something the user asked for cannot be shown; the message is one sentence for them."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of one run. name: what a legend calls the run. series: metric -> {step: value}, finite numbers only,
    steps increasing. skipped_lines: how many lines other than an unfinished last one were no JSON object."""

    name: str
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    skipped_lines: int = 0

    @property
    def gaps(self) -> list[str]:
        """What the file lacks, as sentences."""
        found, steps = [], self.series.get("train/loss", {})
        if self.skipped_lines:
            found.append(f"{self.name}: {self.skipped_lines} lines were no JSON object with a step; left out.")
        if missing := max(steps, default=0) - min(steps, default=1) + 1 - len(steps):
            found.append(f"{self.name}: its metrics lack {missing} training steps between the first and the last.")
        return found

    def last(self, key: str) -> float | None:
        """Return the newest value of a metric, or None where it was never logged."""
        values = self.series.get(key)
        return values[max(values)] if values else None

    def points(self, key: str, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y, both float64 [N], of a metric; `x_axis` is "step" or "tokens" (which the run must hold)."""
        values = self.series.get(key, {})
        steps, y = to_array(values), to_array(values.values())
        if x_axis == "step":
            return steps, y
        tokens = self.series["stats/tokens"]
        return np.interp(steps, to_array(tokens), to_array(tokens.values())), y


def folder_of(path: str | Path) -> Path:
    """The run folder that a command-line argument means: itself, or where the metrics file lies."""
    path = Path(path)
    return path if path.is_dir() else path.parent


def default_output(given: str | None, runs: list[str], name: str) -> Path:
    """The file that --output names, else one of this name in the folder of the one run, or here for several."""
    return Path(given) if given else Path(name) if len(runs) > 1 else folder_of(runs[0]) / name


def to_array(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=np.float64)


def load_metrics(path: str | Path) -> Metrics:
    """Read a run folder's metrics.jsonl, or such a file itself, whether the run is finished or still writing. Of a step
    that stands there twice (a run resumed from an earlier checkpoint) the later line counts. Values that are missing,
    null or not finite are gaps. Raises ReportError where there is no such file, or it holds no metrics yet."""
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ReportError(f"{path} is no run: name a folder with a metrics.jsonl file in it, or such a file.")
    series: dict[str, dict[int, float]] = {}
    skipped = 0
    for line, content in json_lines(file):
        step = content.get("step") if content else None
        if content is None or not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST:
            skipped += bool(line.strip()) and line.endswith(b"\n")  # a last line without its end is still being written
            continue
        for key, value in content.items():
            if key != "step" and isinstance(value, (int, float)) and abs(value) <= _LARGEST:  # NaN is not
                series.setdefault(key, {})[step] = float(value)
    if not series:
        raise ReportError(f"{file} holds no metrics yet: nothing to draw before the first training step.")
    ordered = {key: dict(sorted(values.items())) for key, values in series.items()}
    return Metrics(name=file.resolve().parent.name, series=ordered, skipped_lines=skipped)


def load_all_metrics(paths: list[str]) -> list[Metrics]:
    """Read several runs; those of the same folder name are called by their path instead."""
    found = [load_metrics(path) for path in paths]
    names = [metrics.name for metrics in found]
    return [
        replace(metrics, name=path) if names.count(metrics.name) > 1 else metrics
        for path, metrics in zip(paths, found, strict=True)
    ]


def objectives(runs: Iterable[Metrics]) -> list[str]:
    """The objectives with a loss in any run (`train/NAME_loss`, `valid/NAME_loss`), masked and causal first."""
    keys = {key for metrics in runs for key in metrics.series}
    found = {match[1] for key in keys if (match := re.fullmatch(r"(?:train|valid)/(?:ema_)?(\w+)_loss", key))}
    found -= _NO_OBJECTIVES
    return [name for name in _FIRST_OBJECTIVES if name in found] + sorted(found.difference(_FIRST_OBJECTIVES))


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """Return y [N] averaged over about `width` neighbours to both sides, the near ones counting more.

    The weights fall linearly and are centred, so the curve does not lag behind a falling loss; at both ends they are
    those of the neighbours that exist. A width of 0 gives y itself."""
    weights = np.concatenate([np.arange(1, width + 1), np.arange(width + 1, 0, -1)]).astype(np.float64)
    padded = np.pad(y, width)
    present = np.pad(np.ones(len(y)), width)
    return np.convolve(padded, weights, mode="valid") / np.convolve(present, weights, mode="valid")


def thin(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Average neighbouring points of x and y [N] until at most `limit` are left; shorter ones come back as they are."""
    group = -(-len(x) // limit)
    if group <= 1:
        return x, y
    starts = np.arange(0, len(x), group)
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def trend(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A noisy line thinned and smoothed over a fiftieth of its length to both sides."""
    x, y = thin(x, y)
    return (x, smooth(y, len(y) // 50)) if len(y) else (x, y)


def short_number(value: float) -> str:
    """Return 1500000 as "1.5M": three digits and k, M, B or T."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"
