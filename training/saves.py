"""Saves: what goes into a checkpoint, when, and how a run deals with one that fails.

A save that is not the last one stops training only while the state is copied into the host's memory, beside the next
step's passes even; files are written from there in the background. The next save, a stop, an error and the end of the
run wait for that; a save that has failed for good is known to all ranks at the next step's agreement.

Rank 0 writes everything, but of a state that is divided among ranks (--sharding), of which each writes its part.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.atomic_io import memory_left, write_atomically
from data.objectives import added_objectives
from training.checkpoint import (
    Checkpoint,
    FileImage,
    Files,
    SaveError,
    checkpoint_bytes,
    give_name,
    open_checkpoint,
    prune,
    write_checkpoint,
    write_files,
    write_indexes,
)
from training.distributed import on_main
from training.inputs import Inputs
from training.metric_logger import MetricLogger
from training.rank_checks import check_ranks
from training.run_dir import RunFolder, versions
from training.state import Tensors, TrainState, check_finite, state_tensors
from training.status import RUNNING, StatusFile, checkpoint_folders, list_checkpoints, step_of
from training.stopping import Stop, StopConditions, most_urgent

_PAUSE_SECONDS = 1.0  # before a save is tried again: a file server may be on its way back
_ALIGNMENT = 64  # bytes between beginnings of files in a snapshot
_LARGEST_PART = 0.5  # of the host's free memory that a snapshot may take


def save(state: TrainState, saver: Saver | None, last: bool = False) -> None:
    """Begin to write the checkpoint of this step on rank 0; the `last` of this start, which has none after it, to the
    end.

    Raises on all ranks: DivergenceError or NonFiniteError for a bad state, SaveError where this save, or the one
    before it, has failed and a later one may not help either.
    """
    check_ranks(state, state.world)  # what differs must not take the place of a good checkpoint
    tensors = state_tensors(state)
    check_finite(state, tensors)
    waits = on_main(state.world, lambda: saver is not None and saver.save(state, tensors, last))
    state.write_part(tensors)
    if waits:
        on_main(state.world, lambda: saver and saver.finish())


def save_and_stop(state: TrainState, saver: Saver | None, conditions: StopConditions) -> Stop:
    """End a run that some rank wants to stop, by a checkpoint unless it has one of this step; returns the reason."""
    if on_main(state.world, lambda: saver and saver.finish()) != state.step:
        save(state, saver, last=True)
    return most_urgent(state.world.all_gather_objects(conditions.request, "stop requests"))


class Snapshot:
    """Room on the host for the files of a checkpoint, kept from save to save; page-locked for a CUDA device."""

    def __init__(self, device: torch.device, expected_bytes: int) -> None:
        """expected_bytes: of a checkpoint, for which a thread makes room on CUDA: locking pages takes a while."""
        self._device = device
        self._room: torch.Tensor | None = None
        self._locked = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._thread = threading.Thread(target=self._reserve, args=(expected_bytes,), daemon=True)
        if self._stream is not None and self._fits(expected_bytes):
            self._thread.start()

    def take(self, tensors: Tensors) -> dict[str, FileImage] | None:
        """Images of files, which hold these tensors once `wait` has returned; None where the host has too little
        memory. The one before is gone then."""
        images = {file: FileImage(of) for file, of in tensors.items()}
        sizes = [-(-image.bytes // _ALIGNMENT) * _ALIGNMENT for image in images.values()]
        if self._thread.ident is not None:
            self._thread.join()
        if self._room is None or self._room.numel() < sum(sizes):
            if not self._fits(sum(sizes)):
                return None
            self._reserve(sum(sizes))
        assert self._room is not None
        rooms = self._room[: sum(sizes)].split(sizes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for (file, image), room in zip(images.items(), rooms, strict=True):
                image.fill(tensors[file], room[: image.bytes])
                for tensor in tensors[file].values():
                    if self._stream is not None and tensor.is_cuda:
                        tensor.record_stream(self._stream)
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        return images

    def wait(self) -> None:
        """Until what was taken is there."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_updates(self) -> None:
        """Have what is queued on the device from here on wait for the copies: it may change what they read."""
        if self._copied is not None:
            self._copied.wait(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Give the memory back."""
        if self._thread.ident is not None:
            self._thread.join()
        self._release()

    def _fits(self, size: int) -> bool:
        present = 0 if self._room is None else self._room.numel()
        return size - present <= _LARGEST_PART * memory_left()

    def _reserve(self, size: int) -> None:
        """Have room for so many bytes. Where pages cannot be locked, copies take several times as long."""
        self._release()
        self._room = torch.zeros(size, dtype=torch.uint8)  # zeros: every page is there
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            self._locked = int(_runtime().cudaHostRegister(self._room.data_ptr(), size, 0)) == 0

    def _release(self) -> None:
        if self._room is not None and self._locked:
            self.wait()
            _runtime().cudaHostUnregister(self._room.data_ptr())
        self._room, self._locked = None, False


def _runtime() -> Any:
    return torch.cuda.cudart()


class Parts:
    """Parts of checkpoints, which the ranks of a divided state write side by side, in the background; rank 0 leads. Of
    several copies of the state (--sharding_ranks) the first is written.

    Messages go through a process group of their own, where no other thread can come in between.
    """

    def __init__(self, state: TrainState) -> None:
        """To be called by all ranks."""
        self._state, self._world = state, state.world
        own = sum(average.numel() for average in state.ema.state_dict().values())
        self.bytes = checkpoint_bytes(own, len(state.averages))  # about
        self._size = state.gradients.mesh.size
        timeout = timedelta(minutes=self._world.collective_timeout)
        self._group: Any = dist.new_group(list(range(self._size)), timeout, backend="gloo")
        self._snapshot: Snapshot | None = None
        self._writer: threading.Thread | None = None
        if 0 < self._world.rank < self._size:
            self._snapshot = Snapshot(self._world.device, self.bytes)
            state.write_part = self._follow

    def write(self, folder: Path, files: Files) -> dict[str, Any]:
        """On rank 0 what `write_files` does, with all ranks' parts and an index of them. Raises OSError."""
        self._tell((str(folder), list(files)))
        listing: dict[str, Any] = {}
        places: dict[str, dict[str, str]] = {name: {} for name in files}
        for written, names, problem in self._gather(self._own(folder, files)):
            if problem:
                raise OSError(*problem)
            listing |= written
            for (name, keys), part in zip(names.items(), written, strict=True):
                for key in keys:
                    places[name].setdefault(key, part)  # what several ranks have is the first one's
        return listing | write_indexes(folder, places, listing)

    def end(self) -> None:
        """On rank 0: there is nothing more to write in this save."""
        with suppress(RuntimeError):  # a rank is gone, which the run hears by its own messages
            self._tell(None)

    def close(self) -> None:
        """Wait for what this rank is writing when a run ends."""
        if self._writer is not None:
            self._writer.join(60 * self._world.collective_timeout)
        if self._snapshot is not None and (self._writer is None or not self._writer.is_alive()):
            self._snapshot.close()

    def _follow(self, tensors: Tensors) -> None:
        """On the others: write this rank's part where and as often as rank 0 says."""
        assert self._snapshot is not None
        if self._writer is not None:
            self._writer.join()  # it has ended, or is about to: rank 0 begins with the next save
        images = self._snapshot.take(tensors)
        self._state.before_update = self._snapshot.hold_updates
        files: Files = images or tensors

        def write() -> None:
            with suppress(RuntimeError):
                while (order := self._tell(None)) is not None:
                    folder, names = order
                    self._gather(self._own(Path(folder), {name: files[name] for name in names}))

        self._writer = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writer.start()
        if images is None:
            self._writer.join()

    def _own(self, folder: Path, files: Files) -> tuple[dict[str, Any], dict[str, list[str]], tuple[int, str] | None]:
        """Write this rank's part: its files, the names of their tensors, and what went wrong."""
        try:
            if self._snapshot is not None:
                self._snapshot.wait()
            written = write_files(folder, files, f"-{self._world.rank + 1:05}-of-{self._size:05}")
        except Exception as error:  # whatever it is, rank 0 waits to hear of it
            code, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
            return {}, {}, (code or 0, f"{words or error} (rank {self._world.rank} on {socket.gethostname()})")
        return written, {name: of.names if isinstance(of, FileImage) else list(of) for name, of in files.items()}, None

    def _tell(self, order: tuple[str, list[str]] | None) -> tuple[str, list[str]] | None:
        box = [order]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _gather(self, answer: Any) -> list[Any]:
        answers: list[Any] | None = [None] * self._size if self._world.is_main else None
        dist.gather_object(answer, answers, dst=0, group=self._group)
        return answers or []


class Saver:
    """Writes the checkpoints of a run, on rank 0, in the background. newest: the last one of the run."""

    def __init__(
        self,
        folder: RunFolder,
        inputs: Inputs,
        log: MetricLogger,
        conditions: StopConditions,
        status: StatusFile,
        state: TrainState,
        parts: Parts | None = None,
    ):
        """state: what the run starts from, which is in a checkpoint already, or follows from the seed. parts: of it,
        which all ranks write."""
        self._folder, self._inputs, self._log, self._say = folder, inputs, log, log.say
        self._conditions, self._status = conditions, status
        self._parents = checkpoint_folders(folder.path)
        self.newest = next(iter(list_checkpoints(*self._parents)), None)
        self._tries = [folder.checkpoints, folder.checkpoints]
        if inputs.config.spare_checkpoint_dir:
            self._tries.append(self._parents[-1])
        self._failed = 0  # saves in a row
        self._saved_step = state.step
        self._parts = parts
        self._snapshot = Snapshot(state.world.device, parts.bytes if parts else state.checkpoint_bytes)
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None  # of the writer
        self._began = time.monotonic()  # the present save, or the run
        self._noted = False
        if self.newest is not None and not inputs.config.save_weights_only:  # it was written, and then the run killed
            names = inputs.named_checkpoints.get(step_of(self.newest), ())
            self._name(self.newest, [name for name in names if not (self.newest.parent / name).exists()])

    @property
    def problem(self) -> str | None:
        """A sentence once a save has failed for good; the training loop then stops, and `finish` raises."""
        return None if self._error is None else str(self._error)

    def due(self, step: int) -> bool:
        """Whether --save_minutes have passed since the last save, and steps were done."""
        minutes = self._inputs.config.save_minutes
        return minutes > 0 and step != self._saved_step and time.monotonic() - self._began >= 60 * minutes

    def save(self, state: TrainState, tensors: Tensors, last: bool) -> bool:
        """Begin to write the checkpoints of a step, after those of the step before; returns whether training must wait
        for the end: as these are the last, or the host lacks memory for a copy.

        Raises SaveError where a save has failed and a later one may not help either.
        """
        inputs, step = self._inputs, state.step
        regular = last or inputs.saves_after(step) or self.due(step)
        began = time.monotonic()
        self.finish()
        images = self._snapshot.take(tensors)
        state.before_update = self._snapshot.hold_updates
        if images is None and not self._noted:
            self._noted = True
            self._say("note: the host lacks memory for a copy of the state: training waits while files are written")
        files: Files = images or tensors
        weights_only = inputs.config.save_weights_only
        names = inputs.named_checkpoints.get(step, ())
        record, ledger = self._record(state), json.dumps(inputs.ledger(step), indent=1)

        def write() -> None:
            try:
                self._snapshot.wait()
                self._log.sync()  # no checkpoint is newer than the metrics on the disk
                for name in names if weights_only else ():
                    self._write(step, {file: files[file] for file in files if file != "optimizer"}, record, last, name)
                if regular:
                    self._write_regular(step, files, record, ledger, last, () if weights_only else names)
            except Exception as error:  # raised again by `finish`
                self._error = error
            finally:
                if self._parts is not None:
                    self._parts.end()

        self._began = began
        self._writer = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writer.start()
        return last or images is None

    def finish(self) -> int:
        """Wait for what is being written; returns the step of the last save that worked.

        Raises SaveError, once, where it has failed and a later one may not help either.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if (error := self._error) is not None:
            self._error = None
            raise error
        return self._saved_step

    def last_checkpoint(self) -> Checkpoint | None:
        """The last save that worked. Raises SaveError or CheckpointError."""
        self.finish()
        return None if self.newest is None else open_checkpoint(self.newest)

    def close(self) -> None:
        """Wait for what is being written when a run ends by an error, whose reason is told already."""
        if self._writer is not None:
            self._writer.join(60 * self._inputs.config.collective_timeout)
            if self._writer.is_alive():
                return  # its disk does not answer; a resume removes what is unfinished
        if self._error is not None:
            self._say(f"note: {self._error}")
            self._error = None
        self._snapshot.close()

    def _write_regular(
        self, step: int, files: Files, record: Mapping[str, Any], ledger: str, last: bool, names: Sequence[str]
    ) -> None:
        """Write a checkpoint that a resume can take, and what follows from it. Raises SaveError."""
        path = self._write(step, files, record, last)
        if path is None:
            return
        self._saved_step = step
        self._name(path, names)
        self._prune(step)
        try:
            write_atomically(self._folder.ledger, ledger.encode())
            self._status.write(RUNNING, "", step)
        except OSError as error:
            self._say(f"note: status.json and ledger.json in {self._folder.path} cannot be written: {error.strerror}")

    def _write(self, step: int, files: Files, record: Mapping[str, Any], last: bool, name: str = "") -> Path | None:
        """Write a checkpoint, or one of weights alone that has a name. None where it failed and a later one may not.

        last: there will be no later one. Raises SaveError.
        """
        config, problems = self._inputs.config, []
        for parent in self._tries:
            try:
                if parent == self._folder.checkpoints:
                    self._folder.check()
                tensors = files if self._parts is None else partial(self._parts.write, files=files)
                path = write_checkpoint(parent, step, tensors, record, self._files(), name)
            except SaveError as error:
                problems.append(str(error))
                if len(problems) == 1:
                    time.sleep(_PAUSE_SECONDS)
                continue
            if problems:
                self._say(f"note: {problems[0]}; tried again, {path} was written")
            self._failed = 0
            seconds = time.monotonic() - self._began
            self._say(f"step {step:>6}  saved {path} in {seconds:.1f} s")
            if not name:
                self.newest = path
                self._conditions.saved(seconds)
            return path
        self._failed += 1
        failures, limit = "; ".join(dict.fromkeys(problems)), config.max_failed_saves
        if not last and self._failed < limit:
            row = f"{self._failed} of --max_failed_saves {limit} in a row"
            self._say(f"note: {failures}; the run continues without this save ({row})")
            return None
        newest = next(iter(list_checkpoints(*self._parents)), None)
        kept = f"; {newest} is intact" if newest else ""
        raise SaveError(f"{failures}{kept}. Check space, rights, mounts or give --spare_checkpoint_dir, then resume")

    def _name(self, path: Path, names: Sequence[str]) -> None:
        """Give a checkpoint its names; a file system without links is no failed save."""
        try:
            for name in names:
                give_name(path, name)
                self._say(f"{name} is {path}")
        except OSError as error:
            self._say(f"note: {path} cannot have the names {', '.join(names)} ({error.strerror})")

    def _record(self, state: TrainState) -> dict[str, Any]:
        inputs, step = self._inputs, state.step
        return {
            "tokens": inputs.plan.tokens_before(step),
            "ledger": inputs.ledger(step),
            "hours": round(self._conditions.hours, 4),
            "flags": inputs.config.to_dict(),
            **({} if state.spikes is None else {"spikes": state.spikes.to_json()}),
            **({"starts": dict(state.starts)} if any(state.starts.values()) else {}),
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
            prune(self._parents, step, config.keep_last, config.save_steps)
        except OSError as error:
            self._say(f"note: --keep_last {config.keep_last}: an old checkpoint could not be deleted: {error}")
