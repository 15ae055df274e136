"""One shard folder made by many processes, such as the tasks of a SLURM job array.

Process I of N tokenises its share of the files into a shard folder of its own; whoever completes the last one merges
them into the output folder: the same bytes as from one process. While this goes on there is

    OUTPUT/.parts/plan.json         what all processes must agree on
    OUTPUT/.parts/lock              held while that is compared, while complete parts are counted, and while they are
                                    merged; byte I is "1" where part I is complete
    OUTPUT/.parts/part_00003.lock   held while part 3 is made
    OUTPUT/.parts/part_00003/       the shards of part 3 (see shard_folder.py), and the words of each document

The manifest in OUTPUT is what says that the merge is complete; then `.parts` goes. The count lies inside the lock's
file because a network file system may show other nodes a new file half a minute late, but shows them the content of a
file that they have just locked: of processes that end at the same moment, exactly the last one sees a full count.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic_io import write_atomically
from data.shards import MANIFEST_NAME, Shard, open_shard, read_manifest, resolve_shards
from preprocessing.cli import CommandError, counted
from preprocessing.inputs import InputFile
from preprocessing.resumable_output import JOURNAL_NAME, FolderPlan, ShardFolder, first_difference, flag_of
from preprocessing.split_writer import WORDS_NAME

PARTS_NAME = ".parts"
MERGED_TOKENS = 1 << 20  # at a time
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def share(files: Sequence[InputFile], part: int, parts: int) -> list[InputFile]:
    """The files of one part: neighbours in the list, cut where the bytes on the disk come nearest to equal shares. A
    part may be empty; every file is in exactly one."""
    total = sum(file.size for file in files)
    before, chosen = 0, []
    for file in files:
        middle = (2 * before + file.size) * parts // max(2 * total, 1)
        if min(middle, parts - 1) == part:
            chosen.append(file)
        before += file.size
    return chosen


def refuse_parts(output: Path) -> None:
    """Raises CommandError if a folder holds parts, which one process would neither use nor see again."""
    if (output / PARTS_NAME / "plan.json").exists():
        raise CommandError(
            f"--output {output} holds parts of a job with --parts; run that to its end, end it with --merge, choose "
            f"another folder, or remove {output / PARTS_NAME} by hand"
        )


def number_of_parts(output: Path) -> int | None:
    """How many parts an output folder was begun with; None where it has none."""
    plan = _read_plan(output / PARTS_NAME / "plan.json")
    return None if plan is None else plan["parts"]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers the way sbatch --array takes them, such as 0,2-5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, ends)) for ends in found)


class PartsFolder:
    """The parts of the folder that `plan` describes. `begin`, then make `part_plan`'s folder inside `holding`, then
    `record`; `merge` when all are recorded."""

    def __init__(self, plan: FolderPlan, parts: int) -> None:
        by_hand = f"remove {plan.folder} by hand"  # --overwrite would let a process remove what others have made
        self.plan = replace(plan, identity={**plan.identity, "parts": parts}, start_again=by_hand)
        self.parts = parts
        self.can_lock = True
        self._folder = plan.folder / PARTS_NAME

    def begin(self, create: bool = True) -> bool:
        """Whether there is something to do; False if the output is complete. Raises CommandError if it holds something
        else, or parts made from other inputs or with other options."""
        output = ShardFolder(self.plan)
        if not output.is_complete():
            if not create and number_of_parts(self.plan.folder) is None:
                raise CommandError(
                    f"--merge: {self.plan.folder} holds no parts; make them first, each by its own process with "
                    "--part I --parts N"
                )
            with self._locked():
                if not output.is_complete():  # it may have become so while this process waited
                    self._agree()
                    return True
        self._remove()
        return False

    def part_plan(self, part: int, plan: FolderPlan) -> FolderPlan:
        """The folder of one part, given the plan for the part's own inputs."""
        place = {"part": part, "parts": self.parts}
        return replace(
            plan,
            folder=self._part(part),
            identity={**plan.identity, **place},
            made_by={**plan.made_by, **place},
            keep_words=True,
            start_again=f"remove {self._part(part)} by hand",
        )

    @contextmanager
    def holding(self, part: int) -> Iterator[None]:
        """Keeps other processes from making the same part."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / f"{self._part(part).name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not self._lock(descriptor, wait=False):
                raise CommandError(
                    f"--part {part} of --output {self.plan.folder} is in use by another process; wait for it to end"
                )
            yield
        finally:
            os.close(descriptor)

    def record(self, part: int) -> int:
        """Notes that a part is complete; returns how many are."""
        with self._locked() as lock:
            if ShardFolder(self.plan).is_complete():  # this process was the second to make the part
                return self.parts
            os.pwrite(lock, b"1", part)
            os.fsync(lock)
            return os.pread(lock, self.parts, 0).count(b"1")

    def merge(self, journal_seconds: float = 10.0) -> ShardFolder | None:
        """Turns the parts into the output folder, continuing an earlier attempt, and removes them; None if that has
        happened already. Waits for another process that does it, and takes over if that dies."""
        with self._locked():
            folder = ShardFolder(self.plan)
            done_before = folder.is_complete()
            if not done_before:
                try:
                    self._merge_into(folder, journal_seconds)
                finally:
                    folder.close()
        self._remove()
        return None if done_before else folder

    # ------------------------------------------------------------------------------------------------ agreement

    def _agree(self) -> None:
        """Under the lock: the first process writes the plan down, the others compare."""
        path, mine = self._folder / "plan.json", self.plan.identity
        found = _read_plan(path)
        if found is None:
            write_atomically(path, json.dumps(mine).encode())
            return
        key = first_difference(found, mine)
        if not key:
            return
        values = f" ({found.get(key)} there, {mine.get(key)} here)" if key not in ("inputs", "tokenizer") else ""
        raise CommandError(
            f"{flag_of(key)} differs from what the parts in {self._folder} are made with{values}; give "
            f"all parts the same, on the same files, or {self.plan.start_again} to start again"
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Holds, and gives, the file that counts complete parts."""
        path = self._folder / "lock"
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # the folder was removed in between
                continue
            try:
                self._lock(descriptor, wait=True)
                if os.fstat(descriptor).st_nlink:
                    yield descriptor
                    return
            finally:
                os.close(descriptor)  # removed while this process waited for it: take the new one

    def _lock(self, descriptor: int, wait: bool) -> bool:
        """False if another process has the lock. Some file systems have no locks: `can_lock` tells."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.can_lock = False
        return True

    def _remove(self) -> None:
        """After the merge, without the lock: a network file system keeps the name of a file that is still open. The
        plan goes last, so that what a crash leaves here is seen by the next run."""
        for path in sorted(self._folder.glob("part_*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _part(self, part: int) -> Path:
        return self._folder / f"part_{part:05d}"

    # ---------------------------------------------------------------------------------------------------- merging

    def _merge_into(self, folder: ShardFolder, journal_seconds: float) -> None:
        sources, counts = self._sources()
        if not sources:
            self._remove()
            raise CommandError(
                f"--input holds no text in {counted(len(self.plan.inputs), 'file')}; check --input and --text_field"
            )
        if (bad := counts.get("bad_lines", 0)) and not self.plan.skip_bad_lines:
            raise CommandError(
                f"--output {self.plan.folder} has parts that passed over {counted(bad, 'malformed line')}; add "
                f"--skip_bad_lines, or {self.plan.start_again} to start again"
            )
        folder.open()
        with folder.journal(journal_seconds) as save_when_due:
            for _ in _copy(folder, sources):
                save_when_due()
        folder.counts = counts
        folder.complete()

    def _sources(self) -> tuple[list[_Source], dict[str, int]]:
        """All shards of all parts in the order of the output, and the totals of the parts' counts."""
        places = [[self._part(part) / name for part in range(self.parts)] for name in self.plan.splits]
        missing = [
            part
            for part in range(self.parts)
            if (self._part(part) / JOURNAL_NAME).exists()
            or not all((split[part] / MANIFEST_NAME).is_file() for split in places)
        ]
        if missing:
            raise CommandError(
                f"--output {self.plan.folder} lacks {len(missing)} of its {self.parts} parts, or they are unfinished; "
                f"before --merge, run again --parts {self.parts} with --part {ranges(missing)}"
            )
        counts: dict[str, int] = {}
        sources: list[_Source] = []
        for number, split in enumerate(places):
            for place in split:
                manifest = read_manifest(place)
                _check_words(place, manifest)
                if number == 0:  # each split's manifest repeats the part's counts
                    for name in ("empty_documents", "bad_lines", "special_tokens", "text_bytes"):
                        counts[name] = counts.get(name, 0) + manifest["created_by"].get(name, 0)
                first = 0
                paths = resolve_shards(place) if manifest["shards"] else []
                for path, entry in zip(paths, manifest["shards"], strict=True):
                    sources.append(_Source(path, bool(number), place / WORDS_NAME, first))
                    first += entry["documents"]
        return sources, counts


