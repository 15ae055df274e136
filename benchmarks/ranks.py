"""What many ranks cost: start-up, the agreement before a step, memory and sockets, with gloo on this machine.

    python benchmarks/ranks.py --ranks 2 16 32 64 128 [--output ranks.json]

One process imports PyTorch and the suite and forks the ranks, which share its pages; they train a tiny model for two
steps, as under torchrun. For each number of ranks: seconds of wall-clock time until all have met, until all have
compared flags, until the first step and until the end; the sum of the agreement along the axes of a grid, and around
the ring of all ranks that it replaces above 32; CPU time, memory (unique pages) and open files of a rank. `computed`
has what follows for --to ranks with a core each, from a message of gloo and a further axis between two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch._dynamo
import torch.distributed as dist

import train_multi_gpu
import train_single_gpu
from benchmarks.synthetic import run_flags, write_inputs
from benchmarks.timing import host_times_of, write_results
from data.cli import Parser
from model import ModelConfig
from training.distributed import Grid, World, axes_through, start_world

_TRIES = 20
_CONSTANT_TRIES = 400  # the fastest counts: on a machine that others use, too


def write_model(folder: Path) -> list[str]:
    """Inputs of a tiny run; its flags but for those that depend on the number of ranks."""
    write_inputs(folder, 256, 40_000)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    model = ModelConfig(**sizes, vocab_size=256, max_position_embeddings=64, position_bucket_size=8)
    (folder / "model.json").write_text(json.dumps(asdict(model)))
    short = {"max_steps": 2, "seq_length": 16, "validation_samples": 0, "device": "cpu", "collective_timeout": 9}
    return run_flags(folder, folder / "model.json", folder / "runs", **short)


def own_bytes() -> int:
    """Memory of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def run_rank(rank: int, ranks: int, flags: Sequence[str], began: float, folder: Path) -> None:
    """One rank's run; leaves what it measured in `folder`."""
    found: dict[str, float] = {}
    names: dict[str, object] = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getppid() % 10000}
    os.environ.update({name: str(value) for name, value in names.items()})
    check, step = train_single_gpu.check_same_run, train_single_gpu.train_step

    def connect(config: Any) -> World:
        world = start_world(config)
        found["met"] = time.time() - began
        pause = time.time()
        counts = torch.zeros(5, dtype=torch.int64)
        tries = _CONSTANT_TRIES if ranks == 2 else _TRIES
        ring = host_times_of(lambda: dist.all_reduce(counts), tries)
        grid = world.grid or Grid(rank, ranks, timedelta(minutes=5))
        agreement = host_times_of(lambda: grid.all_reduce(counts, dist.ReduceOp.SUM).wait(), tries)
        found["ring_ms"], found["grid_ms"] = statistics.median(ring), statistics.median(agreement)
        found["least_ring_ms"], found["least_grid_ms"] = min(ring), min(agreement)
        found["pause"] = time.time() - pause
        return world

    def checked(*arguments: Any) -> None:
        check(*arguments)
        found["compared"] = time.time() - began - found["pause"]

    def stepped(*arguments: Any) -> Any:
        found.setdefault("first_step", time.time() - began - found["pause"])
        done = step(*arguments)
        found.update(usage())
        return done

    patched = mock.patch.multiple(train_single_gpu, check_same_run=checked, train_step=stepped)
    with patched, open(folder / f"{rank}.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        code = train_single_gpu.main([*flags, f"--global_batch_size={ranks}"], connect)
    found["ended"] = time.time() - began - found["pause"]
    (folder / f"{rank}.json").write_text(json.dumps({**found, "code": code}))


def usage() -> dict[str, float]:
    """What this process has used so far."""
    own, files, times = own_bytes(), len(os.listdir("/proc/self/fd")), os.times()
    return {"own_mib": own / 2**20, "open_files": files, "cpu_seconds": times.user + times.system}


def measure(ranks: int, flags: Sequence[str], folder: Path) -> dict[str, float]:
    """The figures of one number of ranks: the largest of all, of CPU time the mean. Raises RuntimeError."""
    folder.mkdir()
    began, pids = time.time(), []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, ranks, [*flags, f"--name={ranks}"], began, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    missing = [rank for rank in range(ranks) if not (folder / f"{rank}.json").exists()]
    if missing:
        raise RuntimeError((folder / f"{missing[0]}.txt").read_text()[-3000:])
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    if any(each.pop("code") for each in found):
        raise RuntimeError((folder / "0.txt").read_text()[-3000:])
    largest = {name: max(each[name] for each in found) for name in found[0] if name != "pause"}
    return {**largest, "cpu_seconds": statistics.mean(each["cpu_seconds"] for each in found)}


def computed(ranks: int, pair: dict[str, float]) -> dict[str, float]:
    """The agreement between so many ranks with a core each, by the messages that follow one another. pair: what was
    measured with two ranks, whose sum is two messages."""
    hop, axis = pair["least_ring_ms"] / 2, max(0.0, pair["least_grid_ms"] - pair["least_ring_ms"])
    sides = [len(side) for side in axes_through(0, ranks)]
    messages = sum(2 * (side - 1) for side in sides)
    grid = {"messages": messages, "axes": len(sides), "grid_ms": messages * hop + len(sides) * axis}
    ring = {"ring_messages": 2 * (ranks - 1), "ring_ms": 2 * (ranks - 1) * hop}
    return {"message_us": 1000 * hop, "axis_us": 1000 * axis, **grid, **ring}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 32, 64, 128], metavar="N")
    parser.add_argument("--to", type=int, nargs="+", default=[128, 1024], metavar="N", help="numbers to compute for")
    parser.add_argument("--output", default="", metavar="FILE", help="write the results here as JSON")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = write_model(Path(folder))
        for ranks in options.ranks:
            found = measure(ranks, flags, Path(folder) / str(ranks))
            results[str(ranks)] = found | {"load": os.getloadavg()[0]}
            print(f"{ranks:5} ranks: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    forecast = {str(ranks): computed(ranks, results["2"]) for ranks in options.to if "2" in results}
    for ranks, found in forecast.items():
        print(f"{ranks:>5} ranks, computed: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    write_results(options, measured=results, computed=forecast)
    return 0


assert train_multi_gpu.main  # imported for the ranks, which call what it calls

if __name__ == "__main__":
    sys.exit(main())
