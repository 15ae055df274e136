"""Ranks that do not answer: the one that the others wait for is named, and the run ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Run, run_ranks, start_ranks
from helpers.tiny_runs import flags, make_inputs, training_lines

from train_single_gpu import main as train
from training.distributed import axes_through
from training.errors import DONE, HARDWARE, signal_code
from training.status import read_status
from training.watchdog import explain_hang, silent_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"),
    [({"heartbeat_timeout": 3}, "--heartbeat_timeout 3 s"), ({"step_timeout": 0.05}, "--step_timeout 0.05 min")],
    ids=["no_sign", "too_long"],
)
def test_stopped_rank_is_named(tmp_path: Path, option: dict[str, float], words: str):
    """Three ranks, of which rank 1 is stopped after step 5: the others say so after either timeout and end."""
    inputs = make_inputs(tmp_path / "inputs")
    options = {"collective_timeout": 5, "validate_every": 0, "save_every": 2, **option}
    processes = start_ranks([Run(flags(inputs, tmp_path, **options), fault="stopped")], world_size=3)
    try:
        assert [processes[rank].wait(timeout=120) for rank in (0, 2)] == [HARDWARE.code] * 2
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.state, status.step) == ("failed", 4)
    silent = r"rank 1 on \S+ has sent no heartbeat for \d+ s: the last one was in step \d+ \([^()]+\); "
    limit = rf"after \d+ s \({re.escape(words)}\)\. Stack traces .*failures"
    expected = rf"{silent}the others timed out in all_reduce of (target counts|gradients), step 6, {limit}"
    assert re.fullmatch(expected, status.reason), status.reason
    stacks = sorted((tmp_path / "run" / "failures").iterdir())
    assert [path.name for path in stacks] == ["stacks_none_0_0.txt", "stacks_none_0_2.txt"]
    assert all(re.search(r"in _?finish\b", path.read_text()) for path in stacks)
    beat = json.loads((tmp_path / "run" / "heartbeats" / f"{socket.gethostname()}.json").read_text())
    assert (beat["rank"], beat["host"]) == (0, socket.gethostname())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_killed_rank_ends_the_other_under_nccl(tmp_path: Path, sharding: str):
    inputs = make_inputs(tmp_path / "inputs", hidden_size=64)
    options = {"device": "cuda", "heartbeat_timeout": 10, "validate_every": 0, "save_every": 2, "sharding": sharding}
    first, second = start_ranks([Run(flags(inputs, tmp_path, max_steps=1000, **options), fault="killed")])
    try:
        second.communicate(timeout=300)
        assert second.returncode == -signal.SIGKILL
        began = time.monotonic()
        text, _ = first.communicate(timeout=200)
        print(f"the other ended after {time.monotonic() - began:.1f} s")
    finally:
        first.kill()
    assert first.returncode == HARDWARE.code or json.loads(text)["code"] == HARDWARE.code, text
    status = read_status(tmp_path / "run")
    assert status is not None
    print(status.reason)
    assert status.state == "failed"
    assert re.search("lost contact with another rank|rank 1 on .* has sent no heartbeat", status.reason), status.reason


def test_stop_of_one_rank_is_agreed_while_a_step_computes(tmp_path: Path):
    """A signal inside step 5 ends all ranks after step 6, on which they had agreed before; the run stays the same."""
    inputs, short = make_inputs(tmp_path / "inputs"), {"max_steps": 8, "validate_every": 0, "save_every": 0}
    assert train(flags(inputs, tmp_path, "alone", **short)) == 0
    arguments = flags(inputs, tmp_path, "four", **short)
    runs = [Run(arguments, fault="signal_in_step"), Run([*arguments, "--resume=auto"], fault="grid")]
    stopped, resumed = run_ranks(runs, world_size=4)
    assert [outcome.code for outcome in stopped] == [signal_code("SIGTERM"), DONE, DONE, DONE], stopped
    assert "stopped by SIGTERM after step 6" in stopped[0].text
    assert [outcome.code for outcome in resumed] == [DONE] * 4, resumed
    whole, found = training_lines(tmp_path / "alone"), training_lines(tmp_path / "four")
    assert [line["step"] for line in found] == list(range(1, 9))
    for a, b in zip(whole, found, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 6, 64, 96, 127, 1024])
def test_a_sum_along_each_axis_reaches_every_rank(size: int):
    sums = [{rank} for rank in range(size)]
    axes = [axes_through(rank, size) for rank in range(size)]
    for axis in range(len(axes[0])):
        parts = [sums[rank] for rank in range(size)]
        for rank in range(size):
            assert rank in axes[rank][axis]
            assert sum(len(parts[other]) for other in axes[rank][axis]) == len(axes[rank][axis]) * len(parts[rank])
            sums[rank] = set().union(*(parts[other] for other in axes[rank][axis]))
    assert all(found == set(range(size)) for found in sums)
    assert size == 127 or max(len(axis) for axis in axes[0]) <= 8


def test_a_rank_without_a_sign_is_silent(monkeypatch):
    now, signs = [0.0], {}
    monkeypatch.setattr("training.watchdog.time.monotonic", lambda: now[0])
    monkeypatch.setattr("training.watchdog.time.time", lambda: 100 + now[0])  # clocks of hosts differ
    beats = {rank: position(rank, 0) for rank in range(3)}
    for second in range(0, 40, 5):
        now[0] = float(second)
        moving = {rank: {**beats[rank], "time": float(second if rank != 1 else 0)} for rank in beats}
        assert silent_ranks(signs, moving, 30.0, waited=0.0) == ({1} if second > 30 else set())
    assert silent_ranks({}, beats, 30.0, waited=29.0) == set()
    assert silent_ranks({}, beats, 30.0, waited=31.0) == {0, 1, 2}  # unchanged for as long as it has waited


def position(rank: int, collectives: int, seconds_waited: float = 300.0, **changed: Any) -> dict[str, Any]:
    own = {"rank": rank, "host": f"node{rank // 2}", "collectives": collectives, "seconds_waited": seconds_waited}
    common = {"step": 17, "operation": "all_reduce of losses", "timeout": "--step_timeout 5 min"}
    return {**own, **common, "time": time.time() - 40, **changed}


def test_rank_behind_the_others_is_named():
    answers = {rank: position(rank, 90, operation="all_reduce of target counts", step=18) for rank in (0, 1, 2)}
    answers[3] = position(3, 89, seconds_waited=0.0)
    error = explain_hang(answers, answers, [])
    assert error.host == "node1"
    assert str(error) == (
        "rank 3 on node1 has not arrived: it is in step 17 (after all_reduce of losses); "
        "the others timed out in all_reduce of target counts, step 18, after 300 s (--step_timeout 5 min)"
    )


def test_silent_ranks_come_first_and_few_are_listed():
    heartbeats = {rank: position(rank, 89) for rank in range(10)}
    said = str(explain_hang({0: heartbeats[0], 1: position(1, 70)}, heartbeats, range(2, 10)))
    assert said.startswith(
        "rank 2 on node1 has sent no heartbeat for 40 s: the last one was in step 17 (all_reduce of losses)"
    )
    assert "rank 5 on" in said
    assert "rank 6" not in said
    assert "; and 4 more ranks; the others" in said


def test_no_rank_is_blamed_where_all_have_arrived():
    answers = {rank: position(rank, 90, operation="device synchronization") for rank in range(4)}
    assert str(explain_hang(answers, answers, [])).startswith(
        "all ranks timed out in device synchronization, step 17, after 300 s (--step_timeout 5 min) and none is"
    )


def test_silent_rank_0_is_named_by_the_others():
    own = {2: position(2, 90)}
    assert str(explain_hang(own, {}, [0])).startswith("rank 0 has sent no heartbeat; the others timed out in")
