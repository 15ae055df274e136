"""Where numbers go: metrics.jsonl always, wandb where wanted, one live line on the console."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from tqdm import tqdm

from data.atomic_io import json_lines, write_atomically
from data.objectives import OBJECTIVE_NAMES
from training.background import Background
from training.config import ConfigError, TrainingConfig
from training.distributed import World
from training.inputs import Inputs
from training.run_dir import RunFolder, RunView
from training.status import RUNNING, SAMPLES, StatusFile
from training.summary import describe_launch

DEFAULT_PROJECT = "hybrid-pretraining"
_PATIENT_SECONDS, _HURRIED_SECONDS = 600.0, 20.0  # for what wandb still has to upload at the end
_LINE_SECONDS = 10.0  # between lines where the console is a file


def _has_step(record: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return record is not None and isinstance(record.get("step"), int)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl (or samples.jsonl); damaged lines, such as a cut-off last one, are left out."""
    return [record for _line, record in json_lines(path) if _has_step(record)]


def keep_until(path: Path, step: int) -> int:
    """Drop what a metrics.jsonl (or samples.jsonl) holds beyond `step`, so that a resumed run repeats no step.

    Damaged lines go too; returns how many there were.
    """
    kept, damaged = [], 0
    for line, record in json_lines(path):
        if not _has_step(record):
            damaged += bool(line.strip())
        elif record["step"] <= step:
            kept.append(line.rstrip(b"\n") + b"\n")
    write_atomically(path, b"".join(kept))
    return damaged


def missing_steps(path: Path, first: int, last: int) -> list[int]:
    """The training steps from `first` to `last` that a metrics.jsonl does not tell of."""
    logged = {record["step"] for record in read_metrics(path) if "train/loss" in record}
    return [step for step in range(first, last + 1) if step not in logged]


def trim_metrics(folder: RunView, step: int) -> None:
    """Drop what metrics and samples hold beyond `step`, so that none comes twice; says what is damaged or missing."""
    for path in filter(Path.exists, (folder.metrics, folder.samples)):
        if damaged := keep_until(path, step):
            print(f"note: {path} had {damaged} damaged line{'s' * (damaged > 1)}, left out now", flush=True)
    first = ((folder.read_config() or {}).get("launches") or [{}])[0].get("start_step", 0) if step else 0
    if missing := missing_steps(folder.metrics, first + 1, step):
        print(f"note: {folder.metrics} lacks {len(missing)} steps, the first of them {missing[0]}", flush=True)


