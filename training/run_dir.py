"""The run folder OUTPUT_DIR/NAME: its files, its lock, and config.json with everything needed to repeat the run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

from data.atomic_io import json_object, write_atomically
from data.batch_schedule import BatchSchedule
from data.positions import Exposure, PositionError, parse_position, step_after
from data.wording import time_text
from training.checkpoint import RECORD, SaveError, training_flags
from training.config import FIELDS, ConfigError, TrainingConfig
from training.environment import COMMIT_FILE, git
from training.schedules import OPEN_ENDED
from training.status import LEDGER, SAMPLES, checkpoint_folders, copied_from, list_checkpoints
from training.watchdog import HeartbeatFile

_ROOT = Path(__file__).resolve().parent.parent
_OWNER_SECONDS = 10.0  # between heartbeats of the folder's owner
STALE_SECONDS = 60.0  # without a heartbeat, after which an owner counts as gone; far more than clocks differ


def git_commit() -> str | None:
    """Commit of this checkout, with a + where files differ from it; None outside git. In the copy of the code that
    slurm/launch.py makes for a job, what that has noted."""
    noted = _ROOT / COMMIT_FILE
    if noted.is_file():
        return noted.read_text(encoding="utf-8").strip() or None

    commit = git(_ROOT, "rev-parse", "HEAD")
    return commit and commit.strip() + "+" * bool(git(_ROOT, "status", "--porcelain", "-uno"))


def versions() -> dict[str, str]:
    """Versions on which numbers may depend."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


class RunView:
    """OUTPUT_DIR/NAME, to be read; it need not exist."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / SAMPLES
        self.config = path / "config.json"
        self.ledger = path / LEDGER

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Where its checkpoints may be, its own folder first."""
        return checkpoint_folders(self.path)

    @property
    def used(self) -> bool:
        """Whether a run has left checkpoints or metrics here."""
        return bool(list_checkpoints(*self.checkpoint_folders)) or (
            self.metrics.exists() and self.metrics.stat().st_size > 0
        )

    def check_unlocked(self) -> None:
        """Raise ConfigError where another process has locked the folder to train in it."""
        lock = self.path / ".lock"
        if not lock.exists():
            return
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use("another process") from None
            except OSError:  # a file system without locks
                return

    def _in_use(self, holder: str) -> ConfigError:
        return ConfigError(f"--name: {holder} is training in {self.path}; wait for it or take another name")

    def read_config(self) -> dict[str, Any] | None:
        """The config.json of an earlier start; None where there is none. Raises ConfigError where it is damaged."""
        if not self.config.exists():
            return None
        try:
            return json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.config} cannot be read ({error}); restore it, or take another --name") from error


