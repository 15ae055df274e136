"""Ranks that do not answer: the one that the others wait for is named, and the run ends."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import Run, start_ranks
from helpers.tiny_runs import flags, make_inputs

from training.errors import HARDWARE
from training.status import read_status
from training.watchdog import explain_hang


@pytest.mark.slow
def test_stopped_rank_is_named(tmp_path: Path):
    """Three ranks, of which rank 1 is stopped after step 5: the others say so after --step_timeout and end."""
    inputs = make_inputs(tmp_path / "inputs")
    options = {"step_timeout": 0.05, "collective_timeout": 5, "validate_every": 0, "save_every": 2}
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
    limit = r"after \d+ s \(--step_timeout 0\.05 min\)\. Stack traces .*failures"
    expected = rf"{silent}the others timed out in all_reduce of target counts, step 6, {limit}"
    assert re.fullmatch(expected, status.reason), status.reason
    stacks = sorted((tmp_path / "run" / "failures").iterdir())
    assert [path.name for path in stacks] == ["stacks_none_0_0.txt", "stacks_none_0_2.txt"]
    assert all("in agree" in path.read_text() for path in stacks)
    beat = json.loads((tmp_path / "run" / "heartbeats" / f"{socket.gethostname()}.json").read_text())
    assert (beat["rank"], beat["host"]) == (0, socket.gethostname())


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
