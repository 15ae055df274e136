"""How a run saves: no bad state, elsewhere or later where a disk fails, and which older checkpoints go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import SaveError, prune, write_checkpoint
from training.errors import NonFiniteError
from training.optimizers import named_state
from training.setup import Inputs, RunFolder, versions
from training.status import checkpoint_folders, list_checkpoints
from training.step import TrainState

_PAUSE_SECONDS = 1.0  # before a save is tried again: a file server may be on its way back


def check_finite(state: TrainState) -> None:
    """Refuse to save weights, averages or moments that are not finite: one norm for each, one look at the device.

    Raises NonFiniteError, on all ranks alike where all hold the same bits (see divergence.py).
    """
    named = {f"{group}/{name}": value for group, tensors in _tensors(state).items() for name, value in tensors.items()}
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
    """What rank 0 does to save. newest: the last checkpoint that it has written."""

    def __init__(self, folder: RunFolder, inputs: Inputs, say: Callable[[str], None]):
        self.newest: Path | None = None
        self._folder, self._inputs, self._say = folder, inputs, say
        self._places = checkpoint_folders(folder.path)
        self._tries = [folder.checkpoints, folder.checkpoints]
        if inputs.config.spare_checkpoint_dir:
            self._tries.append(self._places[-1])
        self._failed = 0  # saves in a row

    def save(self, state: TrainState, last: bool) -> Path | None:
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
        told, limit = "; ".join(dict.fromkeys(problems)), config.max_failed_saves
        if not last and self._failed < limit:
            row = f"{self._failed} of --max_failed_saves {limit} in a row"
            self._say(f"note: {told}; the run goes on without this save ({row})")
            return None
        newest = next(iter(list_checkpoints(*self._places)), None)
        kept = f"; {newest} is intact" if newest else ""
        raise SaveError(f"{told}{kept}. Mend that (space, rights, mounts) or give --spare_checkpoint_dir, then resume")

    def _record(self, step: int) -> dict[str, Any]:
        inputs = self._inputs
        return {
            "tokens": inputs.plan.tokens_before(step),
            "flags": inputs.config.to_dict(),
            "data": inputs.data_identity,
            "held_out": inputs.held_out_identity,
            "versions": versions(),
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
