"""Assessments of slurm/doctor.py for what this machine cannot have: GPUs, nodes, versions, clocks."""

from __future__ import annotations

import dataclasses
import time

from data.wording import ranks_text, time_text
from slurm.doctor_machine import (
    assess_device_reduce,
    assess_devices,
    assess_environment,
    assess_processors,
    assess_ranks,
    assess_versions,
)
from slurm.doctor_run import assess_shared
from slurm.doctor_table import FAIL, OK, WARN
from training.environment import Environment


def rank_on(host: str, gpu: str | None = None, **changes) -> dict:
    card = {"index": 0, "uuid": gpu, "pci": f"{gpu}:00", "name": "H200", "free": 99, "total": 100, "bf16": True}
    measured = {"host": host, "local_rank": 0, "type": "cuda" if gpu else "cpu", "cores": [*range(16)], "threads": 2}
    return {**measured, "unused_gpu": False, "gpu": {**card, "driver": "580.1", **changes} if gpu else None}


def test_assessment_of_ranks_and_devices():
    two = Environment("slurm", world_size=4, nodes=2)
    whole = {rank: rank_on(f"n{rank // 2}", f"g{rank % 2}") for rank in range(4)}
    assert assess_ranks(whole, two).result == OK
    assert assess_ranks(whole, two).detail == "n0: ranks 0-1 on GPUs g0:00, g1:00\nn1: ranks 2-3 on GPUs g0:00, g1:00"
    twice = {**whole, 3: rank_on("n1", "g0")}
    assert assess_ranks(twice, two).result == FAIL
    assert "ranks 2-3 share one GPU of n1" in assess_ranks(twice, two).detail
    assert assess_ranks({**whole, 3: rank_on("n1")}, two).result == FAIL
    uneven = {0: rank_on("n0", "a"), 1: rank_on("n0", "b"), 2: rank_on("n1", "c")}
    assert assess_ranks(uneven, dataclasses.replace(two, world_size=3)).result == WARN
    assert assess_ranks({0: rank_on("n0", "a"), 1: rank_on("n0", "b")}, two).result == WARN  # two nodes, one host

    assert assess_devices(whole, "auto", None).result == OK
    for changes, says in (
        ({"free": 80}, "of ranks 3"),
        ({"name": "A100"}, "different models"),
        ({"driver": "5"}, "drivers"),
        ({"bf16": False}, ""),
    ):
        row = assess_devices({**whole, 3: rank_on("n1", "g1", **changes)}, "auto", None)
        assert (row.result, says in row.detail, bool(row.remedy)) == (WARN, True, True)
    assert assess_devices({0: {**rank_on("n0"), "unused_gpu": True}}, "auto", None).result == WARN
    assert assess_devices({0: {**rank_on("n0"), "unused_gpu": True}}, "cpu", None).result == OK

    assert assess_processors(whole).result == OK
    assert assess_processors({**whole, 1: {**whole[1], "threads": 15}}).result == WARN
    row = assess_processors({0: {**whole[0], "cores": [3], "threads": 1}})
    assert (row.result, "--cpus-per-task" in row.remedy) == (WARN, True)


def test_assessment_of_versions_network_and_clocks():
    same = {0: {"torch": "2", "code": "abc+"}, 1: {"torch": "2", "code": "abc+"}}
    assert assess_versions(same).result == OK
    row = assess_versions({**same, 2: {"torch": "3", "code": "abc+", "nccl": "2"}})
    assert (row.result, row.detail.splitlines()[0]) == (FAIL, "torch: 2 on ranks 0-1; 3 on ranks 2")
    assert "nccl: none on ranks 0-1; 2 on ranks 2" in row.detail

    near, far = ({0: rank_on("n0", "a"), 1: rank_on(host, "b")} for host in ("n0", "n1"))
    measured = {rank: {"right": True, "rates": {"4194304": 1e9, "268435456": 2e9}} for rank in (0, 1)}
    assert assess_device_reduce(measured, near).result == WARN
    assert assess_device_reduce(measured, far).result == OK
    assert assess_device_reduce({**measured, 1: {**measured[1], "right": False}}, far).result == FAIL

    seen = {rank: {"host": f"n{rank}", "sees": True, "locked_out": True, "skew": 0.1} for rank in (0, 1)}
    probe, clocks = {"path": "/runs/a/.doctor_x", "locks": ""}, {0: {"time": 10.0}, 1: {"time": 10.1}}
    assert [row.result for row in assess_shared(seen, probe, clocks)] == [OK, OK, OK]
    assert [row.result for row in assess_shared(seen, probe, {})] == [
        OK,
        OK,
        OK,
    ]  # a rank went missing
    assert assess_shared({**seen, 1: {**seen[1], "sees": False}}, probe, clocks)[0].result == FAIL
    assert assess_shared({**seen, 1: {**seen[1], "locked_out": False}}, probe, clocks)[1].result == WARN
    assert assess_shared(seen, probe, {**clocks, 1: {"time": 14.0}})[2].result == WARN
    assert assess_shared({**seen, 1: {**seen[1], "skew": -5.0}}, probe, clocks)[2].result == WARN


def test_ranks_times_and_environment_in_words():
    assert ranks_text([3, 0, 1, 2, 6]) == "0-3, 6"
    assert [time_text(s) for s in (0.002, 90, 900, 9000, 900000)] == ["2 ms", "90 s", "15 min", "2.5 h", "10.4 days"]
    row = assess_environment(
        Environment("slurm", world_size=8, nodes=2, job_id="7", restart_count=1, end_time=time.time() + 7300)
    )
    assert row.detail.splitlines()[1] == "SLURM job 7, start 2, ends in 2.0 h"
