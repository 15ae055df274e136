"""Grids of fine-tuning: the jobs of `slurm/launch.py --finetune`, one for each combination of swept flags."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data.atomic_io import PARTIAL_SUFFIX
from slurm.job_options import JobOptions, LaunchError
from slurm.jobs import Task
from slurm.sweep import Axis, SweepError, combinations
from training.errors import DONE
from training.status import FINISHED

_NAME = "finetune"
_MOST_FRUITLESS = 2  # starts in a row without another epoch


class FinetuneFailed(RuntimeError):
    """Fine-tuning in a job failed."""


class FinetuneJob:
    """The callable that submitit pickles and calls in a job: evaluation/finetune.py in the folder of the submission.
    Before the time limit, and where it is preempted, submitit asks for a `checkpoint` and requeues the job."""

    def __init__(self, arguments: Sequence[str], progress: str, folder: str):
        """progress: the folder of its --progress, which is among the arguments. folder: where paths begin."""
        self.arguments = list(arguments)
        self.folder, self.progress = folder, progress
        self.began, self.fruitless = 0, 0  # what was done when it started, and starts that did no more

    def __call__(self) -> str:
        """Fine-tune. Raises FinetuneFailed, which ends up in submitit's result and log."""
        from evaluation.finetune import main

        os.chdir(self.folder)
        self.began = self._latest()
        code = main(self.arguments)
        if code != DONE:
            sys.tracebacklimit = 0  # where in this file it was raised helps nobody
            raise FinetuneFailed(f"evaluation/finetune.py ended with exit code {code}; the log says why")
        return FINISHED

    def _latest(self) -> int:
        """When something was last kept of what is done."""
        files = (path for path in Path(self.progress).glob("*") if path.suffix != PARTIAL_SUFFIX)
        return max((path.stat().st_mtime_ns for path in files), default=0)

    def checkpoint(self):
        """The same again, which goes on from --progress. Raises FinetuneFailed where two starts brought nothing."""
        from submitit.helpers import DelayedSubmission

        self.fruitless = self.fruitless + 1 if self._latest() == self.began else 0
        if self.fruitless >= _MOST_FRUITLESS:
            raise FinetuneFailed(f"{self.fruitless} starts did not get through an epoch: give a longer --time")
        return DelayedSubmission(self)


def plan_grid(arguments: Sequence[str], axes: Sequence[Axis], folder: Path) -> list[Task]:
    """The jobs of a grid, their flags and the files of their tasks checked; each has a file of results in --output.

    folder: where relative paths begin. Raises SweepError or LaunchError; exits with one sentence for an unknown flag.
    """
    from evaluation.finetune import make_settings, parse_arguments, read_tasks
    from evaluation.finetune_task import TaskError
    from evaluation.generation import UsageError

    flags = [axis.flag for axis in axes]
    for flag in ("output", "predictions", "progress"):
        if flag in flags:
            raise SweepError(f"--sweep {flag}: files of results are named by the swept values, in the folder --output")
    each = ["--num_seeds=1"] if "seed" in flags and not any(a.startswith("--num_seeds") for a in arguments) else []
    tasks, read = [], set[tuple[str, ...]]()
    for index, (values, suffix) in enumerate(combinations(axes)):
        own = [*arguments, *each, *(f"--{flag}={value}" for flag, value in values.items())]
        options = parse_arguments(own)
        try:
            make_settings(options)
            if (only := tuple(options.only)) not in read:
                read_tasks(options)
                read.add(only)
        except (UsageError, TaskError) as error:
            raise LaunchError(str(error)) from None
        name = f"{_NAME}{suffix}"
        target = folder / _output_folder(options) / name
        tasks.append(
            Task(index, name, str(target), 0, values, [*own, f"--output={target}.json", f"--progress={target}"])
        )
    return tasks


def _output_folder(options: argparse.Namespace) -> Path:
    if options.output is None or options.output.suffix == ".json":
        given = "is missing" if options.output is None else f"is {options.output}"
        raise LaunchError(f"--output {given}: with --finetune give a folder, in which each job writes a file")
    if options.predictions is not None:
        raise LaunchError("--predictions goes with one model for each task: give it to evaluation/finetune.py")
    return options.output


def check_grid(options: JobOptions) -> None:
    """Refuse a job of several ranks. Raises LaunchError."""
    if options.nodes > 1 or options.tasks > 1:
        raise LaunchError(
            f"--finetune runs on one device, and --nodes is {options.nodes} with {options.tasks} tasks on each: leave "
            "them at 1, and --gpus_per_node too"
        )


def how_to_join(tasks: Sequence[Task]) -> str:
    """The command that joins the results."""
    folder = Path(tasks[0].run_folder).parent
    return f"join    python evaluation/finetune_grid.py {folder}/{_NAME}*.json --output {folder}.json"
