"""Weak scaling on one machine: tokens per second of one GPU and of all of them, each with the same work.

    python benchmarks/scaling.py [--config configs/base.json] [--split rows ranks] [--sharding none zero1 full]

One GPU runs train_single_gpu.py, all of them torchrun and train_multi_gpu.py, on synthetic shards, with the same
micro-batches and as many of them a step and GPU; of N ranks' rows (N - 1) / N are masked, for one GPU too, so that
the objectives can be split by ranks. Prints the median over the steps after `--skip`, and the efficiency: the rate of N
GPUs over N times that of one. With --apart also N runs of one GPU each at the same time, which share the machine
but exchange nothing: what they lose is not the all_reduce of gradients. Results are written after each case.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.synthetic import read_rates, run_flags, write_inputs
from benchmarks.timing import write_results
from data.cli import Parser
from model import ModelConfig

_ROOT = Path(__file__).resolve().parent.parent


class Run:
    """One run, which begins at once: on `ranks` GPUs, or on the one with number `device`."""

    def __init__(
        self,
        inputs: Path,
        options: argparse.Namespace,
        ranks: int,
        accumulation: int,
        extra: Sequence[str] = (),
        device: int = 0,
    ) -> None:
        self._ranks, self._accumulation, self._extra, self._skip = ranks, accumulation, list(extra), options.skip
        rows = options.tokens // options.seq_length
        self._step_tokens = rows * accumulation * ranks * options.seq_length
        self._folder = Path(tempfile.mkdtemp(dir=inputs))
        self._command = _command(inputs, self._folder, options, ranks, accumulation, extra)
        alone = ranks == 1 and options.device != "cpu"
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": str(device)} if alone else {})}
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def result(self) -> dict[str, Any]:
        """Its rates, once it has ended. Raises RuntimeError with the run's output where it fails."""
        if self._process.wait():
            output = (self._folder / "log").read_text(errors="replace")
            raise RuntimeError(f"{' '.join(self._command)}\n{output[-6000:]}")
        rates, lines = read_rates(self._folder / "run", self._skip)
        shutil.rmtree(self._folder)
        return {
            "ranks": self._ranks,
            "accumulation": self._accumulation,
            "flags": self._extra,
            **rates,
            "step_ms": 1000 * self._step_tokens / rates["tokens_per_second"],
            "last_loss": lines[-1]["train/loss"],
        }


def _command(
    inputs: Path, folder: Path, options: argparse.Namespace, ranks: int, accumulation: int, extra: Sequence[str]
) -> list[str]:
    rows = options.tokens // options.seq_length
    launcher = [sys.executable, str(_ROOT / "train_single_gpu.py")]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        launcher.append(str(_ROOT / "train_multi_gpu.py"))
    sizes = {"seq_length": options.seq_length, "local_batch_size": rows, "max_steps": options.steps}
    sizes |= {"global_batch_size": rows * accumulation * ranks, "device": options.device, "name": "run"}
    ratio = {"hybrid_numerator": max(1, options.ranks - 1), "hybrid_denominator": options.ranks}
    return [*launcher, *run_flags(inputs, options.config, folder, **sizes, **ratio), *extra]


def apart(inputs: Path, options: argparse.Namespace, accumulation: int) -> dict[str, Any]:
    """As many runs as GPUs, each on its own; rates are added up."""
    runs = [Run(inputs, options, 1, accumulation, device=device) for device in range(options.ranks)]
    results = [run.result() for run in runs]
    rates = {key: sum(result[key] for result in results) for key in ("tokens_per_second", "slowest", "fastest")}
    means = {key: statistics.mean(result[key] for result in results) for key in ("step_ms", "loader_wait_fraction")}
    return {**results[0], **rates, **means, "ranks": options.ranks, "flags": ["apart"]}


def show(case: dict[str, Any]) -> None:
    """A line of the table."""
    efficiency = f"  efficiency {case['efficiency']:.1%}" if "efficiency" in case else ""
    print(
        f"{case['ranks']} x  {case['accumulation']} micro-batches  {' '.join(case['flags']):<50} "
        f"{case['tokens_per_second']:>11,.0f} tok/s ({case['slowest']:,.0f} - {case['fastest']:,.0f})  "
        f"{case['step_ms']:.1f} ms{efficiency}  waiting for data {case['loader_wait_fraction']:.1%}  "
        f"{case['peak_memory_gib']:.1f} GiB",
        flush=True,
    )


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=str(_ROOT / "configs/base.json"), help="model configuration")
    parser.add_argument("--seq_length", type=int, default=128, help="row length in tokens")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per micro-batch and GPU")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[4], help="micro-batches per step and GPU")
    parser.add_argument("--steps", type=int, default=30, help="steps per case")
    parser.add_argument("--skip", type=int, default=10, help="steps not counted")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use (default: all that are visible)")
    parser.add_argument("--split", nargs="+", default=["rows"], choices=["rows", "ranks"], help="--hybrid_split")
    parser.add_argument(
        "--allreduce_dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"], help="of gradients"
    )
    parser.add_argument(
        "--sharding", nargs="+", default=["none"], choices=["none", "zero1", "full"], help="of the state"
    )
    parser.add_argument("--apart", action="store_true", help="also as many runs of one GPU each, at the same time")
    parser.add_argument("--device", default="auto", help="as for the training scripts")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    options.ranks = options.ranks or torch.cuda.device_count()
    if options.ranks < 2:
        print(f"error: --ranks is {options.ranks}; scaling takes at least 2 GPUs", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []

    def note(case: dict[str, Any], alone: dict[str, Any] | None = None) -> dict[str, Any]:
        if alone is not None:
            case["efficiency"] = case["tokens_per_second"] / (options.ranks * alone["tokens_per_second"])
        show(case)
        results.append(case)
        write_results(options, results=results)
        return case

    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder), ModelConfig.from_json(options.config).vocab_size, 20_000_000)
        for accumulation in options.accumulation:
            alone = note(Run(inputs, options, 1, accumulation).result())
            if options.apart:
                note(apart(inputs, options, accumulation), alone)
            for split, dtype, sharding in itertools.product(options.split, options.allreduce_dtype, options.sharding):
                flags = [f"--hybrid_split={split}", f"--allreduce_dtype={dtype}"]
                if sharding != "none":
                    flags.append(f"--sharding={sharding}")
                note(Run(inputs, options, options.ranks, accumulation, flags).result(), alone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
