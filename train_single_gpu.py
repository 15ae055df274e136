"""Hybrid masked/causal pretraining on one device: a CUDA GPU or the CPU.

The training itself is training/loop.py; this script only says how the world is made.
"""

import sys

from training.distributed import single_world
from training.loop import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "Hybrid masked/causal pretraining on one device: a CUDA GPU or the CPU.", single_world))
