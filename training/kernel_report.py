"""Kernel report: one line with the CUDA kernels that a run uses, those it does not use, why, and about what it costs.

    residual, gate norm, feed-forward norm, loss, optimizer | not: attention because heads have 96 features and not 32,
    64 or 128 (100 to 260 % more time a step)

Costs are those of base on an H200, rows of 128 to 512 tokens (benchmarks/README.md): what the reference of a kernel
adds to a step in which all others run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from model import ModelConfig
from ops import attention_cuda, cross_entropy_cuda, gated_norm_cuda, lamb_cuda, residual_cuda, rope
from ops.reference import reference_chosen
from training.config import TrainingConfig

# Time that the reference implementation adds to a step, in percent, from and to; None where nobody has measured it.
_COSTS = {
    "attention": (100, 260),
    "rotary attention": None,
    "residual": (60, 60),
    "residual without averages": None,
    "gate norm": (5, 5),
    "feed-forward norm": (15, 15),
    "loss": (5, 10),
    "optimizer": (1, 6),
}


class _Kernel(NamedTuple):
    name: str
    part: str  # its name in HYBRID_REFERENCE
    precise: bool  # runs in float32, too
    obstacle: str  # of device and sizes
    available: Callable[[], bool]


def missing(config: TrainingConfig, model: ModelConfig, device: torch.device, load: bool = True) -> dict[str, str]:
    """For each kernel that there is for such a run, why it is not used; "" where it is.

    config: device defaults resolved. load: compile or load kernels without an obstacle; without, nothing
    touches the device.
    """
    found = {}
    for kernel in _kernels(config, model, device):
        reason = kernel.obstacle if device.type != "cuda" else reference_chosen(kernel.part)
        if not reason and not kernel.precise and not config.mixed_precision:
            reason = "they compute in bfloat16 (--mixed_precision)"
        reason = reason or kernel.obstacle
        if not reason and load and not kernel.available():
            reason = "they cannot be compiled or loaded (a warning says why)"
        found[kernel.name] = reason
    return found


def _kernels(config: TrainingConfig, model: ModelConfig, device: torch.device) -> list[_Kernel]:
    width, averages = model.hidden_size, model.model_type == "gpt-bert"
    heads = (model.head_dim, 2 * model.position_bucket_size - 1)
    drops, sublayers = model.attention_probs_dropout_prob > 0, 2 * model.num_hidden_layers
    attention = _Kernel(
        "attention",
        "attention",
        False,
        attention_cuda.obstacle(device, *heads, trains=True),
        lambda: attention_cuda.available(device, *heads, drops, trains=True),
    )
    if model.position_embedding == "rope":
        dtype = torch.bfloat16 if config.mixed_precision else torch.float32
        attention = _Kernel("rotary attention", "attention", True, rope.obstacle(device, dtype), lambda: True)
    residual = _Kernel(
        "residual" if averages else "residual without averages",
        "residual",
        False,
        residual_cuda.obstacle(device, width, sublayers),
        lambda: residual_cuda.available(device, width, sublayers),
    )
    norms = [
        _Kernel(
            name,
            "norm",
            False,
            gated_norm_cuda.obstacle(device, features),
            partial(gated_norm_cuda.available, device, features),
        )
        for name, features in [("gate norm", width)] * averages + [("feed-forward norm", model.intermediate_size)]
    ]
    loss = _Kernel(
        "loss",
        "loss",
        False,
        cross_entropy_cuda.obstacle(device, model.vocab_size),
        lambda: cross_entropy_cuda.available(device, model.vocab_size),
    )
    kernels = [attention, residual, *norms, loss]
    if config.optimizer == "lamb":
        obstacle = lamb_cuda.obstacle(device)
        kernels.append(_Kernel("optimizer", "optimizer", True, obstacle, lambda: lamb_cuda.available(device)))
    return kernels


def line(found: dict[str, str]) -> str:
    """What `missing` found, in words."""
    used = [name for name, reason in found.items() if not reason]
    if not used and len(set(found.values())) == 1:
        return f"none, since {next(iter(found.values()))}"
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        if reason:
            by_reason.setdefault(reason, []).append(name)
    absent = [f"{', '.join(names)} because {reason} ({_cost(names)})" for reason, names in by_reason.items()]
    return ", ".join(used or ["none"]) + (f" | not: {'; '.join(absent)}" if absent else "")


def _cost(names: list[str]) -> str:
    known = [cost for cost in map(_COSTS.__getitem__, names) if cost is not None]
    if not known:
        return "at a cost that was not measured"
    low, high = (sum(side) for side in zip(*known, strict=True))
    return f"about {low if low == high else f'{low} to {high}'} % more time a step"