class RunFolder(RunView):
    """The folder of a run at work. Only rank 0 has one; it is locked while it is open."""

    def __init__(self, path: Path, patience: float = 0.0):
        """Open and lock the folder; `patience`: seconds to wait for a process that has it. Raises ConfigError."""
        super().__init__(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"--output_dir: {path} cannot be written: {error.strerror}") from error
        self._owner = FolderOwner(path)  # where there are no locks
        if holder := self._acquire(patience):
            self._lock.close()
            raise self._in_use(holder)
        self._held = {place: os.open(place, os.O_RDONLY) for place in (path, self.checkpoints)}

    def _acquire(self, patience: float) -> str:
        """Take the folder, by its lock or as its owner; who has it, where that stays another process."""
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return ""
            except BlockingIOError:
                holder = "another process"
            except OSError:
                holder = self._owner.claim()
                if not holder:
                    print(f"note: {self.path} is on a file system without locks: owner.json guards it", flush=True)
                    return ""
                holder = f"another process ({holder})"
            if time.monotonic() >= end:
                return holder
            time.sleep(0.5)

    def write_config(
        self, config: TrainingConfig, content: Mapping[str, Any], tokenizer_text: str, launch: Mapping[str, Any]
    ) -> str:
        """Write or extend config.json (`content`: Inputs.as_json); returns the run's wandb id."""
        old = self.read_config() or {}
        if original := copied_from(self.path, old):
            print(f"note: {self.path} is a copy of {original}: it gets a wandb run of its own", flush=True)
            old = {**old, "wandb_id": None, "spare_checkpoints": []}
        wandb_id = old.get("wandb_id") or secrets.token_hex(4)
        spare = self._spare(config, wandb_id, old.get("spare_checkpoints", []))
        record = {
            **content,
            "versions": versions(),
            "git_commit": git_commit(),
            "folder": str(self.path.resolve()),
            "wandb_id": wandb_id,
            "spare_checkpoints": spare,
            "launches": [*old.get("launches", []), launch],
        }
        write_atomically(self.config, json.dumps(record, indent=1).encode())
        write_atomically(self.path / "tokenizer.json", tokenizer_text.encode())
        return wandb_id

    def _spare(self, config: TrainingConfig, run_id: str, known: list[str]) -> list[str]:
        """Every folder that --spare_checkpoint_dir has meant for this run, the present one last. Raises ConfigError."""
        if not config.spare_checkpoint_dir:
            return known
        spare = Path(config.spare_checkpoint_dir).resolve() / f"{config.name}_{run_id}" / "checkpoints"
        try:
            spare.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"--spare_checkpoint_dir: {spare} cannot be written: {error.strerror}"
            if not known:
                raise ConfigError(problem) from error
            print(f"note: {problem}", flush=True)  # it was fit when the run began; the run can do without for now
        return [*(path for path in known if path != str(spare)), str(spare)]

    def check(self) -> None:
        """Raise SaveError where the folder is not the one that was opened: what is written there now would be lost."""
        for place, descriptor in self._held.items():
            try:
                same, reason = (
                    os.path.samestat(os.fstat(descriptor), place.stat()),
                    "it was unmounted, moved or replaced",
                )
            except OSError as error:
                same, reason = False, error.strerror
            if not same:
                raise SaveError(f"{place} is not the folder that the run has opened: {reason}")

    def close(self) -> None:
        """Release the folder."""
        self._owner.release()
        self._lock.close()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}


class FolderOwner:
    """A folder's lock where the file system has none: owner.json, with a heartbeat every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "owner.json"
        self._heartbeat: HeartbeatFile | None = None

    def claim(self) -> str:
        """Own the folder; "" where that worked, else who does. A stale owner is replaced, with a note. Raises OSError
        where the folder cannot be written."""
        aside = self._path.with_name(f".owner_{os.getpid()}_{socket.gethostname()}")
        while True:
            try:
                with self._path.open("x") as file:  # atomic, also on file systems without locks
                    file.write(json.dumps(_this_process()))
                self._heartbeat = HeartbeatFile(self._path, _this_process, _OWNER_SECONDS)
                return ""
            except FileExistsError:
                found = self._read()
                if holder := _live_owner(found):
                    return holder
                with suppress(FileNotFoundError):  # somebody else was faster, and will own it
                    os.rename(self._path, aside)
                    aside.unlink()
                    print(f"note: {self._path} is of {_describe(found)}: taken over", flush=True)

    def release(self) -> None:
        """Give the folder back, where it is owned."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _read(self) -> dict[str, Any]:
        """What owner.json says; one that is gone, or damaged, or being written, says when."""
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            with suppress(OSError):
                return {"time": self._path.stat().st_mtime}
            return {"time": 0.0}


def _this_process() -> dict[str, Any]:
    """This process. pids: in which namespace its number counts; containers have their own."""
    pids = None
    with suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    job = os.environ.get("SLURM_JOB_ID")
    return {"host": socket.gethostname(), "pid": os.getpid(), "pids": pids, "job": job, "time": time.time()}


def _describe(found: dict[str, Any]) -> str:
    if "pid" not in found:
        return "an unknown process"
    job = f" of job {found['job']}" if found["job"] else ""
    age = time_text(time.time() - found["time"])
    return f"process {found['pid']} on {found['host']}{job}, last heartbeat {age} ago"


