"""CUDA kernels of cross-entropy, forward and backward; the reference is in ops/cross_entropy.py.

The source is ops/cuda/cross_entropy.cu, compiled at run time by NVRTC (ops/nvrtc.py). The kernels read bfloat16 logits
once in the forward pass and once in the backward pass, which writes their gradient, and compute in float32.
Deterministic, and nothing waits for the device, except the first call, which compiles or loads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.nvrtc import Module, aligned

_SOURCE = Path(__file__).parent / "cuda" / "cross_entropy.cu"
_THREADS = 256


def obstacle(device: torch.device, vocabulary: int) -> str:
    """Why a device cannot run the kernels for a vocabulary; "" where it can. Compiles nothing."""
    if problem := nvrtc.obstacle(device):
        return problem
    return f"vocab_size is {vocabulary:,} and not a multiple of 8" if vocabulary % 8 else ""


@cache
def available(device: torch.device, vocabulary: int) -> bool:
    """Whether the kernels run there: no obstacle, compiled and loaded.

    Warns where they should run but cannot be compiled or loaded.
    """
    consequence = "cross-entropy runs without its CUDA kernels, slower"
    return not obstacle(device, vocabulary) and nvrtc.loads(lambda: _module(nvrtc.number_of(device)), consequence)


@cache
def _module(device: int) -> Module:
    return Module(_SOURCE, [], device)


def fused_target_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.cross_entropy.target_scores` for logits bfloat16 [N, V], where `available` says so."""
    loss, log_z, correct = _scores(aligned(logits), labels.contiguous())
    return loss, log_z.square(), correct


@torch.library.custom_op("hybrid::target_scores", mutates_args=(), device_types="cuda")
def _scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, log-partition and correctness, float32 [N] each; logits bfloat16 [N, V], labels int64 [N]."""
    loss, log_z, correct = (torch.empty(len(labels), device=labels.device) for _ in range(3))
    tensors = {"logits": logits, "labels": labels, "loss": loss, "log_z": log_z, "correct": correct}
    _launch("cross_entropy_forward", tensors)
    return loss, log_z, correct


@torch.library.custom_op("hybrid::target_scores_backward", mutates_args=(), device_types="cuda")
def _scores_backward(
    dloss: Tensor | None, dlog_z: Tensor | None, log_z: Tensor, logits: Tensor, labels: Tensor
) -> Tensor:
    """Gradient of the logits."""
    dlogits = torch.empty_like(logits)
    tensors = {"logits": logits, "labels": labels, "log_z": log_z, "dlogits": dlogits}
    gradients = {"dloss": dloss, "dlog_z": dlog_z}
    tensors |= {name: gradient.contiguous() for name, gradient in gradients.items() if gradient is not None}
    _launch("cross_entropy_backward", tensors)
    return dlogits


@_scores.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))


@_scores_backward.register_fake
def _(dloss: Tensor | None, dlog_z: Tensor | None, log_z: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dloss: Tensor | None, dlog_z: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
    if dloss is None and dlog_z is None:
        return None, None
    return _scores_backward(dloss, dlog_z, *ctx.saved_tensors), None


_scores.register_autograd(_differentiate, setup_context=_save)


class _Params(ctypes.Structure):
    """Field by field what `struct Params` in the source is."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("logits", "labels", "loss", "log_z", "correct")]
        + [(name, ctypes.c_void_p) for name in ("dloss", "dlog_z", "dlogits")]
        + [("rows", ctypes.c_int64), ("vocabulary", ctypes.c_int32)]
    )


def _launch(name: str, tensors: dict[str, Tensor]) -> None:
    logits = tensors["logits"]
    rows, vocabulary = logits.shape
    if rows:
        addresses = {field: tensor.data_ptr() for field, tensor in tensors.items()}
        params = _Params(rows=rows, vocabulary=vocabulary, **addresses)
        with torch.cuda.device(logits.device):
            stream = torch.cuda.current_stream().cuda_stream
            _module(logits.device.index).launch(name, rows, _THREADS, params, stream)
