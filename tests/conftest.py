"""Settings for every test: two cores, no network, and the machine's hardware decides what can run."""

import os

# Before torch is imported, here and in every process that a test starts: with several workers and several ranks on a
# few cores, more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"

import shutil

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run; `make test-gpu` refuses to start without a CUDA device."""
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = "needs a CUDA device"
    if shutil.which("sbatch") is None:
        lacking["slurm"] = "needs SLURM"
    for item in items:
        for mark, reason in lacking.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
