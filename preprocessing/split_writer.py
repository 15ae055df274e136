"""The shards of one split, which can be continued after a crash."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.atomic_io import PARTIAL_SUFFIX, sync_folder
from data.shards import ShardFile, ShardWriter, describe_shard
from preprocessing.cli import CommandError

EMPTY_STATE: dict[str, Any] = {"finished": [], "full": [], "current": None, "part_tokens": 0, "part_words": 0}
WORDS_NAME = "document_words"  # uint64, words of each document; only where asked for


class SplitWriter:
    """The shards of one split: shard_00000.shard, shard_00001.shard, ... A shard ends with the document that brings it
    to `shard_size` tokens. Full shards are finished by `finish_full`, after the journal knows of them.

    keep_words: also write the words of each document, for whoever cuts the documents into other shards.
    start_again: how the user gets rid of damaged work; ends a message."""

    def __init__(
        self,
        folder: Path,
        tokenizer_hash: str,
        vocab_size: int,
        shard_size: int,
        state: dict[str, Any],
        *,
        keep_words: bool = False,
        start_again: str = "add --overwrite",
    ):
        self.folder = folder
        self.finished: list[ShardFile] = []
        self._full: list[dict[str, int]] = []
        self._writer: ShardWriter | None = None
        self._words = 0  # of the current shard
        self._part_tokens = self._part_words = 0  # of a document that is not complete yet
        self._words_file: BinaryIO | None = None
        self._start_again = start_again
        self._make = (tokenizer_hash, vocab_size)
        self._shard_size = shard_size
        folder.mkdir(exist_ok=True)
        self._restore(state)
        if keep_words:
            self._words_file = self._open_words()

    @property
    def has_full(self) -> bool:
        """Whether a shard waits for `finish_full`."""
        return bool(self._full)

    def total(self, key: str) -> int:
        """Documents, tokens or words so far."""
        state = self.state()
        parts = [*state["finished"], *state["full"], *([state["current"]] if state["current"] else [])]
        return sum(part[key] for part in parts)

    def write(self, tokens: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> None:
        """Adds documents: tokens in a row, and length and words of each."""
        ends = np.cumsum(lengths)
        self._record_words(words)
        first = start = 0
        while first < len(lengths):
            writer = self._current()
            room = self._shard_size - writer.num_tokens
            last = min(int(np.searchsorted(ends, start + room)) + 1, len(lengths))  # one past the last that goes here
            stop = int(ends[last - 1])
            writer.append(tokens[start:stop], lengths[first:last])
            self._words += int(words[first:last].sum())
            first, start = last, stop
            self._end_if_full()

    def write_part(self, tokens: np.ndarray, words: int, closes: bool) -> bool:
        """Adds a part of a document; returns whether it closed one that has tokens."""
        writer = self._current()
        writer.append(tokens)
        self._part_tokens += len(tokens)
        self._part_words += words
        closed = closes and self._part_tokens > 0
        if closed:
            writer.end_document()
            self._words += self._part_words
            self._record_words(np.array([self._part_words]))
        if closes:
            self._part_tokens = self._part_words = 0
            self._end_if_full()
        return closed

    def end(self) -> None:
        """No more documents: the current shard counts as full."""
        if self._writer is not None:
            if self._writer.num_documents:
                self._end_shard()
            else:  # opened for a document of no tokens
                self._writer.discard()
                self._writer = None

    def sync(self) -> None:
        """Makes what was written durable."""
        if self._writer is not None:
            self._writer.sync()
        if self._words_file is not None:
            self._words_file.flush()
            os.fsync(self._words_file.fileno())
        sync_folder(self.folder)

    def state(self) -> dict[str, Any]:
        """For the journal."""
        current = None
        if self._writer is not None:
            current = {"documents": self._writer.num_documents, "tokens": self._writer.num_tokens, "words": self._words}
        finished = [vars(shard) for shard in self.finished]
        part = {"part_tokens": self._part_tokens, "part_words": self._part_words}
        return {"finished": finished, "full": self._full, "current": current, **part}

    def finish_full(self) -> None:
        """Gives full shards their header and final name. May be repeated after a crash."""
        while self._full:
            shard = self._full[0]
            path = self._path(len(self.finished))
            if path.with_name(path.name + PARTIAL_SUFFIX).exists():
                writer = ShardWriter(path, *self._make, documents=shard["documents"], tokens=shard["tokens"])
                self.finished.append(writer.finish(shard["words"]))
            else:
                self.finished.append(describe_shard(path, shard["words"]))
            del self._full[0]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._words_file is not None:
            with suppress(OSError):  # a full disk, reported where it was met first
                self._words_file.close()

    def _current(self) -> ShardWriter:
        if self._writer is None:
            self._writer = ShardWriter(self._path(len(self.finished) + len(self._full)), *self._make)
        return self._writer

    def _record_words(self, words: np.ndarray) -> None:
        if self._words_file is not None:
            self._words_file.write(words.astype("<u8").tobytes())

    def _open_words(self) -> BinaryIO:
        """The words of the documents that the journal knows of, and room for more."""
        path, size = self.folder / WORDS_NAME, 8 * self.total("documents")
        path.touch()
        if path.stat().st_size < size:
            raise CommandError(f"{path} is shorter than the journal says; {self._start_again} to start again")
        file = open(path, "r+b")  # noqa: SIM115 (closed by close)
        file.truncate(size)
        file.seek(size)
        return file

    def _end_if_full(self) -> None:
        if self._writer is not None and self._writer.num_tokens >= self._shard_size:
            self._end_shard()

    def _end_shard(self) -> None:
        assert self._writer is not None
        self._full.append(self.state()["current"])
        self._writer.sync()
        self._writer.close()
        self._writer, self._words = None, 0

    def _path(self, number: int) -> Path:
        return self.folder / f"shard_{number:05d}.shard"

    def _restore(self, state: dict[str, Any]) -> None:
        self.finished = [ShardFile(**shard) for shard in state["finished"]]
        self._full = list(state["full"])
        self._part_tokens, self._part_words = state["part_tokens"], state.get("part_words", 0)
        for shard in self.finished:
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                problem = "is missing or changed since it was finished"
                raise CommandError(f"{path} {problem}; {self._start_again} to start again")
        self.finish_full()
        current = state["current"]
        for path in sorted(self.folder.glob("shard_*")):
            number, partial = int(path.name[len("shard_") :].split(".")[0]), path.suffix == PARTIAL_SUFFIX
            known = number == len(self.finished) and current if partial else number < len(self.finished)
            if not known:  # written after the journal
                path.unlink()
        if current is not None:
            self._words = current["words"]
            path = self._path(len(self.finished))
            self._writer = ShardWriter(path, *self._make, documents=current["documents"], tokens=current["tokens"])
