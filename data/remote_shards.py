"""Remote shards: folders on https://, s3://, gs:// and the like, read through a local cache of bounded size.

A remote folder has a manifest, as a local one; its shards are fetched whole, ahead of their use where blocks are read
ahead (data/blocks.py), and each is checked by the manifest's SHA-256. Connections that are lost are tried again. All
processes of a node share the cache; the files that were used longest ago make room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.atomic_io import PARTIAL_SUFFIX
from data.remote_files import TRIES, file_system, retried
from data.shards import MANIFEST_NAME, ShardError
from data.stop_event import begun, in_threads

_TRIES = 12  # at growing distances, some six minutes in all
_PART_BYTES = 8 << 20  # of a request
FILES, REQUESTS = 4, 4  # fetched at once, and under way for each
_GB = 10**9


@dataclass(frozen=True)
class ShardCache:
    """A folder for copies of remote shards, and how many GB of them it may hold."""

    folder: Path
    gigabytes: float

    def manifest(self, url: str) -> dict[str, Any]:
        """The manifest of a remote folder, as it is now. Raises ShardError."""
        content = _fetched(f"{url.rstrip('/')}/{MANIFEST_NAME}", tries=TRIES)
        try:
            return json.loads(content)
        except ValueError:
            raise ShardError(f"{url}/{MANIFEST_NAME} is not JSON; give a folder that tokenize_corpus.py made") from None

    def place(self, url: str, name: str) -> Path:
        """Where the copy of a shard lies."""
        return self.folder / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / name


@dataclass(frozen=True)
class RemoteFile:
    """A shard on a server: its URL, bytes and SHA-256 (by the manifest), and the cache that holds its copy."""

    url: str
    bytes: int
    sha256: str
    cache: ShardCache

    def fetch(self, path: Path) -> None:
        """Have a checked copy at `path`, which is the cache's place for it; one process of the node fetches it.

        Raises ShardError where the server cannot be reached for minutes, or gives another file."""
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            self._make_room()
            partial = path.with_name(path.name + PARTIAL_SUFFIX)
            for again in (False, True):
                digest = hashlib.sha256()
                with open(partial, "wb") as file:
                    for part in _parts(self.url, self.bytes):
                        digest.update(part)
                        file.write(part)
                if digest.hexdigest() == self.sha256:
                    os.replace(partial, path)
                    return
                partial.unlink()
                if again:
                    raise ShardError(
                        f"{self.url} has another content than its {MANIFEST_NAME} says (SHA-256); upload it again"
                    )

    def _make_room(self) -> None:
        files = []
        for file in self.cache.folder.glob("*/*.shard"):
            with suppress(OSError):  # another process removes it
                state = file.stat()
                files.append((state.st_mtime, state.st_size, file))
        size = sum(each[1] for each in files) + self.bytes
        for _, freed, file in sorted(files):
            if size <= self.cache.gigabytes * _GB:
                break
            file.unlink(missing_ok=True)
            size -= freed


def fetch_all(shards: list[Any]) -> None:
    """Fetch the copies of shards, several at once. What is wrong with one is said where it is read."""

    def fetch(shard: Any) -> None:
        with suppress(ShardError):
            shard.fetch()

    in_threads(fetch, shards, FILES)


def _parts(url: str, size: int) -> Iterator[bytes]:
    """The bytes of a file, in order; several requests are under way at once. Raises ShardError."""
    under_way: deque[Future[bytes]] = deque()
    for begin in range(0, size, _PART_BYTES):
        under_way.append(begun(partial(_fetched, url, begin, min(begin + _PART_BYTES, size))))
        if len(under_way) == REQUESTS:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _fetched(url: str, begin: int = 0, end: int | None = None, tries: int = _TRIES) -> bytes:
    """Bytes [begin, end) of a file, all of it where `end` is None; tried again and again. Raises ShardError."""
    system, path = file_system(url, ShardError)

    def content() -> bytes:
        found = system.cat_file(path, start=begin if end is not None else None, end=end)
        if end is not None and len(found) != end - begin:
            raise EOFError(f"{len(found):,} of {end - begin:,} bytes came")
        return found

    return retried(content, url, ShardError, tries)
