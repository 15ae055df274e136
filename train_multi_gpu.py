"""Hybrid masked/causal pretraining on many devices: start with srun in a SLURM job, or with torchrun.

The training itself is training/loop.py; this script only says how the world is made.
"""

import sys

from training.distributed import start_world
from training.loop import main

if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1:],
            "Hybrid masked/causal pretraining on many devices: start with srun in a SLURM job, or with torchrun.",
            start_world,
        )
    )
