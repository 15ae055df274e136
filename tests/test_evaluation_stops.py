"""A stop request during validation, minimal pairs or samples ends these; the resume begins with what they lack."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from helpers.ranks import FAULTS, Run, run_ranks
from helpers.tiny_runs import flags, make_inputs, make_texts, training_lines

from evaluation.in_training import PLUGINS, STEP, VALIDATION, kind_of
from train_single_gpu import main
from training.checkpoint import locate
from training.distributed import World
from training.environment import Environment
from training.metric_logger import read_metrics
from training.stopping import Abandoned, until_stop

STEPS, EVERY = 6, 3
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("stops") / "inputs", documents=200)
    good = [" ".join(text.split()[:4]) for text in make_texts(8, seed=3)]
    pairs = [{"sentence_good": a, "sentence_bad": b} for a, b in zip(good, reversed(good), strict=True)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    plugin = "def evaluate(model, _):\n    return {'norm': float(next(model.parameters()).norm())}"
    (folder / "plugin.py").write_text(plugin)
    return folder


def arguments(inputs: Path, output: Path, name: str) -> list[str]:
    return flags(
        inputs, output, name, max_steps=STEPS, validate_every=EVERY, evaluate_every=EVERY, save_every=0,
        evaluate_data=inputs / "pairs.jsonl", validation_samples=2, length_milestones="",
        plugin=inputs / "plugin.py",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_report() -> Iterator[None]:
    with mock.patch("train_single_gpu.publish_report"):
        yield


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The run that nothing disturbed, on one rank."""
    output = tmp_path_factory.mktemp("whole")
    assert main(arguments(inputs, output, "run")) == 0
    return output / "run"


def evaluations(folder: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Metrics by step and kind of evaluation; each is logged once."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if kind_of(line) != STEP]
    found = {(line["step"], kind_of(line)): line for line in lines}
    assert len(found) == len(lines)
    return found


def assert_same_evaluations(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, metrics in expected.items():
        assert found[key] == pytest.approx(metrics, rel=1e-6)


def assert_same(folder: Path, whole: Path) -> None:
    expected, found = training_lines(whole), training_lines(folder)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["train/loss"] for line in found] == pytest.approx([line["train/loss"] for line in expected], rel=1e-6)
    assert_same_evaluations(evaluations(folder), evaluations(whole))
    assert locate(folder).step == STEPS


def sampled_steps(folder: Path) -> set[int]:
    path = folder / "samples.jsonl"
    return {line["step"] for line in read_metrics(path)} if path.exists() else set()


@pytest.mark.parametrize(
    ("fault", "step", "measured"),
    [
        ("signal_in_validation", EVERY, set()),
        ("signal_in_validation_of_average", EVERY, set()),
        ("signal_in_samples", EVERY, {VALIDATION}),
        ("signal_in_pairs", EVERY, {VALIDATION, PLUGINS}),
        ("signal_in_validation", STEPS, set()),
    ],
)
def test_stop_request_ends_evaluation_which_the_resume_repeats(
    inputs, whole, tmp_path, capsys, monkeypatch, fault, step, measured
):
    folder, command = tmp_path / "run", arguments(inputs, tmp_path, "run")
    if step == STEPS:  # nothing is due before the last step
        command = [*command, "--validate_every=0", "--evaluate_every=0"]
    with FAULTS[fault](0):
        assert main(command) == TERMINATED
    said = capsys.readouterr().out
    assert f"stopped by SIGTERM after step {step}" in said
    assert "no samples from here on" not in said
    assert locate(folder).step == step
    assert set(evaluations(folder)) == {(step, kind) for kind in measured}
    assert sampled_steps(folder) == ({step} if fault == "signal_in_pairs" else set())

    with FAULTS["signal_in_pairs"](0):  # while it measures that: the same again
        assert main(command) == TERMINATED
    assert locate(folder).step == step
    assert set(evaluations(folder)) == {(step, VALIDATION), (step, PLUGINS)}

    assert main(command) == 0
    if step == EVERY:
        assert_same(folder, whole)
    else:
        last = {key: value for key, value in evaluations(whole).items() if key[0] == STEPS}
        assert_same_evaluations(evaluations(folder), last)
        assert f"the model is in {locate(folder).path}" in capsys.readouterr().out
        assert main(command) == 0
        assert "nothing to do" in capsys.readouterr().out


def test_stop_request_of_one_rank_ends_evaluation_on_all(inputs, tmp_path):
    """Three starts that end in the evaluations of one step, then the rest of the run; beside one undisturbed."""
    command, faults = arguments(inputs, tmp_path, "run"), ("validation", "samples", "pairs")
    runs = [*(Run(command, fault=f"signal_in_{name}") for name in faults), Run(command)]
    *stopped, last, _whole = run_ranks([*runs, Run(arguments(inputs, tmp_path, "whole"))])
    for outcome in stopped:
        assert outcome[0].code == TERMINATED, (outcome[0].text, outcome[1].text)
        assert "evaluation ended by a stop request" in outcome[0].text
        assert f"stopped by SIGTERM after step {EVERY}" in outcome[0].text
        assert "no samples from here on" not in outcome[0].text
    assert [rank.code for rank in last] == [0, 0], [rank.text for rank in last]
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert sampled_steps(tmp_path / "run") == {STEPS}


def test_line_without_keys_of_the_suite_is_of_plugins():
    assert kind_of({"step": 1, "stats/tokens": 2}) == PLUGINS
    assert kind_of({"step": 1, "eval/probe": 0.5}) == PLUGINS
    assert kind_of({"step": 1, "train/loss": 2.0, "valid/mine": 0.5}) == STEP


def test_branch_does_not_measure_what_its_origin_did(inputs, whole, tmp_path):
    command = arguments(inputs, tmp_path, "branch")
    checkpoint = whole / "checkpoints" / f"step_{STEPS:08d}"
    assert main([*command, f"--resume={checkpoint}", "--max_steps=7", "--validate_every=6"]) == 0
    assert {step for step, _ in evaluations(tmp_path / "branch")} == {7}


# The agreement between ranks


class ThreadWorld(World):
    """A rank that is a thread; all_reduce adds up behind a barrier, which a rank that does not come breaks."""

    barrier = threading.Barrier(2, timeout=20)
    parts: ClassVar[list[torch.Tensor]] = []

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        self.parts.append(tensor)
        self.barrier.wait()
        total = torch.stack(self.parts[-2:]).sum(0)
        self.barrier.wait()
        return total


def taken_batches(counts: tuple[int, int], stop_after: int | None) -> list[tuple[int, bool]]:
    """By rank how many of its batches it got and whether it was told to stop; rank 0 asks for it in that round."""
    found = [(0, False)] * 2

    def work(rank: int) -> None:
        rounds = taken = 0
        ended = False

        def wanted() -> bool:
            nonlocal rounds
            rounds += 1
            return rank == 0 and stop_after is not None and rounds > stop_after

        world = ThreadWorld(rank, 2, torch.device("cpu"), Environment("none"))
        try:
            for _ in until_stop(range(counts[rank]), world, wanted):
                taken += 1
        except Abandoned:
            ended = True
        found[rank] = (taken, ended)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("counts", [(2, 5), (5, 2), (0, 3), (4, 4), (0, 0)])
def test_ranks_with_different_numbers_of_batches_agree(counts):
    assert taken_batches(counts, None) == [(count, False) for count in counts]
    for stop_after in range(max(counts) + 1):
        assert taken_batches(counts, stop_after) == [(min(count, stop_after), True) for count in counts]
