"""Tasks of a job: flags of training, checked and made independent of where the launcher was called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from data.atomic_io import is_remote
from slurm.jobs import Task
from slurm.sweep import Axis, SweepError, combinations, safe_name
from training.config import FIELDS, TrainingConfig, parse_config

DESCRIPTION = "Hybrid masked/causal pretraining in a job of slurm/launch.py; these flags stand after --."
_LONGEST_NAME = 200  # of a run folder; file systems take 255 bytes


def to_arguments(config: TrainingConfig) -> list[str]:
    """The command line that gives `config` again, without a recipe and with only what differs from the defaults."""
    found = []
    for name, spec in FIELDS.items():
        value = getattr(config, name)
        if value == spec.default and not (name == "max_steps" and config.max_hours and config.budget is None):
            continue
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found.append(f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return found


def with_absolute_paths(config: TrainingConfig, folder: Path) -> TrainingConfig:
    """`config` with its paths, which are relative to `folder`, meaning the same from anywhere."""
    paths = {name: getattr(config, name) for name, spec in FIELDS.items() if spec.metadata["path"]}
    if config.resume in ("auto", "never"):
        del paths["resume"]

    def absolute(path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(path, str):
            return path if is_remote(path) else str(folder / path)
        return tuple(str(folder / each) for each in path)

    return dataclasses.replace(config, **{name: absolute(path) for name, path in paths.items() if path})


def is_list(flag: str) -> bool:
    """Whether a flag of training takes several values."""
    return flag in FIELDS and isinstance(FIELDS[flag].default, tuple)


def _override(flag: str, value: str) -> str:
    """A swept value as an argument."""
    if flag in FIELDS and FIELDS[flag].metadata["kind"] is bool:
        if value.lower() not in ("true", "false"):
            raise SweepError(f"--sweep {flag}={value}: the values of this flag are true and false")
        return f"--{flag}" if value.lower() == "true" else f"--no-{flag}"
    return f"--{flag}={value}"


def plan_tasks(arguments: Sequence[str], axes: Sequence[Axis], folder: Path) -> list[Task]:
    """The runs of a job, each checked as training itself checks its flags; paths are relative to `folder`. Raises
    ConfigError or SweepError; exits with one sentence for an unknown flag or a value of a wrong type."""
    for axis in axes:
        if axis.flag in ("name", "output_dir"):
            raise SweepError(f"--sweep {axis.flag}: names of runs are made from --name and the swept values")
        if axis.flag not in FIELDS and axis.flag != "recipe":
            raise SweepError(f"--sweep {axis.flag}: training has no such flag")
    tasks: list[Task] = []
    for index, (values, suffix) in enumerate(combinations(axes)):
        overrides = [_override(flag, value) for flag, value in values.items()]
        config = with_absolute_paths(parse_config([*arguments, *overrides], DESCRIPTION), folder)
        config = dataclasses.replace(config, name=config.name + suffix)
        if len(config.name.encode()) > _LONGEST_NAME:
            raise SweepError(f"the run's name {config.name!r} is too long for a folder; shorten --name or sweep less")
        run_folder = str(config.run_folder)
        steps = config.max_steps if config.budget is None else 0
        tasks.append(Task(index, config.name, run_folder, steps, values, to_arguments(config)))
    return tasks


def base_name(tasks: Sequence[Task], axes: Sequence[Axis]) -> str:
    """The name of a sweep: its runs' without the values."""
    return safe_name(tasks[0].name.removesuffix(combinations(axes)[0][1]))


def missing_files(tasks: Sequence[Task]) -> list[str]:
    """Notes on files that cannot be seen from here, which need not be wrong: a disk may exist on the nodes only."""
    found = {}
    for task in tasks:
        for argument in task.arguments:
            flag, _, value = argument.partition("=")
            if flag in ("--config_file", "--tokenizer_path", "--initial_weights") and not Path(value).exists():
                found[argument] = f"note: {flag} {value} cannot be seen from here; the job will need it"
    return list(found.values())
