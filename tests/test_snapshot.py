"""slurm/snapshot.py: what of a checkout is code, and its record."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurm.snapshot import SnapshotError, code_files, take_snapshot


def make_checkout(folder: Path) -> Path:
    for name, content in {
        "train.py": "1",
        "pack/mod.py": "2",
        "configs/tiny.json": "{}",
        "README.md": "text",
        "data.json": "x" * 2_000_000,
        "runs/a/config.json": "{}",
        "own_runs/a/job.py": "3",
        ".venv/lib.py": "4",
        "slurm/site.env": "A=1",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_snapshot_holds_code_and_site_file(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    wanted = {"train.py", "pack/mod.py", "configs/tiny.json", "slurm/site.env"}
    assert {str(path) for path in code_files(checkout, [checkout / "own_runs"])} == wanted
    (checkout / ".gitignore").write_text("/.venv\nruns/\nsite.env\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "train.py", ".gitignore")
    git(checkout, "commit", "-q", "-m", "first")
    (checkout / "train.py").write_text("changed")
    taken = take_snapshot(checkout, tmp_path / "job" / "code", [checkout / "own_runs", tmp_path])
    found = {str(path.relative_to(taken.folder)) for path in taken.folder.rglob("*") if path.is_file()}
    assert found == {*wanted, "GIT_COMMIT"}
    assert taken.commit == git(checkout, "rev-parse", "HEAD") + "+"
    assert (taken.folder / "GIT_COMMIT").read_text().strip() == taken.commit
    assert (taken.folder / "train.py").read_text() == "changed"
    assert "+changed" in (tmp_path / "job" / "code.diff").read_text()


def test_checkout_full_of_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("slurm.snapshot._MOST_FILES", 2)
    with pytest.raises(SnapshotError, match="--no-snapshot"):
        take_snapshot(make_checkout(tmp_path / "checkout"), tmp_path / "code")
