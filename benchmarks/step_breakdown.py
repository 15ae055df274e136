"""Step breakdown: milliseconds of CUDA kernels in a training step by part of the model.

    python benchmarks/step_breakdown.py [--max_steps 6] [FLAGS OF train_single_gpu.py ...]

Trains as train_single_gpu.py does, without CUDA graphs, and profiles the last step but one; prints one JSON object.
Called by benchmarks/throughput.py. A kernel belongs to the part whose forward or backward pass launched it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import train_single_gpu
from data.cli import Parser
from ops.reference import VARIABLE, reference_parts
from training import forward_backward, optimizers
from training.distributed import single_world

_MARK = "part: "
# Kernels with a name of their own, by what it begins with.
_KERNELS = {
    "relative_attention": "attention scores",
    "residual": "residual stream, averaging over depth",
    "gated_norm": "gates and their norms",
}
# Those of ops/lamb_cuda.py, which run outside of what torch calls an operator.
_OPTIMIZER = "clipping, optimizer, weight average"
_OPTIMIZER_KERNELS = {
    "gradient_squares", "gradient_norm", "moments", "trust_ratios", "apply", "moments_and_apply", "momenta",
    "row_squares", "row_scales", "descend",
}  # fmt: skip


def part_of_events(events: Any) -> Counter[str]:
    """Milliseconds of kernels by part, from a profile's events."""
    by_sequence: dict[int, str] = {}

    def marked(event: Any) -> str:
        while event is not None:
            if event.name.startswith(_MARK):
                return event.name.removeprefix(_MARK)
            event = event.cpu_parent
        return ""

    # An operation knows the number that the next node of autograd's graph will get; the last to know it makes the node.
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.device_type == DeviceType.CPU and event.sequence_nr >= 0 and (part := marked(event)):
            by_sequence[event.sequence_nr] = part

    def part_of(event: Any) -> str:
        node = event
        while node is not None:
            if node.name.startswith(_MARK):
                return node.name.removeprefix(_MARK)
            if "AccumulateGrad" in node.name:
                return "accumulation of gradients"
            if node.name.startswith("autograd::engine::evaluate_function") and node.sequence_nr in by_sequence:
                return by_sequence[node.sequence_nr]
            node = node.cpu_parent
        return "other"

    parts: Counter[str] = Counter()
    for event in events:
        for kernel in event.kernels if event.device_type == DeviceType.CPU else ():
            own = (part for name, part in _KERNELS.items() if kernel.name.startswith(name))
            if kernel.name not in _OPTIMIZER_KERNELS:
                parts[next(own, "") or part_of(event)] += kernel.duration / 1000
        if event.device_type == DeviceType.CUDA and event.name in _OPTIMIZER_KERNELS:
            parts[_OPTIMIZER] += event.time_range.elapsed_us() / 1000
    return parts


def _mark(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        with record_function(_MARK + part):
            return function(*arguments, **named)

    return marked


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0], epilog="All other flags are those of train_single_gpu.py.")
    parser.add_argument("--max_steps", type=int, default=6, help="steps to train")
    options, flags = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device to profile", file=sys.stderr)
        return 2
    steps = max(2, options.max_steps)
    flags.append(f"--max_steps={steps}")
    os.environ[VARIABLE] = ",".join({*reference_parts(), "graphs"})
    plain_step, done, results = train_single_gpu.train_step, 0, {}

    def step(state: Any, *rest: Any) -> Any:
        nonlocal done
        done += 1
        if done == 1:
            encoder = state.model.transformer
            parts = [*((layer, "attention projections") for layer in encoder.attention_layers)]
            parts += [(layer, "feed-forward") for layer in encoder.mlp_layers]
            parts.append((state.model.classifier, "head and loss"))
            for module, part in parts:
                name = "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"
                setattr(module, name, _mark(getattr(module, name), part))
            state.model.score = _mark(state.model.score, "head and loss")
            state.model.embedding.forward = _mark(state.model.embedding.forward, "embedding and inputs")
        if done != steps - 1:
            return plain_step(state, *rest)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            pending = plain_step(state, *rest)
            torch.cuda.synchronize()
        parts = part_of_events(profiler.events())
        results.update({name: round(milliseconds, 3) for name, milliseconds in parts.most_common()})
        return pending

    train_single_gpu.train_step = step
    optimizers.OptimizerStep.__call__ = _mark(optimizers.OptimizerStep.__call__, _OPTIMIZER)
    forward_backward.hybrid_loss = _mark(forward_backward.hybrid_loss, "embedding and inputs")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = train_single_gpu.main(flags, single_world)
    print(json.dumps(results) if code == 0 else out.getvalue())
    return code


if __name__ == "__main__":
    sys.exit(main())
