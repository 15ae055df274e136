"""The short run that runs on SLURM have to repeat, made once for all tests and all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from helpers.tiny_runs import flags, make_inputs, run

STEPS = 30
COMMON = {"max_steps": STEPS, "data_fingerprint": True, "save_every": 0, "validate_every": STEPS}


class Reference:
    """In `folder`, which workers may share: each part is made when it is first asked for, by whoever asks first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @cached_property
    def inputs(self) -> Path:
        """The folder of make_inputs."""
        return self._once("inputs", make_inputs)

    @cached_property
    def run(self) -> Path:
        """The folder of the run of one process."""
        return self._once("alone", lambda path: run(flags(self.inputs, path.parent, path.name, **COMMON)))

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        path, done = self.folder / name, self.folder / f"{name}.done"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)  # of a worker that failed
                make(path)
                done.touch()
        return path
