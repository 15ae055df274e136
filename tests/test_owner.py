"""A run folder on a file system without locks has one owner, which shows that it lives."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest

from training import run_dir
from training.config import ConfigError
from training.run_dir import STALE_SECONDS, FolderOwner, RunFolder
from training.watchdog import HeartbeatFile


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_dir.fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_second_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = RunFolder(tmp_path)
    assert "without locks: owner.json guards it" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=rf"--name: another process \(process {os.getpid()} on \S+, last heartbeat"):
        RunFolder(tmp_path)
    first.close()
    RunFolder(tmp_path).close()
    assert not (tmp_path / "owner.json").exists()


def owned_by(folder: Path, **changed: object) -> None:
    known = {"host": "elsewhere", "pid": 7, "pids": None, "job": "123", "time": time.time()}
    (folder / "owner.json").write_text(json.dumps({**known, **changed}))


def test_silent_owner_is_replaced_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    owner = FolderOwner(tmp_path)
    owned_by(tmp_path)
    assert owner.claim().startswith("process 7 on elsewhere of job 123, last heartbeat ")
    owned_by(tmp_path, time=time.time() - STALE_SECONDS - 1)
    assert owner.claim() == ""
    assert "owner.json is of process 7 on elsewhere of job 123, last heartbeat 61" in capsys.readouterr().out
    assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.json"]
    owner.release()


def test_ended_process_of_this_host_is_replaced_at_once(tmp_path: Path):
    gone = 2**22 + 1  # above the largest process number
    pids = os.readlink("/proc/self/ns/pid")
    owned_by(tmp_path, host=socket.gethostname(), pid=gone, pids="another container's")
    assert FolderOwner(tmp_path).claim()
    owned_by(tmp_path, host=socket.gethostname(), pid=gone, pids=pids)
    owner = FolderOwner(tmp_path)
    assert owner.claim() == ""
    owner.release()


def test_damaged_owner_file_counts_by_its_age(tmp_path: Path):
    (tmp_path / "owner.json").write_text("{")
    assert FolderOwner(tmp_path).claim() == "an unknown process"
    os.utime(tmp_path / "owner.json", (0, 0))
    owner = FolderOwner(tmp_path)
    assert owner.claim() == ""
    owner.release()


def test_heartbeat_continues_until_closed(tmp_path: Path):
    numbers = iter(range(1_000_000))
    beating = HeartbeatFile(tmp_path / "in" / "beat.json", lambda: {"n": next(numbers)}, seconds=0.001)
    deadline = time.monotonic() + 60
    while json.loads((tmp_path / "in" / "beat.json").read_text())["n"] < 3:
        assert time.monotonic() < deadline
    beating.close()
    assert not list((tmp_path / "in").glob("*.json"))


def test_vanished_folder_is_not_made_again(tmp_path: Path):
    (tmp_path / "run").mkdir()
    beating = HeartbeatFile(tmp_path / "run" / "in" / "beat.json", dict, seconds=0.001)
    (tmp_path / "run").rename(tmp_path / "gone")
    time.sleep(0.05)
    assert not (tmp_path / "run").exists()
    beating.close()
