"""How an error of one rank reaches the person who reads the log, and the run folder of its SLURM job."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback

import torch

from training.config import TrainingConfig
from training.distributed import World
from training.environment import Environment, EnvironmentProblem, read_environment
from training.errors import (
    BUG,
    INTERRUPTED,
    HardwareError,
    Kind,
    OtherRankFailed,
    host_at_fault,
    is_explained,
    kind_of,
)
from training.status import first_failure, record_failure

_FIRST_SECONDS = 1.0  # for rank 0 to report first what all ranks meet alike
_LAUNCHER_SECONDS = 10.0  # for srun or torchrun to end this process, once another rank has failed


def _environment(world: World | None) -> Environment:
    if world is not None:
        return world.environment
    try:
        return read_environment(os.environ)
    except EnvironmentProblem:
        return Environment("none")


def out_of_memory(error: Exception) -> str:
    """The sentence for torch.OutOfMemoryError: torch's first, and the remedy."""
    return f"{str(error).split('. ')[0]}; lower --local_batch_size: it changes speed alone"


def tell(error: BaseException, config: TrainingConfig | None, world: World | None) -> int:
    """Print what ends this rank, and leave it in the run folder of a SLURM job; returns the exit code of its kind.

    An error with a sentence of its own is that sentence, any other its traceback. A rank that only follows another
    gives the launcher time to end it first: the other's error is the one to read.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted before the first step; nothing was lost", file=sys.stderr, flush=True)
        return INTERRUPTED
    follows = isinstance(error, OtherRankFailed) or (isinstance(error, HardwareError) and error.secondary)
    if isinstance(error, OtherRankFailed):
        _await_launcher()
        return BUG.code
    kind = kind_of(error)
    if follows and _await_launcher():
        return kind.code  # and leaves no word: the launcher knows of the other
    if isinstance(error, torch.OutOfMemoryError):
        text = out_of_memory(error)
    elif isinstance(error, OSError) and kind is not BUG:
        text = f"{error.filename or 'a file of the run'}: {error.strerror}"
    else:
        text = str(error) if is_explained(error) else _show_traceback(error, world)
    _report(text, kind, config, world, host_at_fault(error), follows)
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


def _report(
    error: str, kind: Kind, config: TrainingConfig | None, world: World | None, host: str, secondary: bool
) -> None:
    """Print an error, naming the rank where there are several, and leave it in the run folder of a SLURM job."""
    environment = _environment(world)
    if config is not None and environment.job_id is not None:
        if environment.rank > 0 and world is None:  # before they meet, most ranks meet the same error: one prints it
            time.sleep(_FIRST_SECONDS)
            known = first_failure(config.run_folder, environment.job_id, environment.restart_count)
            if known is not None and known.error == error:
                return
        record_failure(config.run_folder, environment, error, secondary, kind, host)
    prefix = f"[rank {environment.rank} on {socket.gethostname()}] " if environment.world_size > 1 else ""
    print("".join(f"{prefix}{line}\n" for line in f"error: {error}".splitlines()), end="", file=sys.stderr, flush=True)


def _show_traceback(error: BaseException, world: World | None) -> str:
    """Print the traceback of an error that nobody foresaw, all but its last line, which is returned."""
    environment = _environment(world)
    prefix = f"[rank {environment.rank} on {socket.gethostname()}] " if environment.world_size > 1 else ""
    lines = "".join(traceback.format_exception(error)).splitlines()
    print("".join(f"{prefix}{line}\n" for line in lines[:-1]), end="", file=sys.stderr, flush=True)
    return lines[-1]
