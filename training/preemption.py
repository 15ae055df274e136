"""Preemption: the signals and the time limit upon which a run saves and stops, and SLURM's queue of jobs.

Signals set a flag, and the training loop acts on it at the next step boundary, or the next batch of an evaluation.

The queue is asked by squeue, scontrol and sinfo: `sacct` is disabled on many clusters, and SLURM forgets an ended job
after a few minutes. Where the commands are missing (in a container), the job script has put the time limit into the
environment and does the requeue itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType

from training.config import TrainingConfig
from training.environment import Environment, expand_node_list
from training.errors import GAVE_UP
from training.status import Attempt, begin_attempt, end_attempt

_LIMIT_SECONDS = 900.0  # before the time limit in which a signal may be SLURM's warning that it comes near (--signal)
_QUERY_SECONDS = 15.0  # between queries once the limit is near: it may have been extended

_REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Context manager that turns stop signals into `received`; of further ones only the third Ctrl-C changes anything.

    SIGUSR1, SIGUSR2, SIGTERM and SIGHUP (a closed terminal) ask to save and, in a SLURM job, to be started again;
    SIGINT asks to save and end. Rank 0 says so at once, whatever its main thread waits for.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received: str | None = None
        self.stopped_early = False  # set by whoever acts on a stop, for the caller to know
        self._numbers = numbers or (signal.SIGINT, *_REQUEUE_SIGNALS)
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._presses, self._reported = 0, False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name

    def install(self, *numbers: signal.Signals) -> None:
        """Handle these signals too, until the context ends."""
        for number in numbers:
            ignored = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN  # nohup
            if number not in self._previous and not ignored:
                self._previous[number] = signal.signal(number, self._handle)

    def __enter__(self) -> StopSignals:
        self.install(*self._numbers)
        if self._pipe is None:
            # Python's handlers wait for the main thread, which may be inside a collective; this byte does not.
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._report_all, args=(self._pipe[0],), daemon=True).start()
        return self

    def _report_all(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            self._report(number[0])
        os.close(pipe)

    def _report(self, number: int) -> None:
        """Print what a signal does; the third Ctrl-C does it."""
        if number not in self._previous:
            return
        self._presses += number == signal.SIGINT
        if number != signal.SIGINT or self._presses == 1:
            more = "; Ctrl-C twice more ends it now, without saving" if number == signal.SIGINT else ""
            words = f"{signal.Signals(number).name}: the run finishes this step or batch, saves and stops{more}"
            if self._reported:
                return
            self._reported = True
        elif self._presses == 2:
            words = "the run is about to save; Ctrl-C once more ends it now, and what is not saved is lost"
        else:
            words = "ended by the third Ctrl-C: the same command resumes from the last checkpoint"
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            with contextlib.suppress(OSError):  # the console may be what is gone
                os.write(2, f"\n{words}\n".encode())
        if self._presses > 2:
            os._exit(128 + signal.SIGINT)

    def __exit__(self, *_exception: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])
            self._pipe = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        self._previous.clear()


def early_signals() -> StopSignals:
    """Handlers for the time before training begins: importing torch takes seconds in which SLURM may send a signal.
    Only inside a SLURM job. Elsewhere SIGTERM and Ctrl-C end a program that has not begun, as everyone expects."""
    signals = StopSignals(*_REQUEUE_SIGNALS)
    return signals.__enter__() if "SLURM_JOB_ID" in os.environ else signals


class TimeLimit:
    """The job's time limit: a clock at every step, and a query of SLURM only near the end."""

    def __init__(self, environment: Environment):
        self._job_id = environment.job_id
        self._end: float | None = None  # on time.monotonic()
        self._next_query = 0.0
        if self._job_id is None:
            return
        if not self._update() and environment.end_time is not None:
            self._end = time.monotonic() + environment.end_time - time.time()

    def _update(self) -> bool:
        job = query_job(self._job_id) if self._job_id is not None else None
        if job is None:
            return False
        self._end = None if job.seconds_left is None else time.monotonic() + job.seconds_left
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the limit; None where there is none."""
        return None if self._end is None else self._end - time.monotonic()

    def reached(self, lead: float) -> bool:
        """Whether fewer than `lead` seconds are left; a query confirms it, since the limit may have been moved."""
        left = self.seconds_left
        if left is None or left > lead:
            return False
        if time.monotonic() >= self._next_query:
            self._next_query = time.monotonic() + _QUERY_SECONDS
            self._update()
            left = self.seconds_left
        return left is not None and left <= lead


# Starts of a job


class RestartRefused(RuntimeError):
    """The job has been restarted too often, or without progress; the message says which."""

    kind = GAVE_UP


def register_attempt(config: TrainingConfig, environment: Environment, newest_step: int) -> Attempt:
    """Register this start of the run. Raises RestartRefused where the job goes round in circles."""
    attempt = begin_attempt(config.run_folder, environment, newest_step)
    reason = None
    if environment.restart_count > config.max_restarts:
        reason = f"it has been restarted {environment.restart_count} times (--max_restarts {config.max_restarts})"
    elif attempt.without_progress >= config.max_fruitless_starts:
        reason = (
            f"its last {attempt.without_progress} starts left no new checkpoint behind (the newest is of step "
            f"{newest_step}); look for the cause in the log, allow more time or lower --save_every, and submit it anew "
            f"(--max_fruitless_starts {config.max_fruitless_starts})"
        )
    if reason:
        raise RestartRefused(f"job {environment.job_id} stops here: {reason}")
    return attempt


def excuse_attempt(config: TrainingConfig, environment: Environment) -> None:
    """Note that a signal ends this start: that nothing was saved is no sign of a crash, unless its time was up."""
    left = TimeLimit(environment).seconds_left
    if left is None or left > _LIMIT_SECONDS:
        with contextlib.suppress(OSError):
            end_attempt(config.run_folder, environment)


# SLURM's queue

_STEP_SECONDS = 10  # within which a healthy host starts a process
_COMMAND_SECONDS = 30  # a busy controller may take long to answer

# States of a job before it runs, for the first time or again
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# States after which SLURM does no more, with the reason for people
ENDED = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "cancelled (scancel)",
    "COMPLETED": "",
    "DEADLINE": "its deadline passed",
    "FAILED": "",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than the job has (--mem)",
    "PREEMPTED": "preempted, and not requeued",
    "REVOKED": "",
    "TIMEOUT": "the time limit came before it could save (--time, --signal_delay)",
}

REQUEUED, CANCELLED, NO_COMMAND, REFUSED = "requeued", "cancelled", "no scontrol", "refused"


class SlurmUnreachable(RuntimeError):
    """SLURM's commands are missing or its controller does not answer."""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. Raises SlurmUnreachable where there is none or it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except FileNotFoundError:
        raise SlurmUnreachable(f"{command[0]} is not installed on this host") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnreachable(f"{command[0]} does not answer: {error}") from None