def _read_plan(path: Path) -> dict[str, Any] | None:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or not isinstance(plan.get("parts"), int):
        raise CommandError(f"{path} is damaged; remove {path.parent} by hand to start again")
    return plan


def _check_words(place: Path, manifest: dict[str, Any]) -> None:
    path, size = place / WORDS_NAME, 8 * manifest["num_documents"]
    found = path.stat().st_size if path.is_file() else 0
    if found != size:
        part = next(folder for folder in (place, *place.parents) if folder.parent.name == PARTS_NAME)
        raise CommandError(
            f"{path} has {found:,} bytes where its documents ask for {size:,}; remove {part} by hand and make that "
            "part again"
        )


@dataclass(frozen=True)
class _Source:
    """A shard of a part, and where the words of its documents are."""

    path: Path
    validation: bool
    words_path: Path
    first_document: int  # in the words' file

    def words(self, first: int, last: int) -> np.ndarray:
        """Words of documents first .. last - 1, int64."""
        offset = 8 * (self.first_document + first)
        return np.fromfile(self.words_path, "<u8", last - first, offset=offset).astype(np.int64)


def _copy(folder: ShardFolder, sources: Sequence[_Source]) -> Iterator[None]:
    """Adds all documents, from the folder's position to the end, a few MiB for each turn."""
    start = folder.position or {"source": 0, "document": 0, "token": 0}
    for number in range(start["source"], len(sources)):
        shard = open_shard(sources[number].path, folder.plan.tokenizer_hash)
        document, token = (start["document"], start["token"]) if number == start["source"] else (0, 0)
        while document < shard.num_documents:
            document, token = _copy_block(folder, shard, sources[number], number, document, token)
            shard.drop_cache()
            yield


