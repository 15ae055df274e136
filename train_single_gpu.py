"""Hybrid masked/causal pretraining on one device: a CUDA GPU or the CPU.

The training itself is training/loop.py; this script only says how the world is made.
"""

import sys

from training.preemption import early_signals

if __name__ == "__main__":
    signals = early_signals()  # before torch is imported: that takes seconds, and SLURM may not wait

    from training.background import leave
    from training.distributed import single_world
    from training.loop import main

    about = "Hybrid masked/causal pretraining on one device: a CUDA GPU or the CPU."
    leave(main(sys.argv[1:], about, single_world, signals))
