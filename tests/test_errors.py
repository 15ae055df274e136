"""Kinds of failures and their exit codes; a run tells its error before anything that takes long."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import ROOT, flags, make_inputs

import train_single_gpu
from data.shards import ShardError
from slurm import requeue
from slurm.requeue import START_AGAIN, finish
from training import preemption
from training.checkpoint import CheckpointError, SaveError
from training.config import ConfigError, TrainingConfig
from training.distributed import CollectiveError, single_world
from training.environment import Environment, EnvironmentProblem
from training.errors import (
    BUG,
    GAVE_UP,
    HARDWARE,
    KINDS,
    NOT_FINITE,
    USER,
    NonFiniteError,
    host_at_fault,
    kind_of,
    kind_of_code,
)
from training.preemption import RestartRefused
from training.sinks import BackgroundSink, Sink
from training.status import RUNNING, StatusFile, begin_attempt, read_status, record_failure

HERE = socket.gethostname()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("errors") / "inputs")


@pytest.mark.parametrize(
    ("error", "kind", "host"),
    [
        (ConfigError("--name is ''"), USER, ""),
        (ShardError("a.shard is cut off"), USER, ""),
        (EnvironmentProblem("put srun in front"), USER, ""),
        (CheckpointError("is damaged"), USER, ""),
        (torch.OutOfMemoryError("CUDA out of memory"), USER, ""),
        (PermissionError(errno.EACCES, "Permission denied"), USER, ""),
        (NonFiniteError("step 3: the loss is nan"), NOT_FINITE, ""),
        (RestartRefused("restarted 200 times"), GAVE_UP, ""),
        (SaveError("the disk is full"), HARDWARE, ""),
        (CollectiveError("timed out", late=True), HARDWARE, ""),
        (torch.distributed.DistBackendError("NCCL error in: NCCLUtils.hpp"), HARDWARE, ""),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), HARDWARE, ""),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), HARDWARE, HERE),
        (OSError(errno.ESTALE, "Stale file handle"), HARDWARE, HERE),
        (OSError(errno.EIO, "Input/output error"), HARDWARE, HERE),
        (OSError(errno.ENOSPC, "No space left on device"), HARDWARE, ""),
        (RuntimeError("CUDA error: device-side assert triggered"), BUG, ""),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), BUG, ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), BUG, ""),
        (ZeroDivisionError("division by zero"), BUG, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_kinds(error, kind, host):
    assert kind_of(error) is kind
    assert host_at_fault(error) == host


def test_exit_codes_are_those_of_the_readme():
    assert {kind.code for kind in KINDS.values()} == {1, 2, 3, 75}
    assert [kind_of_code(code) for code in (1, 2, 3, 75, 137, 7)] == [BUG, USER, NOT_FINITE, HARDWARE, HARDWARE, BUG]
    assert [kind for kind in KINDS.values() if kind.retried] == [HARDWARE]
    table = (ROOT / "training" / "README.md").read_text().split("| exit code |")[1].split("\n\n")[0]
    for code in ("0", "1", "2", "3", "75", "130", "143"):
        assert f"\n| {code}" in table, code


class SlowSink(Sink):
    """A wandb whose upload takes a minute."""

    def close(self, failed: bool) -> None:
        assert failed
        time.sleep(60)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ZeroDivisionError("an error of its own"), 1, "ZeroDivisionError: an error of its own"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 75, "ECC error"),
        (OSError(errno.ESTALE, "Stale file handle", "runs/run/x"), 75, "error: runs/run/x: Stale file handle"),
    ],
    ids=["bug", "device", "storage"],
)
def test_error_is_reported_before_slow_start_up(inputs, tmp_path, capsys, monkeypatch, error, code, message):
    """stderr and status.json have it when the threads of the loader are joined and wandb is waited for."""
    seen = []

    def close(self) -> None:
        seen.append((capsys.readouterr().err, read_status(tmp_path / "run").state))

    def step(*_: object) -> None:
        raise error

    monkeypatch.setattr("train_single_gpu.train_step", step)
    monkeypatch.setattr("training.sinks.Wandb", lambda *_: SlowSink())
    monkeypatch.setattr("training.metric_logger._HURRIED_SECONDS", 0.05)
    monkeypatch.setattr(train_single_gpu.Loader, "close", close)
    began = time.monotonic()
    assert train_single_gpu.main(flags(inputs, tmp_path, wandb_mode="offline"), single_world) == code
    assert time.monotonic() - began < 50
    ((stderr, state),) = seen
    assert message in stderr
    assert ("Traceback" in stderr) == (code != 75 or isinstance(error, RuntimeError))
    assert state == "failed"


def test_stop_is_noted_before_an_upload_is_waited_for(inputs, tmp_path, monkeypatch):
    """SLURM may kill the job in the meantime; and a wandb that the job's signal ended is not started once more."""
    import wandb  # here: machines that only run the tests for GPUs need not have it

    seen, starts, train_step = [], [], train_single_gpu.train_step

    def step(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return train_step(*arguments)

    def init(**options: object) -> None:
        while not (tmp_path / "run" / "checkpoints" / "step_00000001").exists():
            time.sleep(0.01)
        starts.append(options["mode"])
        raise wandb.Error("wandb-core exited with code -15")

    def join(sink: BackgroundSink, deadline: object) -> None:
        seen.append(read_status(tmp_path / "run"))
        sink._thread.join()

    monkeypatch.setattr("train_single_gpu.train_step", step)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(BackgroundSink, "join", join)
    train_single_gpu.main(flags(inputs, tmp_path, wandb_mode="offline"), single_world)
    ((state, reason, done),) = ((status.state, status.reason, status.step) for status in seen)
    assert (state, reason, done) == ("stopped", "SIGINT", 1)
    assert starts == ["offline"]


# The job script's last word (slurm/requeue.py)


@pytest.mark.parametrize(
    ("srun", "failures", "retried", "code"),
    [
        (1, [(HARDWARE, False, "CUDA error: uncorrectable ECC error encountered")], True, 0),
        (137, [(HARDWARE, False, "CUDA error: uncorrectable ECC error encountered")], True, 0),  # KillWait was short
        (137, [(NOT_FINITE, False, "step 6: the loss is nan")], False, 3),
        (137, [(HARDWARE, True, "lost contact"), (NOT_FINITE, False, "step 6: the loss is nan")], False, 3),
        (143, [(USER, False, "--learning_rate is -1")], False, 2),
        (1, [(BUG, False, "ZeroDivisionError: division by zero")], False, 1),
        (75, [], True, 0),
        (137, [], True, 0),
        (1, [], False, 1),
    ],
)
def test_requeue_by_kind_of_first_failure(tmp_path, monkeypatch, srun, failures, retried, code):
    """Whatever the exit code of srun, which depends on KillWait and on who ended whom."""
    monkeypatch.setattr(preemption, "requeue", lambda *_: (preemption.REQUEUED, ""))
    config = TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(tmp_path))
    config.run_folder.mkdir()
    for rank, (kind, secondary, error) in enumerate(failures):
        environment = Environment("slurm", rank=rank, world_size=8, job_id="77")
        record_failure(config.run_folder, environment, error, secondary, kind.name)
    environment = Environment("slurm", job_id="77")
    StatusFile(config.run_folder, environment, 100).write(RUNNING, "", 0)
    found, words = finish(config, environment, srun, requeue_on_crash=True)
    assert found == code
    assert ("SLURM starts job 77 again" in words) == retried
    StatusFile(config.run_folder, environment, 100).write(RUNNING, "", 0)
    found, words = finish(config, environment, srun, requeue_on_crash=False)
    assert found == (code or (failures[0][0].code if failures else srun))
    assert words.startswith("job 77 failed: ")


