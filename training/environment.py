"""Which process of which job this is: one frozen value parsed from SLURM's, torchrun's or no environment.

Nothing is read at import time. A partial or contradictory environment is refused with the names of what is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMIT_FILE = "GIT_COMMIT"  # of a copy of the code, which is no checkout, for a job
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
RESTARTS = "TRAINING_RESTARTS"  # variable of train.sbatch: the starts of the job before this one
_PORT_STEP = 997
_PORT_BASE, _PORT_COUNT = 20000, 12000  # below Linux's default range of ephemeral ports, which starts at 32768


class EnvironmentProblem(ValueError):
    """The launcher's environment variables cannot be used; the message names them and the remedy."""


@dataclass(frozen=True)
class Environment:
    """This process's rank in a distributed job.

    launcher: "slurm", "torchrun" or "none" (one process). rank: 0 .. world_size-1. local_rank: number of the process
    on its node, of local_world_size there. node_rank: number of the node, of `nodes`. master_addr, master_port: where
    rank 0 listens.

    job_id: SLURM's name of the job, "123" or "123_4" in an array, also under torchrun and for one process inside a
    job; None outside. restart_count: how often it has been started again, by SLURM (requeues) or by the job script
    within its allocation. end_time: when its time limit is up (Unix seconds), None where the environment does not say
    (SLURM before 22.05.3 or so: ask training.preemption).
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    job_id: str | None = None
    restart_count: int = 0
    requeues: int = 0
    end_time: float | None = None


def _integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in variables and default is not None:
        return default
    try:
        return int(variables[name])
    except ValueError:
        raise EnvironmentProblem(f"environment variable {name} is {variables[name]!r}, not a whole number") from None


def expand_node_list(text: str) -> list[str]:
    """Host names of a SLURM node list such as `gpu[01-03,7],login1` (without calling scontrol). Raises
    EnvironmentProblem for a list that does not follow SLURM's syntax."""
    hosts = []
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):  # at commas outside brackets
        if not re.fullmatch(r"(?:[^\[\]\s]+|\[[^\[\]\s]+\])+", part):
            raise EnvironmentProblem(f"node list {text!r} does not follow SLURM's syntax")
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]*)(?:\[([^\[\]]*)\])?", part):
            names = [name + literal for name in names]
            if ranges:
                values = []
                for item in ranges.split(","):
                    match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
                    if not match:
                        raise EnvironmentProblem(
                            f"node list {text!r} has the range {item!r}, which is not SLURM's syntax"
                        )
                    low, high = match[1], match[2] or match[1]
                    values += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
                names = [name + value for name in names for value in values]
        hosts += names
    if not hosts:
        raise EnvironmentProblem(f"node list {text!r} does not follow SLURM's syntax")
    return hosts


