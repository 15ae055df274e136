"""An output folder of shards that is either complete or can be continued.

While work goes on, `journal.json` says how far: the place in the input, and for each split the finished shards and how
much of the unfinished ones belongs to that place. `save` first makes the data durable, then the journal; after a crash
everything beyond the journal is cut off and made again, so the final bytes do not depend on crashes. The manifest,
which declares a folder complete, comes last and takes the journal's place.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic_io import sync_folder, write_atomically
from data.shards import JOURNAL_NAME, MANIFEST_NAME, read_manifest, resolve_shards, write_manifest
from preprocessing.cli import CommandError
from preprocessing.split_writer import EMPTY_STATE, WORDS_NAME, SplitWriter

TOKENIZER_NAME = "tokenizer.json"
_OURS = re.compile(
    rf"(shard_\d+\.shard(\.offsets)?|manifest\.json|journal\.json|tokenizer\.json|{WORDS_NAME})(\.partial)?"
)
_SPLITS = ("train", "validation")
_FLAGS = {"inputs": "--input", "tokenizer": "--tokenizer_path", "script": "the script", "format": "the format"}


@dataclass(frozen=True)
class FolderPlan:
    """What is to be made where.

    identity: all that decides the content; an unfinished folder with another identity is not continued.
    made_by: the part of it that does not depend on where the inputs lie; goes into the manifest.
    splits: ("",) for shards in the folder itself, or ("train", "validation").
    keep_words: whether each split also holds the words of each document, see SplitWriter.
    start_again: how the user starts again from nothing; ends messages.
    """

    folder: Path
    tokenizer_path: Path
    tokenizer_hash: str
    vocab_size: int
    shard_size: int
    splits: tuple[str, ...]
    inputs: tuple[Path, ...]
    skip_bad_lines: bool
    identity: dict[str, Any]
    made_by: dict[str, Any]
    keep_words: bool = False
    start_again: str = "add --overwrite"


class ShardFolder:
    """The folder of a plan, under a lock. After `open`, `position` (empty at the start) and `counts` say where to go
    on; then `add` or `add_part` inside `journal`, and `complete`."""

    def __init__(self, plan: FolderPlan) -> None:
        self.plan = plan
        self.position: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.writers: list[SplitWriter] = []
        self._identity = _digested(plan.identity)
        self._tokenizer = plan.tokenizer_path.read_bytes()
        self._consistent = True  # False while the writers are ahead of position and counts
        self._part_split = 0
        self._lock: int | None = None

    def open(self, overwrite: bool = False) -> bool:
        """Prepares a new folder, or restores an unfinished one; False if it is complete already, with the same content.
        Raises CommandError if it holds something else."""
        folder = self.plan.folder
        self._refuse_file()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        if overwrite:
            _refuse_foreign_files(folder)
        elif self.is_complete():
            return False
        elif (journal := self._read_journal()) is not None and journal["position"]:
            self._start(journal)
            return True
        _clear(folder, self.plan.tokenizer_path)
        self._start(None)
        return True

    def is_complete(self) -> bool:
        """Whether the folder holds all of the plan; takes no lock and changes nothing. Raises CommandError if it holds
        something else than that or a beginning of it."""
        folder = self.plan.folder
        self._refuse_file()
        _refuse_foreign_files(folder)
        journal = self._read_journal()
        if journal is not None:
            self._check_journal(journal)
            return False
        complete = [folder / name for name in (*_SPLITS, "") if (folder / name / MANIFEST_NAME).exists()]
        if complete:
            self._check_complete(complete)
        return bool(complete)

    def add(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        words: np.ndarray,
        validation: np.ndarray,
        position: dict[str, Any],
        counts: dict[str, int],
    ) -> None:
        """Adds documents (tokens in a row [N]; tokens, words and split of each [documents]), which reach up to
        `position` in the input, and adds `counts` to the totals."""
        self._consistent = False
        if len(self.writers) == 1:
            self.writers[0].write(tokens, lengths, words)
        else:
            for number, writer in enumerate(self.writers):
                chosen = validation == bool(number)
                writer.write(tokens[np.repeat(chosen, lengths)], lengths[chosen], words[chosen])
        self._advance(position, counts)

    def add_part(
        self,
        tokens: np.ndarray,
        words: int,
        validation: bool,
        opens: bool,
        closes: bool,
        position: dict[str, Any],
        counts: dict[str, int],
    ) -> None:
        """Adds a part of one document; its first part decides the split."""
        self._consistent = False
        if opens:
            self._part_split = int(validation) if len(self.writers) > 1 else 0
        closed = self.writers[self._part_split].write_part(tokens, words, closes)
        empty = int(closes and not closed)
        self._advance(position, {**counts, "empty_documents": counts.get("empty_documents", 0) + empty})

    def _advance(self, position: dict[str, Any], counts: dict[str, int]) -> None:
        self.position = position
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self._consistent = True

    @property
    def has_full_shards(self) -> bool:
        """Whether `save` would finish a shard."""
        return any(writer.has_full for writer in self.writers)

    def save(self) -> None:
        """Makes everything durable up to `position`, and finishes full shards."""
        if not self._consistent:  # interrupted inside `add`: what is in the journal holds
            return
        self._consistent = False
        for writer in self.writers:
            writer.sync()
        self._write_journal()
        if self.has_full_shards:
            for writer in self.writers:
                writer.finish_full()
            self._write_journal()
        self._consistent = True

    @contextmanager
    def journal(self, seconds: float) -> Iterator[Callable[[], None]]:
        """Gives what to call between additions: it saves once shards are full or `seconds` have passed. Whoever stops
        the block by Ctrl-C or a CommandError finds the work saved up to there."""
        saved = time.monotonic()

        def save_when_due() -> None:
            nonlocal saved
            if self.has_full_shards or time.monotonic() - saved >= seconds:
                self.save()
                saved = time.monotonic()

        try:
            yield save_when_due
        except (KeyboardInterrupt, CommandError):
            self.save()
            raise

    def complete(self) -> None:
        """Finishes the last shards and declares the folder complete."""
        for writer in self.writers:
            writer.end()
        self.save()
        for name, writer in zip(self.plan.splits, self.writers, strict=True):
            write_atomically(writer.folder / TOKENIZER_NAME, self._tokenizer)
            created_by = {**self.plan.made_by, **({"split": name} if name else {}), **self.counts}
            write_manifest(writer.folder, writer.finished, self.plan.tokenizer_hash, self.plan.vocab_size, created_by)
        (self.plan.folder / JOURNAL_NAME).unlink()
        sync_folder(self.plan.folder)

    def close(self) -> None:
        """Closes files and gives up the lock; unfinished work stays for another run."""
        for writer in self.writers:
            writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Removes everything this class writes."""
        for writer in self.writers:
            writer.close()
        _clear(self.plan.folder, self.plan.tokenizer_path)

    def _refuse_file(self) -> None:
        if self.plan.folder.exists() and not self.plan.folder.is_dir():
            raise CommandError(f"--output {self.plan.folder} is a file; give a folder")

    def _start(self, journal: dict[str, Any] | None) -> None:
        plan = self.plan
        if journal is None:  # the journal comes first: shards without one would be somebody else's
            self._write_journal()
        else:
            self.position, self.counts, self._part_split = journal["position"], journal["counts"], journal["part_split"]
        for number, name in enumerate(plan.splits):
            state = journal["splits"][number] if journal and journal["splits"] else EMPTY_STATE
            make = (plan.tokenizer_hash, plan.vocab_size, plan.shard_size)
            options = {"keep_words": plan.keep_words, "start_again": plan.start_again}
            self.writers.append(SplitWriter(plan.folder / name, *make, state, **options))

    def _write_journal(self) -> None:
        journal = {
            "identity": self._identity,
            "position": self.position,
            "counts": self.counts,
            "part_split": self._part_split,
            "splits": [writer.state() for writer in self.writers],
        }
        write_atomically(self.plan.folder / JOURNAL_NAME, json.dumps(journal).encode())

    def _read_journal(self) -> dict[str, Any] | None:
        path = self.plan.folder / JOURNAL_NAME
        try:
            journal = json.loads(path.read_text(encoding="utf-8"))
            if set(journal) >= {"identity", "position", "counts", "part_split", "splits"}:
                return journal
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            pass
        raise CommandError(f"{path} is damaged; {self.plan.start_again} to start again")

    def _check_journal(self, journal: dict[str, Any]) -> None:
        if not journal["position"]:  # nothing is done yet, as after a mistake in the flags: `open` begins anew
            return
        difference = first_difference(_digested(journal["identity"]), self._identity)  # older journals have the list
        difference = flag_of(difference) if difference else ""
        if not difference and journal["counts"].get("bad_lines", 0) and not self.plan.skip_bad_lines:
            difference = "--skip_bad_lines"
        if difference:
            raise CommandError(
                f"--output {self.plan.folder} holds unfinished work that differs in {difference}; run that to its "
                f"end, choose another folder, or {self.plan.start_again} to start again"
            )

    def _check_complete(self, complete: list[Path]) -> None:
        folder = self.plan.folder
        same_splits = complete == [folder / name for name in self.plan.splits]
        difference = "" if same_splits else flag_of("validation_fraction")
        for part in complete:
            manifest = read_manifest(part)
            created_by = manifest["created_by"]
            if not difference and (key := first_difference(*map(self._comparable, (created_by, self.plan.made_by)))):
                difference = flag_of(key)
            if not difference and manifest["tokenizer_hash"] != self.plan.tokenizer_hash:
                difference = flag_of("tokenizer")
            if not difference and created_by.get("bad_lines", 0) and not self.plan.skip_bad_lines:
                difference = "--skip_bad_lines"
            if not difference and manifest["shards"]:
                resolve_shards(part)  # all there, with their sizes
            if not difference and (path := self._changed_input(part, created_by)):
                difference = f"{path}, which was changed since"
        if difference:
            raise CommandError(
                f"--output {folder} holds a corpus that differs in {difference}; choose another folder, or "
                f"{self.plan.start_again} to replace it"
            )

    def _comparable(self, made_by: dict[str, Any]) -> dict[str, Any]:
        """What a manifest and the plan must have in common; when a file was changed is `_changed_input`'s."""
        inputs = [(entry["name"], entry["bytes"]) for entry in made_by.get("inputs", [])]
        return {**{name: made_by.get(name) for name in self.plan.made_by}, "inputs": inputs}

    def _changed_input(self, part: Path, created_by: dict[str, Any]) -> Path | None:
        """The first input that was changed since a manifest was made, although names and sizes are the same."""
        made = (part / MANIFEST_NAME).stat().st_mtime_ns
        for path, then, now in zip(self.plan.inputs, created_by["inputs"], self.plan.made_by["inputs"], strict=True):
            known = "modified" in then  # older manifests lack it
            if then["modified"] != now["modified"] if known else now["modified"] > made:
                return path
        return None


