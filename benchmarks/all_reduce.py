"""All-reduce overhead of gradients: a training script that also times the parts of each step.

    python benchmarks/all_reduce.py FLAGS                               # one GPU: a step without all_reduce
    torchrun --nproc_per_node=4 benchmarks/all_reduce.py FLAGS          # FLAGS: those of train_multi_gpu.py

Each step has three parts, by CUDA events on every rank: its micro-batches up to the end of the last backward pass,
which all_reduce overlaps; the all_reduce that is still to be awaited; clipping, optimizer and average. Prints medians
over the second half of the steps, without those in which a rank ran its last micro-batch outside of a CUDA graph.
--bucket_mib changes the size of a bucket: with more than all gradients take, nothing overlaps the backward pass.
--trace FOLDER writes the kernels of four of these steps on every rank, for chrome://tracing.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

import train_single_gpu
import training.state
from benchmarks.timing import has_cuda
from data.cli import Parser
from data.loader import StepBatch
from data.plan import DataPlan
from training.config import TrainingConfig
from training.distributed import single_world, start_world
from training.gradients import GradientBuckets
from training.state import TrainState
from training.step import InFlightStep

_TRACED_STEPS = 4
_PARTS = ("micro-batches", "all_reduce", "rest")


class TimedGradients(GradientBuckets):
    """Marks when the last backward pass of a step has ended, and when its all_reduce has."""

    marks: list[torch.cuda.Event]

    def sum_replayed(self, marks: Any) -> None:
        """As in GradientBuckets."""
        self.marks = [_now()]
        super().sum_replayed(marks)
        self.marks.append(_now())


class Steps:
    """The times of all steps of a rank."""

    def __init__(self, trace: str) -> None:
        self._trace, self._profile = trace, None
        self._events: list[list[torch.cuda.Event]] = []

    def train_step(
        self, state: TrainState, batch: StepBatch, targets: tuple[int, int], config: TrainingConfig, plan: DataPlan
    ) -> InFlightStep:
        """training.step.train_step between two events."""
        gradients = state.gradients
        assert isinstance(gradients, TimedGradients)
        self._follow(state.step - config.max_steps // 2, state.world.rank)
        gradients.marks, begin = [], _now()
        done = _train_step(state, batch, targets, config, plan)
        self._events.append([begin, *gradients.marks, _now()] if gradients.marks else [])
        return done

    def milliseconds(self) -> list[list[float]]:
        """The three parts of each step; of one without a replay nothing."""
        torch.cuda.synchronize()
        return [[a.elapsed_time(b) for a, b in pairwise(events)] for events in self._events]

    def _follow(self, step: int, rank: int) -> None:
        if self._trace and step == 0:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        if self._profile is not None and step == _TRACED_STEPS:
            torch.cuda.synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(Path(self._trace) / f"rank{rank}.json.gz"))
            self._profile = None


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def show(ranks: list[list[list[float]]]) -> None:
    """The table: `ranks` has each rank's steps."""
    half = len(ranks[0]) // 2
    late = [list(parts) for parts in zip(*ranks, strict=True)][half:]
    steps = [parts for parts in late if all(parts)]
    print(f"{len(steps)} of the last {len(late)} steps, milliseconds")
    if not steps:
        print("the others had no CUDA graphs on all ranks: more steps (--max_steps)?")
        return
    print(f"{'':<14}" + "".join(f"{name:>15}" for name in (*_PARTS, "whole")))
    for rank in range(len(ranks)):
        own = [parts[rank] for parts in steps]
        line = [*(statistics.median(part) for part in zip(*own, strict=True)), statistics.median(map(sum, own))]
        print(f"{f'rank {rank}':<14}" + "".join(f"{value:>15.2f}" for value in line))
    slowest = statistics.median(max(part[0] for part in parts) for parts in steps)
    mean = statistics.median(statistics.mean(part[0] for part in parts) for parts in steps)
    least = statistics.median(min(part[1] for part in parts) for parts in steps)
    print(f"micro-batches: {mean:.2f} by the mean of ranks, {slowest:.2f} by the slowest; least awaited: {least:.2f}")


_train_step, _run_steps = train_single_gpu.train_step, train_single_gpu.run_steps


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--bucket_mib", type=float, default=0.0, help="gradient bucket in MiB (default: as in training)"
    )
    parser.add_argument("--trace", default="", help="folder for traces of kernels")
    options, flags = parser.parse_known_args()
    if not has_cuda():
        return 2
    if options.trace:
        Path(options.trace).mkdir(parents=True, exist_ok=True)
    steps = Steps(options.trace)
    size = {"bucket_bytes": int(options.bucket_mib * 2**20)} if options.bucket_mib else {}

    def run_steps(state: TrainState, *arguments: Any) -> Any:
        stop = _run_steps(state, *arguments)
        ranks = state.world.all_gather_objects(steps.milliseconds(), "timings")
        if state.world.is_main:
            show(ranks)
        return stop

    training.state.GradientBuckets = functools.partial(TimedGradients, **size)
    train_single_gpu.train_step, train_single_gpu.run_steps = steps.train_step, run_steps
    return train_single_gpu.main(flags, start_world if "RANK" in os.environ else single_world)


if __name__ == "__main__":
    sys.exit(main())
