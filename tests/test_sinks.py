"""Sinks of metrics: whatever is beside the run can fail in any way without ending, delaying or changing it."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs, refusal, run, training_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_single_gpu
from training import metric_logger, sinks
from training.distributed import single_world
from training.metric_logger import MetricLogger, read_metrics
from training.run_dir import RunView
from training.sinks import BackgroundSink, Console, JsonLines, Sink, TensorBoard


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("sinks") / "inputs")


class Remembering(Sink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def metrics(self, record: dict[str, Any]) -> None:
        self.calls.append(record["step"])

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append(list(samples))

    def media(self, files: Mapping[str, Path], step: int) -> None:
        self.calls.append(dict(files))

    def preempting(self) -> None:
        self.calls.append("preempting")

    def close(self, failed: bool) -> None:
        self.calls.append("failed" if failed else "closed")


METHODS = ("metrics", "samples", "media", "preempting", "close")
ALL_CALLS = [1, [{"step": 1, "kind": "causal"}], {"report": Path("report.html")}, "preempting", "closed"]


def failing(method: str) -> Remembering:
    """A sink whose `method` raises."""
    sink = Remembering()

    def fail(*_: object) -> None:
        raise ConnectionResetError(f"{method}:\nConnection lost")

    setattr(sink, method, fail)
    return sink


def in_background(sink: Sink, name: str = "Elsewhere") -> BackgroundSink:
    return BackgroundSink(name, lambda: sink, print)


@pytest.fixture
def make_logger(tmp_path, monkeypatch):
    """A logger of a run folder with these sinks, whose threads shall finish within a moment."""
    monkeypatch.setattr(metric_logger, "_PATIENT_SECONDS", 60.0)
    monkeypatch.setattr(metric_logger, "_HURRIED_SECONDS", 0.2)

    def make(*sinks: BackgroundSink, signalled: bool = False) -> MetricLogger:
        return MetricLogger(JsonLines(RunView(tmp_path)), Console(10, 0), sinks, signalled=lambda: signalled)

    return make


def use(log: MetricLogger) -> None:
    """Everything that a run does with its logger."""
    log.log({"step": 1, "valid/x": 1.0, "valid/bad": math.nan})
    log.log_samples(lambda: [{"step": 1, "kind": "causal"}])
    log.log_media({"report": Path("report.html")}, 1)
    log.preempting()
    log.sync()
    log._patience = 60.0
    log.close()


@pytest.mark.parametrize("method", METHODS)
def test_sink_that_fails_is_dropped_and_all_others_get_everything(method, make_logger, tmp_path, capsys):
    sinks = [Remembering(), failing(method), Remembering()]
    log = make_logger(*map(in_background, sinks))
    use(log)
    assert [sink.calls for sink in sinks[::2]] == [ALL_CALLS, ALL_CALLS]
    assert sinks[1].calls == ALL_CALLS[: METHODS.index(method)]
    note = (
        f"note: Elsewhere failed (ConnectionResetError: {method}: Connection lost); the run continues without it, and "
    )
    assert capsys.readouterr().out == f"{note}metrics.jsonl has everything\n"
    assert log.problem is None
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "valid/x": 1.0, "valid/bad": None}]
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "kind": "causal"}\n'


def test_sink_that_cannot_be_opened_is_dropped(make_logger, capsys):
    def refuse() -> Sink:
        raise SystemExit(3)

    use(make_logger(BackgroundSink("Elsewhere", refuse, print)))
    assert capsys.readouterr().out.count("note: Elsewhere failed (SystemExit: 3)") == 1


def test_sink_that_hangs_is_not_waited_for(make_logger, monkeypatch, capsys):
    """An opening that does not return: nothing waits for it, and a queue that grows too long is given up."""
    monkeypatch.setattr(sinks, "_LONGEST_QUEUE", 5)
    hanging, rest = threading.Event(), Remembering()

    def hang() -> Sink:
        hanging.wait(60)
        return rest

    slow = BackgroundSink("Elsewhere", hang, print, "try later")
    log = make_logger(slow, signalled=True)
    began = time.monotonic()
    log.log({"step": 1})
    log.close()
    assert capsys.readouterr().out == "note: Elsewhere does not finish; try later\n"
    for step in range(2, 6):
        slow.put(lambda sink, step=step: sink.metrics({"step": step}))
    assert capsys.readouterr().out.startswith("note: Elsewhere does not keep up; the run continues without it")
    assert time.monotonic() - began < 30
    hanging.set()
    slow._thread.join(60)
    assert rest.calls == []


def test_metrics_that_cannot_be_written_are_a_problem_and_samples_are_not(make_logger, tmp_path, capsys):
    log = make_logger()
    (tmp_path / "samples.jsonl").mkdir()
    log.log_samples(lambda: [{"step": 1}])
    log.log_samples(lambda: [{"step": 2}])
    assert capsys.readouterr().out.count("note: no samples from here on (IsADirectoryError") == 1
    assert log.problem is None
    log._files._file.close()
    log._files._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - the logger closes it
    log.log({"step": 1})
    assert log.problem == "/dev/full cannot be written: No space left on device"
    log.close()


def test_logger_of_other_ranks_does_nothing(capsys):
    log = MetricLogger()
    log.log_steps([{"step": 1}], last=True)
    log.log_samples(lambda: pytest.fail("sampled"))
    use(log)
    log.say("x")
    assert capsys.readouterr() == ("", "")
    assert not log.takes_media


def test_console_shows_a_line_now_and_then_and_before_other_lines(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    console = Console(10, 0)
    for step, seconds in ((1, 0), (2, 9), (3, 9), (4, 1)):
        now[0] += seconds
        console.metrics({"step": step, "train/loss": 2.0, "stats/tokens_per_second": 1000.0})
    console.metrics({"step": 4, "valid/loss": 1.0})
    console.show_line()
    console.show_line()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["1", "3", "4"]
    assert lines[0] == "step      1/10  loss 2.000  1,000 tok/s"


# TensorBoard


def test_tensorboard_holds_scalars_and_samples_and_a_resume_drops_what_comes_again(tmp_path):
    gaps = [{"candidates": [["a|b", 0.5], [" c", 0.25]], "truth": "c"}]
    told = [{"step": 2, "kind": "causal", "prompt": "p", "text": "one\ntwo", "truth": "t"}]
    told.append({"step": 2, "kind": "masked", "text": "x <mask>", "gaps": gaps})
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        sink = TensorBoard(tmp_path, start)
        for step in steps:
            sink.metrics({"step": step, "train/loss": float(step), "data/fingerprint": "ab", "none": None})
        if start == 0:
            sink.samples(told)
        sink.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(n, n) for n in (1, 2, 3, 4)]
    (causal,) = events.Tensors("samples/causal/text_summary")
    (masked,) = events.Tensors("samples/masked/text_summary")
    assert causal.tensor_proto.string_val[0].decode().splitlines()[-1] == "| 2 | p | one two | t |"
    assert masked.tensor_proto.string_val[0].decode().endswith("| 2 | x <mask> | 1 | a\\|b 50.0% / c 25.0% | c |")


def test_missing_tensorboard_is_one_sentence_before_any_work(inputs, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else found(name))
    assert "pip install tensorboard" in refusal(
        capsys, train_single_gpu.main, flags(inputs, tmp_path, tensorboard=True), single_world
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_samples_that_fail_leave_the_run_as_it_is(inputs, tmp_path, capsys, monkeypatch):
    options = {"max_steps": 6, "validate_every": 2, "save_every": 0, "validation_samples": 1}

    def broken(*_arguments: object) -> None:
        raise RuntimeError("no words")

    assert train_single_gpu.main(flags(inputs, tmp_path, "whole", **options), single_world) == 0
    monkeypatch.setattr("evaluation.samples.continue_prompts", broken)
    assert train_single_gpu.main(flags(inputs, tmp_path, "broken", **options), single_world) == 0
    note = "note: no samples from here on (RuntimeError: no words); the run continues without them"
    assert capsys.readouterr().out.count(note) == 1
    whole, broken_run = (training_lines(tmp_path / name) for name in ("whole", "broken"))
    assert [line["train/loss"] for line in whole] == [line["train/loss"] for line in broken_run]


_KILLS_WANDB = """
import os, sys, time
sys.path.insert(0, {root!r})
import psutil
from training.preemption import early_signals
signals = early_signals()
from training import sinks
import train_single_gpu
from training.distributed import single_world
from training.sinks import leave

def wandb_processes():
    return [each for each in psutil.Process().children(recursive=True) if each.name().startswith("wandb")]

began, Wandb = [], sinks.Wandb
def opened(*arguments):
    began.append(Wandb(*arguments))
    return began[0]
sinks.Wandb = opened

train_step = train_single_gpu.train_step
def step(state, *arguments):
    if state.step == 5:
        while not began:  # wandb has started
            time.sleep(0.01)
        for each in wandb_processes():
            each.kill()
    return train_step(state, *arguments)
train_single_gpu.train_step = step
leave(train_single_gpu.main(sys.argv[1:], single_world, signals))
"""


@pytest.mark.slow
def test_a_dead_wandb_ends_no_run(inputs, tmp_path):
    """Its process is killed at step 5."""
    script = tmp_path / "train.py"
    script.write_text(_KILLS_WANDB.format(root=str(ROOT)))
    done = run(flags(inputs, tmp_path, wandb_mode="offline", max_steps=10, validate_every=0), script=script)
    assert "done: 10 steps" in done.stdout
    assert done.stdout.count("note: wandb failed (") == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert len(training_lines(tmp_path / "run")) == 10
