"""Submitted jobs: their tasks, the state of each, and following them to their end."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from report.runs import run_of
from slurm.job_options import LaunchError
from slurm.job_states import LIVE, RunOutcome, resolve_state
from slurm.sweep import format_table
from training.preemption import SlurmUnreachable, find_log, read_queue

RECORD = "job.json"
_LONGEST_PAUSE = 15.0  # seconds between queries; a controller serves thousands of jobs
_TAIL = 65536
_MOST_LOGS = 10


@dataclass(frozen=True)
class Task:
    """One run of a job. values: the swept flags. arguments: every flag of training that is no default. job_id: SLURM's,
    once submitted; of an array's task such as "12_3"."""

    index: int
    name: str
    run_folder: str
    max_steps: int
    values: dict[str, str]
    arguments: list[str]
    job_id: str = ""


@dataclass(frozen=True)
class TaskReport:
    """State of one run. step: optimizer steps done, None before the first. reason: why it waits, stopped or failed."""

    task: Task
    state: str
    step: int | None
    reason: str

    @property
    def over(self) -> bool:
        """Whether no other state will come by itself."""
        return self.state not in LIVE


def _swept(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(flag for task in tasks for flag in task.values))


def _values(task: Task, flags: Sequence[str]) -> list[str]:
    return [task.values[flag] or "none" for flag in flags]


def tasks_table(tasks: Sequence[Task]) -> str:
    """The table of a job's tasks."""
    flags = _swept(tasks)
    rows = [[task.index, task.name, *_values(task, flags)] for task in tasks]
    return format_table(["task", "run", *flags], rows)


def reports_table(reports: Sequence[TaskReport]) -> str:
    """The table of a job's tasks with the state of each."""
    flags = _swept([report.task for report in reports])
    rows = []
    for report in reports:
        task, step = report.task, "" if report.step is None else str(report.step)
        step += f"/{task.max_steps}" * bool(step and task.max_steps)
        run = None if report.step is None else run_of(Path(task.run_folder))
        useful = "" if run is None or run.useful is None else f"{100 * min(1.0, run.useful):.1f} %"
        rows.append([task.index, task.name, *_values(task, flags), report.state, step, useful, report.reason])
    return format_table(["task", "run", *flags, "state", "step", "useful", "reason"], rows)


def exit_code(reports: Sequence[TaskReport]) -> int:
    """0 where every run is finished or may still finish, else 1."""
    return 0 if all(report.state in ("finished", *LIVE) for report in reports) else 1


