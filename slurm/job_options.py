"""Job options: the resources of a job, submitit's parameters, its batch script and its environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurm.snapshot import SITE_FILE
from training.preemption import parse_time

# Options of sbatch that other flags give, or that the rest relies on
_OURS = ("array", "output", "error", "open_mode", "job_name", "time")
# Until python has its handlers, the signal that asks to save and requeue would kill a rank that has nothing to save.
PYTHON = f"""/bin/sh -c 'trap "" USR2; exec "$@"' sh {shlex.quote(sys.executable)}"""


class LaunchError(RuntimeError):
    """Nothing was submitted; the message says why and what to do."""


def parse_minutes(text: str) -> int:
    """Whole minutes, rounded up, of a time limit as sbatch takes it; 0 for UNLIMITED. Raises LaunchError."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    seconds = parse_time(text)
    if seconds is None:
        raise LaunchError(f"--time {text!r} is none of SLURM's forms: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S")
    return -(-seconds // 60)


@dataclass(frozen=True)
class JobOptions:
    """The resources that a job requests; fields are the flags of the same name (see --help)."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 0
    cpus_per_task: int = 0
    mem: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    dependency: str = ""
    signal_delay: int = 120
    job_name: str = ""
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    array_parallelism: int = 0
    log_folder: str = ""
    snapshot: bool = True
    requeue_on_crash: bool = False
    least_nodes: int = 0

    def __post_init__(self) -> None:
        least = {"nodes": 1, "gpus_per_node": 0, "tasks_per_node": 0, "cpus_per_task": 0, "least_nodes": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise LaunchError(f"--{name} is {getattr(self, name)}; it must be at least {limit}")
        if self.least_nodes and not self.requeue_on_crash:
            raise LaunchError(f"--least_nodes is {self.least_nodes} without --requeue_on_crash; give both")
        if self.signal_delay < 1 or self.array_parallelism < 0:
            raise LaunchError("--signal_delay must be at least 1 and --array_parallelism at least 0")
        if self.time:
            parse_minutes(self.time)
        self.extra()

    @property
    def tasks(self) -> int:
        """Tasks on each node: one a GPU, where nothing else was said."""
        return self.tasks_per_node or self.gpus_per_node or 1

    def extra(self) -> dict[str, Any]:
        """--sbatch as submitit's additional_parameters. Raises LaunchError."""
        found: dict[str, Any] = {"requeue": True, **({"no_kill": True} if self.least_nodes else {})}
        for text in self.sbatch:
            key, equals, value = text.lstrip("-").partition("=")
            key = key.strip().replace("-", "_")
            if not key:
                raise LaunchError(f"--sbatch {text!r} is not KEY=VALUE (such as mail-type=END) or KEY (such as hold)")
            if key in _OURS:
                raise LaunchError(f"--sbatch {key.replace('_', '-')} is set by the launcher (see --job_name, --sweep)")
            found[key] = value if equals else True
        return found


def setup_lines(options: JobOptions, folder: Path, code: Path, has_site_file: bool, restarts: bool) -> list[str]:
    """Shell lines before srun: the site's, the user's, and what makes `import training` mean the code in `code`; with
    `restarts` srun starts the ranks again where it can, as in train.sbatch."""
    site = [
        f". {shlex.quote(str(code / SITE_FILE))}",
        "if declare -F site_setup >/dev/null; then site_setup || exit 2; fi",
    ]
    return [
        "trap : TERM USR1 USR2  # the ranks save; this script outlives them to say how it ended",
        *(site if has_site_file else []),
        *options.setup,
        *(_restart_lines(options, folder, code) if restarts else ()),
        f'srun() {{ {"run_ranks" if restarts else "command srun"} "${{SRUN_OPTIONS[@]:---cpu-bind=cores}}" "$@"; }}',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"cd {shlex.quote(str(code))}  # python -m looks here first",
    ]


def flags_file(folder: Path, task: int | str) -> Path:
    """Where the arguments of a job's task lie, each ended by a zero byte."""
    return folder / f"flags_{task}"


def _restart_lines(options: JobOptions, folder: Path, code: Path) -> list[str]:
    flags = f'{shlex.quote(str(flags_file(folder, "")))}"${{SLURM_ARRAY_TASK_ID:-0}}"'
    wanted = {"REQUEUE_ON_CRASH": int(options.requeue_on_crash), "LEAST_NODES": options.least_nodes}
    return [
        *(f"{name}={value}" for name, value in wanted.items() if value),
        f"SUITE={shlex.quote(str(code))} host_python={shlex.quote(sys.executable)}",
        f"mapfile -d '' -t flags <{flags}",
        '. "$SUITE/slurm/ranks.sh"',
    ]


def submitit_parameters(
    options: JobOptions, name: str, folder: Path, code: Path, has_site_file: bool, tasks: int, restarts: bool
) -> dict[str, Any]:
    """submitit's parameters. None leaves an option to SLURM, or drops one that submitit would set. restarts: whether
    the job script starts ranks again, or requeues the job, where these could not."""
    # Since SLURM 22.05, srun does not take over the batch job's --cpus-per-task.
    cpus = [f"--cpus-per-task={options.cpus_per_task}"] if options.cpus_per_task else []
    return {
        "job_name": options.job_name or name,
        "nodes": options.nodes,
        "ntasks_per_node": options.tasks,
        "gpus_per_node": options.gpus_per_node or None,
        "cpus_per_task": options.cpus_per_task or None,
        "mem": options.mem or None,
        "time": parse_minutes(options.time) if options.time else None,
        **{
            key: getattr(options, key) or None
            for key in ("partition", "account", "qos", "constraint", "exclude", "dependency")
        },
        "signal_delay_s": options.signal_delay,
        "array_parallelism": options.array_parallelism or tasks,
        "wckey": None,  # submitit's default, "submitit", is refused where a site keeps a list of them
        "stderr_to_stdout": True,  # one log a rank
        "setup": setup_lines(options, folder, code, has_site_file, restarts),
        "srun_args": ["--kill-on-bad-exit=1", "--wait=0", "--open-mode=append", *cpus],
        "additional_parameters": options.extra(),
    }


@contextmanager
def clean_environment() -> Iterator[None]:
    """Without variables that describe another job or launcher: sbatch hands the environment on to the job."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    if "SLURM_JOB_ID" in os.environ:
        names |= {name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_"))}
    names -= {"SLURM_CONF", "SLURM_CLUSTERS"}
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def new_folder(parent: Path, name: str) -> Path:
    """A folder for a job that no other job has."""
    stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise LaunchError(f"{parent} holds too many jobs of this second")