def _copy_block(
    folder: ShardFolder, shard: Shard, source: _Source, number: int, document: int, token: int
) -> tuple[int, int]:
    """Adds the documents that fit into a block, or a piece of one that does not, beginning with its `token`-th; returns
    the next document and token."""
    tokens, offsets = shard.tokens, shard.offsets
    start = int(offsets[document]) + token
    # searchsorted would turn all offsets into floats for a Python integer
    last = int(np.searchsorted(offsets, np.uint64(start + MERGED_TOKENS), side="right")) - 1
    if token == 0 and last > document:  # documents up to, but without, `last`
        lengths = np.diff(offsets[document : last + 1]).astype(np.int64)
        position = {"source": number, "document": last, "token": 0}
        block, words = tokens[start : int(offsets[last])], source.words(document, last)
        folder.add(block, lengths, words, np.full(len(lengths), source.validation), position, {})
        return last, 0
    end = min(start + MERGED_TOKENS, int(offsets[document + 1]))
    closes = end == int(offsets[document + 1])
    words = int(source.words(document, document + 1)[0]) if closes else 0
    following = (document + 1, 0) if closes else (document, token + end - start)
    position = {"source": number, "document": following[0], "token": following[1]}
    folder.add_part(tokens[start:end], words, source.validation, token == 0, closes, position, {})
    return following
