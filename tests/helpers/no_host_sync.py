"""Training steps in which waiting for the device is an error; a program for several GPUs, too, under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from data.loader import Loader
from training.config import TrainingConfig, parse_config
from training.distributed import World, start_world
from training.gradients import BUCKET_BYTES
from training.inputs import read_inputs, resolve_device_defaults
from training.rank_checks import begin_agreement
from training.state import TrainState
from training.step import AsyncStepMetrics, train_step


def train_without_waiting(
    config: TrainingConfig, world: World, uses_cuda_graphs: bool, bucket_bytes: int = BUCKET_BYTES
) -> dict[int, list[dict[str, Any]]]:
    """A run's records by row length. Raises RuntimeError where a normal step waits for the device.

    A step is all from the agreement to the log line of the step before, statistics and fingerprints included. What
    AsyncStepMetrics may wait for is the event of the step before; `torch.cuda.Event.synchronize` is no error in this
    mode. The first steps of a row length may wait: they make tables, and compile, and record graphs.
    """
    read = read_inputs(resolve_device_defaults(config, world.device))
    state = TrainState.create(read.config, read.model_config, read.builder.options, world, bucket_bytes=bucket_bytes)
    log = AsyncStepMetrics(world, read.model_config)
    assert state.forward_backward.captures == uses_cuda_graphs
    first = 8 if uses_cuda_graphs else 2
    sizes = {"rank": world.rank, "world_size": world.size, "local_batch_size": config.local_batch_size}
    loader = Loader(read.builder, **sizes, split="rows", pin_memory=True)
    lengths: list[int] = []
    records = []
    try:
        for batch in loader:
            lengths.append(batch.plan.seq_length)
            try:
                torch.cuda.set_sync_debug_mode("error" if lengths.count(lengths[-1]) > first else "default")
                targets = begin_agreement(world, batch, False, state.step, len(read.plan.objectives))().targets
                records += log.push(train_step(state, batch, targets, read.config, read.plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        loader.close()
    records += log.flush()
    assert state.forward_backward.captures == uses_cuda_graphs, "a recording has failed"
    assert [record["step"] for record in records] == list(range(1, config.max_steps + 1))
    return {n: [r for r, length in zip(records, lengths, strict=True) if length == n] for n in sorted(set(lengths))}


def main() -> None:
    """One rank of several, with many buckets of gradients; rank 0 prints the records."""
    config = parse_config(sys.argv[1:], "")
    world = start_world(config)
    captures = config.sharding != "full"  # as training.forward_backward.graph_obstacle says
    records = train_without_waiting(config, world, uses_cuda_graphs=captures, bucket_bytes=20_000)
    if world.is_main:
        print(json.dumps(records))
    world.close()


if __name__ == "__main__":
    main()
