"""Runs that are held after a step, or inside its save, so that a signal meets them there on any busy machine."""

from __future__ import annotations

import time
from pathlib import Path

from helpers.tiny_runs import start

_SECONDS = 180.0
_SCRIPT = """
import sys, threading, time
from pathlib import Path
import train_single_gpu
from training import checkpoint
from training.distributed import single_world, start_world

train_step, flush = train_single_gpu.train_step, checkpoint._flush
reached, released = Path({reached!r}), Path({released!r})
inside_save = {inside_save}

def hold():
    reached.touch()
    while not released.exists():
        time.sleep(0.01)

def step(state, *arguments):
    done = train_step(state, *arguments)
    if state.step == {step} and not inside_save:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # of a step before this one
                thread.join()
        hold()
    return done

def flushed(path):
    if path.parent.name == ".tmp_step_{step:08d}" and inside_save:
        hold()
    return flush(path)

train_single_gpu.train_step, checkpoint._flush = step, flushed
sys.exit(train_single_gpu.main(sys.argv[1:], {world}))
"""


class HeldRun:
    """A run of the training script, or of `ranks`, that is held after `step` on every rank.

    inside_save: while it writes the checkpoint of that step. Its script is called as the real one, in `folder`.
    """

    def __init__(
        self, arguments: list[str], folder: Path, step: int, ranks: int = 0, inside_save: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"train_{'multi' if ranks else 'single'}_gpu.py"
        self._reached, self._released = folder / "reached", folder / "released"
        names = {"reached": str(self._reached), "released": str(self._released)}
        world = "start_world" if ranks else "single_world"
        script.write_text(_SCRIPT.format(**names, step=step, inside_save=inside_save, world=world))
        self.processes = start(arguments, ranks, script)

    def wait(self) -> None:
        """Until a rank is held."""
        deadline = time.monotonic() + _SECONDS
        while not self._reached.exists():
            assert self.processes.running(), self.processes.finish()
            assert time.monotonic() < deadline, "the run never got there"
            time.sleep(0.01)

    def release(self) -> tuple[str, list[int]]:
        """Let it go; returns what it has printed and the exit code of each rank, once it has ended."""
        self._released.touch()
        ended = self.processes.finish(_SECONDS)
        return "".join(each.stdout + each.stderr for each in ended), [each.code for each in ended]
