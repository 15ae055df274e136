"""Arrays that the processes of a node share: the first one that needs an array computes it, the others map its file.

The file lies in /dev/shm, or in the folder for temporary files where that has no room, under a name that says what is
in it. Whoever uses it holds a shared lock beside it; the last one to let go removes it, and what a killed process has
left is removed by the next one that makes something.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.atomic_io import PARTIAL_SUFFIX

SHARED_FROM = 1 << 20  # numbers; smaller arrays are soon computed
_LOCK_SUFFIX = ".lock"
_ROOM = 4  # of what is free in /dev/shm an array may take one part in so many


def shared_array(
    name: str, length: int, fill: Callable[[np.ndarray], None], wait: Callable[[], None] = lambda: None
) -> np.ndarray:
    """int64 [length], read only, as `fill` writes it (given zeros) in the first process of this node that asks for it.

    name: a hash of all that decides the content. wait: called while another process computes it; may raise.
    A short array, or one for which there is no room in any folder, is computed in this process's own memory."""
    if length >= SHARED_FROM:
        with suppress(OSError):
            return _shared(_folder(8 * length) / name, length, fill, wait)
    array = np.zeros(length, np.int64)
    fill(array)
    return array


def _folder(size: int) -> Path:
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for place in places:
        with suppress(OSError):
            free = os.statvfs(place)
            if place == places[-1] or free.f_bavail * free.f_frsize >= _ROOM * size:
                folder = place / f"pretraining-{os.getuid()}"
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.stat().st_uid == os.getuid():
                    return folder
    raise OSError("no folder for what the processes of a node share")


def _shared(path: Path, length: int, fill: Callable[[np.ndarray], None], wait: Callable[[], None]) -> np.ndarray:
    lock_path = path.with_name(path.name + _LOCK_SUFFIX)
    while True:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _locked(lock, fcntl.LOCK_SH, lock_path) and path.exists():
                array = np.memmap(path, np.int64, "r", shape=(length,))
                weakref.finalize(array, _let_go, path, lock)
                lock = -1
                return np.asarray(array)
            if _locked(lock, fcntl.LOCK_EX, lock_path) and not path.exists():
                _remove_left(path)
                partial = path.with_name(path.name + PARTIAL_SUFFIX)
                with open(partial, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 8 * length)  # a full disk is an error here, not a signal later
                fill(np.memmap(partial, np.int64, "r+", shape=(length,)))
                os.replace(partial, path)
                continue
        finally:
            if lock >= 0:
                os.close(lock)
        wait()
        time.sleep(random.uniform(0.01, 0.1))


def _locked(lock: int, kind: int, lock_path: Path) -> bool:
    """Whether the lock was free, and is now held, on the file that is there (another may have removed it)."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return os.fstat(lock).st_ino == lock_path.stat().st_ino
    except OSError:
        return False


def _let_go(path: Path, lock: int) -> None:
    """Remove the file unless others use it."""
    lock_path = path.with_name(path.name + _LOCK_SUFFIX)
    with suppress(OSError):
        if _locked(lock, fcntl.LOCK_EX, lock_path):
            for file in (path, path.with_name(path.name + PARTIAL_SUFFIX)):
                file.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    os.close(lock)


def _remove_left(path: Path) -> None:
    """Remove what no process uses any more, but for what is about to be made at `path`."""
    for lock_path in path.parent.glob(f"*{_LOCK_SUFFIX}"):
        other = lock_path.with_name(lock_path.name.removesuffix(_LOCK_SUFFIX))
        if other != path:
            with suppress(OSError):
                _let_go(other, os.open(lock_path, os.O_RDWR))
