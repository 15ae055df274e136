"""What became of a job, without SLURM's accounting: what squeue and scontrol still know, and what the run left behind.

`sacct` is disabled on many clusters, and SLURM forgets an ended job after a few minutes. So a state is judged from the
queue first and from the run's own files then, and a run that says it is running in a job that is gone is lost.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_COMMAND_SECONDS = 60
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = {
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
LIVE = ("pending", "running", "requeued", "unknown")  # states after which another may come


class SlurmUnreachable(RuntimeError):
    """SLURM's commands are missing or its controller does not answer."""


@dataclass(frozen=True)
class QueueEntry:
    """A job as SLURM knows it now. state, reason: in SLURM's words. exit_code: of an ended job, else ""."""

    state: str
    reason: str
    exit_code: str = ""


def _ask(*command: str) -> str:
    """What a SLURM command prints; "" where it says that there is no such job. Raises SlurmUnreachable."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except FileNotFoundError:
        raise SlurmUnreachable(f"there is no {command[0]} here") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnreachable(f"{command[0]} does not answer: {error}") from None
    if done.returncode == 0:
        return done.stdout
    if "invalid job id" in done.stderr.lower():
        return ""
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    raise SlurmUnreachable(f"{command[0]}: {said}")


def _array_tasks(text: str) -> list[str]:
    """Task numbers of an array as scontrol writes them: "3" or, of tasks not yet started, "1-3,7%2"."""
    found: list[str] = []
    for part in text.split("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found += [str(number) for number in range(first, last + 1, step)]
    return found


def read_queue(job_id: str) -> dict[str, QueueEntry]:
    """What SLURM knows about a job or each task of an array, by id: "12", or "12_0", "12_1", ...

    A job that ended long ago is in neither of SLURM's answers. Raises SlurmUnreachable where nobody can tell.
    """
    found: dict[str, QueueEntry] = {}
    # squeue first: of waiting and running jobs it says most, and sites that hide others' jobs show everyone their own
    listed = _ask("squeue", "--noheader", "--array", "--jobs", job_id, "--format=%i|%T|%r")
    for line in listed.splitlines():
        key, state, reason = [*line.strip().split("|"), "", ""][:3]
        found[key] = QueueEntry(state, "" if reason == "None" else reason)
    for line in _ask("scontrol", "--oneliner", "show", "job", job_id).splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" not in facts:
            continue
        reason = facts.get("Reason", "None")
        entry = QueueEntry(facts["JobState"], "" if reason == "None" else reason, facts.get("ExitCode", ""))
        keys = [facts.get("JobId", "")]
        if "ArrayJobId" in facts:
            keys = [f"{facts['ArrayJobId']}_{number}" for number in _array_tasks(facts.get("ArrayTaskId", ""))]
        for key in keys:
            found.setdefault(key, entry)
    return found


@dataclass(frozen=True)
class RunFacts:
    """What a run's own files say about it in this job. state: of its status.json, None where there is none.

    reason: why it stopped or failed. error: the sentence of the rank, or the process, that failed first ("" where
    none is known). done: whether the program reported that it came to its end.
    """

    state: str | None = None
    reason: str = ""
    error: str = ""
    done: bool = False


def judge(entry: QueueEntry | None, run: RunFacts) -> tuple[str, str]:
    """State and reason of a task, from what SLURM knows about it (None: nothing any more) and from its run."""
    over = entry is None or entry.state in _ENDED
    if entry is not None and entry.state in _WAITING:
        if run.state in ("requeued", "requeue_wanted"):
            return "requeued", "; ".join(part for part in (run.reason, entry.reason) if part)
        return "pending", entry.reason
    if not over and (entry is None or entry.state != "COMPLETING" or run.state in (None, "running")):
        return "running", "" if run.state else "starting"
    if run.state == "finished":
        return "finished", run.reason
    if entry is not None and entry.state in _ENDED and entry.state not in ("COMPLETED", "FAILED"):
        # What was done to the job says more than how its ranks took it.
        words = run.reason if entry.state == "CANCELLED" and run.state == "stopped" else ""
        return entry.state.lower(), words or _ENDED[entry.state]
    if run.state == "stopped":
        return "stopped", run.reason
    if run.state == "failed":
        return "failed", run.error or run.reason
    if not over:  # on its way back into the queue
        return "requeued", run.reason
    if entry is None:
        return _judge_forgotten(run)
    if run.state == "requeue_wanted" and entry.state == "COMPLETED":
        return "stopped", f"{run.reason}; it has saved, but its node has no scontrol to requeue it: submit it again"
    if entry.state == "COMPLETED" and (run.state is None or run.done):
        return "finished", ""
    return "failed", run.error or f"it ended with exit code {entry.exit_code} and no word; see its log"


def _judge_forgotten(run: RunFacts) -> tuple[str, str]:
    """A job that SLURM does not know any more and that left no final state."""
    if run.error:
        return "failed", run.error
    if run.done:
        return "finished", ""
    if run.state is None:
        return "lost", "SLURM does not know the job any more, and it had not begun to train"
    if run.state == "running":
        return "lost", "killed: it was training, and SLURM does not know the job any more"
    return "lost", f"{run.reason or run.state}; then SLURM dropped the job: submit it again"