@contextmanager
def unbreakable(*streams: TextIO) -> Iterator[None]:
    """Printing inside is no reason to end: a console that is gone (a closed terminal, say) is silent from here on."""
    try:
        yield
    except (OSError, ValueError):
        for stream in streams:
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class NullLogger:
    """What ranks other than 0 log to: nothing happens. Its methods are those that the training loop calls."""

    problem: str | None = None
    takes_media = False

    def log_steps(self, entries: list[dict[str, Any]], last: bool = False) -> None:
        """Metrics of training steps, to files and console; `last` before something else is printed."""

    def log(self, record: dict[str, Any]) -> None:
        """Metrics of one step; `record` has the key `step`."""

    def log_samples(self, take: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Sample completions, which `take` computes."""

    def log_media(self, media: Callable[[], dict[str, Any]], step: int) -> None:
        """Pages and pictures."""

    def say(self, text: str) -> None:
        """A line that stays on the console."""

    def sync(self) -> None:
        """Have everything on the disk."""

    def preempting(self) -> None:
        """The run is about to stop and to come back."""

    def hurry(self, failed: bool = False) -> None:
        """Have `close` wait for no more than a moment."""

    def close(self) -> None:
        """Flush everything."""


class MetricLogger(NullLogger):
    """Writes metrics and samples of rank 0.

    problem: a sentence once metrics.jsonl could not be written; the training loop then saves and stops. All else is
    expendable: what fails is said once and left out. signalled: whether somebody wants the run to end soon.
    """

    def __init__(
        self,
        config: TrainingConfig,
        folder: Path,
        wandb_id: str,
        start_step: int,
        facts: Mapping[str, Any],
        signalled: Callable[[], bool] = lambda: False,
    ):
        self._folder, self._signalled, self._samples = folder, signalled, True
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._wandb = _start_wandb(config, folder, wandb_id, facts, self.say)
        live = sys.stderr.isatty()
        self._bar = tqdm(total=config.max_steps, initial=start_step, unit="step", disable=not live, dynamic_ncols=True)
        self._live, self._last_line, self._max_steps = live, 0.0, config.max_steps
        self._patience, self._code = _PATIENT_SECONDS, 0
        self.problem: str | None = None

    def log_steps(self, entries: list[dict[str, Any]], last: bool = False) -> None:
        """Metrics of training steps, to files and console; `last` before something else is printed."""
        for entry in entries:
            self.log(entry)
            self.show(entry, last)

    def log(self, record: dict[str, Any]) -> None:
        """Record metrics of one step; `record` has the key `step`. Values that are NaN or infinite become null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self._file.write(json.dumps(clean) + "\n")
            self._file.flush()
        except OSError as error:
            self.problem = f"{self._file.name} cannot be written: {error.strerror}"
        if self._wandb is not None:
            numbers = {k: v for k, v in record.items() if not isinstance(v, str)}
            self._wandb.put(lambda run: run.log(numbers, step=record["step"]))

    def log_samples(self, take: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Record sample completions (see report_samples) in samples.jsonl, and as tables in wandb."""
        if not self._samples:
            return
        try:
            samples = take()
            with (self._folder / SAMPLES).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        except Exception as error:
            self._samples = False
            self.say(f"note: no samples from here on ({type(error).__name__}: {error}); the run continues without them")
            return
        if self._wandb is not None and samples:
            self._wandb.put(lambda run: run.log(_sample_tables(samples), step=samples[-1]["step"]))

    def sync(self) -> None:
        """Have metrics and samples on the disk, so that no checkpoint is newer than they are after a crash."""
        try:
            os.fsync(self._file.fileno())
            with suppress(FileNotFoundError), (self._folder / SAMPLES).open("rb") as samples:
                os.fsync(samples.fileno())
        except OSError as error:
            self.problem = f"{self._file.name} cannot be written: {error.strerror}"

    def log_media(self, media: Callable[[], dict[str, Any]], step: int) -> None:
        """Give `media`'s result, made where wandb is imported, to wandb, if it takes part."""
        if self._wandb is not None:
            self._wandb.put(lambda run: run.log(media(), step=step))

    @property
    def takes_media(self) -> bool:
        """Whether `log_media` reaches anybody."""
        return self._wandb is not None

    def show(self, record: Mapping[str, Any], last: bool = False) -> None:
        """Show a training step on the console: as a live bar on a terminal, as a line now and then elsewhere."""
        parts = [f"loss {record['train/loss']:.3f}"]
        parts += [f"{name} {record[key]:.3f}" for name, key in _SHOWN if key in record]
        parts.append(f"{record['stats/tokens_per_second']:,.0f} tok/s")
        if self._live:
            self._bar.n = record["step"]
            with unbreakable(sys.stderr):
                self._bar.set_postfix_str(", ".join(parts))
        elif last or time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            with unbreakable(sys.stdout):
                print(f"step {record['step']:>6}/{self._max_steps}  " + "  ".join(parts), flush=True)

    def say(self, text: str) -> None:
        """A line that stays on the console."""
        with unbreakable(sys.stdout, sys.stderr):
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def preempting(self) -> None:
        """Tell wandb that the run is about to stop and come back, and hurry: the job's time may be nearly up."""
        self.hurry()
        if self._wandb is not None:
            self._wandb.put(lambda run: run.mark_preempting())

    def hurry(self, failed: bool = False) -> None:
        """Have `close` wait for no more than a moment. failed: wandb shall show the run so."""
        self._patience, self._code = _HURRIED_SECONDS, int(failed)

    def close(self) -> None:
        """Flush everything; a wandb server that does not answer is waited for, but not for ever, nor after a signal."""
        with unbreakable(sys.stderr):
            self._bar.close()
        try:
            self._file.close()
        except OSError as error:
            self.problem = self.problem or f"{self._file.name} cannot be written: {error.strerror}"
        if self._wandb is not None:
            code = self._code
            done = self._wandb.close(lambda run: run.finish(code), self._patience, self._signalled, _HURRIED_SECONDS)
            if not done:
                self.say("wandb does not finish its upload; `wandb sync` can complete it from the run folder")


_SHOWN = (
    *((name, f"train/{name}_loss") for name in OBJECTIVE_NAMES),
    ("lr", "stats/learning_rate"),
)


def wandb_mode(config: TrainingConfig) -> str:
    """`online`, `offline` or `disabled` for --wandb_mode. Raises ConfigError where wandb is asked for and missing."""
    installed = importlib.util.find_spec("wandb") is not None
    mode = config.wandb_mode
    if mode == "disabled" or (mode == "auto" and not installed):
        return "disabled"
    if not installed:
        raise ConfigError(
            f"--wandb_mode is {mode!r} but wandb is not installed: pip install wandb, or --wandb_mode disabled"
        )
    if mode == "auto":
        return "online" if _has_login() else "offline"
    return mode


def _has_login() -> bool:
    """Whether wandb would find credentials without asking for them."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start_wandb(
    config: TrainingConfig, folder: Path, run_id: str, facts: Mapping[str, Any], say: Callable[[str], None]
) -> Background | None:
    """wandb on a thread of its own, where it also starts: no step waits for it."""
    mode = wandb_mode(config)
    if mode == "disabled":
        return None
    print(
        f"  wandb         {'online' if mode == 'online' else f'offline; upload with: wandb sync {folder}/wandb/*run*'}"
    )
    return Background("wandb", lambda: _open_wandb(config, mode, folder, run_id, facts, say), say)


def _open_wandb(
    config: TrainingConfig,
    mode: str,
    folder: Path,
    run_id: str,
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> Any:
    import wandb
    from wandb.errors import Error as WandbError

    options: dict[str, Any] = {
        "project": config.wandb_project or DEFAULT_PROJECT,
        "entity": config.wandb_entity or None,
        "name": config.name,
        "id": run_id,  # the same after a resume: one run in the dashboard
        "resume": "allow",
        "dir": str(folder),
        "config": {**config.to_dict(), **facts},
    }
    quiet = wandb.Settings(silent=True)
    try:
        run = wandb.init(mode="online" if mode == "online" else "offline", settings=quiet, **options)
    except WandbError as error:
        say(f"note: wandb could not start ({error}); it logs offline, and `wandb sync` uploads that")
        run = wandb.init(mode="offline", settings=quiet, **options)
    _define_metrics(run)
    return run


_NOT_LOGGED = {f"train/{objective}_perplexity" for objective in OBJECTIVE_NAMES}
_FALLING, _RISING = "min,last", "max,last"  # the best and the last value go into wandb's summary


def _define_metrics(run: Any) -> None:
    """Say on which axis wandb draws each metric and which of its values it keeps in the table of runs.

    Results are drawn on tokens, which compare runs of different batch sizes; what describes a step on steps.
    """
    run.define_metric("step", summary="max")
    run.define_metric("*", step_metric="step")
    run.define_metric("stats/tokens", step_metric="step", summary="max")
    run.define_metric("stats/tokens_per_second", step_metric="step", summary="mean,last")
    run.define_metric("stats/mfu", step_metric="step", summary="mean,last")
    run.define_metric("stats/peak_memory_gib", step_metric="step", summary="max")
    groups = [f"{prefix}{objective}_" for prefix in ("train/", "valid/", "valid/ema_") for objective in OBJECTIVE_NAMES]
    for group in ("train/", *groups):
        for measure, summary in (("loss", _FALLING), ("perplexity", _FALLING), ("accuracy", _RISING)):
            if f"{group}{measure}" not in _NOT_LOGGED:
                run.define_metric(f"{group}{measure}", step_metric="stats/tokens", summary=summary)
    run.define_metric("train/z_loss", step_metric="stats/tokens", summary="last")
    run.define_metric("valid/*", step_metric="stats/tokens")  # those of longer rows
    run.define_metric("eval/*", step_metric="stats/tokens", summary=_RISING)


def _sample_tables(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples as wandb tables, by key."""
    import wandb

    continued = wandb.Table(columns=["step", "prompt", "continuation", "truth"])
    filled = wandb.Table(columns=["step", "text", "gap", "candidates", "truth"])
    for sample in samples:
        if sample["kind"] == "causal":
            continued.add_data(sample["step"], sample["prompt"], sample["text"], sample["truth"])
            continue
        for number, gap in enumerate(sample["gaps"], start=1):
            words = " / ".join(f"{word.strip()} {share:.1%}" for word, share in gap["candidates"])
            filled.add_data(sample["step"], sample["text"], number, words, gap["truth"])
    tables = {"samples/causal": continued, "samples/masked": filled}
    return {key: table for key, table in tables.items() if table.data}


def open_logger(
    folder: RunFolder, inputs: Inputs, world: World, step: int, status: StatusFile, signalled: Callable[[], bool]
) -> MetricLogger:
    """Begin to write into the run folder, on rank 0, from `step` on: config.json, status.json, metrics."""
    trim_metrics(folder, step)
    config, model = inputs.config, inputs.model_config
    launch = describe_launch(config, model, world, step)
    wandb_id = folder.write_config(config, inputs.as_json(), inputs.tokenizer_text, launch)
    about = {"model": model.to_dict(), "world_size": world.size, "data": inputs.data_identity}
    status.write(RUNNING, "", step)
    return MetricLogger(config, folder.path, wandb_id, step, about, signalled)
