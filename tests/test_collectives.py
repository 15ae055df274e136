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
from training.watchdog import verdict


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(tmp_path: Path):
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
    where = r"rank 1 on \S+ has not been heard of for \d+ s: it was last in step \d+ \([\w ]+\); "
    waiting = r"the others have waited in step 6 \(the agreement before a step\) for \d+ s\. Stack traces .*failures"
    assert re.fullmatch(where + waiting, status.reason), status.reason
    stacks = sorted((tmp_path / "run" / "failures").iterdir())
    assert [path.name for path in stacks] == ["stacks_none_0_0.txt", "stacks_none_0_2.txt"]
    assert all("in agree" in path.read_text() for path in stacks)
    beat = json.loads((tmp_path / "run" / "heartbeats" / f"{socket.gethostname()}.json").read_text())
    assert (beat["rank"], beat["host"]) == (0, socket.gethostname())


def place(rank: int, arrivals: int, waits: float = 300.0, **facts: Any) -> dict[str, Any]:
    host = f"node{rank // 2}"
    common = {"rank": rank, "host": host, "arrivals": arrivals, "waits": waits, "time": time.time() - 40}
    return {**common, "step": 17, "doing": "the sum of losses", **facts}


def test_a_rank_that_lives_but_has_not_arrived_is_named():
    answers = {rank: place(rank, 90, doing="the agreement before a step", step=18) for rank in (0, 1, 2)}
    answers[3] = place(3, 89, waits=0.0)
    error = verdict(answers, answers, [])
    assert error.host == "node1"
    assert str(error) == (
        "rank 3 on node1 has not arrived: it is in step 17 (after the sum of losses); "
        "the others have waited in step 18 (the agreement before a step) for 300 s"
    )


def test_silent_ranks_come_first_and_are_not_listed_by_the_hundred():
    beats = {rank: place(rank, 89) for rank in range(10)}
    said = str(verdict({0: beats[0], 1: place(1, 70)}, beats, range(2, 10)))
    assert said.startswith("rank 2 on node1 has not been heard of for 40 s: it was last in step 17 (the sum of losses)")
    assert "rank 5 on" in said
    assert "rank 6" not in said
    assert "; and 4 more ranks; the others" in said


def test_where_all_have_arrived_nobody_is_blamed():
    answers = {rank: place(rank, 90, doing="the device") for rank in range(4)}
    assert str(verdict(answers, answers, [])).startswith(
        "all ranks have waited in step 17 (the device) for 300 s and none is"
    )


def test_a_lost_rank_0_is_named_by_the_others():
    own = {2: place(2, 90)}
    assert str(verdict(own, {}, [0])).startswith("rank 0 does not answer; the others have waited")
