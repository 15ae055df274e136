"""Timing by CUDA events, and the environment that is written with the figures."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parent.parent


def times_of(function: Callable[[], Any], repetitions: int, warm_up: int = 3) -> list[float]:
    """Milliseconds on the device of each of `repetitions` calls, queued behind other work: no launch is timed."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # about half a millisecond, in which the call is queued
        start.record()
        function()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in times]


def time_of(function: Callable[[], Any], repetitions: int) -> float:
    """Median milliseconds of one call."""
    return statistics.median(times_of(function, repetitions))


def host_times_of(function: Callable[[], Any], repetitions: int) -> list[float]:
    """Milliseconds by the host's clock of each of `repetitions` calls in a row, after one that counts for nothing."""
    times = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - began))
    return times[1:]


def peak_mib(function: Callable[[], Any]) -> float:
    """MiB of the device that a call needs at most beside what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def commit() -> str:
    """The repository's commit, with "+" where files differ from it; empty without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def has_cuda() -> bool:
    """Whether there is a CUDA device; says so on stderr where not."""
    if not torch.cuda.is_available():
        print("error: no CUDA device to measure", file=sys.stderr)
    return torch.cuda.is_available()


def write_results(options: argparse.Namespace, **sections: Any) -> None:
    """`sections` with the environment and the settings as JSON to `options.output`, if that is not empty."""
    if options.output:
        contents = {"environment": environment(), "settings": vars(options), **sections}
        Path(options.output).write_text(json.dumps(contents, indent=1, default=str))


def environment() -> dict[str, Any]:
    """Device, versions and commit."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
    }
