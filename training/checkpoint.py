"""Checkpoints: complete, atomic and never unpickled.

A checkpoint is a folder `checkpoints/step_00001000/` of safetensors files, the model's configuration and tokenizer, and
`checkpoint.json` with the size and SHA-256 of every other file. It is written under a temporary name, flushed to disk
and renamed, so a folder with the final name is whole; what was damaged later is noticed by its checksum. Large files
are written and summed up in parts, on several threads: their checksum is that of their parts' checksums. Where ranks
divide the state each writes files of its own, NAME-00001-of-00004.safetensors, and NAME.safetensors.index.json says
which tensor is where, as transformers has it.

torch.distributed.checkpoint is not used: its metadata is a pickle, which is code that a load runs, it has no checksums,
and its folder is not put in place at once; other programs could not read the weights as they are here.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.atomic_io import sync_folder, write_atomically
from training.config import ConfigError, later_flag
from training.ema import weights_file
from training.errors import HARDWARE, UserError
from training.status import ABANDONED, checkpoint_folders, folder_name, list_checkpoints, step_of

FORMAT = 2  # 1 had checksums of whole files alone
RECORD = "checkpoint.json"
INDEX = ".safetensors.index.json"  # after the name of what is in several files
_THREADS = 8  # that write, read and sum up parts of files: Python's lock is free meanwhile
_PART_BYTES = 2**24
# Names of types in safetensors files
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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

    def tensors(
        self, name: str, device: str | torch.device = "cpu", wanted: Callable[[str], bool] = lambda name: True
    ) -> dict[str, torch.Tensor]:
        """The tensors of the file NAME, or of its parts, whose names are `wanted`; no others are read."""
        return read_tensors(self.path, name, device, wanted)

    def holds(self, name: str) -> bool:
        """Whether there is a file NAME, or parts of it."""
        return f"{name}.safetensors" in self.record["files"] or f"{name}{INDEX}" in self.record["files"]

    def weights(self, average: bool | str) -> dict[str, torch.Tensor]:
        """The weights, or an average of them (`weights_file`). Raises CheckpointError where it is not there."""
        name, files = weights_file(average), self.record["files"]
        if not self.holds(name):
            there = ", ".join(file for file in files if file.startswith(("model.", "ema")))
            raise CheckpointError(f"checkpoint {self.path} has no {name}.safetensors; it holds {there}")
        return self.tensors(name)


def read_tensors(
    folder: Path, name: str, device: str | torch.device = "cpu", wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    """The `wanted` tensors of `folder/NAME.safetensors`, or of the parts in its index. Raises OSError, ValueError and
    SafetensorError."""
    from safetensors import safe_open

    files: dict[str, list[str] | None] = {f"{name}.safetensors": None}  # None: all
    if (index := folder / f"{name}{INDEX}").is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {part: [key for key in places if places[key] == part] for part in sorted({*places.values()})}
    found = {}
    for part, keys in files.items():
        if keys is None or any(map(wanted, keys)):
            with safe_open(folder / part, framework="pt", device=str(device)) as file:
                found |= {key: file.get_tensor(key) for key in keys or file.keys() if wanted(key)}
    return found


def checkpoint_bytes(parameters: int, further_averages: int = 0) -> int:
    """About how large a checkpoint of so many parameters is: weights, their averages and two moments, in float32."""
    return (16 + 4 * further_averages) * parameters


class FileImage:
    """A safetensors file in memory, byte for byte (its format: https://github.com/huggingface/safetensors)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lays out a file for tensors like these. Raises SaveError for a type that such files do not know."""
        header, end, bounds = {}, 0, {}
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):  # so all are aligned
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES:
                raise SaveError(f"a checkpoint cannot hold {name}, which is of type {tensor.dtype}")
            bounds[name] = (end, end := end + tensor.numel() * tensor.element_size())
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": bounds[name]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._bounds = bounds
        self.bytes = len(self._header) + end
        self._content: torch.Tensor | None = None

    @property
    def names(self) -> list[str]:
        """Of its tensors."""
        return list(self._bounds)

    def fill(self, tensors: Mapping[str, torch.Tensor], room: torch.Tensor | None = None) -> FileImage:
        """Copy the tensors into it; copies from a device are only begun where `room` is page-locked.

        room: uint8 [bytes] on the host, aligned to 8 bytes; by default newly made.
        """
        self._content = content = torch.empty(self.bytes, dtype=torch.uint8) if room is None else room
        data = content[len(self._header) :]
        content.numpy().data[: len(self._header)] = self._header
        for name, (begin, end) in self._bounds.items():
            tensor = tensors[name].detach()
            data[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=room is not None)
        return self

    def write(self, path: Path, pool: Executor) -> dict[str, Any]:
        """Write the file; returns what checkpoint.json says of it. Raises OSError."""
        assert self._content is not None
        data = self._content.numpy().data
        with path.open("wb") as file:

            def write_part(begin: int) -> bytes:
                part, place = data[begin : begin + _PART_BYTES], begin
                while place < begin + len(part):
                    place += os.pwrite(file.fileno(), part[place - begin :], place)
                return hashlib.sha256(part).digest()

            parts = [pool.submit(write_part, begin) for begin in range(0, self.bytes, _PART_BYTES)]
            wait(parts)  # for all of them, whatever one of them meets: the file must stay open for the others
            return _entry(self.bytes, [part.result() for part in parts])


