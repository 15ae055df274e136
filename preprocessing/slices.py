"""Slices: encoded documents of a part of a corpus, in files that appear whole or not at all, and shards cut from them.

A slice holds, for each split, the next tokens of all its documents one after the other, and where among them documents
end; a document may go on in the next slice. So the concatenation of slices does not depend on where one ends and the
next begins, and neither do the shards that are cut from it.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data.atomic_io import PARTIAL_SUFFIX, write_atomically
from data.shards import ShardError, ShardFile, ShardWriter, describe_shard, sha256_file
from preprocessing.cli import CommandError

SLICE_TOKENS = 1 << 22  # a slice is held in memory before it is written
SIDECAR_SUFFIX = ".fields.jsonl"


@dataclass(frozen=True)
class EncodedChunk:
    """Encoded documents without the empty ones, or a piece of one document, which may be empty: `opens` or `closes` is
    False where an earlier chunk holds its beginning or a later one its end."""

    tokens: np.ndarray  # [N] integers, all documents in a row
    lengths: np.ndarray  # [documents] int64, tokens of each
    words: np.ndarray  # [documents] int64, stretches between white space
    validation: np.ndarray  # [documents] bool; of a piece: only the first piece's counts
    position: dict[str, Any]  # in the input, behind the chunk
    counts: dict[str, int]  # what is added to the totals in the manifest
    opens: bool = True
    closes: bool = True
    progress: int = 0  # bytes of the file on the disk that lie before `position`
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # [N], or empty: see data/shards.py
    fields: list[bytes] = field(default_factory=list)  # of each document its line of the sidecar; [] without sidecars


@dataclass(frozen=True)
class Progress:
    """How far a part has come. Every slice holds it, so the newest one says where to go on."""

    slices: int = 0
    position: dict[str, Any] = field(default_factory=dict)  # in the input
    counts: dict[str, int] = field(default_factory=dict)  # totals since the beginning of the part
    open_split: int = 0  # of the document that goes on in the next slice, as are the next two
    open_tokens: int = 0
    open_words: int = 0
    complete: bool = False


class Documents(NamedTuple):
    """A stretch of one split."""

    tokens: np.ndarray  # [N]
    ends: np.ndarray  # [D] int64, ends of documents in `tokens`; what lies behind the last belongs to one that goes on
    words: np.ndarray  # [D] int64, words of these documents
    marks: np.ndarray  # [N] bool; empty where tokens have none
    fields: np.ndarray  # [bytes] uint8, lines of the sidecar for these documents; empty without sidecars


class SliceWriter:
    """Writes the slices of one part, going on behind those that are there.

    seconds: a slice is also written when the last one is this old, so this much work may be lost."""

    def __init__(self, folder: Path, splits: int, seconds: float) -> None:
        self._folder = folder
        self._splits = splits
        self._seconds = seconds
        self._state: tuple[Progress, list[EncodedChunk]] = (read_progress(folder), [])  # replaced in one assignment

    @property
    def progress(self) -> Progress:
        """As of the newest slice."""
        return self._state[0]

    def write(self, chunks: Iterable[EncodedChunk]) -> None:
        """Writes all chunks that are left, and that the part is complete. After Ctrl-C or a CommandError, whatever came
        before it is saved."""
        size, saved = 0, time.monotonic()
        try:
            for chunk in chunks:
                self._state[1].append(chunk)
                size += len(chunk.tokens) + len(chunk.lengths) + sum(map(len, chunk.fields)) // 8
                if size >= SLICE_TOKENS or time.monotonic() - saved >= self._seconds:
                    self._save()
                    size, saved = 0, time.monotonic()
            self._save(complete=True)
        except (KeyboardInterrupt, CommandError):
            self._save()
            raise

    def _save(self, complete: bool = False) -> None:
        progress, chunks = self._state
        if chunks or complete:
            progress, arrays = _slice(progress, chunks, self._splits, complete)
            content = io.BytesIO()
            np.savez(content, progress=np.frombuffer(json.dumps(asdict(progress)).encode(), np.uint8), **arrays)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(_path(self._folder, progress.slices - 1), content.getvalue())
            self._state = (progress, [])


def _slice(
    before: Progress, chunks: Iterable[EncodedChunk], splits: int, complete: bool
) -> tuple[Progress, dict[str, Any]]:
    """The arrays of a slice, tokens_S, ends_S and words_S for each split S, and the progress after it."""
    position, counts = before.position, Counter(before.counts)
    split, open_tokens, open_words = before.open_split, before.open_tokens, before.open_words
    found: list[list[Documents]] = [[] for _ in range(splits)]
    for chunk in chunks:
        position = chunk.position
        counts.update(chunk.counts)
        validation = chunk.validation & (splits > 1)
        if chunk.opens and chunk.closes:
            for number in range(splits):
                chosen = validation == bool(number)
                inside = slice(None) if chosen.all() else np.repeat(chosen, chunk.lengths)
                tokens, marks = chunk.tokens[inside], chunk.marks[inside] if len(chunk.marks) else chunk.marks
                ends, lines = np.cumsum(chunk.lengths[chosen]), _lines(compress(chunk.fields, chosen))
                found[number].append(Documents(tokens, ends, chunk.words[chosen], marks, lines))
            continue
        if chunk.opens:
            split, open_tokens, open_words = int(validation[0]), 0, 0
        open_tokens, open_words = open_tokens + len(chunk.tokens), open_words + int(chunk.words[0])
        closed = int(chunk.closes and open_tokens > 0)
        ends, words = np.full(closed, len(chunk.tokens)), np.full(closed, open_words)
        found[split].append(Documents(chunk.tokens, ends, words, chunk.marks, _lines(chunk.fields[:closed])))
        counts["empty_documents"] += chunk.closes and not closed  # a foreign tokenizer may know no token for a text
    arrays = {f"{name}_{n}": part for n in range(splits) for name, part in _joined(found[n])._asdict().items()}
    after = Progress(before.slices + 1, position, dict(counts), split, open_tokens, open_words, complete)
    return after, arrays


def _joined(pieces: list[Documents]) -> Documents:
    starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
    ends = [piece.ends + start for piece, start in zip(pieces, starts[:-1], strict=True)]
    empty = np.empty(0, np.int64)
    return Documents(
        np.concatenate([piece.tokens for piece in pieces]) if pieces else empty,
        np.concatenate([empty, *ends]),
        np.concatenate([empty, *(piece.words for piece in pieces)]),
        np.concatenate([np.empty(0, bool), *(piece.marks for piece in pieces)]),
        np.concatenate([_lines([]), *(piece.fields for piece in pieces)]),
    )


def _lines(lines: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(line + b"\n" for line in lines), np.uint8)


def read_progress(folder: Path) -> Progress:
    """Of the newest slice in a part's folder; of a part that is not begun, without that."""
    newest = max(folder.glob("slice_*.npz"), default=None)  # zeros in front, so names are in order
    if newest is None:
        return Progress()
    return Progress(**json.loads(_arrays(newest, ["progress"])[0].tobytes()))


