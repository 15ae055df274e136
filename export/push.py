"""Upload an exported folder to the Hugging Face Hub, whole or not at all; the same command again goes on.

    python export/push.py FOLDER USER/NAME

FOLDER is what export/to_huggingface.py has written; its --push does this, too. Of a folder with all checkpoints each
becomes a commit to main, in the order of the steps, and its branch when that commit is done: so, whatever is
interrupted, every revision on the Hub is whole. What is there already is not sent again. A new repository is private.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.cli import Parser, run_command
from export.hf_format import is_exported
from export.revisions import GitError, git

_MAIN = "main"
_REFUSALS = {
    401: "the token is not accepted: run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there: it needs the permission to write to repositories of this user or organization",
    404: "there is no such user or organization, or the token may not see it",
}


class PushError(ValueError):
    """Nothing or not everything was uploaded; the message is one sentence with the remedy."""


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what export/to_huggingface.py has written")
    parser.add_argument("repository", metavar="USER/NAME", help="a repository of the Hub, made where there is none")
    options = parser.parse_args(arguments)

    def upload() -> None:
        if not is_exported(options.folder):
            raise PushError(f"FOLDER {options.folder} is no exported folder; export/to_huggingface.py writes one")
        check_hub(options.repository)
        print(f"uploaded to {push(options.folder, options.repository, say=print)}")

    return run_command(upload, PushError, GitError)


def check_hub(repository: str) -> None:
    """Refuse an upload that cannot work, before anything is written. Raises PushError."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError:
        raise PushError("--push needs a package that is not installed: pip install huggingface_hub") from None
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PushError(f"--push {repository!r} is no name of a repository, such as USER/NAME: {error}") from None
    if not get_token():
        raise PushError("--push needs a login: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str, say: Callable[[str], object] = lambda _: None) -> str:
    """Upload an exported folder with all its branches; returns the repository's address. say: told each revision.
    Raises PushError and GitError; then every revision that the Hub has is whole."""
    from huggingface_hub import HfApi

    commits = _commits(folder)
    api, done = HfApi(), list[str]()

    def upload(revision: str) -> Any:
        return api.upload_folder(
            repo_id=repository, folder_path=folder, revision=revision, commit_message=f"Export {' '.join(done)}".strip()
        )

    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        there = {branch.name for branch in api.list_repo_refs(repository).branches} if commits else set()
        for commit, names in commits:
            git(folder, "checkout", "-q", commit)
            missing = [name for name in names if name not in there]
            for name in names:
                if name in there:
                    upload(name)
            if missing:
                oid = upload(_MAIN).oid
                for name in missing:
                    api.create_branch(repository, branch=name, revision=oid)
            done += names
            say(f"uploaded {', '.join(names)}")
        if commits:
            git(folder, "checkout", "-q", _MAIN)
        upload(_MAIN)
    except GitError:
        raise
    except Exception as error:  # the library's own errors, and those of several HTTP libraries below it
        raise PushError(_failure(folder, repository, error, done)) from error
    finally:
        if commits:
            git(folder, "checkout", "-q", _MAIN)
    return str(address)


def _commits(folder: Path) -> list[tuple[str, list[str]]]:
    """The commits of a folder with all checkpoints, each with its branches but main; [] of another folder. Raises
    PushError where files were changed since: none of the branches has these."""
    if not (folder / ".git").exists():
        return []
    if changed := git(folder, "status", "--porcelain").splitlines():
        raise PushError(f"{folder} has changes that no branch has ({changed[0][3:]}): commit or undo them first")
    names: dict[str, list[str]] = {}
    for line in git(folder, "for-each-ref", "--format=%(objectname) %(refname:short)", "refs/heads").splitlines():
        commit, name = line.split(" ", 1)
        names.setdefault(commit, []).extend([name] * (name != _MAIN))
    every = git(folder, "rev-list", "--reverse", "--topo-order", "--all").split()
    return [(commit, names[commit]) for commit in every if names.get(commit)]


def _failure(folder: Path, repository: str, error: BaseException, done: list[str]) -> str:
    """One sentence: what happened, what is on the Hub, how to go on."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    while error.__cause__ is not None:  # "Error while uploading": what lies below says why
        error = error.__cause__
        kinds |= {kind.__name__ for kind in type(error).__mro__}
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    lines = str(error).strip().splitlines()
    reason = _REFUSALS.get(status) or (lines[0] if lines else type(error).__name__)
    if kinds & {"TransportError", "OSError"} and response is None:
        reason = f"the connection was lost or refused: {reason}"
    there = f"on the Hub are {', '.join(done)}, each whole, and not the rest" if done else "nothing was uploaded"
    return (
        f"--push {repository}: {reason}; {there}. {folder} is whole; to go on: "
        f"python export/push.py {folder} {repository}"
    )


if __name__ == "__main__":
    sys.exit(main())
