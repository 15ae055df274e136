"""Metrics of a run: what metrics.jsonl holds, and the logger that gives rank 0's to the sinks (training/sinks.py)."""

from __future__ import annotations

import resource
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

from data.atomic_io import json_lines, write_atomically
from training.distributed import World
from training.inputs import Inputs
from training.plugins import Plugins
from training.run_dir import RunFolder, RunView
from training.sinks import BackgroundSink, Console, JsonLines, Sink, open_sinks
from training.status import RUNNING, StatusFile
from training.summary import describe_launch

_PATIENT_SECONDS, _HURRIED_SECONDS = 600.0, 10.0  # for what sinks still have to do at the end, such as uploads


def _has_step(record: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return record is not None and isinstance(record.get("step"), int)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl (or samples.jsonl); damaged lines, such as a cut-off last one, are left out."""
    return [record for _line, record in json_lines(path) if _has_step(record)]


def keep_until(path: Path, step: int) -> int:
    """Drop what a metrics.jsonl (or samples.jsonl) holds beyond `step`, so that a resumed run repeats no step. Damaged
    lines go too; returns how many there were."""
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


class MetricLogger:
    """Gives metrics, samples and pictures to a run's files and console, and to sinks beside the run, which may fail.
    Without files and console, as on ranks other than 0, nothing happens."""

    def __init__(
        self,
        files: JsonLines | None = None,
        console: Console | None = None,
        sinks: Sequence[BackgroundSink] = (),
        plugins: Plugins | None = None,
        signalled: Callable[[], bool] = lambda: False,
    ):
        """plugins: may add metrics to those of steps. signalled: whether somebody wants the run to end soon."""
        self._files, self._console, self._sinks = files, console, list(sinks)
        self._plugins, self._signalled, self._takes_samples = plugins, signalled, True
        self._patience, self._failed = _PATIENT_SECONDS, False

    @property
    def problem(self) -> str | None:
        """A sentence once metrics.jsonl could not be written; the training loop then saves and stops."""
        return self._files.problem if self._files is not None else None

    @property
    def takes_media(self) -> bool:
        """Whether `log_media` reaches anybody."""
        return bool(self._sinks)

    def log_steps(self, entries: list[dict[str, Any]], last: bool = False) -> None:
        """Metrics of training steps; `last` before something else is printed."""
        for entry in entries:
            self.log(entry if self._plugins is None else self._plugins.with_step_metrics(entry, self.say))
            if last and self._console is not None:
                self._console.show_line()

    def log(self, record: dict[str, Any]) -> None:
        """Metrics of one step; `record` has the key `step`."""
        if self._files is None or self._console is None:
            return
        self._files.metrics(record)
        self._console.metrics(record)
        self._put(lambda sink: sink.metrics(dict(record)))

    def log_samples(self, take: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """What the model writes, as evaluation/samples.py gives it; the first failure to take it is the last."""
        if self._files is None or not self._takes_samples:
            return
        try:
            samples = take()
            self._files.samples(samples)
        except Exception as error:
            self._takes_samples = False
            self.say(f"note: no samples from here on ({type(error).__name__}: {error}); the run continues without them")
            return
        if samples:
            self._put(lambda sink: sink.samples(samples))

    def log_media(self, files: Mapping[str, Path], step: int) -> None:
        """Pages and pictures of the run, by key, to sinks beside it."""
        self._put(lambda sink: sink.media(files, step))

    def say(self, text: str) -> None:
        """A line that stays on the console."""
        if self._console is not None:
            self._console.say(text)

    def sync(self) -> None:
        """Have metrics and samples on the disk, so that no checkpoint is newer than they are after a crash."""
        if self._files is not None:
            self._files.sync()

    def preempting(self) -> None:
        """The run is about to stop and to be resumed; hurry: the job's time may be nearly up."""
        self.hurry()
        self._put(lambda sink: sink.preempting())

    def hurry(self, failed: bool = False) -> None:
        """Have `close` wait for no more than a moment. failed: the run ends with an error."""
        self._patience, self._failed = _HURRIED_SECONDS, failed

    def close(self) -> None:
        """Flush everything; a server that does not answer is waited for, but not for ever, nor after a signal."""
        if self._files is None or self._console is None:
            return
        self._console.close(self._failed)
        self._files.close(self._failed)
        began = time.monotonic()
        for sink in self._sinks:  # all of them finish at the same time
            sink.close(self._failed)
        for sink in self._sinks:
            sink.join(lambda: began + (_HURRIED_SECONDS if self._signalled() else self._patience))

    def _put(self, call: Callable[[Sink], object]) -> None:
        for sink in self._sinks:
            sink.put(call)


class RankStatistics:
    """How long each rank computes and waits, and its memory; least, median and largest of all ranks, and who is slow.

    A step is as slow as its slowest rank, for which the others wait in the sums of gradients; computing is what a rank
    does before. Values are means over the steps since the last gathering, which nobody waits for: it goes through gloo
    beside the next step.
    """

    def __init__(self, world: World) -> None:
        """To be called by all ranks of several."""
        self._world = world
        self._hosts = world.all_gather_objects(socket.gethostname(), "host names")
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._steps = 0
        self._finish: Callable[[], torch.Tensor] | None = None

    def add(self, computing: float, seconds: float, record: Mapping[str, Any]) -> None:
        """A step of so many seconds, of which this rank spent some on its own passes; `record` has its metrics."""
        waiting = record.get("stats/loader_wait_seconds", 0.0)
        self._sums += torch.tensor([computing, max(0.0, seconds - computing), waiting], dtype=torch.float64)
        self._steps += 1

    def begin_gathering(self) -> None:
        """Begin to tell each other; on all ranks after the same step."""
        device = self._world.device
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = torch.cat((self._sums / max(1, self._steps), torch.tensor([memory / 2**30], dtype=torch.float64)))
        self._finish = self._world.begin_all_gather(row, "times of ranks")
        self._sums.zero_()
        self._steps = 0

    def gathered(self) -> dict[str, Any]:
        """Metrics of all ranks, once after each gathering."""
        if self._finish is None:
            return {}
        columns = self._finish().t()
        self._finish = None
        found: dict[str, Any] = {}
        for name, column in zip(
            ("compute_seconds", "wait_seconds", "loader_seconds", "memory_gib"), columns, strict=True
        ):
            ordered = column.sort().values.tolist()
            found[f"ranks/{name}_min"], found[f"ranks/{name}_max"] = ordered[0], ordered[-1]
            found[f"ranks/{name}_median"] = statistics.median(ordered)
        slowest = int(columns[0].argmax())
        return found | {"ranks/slowest": slowest, "ranks/slowest_host": self._hosts[slowest]}


class Profiler:
    """--profile: traces of some steps, of every rank, and the history of its memory on CUDA; what fails is only said.

    Look at traces with https://ui.perfetto.dev or chrome://tracing, at memory with https://docs.pytorch.org/memory_viz.
    """

    def __init__(self, steps: str, folder: Path, world: World, say: Callable[[str], None]) -> None:
        """steps: "FIRST:LAST", "" for none. folder: of the run. say: prints, on rank 0."""
        self._first, self._last = map(int, steps.split(":")) if steps else (0, 0)
        self._folder, self._world, self._say = folder / "profile", world, say
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """A step is about to be done; the first is 1."""
        if step != self._first:
            return
        from torch.profiler import profile

        try:
            self._profile = profile(record_shapes=True, with_stack=True)  # of all activities that there are
            if self._world.device.type == "cuda":
                torch.cuda.memory._record_memory_history()
            self._profile.start()
        except RuntimeError as error:
            self._profile = None
            self._say(f"note: --profile: nothing is recorded: {error}")

    def end(self, step: int) -> None:
        """A step has been done, as far as the host knows."""
        if self._profile is None or step != self._last:
            return
        name = f"steps_{self._first}_to_{step}_rank_{self._world.rank}"
        try:
            on_cuda = self._world.device.type == "cuda"
            if on_cuda:
                torch.cuda.synchronize(self._world.device)
            self._profile.stop()
            self._folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if on_cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}_memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            self._say(f"step {step:>6}  profiled: {self._folder}/{name}.json.gz")
        except (OSError, RuntimeError) as error:
            self._say(f"note: --profile: {self._folder} has no trace of rank {self._world.rank}: {error}")
        self._profile = None


def open_logger(
    folder: RunFolder,
    inputs: Inputs,
    world: World,
    step: int,
    status: StatusFile,
    signalled: Callable[[], bool],
    plugins: Plugins,
) -> MetricLogger:
    """Begin to write into the run folder, on rank 0, from `step` on: config.json, status.json, metrics."""
    trim_metrics(folder, step)
    config, model = inputs.config, inputs.model_config
    launch = describe_launch(config, model, world, step)
    wandb_id = folder.write_config(config, inputs.as_json(), inputs.tokenizer_text, launch)
    about = {"model": model.to_dict(), "world_size": world.size, "data": inputs.data_identity}
    status.write(RUNNING, "", step)
    files, console = JsonLines(folder), Console(config.max_steps, step)
    sinks = open_sinks(config, folder.path, wandb_id, step, about, console.say, signalled)
    sinks += plugins.open_sinks(folder.path, config, console.say)
    return MetricLogger(files, console, sinks, plugins, signalled)
