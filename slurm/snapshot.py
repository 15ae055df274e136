"""Snapshot of the code for a job: one that waits, or is requeued days later, runs the code as it was submitted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from training.environment import COMMIT_FILE, git

SUFFIXES = frozenset(
    (".py", ".json", ".toml", ".lock", ".sh", ".sbatch", ".env", ".c", ".cu", ".cpp", ".h", ".css", ".js")
)
SITE_FILE = Path("slurm", "site.env")  # a site's own lines: not in git, and needed by the job
_NO_CODE = {"runs", "wandb", "demo_output", "bench_output", "build", "dist", "__pycache__", "node_modules"}
_LARGEST_FILE = 1_000_000  # bytes; data that happens to be JSON is no code
_MOST_FILES = 5000


class SnapshotError(RuntimeError):
    """The code cannot be copied; the message says why and what to do."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the code. commit: of the checkout, with a + where files differed from it; None outside git."""

    folder: Path
    files: int
    commit: str | None


def _walk(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NO_CODE and not name.startswith(".")]
        found += [(Path(folder) / name).relative_to(root) for name in names]
    return found


def code_files(root: Path, without: Iterable[Path] = ()) -> list[Path]:
    """Files of the checkout that a job may need, relative to `root`: in git or not ignored by it, small, and code.
    without: folders whose content is no code, such as those of runs. Ones that hold `root` itself change nothing."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    candidates = _walk(root) if listed is None else [Path(name) for name in listed.split("\0") if name]
    resolved = root.resolve()
    skipped = [path.resolve() for path in without if not resolved.is_relative_to(path.resolve())]

    def is_code(path: Path) -> bool:
        full = root / path
        if path.suffix not in SUFFIXES or not full.is_file() or full.stat().st_size > _LARGEST_FILE:
            return False
        return not any((resolved / path).is_relative_to(folder) for folder in skipped)

    found = {path for path in candidates if is_code(path)}
    if (root / SITE_FILE).is_file():
        found.add(SITE_FILE)
    return sorted(found)


def take_snapshot(root: Path, folder: Path, without: Iterable[Path] = ()) -> Snapshot:
    """Copy the code under `root` to the new folder `folder`; what differs from git's commit goes to `folder`.diff.
    Raises SnapshotError or OSError."""
    files = code_files(root, without)
    if len(files) > _MOST_FILES:
        raise SnapshotError(
            f"{root} holds {len(files):,} files that look like code; move data out of it, have git ignore it, or give "
            "--no-snapshot"
        )
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, folder / path)
    commit, difference = git(root, "rev-parse", "HEAD"), git(root, "diff", "HEAD")
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "--", *(f"*{s}" for s in sorted(SUFFIXES)))
    if commit is not None:
        commit = commit.strip() + ("+" if difference or untracked else "")
        (folder / COMMIT_FILE).write_text(commit + "\n", encoding="utf-8")
    if difference:
        folder.with_name(folder.name + ".diff").write_text(difference, encoding="utf-8")
    return Snapshot(folder, len(files), commit)