@pytest.mark.parametrize(
    ("squeue", "outcome", "asked"),
    [
        ("RUNNING 1:00:00 1", START_AGAIN, []),
        ("RUNNING 1:00:00 2", 0, []),  # SLURM starts it again already
        ("CANCELLED 1:00:00 1", 75, []),
        ("", 0, ["scontrol requeue 77"]),  # whether the allocation goes on, nobody can tell
    ],
)
def test_ranks_start_again_where_the_allocation_goes_on(tmp_path, monkeypatch, squeue, outcome, asked):
    commands = []

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        return subprocess.CompletedProcess(command, 0, squeue if command[0] == "squeue" else "", "")

    monkeypatch.setattr(preemption, "_run", run)
    config = TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(tmp_path))
    config.run_folder.mkdir()
    environment = Environment("slurm", job_id="77", restart_count=4, requeues=1)
    record_failure(config.run_folder, environment, "rank 3 has sent no heartbeat", kind=HARDWARE.name)
    assert finish(config, environment, 137, requeue_on_crash=False, can_start=True)[0] == 75
    commands.clear()
    code, said = finish(config, environment, 137, requeue_on_crash=True, can_start=True)
    assert code == outcome
    assert ("starts again in its allocation" in said) == (code == START_AGAIN)
    assert [command for command in commands if command.startswith("scontrol")] == asked


