"""Signs of life in the run folder: a file that a thread writes anew, and a folder's owner by such a file."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.wording import time_text

_BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # without a sign of life, after which an owner counts as gone; far more than clocks differ


class Heartbeat:
    """Writes `facts()` (JSON) to a file now and every `seconds`, until `close` removes it; what fails is no error.

    The file's folder is made once, in one that exists: a mount that vanishes must not come back as an empty folder.
    """

    def __init__(self, path: Path, facts: Callable[[], dict[str, Any]], seconds: float) -> None:
        self._path, self._facts, self._seconds = path, facts, seconds
        self._stop = threading.Event()
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop writing, and remove the file: what stays behind is of a process that was killed."""
        self._stop.set()
        self._thread.join(1.0)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        while not self._stop.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            temporary.write_text(json.dumps(self._facts()))  # not flushed to disk: it is worthless after a crash
            os.replace(temporary, self._path)


class Owner:
    """Whose folder it is, where the file system has no locks: owner.json, with a sign of life every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "owner.json"
        self._heartbeat: Heartbeat | None = None

    def claim(self) -> str:
        """Own the folder; "" where that worked, else who does. An owner that has fallen silent is replaced, and told.

        Raises OSError where the folder cannot be written.
        """
        aside = self._path.with_name(f".owner_{os.getpid()}_{socket.gethostname()}")
        while True:
            try:
                with self._path.open("x") as file:  # atomic, also on file systems without locks
                    file.write(json.dumps(_self()))
                self._heartbeat = Heartbeat(self._path, _self, _BEAT_SECONDS)
                return ""
            except FileExistsError:
                found = self._read()
                if holder := _alive(found):
                    return holder
                with suppress(FileNotFoundError):  # somebody else was faster, and will own it
                    os.rename(self._path, aside)
                    aside.unlink()
                    print(f"note: {self._path} is of {_text(found)}: taken over", flush=True)

    def release(self) -> None:
        """Give the folder back, where it is owned."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _read(self) -> dict[str, Any]:
        """What owner.json says; one that is gone, or damaged, or being written, says when."""
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            with suppress(OSError):
                return {"time": self._path.stat().st_mtime}
            return {"time": 0.0}


def _self() -> dict[str, Any]:
    """This process. pids: in which namespace its number counts; containers have their own."""
    pids = None
    with suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    job = os.environ.get("SLURM_JOB_ID")
    return {"host": socket.gethostname(), "pid": os.getpid(), "pids": pids, "job": job, "time": time.time()}


def _text(found: dict[str, Any]) -> str:
    if "pid" not in found:
        return "a process that has not said who it is"
    job = f" of job {found['job']}" if found["job"] else ""
    return f"process {found['pid']} on {found['host']}{job}, last heard of {time_text(time.time() - found['time'])} ago"


def _alive(found: dict[str, Any]) -> str:
    """Words for an owner that lives; "" where it does not."""
    if time.time() - found["time"] > STALE_SECONDS:
        return ""
    own = _self()
    if "pid" in found and found["pids"] is not None and all(found[key] == own[key] for key in ("host", "pids")):
        with suppress(PermissionError):  # it lives, and is another user's
            try:
                os.kill(found["pid"], 0)
            except ProcessLookupError:
                return ""
    return _text(found)
