"""Remote inputs, such as hf://, s3:// and https://: what a path names, and bytes that survive lost connections."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from data.remote_files import file_system, retried
from preprocessing.cli import CommandError

_BUFFER_BYTES = 1 << 20
_REQUESTS_AT_ONCE = 16
# What changes with a file's content, by the names of the protocols' own; the first that there is counts.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "md5Hash", "checksum", "Digest", "xet_hash", "blob_id", "Last-Modified"),
    *("LastModified", "last_modified", "updated", "mtime", "modified", "created"),
)
_file_system, _retried = partial(file_system, problem=CommandError), partial(retried, problem=CommandError)


@dataclass(frozen=True)
class RemoteFile:
    """What a server says of a file. version: a number that changes with the content; 0 where it says nothing."""

    url: str
    size: int  # bytes
    version: int


def list_remote(url: str) -> tuple[dict[str, str], bool]:
    """The URLs that a file, a folder (all that lies below it) or a glob names, sorted, with the names of the files, in
    a folder relative to it; and whether it is a folder. Over https:// a folder ends with a slash, and is what its page
    links to. Raises CommandError."""
    system, path = _file_system(url)
    web = url.startswith("http")

    def expanded() -> tuple[list[str], bool]:
        if re.search(r"[*\[]" if web else r"[*?\[]", path):
            every: Any = system.glob(path, detail=True)
            return [name for name, info in every.items() if info["type"] == "file"], False
        if url.endswith("/") if web else system.isdir(path):
            return list(system.find(path)), True
        return [path], False

    found, is_folder = _retried(expanded, url)
    start = len(path.rstrip("/")) + 1
    names = {}
    for each in sorted(found):
        plain = unquote(urlsplit(each).path) if web else each  # of https://, what follows a question mark is no name
        inside = unquote(each[start:]) if web else each[start:]
        names[url if found == [path] else system.unstrip_protocol(each)] = inside if is_folder else plain.split("/")[-1]
    return names, is_folder


def describe_remote(urls: Iterable[str]) -> list[RemoteFile]:
    """Asks for size and version of files. Raises CommandError."""

    def described(url: str) -> RemoteFile:
        system, path = _file_system(url)

        def info() -> dict[str, Any]:
            system.invalidate_cache()  # it may have changed since
            return system.info(path)

        found = _retried(info, url)
        if found.get("size") is None:
            raise CommandError(f"--input {url}: the server does not say how long it is; download it and give the file")
        known = next((f"{key} {found[key]}" for key in _VERSIONS if found.get(key)), "")
        digest = hashlib.blake2b(known.encode(), digest_size=6).digest()
        return RemoteFile(url, found["size"], int.from_bytes(digest, "big") if known else 0)

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(described, urls))


def open_remote(url: str, size: int) -> io.BufferedReader:
    """The bytes of a file, from any place on; a read that fails is tried again there. Raises CommandError."""
    return io.BufferedReader(_Reader(url, size), _BUFFER_BYTES)


class _Reader(io.RawIOBase):
    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0
        self._system, self._path = _file_system(url)
        self._file: Any = None
        self._file_position = 0  # of the next byte that it gives
        self._streams = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        found = _retried(lambda: self._read(wanted), f"{self._url}, byte {self._position:,}")
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _read(self, wanted: int) -> bytes:
        try:
            found = self._opened().read(wanted)
            if not found:
                raise EOFError(f"it ends before its {self._size:,} bytes")
            self._file_position = self._position + len(found)
            return found
        except BaseException as error:
            self._forget()
            if isinstance(error, ValueError) and not self._streams and self._url.startswith("http"):
                self._streams = True  # the server gives files from their beginning alone
                return self._read(wanted)
            raise

    def _opened(self) -> Any:
        """The open file, at the position."""
        if self._file is not None and self._file_position == self._position:
            return self._file
        if self._streams:
            self._forget()
            file = self._system.open(self._path, "rb", block_size=0)
            self._file, left = file, self._position
            while left:
                skipped = len(file.read(min(left, _BUFFER_BYTES)))
                if not skipped:
                    raise EOFError(f"it ends before byte {self._position:,}")
                left -= skipped
        else:
            self._file = file = self._file or self._system.open(self._path, "rb")
            file.seek(self._position)
        return file

    def _forget(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._forget()
        super().close()
