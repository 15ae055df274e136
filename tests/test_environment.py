"""Environments of launchers: parsed once, partial and contradictory ones refused by name; signals set a flag."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT

from training import preemption
from training.config import TrainingConfig
from training.environment import (
    EnvironmentProblem,
    expand_node_list,
    local_device_index,
    read_environment,
    tasks_per_node,
)
from training.preemption import RestartRefused, StopSignals, TimeLimit, excuse_attempt, parse_time, register_attempt
from training.status import record_failure, starts_so_far
from training.stopping import Stop, StopConditions

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
REQUIRED = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("rack[1-2]node[8-10]", [f"rack{r}node{n}" for r in (1, 2) for n in (8, 9, 10)]),
        ("a-b[009-011].site", ["a-b009.site", "a-b010.site", "a-b011.site"]),
        ("n1,n2", ["n1", "n2"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize("text", ["", "gpu[1-x]", "gpu[1", "a b"])
def test_bad_node_lists(text):
    with pytest.raises(EnvironmentProblem, match="node list"):
        expand_node_list(text)


def test_slurm(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)  # as in a container without scontrol
    found = read_environment({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert (found.launcher, found.rank, found.local_rank, found.world_size, found.nodes) == ("slurm", 5, 1, 8, 2)
    assert found.master_addr == "gpu03"
    assert 20000 <= found.master_port < 32768
    assert found.restart_count == 2
    assert (found.local_world_size, found.node_rank, found.end_time) == (4, 1, None)
    other = read_environment({**SLURM, "SLURM_JOB_ID": "123457"})
    assert other.master_port != found.master_port  # two jobs on one node do not collide


def test_starts_within_an_allocation_count(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    requeued = read_environment({**SLURM, "SLURM_RESTART_COUNT": "2"})
    found = read_environment({**SLURM, "SLURM_RESTART_COUNT": "2", "TRAINING_RESTARTS": "5"})
    assert (requeued.restart_count, requeued.requeues) == (2, 2)
    assert (found.restart_count, found.requeues) == (5, 2)
    assert found.master_port != requeued.master_port  # ranks of the last start may still hold that one
    assert starts_so_far(tmp_path, "123456") == 0
    register_attempt(short_config(tmp_path), found, 3)
    folder = short_config(tmp_path).run_folder
    assert (starts_so_far(folder, "123456"), starts_so_far(folder, "77")) == (6, 0)
    record_failure(folder, dataclasses.replace(found, restart_count=6), "an error before it was registered")
    assert starts_so_far(folder, "123456") == 7


def test_torchrun_wins_inside_a_slurm_job():
    found = read_environment({**SLURM, **TORCHRUN})
    assert (found.launcher, found.rank, found.world_size) == ("torchrun", 1, 2)
    assert (found.master_addr, found.master_port, found.job_id) == ("10.0.0.1", 1234, "123456")


def test_no_launcher_is_one_process():
    found = read_environment({"HOME": "/"})
    assert (found.launcher, found.rank, found.world_size) == ("none", 0, 1)


def test_nodes_of_different_sizes():
    uneven = {**SLURM, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_STEP_NUM_NODES": "3"}
    sizes = [read_environment({**uneven, "SLURM_NODEID": str(n), "SLURM_LOCALID": "0"}) for n in range(3)]
    assert [found.local_world_size for found in sizes] == [3, 3, 1]
    assert {found.world_size for found in sizes} == {7}


def test_tasks_per_node():
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(EnvironmentProblem, match=r"2\(3\)"):
        tasks_per_node("2(3)")


def test_slurm_step_smaller_than_its_job(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1"}
    found = read_environment(
        {**SLURM, **step, "SLURM_STEP_NODELIST": "gpu04", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
    )
    assert (found.world_size, found.nodes, found.master_addr) == (2, 1, "gpu04")


def test_batch_script_is_not_a_rank():
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    with pytest.raises(EnvironmentProblem, match="put srun in front"):
        read_environment({**batch, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})


def test_job_of_an_array_and_its_end():
    array = {"SLURM_ARRAY_JOB_ID": "123456", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_END_TIME": "1795236532"}
    found = read_environment({**SLURM, **array})
    assert (found.job_id, found.end_time) == ("123456_3", 1795236532.0)


def test_one_process_inside_a_job():
    found = read_environment({**SLURM, "SLURM_RESTART_COUNT": "1"}, alone=True)
    assert (found.launcher, found.rank, found.world_size) == ("none", 0, 1)
    assert (found.job_id, found.restart_count) == ("123456", 1)
    left_over = {"SLURM_JOB_ID": "7"}  # exported by hand, or an interactive shell of salloc
    assert read_environment(left_over, alone=True).job_id is None


@pytest.mark.parametrize("missing", sorted(REQUIRED - {"SLURM_PROCID"}))
def test_partial_slurm_environment_names_missing_variables(missing):
    with pytest.raises(EnvironmentProblem, match=missing):
        read_environment({name: value for name, value in SLURM.items() if name != missing})


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"])
def test_partial_torchrun_environment_names_missing_variables(missing):
    with pytest.raises(EnvironmentProblem, match=missing):
        read_environment({name: value for name, value in TORCHRUN.items() if name != missing})


def test_contradictory_environments_are_refused():
    with pytest.raises(EnvironmentProblem, match="rank 9 does not fit"):
        read_environment({**TORCHRUN, "RANK": "9"})
    with pytest.raises(EnvironmentProblem, match="'two'"):
        read_environment({**TORCHRUN, "WORLD_SIZE": "two"})
    with pytest.raises(EnvironmentProblem, match="contradict"):
        read_environment({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,1"})
    with pytest.raises(EnvironmentProblem, match="local rank 4 does not fit"):
        read_environment({**SLURM, "SLURM_LOCALID": "4"})


def test_device_of_a_process():
    assert [local_device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [local_device_index(rank, 1) for rank in range(4)] == [0, 0, 0, 0]  # --gpus-per-task=1
    with pytest.raises(EnvironmentProblem, match="ntasks-per-node"):
        local_device_index(2, 2)


def test_signals_set_a_flag_once_and_handlers_come_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) == before


# What SLURM is asked, with commands that answer as SLURM 22.05 did


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Put commands on the path: fake_slurm(squeue="RUNNING 1:00 0"); returns the file that lists the requeues."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    calls = tmp_path / "calls"

    def install(squeue: str, scontrol: int = 0, stderr: str = ""):
        for name, body in (
            ("squeue", f"echo '{squeue}'"),
            ("scontrol", f"echo \"$@\" >> {calls}; echo '{stderr}' >&2; exit {scontrol}"),
        ):
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\n{body}\n")
            script.chmod(0o755)
        return calls

    return install


def test_time_limits_as_squeue_prints_them():
    assert parse_time("1-02:03:04") == ((24 + 2) * 60 + 3) * 60 + 4
    assert parse_time("2:03") == 123
    assert parse_time("0:00") == 0
    assert parse_time("UNLIMITED") is None
    assert parse_time("INVALID") is None


@pytest.mark.parametrize(
    ("squeue", "asked", "outcome"),
    [
        ("RUNNING 1:00 0", True, preemption.REQUEUED),
        ("COMPLETING INVALID 0", True, preemption.REQUEUED),  # out of time: its processes are being ended
        ("COMPLETING 2:56 0", False, preemption.CANCELLED),  # scancel; a requeue would bring it back
        ("CANCELLED 2:56 0", False, preemption.CANCELLED),
        ("COMPLETING 3:00 1", False, preemption.REQUEUED),  # SLURM does it already
        ("PENDING 3:00 0", False, preemption.REQUEUED),
        ("RESV_DEL_HOLD 3:00 0", False, preemption.REQUEUED),  # held: its reservation is gone
    ],
)
def test_requeue_by_job_state(fake_slurm, squeue, asked, outcome):
    calls = fake_slurm(squeue)
    assert preemption.requeue("12_3", 0) == (outcome, "")
    assert calls.exists() == asked
    if asked:
        assert calls.read_text() == "requeue 12_3\n"


def test_refused_requeue(fake_slurm, monkeypatch):
    fake_slurm("RUNNING 1:00 0", 1, "Requested operation is presently disabled for job 5")
    assert preemption.requeue("5", 0) == (preemption.REFUSED, "Requested operation is presently disabled for job 5")
    fake_slurm("RUNNING 1:00 0", 1, "Job is pending execution for job 5")
    assert preemption.requeue("5", 0)[0] == preemption.REQUEUED
    monkeypatch.setenv("PATH", "/nonexistent")
    assert preemption.requeue("5", 0) == (preemption.NO_COMMAND, "")


def test_time_limit(fake_slurm, monkeypatch):
    environment = read_environment(SLURM)
    fake_slurm("RUNNING 1:00 0")
    limit = TimeLimit(environment)
    assert 58 < limit.seconds_left <= 60
    assert not limit.reached(50)
    assert limit.reached(61)
    fake_slurm("RUNNING 1:00:00 0")  # extended meanwhile
    monkeypatch.setattr(preemption, "_QUERY_SECONDS", 0.0)
    limit._next_query = 0.0
    assert not limit.reached(61)
    fake_slurm("RUNNING UNLIMITED 0")
    assert TimeLimit(environment).seconds_left is None
    monkeypatch.setenv("PATH", "/nonexistent")  # in a container the job script says it
    assert TimeLimit(environment).seconds_left is None
    environment = read_environment({**SLURM, "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert 98 < TimeLimit(environment).seconds_left <= 101
    assert not TimeLimit(read_environment({})).reached(1e9)


_HANGING = """
import ctypes, signal, sys
sys.path.insert(0, {root!r})
from training.preemption import StopSignals
with StopSignals():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and no signal wakes it: as in a collective of a lost rank
"""


def test_ctrl_c_prints_at_once_and_the_third_ends_the_process():
    command = [sys.executable, "-c", _HANGING.format(root=str(ROOT))]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=kept)
    try:
        assert process.stdout.readline() == "ready\n"
        for words in ("SIGINT: the run finishes this step", "the run is about to save", "ended by the third Ctrl-C"):
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "\n"
            assert process.stdout.readline().startswith(words)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


def test_sighup_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def short_config(folder: Path, **flag) -> TrainingConfig:
    return TrainingConfig(
        train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(folder), **flag
    )


def test_time_limit_lead_excludes_start_up(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("training.stopping.time.monotonic", lambda: now[0])
    conditions = StopConditions(short_config(tmp_path), StopSignals(), read_environment({}), None, 2_000_000_000)
    assert conditions.lead == 80  # two saves of 10 s, estimated, and the margin
    for seconds in (240, 30, 1, 4, 1):  # compilation, the first step, steps, a validation
        now[0] += seconds
        conditions.requested(None)
    conditions.saved(3.0)
    assert conditions.lead == 4 + 2 * 3 + 60
    conditions.saved(2.0)
    assert conditions.lead == 70


def test_look_between_batches_is_no_round_of_the_lead(tmp_path, monkeypatch):
    now, signals = [0.0], StopSignals()
    monkeypatch.setattr("training.stopping.time.monotonic", lambda: now[0])
    conditions = StopConditions(short_config(tmp_path), signals, read_environment({}), None, 0)
    for _ in range(4):
        for _ in range(10):  # batches of a validation within each round
            now[0] += 1
            assert not conditions.wanted()
        assert conditions.requested(None) is None
    assert conditions.lead == 10 + 60
    signals.received = "SIGTERM"
    assert conditions.wanted()
    signals.received = None
    assert conditions.requested(None) == conditions.request == Stop("preemption", "SIGTERM")  # what was found stays


def test_starts_ended_by_signals_are_not_fruitless(tmp_path, fake_slurm):
    config = short_config(tmp_path, max_fruitless_starts=2)
    fake_slurm("RUNNING 1:00:00 0")

    def start(count: int) -> int:
        environment = read_environment({**SLURM, "SLURM_RESTART_COUNT": str(count)})
        return register_attempt(config, environment, 5).without_progress

    def end_by_signal(count: int) -> None:
        excuse_attempt(config, read_environment({**SLURM, "SLURM_RESTART_COUNT": str(count)}))

    for count in range(4):  # preempted while starting, again and again
        assert start(count) == 0
        end_by_signal(count)
    assert start(4) == 0
    fake_slurm("RUNNING 2:00 0")  # the limit comes near: starting takes too long for it
    end_by_signal(4)
    assert start(5) == 1
    with pytest.raises(RestartRefused, match=r"last 2 starts left no new checkpoint .*--max_fruitless_starts 2"):
        start(6)