@pytest.mark.parametrize(
    ("blamed", "takes_steps", "stays"), [(["node2"], True, True), (["node3"], True, False), ([], False, False)]
)
def test_host_at_fault_is_left_the_second_time(tmp_path, monkeypatch, blamed, takes_steps, stays):
    monkeypatch.setattr(requeue, "takes_steps", lambda _host: takes_steps)
    monkeypatch.setattr(preemption, "query_job", lambda _job: preemption.JobStatus("RUNNING", 3600, 0))
    monkeypatch.setattr(preemption, "plan_exclusion", lambda *_: (["node3"], "without node3"))
    monkeypatch.setattr(preemption, "requeue", lambda *_: (preemption.REQUEUED, ""))
    monkeypatch.setattr(preemption, "exclude_nodes", lambda *_: "")
    config = TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(tmp_path))
    config.run_folder.mkdir()
    for restart, host in enumerate([*blamed, "node3"]):
        environment = Environment("slurm", rank=0, job_id="77", restart_count=restart)
        record_failure(config.run_folder, environment, "CUDA error", kind=HARDWARE.name, host_at_fault=host)
    code, said = finish(config, environment, 75, requeue_on_crash=True, can_start=True)
    assert code == (START_AGAIN if stays else 0)
    assert ("without node3" in said) == (not stays)


