"""How an error of one rank reaches the person who reads the log, and the run folder of its SLURM job."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

from slurm.environment import Environment, EnvironmentProblem, read_environment
from training.config import TrainingConfig
from training.distributed import World
from training.status import first_failure, record_failure

_FIRST_SECONDS = 1.0  # for rank 0 to report first what all ranks meet alike


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


def report(error: str, config: TrainingConfig | None, world: World | None, secondary: bool = False) -> None:
    """Print an error, naming the rank where there are several, and leave it in the run folder of a SLURM job."""
    environment = _environment(world)
    if config is not None and environment.job_id is not None:
        if environment.rank > 0 and world is None:  # before they meet, most ranks meet the same error: one prints it
            time.sleep(_FIRST_SECONDS)
            known = first_failure(config.run_folder, environment.job_id, environment.restart_count)
            if known is not None and known.error == error:
                return
        record_failure(config.run_folder, environment, error, secondary)
    prefix = f"[rank {environment.rank} on {socket.gethostname()}] " if environment.world_size > 1 else ""
    print("".join(f"{prefix}{line}\n" for line in f"error: {error}".splitlines()), end="", file=sys.stderr, flush=True)


def report_traceback(error: BaseException, config: TrainingConfig | None, world: World | None) -> None:
    """The same for an error that nobody foresaw: its traceback, and its last line as the error."""
    environment = _environment(world)
    prefix = f"[rank {environment.rank} on {socket.gethostname()}] " if environment.world_size > 1 else ""
    lines = "".join(traceback.format_exception(error)).splitlines()
    print("".join(f"{prefix}{line}\n" for line in lines[:-1]), end="", file=sys.stderr, flush=True)
    report(lines[-1], config, world)
