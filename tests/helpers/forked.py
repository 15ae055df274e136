"""Scripts in forked processes: torch and the suite are imported once for many runs, which takes longer than a run.

Each process of tests has one server, which imports and forks. What it forks runs a script as Python does (`__main__`,
arguments, exit code), with variables and output of its own; several processes are the ranks of a run, and end together
as under torchrun.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_START, _RUN, _POLL = 180.0, 600.0, 0.01  # seconds


class Ended(NamedTuple):
    """What became of a process. code: its exit code, negative for a signal."""

    code: int
    stdout: str
    stderr: str


class Forked:
    """A script in a process for each of `environments`, started by the constructor. kept: what they need meanwhile."""

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], kept: object = None) -> None:
        self._kept = kept
        self._folder = Path(tempfile.mkdtemp(prefix="forked-"))
        request = {"folder": str(self._folder), "command": list(command), "environments": list(environments)}
        pipe = _server().stdin
        assert pipe is not None
        pipe.write(json.dumps({**request, "cwd": os.getcwd()}) + "\n")
        pipe.flush()
        self.pids: list[int] = self._read("pids", time.monotonic() + _START)

    def finish(self, timeout: float = _RUN) -> list[Ended]:
        """What became of the processes; what runs after `timeout` seconds is killed, and TimeoutError raised."""
        try:
            codes = self._read("codes", time.monotonic() + timeout)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            raise
        texts = [[(self._folder / f"{number}.{name}").read_text(errors="replace") for name in ("out", "err")]
                 for number in range(len(codes))]  # fmt: skip
        shutil.rmtree(self._folder)
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]

    def running(self) -> bool:
        """Whether any process does."""
        return not (self._folder / "codes").exists()

    def send_signal(self, number: int) -> None:
        """To all processes that still run."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _read(self, name: str, deadline: float) -> Any:
        while not (self._folder / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {name} in time; what the processes have printed is in {self._folder}")
            time.sleep(_POLL)
        return json.loads((self._folder / name).read_text())


@cache
def _server() -> subprocess.Popen[str]:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # a pool of threads does not survive a fork
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, cwd=ROOT, env=alone)
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    sys.path[0] = str(ROOT)
    import torch._dynamo  # noqa: F401 - which optimizers import when they are made

    import train_multi_gpu  # noqa: F401 - and with it all else that a run imports

    supervisors: set[int] = set()
    for line in sys.stdin:
        supervisors -= {pid for pid in supervisors if os.waitpid(pid, os.WNOHANG)[0]}
        supervisors.add(os.fork())
        if 0 in supervisors:
            return _supervise(json.loads(line))


def _supervise(request: dict[str, Any]) -> None:
    """Fork the processes and write what becomes of them; returns in those processes alone, once their script ends."""
    pids: list[int] = []
    for number, environment in enumerate(request["environments"]):
        pid = os.fork()
        if pid == 0:
            return _run(request, number, environment)
        pids.append(pid)
    _write(request, "pids", pids)
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as torchrun does
            for other in set(pids).difference(codes):
                os.kill(other, signal.SIGTERM)
    _write(request, "codes", [codes[pid] for pid in pids])
    os._exit(0)


def _run(request: dict[str, Any], number: int, environment: dict[str, str]) -> None:
    folder, command = Path(request["folder"]), request["command"]
    for stream, name in enumerate((os.devnull, folder / f"{number}.out", folder / f"{number}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_path(command[0], run_name="__main__")


def _write(request: dict[str, Any], name: str, content: list[int]) -> None:
    file = Path(request["folder"], f"{name}.new")
    file.write_text(json.dumps(content))
    file.rename(file.with_suffix(""))


if __name__ == "__main__":
    _serve()
