"""Environments of launchers: parsed once, partial and contradictory ones refused by name; signals set a flag."""

from __future__ import annotations

import os
import signal

import pytest

from slurm.environment import EnvironmentProblem, expand_node_list, local_device_index, read_environment
from slurm.preemption import StopSignals

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NUM_NODES": "2",
}
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
    other = read_environment({**SLURM, "SLURM_JOB_ID": "123457"})
    assert other.master_port != found.master_port  # two jobs on one node do not collide


def test_torchrun_wins_inside_a_slurm_job():
    found = read_environment({**SLURM, **TORCHRUN})
    assert (found.launcher, found.rank, found.world_size) == ("torchrun", 1, 2)
    assert (found.master_addr, found.master_port, found.job_id) == ("10.0.0.1", 1234, "123456")


def test_no_launcher_is_one_process():
    found = read_environment({"HOME": "/"})
    assert (found.launcher, found.rank, found.world_size) == ("none", 0, 1)


@pytest.mark.parametrize("missing", [name for name in SLURM if name not in ("SLURM_PROCID", "SLURM_JOB_NUM_NODES")])
def test_a_partial_slurm_environment_names_what_is_missing(missing):
    with pytest.raises(EnvironmentProblem, match=missing):
        read_environment({name: value for name, value in SLURM.items() if name != missing})


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"])
def test_a_partial_torchrun_environment_names_what_is_missing(missing):
    with pytest.raises(EnvironmentProblem, match=missing):
        read_environment({name: value for name, value in TORCHRUN.items() if name != missing})


def test_contradictions_and_nonsense_are_refused():
    with pytest.raises(EnvironmentProblem, match="rank 9 does not fit"):
        read_environment({**TORCHRUN, "RANK": "9"})
    with pytest.raises(EnvironmentProblem, match="'two'"):
        read_environment({**TORCHRUN, "WORLD_SIZE": "two"})


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