def read_slices(folder: Path, splits: int) -> Iterator[list[Documents]]:
    """All slices of a part, each with its documents by split; one at a time is in memory."""
    names = [f"{name}_{number}" for number in range(splits) for name in Documents._fields]
    for number in range(read_progress(folder).slices):
        arrays = _arrays(_path(folder, number), names)
        size = len(Documents._fields)
        yield [Documents(*arrays[first : first + size]) for first in range(0, len(arrays), size)]


def _path(folder: Path, number: int) -> Path:
    return folder / f"slice_{number:08d}.npz"


def _arrays(path: Path, names: Iterable[str]) -> list[np.ndarray]:
    """Arrays of a slice; the archive holds their checksums. Raises CommandError."""
    try:
        with open(path, "rb") as file, np.load(file) as content:
            return [content[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        remedy = f"remove {path.parent} by hand and make that part again"
        raise CommandError(f"{path} is damaged ({error}); {remedy}") from None


def sidecar_path(shard: Path) -> Path:
    """Where the kept fields of a shard's documents are: JSON lines, in the order of the documents."""
    return shard.with_name(f"{shard.stem}{SIDECAR_SUFFIX}")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


class ShardCutter:
    """The shards of one split: shard_00000.shard, shard_00001.shard, ... Each ends with the document that brings it to
    `shard_size` tokens. One that is there already, from before an interruption, is not written again; neither is its
    sidecar, which has its name before it."""

    def __init__(
        self, folder: Path, tokenizer_hash: str, vocab_size: int, shard_size: int, sidecars: bool, marked: bool
    ) -> None:
        self.folder = folder
        self.finished: list[ShardFile] = []
        self._make = (tokenizer_hash, vocab_size, marked)
        self._shard_size = shard_size
        self._sidecars = sidecars
        self._writer: ShardWriter | None = None  # None also while documents of a finished shard are passed over
        self._sidecar: BinaryIO | None = None  # of the shard that is written
        self._tokens = self._words = 0  # of the current shard
        folder.mkdir(exist_ok=True)

    def add(self, documents: Documents) -> None:
        """Adds the next documents of the split, or stretches of one."""
        tokens, ends, words, marks, fields = documents
        line_ends = np.concatenate([[0], np.flatnonzero(fields == ord("\n")) + 1])
        first = start = 0
        while first < len(ends):
            room = self._shard_size - self._tokens
            last = min(int(np.searchsorted(ends, start + room)) + 1, len(ends))  # one past the last that goes here
            stop = int(ends[last - 1])
            self._append(tokens[start:stop], ends[first:last] - start, marks[start:stop])
            self._words += int(words[first:last].sum())
            if self._sidecar is not None:
                self._sidecar.write(fields[line_ends[first] : line_ends[last]].tobytes())
            first, start = last, stop
            if self._tokens >= self._shard_size:
                self.end()
        self._append(tokens[start:], ends[:0], marks[start:])

    def _append(self, tokens: np.ndarray, ends: np.ndarray, marks: np.ndarray) -> None:
        if not len(tokens):
            return
        if not self._tokens and not self._path.exists():
            self._writer = ShardWriter(self._path, *self._make)
            if self._sidecars:
                self._sidecar = open(_partial(sidecar_path(self._path)), "wb")  # noqa: SIM115 - end or discard closes it
        if self._writer is not None:
            self._writer.append(tokens, ends, marks)
        self._tokens += len(tokens)

    def end(self) -> None:
        """Finishes the current shard, if there is one."""
        if not self._tokens:
            return
        path = self._path
        if self._sidecar is not None:
            self._sidecar.flush()
            os.fsync(self._sidecar.fileno())
            self._sidecar.close()
            os.replace(_partial(sidecar_path(path)), sidecar_path(path))  # durable when the shard's name is
        shard = describe_shard(path, self._words) if self._writer is None else self._writer.finish(self._words)
        if shard.tokens != self._tokens:
            raise ShardError(f"{path} is not the shard that was made before the interruption; remove it and run again")
        self.finished.append(shard)
        self._writer, self._sidecar, self._tokens, self._words = None, None, 0, 0

    def describe_sidecars(self) -> list[dict[str, Any]]:
        """Of the finished shards, for the manifest: file, bytes, SHA-256."""
        paths = [sidecar_path(self.folder / shard.file) for shard in self.finished]
        return [{"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths]

    def discard(self) -> None:
        """Removes the shard that is not finished."""
        if self._writer is not None:
            self._writer.discard()
        if self._sidecar is not None:
            self._sidecar.close()
            _partial(sidecar_path(self._path)).unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self.folder / f"shard_{len(self.finished):05d}.shard"
