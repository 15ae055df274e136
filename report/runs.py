"""Run folders as a report reads them: metrics, config.json, status.json, starts and failures, scores and samples.

Every file but metrics.jsonl may be absent (an old run, a metrics file alone) or damaged: the report then says less.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic_io import json_object, json_objects
from data.results import Result, ResultFile, find_results, read_results
from report.metrics import Metrics, ReportError, folder_of, load_all_metrics, to_array
from training.status import LEDGER, SAMPLES

MAX_POINTS = 1000  # of a line in the page
_LARGEST_JSON = 20_000_000  # bytes of a result file that is read


@dataclass(frozen=True)
class Start:
    """One start of a run. outcome: how it ended, as far as files say; step: the step that it began at."""

    time: str
    host: str
    job: str
    device: str
    step: int
    outcome: str = ""


@dataclass(frozen=True)
class Run:
    """A run folder's content. config, status, ledger: config.json and so on, {} without one. starts: in order of time.

    pairs: newest zero-shot result by (mode, name), accuracies in [0, 1], rho and gains in R2; intervals: 95 %, of those
    that have one. results: all others in files of evaluation/. samples: as evaluation/samples.py writes them, newest
    last. hours: step -> hours of training up to it, validation and saving left out."""

    metrics: Metrics
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    pairs: dict[tuple[str, str], float] = field(default_factory=dict)
    intervals: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    hours: dict[int, float] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the report calls the run."""
        return self.metrics.name

    @property
    def step(self) -> int:
        """The newest step in the metrics."""
        return max(max(values) for values in self.metrics.series.values())

    @property
    def useful(self) -> float | None:
        """The fraction of all time since its first start that went into the steps it has now ("goodput").

        The rest is start-up, validation, waiting for saves, steps that were lost and done again, and the time between
        starts, in queues too. None where files do not tell."""
        try:
            began = datetime.fromisoformat(self.starts[0].time)
            ended = datetime.now(timezone.utc)
            if self.state not in ("running", ""):
                ended = datetime.fromisoformat(self.status["time"])
            fraction = 3600 * max(self.hours.values()) / (ended - began).total_seconds()
        except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError):
            return None
        return fraction if 0 < fraction <= 1.01 else None  # the times of files have whole seconds

    @property
    def max_steps(self) -> int | None:
        """The step at which the run ends, where it is known."""
        found = self.status.get("max_steps") or self.config.get("flags", {}).get("max_steps")
        return found if isinstance(found, int) else None

    @property
    def state(self) -> str:
        """running, finished, ... as in status.json; without one, finished where the last step is done, else ""."""
        stated = self.status.get("state")
        if isinstance(stated, str):
            return stated
        return "finished" if self.max_steps and self.step >= self.max_steps else ""

    @property
    def tokens(self) -> float | None:
        """Tokens trained on so far."""
        return self.metrics.last("stats/tokens")


def run_of(folder: Path) -> Run | None:
    """One run; None where it has no metrics yet."""
    try:
        return read_runs([str(folder)])[0]
    except ReportError:
        return None


def read_runs(paths: list[str], results: Sequence[Path] = ()) -> list[Run]:
    """Read several runs. results: more files of results than those in the run folders, each of any of the runs. Raises
    ReportError, one sentence, where one of them is no run or has no metrics yet, or a file is of none of them."""
    try:
        found = load_all_metrics(paths)
    except OSError as error:
        raise ReportError(f"{error.filename}: {error.strerror}") from error
    more: dict[Path, list[Path]] = {}
    folders = [folder_of(path) for path in paths]
    for path in results:
        for folder in _measured(path, folders):
            more.setdefault(folder, []).append(path)
    return [_read_run(metrics, folder, more.get(folder, [])) for metrics, folder in zip(found, folders, strict=True)]


def _measured(path: Path, folders: Sequence[Path]) -> list[Path]:
    """The run folders that a file has results of, by the path of its model, or else its name. Raises ReportError."""
    content = read_results(path)
    if content is None:
        raise ReportError(f"--results {path}: holds no results of the scripts in evaluation/ (their --output).")
    place = content.run_folder.resolve()
    same = [folder for folder in folders if folder.resolve() == place]
    same = same or [folder for folder in folders if folder.resolve().name == place.name]
    if not same:
        raise ReportError(f"--results {path}: is of model {content.model}, which is none of these runs.")
    return same


