"""Two ranks at work: --spike_policy, alike on any number of ranks and after a resume; times of ranks; --profile."""

from __future__ import annotations

import gzip
import json
import math
import socket
from pathlib import Path

import pytest
import torch
from helpers.ranks import FAULTS, Run, run_ranks
from helpers.tiny_runs import flags, make_inputs, training_lines

import train_single_gpu
from training import errors
from training.checkpoint import locate
from training.distributed import single_world
from training.loss import SpikeGuard

STEPS = 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("spikes") / "inputs", documents=100)


def arguments(inputs: Path, output: Path, policy: str, name: str = "run", **options) -> list[str]:
    short = {"max_steps": STEPS, "save_every": 6, "validate_every": 0, "length_milestones": "", "batch_reduction": 1}
    return flags(inputs, output, name, **short, spike_policy=policy, **options)


def train(
    inputs: Path, output: Path, policy: str, monkeypatch, at: str, crash: int = 0, **options
) -> tuple[int, list[float]]:
    """Exit code, and a sum over all weights after each step. crash: the step after which the run dies."""
    original, sums = train_single_gpu.answer_spike, []

    def answer(state, *rest) -> None:
        original(state, *rest)
        sums.append(sum(float(parameter.detach().double().abs().sum()) for parameter in state.model.parameters()))
        if state.step == crash:
            raise RuntimeError("a crash")

    monkeypatch.setenv("SPIKES", at)
    with monkeypatch.context() as context, FAULTS["spikes"](0):
        context.setattr(train_single_gpu, "answer_spike", answer)
        return train_single_gpu.main(arguments(inputs, output, policy, **options), single_world), sums


@pytest.fixture(scope="module")
def on_two_ranks(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("two")
    runs = [
        Run(
            arguments(inputs, output, p, p, sharding=s, log_stats_every=10, profile="3:4"),
            (),
            {"SPIKES": "14,22"},
            "spikes",
        )
        for p, s in (("skip", "none"), ("rollback", "full"))
    ]
    for outcome in run_ranks(runs):
        assert [rank.code for rank in outcome] == [0, 0], outcome[0].text
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "as_before", "words"),
    [
        ("skip", 13, "its update is left out"),
        ("rollback", 12, "the run returns to the state of step_00000012 and goes on with the data after the spike"),
    ],
)
def test_spikes_leave_no_trace_after_a_crash_and_on_two_ranks(
    inputs, on_two_ranks, tmp_path, monkeypatch, capsys, policy, as_before, words
):
    code, sums = train(inputs, tmp_path, policy, monkeypatch, "14,22", name=policy)
    said = capsys.readouterr().out
    assert code == 0
    assert "note: step 14: the gradient norm is " in said
    assert words in said
    assert sums[13] == sums[as_before - 1] != sums[14]
    lines = training_lines(tmp_path / policy)
    assert [line["stats/spikes"] for line in lines] == [(n >= 14) + (n >= 22) for n in range(1, STEPS + 1)]
    assert lines[-1]["stats/rollbacks"] == (2 if policy == "rollback" else 0)

    for crash in (16, 20, 0):  # before and after the save that knows of the first spike
        assert train(inputs, tmp_path / "cut", policy, monkeypatch, "14,22", crash, name=policy)[0] == (crash > 0)
    assert training_lines(tmp_path / "cut" / policy)[-1]["stats/spikes"] == 2
    for part in ("model", "ema", "optimizer"):
        expected = locate(tmp_path / policy).tensors(part)
        torch.testing.assert_close(locate(tmp_path / "cut" / policy).tensors(part), expected, rtol=0, atol=0)
    for one, other in zip(lines, training_lines(on_two_ranks / policy), strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4), one["step"]
        assert other["stats/rollbacks"] == one["stats/rollbacks"]


@pytest.mark.slow
def test_the_slowest_rank_is_named(on_two_ranks):
    lines = training_lines(on_two_ranks / "skip")
    (found, later) = (line for line in lines if "ranks/slowest" in line)
    assert (found["step"], later["step"]) == (11, 21)  # a step after the gathering, for which no step waits
    assert found["ranks/slowest"] == 1
    assert found["ranks/slowest_host"] == socket.gethostname()
    assert found["ranks/compute_seconds_max"] > 0.15
    for name in ("compute_seconds", "wait_seconds", "loader_seconds", "memory_gib"):
        least, middle, most = (found[f"ranks/{name}_{which}"] for which in ("min", "median", "max"))
        assert 0 <= least <= middle <= most
        assert middle == pytest.approx((least + most) / 2)
    assert 0.05 < found["ranks/memory_gib_min"] < 10


@pytest.mark.slow
def test_each_rank_leaves_a_trace_of_the_profiled_steps(on_two_ranks):
    for rank in range(2):
        [trace] = (on_two_ranks / "skip" / "profile").glob(f"steps_3_to_4_rank_{rank}.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "gloo:all_reduce" for event in events) >= 2
        assert any(event.get("name") == "aten::mm" for event in events)


def test_what_returns_do_not_help_against_ends_the_run(inputs, tmp_path, monkeypatch, capsys):
    code, _ = train(inputs, tmp_path, "rollback", monkeypatch, "4,14,15,16,17")
    said = capsys.readouterr()
    assert code == errors.NOT_FINITE.code
    assert "step 17: the gradient norm is" in said.err
    assert "step_00000012 as help" in said.err
    assert said.out.count("returns to the state of step_00000012") == 3


def test_judge(monkeypatch):
    monkeypatch.setattr("training.loss._FEWEST", 10)
    guard = SpikeGuard(8.0)
    usual = [3.0 + 0.01 * (-1) ** n for n in range(40)]
    assert not any(guard.judge(16, {"masked loss": value})[0] for value in usual)
    assert guard.judge(16, {"masked loss": 3.2}) == (False, "")  # within 8 % of the median
    spiked, words = guard.judge(16, {"masked loss": 3.5})
    assert spiked
    assert words == "the masked loss is 3.5, 16 deviations above the median of 3.01"
    again = SpikeGuard(8.0, json.loads(json.dumps(guard.to_json())))
    assert again.to_json() == guard.to_json()
    assert [guard.judge(16, {"masked loss": 6.0 + n})[0] for n in range(5)] == [True] * 4 + [False]
    assert guard.judge(16, {"masked loss": 6.0}) == (False, "")  # the new level
    assert again.judge(16, {"masked loss": math.inf}) == (True, "the masked loss is inf")
    assert again.judge(32, {"masked loss": 9.0}) == (False, "")  # rows of another length
    for _ in range(5):
        assert not again.hopeless()
        assert again.judge(32, {"masked loss": math.nan})[0]
    assert again.judge(32, {"masked loss": math.nan})[0]
    assert again.hopeless()
