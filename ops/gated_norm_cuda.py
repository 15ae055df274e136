"""CUDA kernels of the gated layer norm and of GLUs without a norm, forward and backward; the reference is in
ops/gated_norm.py.

The source is ops/cuda/gated_norm.cu, compiled at run time by NVRTC (ops/nvrtc.py). The kernels read value and gate once
and write the result, backwards likewise; they take bfloat16 and compute in float32. Deterministic, and nothing waits
for the device, except the first call for a width, which compiles or loads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.nvrtc import FLOAT, INT64, POINTER, Module, Params, aligned, fields

_SOURCE = Path(__file__).parent / "cuda" / "gated_norm.cu"
_FEATURES = 24  # of a row that a thread can hold
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu2")  # by their numbers in the source
_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


def fused_gated_norm(value: Tensor, gate: Tensor, eps: float, approximate: str) -> Tensor:
    """`gated_norm` in bfloat16, where `available` says so. Value and gate may be slices of wider rows."""
    return _gated(value.bfloat16(), gate.bfloat16(), eps, approximate == "tanh")[0]


def fused_gated_pair_norm(pair: Tensor, eps: float, approximate: str) -> Tensor:
    """The same of value and gate side by side, [..., 2 D] -> [..., D]."""
    return _paired(pair.bfloat16(), eps, approximate == "tanh")[0]


def fused_gated_pair(pair: Tensor, activation: str) -> Tensor:
    """`gated_pair` in bfloat16, where `available` says so."""
    return _plain(pair.bfloat16(), _ACTIVATIONS.index(activation))


def obstacle(device: torch.device, width: int) -> str:
    """Why a device cannot run the kernels for rows of `width`; "" where it can. Compiles nothing."""
    if problem := nvrtc.obstacle(device):
        return problem
    return "" if _warps(width) else f"rows of {width} features cannot be shared out among threads; multiples of 256 can"


@cache
def available(device: torch.device, width: int) -> bool:
    """Whether the kernels run there: no obstacle, compiled and loaded.

    Warns where they should run but cannot be compiled or loaded.
    """
    consequence = "gated layer norms run without their CUDA kernels, slower"
    return not obstacle(device, width) and nvrtc.loads(
        lambda: _module(nvrtc.number_of(device), width, 1, True), consequence
    )


def _warps(width: int) -> int:
    """Warps that share a row: the fewest that can hold it, if possible of those that read 16 bytes at once; or 0."""
    for vector in (8, 4):
        for warps in _WARPS:
            if width % (32 * warps * vector) == 0 and width <= 32 * warps * _FEATURES:
                return warps
    return 0


@cache
def _module(device: int, width: int, activation: int, norm: bool) -> Module:
    shape = [f"-DWIDTH={width}", f"-DWARPS={_warps(width)}"]
    return Module(_SOURCE, [*shape, f"-DACTIVATION={activation}", f"-DNORM={int(norm)}"], device)


# The custom operators: what autograd and torch.compile see. Each comes in two forms: value and gate by themselves, and
# as the two halves of one tensor ("pair"), whose gradient is then one tensor too, written without a copy.


@torch.library.custom_op("hybrid::gated_norm", mutates_args=(), device_types="cuda")
def _gated(value: Tensor, gate: Tensor, eps: float, tanh: bool) -> tuple[Tensor, Tensor]:
    """The result bfloat16 [..., D], and float32 [..., 2]: mean and 1 / standard deviation of what is normalised."""
    out, statistics = _results(value)
    _launch("gated_norm_forward", tanh, value=_rows(value), gate=_rows(gate), out=out, statistics=statistics, eps=eps)
    return out, statistics


@torch.library.custom_op("hybrid::gated_norm_backward", mutates_args=(), device_types="cuda")
def _gated_backward(
    dout: Tensor, statistics: Tensor, value: Tensor, gate: Tensor, eps: float, tanh: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of value and gate, contiguous."""
    inputs = {"value": _rows(value), "gate": _rows(gate), "dout": _dense(dout), "statistics": statistics}
    dvalue, dgate = _dense_like(value), _dense_like(gate)
    _launch("gated_norm_backward", tanh, **inputs, dvalue=_rows(dvalue), dgate=_rows(dgate), eps=eps)
    return dvalue, dgate


@torch.library.custom_op("hybrid::gated_pair_norm", mutates_args=(), device_types="cuda")
def _paired(pair: Tensor, eps: float, tanh: bool) -> tuple[Tensor, Tensor]:
    """As `_gated`, of value and gate side by side [..., 2 D]."""
    value, gate = _rows(pair).chunk(2, dim=-1)
    out, statistics = _results(pair.chunk(2, dim=-1)[0])
    _launch("gated_norm_forward", tanh, value=value, gate=gate, out=out, statistics=statistics, eps=eps)
    return out, statistics


