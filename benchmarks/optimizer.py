"""Clipping, the optimizer's step and the average of the weights: the kernels beside the calls that they replace;
and the checksums of all of it by which ranks are compared.

    python benchmarks/optimizer.py [--config configs/base.json] [--output optimizer.json]

Every method works on the parameters of one model in the same process: random weights and gradients, a norm that is
clipped, three steps to warm up. Times are medians by CUDA events, each from a device queue that is not empty. The floor
is the traffic of the fused passes at the rate of a large copy in the same process.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import has_cuda, times_of, write_results
from data.cli import Parser
from model import ModelConfig
from model_extra import build_model
from model_protocol import PretrainingModel
from ops import muon
from ops.bit_sums import bit_sums
from ops.reference import VARIABLE
from training.ema import Ema
from training.optimizers import MatrixOptions, OptimizerStep, make_optimizer, named_state

_ROOT = Path(__file__).resolve().parent.parent
_BYTES = 52  # an element of the fused passes: g; g m v w -> m v; m v w a -> w a


def make(config: ModelConfig, optimizer: str, fused: bool) -> OptimizerStep:
    """A model of its own with random gradients, and its update."""
    model = build_model(config).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    settings = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    cautious = MatrixOptions(cautious=True)
    with mock.patch.dict(os.environ, {VARIABLE: "" if fused else "optimizer"}):
        made = make_optimizer(model, optimizer, **settings, matrices=cautious)
        return OptimizerStep(model, made, Ema(model, 0.999), max_norm=2.0)


def copy_rate() -> float:
    """Bytes read and written a second by a copy of 4 GB on the device."""
    source = torch.empty(2**30, device="cuda").normal_()
    target = torch.empty_like(source)
    return 8 * 2**30 / (statistics.median(times_of(lambda: target.copy_(source), 10)) / 1000)


def host_milliseconds(function: Callable[[], Any]) -> float:
    """Median time for which a call keeps the host."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def newton_schulz(model: PretrainingModel, by_torch: bool) -> Callable[[], Any]:
    """Newton-Schulz of stacks of the shapes of a model's matrices, in bfloat16."""
    shapes = Counter[tuple[int, int]]()
    for parameter, projections in model.hidden_matrices().items():
        shapes[parameter.size(0) // projections, parameter.size(1)] += projections
    stacks = [torch.randn(n, *shape, device="cuda", dtype=torch.bfloat16) for shape, n in shapes.items()]
    if by_torch:
        return lambda: [muon.newton_schulz(stack) for stack in stacks]
    scales = [1 / torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float32) for stack in stacks]
    return lambda: [muon.orthogonalised(*each) for each in zip(stacks, scales, strict=True)]


def timed_call(name: str, update: OptimizerStep) -> Callable[[], Any]:
    """The call that a method's name stands for."""
    if name.startswith("Newton-Schulz"):
        assert isinstance(update.model, PretrainingModel)
        return newton_schulz(update.model, by_torch=name.endswith("torch"))
    if name.endswith("alone"):
        return update.optimizer.step
    if not name.startswith("checksums"):
        return update
    update()  # which makes the moments
    moments = named_state(update.optimizer, update.model)
    tensors = [*update.model.parameters(), *update.ema.state_dict().values(), *moments.values()]
    return lambda: bit_sums(tensors)


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=str(_ROOT / "configs/base.json"), help="model configuration")
    parser.add_argument("--repetitions", type=int, default=50, help="of each measurement")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    if not has_cuda():
        return 2
    config = ModelConfig.from_json(options.config)
    methods = [
        ("LAMB, fused", "lamb", True),
        ("LAMB, separate calls (reference)", "lamb", False),
        ("AdamW of torch, fused, with clipping and average", "adamw", False),
        ("AdamW of torch, fused, its step alone", "adamw", False),
        ("NorMuon and AdamW, fused", "normuon", True),
        ("NorMuon and AdamW, separate calls (reference)", "normuon", False),
        ("Muon and AdamW, fused", "muon", True),
        ("Newton-Schulz of all matrices, alone", "normuon", True),
        ("Newton-Schulz of all matrices, by torch", "normuon", True),
        ("checksums of weights, average and moments", "lamb", True),
    ]
    rate, results, parameters = copy_rate(), [], 0
    for name, optimizer, fused in methods:
        update = make(config, optimizer, fused)
        if fused != (update._fused is not None):
            print("error: the fused kernels cannot run on this device", file=sys.stderr)
            return 2
        call = timed_call(name, update)
        parameters = sum(parameter.numel() for parameter in update.model.parameters())
        times, host = times_of(call, options.repetitions), host_milliseconds(call)
        case = {"method": name, "ms": statistics.median(times), "fastest": min(times), "slowest": max(times)}
        results.append({**case, "host_ms": host})
        print(
            f"{name:<50} {case['ms']:7.3f} ms ({case['fastest']:.3f} - {case['slowest']:.3f}), host {host:.2f} ms",
            flush=True,
        )
        del update, call
        torch.cuda.empty_cache()
    floor = 1000 * _BYTES * parameters / rate
    print(f"{parameters:,} parameters; {_BYTES} bytes each at {rate / 1e12:.2f} TB/s (copy): {floor:.3f} ms")
    extent = {"parameters": parameters, "copy_bytes_per_second": rate, "floor_ms": floor}
    write_results(options, **extent, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
