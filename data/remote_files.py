"""Remote files: the file system of a URL, and how often what fails is tried again.

All through fsspec, which is imported only here, and its packages for protocols (s3fs, gcsfs, aiohttp, ...).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from data.stop_event import check_stop

TRIES = 5
FIRST_WAIT = 1.0  # seconds between the first two tries; doubled each time
_LONGEST_WAIT = 60.0
_Result = TypeVar("_Result")


def file_system(url: str, problem: type[Exception]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `problem`, with one sentence for the user."""
    try:
        import fsspec.core
    except ImportError:
        raise problem(f"reading {url} needs a package that is not installed: pip install fsspec") from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise problem(f"reading {url} needs a package that is not installed: {error}") from None
    except ValueError as error:
        raise problem(f"{url} cannot be read: {error}") from None


def retried(action: Callable[[], _Result], what: str, problem: type[Exception], tries: int = TRIES) -> _Result:
    """The result of an action, which may fail a few times; the packages of the protocols raise whatever they like.

    Raises `problem` then, with one sentence about `what`."""
    for number in range(tries):
        check_stop()
        try:
            return action()
        except problem:
            raise
        except Exception as error:
            final = _is_final(error)
            if final or number == tries - 1:
                after = "" if final else f" in {tries} tries"
                reason = str(error.__cause__ or error).strip() or type(error).__name__
                remedy = "check the path and your rights" if final else "run the same again to continue"
                raise problem(f"{what} could not be read{after} ({reason}); {remedy}") from error
        time.sleep(min(_LONGEST_WAIT, FIRST_WAIT * 2**number))
    raise AssertionError("unreachable")


def _is_final(error: BaseException) -> bool:
    """Whether another try would fail as well."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", getattr(getattr(cause, "response", None), "status_code", None))
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 425, 429)
    # fsspec says "not found" of whatever fails over https://: aiohttp's errors without a status are lost connections.
    lost = error.__cause__ is not None and type(error.__cause__).__module__.startswith("aiohttp")
    not_found = isinstance(error, FileNotFoundError) and not lost
    # ValueError: what fsspec and its packages raise for a path or protocol that they cannot read.
    return not_found or isinstance(error, PermissionError | IsADirectoryError | NotImplementedError | ValueError)
