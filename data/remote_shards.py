"""Remote shards: folders on https://, s3://, gs:// and the like, read through a local cache of bounded size.

A remote folder has a manifest, as a local one; its shards are fetched whole, ahead of their use where blocks are read
ahead (data/blocks.py), and each is checked by the manifest's SHA-256. Connections that are lost are tried again. All
processes of a node share the cache; the files that were used longest ago make room. fsspec is imported only here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from data.atomic_io import PARTIAL_SUFFIX
from data.shards import MANIFEST_NAME, ShardError
from data.stop_event import check_stop

_TRIES = 12  # at growing distances, some six minutes in all
_LONGEST_WAIT = 60.0  # seconds between two tries
_CHUNK_BYTES = 16 << 20  # of a request
CONNECTIONS = 8
_GB = 10**9


@dataclass(frozen=True)
class ShardCache:
    """A folder for copies of remote shards, and how many GB of them it may hold."""

    folder: Path
    gigabytes: float

    def manifest(self, url: str) -> dict[str, Any]:
        """The manifest of a remote folder, as it is now. Raises ShardError."""
        content = _fetched(f"{url.rstrip('/')}/{MANIFEST_NAME}", 0, None)
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
                    for begin in range(0, self.bytes, _CHUNK_BYTES):
                        part = _fetched(self.url, begin, min(begin + _CHUNK_BYTES, self.bytes))
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
    left = shards[::-1]

    def work() -> None:
        while left:
            with suppress(IndexError, ShardError):  # another thread took the last
                left.pop().fetch()

    threads = [Thread(target=work, daemon=True) for _ in range(CONNECTIONS)]  # which do not hold up the end of a run
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _fetched(url: str, begin: int, end: int | None) -> bytes:
    """Bytes [begin, end) of a file, all of it where `end` is None; tried again and again. Raises ShardError."""
    try:
        import fsspec.core
    except ImportError:
        raise ShardError(f"reading {url} needs a package that is not installed: pip install fsspec") from None
    for number in range(_TRIES):
        check_stop()
        try:
            system, path = fsspec.core.url_to_fs(url)
            content = system.cat_file(path, start=begin if end is not None else None, end=end)
            if end is None or len(content) == end - begin:
                return content
            error: Exception = EOFError(f"{len(content):,} of {end - begin:,} bytes came")
        except ImportError as missing:
            raise ShardError(f"reading {url} needs a package that is not installed: {missing}") from None
        except Exception as caught:  # packages of protocols raise whatever they like
            error = caught
            status = getattr(error.__cause__ or error, "status", None)
            final = isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
            if final or (isinstance(error, FileNotFoundError) and error.__cause__ is None) or number == _TRIES - 1:
                reason = str(error.__cause__ or error).strip() or type(error).__name__
                raise ShardError(f"{url} could not be read ({reason}); check path, rights, network") from None
        if number == _TRIES - 1:
            raise ShardError(f"{url} could not be read ({error}); check that it is whole on the server")
        time.sleep(min(_LONGEST_WAIT, 2.0 ** (number - 1)))
    raise AssertionError("unreachable")