def _entry(size: int, digests: list[bytes]) -> dict[str, Any]:
    """What checkpoint.json says of a file: its bytes and its checksum, or the checksum of its parts' checksums."""
    if len(digests) == 1:
        return {"bytes": size, "sha256": digests[0].hex()}
    joined = hashlib.sha256(b"".join(digests)).hexdigest()
    return {"bytes": size, "sha256": joined, "part_bytes": _PART_BYTES}


Files = Mapping[str, Mapping[str, torch.Tensor] | FileImage]  # by name


def write_files(folder: Path, tensors: Files, part: str = "") -> dict[str, Any]:
    """Write safetensors files `NAME{part}.safetensors`; returns what checkpoint.json says of each. Raises OSError."""
    listing = {}
    with ThreadPoolExecutor(_THREADS) as pool:  # one file is flushed while the next is written
        flushed: list[Future[None]] = []
        for name, of in tensors.items():
            path = folder / f"{name}{part}.safetensors"
            image = of if isinstance(of, FileImage) else FileImage(of).fill(of)
            listing[path.name] = image.write(path, pool)
            flushed.append(pool.submit(_flush, path))
        for done in flushed:
            done.result()
    return listing


def _write_small(folder: Path, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Write small files by name; returns what checkpoint.json says of each. Raises OSError."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
        _flush(folder / name)
    return {name: _entry(len(data), [hashlib.sha256(data).digest()]) for name, data in files.items()}


def write_indexes(folder: Path, places: Mapping[str, Mapping[str, str]], listing: Mapping[str, Any]) -> dict[str, Any]:
    """Write the indexes of files in parts; returns what checkpoint.json says of each. Raises OSError.

    places: the parts of tensors, by file and name. listing: what `write_files` returned for all parts.
    """
    indexes = {}
    for name, parts in places.items():
        size = sum(listing[part]["bytes"] for part in set(parts.values()))
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": parts}, indent=1)
        indexes[f"{name}{INDEX}"] = text.encode()
    return _write_small(folder, indexes)


def write_checkpoint(
    parent: Path,
    step: int,
    tensors: Files | Callable[[Path], dict[str, Any]],
    record: Mapping[str, Any],
    files: Mapping[str, bytes],
    name: str = "",
) -> Path:
    """Write `parent/step_XXXXXXXX`, or `parent/NAME`, and return it; an older folder there is replaced at the end.

    tensors: for each safetensors file its named tensors, of which a copy is made file by file, or its filled image; or
    what writes them to a folder, as `write_files` does.
    record: further entries of checkpoint.json. files: small files by name. Raises SaveError where the disk is full or
    not writable; nothing that existed before is touched then.
    """
    target = parent / (name or folder_name(step))
    temporary = parent / f".tmp_{target.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        listing = tensors(temporary) if callable(tensors) else write_files(temporary, tensors)
        listing |= _write_small(temporary, files)
        listing = {name: listing[name] for name in sorted(listing)}
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
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else error.strerror or str(error)
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


def _flush(path: Path) -> None:
    """Have a written file on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _part_digest(part: tuple[Path, int, int]) -> bytes:
    """SHA-256 of a file's bytes from, to. Raises OSError."""
    path, place, end = part
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(place)
        while place < end and (block := file.read(min(2**20, end - place))):
            digest.update(block)
            place += len(block)
    return digest.digest()


def _damaged(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The first file of a checkpoint that does not match its checksum, "" where all do."""
    parts: list[tuple[Path, int, int]] = []
    for name, entry in files.items():
        size, step = entry["bytes"], entry.get("part_bytes", entry["bytes"]) or 1
        parts += [(path / name, begin, min(size, begin + step)) for begin in range(0, max(1, size), step)]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(zip(parts, pool.map(_part_digest, parts), strict=True))
    for name, entry in files.items():
        found = [digest for (file, *_), digest in digests if file.name == name]
        whole = hashlib.sha256(b"".join(found)) if "part_bytes" in entry else None
        if (whole.digest() if whole else found[0]).hex() != entry["sha256"]:
            return name
    return ""


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in folder `path`, every file checked against its checksum. Raises CheckpointError."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        files = record["files"]
        if not 1 <= record["format"] <= FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {record['format']}; this version reads 1 to {FORMAT}")
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
    if name := _damaged(path, files):
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
    try:
        return read_tensors(path, "model") if path.is_dir() else load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"--initial_weights: {path} cannot be read as weights: {error}") from error


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