def last_step(run_folder: Path) -> int | None:
    """The last step in a run's metrics, read from the end of the file."""
    try:
        with (run_folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _read_result(path: Path) -> tuple[bool, str]:
    """Whether a rank's call by submitit succeeded, and otherwise the last line of its traceback."""
    try:
        outcome, result = pickle.loads(path.read_bytes())  # submitit's own file, in our own folder
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        return False, f"{path} cannot be read"
    if outcome == "success":
        return True, ""
    return False, re.sub(r"^slurm\.\w+\.\w+Failed: ", "", str(result).strip().splitlines()[-1])


@dataclass(frozen=True)
class Job:
    """A submitted job, or job array, and its folder; `Job.load` finds it again at any later time. read_run: reads a
    task's run folder."""

    folder: Path
    job_id: str
    tasks: list[Task] = field(repr=False)
    read_run: Callable[[Task], RunOutcome] = field(repr=False)

    @staticmethod
    def load(folder: Path, read_run: Callable[[Task], RunOutcome]) -> Job:
        """The job of a job folder. Raises LaunchError."""
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return Job(folder, record["job_id"], [Task(**task) for task in record["tasks"]], read_run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{folder} is no job folder of slurm/launch.py ({error})") from error

    def save(self, **details: Any) -> None:
        """Write job.json."""
        record = {"job_id": self.job_id, **details, "tasks": [asdict(task) for task in self.tasks]}
        partial = self.folder / (RECORD + ".partial")
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        partial.replace(self.folder / RECORD)

    def log(self, task: Task, rank: int = 0) -> Path:
        """The log of one rank: what it printed, and its errors."""
        return self.folder / f"{task.job_id}_{rank}_log.out"

    def reports(self) -> list[TaskReport]:
        """The state of every run now."""
        try:
            queue, problem = read_queue(self.job_id), ""
        except SlurmUnreachable as error:
            queue, problem = {}, str(error)
        found = []
        for task in self.tasks:
            run = self._outcome_of(task)
            state, reason = resolve_state(queue.get(task.job_id), run)
            if problem and state == "lost":  # nobody knows: SLURM could not be asked
                state, reason = "unknown", f"{problem}; the run's own status: {run.state or 'none'}"
            step = None if run.state is None else last_step(Path(task.run_folder))
            found.append(TaskReport(task, state, step, reason))
        return found

    def _outcome_of(self, task: Task) -> RunOutcome:
        run = self.read_run(task)
        outcomes = [_read_result(path) for path in sorted(self.folder.glob(f"{task.job_id}_*_result.pkl"))]
        errors = [error for success, error in outcomes if not success]
        return replace(run, error=run.error or "".join(errors[:1]), done=bool(outcomes) and not errors)

    def table(self, reports: Sequence[TaskReport] | None = None) -> str:
        """The table of what each task runs and how that stands, and the logs of those that did not finish."""
        reports = self.reports() if reports is None else reports
        bad = [report.task for report in reports if report.over and report.state != "finished"]
        logs = [f"log of task {task.index}: {self.log(task)}" for task in bad[:_MOST_LOGS] if self.log(task).exists()]
        return "\n".join([reports_table(reports), *logs])

    def wait(self, seconds: float = _LONGEST_PAUSE) -> list[TaskReport]:
        """Wait until every run is over; asks SLURM every `seconds`."""
        while True:
            reports = self.reports()
            if all(report.over for report in reports):
                return reports
            time.sleep(seconds)


def find_job(job: str, folders: Path, read_run: Callable[[Task], RunOutcome]) -> Job:
    """The job of a job folder or a job id, among those in `folders` where SLURM has forgotten it. Raises
    LaunchError."""
    if (Path(job) / RECORD).is_file():
        return Job.load(Path(job), read_run)
    number = job.split("_")[0]
    if not number.isdigit():
        raise LaunchError(f"--status {job!r} is neither a job folder (with {RECORD}) nor a job id")
    for record in [Path(find_log(number)).parent / RECORD, *folders.glob(f"*/{RECORD}")]:
        if record.is_file() and (found := Job.load(record.parent, read_run)).job_id == number:
            return found
    raise LaunchError(
        f"--status {job}: SLURM does not know the job any more and no folder in {folders} has that id; give the job's "
        "folder, or --log_folder"
    )


def follow(job: Job) -> int:
    """Show a job until it ends: changes of state, and the log of a single run. Returns the exit code."""
    single = job.tasks[0] if len(job.tasks) == 1 else None
    shown: dict[int, str] = {}
    reports: list[TaskReport] = []
    began, next_query, position = time.monotonic(), 0.0, 0
    try:
        while not reports or not all(report.over for report in reports):
            if time.monotonic() >= next_query:
                reports = job.reports()
                pause = min(_LONGEST_PAUSE, max(1.0, (time.monotonic() - began) / 20))
                next_query = time.monotonic() + pause
            for report in reports:
                line = f"{report.state}{f' ({report.reason})' if report.reason else ''}"
                if shown.get(report.task.index) != line:
                    shown[report.task.index] = line
                    print(f"[{report.task.job_id}] {report.task.name}: {line}", flush=True)
            if single is not None:
                position = _print_new(job.log(single), position)
            time.sleep(0.3)
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the job continues.\nfollow it again: python slurm/launch.py --status {job.folder} "
            f"--follow\nstop it: scancel {job.job_id}",
            flush=True,
        )
        return 130
    if single is not None:
        _print_new(job.log(single), position)
    print(f"\n{job.table(reports)}", flush=True)
    return exit_code(reports)


def _print_new(log: Path, position: int) -> int:
    """Print what a file holds beyond `position`; returns its end."""
    try:
        with log.open("rb") as file:
            file.seek(position)
            new = file.read()
    except OSError:
        return position
    sys.stdout.write(new.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return position + len(new)
