"""What stands outside training, wandb and samples, can fail in any way without ending, delaying or changing a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines

import train_single_gpu
from training import background
from training.background import Background
from training.distributed import single_world


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("background") / "inputs")


def never() -> bool:
    return False


def always() -> bool:
    return True


def test_what_fails_is_said_once_and_dropped():
    said: list[str] = []
    calls: list[int] = []

    def fail(_place: object) -> None:
        raise ConnectionResetError("Connection lost")

    place = Background("wandb", lambda: "place", said.append)
    place.put(lambda given: calls.append(len(given)))
    place.put(fail)
    for _ in range(3):
        place.put(lambda _: calls.append(0))
    assert place.close(lambda _: calls.append(0), 60, never, 60)
    assert calls == [5]
    assert said == [
        "note: wandb failed (ConnectionResetError: Connection lost); the run continues without it, and metrics.jsonl "
        "has everything"
    ]


def test_what_hangs_is_not_waited_for(monkeypatch):
    """A start that does not return: nothing waits for it, and a queue that grows too long is given up."""
    monkeypatch.setattr(background, "_LONGEST_QUEUE", 5)
    said: list[str] = []
    hanging = threading.Event()
    place = Background("wandb", lambda: hanging.wait(60), said.append)
    began = time.monotonic()
    for _ in range(3):
        place.put(lambda _: None)
    assert not place.close(lambda _: None, 60, always, 0.2)
    assert not said
    for _ in range(3):
        place.put(lambda _: None)
    assert [note[:27] for note in said] == ["note: wandb does not keep u"]
    assert place.close(lambda _: None, 60, never, 60)
    assert time.monotonic() - began < 30
    hanging.set()


def test_all_calls_are_made_in_order_before_the_end():
    calls: list[int] = []
    place = Background("wandb", lambda: calls, lambda _: None)
    for number in range(100):
        place.put(lambda found, number=number: found.append(number))
    assert place.close(lambda found: found.append(-1), 60, never, 60)
    assert calls == [*range(100), -1]


@pytest.mark.slow
def test_samples_that_fail_leave_the_run_as_it_is(inputs, tmp_path, capsys, monkeypatch):
    options = {"max_steps": 6, "validate_every": 2, "save_every": 0, "validation_samples": 1}

    def broken(model: object, prompts: object) -> None:
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
from training import background, metric_logger
import train_single_gpu
from training.background import leave
from training.distributed import single_world

def wandb_processes():
    return [each for each in psutil.Process().children(recursive=True) if each.name().startswith("wandb")]

background._began, open_wandb = None, metric_logger._open_wandb
def opened(*arguments):
    background._began = open_wandb(*arguments)
    return background._began
metric_logger._open_wandb = opened

train_step = train_single_gpu.train_step
def step(state, *arguments):
    if state.step == 5:
        while background._began is None:  # wandb has started
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
