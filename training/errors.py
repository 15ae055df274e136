"""Errors of a run: the one table of their kinds and exit codes, and how one of a rank is reported.

Both training scripts end with these codes, and slurm/requeue.py, by way of the files in `failures/`, decides by kind
whether a job starts again. Importing this needs no torch: requeue.py may run outside the container of the ranks.

A new error gets its kind by its class: derive it from one of those below, or give it a class attribute `kind`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.environment import Environment, EnvironmentProblem, read_environment
from training.status import first_failure, record_failure

if TYPE_CHECKING:
    from training.config import TrainingConfig
    from training.distributed import World

_FIRST_SECONDS = 1.0  # for rank 0 to report first what fails alike on all ranks
_LAUNCHER_SECONDS = 10.0  # for srun or torchrun to end this process, once another rank has failed


@dataclass(frozen=True)
class Kind:
    """name: as in failures/*.json. code: exit code. retried: whether REQUEUE_ON_CRASH starts the ranks again."""

    name: str
    code: int
    retried: bool = False


BUG = Kind("bug", 1)  # whatever nobody foresaw; reported with its traceback
USER = Kind("user", 2)  # flags, files or the environment have to be changed first
NOT_FINITE = Kind("not finite", 3)  # the same steps would come to the same end
GAVE_UP = Kind("gave up", 1)  # started too often, or without progress
HARDWARE = Kind("hardware or network", 75, retried=True)  # EX_TEMPFAIL of sysexits.h: try again
KINDS = {kind.name: kind for kind in (BUG, USER, NOT_FINITE, HARDWARE, GAVE_UP)}

DONE = 0  # finished; or stopped as asked (Ctrl-C), or stopped in a SLURM job that starts again
INTERRUPTED = 128 + signal.SIGINT  # Ctrl-C before the first step, or for the third time: nothing was saved


def signal_code(name: str) -> int:
    """Exit code of a run that a signal ("SIGTERM") has stopped and that nobody starts again by itself: not finished."""
    return 128 + signal.Signals[name]


def kind_of_code(code: int) -> Kind:
    """The kind of failure that the exit code of a rank, or of srun, stands for where no rank has recorded an error.
    Above 128 a signal killed it: the kernel for want of memory, a driver, a broken file system."""
    return HARDWARE if code > 128 else next((kind for kind in KINDS.values() if kind.code == code), BUG)


class UserError(ValueError):
    """Something that the user has to change; the message names it, its value and the remedy."""

    kind: ClassVar[Kind] = USER


class NonFiniteError(RuntimeError):
    """A loss, gradient or weight is not a number; the message says where."""

    kind: ClassVar[Kind] = NOT_FINITE
    hint = "a lower --learning_rate or --max_gradient, or --no-mixed_precision, usually helps"


class HardwareError(RuntimeError):
    """A device, host, file system or network failed; the same run may well succeed elsewhere or later.

    host: which one is at fault, "" where nobody knows; a restart avoids it. secondary: this rank has only lost touch
    with one that failed before it, whose error is the one to read.
    """

    kind: ClassVar[Kind] = HARDWARE

    def __init__(self, message: str, host: str = "", secondary: bool = False):
        super().__init__(message)
        self.host, self.secondary = host, secondary


class OtherRankFailed(RuntimeError):
    """Another rank met an error and reports it; this rank just stops."""


# Errors of others

_OF_THE_USER = (errno.EACCES, errno.EPERM)
_OF_THE_HOST = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO)
_OF_STORAGE = (*_OF_THE_HOST, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ETIMEDOUT)
_DEVICE = re.compile(r"CUDA (driver )?error|HIP error|CUBLAS_STATUS|CUDNN_STATUS|uncorrectable", re.IGNORECASE)
_OF_THE_PROGRAM = re.compile(r"device-side assert", re.IGNORECASE)  # an index out of range; it comes again


def kind_of(error: BaseException) -> Kind:
    """The kind of any error that can reach the end of a run."""
    import torch

    from data.corpus import CorpusError
    from data.shards import ShardError

    kind = getattr(error, "kind", None)
    if isinstance(kind, Kind):
        return kind
    if isinstance(error, CorpusError | ShardError | EnvironmentProblem | torch.OutOfMemoryError):
        return USER
    if isinstance(error, OSError) and error.errno in _OF_THE_USER:
        return USER
    if isinstance(error, torch.distributed.DistError | ConnectionError) or _is_device_error(error):
        return HARDWARE  # NCCL's errors among them, of which any host may be the cause
    return HARDWARE if isinstance(error, OSError) and error.errno in _OF_STORAGE else BUG


def is_explained(error: BaseException) -> bool:
    """Whether an error's text is a sentence for the user, who then needs no traceback."""
    return hasattr(error, "kind") or (kind_of(error) is USER and not isinstance(error, OSError))


def host_at_fault(error: BaseException) -> str:
    """The host on which a run should not start again; "" where no single one is to blame."""
    if isinstance(error, HardwareError):
        return error.host
    of_host = isinstance(error, OSError) and error.errno in _OF_THE_HOST
    return socket.gethostname() if of_host or _is_device_error(error) else ""


def _is_device_error(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_DEVICE.search(text)) and not _OF_THE_PROGRAM.search(text)


# Reporting


def _environment(world: World | None) -> Environment:
    if world is not None:
        return world.environment
    try:
        return read_environment(os.environ)
    except EnvironmentProblem:
        return Environment("none")


def out_of_memory(error: Exception) -> str:
    """The message for torch.OutOfMemoryError: torch's first sentence, and the remedy."""
    return f"{str(error).split('. ')[0]}; lower --local_batch_size: it changes speed alone"


def report_error(error: BaseException, config: TrainingConfig | None, world: World | None) -> int:
    """Print the error that ends this rank, and record it in the run folder of a SLURM job; returns its exit code.

    An error that explains itself is one sentence, any other its traceback. A rank that fails because another did gives
    the launcher time to end it first: the other's error is the one to read.
    """
    import torch

    if isinstance(error, KeyboardInterrupt):
        print("interrupted before the first step; nothing was lost", file=sys.stderr, flush=True)
        return INTERRUPTED
    follows = isinstance(error, OtherRankFailed) or (isinstance(error, HardwareError) and error.secondary)
    if isinstance(error, OtherRankFailed):
        _await_launcher()
        return BUG.code
    kind = kind_of(error)
    environment = _environment(world)
    if follows and config is not None and environment.job_id is not None and os.environ.get("LEAST_NODES"):
        # For requeue.py --attend: the other may have died with its node, of which srun does not hear
        record_failure(config.run_folder, environment, str(error), True, kind.name)
    if follows and _await_launcher():
        return kind.code  # records nothing else: the launcher knows of the other
    if isinstance(error, torch.OutOfMemoryError):
        text = out_of_memory(error)
    elif isinstance(error, OSError) and kind is not BUG:
        text = f"{error.filename or 'a file of the run'}: {error.strerror}"
    else:
        text = str(error) if is_explained(error) else _show_traceback(error, world)
    _print_and_record(text, kind, config, world, host_at_fault(error), follows)
    return kind.code


def _await_launcher() -> bool:
    """Whether the launcher has asked this process to end."""
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda given, _frame: came.append(given))
    deadline = time.monotonic() + _LAUNCHER_SECONDS
    while not came and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(came)


def _print_and_record(
    error: str, kind: Kind, config: TrainingConfig | None, world: World | None, host: str, secondary: bool
) -> None:
    """Print an error, naming the rank where there are several, and record it in the run folder of a SLURM job."""
    environment = _environment(world)
    if config is not None and environment.job_id is not None:
        if environment.rank > 0 and world is None:  # before the rendezvous all ranks tend to fail alike: one prints it
            time.sleep(_FIRST_SECONDS)
            known = first_failure(config.run_folder, environment.job_id, environment.restart_count)
            if known is not None and known.error == error:
                return
        record_failure(config.run_folder, environment, error, secondary, kind.name, host)
    _print_lines(f"error: {error}".splitlines(), environment)


def _print_lines(lines: list[str], environment: Environment) -> None:
    prefix = f"[rank {environment.rank} on {socket.gethostname()}] " if environment.world_size > 1 else ""
    print("".join(f"{prefix}{line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def _show_traceback(error: BaseException, world: World | None) -> str:
    """Print the traceback of an unforeseen error, all but its last line, which is returned."""
    *lines, last = "".join(traceback.format_exception(error)).splitlines()
    _print_lines(lines, _environment(world))
    return last
