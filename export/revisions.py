"""All checkpoints of a run as revisions of one repository: a git branch for each, as BabyLM's evaluation wants them.

The commits follow each other in the order of the steps, and `main` is the last.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from training.checkpoint import CheckpointError, open_checkpoint
from training.status import checkpoint_folders, folder_name, list_checkpoints

# Whoever runs it: the commits are the export's, and nobody's hooks, signatures or templates take part.
_OWN = {
    **{f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in
       (("NAME", "hybrid pretraining"), ("EMAIL", "export@localhost"))},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


class GitError(ValueError):
    """Git cannot do what was asked; the message is one sentence."""


class Revision(NamedTuple):
    """A checkpoint, and the names of the branches that it becomes."""

    checkpoint: Path
    names: list[str]


def find_revisions(run: Path) -> list[Revision]:
    """All checkpoints of a run folder in the order of their steps, named or else `step_00001000`. Raises
    CheckpointError for a folder without any, and for one that is damaged."""
    parents = checkpoint_folders(run)
    found = {open_checkpoint(path).step: Revision(path, []) for path in list_checkpoints(*parents)}
    for path in sorted(path for parent in parents for path in parent.glob("chck_*") if path.is_dir()):
        names = found.setdefault((checkpoint := open_checkpoint(path)).step, Revision(checkpoint.path, [])).names
        names += [path.name] * (path.name not in names)
    if not found:
        raise CheckpointError(f"{run} has no checkpoints; --all_checkpoints takes those of a run folder")
    return [Revision(path, names or [folder_name(step)]) for step, (path, names) in sorted(found.items())]


def git(folder: Path, *arguments: str, settings: Mapping[str, str] = _OWN) -> str:
    """What git prints in `folder`. Raises GitError."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        command = ["git", "-C", str(folder), "-c", "core.compression=0", *arguments]  # weights do not get smaller
        done = subprocess.run(command, env={**environment, **settings}, capture_output=True, text=True, check=False)
    except OSError as error:
        raise GitError(f"--all_checkpoints makes a git repository, and git cannot be run: {error.strerror}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise GitError(f"git {arguments[0]} in {folder} failed: {reason}")
    return done.stdout


def write_revisions(folder: Path, revisions: list[Revision], write: Callable[[Path, Path], None]) -> None:
    """Make the empty `folder` a repository with a branch for each name, and `main` at the last, which is checked out.
    write: exports a checkpoint into a folder, over what it wrote there before. Raises GitError."""
    git(folder, "init", "-q", "--template=", "-b", "main")
    for checkpoint, names in revisions:
        write(checkpoint, folder)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "--allow-empty", "-m", ", ".join(names))
        for name in names:
            git(folder, "branch", name)


def is_git_address(repository: str) -> bool:
    """Whether --push names a repository of git rather than one of the Hugging Face Hub."""
    return "://" in repository or repository.endswith(".git") or Path(repository).is_dir()


def push_revisions(folder: Path, repository: str) -> str:
    """Push all branches to another repository, as the user's own git does; returns its address. Raises GitError."""
    address = str(Path(repository).resolve()) if Path(repository).is_dir() else repository
    git(folder, "push", "-q", address, "--all", settings={})
    return address
