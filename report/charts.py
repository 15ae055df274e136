"""Charts of a report and the lines in them, as JSON for the page's script to draw.

A line is {run, kind, colour, label, s, y}: steps and values. kind: "raw", "smooth" (its trend), "valid" (points on a
thin line), "ema" (hollow points, dashed), "line" or "stepped". colour: the name of a colour of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from report.metrics import objectives, trend
from report.runs import Run, downsample, pair_keys, rounded, unit_of

Chart = dict[str, Any]
RUN_COLOURS = 6  # in the page's palette; after the last they start again
_OWN_COLOURS = ("masked", "causal", "fused")  # objectives and modes of scoring that have a colour of their name
_MOST_TICKS = 5  # values of a stepped schedule that are marked one by one


def run_colour(number: int) -> str:
    """The colour of the run of this number."""
    return f"run{number % RUN_COLOURS}"


def hue_of(name: str, number: int) -> str:
    """The colour of an objective or a mode of scoring, the one of this number in its chart or report."""
    return name if name in _OWN_COLOURS else run_colour(number)


def axes_of(run: Run) -> dict[str, list[float]]:
    """Steps of a run, and the tokens and hours at them, for the page to put steps on any axis. "tokens" or "hours" is
    left out where the run did not log what it needs."""
    steps = np.array(sorted({step for values in run.metrics.series.values() for step in values}), dtype=np.float64)
    if len(steps) > 1000:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, 1000).astype(int))]
    found = {"s": rounded(steps, 12)}
    for name, values in (("tokens", run.metrics.series.get("stats/tokens", {})), ("hours", run.hours)):
        if values:
            known = np.array(sorted(values.items()), dtype=np.float64)
            found[name] = rounded(np.interp(steps, known[:, 0], known[:, 1]), 7)
    return found


def rounded_line(values: dict[int, float], number: int, colour: str, label: str) -> dict[str, Any]:
    """The line of a run's few values by step, in points."""
    s, y = (rounded(np.array(list(part), dtype=np.float64), 9) for part in (values, values.values()))
    return {"run": number, "kind": "valid", "colour": colour, "label": label, "s": s, "y": y}


def _line(run: Run, number: int, key: str, kind: str, colour: str, label: str, scale: float = 1.0) -> dict[str, Any]:
    """One line of a chart; without points where the run has no such metric."""
    x, y = run.metrics.points(key, "step")
    x, y = trend(x, y) if kind == "smooth" else (x, y)
    x, y = downsample(x, y * scale)
    return {"run": number, "kind": kind, "colour": colour, "label": label, "s": rounded(x, 9), "y": rounded(y)}


def chart_of(name: str, title: str, lines: Iterable[dict[str, Any]], **options: Any) -> list[Chart]:
    """A chart as a list of one, or of none where it has no points."""
    lines = [line for line in lines if line["s"]]
    return [{"id": name, "title": title, "lines": lines, **options}] if lines else []


def _noisy(runs: list[Run], key: str, colour: str | None = None, label: str = "training") -> list[dict[str, Any]]:
    """A measured series of every run, smoothed, and raw too for up to two runs."""
    lines, kinds = [], ("raw", "smooth") if len(runs) <= 2 else ("smooth",)
    for number, run in enumerate(runs):
        hue = colour if colour and len(runs) == 1 else run_colour(number)
        lines += [_line(run, number, key, kind, hue, label) for kind in kinds]
    return lines


def further_averages(runs: list[Run]) -> list[str]:
    """Names of further averages of the weights (--ema_decay, --tail_average) that any run has measured."""
    key = re.compile(r"valid/(?:[^/]+/)?ema-([^_/]+)_.*")
    return sorted({found[1] for run in runs for each in run.metrics.series if (found := key.fullmatch(each))})


def objective_charts(runs: list[Run], measure: str, title: str, **options: Any) -> list[Chart]:
    """A chart per objective of `measure` ("loss", "accuracy"): training, validation and validation of averages.

    Also of each source of a mix and of several held-out sets, which share a chart where they share a name."""
    charts = []
    for position, objective in enumerate(objectives(run.metrics for run in runs)):
        colour = hue_of(objective, position)
        lines = _noisy(runs, f"train/{objective}_{measure}", colour)
        name, heading = f"{objective}_{measure}", f"{objective.capitalize()} {title}"
        charts += chart_of(name, heading, [*lines, *_validation(runs, "valid/", name, colour)], **options)
        key = re.compile(
            rf"(?:train|valid)/([^/]+)/(?:ema(?:-[^_/]+)?_)?{re.escape(name)}"
        )  # of sources and held-out sets, each a small chart
        found = (key.fullmatch(each) for run in runs for each in run.metrics.series)
        for held_out in dict.fromkeys(match[1] for match in found if match):
            lines = _noisy(runs, f"train/{held_out}/{name}", colour)
            lines += _validation(runs, f"valid/{held_out}/", name, colour)
            charts += chart_of(f"{name}_{held_out}", f"{heading}, {held_out}", lines, **{**options, "small": True})
    if not charts:
        charts = chart_of(measure, title.capitalize(), _noisy(runs, f"train/{measure}"), **options)
    return charts


def _validation(runs: list[Run], prefix: str, name: str, colour: str) -> list[dict[str, Any]]:
    """Validation of every run's weights, of their EMA, and of further averages, dashed otherwise."""
    lines, further = [], further_averages(runs)
    for number, run in enumerate(runs):
        hue = colour if len(runs) == 1 else run_colour(number)
        lines.append(_line(run, number, f"{prefix}{name}", "valid", hue, "validation"))
        lines.append(_line(run, number, f"{prefix}ema_{name}", "ema", hue, "validation, EMA"))
        for dash, of in enumerate(further, 1):
            line = _line(run, number, f"{prefix}ema-{of}_{name}", "ema", hue, f"validation, average {of}")
            lines.append({**line, "dash": dash})
    return lines