def _query(*command: str) -> str:
    """What a command of SLURM prints; "" where it says that there is no such job. Raises SlurmUnreachable."""
    done = _run(*command)
    if done.returncode == 0:
        return done.stdout
    if "invalid job id" in done.stderr.lower():
        return ""
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    raise SlurmUnreachable(f"{command[0]}: {reason}")


def parse_time(text: str) -> int | None:
    """Seconds of a time as SLURM takes and prints it; None for UNLIMITED, INVALID and the like. Its forms: minutes,
    M:S, H:M:S, D-H, D-H:M and D-H:M:S. So 4:00 is four minutes, and 4:00:00 four hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


# One job, as its own ranks see it


@dataclass(frozen=True)
class JobStatus:
    """What SLURM says about a job now. seconds_left: until its time limit; None where it has none, or where it is over.
    restarts: requeues so far."""

    state: str
    seconds_left: int | None
    restarts: int

    @property
    def cancelled(self) -> bool:
        """Whether somebody has ended the job. `scontrol requeue` would bring even such a job back. While its processes
        end, a job is COMPLETING whatever the reason; only one that ran out of time has none left."""
        return self.state == "CANCELLED" or (self.state == "COMPLETING" and (self.seconds_left or 0) > 0)


def query_job(job_id: str) -> JobStatus | None:
    """The status of a job; None where SLURM cannot be queried or does not know the job."""
    fields = "--Format=State:.30,TimeLeft:.30,RestartCnt:.12"
    try:
        words = _query("squeue", "--noheader", "--states=all", "--jobs", job_id, fields).split()
    except SlurmUnreachable:
        return None
    if len(words) != 3 or not words[2].isdigit():
        return None
    return JobStatus(words[0], parse_time(words[1]), int(words[2]))


def requeue(job_id: str, requeues: int) -> tuple[str, str]:
    """Have SLURM start this job again; to be called by one process only.

    requeues: SLURM's restart count, as this start was given it. Returns an outcome and, where refused, the reason:
    REQUEUED (also where SLURM does so already), CANCELLED (somebody ended the job: leave it), NO_COMMAND (no scontrol
    here) or REFUSED (such as a job of --no-requeue).
    """
    job = query_job(job_id)
    if job is not None:
        if job.restarts > requeues or job.state in WAITING:
            return REQUEUED, ""
        if job.cancelled:
            return CANCELLED, ""
    try:
        done = _run("scontrol", "requeue", job_id)
    except SlurmUnreachable:
        return NO_COMMAND, ""
    if done.returncode == 0 or "pending" in done.stderr.lower():  # pending: a requeue came before ours
        return REQUEUED, ""
    return REFUSED, " ".join(done.stderr.split())


# Any job, as its user sees it


@dataclass(frozen=True)
class QueueEntry:
    """A job, or task of an array, as SLURM knows it now. exit_code: of an ended job, else ""."""

    state: str
    reason: str
    exit_code: str = ""


def read_queue(job_id: str) -> dict[str, QueueEntry]:
    """What SLURM knows about a job or each task of an array, by id: "12", or "12_0", "12_1", ... A job that ended long
    ago is in neither of SLURM's answers. Raises SlurmUnreachable where nobody can tell."""
    found: dict[str, QueueEntry] = {}
    # squeue first: of waiting and running jobs it says most, and sites that hide others' jobs show everyone their own
    listed = _query("squeue", "--noheader", "--array", "--jobs", job_id, "--format=%i|%T|%r")
    for line in listed.splitlines():
        key, state, reason = [*line.strip().split("|"), "", ""][:3]
        found[key] = QueueEntry(state, "" if reason == "None" else reason)
    for line in _query("scontrol", "--oneliner", "show", "job", job_id).splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        reason = fields.get("Reason", "None")
        entry = QueueEntry(fields["JobState"], "" if reason == "None" else reason, fields.get("ExitCode", ""))
        keys = [fields.get("JobId", "")]
        if "ArrayJobId" in fields:
            keys = [f"{fields['ArrayJobId']}_{number}" for number in _array_tasks(fields.get("ArrayTaskId", ""))]
        for key in keys:
            found.setdefault(key, entry)
    return found


