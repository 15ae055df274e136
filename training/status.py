"""Run status in files of the run folder: the present state, every start, errors of each rank, names of checkpoints.

`status.json` holds the state, `attempts.jsonl` a line for each start, `failures/` a file for each rank that failed.
Job scripts and launchers read them where SLURM's accounting is disabled or says too little; nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from data.atomic_io import json_object, json_objects, write_atomically
from training.environment import Environment

SAMPLES = "samples.jsonl"  # of a run folder: what the model wrote at each validation
LEDGER = "ledger.json"  # of a run folder: what its newest checkpoint has used of each source
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
REQUEUED = "requeued"  # SLURM was asked to start the job again, and agreed
REQUEUE_WANTED = "requeue_wanted"  # the batch script does it: no scontrol in the container

_FOLDER = re.compile(r"step_(\d{8,})")
ABANDONED = "abandoned_"  # before the name of a checkpoint that is the run's no more


@dataclass(frozen=True)
class Status:
    """The content of a run folder's status.json.

    state: one of the names above. reason: why it stopped or failed ("" while running). step: optimizer steps that a
    checkpoint holds. time: when this was written (UTC, ISO 8601). job_id, restart_count: SLURM's, None and 0 elsewhere.
    """

    state: str
    reason: str
    step: int
    max_steps: int
    job_id: str | None
    restart_count: int
    host: str
    time: str


@dataclass(frozen=True)
class Failure:
    """One rank's error. secondary: it only lost touch with a rank that failed before it. time: seconds (Unix). kind: a
    name of errors.KINDS. host_at_fault: where a restart should not go, "" if that is not known."""

    rank: int
    host: str
    time: float
    error: str
    secondary: bool
    kind: str = "bug"
    host_at_fault: str = ""


@dataclass(frozen=True)
class StatusFile:
    """A run's status.json, to be written by rank 0, or by who speaks for it."""

    folder: Path
    environment: Environment
    max_steps: int

    def write(self, state: str, reason: str, step: int) -> None:
        """Replace what it says. Raises OSError where the folder cannot be written."""
        now, job = datetime.now(timezone.utc).isoformat(timespec="seconds"), self.environment
        status = Status(state, reason, step, self.max_steps, job.job_id, job.restart_count, socket.gethostname(), now)
        write_atomically(self.folder / "status.json", json.dumps(asdict(status), indent=1).encode())


def read_status(folder: Path) -> Status | None:
    """The run's status.json; None where there is none or it cannot be read."""
    try:
        content = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        return Status(**{spec.name: content[spec.name] for spec in fields(Status)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Failures


def record_failure(
    folder: Path,
    environment: Environment,
    error: str,
    secondary: bool = False,
    kind: str = "bug",
    host_at_fault: str = "",
) -> None:
    """Record this rank's error; a folder that cannot be written is no new error."""
    host, now = socket.gethostname(), time.time()
    failure = Failure(environment.rank, host, now, error, secondary, kind, host_at_fault)
    name = f"{environment.job_id or 'none'}_{environment.restart_count}_{environment.rank}.json"
    path = folder / "failures" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(failure)).encode())
    except OSError:
        pass


def first_failure(folder: Path, job_id: str | None, restart_count: int) -> Failure | None:
    """The earliest error of one start of a job; one that another rank caused counts only where no other is known."""
    found = _failures(folder, f"{job_id or 'none'}_{restart_count}_*.json")
    return min(found, key=lambda failure: (failure.secondary, failure.time), default=None)


def hosts_at_fault(folder: Path, job_id: str, start: int | str = "*") -> set[str]:
    """The hosts that the errors of one start (restart count) of a job, or of all its starts, name as their cause."""
    found = _failures(folder, f"{job_id}_{start}_*.json")
    return {failure.host_at_fault for failure in found if failure.host_at_fault and not failure.secondary}


def _failures(folder: Path, pattern: str) -> list[Failure]:
    found = []
    for path in (folder / "failures").glob(pattern):
        try:
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return found


# Attempts


