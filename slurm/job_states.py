"""States of submitted jobs without SLURM's accounting: from the queue first, then from the run's own files.

A run that says it is running, in a job that SLURM no longer knows, is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.preemption import ENDED, WAITING, QueueEntry

LIVE = ("pending", "running", "requeued", "unknown")  # states after which another may come


@dataclass(frozen=True)
class RunOutcome:
    """A run in this job by its own files. state: of its status.json, None where there is none.

    reason: why it stopped or failed. error: of the rank, or process, that failed first ("" where none is known). done:
    whether the program ended without an error.
    """

    state: str | None = None
    reason: str = ""
    error: str = ""
    done: bool = False


def resolve_state(entry: QueueEntry | None, run: RunOutcome) -> tuple[str, str]:
    """State and reason of a task, from what SLURM knows about it (None: nothing any more) and from its run."""
    over = entry is None or entry.state in ENDED
    if entry is not None and entry.state in WAITING:
        if run.state in ("requeued", "requeue_wanted"):
            return "requeued", "; ".join(part for part in (run.reason, entry.reason) if part)
        return "pending", entry.reason
    if not over and (entry is None or entry.state != "COMPLETING" or run.state in (None, "running")):
        return "running", "" if run.state else "starting"
    if not over and run.state == "stopped":  # SLURM says in a moment whether somebody cancelled the job
        return "running", run.reason
    if run.state == "finished":
        return "finished", run.reason
    if entry is not None and entry.state in ENDED and entry.state not in ("COMPLETED", "FAILED"):
        # Why SLURM ended the job says more than how its ranks ended.
        reason = run.reason if entry.state == "CANCELLED" and run.state == "stopped" else ""
        return entry.state.lower(), reason or ENDED[entry.state]
    if run.state == "stopped":
        return "stopped", run.reason
    if run.state == "failed":
        return "failed", run.error or run.reason
    if not over:  # on its way back into the queue
        return "requeued", run.reason
    if entry is None:
        return _resolve_forgotten(run)
    if run.state == "requeue_wanted" and entry.state == "COMPLETED":
        return "stopped", f"{run.reason}; it has saved, but its node has no scontrol to requeue it: submit it again"
    if entry.state == "COMPLETED" and (run.state is None or run.done):
        return "finished", ""
    return "failed", run.error or f"it ended with exit code {entry.exit_code} and no error of its own; see its log"


def _resolve_forgotten(run: RunOutcome) -> tuple[str, str]:
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