def _live_owner(found: dict[str, Any]) -> str:
    """Describes an owner that lives; "" where it does not."""
    if time.time() - found["time"] > STALE_SECONDS:
        return ""
    own = _this_process()
    if "pid" in found and found["pids"] is not None and all(found[key] == own[key] for key in ("host", "pids")):
        with suppress(PermissionError):  # it lives, and is another user's
            try:
                os.kill(found["pid"], 0)
            except ProcessLookupError:
                return ""
    return _describe(found)


def origin(config: TrainingConfig) -> str | None:
    """The full path that --resume or --checkpoint_filename names, None where it names none."""
    source = config.checkpoint_filename or config.resume
    return None if source in ("auto", "never") else str(Path(source).resolve())


def annealed(config: TrainingConfig, exposure: Exposure) -> TrainingConfig:
    """With --anneal_from, `config` as the run of that checkpoint is planned, for its step and --anneal_steps more.
    Raises ConfigError."""
    if not config.anneal_from:
        return config
    names = ("max_steps", "planned_steps", "anneal_steps")
    given = {"resume": config.anneal_from, "max_tokens": "", "max_words": "", "max_epochs": ""}
    if begun := training_flags(config.run_folder):  # the checkpoint may be gone
        return dataclasses.replace(config, **given, **{name: begun[name] for name in names})
    record = json_object(Path(config.anneal_from) / RECORD)
    if not record:
        raise ConfigError(f"--anneal_from {config.anneal_from!r} is no checkpoint; give .../checkpoints/step_00001000")
    flags, step = record["flags"], int(record["step"])
    planned = flags.get("planned_steps") or flags["max_steps"]
    sizes = (config.seq_length, config.global_batch_size, config.batch_reduction, config.length_milestones)
    try:
        part = parse_position(str(config.anneal_steps or 0.2))
        end = step_after(step, part, BatchSchedule(planned, *sizes), exposure)
    except PositionError as error:
        raise ConfigError(f"--anneal_steps is {config.anneal_steps}; {error}") from error
    found = dict(zip(names, (end, max(planned, end), str(end - step)), strict=True))
    return dataclasses.replace(config, **given, **found)


def extended(config: TrainingConfig) -> TrainingConfig:
    """`config` of a longer run that branches off, with the ends of the runs before it, in whose order it goes on."""
    source = config.checkpoint_filename or config.resume
    begun = training_flags(config.run_folder)
    if config.earlier_ends or (not begun and (source in ("auto", "never") or "step" in config.reset)):
        return config
    if begun:
        return dataclasses.replace(config, earlier_ends=tuple(begun.get("earlier_ends", ())))
    flags = training_flags(Path(source))
    ends = _row_order(flags).ends if flags else None
    found = dataclasses.replace(config, earlier_ends=tuple(end for end in ends or () if end < config.planned_length))
    return found if flags and keeps_row_order(flags, found.to_dict()) else config


def keeps_row_order(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a branch with the flags `new` reads rows in the order of the run with `old`, and longer ones go on."""
    before, now = _row_order(old), _row_order(new)
    if before == now or before.moves or before.flags != now.flags or before.ends is None or now.ends is None:
        return before == now
    return now.ends[: len(before.ends)] == before.ends


class _RowOrder(NamedTuple):
    """What the order of rows depends on. moves: it changes over the run. ends: steps up to which rows are shuffled by
    themselves; None where they do not depend on the run's length."""

    flags: list[Any]
    moves: bool
    ends: list[int] | None


def _row_order(flags: dict[str, Any]) -> _RowOrder:
    flags = {name: flags.get(name, spec.default) for name, spec in FIELDS.items()}
    names = ("seq_length", "global_batch_size", "hybrid_numerator", "hybrid_denominator", "seed", "document_end")
    names = (*names, "order", "block_tokens", "shuffle_tokens")
    still = {"batch_reduction": 1, "length_milestones": [], "hybrid_numerator_end": -1, "hybrid_schedule": ""}
    moving = [list(found) if isinstance(found := flags[name], tuple) else found for name in still]
    moves = moving != list(still.values())
    ends = [*flags["earlier_ends"], flags["planned_steps"] or flags["max_steps"]]
    open_end = not moves and flags["schedule"] in OPEN_ENDED
    return _RowOrder([*(flags[name] for name in names), *moving], moves, None if open_end else ends)