def find_log(job_id: str) -> str:
    """The path of a job's log; "" where SLURM cannot be queried or does not know the job."""
    try:
        found = re.search(r"^ *StdOut=(.*)$", _query("scontrol", "show", "job", job_id), re.MULTILINE)
    except SlurmUnreachable:
        return ""
    return found[1] if found else ""


def _array_tasks(text: str) -> list[str]:
    """Task numbers of an array as scontrol writes them: "3" or, of tasks not yet started, "1-3,7%2"."""
    found: list[str] = []
    for part in text.split("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found += [str(number) for number in range(first, last + 1, step)]
    return found


def end_steps(job_id: str) -> None:
    """Begin to kill what runs of a job beside its script, where SLURM reaches it; it waits long for a dead node."""
    with contextlib.suppress(SlurmUnreachable, OSError):
        steps = _query("squeue", "--noheader", "--steps", "--jobs", job_id, "--format=%i").split()
        for step in steps:
            if step.rpartition(".")[2].isdigit():
                subprocess.Popen(["scancel", "--signal=KILL", step])


# Excluded nodes

_USABLE = ("idle", "mixed", "allocated", "completing", "planned")  # as in sinfo; * is silent, $ in maintenance


def plan_exclusion(job_id: str, host: str, blamed: Collection[str]) -> tuple[list[str], str]:
    """All nodes that the next start of a job is to avoid so that it avoids `host`, and a note on it.

    No nodes where the job cannot do without `host`: as many as it has now must be left of the same kind. blamed: hosts
    at fault at earlier starts; where nodes run out, these may be used again, never those that the user has excluded.
    """
    try:
        asked = ("--noconvert", "--states=all", "--jobs", job_id, "--format=%P|%D|%n|%x|%v|%f")
        fields = _query("squeue", "--noheader", *asked).splitlines()[0]
        partition, count, required, excluded, reservation, features = fields.split("|", 5)
        # With the features only where the job asks for some: they may name the rack
        sort = "%G" if features in ("", "(null)") else "%G|%f"
        listed = _query("sinfo", "--noheader", "--Node", f"--partition={partition}", f"--format=%N|%T|{sort}")
        nodes = {name: (state, kind) for name, state, kind in (line.split("|", 2) for line in listed.splitlines())}
        before = [] if excluded in ("", "(null)") else expand_node_list(excluded)
        fixed = [] if required in ("", "(null)") else expand_node_list(required)
        node = next((name for name in nodes if _short(name) == _short(host)), "")
        needed = int(count)
    except (SlurmUnreachable, ValueError, IndexError):
        return [], f"{host} is not excluded: SLURM does not say what else the job could use"
    if not node or node in fixed or reservation not in ("", "(null)"):
        why = f"partition {partition} has no such node" if not node else "the job asks for that node or a reservation"
        return [], f"{host} is not excluded: {why}"
    usable = {name for name, (state, _) in nodes.items() if state.startswith(_USABLE) and state[-1] not in "*$"}
    alike = {name for name in usable if nodes[name][1] == nodes[node][1]}
    again = [name for name in before if _short(name) in map(_short, blamed)]
    for dropped in ([], again):
        avoided = [name for name in before if name not in dropped] + [node]
        if len(alike.difference(avoided)) >= needed:
            return avoided, f"without {node}" + (f", but with {', '.join(dropped)}: nodes run out" if dropped else "")
    return [], f"{node} is not excluded: too few nodes like it would be left for a job of {needed}"


def takes_steps(host: str, seconds: float = _STEP_SECONDS) -> bool:
    """Whether SLURM can start a process on this host of the allocation that this process is in, so soon."""
    command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={_short(host)}", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=seconds, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def exclude_nodes(job_id: str, nodes: Collection[str]) -> str:
    """Have a job that waits to start again avoid exactly these nodes; "" or why SLURM refuses (a running job)."""
    try:
        done = _run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}")
    except SlurmUnreachable as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())


def _short(host: str) -> str:
    return host.partition(".")[0]