def pair_names(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Modes and names of minimal-pair scores in any run; each set comes before its phenomena."""
    found = {pair for run in runs for pair in (*pair_keys(run.metrics), *run.pairs)}
    modes, order = {mode for mode, _ in found}, _OWN_COLOURS
    return [m for m in order if m in modes] + sorted(modes.difference(order)), sorted({name for _, name in found})


def chance(name: str) -> float | None:
    """The accuracy of a guess in a suite of this name; None where there is none, or results are no accuracies."""
    if name.startswith(("wug", "reading", "lambada", "age_of")):
        return None
    return 0.2 if name.startswith("entity_tracking") else 0.5


def is_set(name: str) -> bool:
    """Whether a name is that of a whole set of pairs rather than of one of its phenomena."""
    return "/" not in name


def spoken(name: str) -> str:
    """The last part of a name as words."""
    return name.rsplit("/", 1)[-1].replace("_", " ")


def pair_charts(runs: list[Run]) -> list[Chart]:
    """A chart per name of what was scored during training; modes by colour in one run, by dashes in several."""
    modes, names = pair_names(runs)
    several, lowest, drawn = len(runs) > 1, 1.0, []
    for name in names:
        lines = []
        for number, run in enumerate(runs):
            keys = pair_keys(run.metrics)
            for dash, mode in enumerate(modes):
                if (mode, name) not in keys:
                    continue
                values = run.metrics.series[keys[mode, name]].values()
                scale = unit_of(max(values))
                lowest = min(lowest, scale * min(values)) if chance(name) else lowest
                hue = run_colour(number) if several else hue_of(mode, dash)
                line = _line(run, number, keys[mode, name], "valid", hue, mode, scale)
                lines.append({**line, "dash": dash if several else 0})
        drawn.append((name, lines))
    charts: list[Chart] = []
    for name, lines in drawn:
        options: dict[str, Any] = {"format": "percent", "small": not is_set(name), "set": name.split("/")[0]}
        if chance(name) is not None:  # all accuracies on one scale
            options |= {"reference": chance(name), "range": [lowest, 1.0]}
        charts += chart_of(f"pairs_{len(charts)}", spoken(name), lines, **options)
    return charts


def schedule_charts(runs: list[Run]) -> list[Chart]:
    """Learning rate, row length, rows per step and mask rate, as they were applied."""
    shown = (
        ("stats/learning_rate", "Learning rate", "line"),
        ("stats/seq_length", "Row length (tokens)", "stepped"),
        ("stats/global_batch_size", "Batch size (rows per step)", "stepped"),
        ("stats/mask_p", "Mask rate", "line"),
    )
    charts = []
    for key, title, kind in shown:
        lines = [_line(run, n, key, kind, run_colour(n) if len(runs) > 1 else "ink", "") for n, run in enumerate(runs)]
        options: dict[str, Any] = {"format": "percent"} if key == "stats/mask_p" else {}
        values = sorted({value for line in lines for value in line["y"]})
        if kind == "stepped" and len(values) <= _MOST_TICKS:
            options["ticks"] = values
        charts += chart_of(key.removeprefix("stats/"), title, lines, zero=True, small=True, **options)
    return charts


def speed_charts(runs: list[Run]) -> list[Chart]:
    """Throughput, fraction of the device's peak, memory, and waiting for data."""
    single = "ink" if len(runs) == 1 else None
    shown = (
        ("stats/tokens_per_second", "Throughput (tokens per second)", {"zero": True}),
        ("stats/mfu", "Model FLOPs utilisation", {"zero": True, "format": "percent"}),
        ("stats/loader_wait_seconds", "Waiting for data (seconds a step)", {"zero": True}),
    )
    charts = []
    for key, title, options in shown:
        lines = _noisy(runs, key, single, "measured")
        charts += chart_of(key.removeprefix("stats/"), title, lines, small=True, **options)
    memory = [_line(run, n, "stats/peak_memory_gib", "line", single or run_colour(n), "") for n, run in enumerate(runs)]
    return charts + chart_of("peak_memory_gib", "Peak device memory (GiB)", memory, small=True, zero=True)


def stability_charts(runs: list[Run]) -> list[Chart]:
    """Gradient norm and z-loss, and where one run is shown the norms by part of the model."""
    single = "ink" if len(runs) == 1 else None
    charts = chart_of("grad_norm", "Gradient norm before clipping", _noisy(runs, "stats/grad_norm", single), small=True)
    charts += chart_of("z_loss", "Squared log-partition (z-loss)", _noisy(runs, "train/z_loss", single), small=True)
    if len(runs) == 1:
        for kind, title in (("grad_norm", "Gradient norm by part"), ("parameter_norm", "Parameter norm by part")):
            keys = sorted(key for key in runs[0].metrics.series if key.startswith(f"stats/{kind}/"))
            lines = [
                _line(runs[0], 0, key, "line", run_colour(number), key.rsplit("/", 1)[-1])
                for number, key in enumerate(keys)
            ]
            charts += chart_of(f"{kind}_roles", title, lines, small=True, legend=True, log=True)
    return charts


def sections(runs: list[Run]) -> dict[str, list[Chart]]:
    """The charts of a report by section; a section may be empty."""
    return {
        "loss": objective_charts(runs, "loss", "loss", format="loss", unit="nats per target"),
        "accuracy": objective_charts(runs, "accuracy", "accuracy", format="percent", small=True),
        "pairs": pair_charts(runs),
        "schedules": schedule_charts(runs),
        "speed": speed_charts(runs),
        "stability": stability_charts(runs),
    }
