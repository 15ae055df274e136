"""Throughput: tokens per second of whole training steps, end to end through train_single_gpu.py.

    python benchmarks/throughput.py [--config base] [--seq_length 128 256 512] [--output throughput.json]

Each case is a run of its own on synthetic shards: loader, masks, forward, backward, clipping, optimizer, EMA, logging.
Prints the median over the steps after `--skip`, the smallest and largest, peak memory, and model FLOP/s over those of a
bf16 matrix product measured first; and, watched from outside, the mean by the wall clock over those steps and the most
device memory in use. With --parts also where the device's time goes (benchmarks/step_breakdown.py). With --ramp each
case also with a batch that grows fourfold over the run, as in the published recipe, with the same mean:
--accumulation 1 --steps 3000 --skip 20 --ramp is every step a micro-batch, and every few steps another number of rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.synthetic import read_rates, run_flags, write_inputs
from benchmarks.timing import time_of, write_results
from data.cli import Parser
from model import ModelConfig
from training.metric_logger import read_metrics
from training.summary import peak_flops

_ROOT = Path(__file__).resolve().parent.parent


def run_case(
    inputs: Path, config: str, seq_length: int, options: argparse.Namespace, extra: list[str], ramp: bool
) -> dict:
    """One run; returns its rates. Raises RuntimeError with the run's output where it fails."""
    # From a quarter of its last size a batch that grows evenly has on average 5/8 of it.
    rows = options.tokens // seq_length * 8 // 5 if ramp else options.tokens // seq_length
    name = f"T{seq_length}" + ("_ramp" if ramp else "") + "".join(extra).replace("--", "_").replace("=", "_")
    output = inputs / "runs"
    sizes = {"seq_length": seq_length, "local_batch_size": rows, "global_batch_size": rows * options.accumulation}
    sizes |= {"batch_reduction": 4 if ramp else 1, "device": options.device}
    flags = [*run_flags(inputs, config, output, **sizes), *extra]
    metrics = output / name / "metrics.jsonl"
    watched = _Watch(metrics, options.skip)
    _run("train_single_gpu.py", [*flags, f"--name={name}", f"--max_steps={options.steps}"], watched.look)
    rates, lines = read_rates(output / name, options.skip)
    parts = {}
    if options.parts:
        parts = json.loads(_run("benchmarks/step_breakdown.py", [*flags, f"--name={name}_parts", "--max_steps=6"]))
    return {
        "seq_length": seq_length,
        "ramp": ramp,
        "flags": extra,
        **rates,
        "mean_tokens_per_second": watched.mean(lines),
        "memory_in_use_gib": watched.memory / 2**30,
        "mfu": statistics.median(line.get("stats/mfu", 0.0) for line in lines),
        "first_step_seconds": _first_step_seconds(output / name),
        "parts_ms_a_step": parts,
    }


class _Watch:
    """A run watched from outside, at every call of `look`: when which step was done, and memory in use."""

    def __init__(self, metrics: Path, skip: int):
        self._metrics, self._skip = metrics, skip
        self._seen: list[tuple[float, int]] = []  # times, and bytes of metrics.jsonl by then
        self.memory = 0  # the most that was in use on the device, in bytes, by whomever

    def look(self) -> None:
        """Note what is there now."""
        if self._metrics.exists():
            self._seen.append((time.perf_counter(), self._metrics.stat().st_size))
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.memory = max(self.memory, total - free)

    def mean(self, lines: list[dict]) -> float:
        """Tokens per second by the wall clock from step `skip` to the last."""
        ends = list(accumulate(len(line) for line in self._metrics.read_bytes().splitlines(keepends=True)))
        first, last = ends[self._skip - 1] if self._skip else 0, ends[-1]
        begin = next(moment for moment, size in self._seen if size >= first)
        end = next(moment for moment, size in self._seen if size >= last)
        return sum(line["stats/global_batch_size"] * line["stats/seq_length"] for line in lines) / (end - begin)


