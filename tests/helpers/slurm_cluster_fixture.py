"""A real SLURM for tests: `Cluster` submits jobs, waits for them, reads their output, and breaks and repairs nodes.

The fixture `cluster` (conftest.py) gives the session's only one: node1 to node4 with pretended CPUs and GPUs.
slurm_cluster.sh starts it; the configuration there says which partitions there are and how long SLURM waits for what.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

SCRIPT = Path(__file__).resolve().with_name("slurm_cluster.sh")
CANNOT_RUN = 3  # exit status of SCRIPT
COMPLETED = "COMPLETED"
TERMINAL = (COMPLETED, "PREEMPTED", "CANCELLED", "TIMEOUT", "FAILED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL")
# `scontrol show job` gives these a line of their own, since they may contain anything but a line's end.
_WHOLE_LINES = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment")
_LAST_STEP = 0xFFFF_FF00  # greater step ids are SLURM's own: batch script, extern step, interactive step
_POLL = 0.2
SMALL_DISK_BYTES = 8_000_000

Job = dict[str, str]
T = TypeVar("T")


class CannotRun(Exception):
    """This machine cannot run a SLURM; the message says why."""


def obstacle() -> str | None:
    """Why this machine cannot run a SLURM, as far as can be told without trying; None where nothing is in the way."""
    if os.geteuid() != 0:
        return "a SLURM for tests needs root"
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    if not shutil.which("slurmctld", path=path) and not shutil.which("apt-get", path=path):
        return "SLURM is not installed and there is no apt-get to install it"
    return None


def free_ports(count: int) -> int:
    """The first of `count` adjacent free TCP ports, below the range in which jobs and the kernel choose theirs."""
    for _ in range(100):
        first = random.SystemRandom().randrange(10_000, 19_000)  # not the seeded generator, equal in all test runs
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise CannotRun(f"no {count} adjacent free ports in 10000..19000")


def parse_jobs(text: str) -> list[Job]:
    """The records of `scontrol show job` (without -o, where a Command may contain what looks like a field)."""
    jobs = []
    for record in re.split(r"\n\s*\n", text):
        job: Job = {}
        for line in filter(None, map(str.strip, record.splitlines())):
            key, _, value = line.partition("=")
            if key in _WHOLE_LINES:
                job[key] = value
            else:
                # A value ends where the next key begins: a JobName may contain spaces.
                fields = re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|$)", line)
                job.update((name, content.strip()) for name, content in fields)
        if "JobId" in job:
            jobs.append(job)
    return jobs


def _severity(job: Job) -> int:
    """Jobs that still run are worse than those that ended, completed ones best."""
    return TERMINAL.index(job["JobState"]) if job["JobState"] in TERMINAL else len(TERMINAL)


def _node_name(node: int | str) -> str:
    return node if isinstance(node, str) else f"node{node}"


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


class Cluster:
    """The SLURM of one `prefix` folder.

    Attributes: nodes and gpus (of each node); environment, with which commands of this SLURM are to be run, and which
    jobs inherit; folder, where jobs start and write their output unless told otherwise (the fixture sets it to the
    running test's tmp_path).
    """

    def __init__(self, prefix: Path, nodes: int = 4, gpus: int = 4) -> None:
        self.prefix, self.nodes, self.gpus = prefix, nodes, gpus
        self.folder = prefix
        self.small_disk = prefix / "small_disk"  # a file system of SMALL_DISK_BYTES, to be filled
        self.kept: set[str] = set()  # jobs that outlive the test that submitted them: drain() leaves them alone
        self._killed: set[str] = set()
        # Variables of other jobs, ranks and GPUs must not reach these jobs.
        foreign = re.compile(r"SLURM|SBATCH|SRUN|MASTER_(ADDR|PORT)$|(LOCAL_)?RANK$|WORLD_SIZE$|CUDA_VISIBLE_DEVICES$")
        self.environment = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        self.environment["SLURM_CONF"] = str(prefix / "etc" / "slurm.conf")

    # ---- the cluster ------------------------------------------------------------------------------------------------

    def _script(self, *arguments: object, **settings: object) -> None:
        """Run slurm_cluster.sh for this prefix. Raises CannotRun or AssertionError with what it printed."""
        environment = {**self.environment, "SLURM_TEST_PREFIX": str(self.prefix)}
        environment.update((name, str(value)) for name, value in settings.items())
        command = [str(SCRIPT), *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=700, check=False
        )
        if done.returncode == CANNOT_RUN:
            raise CannotRun(done.stderr.strip())
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"

    def start(self) -> None:
        """Install SLURM where it is absent and start; the cluster ends with this process even if that is killed.

        Raises CannotRun where this machine cannot.
        """
        self._script("install")
        self.small_disk.mkdir(exist_ok=True)  # mounted before the nodes take their view of the file systems
        size = f"size={SMALL_DISK_BYTES}"
        self.command("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.small_disk))
        port = free_ports(1 + self.nodes)
        self._script("start", self.nodes, self.gpus, SLURM_TEST_PORT=port, SLURM_TEST_OWNER=os.getpid())

    def stop(self) -> None:
        """End every process of the cluster and of its jobs."""
        self._script("stop")
        self.command("umount", "--lazy", str(self.small_disk), check=False)

    def command(self, *arguments: object, check: bool = True, **settings) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM in this cluster; a failure is an AssertionError with its messages."""
        settings = {"env": self.environment, "timeout": 300, **settings}
        words = list(map(str, arguments))
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **settings)
        assert not check or done.returncode == 0, f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}"
        return done

    def scontrol(self, *arguments: object) -> str:
        """What `scontrol` prints."""
        return self.command("scontrol", *arguments).stdout

    def scancel(self, *arguments: object) -> str:
        """What `scancel` prints."""
        return self.command("scancel", *arguments).stdout

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def sbatch(
        self,
        script: Path | str,
        *arguments: object,
        options: Sequence[object] = (),
        env: Mapping[str, object] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Submit `script` (a file, or its text if it begins with #!) and return the job id.

        options: for sbatch. env: variables beside those of self.environment. cwd: otherwise self.folder. Without an
        --output among the options, what the job prints goes to self.folder, whatever the script's #SBATCH lines say.
        """
        options = list(map(str, options))
        if not any(re.match(r"-o|--output(=|$)", option) for option in options):
            array = any(re.match(r"-a|--array(=|$)", option) for option in options)
            options += ["--output", str(self.folder / ("slurm-%A_%a.out" if array else "slurm-%j.out"))]
        text = str(script)
        source = ["/dev/stdin"] if text.startswith("#!") else [text]
        environment = {**self.environment, **{name: str(value) for name, value in (env or {}).items()}}
        command = ["sbatch", "--parsable", *options, *source, *map(str, arguments)]
        done = subprocess.run(
            command,
            env=environment,
            cwd=cwd or self.folder,
            input=text if text.startswith("#!") else "",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
        return done.stdout.strip().partition(";")[0]  # "id;cluster" in a federation

    def jobs(self) -> list[Job]:
        """Every job that slurmctld remembers, each as its fields in `scontrol show job`."""
        return parse_jobs(self.scontrol("show", "job"))

    def tasks(self, job_id: str) -> list[Job]:
        """The records of one job: several for an array, one of them for all tasks that have not started."""
        return parse_jobs(self.scontrol("show", "job", job_id))

    def job(self, job_id: str) -> Job:
        """The fields of a job in `scontrol show job`; of an array's tasks, the one with the worst state."""
        return max(self.tasks(job_id), key=_severity)

    def hosts(self, job_id: str) -> list[str]:
        """The nodes of a job that runs or has run."""
        return self.scontrol("show", "hostnames", self.job(job_id)["NodeList"]).split()

    def output_files(self, job_id: str) -> list[Path]:
        """The existing files that a job and its array tasks print to, standard output first."""
        tasks = self.tasks(job_id)
        paths = [task[key] for key in ("StdOut", "StdErr") for task in tasks if key in task]
        return [path for path in map(Path, dict.fromkeys(paths)) if path.is_file()]

    def output(self, job_id: str) -> str:
        """What a job has printed so far (of an array: all tasks), to standard output and then to standard error."""
        return "".join(path.read_text(errors="replace") for path in self.output_files(job_id))

    def pids(self, job_id: str) -> dict[int, int]:
        """Process ids by rank of the tasks in the job's running step, empty where none runs.

        They are the processes that srun itself started, not their children. After a requeue, tasks of the first run
        may live on where slurmd was killed: the latest run counts, and in it the latest step.
        """
        raw = self.job(job_id)["JobId"]  # the environment of an array task has this number, not 7_1
        found: dict[tuple[int, int], dict[int, int]] = {}
        for pid, variables in self._job_processes():
            step = int(variables.get("SLURM_STEP_ID", _LAST_STEP))  # a batch script has none
            is_task = variables.get("SLURM_TASK_PID") == str(pid) and step < _LAST_STEP
            if is_task and variables["SLURM_JOB_ID"] == raw:
                run = int(variables.get("SLURM_RESTART_COUNT", "0"))
                found.setdefault((run, step), {})[int(variables["SLURM_PROCID"])] = pid
        return dict(sorted(found[max(found)].items())) if found else {}

    def _job_processes(self) -> list[tuple[int, dict[str, str]]]:
        """Process id and environment of everything that jobs of this cluster have started: batch scripts, tasks, ..."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # ended meanwhile
            variables = dict(entry.partition("=")[::2] for entry in entries)
            if variables.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in variables:
                found.append((int(process.name), variables))
        return found

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def describe(self, *job_ids: str) -> str:
        """What is known about jobs (without ids: about the cluster), for the message of a failed test."""
        jobs = [job for job_id in job_ids for job in self.tasks(job_id)] if job_ids else self.jobs()
        shown = job_ids or sorted({job["JobId"] for job in jobs if job["JobState"] not in TERMINAL})
        lines = [f"nodes: {self.node_states()}"]
        lines += [" ".join(f"{key}={value}" for key, value in job.items()) for job in jobs]
        lines += [f"---- end of the output of job {job_id}\n{_tail(self.output(job_id), 40)}" for job_id in shown]
        log = self.prefix / "log" / "slurmctld.log"
        lines.append(f"---- end of {log}\n{_tail(log.read_text(errors='replace'), 12)}")
        return "\n".join(lines)

    def wait_for(self, condition: Callable[[], T], timeout: float, what: str, *job_ids: str) -> T:
        """Poll until `condition` is true and return its value; AssertionError with the state of things otherwise.

        A condition that raises AssertionError ends the waiting, with that error and the state of things.
        """
        end = time.monotonic() + timeout
        while True:
            last = time.monotonic() > end  # before the condition: it is always asked once more after a pause
            try:
                if value := condition():
                    return value
            except AssertionError as error:
                raise AssertionError(f"while waiting for {what}: {error}\n{self.describe(*job_ids)}") from None
            if last:
                raise AssertionError(f"{what}: not within {timeout:g} s\n{self.describe(*job_ids)}")
            time.sleep(_POLL)

    def wait(self, job_id: str, *states: str, timeout: float = 300) -> Job:
        """Wait until a job (an array: all its tasks) is in one of `states`, by default any that is final.

        Returns its fields (an array: those of the worst task). AssertionError at once where it ends in another state.
        """
        wanted = states or TERMINAL

        def reached() -> Job | None:
            tasks = self.tasks(job_id)
            states = {task["JobState"] for task in tasks}
            lost = states.intersection(TERMINAL).difference(wanted)
            assert not lost, f"the job is {', '.join(sorted(lost))}"
            return max(tasks, key=_severity) if states.issubset(wanted) else None

        job = self.wait_for(reached, timeout, f"job {job_id} {'/'.join(wanted)}", job_id)
        assert job is not None
        return job

    def wait_until_output(self, job_id: str, text: str, timeout: float = 300) -> str:
        """Wait until a job has printed `text`, and return all its output; AssertionError at once where it ended."""

        def printed() -> str | None:
            ended = self.job(job_id)["JobState"] in TERMINAL  # asked first: what it printed last must count
            output = self.output(job_id)
            assert text in output or not ended, "the job ended without printing it"
            return output if text in output else None

        return self.wait_for(printed, timeout, f"{text!r} in the output of job {job_id}", job_id) or ""

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """The state of each node as in sinfo: idle, mixed, allocated, down, ..., with * where it is silent."""
        listing = self.command("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T").stdout
        return dict(line.split() for line in listing.splitlines())

    def kill_node(self, node: int | str, tasks: bool = False) -> None:
        """Kill a node's slurmd, and with `tasks` everything on it; SLURM notices after 20 to 30 s.

        Without `tasks` the ranks on it continue, as on a node that lost its network.
        """
        name = _node_name(node)
        self._killed.add(name)
        self._script("crash-node" if tasks else "kill-node", name.removeprefix("node"))

    def start_node(self, node: int | str, timeout: float = 120) -> None:
        """Start the slurmd of a node that has none, and wait until SLURM can use the node."""
        name = _node_name(node)
        self._script("start-node", name.removeprefix("node"))
        usable = ("idle", "mixed", "allocated", "completing")
        self.wait_for(lambda: self.node_states()[name] in usable, timeout, f"{name} usable")
        self._killed.discard(name)

    def down(self, node: int | str, reason: str = "test") -> None:
        """Declare a node DOWN: SLURM ends its jobs or requeues them."""
        self.scontrol("update", f"NodeName={_node_name(node)}", "State=DOWN", f"Reason={reason}")

    def resume(self, node: int | str) -> None:
        """Undo down()."""
        self.scontrol("update", f"NodeName={_node_name(node)}", "State=RESUME")

    def drain(self, timeout: float = 120) -> None:
        """Cancel and kill every job but the kept ones, repair every node, and wait until nothing else runs."""

        def queued() -> set[str]:
            return set(self.command("squeue", "--noheader", "--format=%A").stdout.split()) - self.kept

        jobs = queued()
        if jobs:
            self.command("scancel", *jobs, check=False)  # which fails for jobs that end at this moment
            for pid, variables in self._job_processes():  # scancel alone gives those that ignore TERM some KillWait
                if variables["SLURM_JOB_ID"] not in self.kept:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        # A kept job may be about a node that does not answer: such nodes wait for the drain after it.
        for name in [] if self.kept else sorted(self._killed):
            self._script("crash-node", name.removeprefix("node"))  # the tasks that outlived their slurmd
            self.start_node(name, timeout)

        def idle() -> bool:
            states = self.node_states()
            for name, state in states.items():
                if state.startswith(("down", "drain")) and name not in self._killed:
                    self.command("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
            usable = {"idle", "mixed", "allocated"} if self.kept else {"idle"}
            repaired = {state for name, state in states.items() if name not in self._killed}
            return repaired <= usable and not queued()

        self.wait_for(idle, timeout, "all nodes idle")
