"""Which process of which job this is: one frozen value parsed from SLURM's, torchrun's or no environment.

Nothing is read at import time. A partial or contradictory environment is refused with the names of what is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
_PORT_BASE, _PORT_COUNT = 20000, 12000  # below Linux's default range of ephemeral ports, which starts at 32768


class EnvironmentProblem(ValueError):
    """The launcher's environment variables cannot be used; the message names them and the remedy."""


@dataclass(frozen=True)
class Environment:
    """This process's place in a distributed job.

    launcher: "slurm", "torchrun" or "none" (one process). rank: 0 .. world_size-1. local_rank: number of the process
    on its node. master_addr, master_port: where rank 0 listens. job_id and restart_count are SLURM's.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    job_id: str | None = None
    restart_count: int = 0


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise EnvironmentProblem(f"environment variable {name} is {variables[name]!r}, not a whole number") from None


def _split_node_list(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def expand_node_list(text: str) -> list[str]:
    """Host names of a SLURM node list such as `gpu[01-03,7],login1` (without calling scontrol).

    Raises EnvironmentProblem for a list that does not follow SLURM's syntax.
    """
    hosts = []
    for part in _split_node_list(text):
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


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Parse environment `variables` (usually os.environ).

    torchrun's variables win over SLURM's, since torchrun may run inside a SLURM job. Raises EnvironmentProblem where
    some of a launcher's variables are set and others missing, or where they contradict each other.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        missing = [name for name in _TORCHRUN if name not in variables]
        if missing:
            raise EnvironmentProblem(
                f"RANK or WORLD_SIZE is set but {', '.join(missing)} not: start with torchrun or srun, or unset them"
            )
        environment = Environment(
            launcher="torchrun",
            rank=_integer(variables, "RANK"),
            local_rank=_integer(variables, "LOCAL_RANK"),
            world_size=_integer(variables, "WORLD_SIZE"),
            nodes=int(variables.get("GROUP_WORLD_SIZE", "1")),
            master_addr=variables["MASTER_ADDR"],
            master_port=_integer(variables, "MASTER_PORT"),
            job_id=variables.get("SLURM_JOB_ID"),
            restart_count=int(variables.get("SLURM_RESTART_COUNT", "0")),
        )
    elif "SLURM_PROCID" in variables:
        missing = [name for name in _SLURM if name not in variables]
        if missing:
            raise EnvironmentProblem(
                f"SLURM_PROCID is set but {', '.join(missing)} not: start the script with srun inside an allocation"
            )
        job_id = variables["SLURM_JOB_ID"]
        environment = Environment(
            launcher="slurm",
            rank=_integer(variables, "SLURM_PROCID"),
            local_rank=_integer(variables, "SLURM_LOCALID"),
            world_size=_integer(variables, "SLURM_NTASKS"),
            nodes=int(variables.get("SLURM_JOB_NUM_NODES", "1")),
            master_addr=variables.get("MASTER_ADDR") or _first_host(variables["SLURM_JOB_NODELIST"]),
            master_port=_integer(variables, "MASTER_PORT")
            if "MASTER_PORT" in variables
            else _PORT_BASE + _integer(variables, "SLURM_JOB_ID") % _PORT_COUNT,
            job_id=job_id,
            restart_count=int(variables.get("SLURM_RESTART_COUNT", "0")),
        )
    else:
        return Environment(launcher="none")
    if not 0 <= environment.rank < environment.world_size:
        raise EnvironmentProblem(
            f"rank {environment.rank} does not fit a world of {environment.world_size} processes: "
            f"the variables of {environment.launcher} contradict each other"
        )
    return environment


def local_device_index(local_rank: int, visible_devices: int) -> int:
    """Which of the visible GPUs this process uses: its own where all are visible, the only one where one is.

    Raises EnvironmentProblem where the node has fewer GPUs than processes.
    """
    if visible_devices == 1:
        return 0  # --gpus-per-task=1 shows each task its own device under the number 0
    if local_rank >= visible_devices:
        raise EnvironmentProblem(
            f"process {local_rank} of this node has no GPU of its own: {visible_devices} are visible; "
            "start as many tasks a node as it has GPUs (--ntasks-per-node)"
        )
    return local_rank
