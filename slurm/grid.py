"""Grids of fine-tuning: the jobs of `slurm/launch.py --finetune`, one for each combination of swept flags."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm.job_options import JobOptions, LaunchError
from slurm.jobs import Task
from slurm.sweep import Axis, SweepError, combinations
from training.errors import DONE
from training.status import FINISHED

_NAME = "finetune"


class FinetuneFailed(RuntimeError):
    """Fine-tuning in a job failed."""


class FinetuneJob:
    """The callable that submitit pickles and calls in a job: evaluation/finetune.py in the folder of the submission."""

    def __init__(self, arguments: Sequence[str], folder: str):
        self.arguments = list(arguments)
        self.folder = folder

    def __call__(self) -> str:
        """Fine-tune. Raises FinetuneFailed, which ends up in submitit's result and log."""
        from evaluation.finetune import main

        os.chdir(self.folder)
        code = main(self.arguments)
        if code != DONE:
            sys.tracebacklimit = 0  # where in this file it was raised helps nobody
            raise FinetuneFailed(f"evaluation/finetune.py ended with exit code {code}; the log says why")
        return FINISHED


def plan_grid(arguments: Sequence[str], axes: Sequence[Axis], folder: Path) -> list[Task]:
    """The jobs of a grid, their flags and the files of their tasks checked; each has a file of results in --output.

    folder: where relative paths begin. Raises SweepError or LaunchError; exits with one sentence for an unknown flag.
    """
    from evaluation.finetune import make_settings, parse_arguments, read_tasks
    from evaluation.finetune_task import TaskError
    from evaluation.generation import UsageError

    flags = [axis.flag for axis in axes]
    for flag in ("output", "predictions"):
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
        tasks.append(Task(index, name, str(target), 0, values, [*own, f"--output={target}.json"]))
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
