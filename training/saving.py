"""Saves of a run: no bad state, elsewhere or later where a disk fails, and which older checkpoints go."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from data.objectives import added_objectives
from training.checkpoint import SaveError, prune, write_checkpoint
from training.distributed import on_main
from training.errors import NonFiniteError
from training.inputs import Inputs
from training.metric_logger import MetricLogger
from training.optimizers import named_state
from training.rank_checks import check_ranks
from training.run_dir import RunFolder, versions
from training.state import TrainState
from training.status import RUNNING, StatusFile, checkpoint_folders, list_checkpoints
from training.stopping import Stop, StopConditions, most_urgent

_PAUSE_SECONDS = 1.0  # before a save is tried again: a file server may be on its way back


def save(state: TrainState, saver: Saver | None, last: bool = False) -> bool:
    """Write a checkpoint on rank 0, the `last` of this start or not; all ranks learn whether that worked.

    Raises DivergenceError or NonFiniteError for a bad state, SaveError where a later save may not help either.
    """
    check_ranks(state, state.world)  # what differs must not take the place of a good checkpoint
    check_finite(state)
    return on_main(state.world, lambda: saver is not None and saver.save(state, last))


def save_and_stop(state: TrainState, saver: Saver | None, saved: int, conditions: StopConditions) -> Stop:
    """End a run that some rank wants to stop, by a checkpoint unless that of step `saved` is it; returns the reason."""
    if saved != state.step:
        save(state, saver, last=True)
    return most_urgent(state.world.all_gather_objects(conditions.request, "stop requests"))


def check_finite(state: TrainState) -> None:
    """Refuse to save weights, averages or moments that are not finite: one norm for each, one look at the device.

    Raises NonFiniteError, on all ranks alike where all hold the same bits (see rank_checks.py).
    """
    named = {f"{group}/{name}": value for group, tensors in _tensors(state).items() for name, value in tensors.items()}
    named = {name: value.to(state.world.device) for name, value in named.items() if value.is_floating_point()}
    finite = torch.isfinite(torch.stack(torch._foreach_norm(list(named.values())))).tolist()
    if bad := [name for name, good in zip(named, finite, strict=True) if not good]:
        raise NonFiniteError(f"step {state.step}, before its checkpoint: {bad[0]} is not finite")


def _tensors(state: TrainState) -> dict[str, dict[str, torch.Tensor]]:
    """All that a checkpoint holds of the state, by file."""
    return {
        "model": state.model.state_dict(),
        "ema": state.ema.state_dict(),
        "optimizer": named_state(state.optimizer, state.model),
    }


class Saver:
    """Writes the checkpoints of a run, on rank 0. newest: the last one of the run."""

    def __init__(
        self, folder: RunFolder, inputs: Inputs, log: MetricLogger, conditions: StopConditions, status: StatusFile
    ):
        self._folder, self._inputs, self._log, self._say = folder, inputs, log, log.say
        self._conditions, self._status = conditions, status
        self._places = checkpoint_folders(folder.path)
        self.newest = next(iter(list_checkpoints(*self._places)), None)
        self._tries = [folder.checkpoints, folder.checkpoints]
        if inputs.config.spare_checkpoint_dir:
            self._tries.append(self._places[-1])
        self._failed = 0  # saves in a row

    def save(self, state: TrainState, last: bool) -> bool:
        """Write a checkpoint and note it; False where a later one may work. Raises SaveError."""
        began = time.monotonic()
        self._log.sync()  # no checkpoint is newer than the metrics on the disk
        path = self._write(state, last)
        if path is None:
            return False
        seconds = time.monotonic() - began
        self._conditions.saved(seconds)
        self._say(f"step {state.step:>6}  saved {path} in {seconds:.1f} s")
        try:
            self._status.write(RUNNING, "", state.step)
        except OSError as error:
            self._say(f"note: {self._folder.path}/status.json cannot be written: {error.strerror}")
        return True

    def _write(self, state: TrainState, last: bool) -> Path | None:
        """Write a checkpoint and delete what it makes superfluous. None where it failed and a later one may not.

        last: there will be no later one. Raises SaveError.
        """
        step, config, problems = state.step, self._inputs.config, []
        for place in self._tries:
            try:
                if place == self._folder.checkpoints:
                    self._folder.check()
                self.newest = write_checkpoint(place, step, _tensors(state), self._record(step), self._files())
            except SaveError as error:
                problems.append(str(error))
                if len(problems) == 1:
                    time.sleep(_PAUSE_SECONDS)
                continue
            if problems:
                self._say(f"note: {problems[0]}; tried again, {self.newest} was written")
            self._failed = 0
            self._prune(step)
            return self.newest
        self._failed += 1
        failures, limit = "; ".join(dict.fromkeys(problems)), config.max_failed_saves
        if not last and self._failed < limit:
            row = f"{self._failed} of --max_failed_saves {limit} in a row"
            self._say(f"note: {failures}; the run continues without this save ({row})")
            return None
        newest = next(iter(list_checkpoints(*self._places)), None)
        kept = f"; {newest} is intact" if newest else ""
        raise SaveError(f"{failures}{kept}. Check space, rights, mounts or give --spare_checkpoint_dir, then resume")

    def _record(self, step: int) -> dict[str, Any]:
        inputs = self._inputs
        return {
            "tokens": inputs.plan.tokens_before(step),
            "flags": inputs.config.to_dict(),
            "data": inputs.data_identity,
            "held_out": inputs.held_out_identity,
            "versions": versions(),
            **({"objectives": added} if (added := added_objectives()) else {}),
        }

    def _files(self) -> dict[str, bytes]:
        return {
            "config.json": json.dumps(self._inputs.model_config.to_dict(), indent=1).encode(),
            "tokenizer.json": self._inputs.tokenizer_text.encode(),
        }

    def _prune(self, step: int) -> None:
        """Superfluous checkpoints go; one that cannot be deleted is no failed save."""
        config = self._inputs.config
        try:
            prune(self._places, step, config.keep_last, config.save_steps)
        except OSError as error:
            self._say(f"note: --keep_last {config.keep_last}: an old checkpoint could not be deleted: {error}")
