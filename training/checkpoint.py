"""Checkpoints: complete, atomic and never unpickled.

A checkpoint is a folder `checkpoints/step_00001000/` of safetensors files, the model's configuration and tokenizer, and
`checkpoint.json` with the size and SHA-256 of every other file. It is written under a temporary name, flushed to disk
and renamed, so a folder with the final name is whole; what was damaged later is noticed by its checksum.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.atomic_io import sync_folder, take_folder_mode, write_atomically
from data.shards import sha256_file
from training.config import ConfigError, later_flag
from training.errors import HARDWARE, UserError
from training.status import ABANDONED, checkpoint_folders, folder_name, list_checkpoints, step_of

FORMAT = 1
RECORD = "checkpoint.json"
_THREADS = 4  # that flush and sum up files: Python's lock is free meanwhile


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message names the folder and what to do."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; the message names the folder and says why."""

    kind = HARDWARE


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint on disk. `record` is the content of its checkpoint.json."""

    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return int(self.record["step"])

    def tensors(self, name: str, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """The tensors of `NAME.safetensors`."""
        from safetensors.torch import load_file

        return load_file(self.path / f"{name}.safetensors", device=str(device))


def checkpoint_bytes(parameters: int) -> int:
    """About how large a checkpoint of so many parameters is: weights, their average and two moments, in float32."""
    return 16 * parameters


def _no_space(error: BaseException) -> bool:
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


def write_checkpoint(
    parent: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    record: Mapping[str, Any],
    files: Mapping[str, bytes],
    name: str = "",
) -> Path:
    """Write `parent/step_XXXXXXXX`, or `parent/NAME`, and return it; an older folder there is replaced at the end.

    tensors: for each safetensors file its named tensors. record: further entries of checkpoint.json. files: small files
    by name. Raises SaveError where the disk is full or not writable; nothing that existed before is touched then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = parent / (name or folder_name(step))
    temporary = parent / f".tmp_{target.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with ThreadPoolExecutor(_THREADS) as pool:  # one file is flushed and summed up while the next is written
            sealed: dict[str, Future[dict[str, Any]]] = {}
            for name in sorted(tensors, key=lambda name: -sum(value.numel() for value in tensors[name].values())):
                on_host = {key: value.detach().to("cpu").contiguous() for key, value in tensors[name].items()}
                path = temporary / f"{name}.safetensors"
                save_file(on_host, path)
                sealed[path.name] = pool.submit(_seal, path)
            for name, data in files.items():
                (temporary / name).write_bytes(data)
                sealed[name] = pool.submit(_seal, temporary / name)
            listing = {name: sealed[name].result() for name in sorted(sealed)}
        content = {"format": FORMAT, "step": step, **record, "files": listing}
        write_atomically(temporary / RECORD, json.dumps(content, indent=1).encode())
        old = parent / f".old_{target.name}"
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            os.rename(target, old)
        os.rename(temporary, target)
        sync_folder(parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = "the disk is full" if _no_space(error) else getattr(error, "strerror", None) or str(error)
        raise SaveError(f"checkpoint {target} could not be written: {reason}") from error
    return target


def give_name(checkpoint: Path, name: str) -> None:
    """Have `name` beside a checkpoint stand for it, as a link, in the place of what stood there. Raises OSError."""
    link, temporary = checkpoint.parent / name, checkpoint.parent / f".tmp_{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    os.replace(temporary, link)
    sync_folder(link.parent)


def _seal(path: Path) -> dict[str, Any]:
    """Flush a written file to disk; returns what checkpoint.json says of it."""
    take_folder_mode(path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in folder `path`, every file checked against its checksum. Raises CheckpointError."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        files = record["files"]
        if record["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {record['format']}; this version reads {FORMAT}")
        int(record["step"])
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} has no {RECORD}: it is not a checkpoint, or incomplete") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} is damaged: {RECORD} cannot be read ({error})") from error
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
            )
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, found in zip(files, pool.map(sha256_file, [path / name for name in files]), strict=True):
            if found != files[name]["sha256"]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not match its checksum")
    return Checkpoint(path, record)


