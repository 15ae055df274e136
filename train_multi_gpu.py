"""Hybrid masked/causal pretraining on many devices: start with srun in a SLURM job, or with torchrun.

The run is that of train_single_gpu.py; only its world is another: the ranks that the launcher has started.
"""

import sys

from training.preemption import StopSignals, early_signals

# Before torch is imported: that takes seconds, and SLURM may not wait so long with a signal.
signals = early_signals() if __name__ == "__main__" else None

from collections.abc import Sequence

import train_single_gpu
from training.distributed import start_world
from training.sinks import leave


def main(arguments: Sequence[str], signals: StopSignals | None = None) -> int:
    """One rank's part of a run; returns the exit code (training/errors.py)."""
    return train_single_gpu.main(arguments, start_world, signals, (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    leave(main(sys.argv[1:], signals))
