"""Sinks of metrics, samples and pictures: the run's own files and console; wandb, TensorBoard and others beside them.

metrics.jsonl is the one that matters: where it cannot be written, the run saves and stops. Sinks beside the run work on
threads of their own. Whatever happens there (an error, a dead process, a server that does not answer) must not end,
delay or change a run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

from tqdm import tqdm

from data.objectives import KNOWN_NAMES
from training.config import ConfigError, TrainingConfig
from training.run_dir import RunView

DEFAULT_PROJECT = "hybrid-pretraining"
_LONGEST_QUEUE = 10_000  # calls that may wait: some minutes of steps, some MiB
_POLL_SECONDS = 0.1
_LINE_SECONDS = 10.0  # between lines where the console is a file
_dropped: list[str] = []  # names of the sinks that were, in this process


class Sink(Protocol):
    """Takes what a run logs. Classes derived from it inherit methods that do nothing."""

    def metrics(self, record: dict[str, Any]) -> None:
        """Metrics of one step, by key; `record` has the key `step`."""

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """What the model writes and fills in, at a validation: the objects of samples.jsonl."""

    def media(self, files: Mapping[str, Path], step: int) -> None:
        """Pages and pictures of a run, by key."""

    def preempting(self) -> None:
        """The run is about to stop and to be resumed."""

    def close(self, failed: bool) -> None:
        """Flush everything: nothing more will come. failed: the run has ended with an error."""


# The run's own


class JsonLines(Sink):
    """metrics.jsonl and samples.jsonl in the run folder. problem: a sentence once metrics could not be written; the
    training loop then saves and stops."""

    def __init__(self, folder: RunView):
        self.problem: str | None = None
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._samples = folder.samples

    def metrics(self, record: dict[str, Any]) -> None:
        """Append a line. Values that are NaN or infinite become null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self._noted():
            self._file.write(json.dumps(clean) + "\n")
            self._file.flush()

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append lines. Raises OSError: samples are expendable."""
        with self._samples.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)

    def sync(self) -> None:
        """Have both on the disk, so that no checkpoint is newer than they are after a crash."""
        with self._noted():
            os.fsync(self._file.fileno())
            with suppress(FileNotFoundError), self._samples.open("rb") as samples:
                os.fsync(samples.fileno())

    def close(self, failed: bool) -> None:
        with self._noted():
            self._file.close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{self._file.name} cannot be written: {error.strerror}"


@contextmanager
def unbreakable(*streams: TextIO) -> Iterator[None]:
    """Printing inside is no reason to end: a console that is gone (a closed terminal, say) is silent from here on."""
    try:
        yield
    except (OSError, ValueError):
        for stream in streams:
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


_SHOWN = (*((name, f"train/{name}_loss") for name in KNOWN_NAMES), ("lr", "stats/learning_rate"))


class Console(Sink):
    """Training steps on the console: as a live bar on a terminal, as a line now and then elsewhere."""

    def __init__(self, max_steps: int, start_step: int):
        self._live, self._max_steps = sys.stderr.isatty(), max_steps
        self._bar = tqdm(total=max_steps, initial=start_step, unit="step", disable=not self._live, dynamic_ncols=True)
        self._line, self._shown_at = "", 0.0  # the newest line, "" once it is shown

    def metrics(self, record: dict[str, Any]) -> None:
        """Show a training step, if it is time for one."""
        if "train/loss" not in record:
            return
        parts = [f"loss {record['train/loss']:.3f}"]
        parts += [f"{name} {record[key]:.3f}" for name, key in _SHOWN if key in record]
        parts.append(f"{record['stats/tokens_per_second']:,.0f} tok/s")
        self._line = f"step {record['step']:>6}/{self._max_steps}  " + "  ".join(parts)
        if self._live:
            self._bar.n = record["step"]
            with unbreakable(sys.stderr):
                self._bar.set_postfix_str(", ".join(parts))
        elif time.monotonic() - self._shown_at >= _LINE_SECONDS:
            self.show_line()

    def show_line(self) -> None:
        """Have the newest step shown: something else is to be printed."""
        if self._line and not self._live:
            self._shown_at = time.monotonic()
            with unbreakable(sys.stdout):
                print(self._line, flush=True)
        self._line = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        with unbreakable(sys.stdout, sys.stderr):
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self, failed: bool) -> None:
        with unbreakable(sys.stderr):
            self._bar.close()


# Beside the run


class BackgroundSink:
    """A sink on a thread of its own, where it is also opened: nobody waits for it until `join`. The first call that
    fails, or a queue that has become too long, is reported by `say` and drops the sink."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], say: Callable[[str], object], remedy: str = ""):
        """remedy: what to do where it does not finish in time."""
        self._name, self._say, self._remedy = name, say, remedy
        self._calls: queue.Queue[Callable[[Sink], object] | None] = queue.Queue(_LONGEST_QUEUE)
        self._dropped = False
        self._thread = threading.Thread(target=self._work, args=(open_sink,), name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Sink], object] | None) -> None:
        """Have `call` made with the sink, after all others; returns at once. None: no more will come."""
        if self._dropped:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop("does not keep up")

    def close(self, failed: bool) -> None:
        """Have the sink closed after all other calls; returns at once."""
        self.put(lambda sink: sink.close(failed))
        self.put(None)

    def join(self, deadline: Callable[[], float]) -> None:
        """Wait until it is closed, but not beyond `deadline()`, in the seconds of time.monotonic(), asked again now and
        then."""
        while self._thread.is_alive() and not self._dropped:
            self._thread.join(_POLL_SECONDS)
            if self._thread.is_alive() and not self._dropped and time.monotonic() > deadline():
                self._say(f"note: {self._name} does not finish{self._remedy and '; '}{self._remedy}")
                return

    def _work(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while (call := self._calls.get()) is not None and not self._dropped:
                call(sink)
        except BaseException as error:  # SystemExit included, which wandb has been seen to raise
            self._drop(f"failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")

    def _drop(self, why: str) -> None:
        if not self._dropped:
            self._dropped = True
            _dropped.append(self._name)
            self._say(f"note: {self._name} {why}; the run continues without it, and metrics.jsonl has everything")


def leave(code: int) -> NoReturn:
    """End this process; at once where a sink was dropped, whose own clean-up at exit might wait for ever."""
    if _dropped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def check_sinks(config: TrainingConfig) -> None:
    """Refuse a sink whose package is missing. Raises ConfigError."""
    wandb_mode(config)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard is given but tensorboard is not installed: pip install tensorboard")


def open_sinks(
    config: TrainingConfig,
    folder: Path,
    wandb_id: str,
    start_step: int,
    about: Mapping[str, Any],
    say: Callable[[str], None],
    signalled: Callable[[], bool],
) -> list[BackgroundSink]:
    """The sinks that the flags ask for beside the run's own. about: what wandb shows of the run besides its flags.
    signalled: whether somebody wants the run to end soon."""
    sinks, mode = [], wandb_mode(config)
    if mode != "disabled":
        upload = f"wandb sync {folder}/wandb/*run*"
        print(f"  wandb         {'online' if mode == 'online' else f'offline; upload with: {upload}'}")
        remedy = "`wandb sync` can complete its upload from the run folder"

        def open_wandb() -> Wandb:
            return Wandb(config, mode, folder, wandb_id, about, say, signalled)

        sinks.append(BackgroundSink("wandb", open_wandb, say, remedy))
    if config.tensorboard:
        print(f"  tensorboard   look at it with: tensorboard --logdir {folder}/tensorboard")
        sinks.append(BackgroundSink("tensorboard", lambda: TensorBoard(folder, start_step), say))
    return sinks


class TensorBoard(Sink):
    """Event files in the run folder: scalars by the keys of metrics.jsonl, samples as text."""

    def __init__(self, folder: Path, start_step: int):
        from torch.utils.tensorboard.writer import SummaryWriter

        # What an earlier start wrote beyond the step that it is resumed from is not shown.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def metrics(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, record["step"])

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        for key, (columns, rows) in sample_tables(samples).items():
            cells = [columns, ["---"] * len(columns), *rows]
            text = "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in row) + " |" for row in cells)
            self._writer.add_text(key, text, samples[-1]["step"])

    def close(self, failed: bool) -> None:
        self._writer.close()


def _markdown_cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def sample_tables(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Columns and rows of the samples, by key; only of kinds that there are."""
    continued: list[Any] = []
    filled: list[Any] = []
    for sample in samples:
        if sample["kind"] == "causal":
            continued.append([sample["step"], sample["prompt"], sample["text"], sample["truth"]])
            continue
        for number, gap in enumerate(sample["gaps"], start=1):
            words = " / ".join(f"{word.strip()} {fraction:.1%}" for word, fraction in gap["candidates"])
            filled.append([sample["step"], sample["text"], number, words, gap["truth"]])
    tables = {
        "samples/causal": (["step", "prompt", "continuation", "truth"], continued),
        "samples/masked": (["step", "text", "gap", "candidates", "truth"], filled),
    }
    return {key: table for key, table in tables.items() if table[1]}


# wandb


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


class Wandb(Sink):
    """A run of Weights & Biases; the same one after a resume."""

    def __init__(
        self,
        config: TrainingConfig,
        mode: str,
        folder: Path,
        run_id: str,
        about: Mapping[str, Any],
        say: Callable[[str], None],
        signalled: Callable[[], bool],
    ):
        import wandb
        from wandb.errors import Error as WandbError

        options: dict[str, Any] = {
            "project": config.wandb_project or DEFAULT_PROJECT,
            "entity": config.wandb_entity or None,
            "name": config.name,
            "id": run_id,  # the same after a resume: one run in the dashboard
            "resume": "allow",
            "dir": str(folder),
            "config": {**config.to_dict(), **about},
        }
        quiet = wandb.Settings(silent=True)
        try:
            self.run = wandb.init(mode="online" if mode == "online" else "offline", settings=quiet, **options)
        except WandbError as error:
            if signalled():  # a job's signals reach wandb's service as well; no time is left for another
                raise
            say(f"note: wandb could not start ({error}); it logs offline, and `wandb sync` uploads that")
            self.run = wandb.init(mode="offline", settings=quiet, **options)
        _define_metrics(self.run)

    def metrics(self, record: dict[str, Any]) -> None:
        self.run.log({k: v for k, v in record.items() if not isinstance(v, str)}, step=record["step"])

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        tables = {
            key: wandb.Table(columns=columns, data=rows) for key, (columns, rows) in sample_tables(samples).items()
        }
        self.run.log(tables, step=samples[-1]["step"])

    def media(self, files: Mapping[str, Path], step: int) -> None:
        import wandb

        pages = {key: wandb.Html(str(file), inject=False) for key, file in files.items() if file.suffix == ".html"}
        pictures = {key: wandb.Image(str(file)) for key, file in files.items() if file.suffix == ".png"}
        self.run.log({**pages, **pictures}, step=step)

    def preempting(self) -> None:
        self.run.mark_preempting()

    def close(self, failed: bool) -> None:
        self.run.finish(int(failed))


_NOT_LOGGED = {f"train/{objective}_perplexity" for objective in KNOWN_NAMES}
_FALLING, _RISING = "min,last", "max,last"  # the best and the last value go into wandb's summary


def _define_metrics(run: Any) -> None:
    """Say on which axis wandb draws each metric and which of its values it keeps in the table of runs. Results are
    drawn on tokens, which compare runs of different batch sizes; what describes a step on steps."""
    run.define_metric("step", summary="max")
    run.define_metric("*", step_metric="step")
    run.define_metric("stats/tokens", step_metric="step", summary="max")
    run.define_metric("stats/tokens_per_second", step_metric="step", summary="mean,last")
    run.define_metric("stats/mfu", step_metric="step", summary="mean,last")
    run.define_metric("stats/peak_memory_gib", step_metric="step", summary="max")
    groups = [f"{prefix}{objective}_" for prefix in ("train/", "valid/", "valid/ema_") for objective in KNOWN_NAMES]
    for group in ("train/", *groups):
        for measure, summary in (("loss", _FALLING), ("perplexity", _FALLING), ("accuracy", _RISING)):
            if f"{group}{measure}" not in _NOT_LOGGED:
                run.define_metric(f"{group}{measure}", step_metric="stats/tokens", summary=summary)
    run.define_metric("train/z_loss", step_metric="stats/tokens", summary="last")
    run.define_metric("valid/*", step_metric="stats/tokens")  # those of longer rows
    run.define_metric("eval/*", step_metric="stats/tokens", summary=_RISING)