def described_input(name: str, size: int, modified: int) -> dict[str, Any]:
    """An input as manifests tell of it: its name, bytes, and when it was last changed (nanoseconds since 1970)."""
    return {"name": name, "bytes": size, "modified": modified}


def _digested(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity with a hash in place of its list of inputs: a million files are not written at each save."""
    inputs = identity.get("inputs")
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest() if isinstance(inputs, list) else inputs
    return {**identity, "inputs": digest}


def flag_of(key: str) -> str:
    """The flag that sets a key of an identity, for messages."""
    return _FLAGS.get(key, f"--{key}")


def first_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first key whose values differ or that one of them lacks, "" if none does."""
    return next((key for key in {**wanted, **found} if found.get(key) != wanted.get(key)), "")


def _our_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if _OURS.fullmatch(path.name)] if folder.is_dir() else []


def _refuse_foreign_files(folder: Path) -> None:
    for place in (folder, *(folder / name for name in _SPLITS)):
        visible = [path for path in place.iterdir() if not path.name.startswith(".")] if place.is_dir() else []
        allowed = {place / name for name in _SPLITS} if place == folder else set()
        foreign = sorted(set(visible) - set(_our_files(place)) - allowed)
        if foreign:
            raise CommandError(f"--output {folder} holds other files, such as {foreign[0].name}; give a new folder")


def _clear(folder: Path, tokenizer_path: Path) -> None:
    """Removes shards, journals and copies of tokenizers, but not the tokenizer in use; manifests first, so that no
    moment shows half a corpus as complete."""
    places = (folder, *(folder / name for name in _SPLITS))
    for path in sorted((path for place in places for path in _our_files(place)), key=lambda p: p.name != MANIFEST_NAME):
        if path.resolve() != tokenizer_path.resolve():
            path.unlink()
    for place in places[1:]:
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _locked(folder: Path) -> int:
    """Holds the folder for this process; the lock goes when the descriptor is closed or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise CommandError(f"--output {folder} is in use by another process; wait for it to end") from None
        # some network file systems cannot lock folders: go on without
    return descriptor