def find_newest(*parents: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint in folders of checkpoints, and a sentence for each newer one that is not."""
    problems = []
    for path in list_checkpoints(*parents):
        try:
            return open_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def _say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr, flush=True)


def locate(path: str | Path, say: Callable[[str], None] = _say) -> Checkpoint:
    """The checkpoint meant by a checkpoint folder or a run folder (its newest whole one). Raises CheckpointError.

    say: reports each newer one that is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; give a checkpoint (.../checkpoints/step_00001000) or a run folder"
        )
    folders = checkpoint_folders(path)
    if folders[0].is_dir() or folders[1:]:
        found, problems = find_newest(*folders)
        if found is None:
            raise CheckpointError("; ".join(problems) or f"run folder {path} has no checkpoint yet")
        for problem in problems:
            say(f"{problem}; {found.path} is taken instead")
        return found
    return open_checkpoint(path)


def set_aside(parent: Path, step: int, records: Iterable[Path] = (), rename: bool = True) -> list[str]:
    """Rename the checkpoints newer than `step`, from which their run resumes: they are of another branch, or damaged.

    Returns a sentence for each. records: the run's files that get shorter now; the newest checkpoint gets a copy of
    them. rename: without, nothing is changed. Raises OSError.
    """
    notes = []
    for path in (path for path in list_checkpoints(parent) if step_of(path) > step):
        numbers = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
        name = next(n for i in numbers if not (parent / (n := f"{ABANDONED}{path.name}{i}")).exists())
        notes.append(f"the run resumes from step {step}: {path} is kept as {name} and counts no more")
        if rename:
            for record in filter(Path.exists, [] if len(notes) > 1 else records):
                shutil.copyfile(record, path / record.name)
            os.rename(path, parent / name)
    return notes


def prune(parents: Iterable[Path], step: int, keep_last: int, keep_steps: tuple[int, ...]) -> None:
    """Delete checkpoints up to `step`, the one just written, but the newest `keep_last` (0: all), `keep_steps` and
    those that have a name. Raises OSError.
    """
    folders = list(parents)
    named = {os.readlink(path) for folder in folders for path in folder.glob("chck_*") if path.is_symlink()}
    regular = [p for p in list_checkpoints(*folders) if step_of(p) <= step and step_of(p) not in keep_steps]
    regular = [path for path in regular if path.name not in named]
    for path in regular[keep_last:] if keep_last else []:
        removed = path.with_name(f".gone_{path.name}")  # renamed first: a half-deleted folder must not look like one
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


def clean(parent: Path) -> None:
    """Finish what an interrupted save or deletion left behind."""
    for path in parent.glob(".old_*"):
        whole = path.with_name(path.name.removeprefix(".old_"))
        if not whole.exists():  # the save was cut off between its two renames: the older folder is still the good one
            os.rename(path, whole)
    for pattern in (".tmp_*", ".old_*", ".gone_*"):
        for path in parent.glob(pattern):
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def read_initial_weights(source: str) -> dict[str, torch.Tensor]:
    """The weights that --initial_weights names. Raises ConfigError where they are not there or of another model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(source)
    if (path / "checkpoints").is_dir():
        path = locate(path).path
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--initial_weights: {file} cannot be read as weights: {error}") from error


def training_flags(model: Path) -> dict[str, Any]:
    """The flags that a model was trained with, as far as its folder tells."""
    for name in (RECORD, "config.json"):  # of a checkpoint; of a run folder or an exported folder
        try:
            return dict(json.loads((model / name).read_text(encoding="utf-8"))["flags"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def rows_begin_with_bos(flags: Mapping[str, Any]) -> bool:
    """Whether training's rows begin with `<s>`: by default and as published, but not before there was a flag for it."""
    return bool(later_flag(flags, "row_start"))
