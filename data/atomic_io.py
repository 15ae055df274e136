"""Atomic files: whole or absent, whatever happens while they are written. Needs nothing but Python."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTIAL_SUFFIX = ".partial"
_OTHER_FILES = 100  # that a process has open or is about to open, beside those counted
_UNABLE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a rename is on the disk only when its folder is. Where the file system
    cannot do that for folders (SMB, some FUSE mounts), it is left to it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Puts `content` under `path` durably; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def take_folder_mode(path: Path) -> None:
    """Gives a file the rights that the umask (or the folder's default ACL) gave its folder, without execution.

    For libraries that write by way of a private temporary file and leave its mode 0600. A file system that keeps no
    modes may refuse: then they are those of the mount."""
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def json_object(path: Path, largest: float = math.inf) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none, it cannot be read, or the file has more bytes than that."""
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size <= largest else {}
    except (OSError, ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        return {}
    return content if isinstance(content, dict) else {}


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file with one JSON object a line, each with its object: None where it is none or damaged.

    Lines end at b"\\n" alone, and each is decoded by itself: a crash may tear one anywhere, and a text may hold U+2028.
    Without the file there are no lines. Raises OSError where it cannot be read."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
                content = None
            yield line, content if isinstance(content, dict) else None


def json_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line, without damaged lines; [] where it is absent or cannot be read."""
    try:
        return [content for _line, content in json_lines(path) if content is not None]
    except OSError:
        return []


def allow_open_files(number: int) -> int:
    """Let this process open `number` more files than it may now, as far as the hard limit goes; how many it may, half
    of what that limit leaves beside some others if not all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return number
    most = soft + number if hard == resource.RLIM_INFINITY else hard
    with suppress(OSError, ValueError):  # a system with a limit of its own: the present one may do
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + number, most), hard))
    return number if number + _OTHER_FILES <= most else max(1, (most - _OTHER_FILES) // 2)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file in hex, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_remote(path: str | Path) -> bool:
    """Whether a path has a protocol, as in https://."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def memory_left() -> float:
    """Bytes of memory that this process can still have; infinity where that is not known."""
    left = math.inf
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = 1024 * next(float(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError, IndexError, StopIteration):  # a job's limit; what files occupy is free again
        path = Path("/proc/self/cgroup").read_text().split("::")[1].strip()
        group = Path("/sys/fs/cgroup") / path.lstrip("/")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])
        left = min(left, int((group / "memory.max").read_text()) - used)
    return left
