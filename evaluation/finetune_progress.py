"""What fine-tuning has done so far, in a folder: a job that was stopped goes on from there when it starts again.

Trainings that are done are kept by their results, and of the one that is not the state after an epoch. As everything
random is keyed by seed and step, what comes out is what an undisturbed run would have given.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from data.atomic_io import PARTIAL_SUFFIX, json_object, write_atomically
from evaluation.generation import UsageError

SECONDS_BETWEEN = 60.0  # states of the training that runs


class Progress:
    """The folder's content. about: what has to be the same for it to be of use, as JSON."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Raises UsageError where the folder is of something else, or cannot be made."""
        self._file, self._state = folder / "done.json", folder / "training.pt"
        about = json.loads(json.dumps(about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--progress is {folder}: it cannot be made ({error.strerror}).") from None
        self._about, self._done, self._saved = about, dict[str, Any](), time.monotonic()
        if not self._file.exists():
            self._write()
        elif (kept := json_object(self._file)).get("about") != about:
            raise UsageError(f"--progress is {folder}: it is of other settings, tasks or models; delete it.")
        else:
            self._done = kept["done"]

    def results(self, training: str) -> list[dict[str, float]] | None:
        """Of a training that is done; None of others."""
        return self._done.get(training)

    def finish(self, training: str, results: list[dict[str, float]]) -> None:
        """Keep the results of a training that is done."""
        self._done[training] = results
        self._write()
        self._state.unlink(missing_ok=True)

    def _write(self) -> None:
        write_atomically(self._file, json.dumps({"about": self._about, "done": self._done}).encode())

    def save(self, training: str, state: dict[str, Any]) -> None:
        """Keep the state of the training that runs, if the last one is old enough."""
        if time.monotonic() - self._saved < SECONDS_BETWEEN:
            return
        partial = self._state.with_name(self._state.name + PARTIAL_SUFFIX)
        torch.save({**state, "training": training}, partial)
        os.replace(partial, self._state)
        self._saved = time.monotonic()

    def load(self, training: str, device: torch.device) -> dict[str, Any] | None:
        """What `save` kept of this training; None where there is nothing."""
        if not self._state.exists():
            return None
        state = torch.load(self._state, map_location=device, weights_only=True)
        return state if state["training"] == training else None

    def remove(self) -> None:
        """All is done."""
        shutil.rmtree(self._file.parent, ignore_errors=True)