def _first_host(node_list: str) -> str:
    """The first host of a job's node list: rank 0 runs there."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", node_list]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if found.returncode == 0 and found.stdout.split():
            return found.stdout.split()[0]
    return expand_node_list(node_list)[0]


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from SLURM's short form: "2(x3),1" is [2, 2, 2, 1]. Raises EnvironmentProblem."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise EnvironmentProblem(f"SLURM's tasks per node are {text!r}, which is not its syntax")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _job(variables: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the job that this process is in; none outside jobs."""
    job_id = variables.get("SLURM_JOB_ID")
    if job_id is None:
        return {}
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        # An array's first job has the number of the whole array: a requeue by that would hit every task.
        job_id = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    end, requeues = variables.get("SLURM_JOB_END_TIME", ""), _integer(variables, "SLURM_RESTART_COUNT", 0)
    return {
        "job_id": job_id,
        "restart_count": max(requeues, _integer(variables, RESTARTS, 0)),
        "requeues": requeues,
        "end_time": float(end) if end.isdigit() else None,
    }


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        raise EnvironmentProblem(
            f"RANK or WORLD_SIZE is set but {', '.join(missing)} not: start with torchrun or srun, or unset them"
        )
    return Environment(
        launcher="torchrun",
        rank=_integer(variables, "RANK"),
        local_rank=_integer(variables, "LOCAL_RANK"),
        world_size=_integer(variables, "WORLD_SIZE"),
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", _integer(variables, "WORLD_SIZE")),
        nodes=_integer(variables, "GROUP_WORLD_SIZE", 1),
        node_rank=_integer(variables, "GROUP_RANK", 0),
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        **_job(variables),
    )


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _SLURM if name not in variables]
    if missing:
        raise EnvironmentProblem(
            f"SLURM_PROCID is set but {', '.join(missing)} not: start the script with srun inside an allocation"
        )
    world_size = _integer(variables, "SLURM_STEP_NUM_TASKS", _integer(variables, "SLURM_NTASKS"))
    if world_size > 1 and "SLURM_STEP_ID" not in variables:
        # The batch script itself carries the variables of a task 0, and would wait for the others for ever.
        raise EnvironmentProblem(
            f"the job has {world_size} tasks but SLURM_STEP_ID is not set: this process was started by the batch "
            "script itself; put srun in front of python"
        )
    hosts = variables.get("SLURM_STEP_NODELIST", variables["SLURM_JOB_NODELIST"])
    nodes = _integer(variables, "SLURM_STEP_NUM_NODES", _integer(variables, "SLURM_JOB_NUM_NODES", 1))
    node_rank = _integer(variables, "SLURM_NODEID", 0)
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", ""))
    per_node = tasks_per_node(tasks) if tasks else [-(-world_size // nodes)] * nodes
    if tasks and (sum(per_node) != world_size or len(per_node) != nodes or node_rank >= nodes):
        raise EnvironmentProblem(
            f"SLURM's variables contradict each other: {world_size} tasks on {nodes} nodes, {tasks} tasks per node, "
            f"and this is node {node_rank}; unset those that were exported by hand"
        )
    job = _job(variables)
    # Another one at each start: what is left of the last may still hold its own.
    port = _PORT_BASE + (_integer(variables, "SLURM_JOB_ID") + _PORT_STEP * job["restart_count"]) % _PORT_COUNT
    return Environment(
        launcher="slurm",
        rank=_integer(variables, "SLURM_PROCID"),
        local_rank=_integer(variables, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=per_node[node_rank],
        nodes=nodes,
        node_rank=node_rank,
        master_addr=variables.get("MASTER_ADDR") or _first_host(hosts),
        master_port=_integer(variables, "MASTER_PORT", port),
        **job,
    )


def read_environment(variables: Mapping[str, str], alone: bool = False) -> Environment:
    """Parse environment `variables` (usually os.environ).

    torchrun's variables win over SLURM's, since torchrun may run inside a SLURM job. `alone`: this is a program of one
    process whatever the launcher says; only the job it is in matters. Raises EnvironmentProblem where some of a
    launcher's variables are set and others missing, or where they contradict each other.
    """
    if alone or not {"RANK", "WORLD_SIZE", "SLURM_PROCID"} & set(variables):
        in_job = "SLURM_PROCID" in variables  # and not merely in a shell on a login node that once saw a job
        return Environment("none", **(_job(variables) if in_job else {}))
    torchrun = "RANK" in variables or "WORLD_SIZE" in variables
    environment = _from_torchrun(variables) if torchrun else _from_slurm(variables)
    for number, size, what in (
        (environment.rank, environment.world_size, "rank"),
        (environment.local_rank, environment.local_world_size, "local rank"),
    ):
        if not 0 <= number < size:
            raise EnvironmentProblem(
                f"{what} {number} does not fit a world of {size} processes: "
                f"the variables of {environment.launcher} contradict each other"
            )
    return environment


def local_device_index(local_rank: int, visible_devices: int) -> int:
    """Which of the visible GPUs this process uses: its own where all are visible, the only one where one is. Raises
    EnvironmentProblem where the node has fewer GPUs than processes."""
    if visible_devices == 1:
        return 0  # --gpus-per-task=1 shows each task its own device under the number 0
    if local_rank >= visible_devices:
        raise EnvironmentProblem(
            f"process {local_rank} of this node has no GPU of its own: {visible_devices} are visible; "
            "start as many tasks a node as it has GPUs (--ntasks-per-node)"
        )
    return local_rank


def git(root: Path, *arguments: str) -> str | None:
    """What git prints about the repository whose top is `root`; None where there is no git or no such repository."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")
