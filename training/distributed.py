"""Ranks: making the world, sums over it, and agreement on what to do next. One process is the degenerate case."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slurm.environment import Environment, local_device_index, read_environment
from training.config import ConfigError

_TIMEOUT = timedelta(minutes=20)  # longer than the slowest save or validation that other ranks may have to wait for


@dataclass(frozen=True)
class World:
    """The processes of a run. `size` 1 needs no process group."""

    rank: int
    size: int
    device: torch.device
    environment: Environment

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place; CPU tensors go through gloo, CUDA tensors through NCCL."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (any small picklable object of our own making), on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's `value` on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def choose_device(choice: str, local_rank: int = 0) -> torch.device:
    """The device for `--device auto|cuda|cpu`. Raises ConfigError where CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError("--device is 'cuda' but PyTorch sees no CUDA device; use --device cpu, or check nvidia-smi")
    if choice == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_device_index(local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def single_world(device: str) -> World:
    """The world of train_single_gpu.py: one process, whatever the environment says."""
    return World(0, 1, choose_device(device), Environment("none"))


def start_world(device: str) -> World:
    """The world of train_multi_gpu.py, from SLURM's or torchrun's environment.

    Raises EnvironmentProblem or ConfigError, each a sentence with the remedy.
    """
    environment = read_environment(os.environ)
    if environment.launcher == "none":
        raise ConfigError(
            "train_multi_gpu.py found neither SLURM's nor torchrun's variables: start it with "
            "'srun python train_multi_gpu.py ...' in a job, with 'torchrun --nproc_per_node N train_multi_gpu.py ...' "
            "on one machine, or use train_single_gpu.py for one device"
        )
    chosen = choose_device(device, environment.local_rank)
    if environment.world_size > 1:
        # Both backends in one group: gradients go through NCCL, small facts about control flow stay on the hosts.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"tcp://{environment.master_addr}:{environment.master_port}"
            if environment.launcher == "slurm"
            else None,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=_TIMEOUT,
        )
    return World(environment.rank, environment.world_size, chosen, environment)