def _run(script: str, flags: list[str], look: Callable[[], None] | None = None) -> str:
    """Run a script of ours, calling `look` every few milliseconds; returns what it prints. Raises RuntimeError with its
    output where it fails."""
    command = [sys.executable, str(_ROOT / script), *flags]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=printed, stderr=complaints, text=True)
        while process.poll() is None:
            if look is not None:
                look()
            time.sleep(0.005)
        if look is not None:
            look()
        printed.seek(0)
        complaints.seek(0)
        output, errors = printed.read(), complaints.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{output[-2000:]}{errors[-4000:]}")
    return output


def _first_step_seconds(run: Path) -> float:
    """How long the first step took, in which everything is compiled that is not in a cache."""
    first = next(line for line in read_metrics(run / "metrics.jsonl") if line["step"] == 1)
    return first["stats/tokens"] / first["stats/tokens_per_second"]


def matmul_flops(size: int = 8192) -> float:
    """FLOP/s of a bf16 matrix product of random numbers on this device; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0.0
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (time_of(lambda: left @ right, 20) / 1000)


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="base", help="preset in configs/, or a model configuration")
    parser.add_argument("--seq_length", type=int, nargs="+", default=[128, 256, 512], help="row lengths in tokens")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per micro-batch")
    parser.add_argument(
        "--document_length", type=int, default=400,
        help="mean length of documents in tokens; attention stays inside them, so take that of your "
        "texts for long rows",
    )  # fmt: skip
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=30, help="steps per case")
    parser.add_argument("--skip", type=int, default=10, help="steps not counted")
    parser.add_argument("--device", default="auto", help="as for train_single_gpu.py")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="further flags of the script; each occurrence is a case of its own",
    )
    parser.add_argument("--ramp", action="store_true", help="each case also with a batch that grows fourfold")
    parser.add_argument("--parts", action="store_true", help="profile each case too")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    if options.device == "auto" and not torch.cuda.is_available():
        print(
            "error: no CUDA device to measure; --device cpu measures this CPU (take a small --config)", file=sys.stderr
        )
        return 2
    preset = _ROOT / "configs" / f"{options.config}.json"
    options.config = str(preset) if preset.is_file() else options.config
    ceiling, peak = matmul_flops(), peak_flops(torch.device("cuda")) if torch.cuda.is_available() else None
    torch.cuda.empty_cache()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = ModelConfig.from_json(options.config).vocab_size
        inputs = write_inputs(Path(folder), vocab_size, 20_000_000, options.document_length)
        ramps = (False, True) if options.ramp else (False,)
        variants = options.variant or [""]
        for variant, seq_length, ramp in [(v, s, r) for v in variants for s in options.seq_length for r in ramps]:
            kind = f"{'ramp ' if ramp else ''}{variant}"
            case = run_case(inputs, options.config, seq_length, options, variant.split(), ramp)
            case["mfu_of_matmul"] = case["mfu"] * peak / ceiling if peak and ceiling else 0.0
            results.append(case)
            print(
                f"T={seq_length:<4} {kind:<30} {case['tokens_per_second']:>10,.0f} tok/s "
                f"({case['slowest']:,.0f} - {case['fastest']:,.0f}; mean by the clock "
                f"{case['mean_tokens_per_second']:,.0f})  MFU {case['mfu_of_matmul']:.1%} of a matmul  memory "
                f"{case['peak_memory_gib']:.1f} GiB (in use {case['memory_in_use_gib']:.1f})  waiting for data "
                f"{case['loader_wait_fraction']:.1%}",
                flush=True,
            )
            total = sum(case["parts_ms_a_step"].values())
            for part, milliseconds in case["parts_ms_a_step"].items():
                print(f"    {part:<40} {milliseconds:8.2f} ms a step  {milliseconds / total:6.1%}", flush=True)
    write_results(options, matmul_tflops=ceiling / 1e12, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
