"""Offsets table: where documents begin, of all shards of a folder in one file beside them.

The index of an epoch needs the lengths of all documents. With the table each node opens one file for them, where it
would open every shard; without it all works, too. A shard is found in it by its SHA-256, so a table that belongs to
other shards is not used for these.

    bytes 0-15   magic, number of shards (uint64)
    then         of each shard its SHA-256, number of documents and of those of the shards before it (uint64 both)
    then         of each document its first token in its shard, uint64
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np

from data.atomic_io import PARTIAL_SUFFIX, sync_folder
from data.shards import REMAKE, Shard, ShardError, ShardFile, open_shard

TABLE_NAME = "offsets.bin"
TABLE_FROM = 64  # shards: from so many on, tokenising leaves a table beside them

_MAGIC = b"TOKTABLE"
_ENTRY = np.dtype([("sha256", "V32"), ("documents", "<u8"), ("first", "<u8")])


def write_table(folder: Path, shards: Sequence[ShardFile]) -> None:
    """Writes the table of finished shards, durably and under its name only when it is whole. Raises ShardError."""
    path = folder / TABLE_NAME
    entries = np.zeros(len(shards), _ENTRY)
    entries["sha256"] = [np.void(bytes.fromhex(shard.sha256)) for shard in shards]
    entries["documents"] = [shard.documents for shard in shards]
    entries["first"] = np.cumsum(entries["documents"]) - entries["documents"]
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with open(partial, "wb") as file:
        file.write(_MAGIC + np.array(len(shards), "<u8").tobytes() + entries.tobytes())
        for each in shards:
            starts = np.empty(each.documents, np.int64)
            open_shard(folder / each.file).read_offsets(starts)
            file.write(starts.tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(folder)


class OffsetsTable:
    """An opened table. Threads may read from it at once."""

    def __init__(self, path: Path) -> None:
        """Raises ShardError where it is damaged, FileNotFoundError where there is none."""
        self._file, self._path = open(path, "rb", buffering=0), path  # noqa: SIM115 - close does
        header, size = self._file.read(16), os.fstat(self._file.fileno()).st_size
        number = int.from_bytes(header[8:], "little")
        self._begin = 16 + number * _ENTRY.itemsize
        if header[:8] == _MAGIC and self._begin <= size:
            entries = np.frombuffer(os.pread(self._file.fileno(), number * _ENTRY.itemsize, 16), _ENTRY)
            if self._begin + 8 * int(entries["documents"].sum()) == size:
                names = [bytes(each).hex() for each in entries["sha256"]]
                self._places = dict(zip(names, entries[["documents", "first"]].tolist(), strict=True))
                return
        self.close()
        raise ShardError(f"{path} is damaged; remove it or make it again, inspect_shards.py FOLDER --write_offsets")

    def close(self) -> None:
        self._file.close()

    def __contains__(self, shard: Shard) -> bool:
        return self._places.get(shard.sha256 or "", (-1,))[0] == shard.num_documents

    def read_offsets(self, shard: Shard, out: np.ndarray) -> None:
        """`Shard.read_offsets` of a shard that the table contains."""
        buffer, place = out.view(np.uint8).data, self._begin + 8 * self._places[shard.sha256 or ""][1]
        while buffer:
            count = os.preadv(self._file.fileno(), [buffer], place)
            if not count:
                raise ShardError(f"{self._path} has shrunk while it was in use; {REMAKE}")
            buffer, place = buffer[count:], place + count


@contextmanager
def tables_beside(shards: Sequence[Shard]) -> Iterator[dict[Path, OffsetsTable]]:
    """The tables beside shards, by folder. Raises ShardError for one that is damaged."""
    found = {}
    with ExitStack() as stack:
        for folder in {shard.path.parent for shard in shards if shard.sha256 and shard.remote is None}:
            with suppress(FileNotFoundError):
                found[folder] = stack.enter_context(closing(OffsetsTable(folder / TABLE_NAME)))
        yield found