def test_nodes_that_died_are_left_out_while_enough_are_left(tmp_path, monkeypatch):
    dead: set[str] = set()
    monkeypatch.setattr(requeue, "takes_steps", lambda host, seconds=0.0: host not in dead)
    monkeypatch.setattr(preemption, "query_job", lambda _job: preemption.JobStatus("RUNNING", 3600, 0))
    monkeypatch.setattr(preemption, "plan_exclusion", lambda _job, host, _blamed: ([host], f"without {host}"))
    monkeypatch.setattr(preemption, "requeue", lambda *_: (preemption.REQUEUED, ""))
    monkeypatch.setattr(preemption, "exclude_nodes", lambda *_: "")
    variables = {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1", "LEAST_NODES": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(tmp_path))
    config.run_folder.mkdir()
    place, found = tmp_path / "place", []
    place.touch()
    for restart, dies in enumerate([{"node3"}, set[str](), {"node4"}, {"node2"}]):
        dead |= dies
        environment = Environment("slurm", job_id="77", restart_count=restart)
        begin_attempt(config.run_folder, environment, restart)
        (config.run_folder / "checkpoints" / f"step_{restart + 1:08}").mkdir(parents=True)
        record_failure(config.run_folder, environment, "connection lost", secondary=True, kind=HARDWARE.name)
        code, said = finish(config, environment, 75, requeue_on_crash=True, can_start=True, place=place)
        found.append((code, said.rpartition("connection lost; ")[2], place.read_text().split()))
    first = ["--nodes=3", "--ntasks=5", "--exclude=node3", "--overlap"]
    second = ["--nodes=2", "--ntasks=4", "--exclude=node3,node4", "--overlap"]
    again = "job 77 starts again in its allocation"
    assert found == [
        (START_AGAIN, f"{again} without node3", first),
        (START_AGAIN, again, first),
        (START_AGAIN, f"{again} without node4", second),
        (0, "SLURM starts job 77 again without node2", second),
    ]


_NODES = "".join(f"node{number}|{'down*' if number == 4 else 'mixed'}|gpu:4\n" for number in (1, 2, 3, 4))
_NODES += "cpu1|idle|(null)\n"
_RETRIED = f"rank 0 on {HERE} failed first: CUDA error; SLURM starts job 77 again"


@pytest.mark.parametrize(
    ("asks", "hosts", "blamed", "refusal", "excluded", "words"),
    [
        ("debug|2|||(null)|(null)", ["node3"], [], "", "node3", " without node3"),
        ("debug|1||node[1,9]|(null)|(null)", ["node3.site"], [], "", "node1,node9,node3", " without node3"),
        ("debug|1||node2|(null)|", ["node3"], ["node2"], "", "node2,node3", " without node3"),
        ("debug|2||node9,node2|(null)|", ["node3"], ["node2"], "", "node9,node3", " without node3, but with node2"),
        ("debug|2||node2|(null)|(null)", ["node3"], [], "", None, "; node3 is not excluded: too few nodes"),
        ("debug|3|||(null)|(null)", ["node3"], [], "", None, "; node3 is not excluded: too few nodes"),
        ("debug|1|node[2-3]||(null)|(null)", ["node3"], [], "", None, "; node3 is not excluded: the job asks"),
        ("debug|1|||weekly|(null)", ["node3"], [], "", None, "; node3 is not excluded: the job asks"),
        ("debug|1|||(null)|(null)", ["login"], [], "", None, "; login is not excluded: partition debug has no"),
        ("", ["node3"], [], "", None, "; node3 is not excluded: SLURM does not say"),
        ("debug|1|||(null)|(null)", ["node3"], [], "Access denied", "node3", "; node3 is not excluded: Access denied"),
        ("debug|1|||(null)|(null)", ["node3", "node2"], [], "", None, ""),  # a file system that failed everywhere
        ("debug|1|||(null)|(null)", [""], [], "", None, ""),
    ],
)
def test_restart_excludes_host_at_fault(tmp_path, monkeypatch, asks, hosts, blamed, refusal, excluded, words):
    """asks: what squeue tells of the job (partition, nodes, required, excluded, reservation, features)."""
    commands = []

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        error = refusal if command[1] == "update" else ""
        output = {"squeue": asks, "sinfo": _NODES}.get(command[0], "")
        return subprocess.CompletedProcess(command, int(bool(error)), output, error)

    monkeypatch.setattr(preemption, "_run", run)
    config = TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="run", output_dir=str(tmp_path))
    config.run_folder.mkdir()
    for restart, names in ((0, blamed), (1, hosts)):
        for rank, host in enumerate(names):
            environment = Environment("slurm", rank=rank, world_size=8, job_id="77", restart_count=restart)
            record_failure(config.run_folder, environment, "CUDA error", kind=HARDWARE.name, host_at_fault=host)
    code, said = finish(config, Environment("slurm", job_id="77", restart_count=1), 75, requeue_on_crash=True)
    assert code == 0
    assert said.startswith(_RETRIED + words) if words else said == _RETRIED
    asked = [command[1:] for command in commands if command[0] == "scontrol"]
    update = [("update", "JobId=77", f"ExcNodeList={excluded}")] if excluded else []
    assert asked == [("requeue", "77"), *update]  # in this order: only a pending job can be changed