def _read_run(metrics: Metrics, folder: Path, more: Sequence[Path]) -> Run:
    """A run's metrics with what the other files of its folder add to them, and `more` files of results."""
    config, status = tidied(read_object(folder / "config.json")), read_object(folder / "status.json")
    files = result_files(folder, more)
    newest = {(each.mode, each.name, each.measure): each for _, file in files for each in file.results}
    zero_shot = {key[:2]: each for key, each in newest.items() if _is_score(each)}
    logged = {pair: metrics.last(key) for pair, key in pair_keys(metrics).items()}
    return Run(
        metrics=replace(metrics, series={**by_checkpoint(files), **metrics.series}),
        config=config,
        status=status,
        starts=read_starts(folder, config, status),
        pairs={pair: value * unit_of(value) for pair, value in logged.items() if value is not None}
        | {key: each.value for key, each in zero_shot.items()},
        intervals={
            key: (each.low, each.high)
            for key, each in zero_shot.items()
            if each.low is not None and each.high is not None
        },
        results=[each for each in newest.values() if not _is_score(each)],
        samples=json_objects(folder / SAMPLES),
        hours=training_hours(metrics),
        ledger=read_object(folder / LEDGER),
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder; {} where there is none, it cannot be read or is too large."""
    return json_object(path, _LARGEST_JSON)


def tidied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose groups are objects and whose launches are a list of objects; what is not is left out."""
    groups = {name: config[name] for name in _GROUPS if isinstance(config.get(name), dict)}
    launches = config.get("launches")
    launches = [launch for launch in launches if isinstance(launch, dict)] if isinstance(launches, list) else []
    rest = {name: value for name, value in config.items() if name not in (*_GROUPS, "launches")}
    return {**rest, **groups, "launches": launches} if config else {}


_GROUPS = ("flags", "model", "data", "versions")


# Starts


def read_starts(folder: Path, config: Mapping[str, Any], status: Mapping[str, Any]) -> list[Start]:
    """Every start that config.json or attempts.jsonl knows, each with how it ended. config.json has those that came as
    far as training; a start that is in attempts.jsonl alone ended before that."""
    launches = config.get("launches", [])
    known = {_key(launch) for launch in launches}
    early = [attempt for attempt in json_objects(folder / "attempts.jsonl") if _key(attempt) not in known]
    merged = sorted([*launches, *early], key=lambda start: str(start.get("time", "")))
    failures = _failures(folder)
    found = []
    for number, start in enumerate(merged):
        job, count = start.get("job_id"), start.get("restart_count", 0)
        outcome = failures.get(_key(start), "")
        if not outcome and start in early:
            outcome = "ended before its first step"
        elif not outcome and number == len(merged) - 1:
            outcome = " ".join(filter(None, [str(status.get("state", "")), str(status.get("reason", ""))]))
        elif not outcome:
            outcome = f"resumed from step {_start_step(merged[number + 1]):,}"
        world = start.get("world_size")
        device = str(start.get("device", ""))
        device = f"CPU ({device})" if device in ("x86_64", "aarch64", "arm64") else device
        found.append(
            Start(
                time=str(start.get("time", "")),
                host=str(start.get("host", "")),
                job=f"{job}{f' (restart {count})' if count else ''}" if job else "",
                device=f"{world} × {device}" if world and device else device,
                step=_start_step(start),
                outcome=outcome,
            )
        )
    return found


def _key(start: Mapping[str, Any]) -> tuple[str, str]:
    """Which start of which job it is."""
    return str(start.get("job_id") or "none"), str(start.get("restart_count") or 0)


def _start_step(start: Mapping[str, Any]) -> int:
    step = start.get("start_step", start.get("newest_step", 0))
    return step if isinstance(step, int) else 0


def _failures(folder: Path) -> dict[tuple[str, str], str]:
    """The first error of each start, by its `_key`."""
    found: dict[tuple[str, str], tuple[bool, float, str]] = {}
    for path in sorted((folder / "failures").glob("*.json")):
        parts = path.stem.split("_")
        content = read_object(path)
        if len(parts) != 3 or not parts[1].isdigit() or "error" not in content:
            continue
        where = f"rank {content.get('rank')} on {content.get('host')}: {content['error']}"
        time = content.get("time")
        entry = (bool(content.get("secondary")), time if isinstance(time, float) else 0.0, where)
        key = (parts[0], str(int(parts[1])))
        found[key] = min(found.get(key, entry), entry)
    return {key: entry[2] for key, entry in found.items()}


# Minimal pairs


def pair_keys(metrics: Metrics) -> dict[tuple[str, str], str]:
    """The keys `eval/MODE/NAME` of a run by (mode, name)."""
    found = {}
    for key in metrics.series:
        match = re.fullmatch(r"eval/([^/]+)/(.+)", key)
        if match:
            found[match[1], match[2]] = key
    return found


def unit_of(largest: float) -> float:
    """The unit of accuracies up to `largest`: a hundredth where they were given in percent, else 1."""
    return 0.01 if largest > 1.5 else 1.0


def result_files(folder: Path, more: Sequence[Path] = ()) -> list[tuple[int | None, ResultFile]]:
    """The results that evaluation/ left in a run folder and in `more` files, each with the step of its checkpoint. None
    is the step of a file that was made of the run folder, and of a checkpoint that is gone. The newest come last."""
    found = []
    for path in [*find_results(folder), *more]:
        if path.name not in _OWN_FILES and (file := read_results(path)):
            of = (folder / "checkpoints" / file.checkpoint).resolve() if file.checkpoint else Path()
            step = re.fullmatch(r"step_(\d+)", of.name)
            order = math.inf if not file.checkpoint else int(step[1]) if step else -1
            found.append(((order, _modified(path)), int(step[1]) if step else None, file))
    return [(step, file) for _, step, file in sorted(found, key=lambda entry: entry[0])]


def by_checkpoint(files: Sequence[tuple[int | None, ResultFile]]) -> dict[str, dict[int, float]]:
    """Scores of several checkpoints as series of metrics, `eval/MODE/NAME`."""
    found: dict[str, dict[int, float]] = {}
    for step, file in files:
        for each in file.results:
            if step is not None and _is_score(each):
                found.setdefault(f"eval/{each.mode}/{each.name}", {})[step] = each.value
    return found


def pairs_in_files(folder: Path) -> dict[tuple[str, str], float]:
    """Zero-shot results in the JSON files that evaluation/ left in a run folder; those of the newest file win. Names
    are as in the metrics: SET for the mean of its files, SET/PHENOMENON for a part of it."""
    every = [each for _, file in result_files(folder) for each in file.results]
    return {(each.mode, each.name): each.value for each in every if _is_score(each)}


def _is_score(result: Result) -> bool:
    """Whether it is a zero-shot score: what --evaluate_data measures, too."""
    return bool(result.mode) and not result.lower_is_better


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone since it was listed
        return 0.0


_OWN_FILES = ("config.json", "status.json", "tokenizer.json")


# Numbers


def training_hours(metrics: Metrics) -> dict[int, float]:
    """Hours of training up to each step, from tokens and tokens per second; validation and saving do not count."""
    tokens, rates = metrics.series.get("stats/tokens", {}), metrics.series.get("stats/tokens_per_second", {})
    steps = sorted(rates.keys() & tokens.keys())
    if not steps:
        return {}
    count, rate = to_array(tokens[s] for s in steps), to_array(rates[s] for s in steps)
    per_step = np.diff(count, prepend=0.0) / np.maximum(rate, 1e-9)
    if len(steps) > 1 and steps[0] > 1:  # the metrics begin later than the run
        per_step[0] = per_step[1]
    return dict(zip(steps, (np.cumsum(per_step) / 3600).tolist(), strict=True))


def downsample(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points of a line x, y [N] that draw like all of them.

    From each of limit / 4 groups of neighbours: the first, the last, the smallest and the largest (M4, Jugel et al.,
    VLDB 2014). Nothing is averaged: every point kept is one of the line's own."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), limit // 4 + 1).astype(int)
    kept: set[int] = set()
    for begin, end in itertools.pairwise(edges.tolist()):
        part = y[begin:end]
        kept.update((begin, end - 1, begin + int(part.argmin()), begin + int(part.argmax())))
    order = np.array(sorted(kept))
    return x[order], y[order]


def rounded(values: np.ndarray, digits: int = 5) -> list[float]:
    """Values with so many significant digits, which is what a page needs and a third of the bytes."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