@torch.library.custom_op("hybrid::gated_pair_norm_backward", mutates_args=(), device_types="cuda")
def _paired_backward(dout: Tensor, statistics: Tensor, pair: Tensor, eps: float, tanh: bool) -> Tensor:
    """Gradient of the pair, contiguous."""
    dpair = _dense_like(pair)
    (value, gate), (dvalue, dgate) = (_rows(x).chunk(2, dim=-1) for x in (pair, dpair))
    halves = {"value": value, "gate": gate, "dvalue": dvalue, "dgate": dgate}
    _launch("gated_norm_backward", tanh, **halves, dout=_dense(dout), statistics=statistics, eps=eps)
    return dpair


@torch.library.custom_op("hybrid::gated_pair", mutates_args=(), device_types="cuda")
def _plain(pair: Tensor, activation: int) -> Tensor:
    """value * activation(gate) of both side by side [..., 2 D]."""
    value, gate = _rows(pair).chunk(2, dim=-1)
    out = _dense_like(pair.chunk(2, dim=-1)[0])
    _launch("gated_norm_forward", activation, value=value, gate=gate, out=out, eps=None)
    return out


@torch.library.custom_op("hybrid::gated_pair_backward", mutates_args=(), device_types="cuda")
def _plain_backward(dout: Tensor, pair: Tensor, activation: int) -> Tensor:
    """Gradient of the pair, contiguous."""
    dpair = _dense_like(pair)
    (value, gate), (dvalue, dgate) = (_rows(x).chunk(2, dim=-1) for x in (pair, dpair))
    halves = {"value": value, "gate": gate, "dvalue": dvalue, "dgate": dgate}
    _launch("gated_norm_backward", activation, **halves, dout=_dense(dout), eps=None)
    return dpair


@_plain.register_fake
def _(pair: Tensor, *_: Any) -> Tensor:
    return _dense_like(pair.chunk(2, dim=-1)[0])


@_plain_backward.register_fake
def _(dout: Tensor, pair: Tensor, *_: Any) -> Tensor:
    return _dense_like(pair)


@_gated.register_fake
def _(value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(value)


@_gated_backward.register_fake
def _(dout: Tensor, statistics: Tensor, value: Tensor, gate: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _dense_like(value), _dense_like(gate)


@_paired.register_fake
def _(pair: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(pair.chunk(2, dim=-1)[0])


@_paired_backward.register_fake
def _(dout: Tensor, statistics: Tensor, pair: Tensor, *_: Any) -> Tensor:
    return _dense_like(pair)


def _results(value: Tensor) -> tuple[Tensor, Tensor]:
    return _dense_like(value), torch.empty((*value.shape[:-1], 2), dtype=torch.float32, device=value.device)


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.tanh = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None
    return *_gated_backward(dout, *ctx.saved_tensors, ctx.eps, ctx.tanh), None, None


def _differentiate_pair(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None
    return _paired_backward(dout, *ctx.saved_tensors, ctx.eps, ctx.tanh), None, None


def _save_pair(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pair, ctx.activation = inputs
    ctx.save_for_backward(pair)


def _differentiate_plain(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return _plain_backward(dout, *ctx.saved_tensors, ctx.activation), None


_plain.register_autograd(_differentiate_plain, setup_context=_save_pair)
_gated.register_autograd(_differentiate, setup_context=_save)
_paired.register_autograd(_differentiate_pair, setup_context=_save)


# Launches


class _Params(Params):
    """Field by field what `struct Params` in the source is."""

    _fields_ = (
        fields(POINTER, "value gate out statistics dout dvalue dgate")
        + fields(INT64, "value_stride gate_stride dvalue_stride dgate_stride rows")
        + fields(FLOAT, "eps")
    )


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D], or a copy of it, such that rows are dense, evenly spaced and at 16-byte boundaries."""
    rows = x.reshape(-1, x.size(-1))
    dense = rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows if dense else aligned(rows)


def _dense(x: Tensor) -> Tensor:
    """As `_rows`, without gaps between rows."""
    return aligned(x.reshape(-1, x.size(-1)))


def _launch(name: str, activation: int, eps: float | None, **tensors: Tensor) -> None:
    """Queue a kernel on the current stream of the tensors' device; tensors as `_rows` gives them. eps: None without
    norm.

    Raises ValueError where the kernels would read what is not there.
    """
    value = tensors["value"]
    rows, width = value.shape
    for field in ("gate", "dout"):
        other = tensors.get(field, value)
        if other.shape != value.shape or other.dtype != value.dtype:
            raise ValueError(
                f"the gated norm was given {field} {other.dtype} {list(other.shape)} for value {list(value.shape)}"
            )
    params = _Params(rows=rows, eps=eps or 0.0, **tensors)
    strided = tensors.keys() & {"value", "gate", "dvalue", "dgate"}
    params.set(**{f"{field}_stride": tensors[field].stride(-2) for field in strided})
    warps = _warps(width)
    per_block = 4 if warps == 1 else 1
    module = _module(value.device.index, width, int(activation), eps is not None)
    module.launch(name, -(-rows // per_block), 32 * warps * per_block, params)
