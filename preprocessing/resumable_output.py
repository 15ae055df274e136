"""Resumable output folder of shards, made by one process or by many (tasks of a SLURM job array) in two passes.

Process I of N encodes its files into slices (see slices.py) and goes on behind the last slice when it is run again.
Whoever completes the last part cuts all slices, in order, into shards: the same bytes for any N and after any
interruption. While this goes on there is

    OUTPUT/journal.json                    what is being made, and that it is unfinished
    OUTPUT/.parts/lock                     held while that is compared, while complete parts are and while
                                           shards are made; byte I is "1" where part I is complete
    OUTPUT/.parts/part_00003.lock          held while part 3 is made
    OUTPUT/.parts/part_00003/slice_*.npz   what is encoded of part 3

Manifests declare the folder complete; then journal.json and .parts go. The count lies inside the lock's file because a
network file system may show other nodes a new file half a minute late, but shows them the content of a file that they
have just locked: of processes that end at the same moment, exactly the last one sees a full count.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from data.atomic_io import sync_folder, write_atomically
from data.offsets_table import TABLE_FROM, write_table
from data.shard_paths import resolve_shards
from data.shards import (
    FORMAT_VERSION,
    JOURNAL_NAME,
    MANIFEST_NAME,
    ShardFile,
    read_manifest,
    tokenizer_hash,
    write_manifest,
)
from data.wording import count, ranks_text
from preprocessing.cli import CommandError
from preprocessing.inputs import InputFile
from preprocessing.readers import DOCUMENT_BYTES
from preprocessing.slices import ShardCutter, SliceWriter, read_progress, read_slices
from preprocessing.tokenizer import load_tokenizer, roles_to_record, vocabulary_size

TOKENIZER_NAME = "tokenizer.json"
PARTS_NAME = ".parts"
_SLICES_VERSION = 2
_OURS = re.compile(
    r"(shard_\d+\.(shard(\.offsets)?|fields\.jsonl)|manifest\.json|offsets\.bin|journal\.json|tokenizer\.json)(\.partial)?"
)
_SPLITS = ("train", "validation")
_FLAGS = {
    "inputs": "--input",
    "tokenizer": "--tokenizer_path",
    "script": "the script",
    "format": "the format",
    "slices": "the version of this program",
    "document_bytes": "the version of this program",
}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class FolderPlan:
    """What is to be made where. given: what decides the content beside files, tokenizer and size of shards."""

    folder: Path
    files: Sequence[InputFile]
    tokenizer_path: Path
    special_tokens: str  # as --special_tokens
    shard_size: int
    given: dict[str, Any]
    skip_bad_lines: bool = False

    @cached_property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer_path)

    @cached_property
    def options(self) -> dict[str, Any]:
        """All that decides the content beside files and tokenizer; goes into the manifest."""
        return {
            **self.given,
            "shard_size": self.shard_size,
            **roles_to_record(self.tokenizer_path, self.special_tokens),
        }

    @property
    def splits(self) -> tuple[str, ...]:
        """("",) for shards in the folder itself, or ("train", "validation")."""
        return _SPLITS if self.given.get("validation_fraction") else ("",)

    @property
    def made_by(self) -> dict[str, Any]:
        """For the manifest: options and inputs, but not where the inputs lie."""
        inputs = [{"name": file.name, "bytes": file.size, "modified": file.modified} for file in self.files]
        return {**self.options, "inputs": inputs}


@dataclass(frozen=True)
class Totals:
    """What a complete folder holds: the shards of each split by its name, counts such as of empty documents, and what
    the manifests say of each split's sidecars ([]: there are none)."""

    shards: dict[str, list[ShardFile]]
    counts: dict[str, int]
    sidecars: list[list[dict[str, Any]]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Documents, words and tokens of each split, for people."""
        found = []
        for name, shards in self.shards.items():
            sums = {noun: sum(getattr(each, f"{noun}s") for each in shards) for noun in ("document", "word", "token")}
            per_word = sums["token"] / max(sums["word"], 1)
            totals = ", ".join(count(number, noun) for noun, number in sums.items())
            shard_count = count(len(shards), "shard")
            found.append(f"{name or 'total'}: {totals} ({per_word:.3f} tokens per word) in {shard_count}")
        return found


class OutputFolder:
    """The folder of a plan. Slices are written inside `making`, then `record` counts the part as complete; when all
    are, `assemble` makes the shards."""

    def __init__(self, plan: FolderPlan, parts: int = 1) -> None:
        self.plan = plan
        self.parts = parts
        self.can_lock = True
        self._parts_folder = plan.folder / PARTS_NAME
        self._vocab_size = vocabulary_size(load_tokenizer(plan.tokenizer_path))
        self._tokenizer = plan.tokenizer_path.read_bytes()  # now: the file may change before the end
        inputs = [[file.place, file.size, file.modified] for file in plan.files]
        self._identity = {
            "slices": _SLICES_VERSION,
            "parts": parts,
            **plan.options,
            "format": FORMAT_VERSION,
            "document_bytes": DOCUMENT_BYTES,
            "tokenizer": plan.tokenizer_hash,
            "inputs": hashlib.sha256(json.dumps(inputs).encode()).hexdigest(),  # there may be a million
        }

    @contextmanager
    def making(self, part: int, seconds: float, overwrite: bool = False) -> Iterator[SliceWriter | None]:
        """Holds a part, and gives what writes its slices; None if the folder is complete. seconds: see SliceWriter.
        Raises CommandError if another process holds it, or if the folder holds something else than the plan."""
        complete = self.is_complete(overwrite)
        if not complete:
            with self._locked(f"part_{part:05d}.lock", part):
                with self._locked("lock") as lock:
                    complete = self.is_complete(overwrite)  # it may have become so while this process waited
                    if not complete and (overwrite or _read_journal(self.plan.folder) != self._identity):
                        self._clear()
                        os.ftruncate(lock, 0)
                        write_atomically(self.plan.folder / JOURNAL_NAME, json.dumps(self._identity).encode())
                if not complete:
                    slices = SliceWriter(self._part(part), len(self.plan.splits), seconds)
                    self._check_bad_lines(slices.progress.counts)
                    yield slices
        if complete:
            self._remove_parts()
            yield None

    def record(self, part: int) -> int:
        """Counts a part as complete; returns how many are."""
        with self._locked("lock") as lock:
            if self.is_complete():  # another process has made this part, and the shards
                return self.parts
            os.pwrite(lock, b"1", part)
            os.fsync(lock)
            return os.pread(lock, self.parts, 0).count(b"1")

    def assemble(self) -> Totals | None:
        """Cuts the slices of all parts into shards, continuing an earlier attempt, and removes them; None if that has
        happened already. Without documents there is no shard, and the folder is empty afterwards. Waits for another
        process that does it, and takes over if that dies."""
        totals, begun = None, number_of_parts(self.plan.folder) is not None  # first: another process may end meanwhile
        if not self.is_complete():
            if not begun:
                raise CommandError(
                    f"--merge: {self.plan.folder} holds no parts; make them first, each by its own process with "
                    "--part I --parts N"
                )
            with self._locked("lock"):
                if not self.is_complete():
                    totals = self._assemble()
        self._remove_parts()
        return totals

    # ------------------------------------------------------------------------------------------------------ shards

    def _assemble(self) -> Totals:
        plan, parts = self.plan, [self._part(number) for number in range(self.parts)]
        progress = [read_progress(part) for part in parts]
        missing = [number for number, part in enumerate(progress) if not part.complete]
        if missing:
            raise CommandError(
                f"--output {plan.folder} lacks {len(missing)} of its {self.parts} parts, or they are unfinished; "
                f"before --merge, run again --parts {self.parts} with --part {ranks_text(missing, ',')}"
            )
        counts = Counter[str]()
        for part in progress:
            counts.update(part.counts)
        self._check_bad_lines(counts)
        extras = (bool(plan.options.get("keep_fields")), plan.options.get("targets") is not None)
        make = (plan.tokenizer_hash, self._vocab_size, plan.shard_size, *extras)
        cutters = [ShardCutter(plan.folder / name, *make) for name in plan.splits]
        try:
            for part in parts:
                for documents in read_slices(part, len(cutters)):
                    for cutter, chosen in zip(cutters, documents, strict=True):
                        cutter.add(chosen)
            for cutter in cutters:
                cutter.end()
        finally:
            for cutter in cutters:
                cutter.discard()
        sidecars = [cutter.describe_sidecars() for cutter in cutters] if plan.options.get("keep_fields") else []
        shards = {name: cutter.finished for name, cutter in zip(plan.splits, cutters, strict=True)}
        totals = Totals(shards, dict(counts), sidecars)
        self._declare_complete(totals) if any(shards.values()) else self._clear()
        return totals

    def _declare_complete(self, totals: Totals) -> None:
        plan = self.plan
        for number, (name, shards) in enumerate(totals.shards.items()):
            write_atomically(plan.folder / name / TOKENIZER_NAME, self._tokenizer)
            sidecars = {"sidecars": totals.sidecars[number]} if totals.sidecars else {}
            created_by = {**plan.made_by, **({"split": name} if name else {}), **totals.counts, **sidecars}
            if len(shards) >= TABLE_FROM:
                write_table(plan.folder / name, shards)
            write_manifest(plan.folder / name, shards, plan.tokenizer_hash, self._vocab_size, created_by)
        (plan.folder / JOURNAL_NAME).unlink()
        sync_folder(plan.folder)

    # ------------------------------------------------------------------------------------------- what is there already

    def is_complete(self, overwrite: bool = False) -> bool:
        """Whether the folder holds all of the plan; takes no lock and changes nothing. Raises CommandError if it holds
        something else than that or a beginning of it, or, with `overwrite`, what must not be removed."""
        folder = self.plan.folder
        if folder.exists() and not folder.is_dir():
            raise CommandError(f"--output {folder} is a file; give a folder")
        _refuse_foreign_files(folder)
        if overwrite:
            parts = None
            with suppress(CommandError):  # damaged
                parts = number_of_parts(folder)
            if parts is not None and parts > 1:
                remedy = self._remedy(by_hand=True)
                raise CommandError(f"--output {folder} holds {parts} parts; run all of them to their end, {remedy}")
            return False
        journal = _read_journal(folder)
        if journal is not None:
            self._check_journal(journal)
            return False
        complete = [folder / name for name in (*_SPLITS, "") if (folder / name / MANIFEST_NAME).exists()]
        if complete:
            self._check_complete(complete)
        return bool(complete)

    def _check_journal(self, journal: dict[str, Any]) -> None:
        alone = journal.get("parts") == self.parts == 1
        if alone and not any(self._parts_folder.glob("part_*/*")):
            return  # nothing is done yet, as after a mistake in the flags: `making` begins anew
        key = _first_difference(journal, self._identity)
        if not key:
            return
        there, here = journal.get(key), self._identity.get(key)
        remedy = self._remedy(by_hand=journal.get("parts", 1) > 1)
        values = f" ({there} there, {here} here)" if key not in _FLAGS else ""
        raise CommandError(
            f"--output {self.plan.folder} holds unfinished work that differs in {_flag(key)}{values}; give the same to "
            f"continue it, {remedy}"
        )

    def _check_bad_lines(self, counts: dict[str, int]) -> None:
        if (bad := counts.get("bad_lines", 0)) and not self.plan.skip_bad_lines:
            raise CommandError(
                f"--output {self.plan.folder} holds unfinished work that skipped {count(bad, 'malformed line')}; add "
                f"--skip_bad_lines, {self._remedy(by_hand=self.parts > 1)}"
            )

    def _check_complete(self, complete: list[Path]) -> None:
        folder = self.plan.folder
        difference = "" if complete == [folder / name for name in self.plan.splits] else _flag("validation_fraction")
        for split in complete:
            manifest = read_manifest(split)
            created_by = manifest["created_by"]
            if not difference and (key := _first_difference(*map(self._comparable, (created_by, self.plan.made_by)))):
                difference = _flag(key)
            if not difference and manifest["tokenizer_hash"] != self.plan.tokenizer_hash:
                difference = _flag("tokenizer")
            if not difference and created_by.get("bad_lines", 0) and not self.plan.skip_bad_lines:
                difference = "--skip_bad_lines"
            if not difference and manifest["shards"]:
                resolve_shards(split)  # all there, with their sizes
            if not difference and (path := self._changed_input(split, created_by)):
                difference = f"{path}, which was changed since"
        if difference:
            raise CommandError(f"--output {folder} holds a corpus that differs in {difference}; {self._remedy()}")

    def _comparable(self, made_by: dict[str, Any]) -> dict[str, Any]:
        """What a manifest and the plan must have in common; when a file was changed is `_changed_input`'s."""
        inputs = [(entry["name"], entry["bytes"]) for entry in made_by.get("inputs", [])]
        return {**{name: made_by.get(name) for name in self.plan.options}, "inputs": inputs}

    def _changed_input(self, split: Path, created_by: dict[str, Any]) -> Path | str | None:
        """The first input that was changed since a manifest was made, although names and sizes are the same."""
        made = (split / MANIFEST_NAME).stat().st_mtime_ns
        for file, then in zip(self.plan.files, created_by["inputs"], strict=True):
            known = "modified" in then  # older manifests lack it
            if then["modified"] != file.modified if known else file.modified > made:
                return file.path
        return None

    def _remedy(self, by_hand: bool = False) -> str:
        """Ends a message. Several processes may be at work: --overwrite would let one remove what others have made."""
        again = f"remove {self.plan.folder} by hand" if by_hand or self.parts > 1 else "add --overwrite"
        return f"choose another folder, or {again} to start again"

    # -------------------------------------------------------------------------------------------- locks and removal

    @contextmanager
    def _locked(self, name: str, part: int | None = None) -> Iterator[int]:
        """Holds a file, and gives its descriptor; of a part without waiting. Some file systems have no locks:
        `can_lock` says so."""
        path = self._parts_folder / name
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # the folder was removed in between
                continue
            try:
                self._lock(descriptor, part)
                if os.fstat(descriptor).st_nlink:
                    yield descriptor
                    return
            finally:
                os.close(descriptor)  # removed while this process waited for it: take the new one

    def _lock(self, descriptor: int, part: int | None) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if part is not None else 0))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                which = f"--part {part} of " if self.parts > 1 else ""
                raise CommandError(
                    f"{which}--output {self.plan.folder} is in use by another process; wait for it to end"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            self.can_lock = False

    def _clear(self) -> None:
        """Removes all that this class writes, except for locks and the tokenizer in use; manifests first, so that no
        moment shows half a corpus as complete."""
        folders = [self.plan.folder / name for name in ("", *_SPLITS)]
        inside = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
        ours = (path for path in inside if _OURS.fullmatch(path.name))
        for path in sorted(ours, key=lambda path: path.name != MANIFEST_NAME):
            if path.resolve() != self.plan.tokenizer_path.resolve():
                path.unlink()
        for folder in folders[1:]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        for part in self._parts_folder.glob("part_*"):
            if part.is_dir():
                shutil.rmtree(part)

    def _remove_parts(self) -> None:
        """Without the lock: a network file system keeps the name of a file that is still open."""
        shutil.rmtree(self._parts_folder, ignore_errors=True)

    def _part(self, part: int) -> Path:
        return self._parts_folder / f"part_{part:05d}"


def complete_line(folder: Path) -> str:
    """What is said where nothing is left to do."""
    return f"{folder} is complete already, from the same inputs and options: nothing to do"


def number_of_parts(folder: Path) -> int | None:
    """How many parts unfinished work was begun with; None where there is none."""
    journal = _read_journal(folder)
    return None if journal is None else journal.get("parts", 1)


def _read_journal(folder: Path) -> dict[str, Any] | None:
    path = folder / JOURNAL_NAME
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        journal = None
    if not isinstance(journal, dict):
        raise CommandError(f"{path} is damaged; add --overwrite, or remove {folder} by hand, to start again")
    return journal


def _flag(key: str) -> str:
    """The flag that sets a key of a plan, for messages."""
    return _FLAGS.get(key, f"--{key}")


def _first_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first key whose values differ or that one of them lacks, "" if none does."""
    return next((key for key in {**wanted, **found} if found.get(key) != wanted.get(key)), "")


def _refuse_foreign_files(folder: Path) -> None:
    for parent in (folder, *(folder / name for name in _SPLITS)):
        # One look at the folder: another process that merges may rename a file between two.
        visible = [path for path in parent.iterdir() if not path.name.startswith(".")] if parent.is_dir() else []
        allowed = {parent / name for name in _SPLITS} if parent == folder else set()
        foreign = sorted(path for path in visible if not _OURS.fullmatch(path.name) and path not in allowed)
        if foreign:
            raise CommandError(f"--output {folder} holds other files, such as {foreign[0].name}; give a new folder")