def _attempts(folder: Path) -> list[dict[str, Any]]:
    """The starts that attempts.jsonl holds."""
    whole = {"job_id", "restart_count", "newest_step"}
    return [line for line in json_objects(folder / "attempts.jsonl") if line.keys() >= whole]


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as registered in attempts.jsonl. without_progress: how many starts of this job right before
    this one left no newer checkpoint behind, those left out that a signal ended."""

    folder: Path
    job_id: str | None
    restart_count: int
    without_progress: int

    def superseded(self) -> bool:
        """Whether SLURM has started the job again since: then this process runs on a node that was given up."""
        return self.job_id is not None and any(
            attempt["job_id"] == self.job_id and attempt["restart_count"] > self.restart_count
            for attempt in _attempts(self.folder)
        )


def begin_attempt(folder: Path, environment: Environment, newest_step: int) -> Attempt:
    """Register a start and count the fruitless ones before it; a start that is known already is only looked up.

    newest_step: steps done by the newest checkpoint now, 0 for none. Raises OSError where `folder` cannot be written.
    """
    job_id, restart_count = environment.job_id, environment.restart_count
    known = [attempt for attempt in _attempts(folder) if job_id is not None and attempt["job_id"] == job_id]
    ended = [line for line in json_objects(folder / "attempts.jsonl") if "ended_by_signal" in line]
    excused, without_progress = {line["restart_count"] for line in ended if line.get("job_id") == job_id}, 0
    for attempt in reversed([attempt for attempt in known if attempt["restart_count"] < restart_count]):
        if attempt["newest_step"] != newest_step:  # also a lower one: the run was rolled back, then went on
            break
        without_progress += attempt["restart_count"] not in excused
    if not any(attempt["restart_count"] == restart_count for attempt in known):
        line = {
            "job_id": job_id,
            "restart_count": restart_count,
            "newest_step": newest_step,
            "host": socket.gethostname(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        _append(folder, line)
    return Attempt(folder, job_id, restart_count, without_progress)


def starts_so_far(folder: Path, job_id: str | None) -> int:
    """How many starts of a job the run folder knows: those that registered, and those that only left an error."""
    counts = [attempt["restart_count"] for attempt in _attempts(folder) if attempt["job_id"] == job_id]
    numbers = [path.stem.split("_")[-2] for path in (folder / "failures").glob(f"{job_id}_*_*.json")]
    return 1 + max([*counts, *(int(number) for number in numbers if number.isdigit())], default=-1)


def end_attempt(folder: Path, environment: Environment) -> None:
    """Note that a signal ended this start. Raises OSError where `folder` cannot be written."""
    line = {"job_id": environment.job_id, "restart_count": environment.restart_count, "ended_by_signal": True}
    _append(folder, line)


def _append(folder: Path, line: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


# Checkpoints


def folder_name(step: int) -> str:
    """Name of the checkpoint folder after `step` optimizer steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Optimizer steps done, from a checkpoint folder's name."""
    return int(path.name.removeprefix("step_"))


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Where a run's checkpoints may be: in its own folder, and where --spare_checkpoint_dir let it save."""
    config = json_object(run_folder / "config.json")
    spare = [] if copied_from(run_folder, config) else config.get("spare_checkpoints", [])
    return [run_folder / "checkpoints", *map(Path, spare)]


def copied_from(run_folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The run folder of which this one, with this config.json, is a copy; None for one that is none, or was moved."""
    original = Path(config.get("folder") or run_folder)
    try:
        same = original.samefile(run_folder)
        same = same or json_object(original / "config.json").get("wandb_id") != config.get("wandb_id")
    except OSError:  # moved, or seen under another path on this host
        same = True
    return None if same else original


def list_checkpoints(*parents: Path) -> list[Path]:
    """Checkpoint folders, newest first, of equal ones those of the first parent; whether they are whole is not seen."""
    found = [path for parent in parents if parent.is_dir() for path in parent.iterdir()]
    return sorted((path for path in found if _FOLDER.fullmatch(path.name) and path.is_dir()), key=step_of, reverse=True)


def newest_step(*parents: Path) -> int:
    """Steps done by the newest checkpoint in folders of checkpoints, 0 where there is none."""
    return max((step_of(path) for path in list_checkpoints(*parents)), default=0)
