"""Disentangled relative attention as CUDA kernels, forward and backward: the fast twin of ops.attention.

The source is ops/cuda/relative_attention.cu, compiled at run time by NVRTC, which torch's CUDA wheels bring along, and
kept in a cache folder (ops/nvrtc.py). bfloat16, head sizes 32, 64 and 128, at most 64 position slots, rows of any
length; tensor cores through wgmma on Hopper (sm_90a) and mma.sync elsewhere from sm_80 on. Deterministic: no atomics,
and the same inputs give the same bits on the same kind of GPU. Nothing here waits for the device, except the first call
for a device, head size, row length and dropout or none, which compiles or loads.

    if wanted(query_key.device, query_key.dtype, head_dim, slots, drops):
        layout = fused_layout(document_ids, causal, bucket_size, max_position)       once for all layers
        context = fused_relative_attention(query_key, value, positions, layout, p, keys, columns)

HYBRID_FUSED_ATTENTION=0 in the environment makes models use the twin everywhere, for comparing and debugging.
"""

import ctypes
import os
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.attention import bucket
from ops.dropout import keep_scale
from ops.nvrtc import Module

_SOURCE = Path(__file__).parent / "cuda" / "relative_attention.cu"
_TILE = 64  # rows of a block, columns of a step, and slots, in the source
_THREADS = 128
_HEAD_DIMS = (32, 64, 128)
_NO_STEP = 2**30


class FusedLayout(NamedTuple):
    """What the kernels know of a batch, computed once for all layers; all on one device.

    spans: int32 [B, T, 2], first and last + 1 token of each token's document (0, 0 for padding). causal: bool [B].
    slots: int32 [2 P + 1] (P is T rounded up to a multiple of 64), slot of the distances -P .. P.
    fragments: int32 [F, 32, 2], parts of the one-hot matrix [distance, slot] as operands of mma.m16n8k16: each 16
        distances (16 k + 1 .. 16 k + 16) by a group of 8 slots. groups: int32 [8, 4], for each group the first and last
        k with any of its slots, and what to add to k for the index of the fragment.
    """

    spans: Tensor
    causal: Tensor
    slots: Tensor
    fragments: Tensor
    groups: Tensor


def fused_layout(document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int) -> FusedLayout:
    """Layout from document_ids int [B, T] (negative: padding; a document is a run of equal ids) and causal bool [B]."""
    tables = position_tables(document_ids.size(1), bucket_size, max_position, document_ids.device)
    return FusedLayout(document_spans(document_ids), causal, *tables)


def document_spans(document_ids: Tensor) -> Tensor:
    """First and last + 1 token of the run of equal ids that each token is in: int [B, T] -> int32 [B, T, 2]."""
    length = document_ids.size(1)
    index = torch.arange(length, device=document_ids.device)
    new = torch.ones_like(document_ids, dtype=torch.bool)
    new[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    start = torch.where(new, index, 0).cummax(dim=1).values
    last = new.roll(-1, dims=1)  # the next token begins a run; after the last one comes the first, which does
    end = torch.where(last, index + 1, length).flip(1).cummin(dim=1).values.flip(1)
    spans = torch.stack((start, end), dim=-1)
    return spans.masked_fill_((document_ids < 0)[..., None], 0).int()


@lru_cache(maxsize=64)
def position_tables(
    length: int, bucket_size: int, max_position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """FusedLayout's slots, fragments and groups for rows of `length` tokens, made once."""
    padded = -(-length // _TILE) * _TILE
    distance = torch.arange(-padded, padded + 1)
    slots = bucket(distance, bucket_size, max_position) + bucket_size - 1
    # 16 * steps distances from 16 * first_step + 1 on: slots[padded + 1 + ...] is the slot of distance 1 + ...
    first_step, steps = -padded // 16, padded // 8
    by_step = slots[1:].view(steps, 16)
    first_group, last_group = by_step[:, 0] // 8, by_step[:, -1] // 8
    lane = torch.arange(32)
    # Operand B: lane 4 g + t holds column g of rows 2 t, 2 t + 1 (first register) and 2 t + 8, 2 t + 9.
    rows = (lane % 4 * 2)[:, None] + torch.tensor([0, 1, 8, 9])
    fragments, groups = [], []
    for group in range(_TILE // 8):
        members = ((first_group <= group) & (group <= last_group)).nonzero().flatten()
        if not len(members):
            groups.append((_NO_STEP, -_NO_STEP, -_NO_STEP, 0))  # no steps, and an index that exists
            continue
        first, last = int(members[0]), int(members[-1])
        groups.append((first + first_step, last + first_step, len(fragments) - first - first_step, 0))
        for step in range(first, last + 1):
            one = (by_step[step][rows] == (group * 8 + lane // 4)[:, None]).long() * 0x3F80  # bfloat16 1.0
            fragments.append(torch.stack((one[:, 0] | one[:, 1] << 16, one[:, 2] | one[:, 3] << 16), dim=-1))
    fragments.append(torch.zeros_like(fragments[0]))  # the kernel reads one ahead
    return slots.int().to(device), torch.stack(fragments).int().to(device), torch.tensor(groups).int().to(device)


def fused_relative_attention(
    query_key: Tensor,
    value: Tensor,
    positions: Tensor,
    layout: FusedLayout,
    dropout_p: float = 0.0,
    dropout_keys: Tensor | None = None,
    dropout_columns: Tensor | None = None,
) -> Tensor:
    """Context bfloat16 [B, T, H, d], zero for padding tokens, by `ops.attention.relative_attention`'s formula.

    query_key: [B, T, 2, H, d], queries and keys as the projection gives them; its gradient comes back in one tensor.
    value: [B, T, H, d]. positions: [2b-1, 2, H, d], the position table seen as queries and as keys.
    dropout_keys, dropout_columns: int32 [B, H, T] of `ops.dropout.head_keys` and int32 [>= T] of its column keys; None
    drops nothing. Other dtypes are cast to bfloat16.
    """
    if dropout_keys is None or dropout_columns is None or dropout_p == 0:
        dropout_p, dropout_keys, dropout_columns = 0.0, None, None
    context, _ = _attention(
        query_key.bfloat16(), value.bfloat16(), positions.bfloat16(), *layout, dropout_p, dropout_keys, dropout_columns
    )
    return context


def wanted(device: torch.device, dtype: torch.dtype, head_dim: int, slots: int, drops: bool) -> bool:
    """Whether a model whose queries are of `dtype` should use the kernels; `drops`: with dropout of probabilities.

    Not while torch.compile traces: then the layout would have to be part of the graph, and its tables are made on the
    host. Training compiles sublayers, which get the layout as an argument (training/compiling.py).
    """
    chosen = os.environ.get("HYBRID_FUSED_ATTENTION", "1") != "0" and not torch.compiler.is_compiling()
    return chosen and dtype == torch.bfloat16 and available(device, head_dim, slots, drops)


@cache
def available(device: torch.device, head_dim: int, slots: int, drops: bool = False) -> bool:
    """Whether the kernels run there: a CUDA device of sm_80 or later and these sizes, compiled and loaded.

    Warns where they should run but cannot be compiled or loaded.
    """
    if device.type != "cuda" or head_dim not in _HEAD_DIMS or slots > _TILE or torch.version.hip is not None:
        return False
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8 or _shared_bytes(head_dim, True) > properties.shared_memory_per_block_optin:
        return False
    try:
        _kernels(torch.cuda.current_device() if device.index is None else device.index, head_dim, drops)
    except (OSError, RuntimeError, AttributeError) as problem:  # no library, it refuses, or it lacks a function
        warnings.warn(f"attention runs without its CUDA kernels, several times slower: {problem}", stacklevel=2)
        return False
    return True


# The custom operators: what autograd and torch.compile see.


@torch.library.custom_op("hybrid::relative_attention", mutates_args=(), device_types="cuda")
def _attention(
    query_key: Tensor,
    value: Tensor,
    positions: Tensor,
    spans: Tensor,
    causal: Tensor,
    slots: Tensor,
    fragments: Tensor,
    groups: Tensor,
    dropout_p: float,
    dropout_keys: Tensor | None,
    dropout_columns: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Context bfloat16 [B, T, H, d] and base-2 log-sum-exp of the scores float32 [B, H, T]."""
    arguments = _Arguments(
        query_key, value, positions, spans, causal, slots, fragments, groups, dropout_p, dropout_keys, dropout_columns
    )
    batch, length, heads, _ = value.shape
    context = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=value.device)
    arguments.set(out=context, lse=lse)
    arguments.launch("relative_attention_forward")
    return context, lse


@_attention.register_fake
def _(query_key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = value.shape[:3]
    return value.new_empty(value.shape), value.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("hybrid::relative_attention_backward", mutates_args=(), device_types="cuda")
def _attention_backward(
    dcontext: Tensor,
    context: Tensor,
    lse: Tensor,
    query_key: Tensor,
    value: Tensor,
    positions: Tensor,
    spans: Tensor,
    causal: Tensor,
    slots: Tensor,
    fragments: Tensor,
    groups: Tensor,
    dropout_p: float,
    dropout_keys: Tensor | None,
    dropout_columns: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query_key, value and positions, contiguous."""
    arguments = _Arguments(
        query_key, value, positions, spans, causal, slots, fragments, groups, dropout_p, dropout_keys, dropout_columns
    )
    dcontext = dcontext.contiguous()
    dquery_key, dvalue, dpositions = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_key, value, positions)
    )
    heads, head_dim = value.shape[2:]
    parts = arguments.parts(True)
    partial = torch.empty(2, heads, parts, _TILE, head_dim, dtype=torch.float32, device=value.device)
    arguments.set(
        context=context,
        dcontext=dcontext,
        lse=lse,
        delta=torch.empty_like(lse),
        partial=partial,
        dquery=dquery_key,
        dkey=dquery_key.select(2, 1),
        dvalue=dvalue,
        dpositions=dpositions,
        dqk_batch=dquery_key.stride(0),
        dqk_token=dquery_key.stride(1),
        parts=parts,
    )
    arguments.launch("relative_attention_backward_queries")
    arguments.launch("relative_attention_backward_keys")
    arguments.launch("relative_attention_reduce")
    return dquery_key, dvalue, dpositions


@_attention_backward.register_fake
def _(
    dcontext: Tensor, context: Tensor, lse: Tensor, query_key: Tensor, value: Tensor, positions: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query_key.new_empty(query_key.shape), value.new_empty(value.shape), positions.new_empty(positions.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout_p, dropout_keys, dropout_columns = inputs
    ctx.save_for_backward(*output, *tensors, dropout_keys, dropout_columns)
    ctx.dropout_p = dropout_p
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dcontext: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dcontext is None:
        return (None,) * 11
    context, lse, *tensors, dropout_keys, dropout_columns = ctx.saved_tensors
    gradients = _attention_backward(dcontext, context, lse, *tensors, ctx.dropout_p, dropout_keys, dropout_columns)
    return *gradients, *(None,) * 8


_attention.register_autograd(_differentiate, setup_context=_save)


# Arguments and launches. Field by field what `struct Params` in the source is.

_POINTERS = (
    *("query", "key", "value", "context", "dcontext", "query_pos", "key_pos", "out", "dquery", "dkey", "dvalue"),
    *("dpositions", "lse", "delta", "partial", "spans", "causal", "slots", "fragments", "groups"),
    *("row_hash", "column_hash"),
)
_STRIDES = ("qk_batch", "qk_token", "v_batch", "v_token", "dqk_batch", "dqk_token", "pos_slot")
_NUMBERS = ("batch", "length", "heads", "n_slots", "padded", "parts", "threshold")


class _Params(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [("scale", ctypes.c_float), ("keep_scale", ctypes.c_float)]
    )


class _Arguments:
    """A `Params`, the tensors that it points to, and launches with it on the current stream."""

    def __init__(
        self,
        query_key: Tensor,
        value: Tensor,
        positions: Tensor,
        spans: Tensor,
        causal: Tensor,
        slots: Tensor,
        fragments: Tensor,
        groups: Tensor,
        dropout_p: float,
        dropout_keys: Tensor | None,
        dropout_columns: Tensor | None,
    ) -> None:
        self.batch, self.length, self.heads, self.head_dim = value.shape
        self._check(query_key, value, positions, spans, slots, dropout_keys, dropout_columns)
        self.device, self.drops = value.device, dropout_keys is not None
        self.kept: list[Tensor] = []  # alive until the launches are queued; the caching allocator orders the rest
        self.params = _Params()
        query_key, value, positions = (_with_dense_heads(x) for x in (query_key, value, positions))
        self.set(
            query=query_key,
            key=query_key.select(2, 1),
            value=value,
            query_pos=positions,
            key_pos=positions.select(1, 1),
            spans=spans.contiguous(),
            causal=causal.contiguous(),
            slots=slots,
            fragments=fragments,
            groups=groups,
            qk_batch=query_key.stride(0),
            qk_token=query_key.stride(1),
            v_batch=value.stride(0),
            v_token=value.stride(1),
            pos_slot=positions.stride(0),
            batch=self.batch,
            length=self.length,
            heads=self.heads,
            n_slots=positions.size(0),
            padded=slots.size(0) // 2,
            scale=(3 * self.head_dim) ** -0.5,
            keep_scale=1.0,
        )
        if dropout_keys is not None and dropout_columns is not None:
            self.set(
                row_hash=dropout_keys.contiguous(),
                column_hash=dropout_columns.contiguous(),
                threshold=min(round(dropout_p * 2**32), 2**32 - 1) - 2**31,
                keep_scale=keep_scale(dropout_p),
            )

    def _check(
        self,
        query_key: Tensor,
        value: Tensor,
        positions: Tensor,
        spans: Tensor,
        slots: Tensor,
        dropout_keys: Tensor | None,
        dropout_columns: Tensor | None,
    ) -> None:
        """Raise ValueError where the kernels would read what is not there."""
        batch, length, heads, head_dim = value.shape
        wrong = ""
        if head_dim not in _HEAD_DIMS or positions.size(0) > _TILE:
            wrong = f"heads of {head_dim} features and {positions.size(0)} slots; see available()"
        elif query_key.shape != (batch, length, 2, heads, head_dim) or positions.shape[1:] != (2, heads, head_dim):
            wrong = (
                f"query_key {list(query_key.shape)}, positions {list(positions.shape)} and value {list(value.shape)}"
            )
        elif spans.shape != (batch, length, 2) or slots.size(0) != 2 * (-(-length // _TILE) * _TILE) + 1:
            wrong = f"a layout of {list(spans.shape[:2])} tokens for value {list(value.shape)}"
        elif not (query_key.dtype == value.dtype == positions.dtype == torch.bfloat16):
            wrong = f"query_key {query_key.dtype}, value {value.dtype} and positions {positions.dtype}, not bfloat16"
        elif (
            dropout_keys is not None
            and dropout_columns is not None
            and (dropout_keys.shape != (batch, heads, length) or dropout_columns.size(0) < length)
        ):
            wrong = f"dropout keys {list(dropout_keys.shape)} and {dropout_columns.size(0)} columns"
        if wrong:
            raise ValueError(f"fused attention was given {wrong}")

    def set(self, **values: Tensor | int | float) -> None:
        """Set fields; tensors by their address."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.kept.append(value)
                setattr(self.params, name, value.data_ptr())
            else:
                setattr(self.params, name, value)

    def parts(self, backward: bool) -> int:
        """Blocks per head: as many as run at once, or as there is work for."""
        work = self.batch * -(-self.length // _TILE)
        at_once = _kernels(self.device.index, self.head_dim, self.drops).blocks(backward)
        return max(1, min(work, at_once // self.heads))

    def launch(self, name: str) -> None:
        """Queue a kernel on the current stream of the tensors' device."""
        if not self.batch * self.length:
            return
        kernels = _kernels(self.device.index, self.head_dim, self.drops)
        if name == "relative_attention_reduce":
            grid = -(-2 * self.heads * self.params.n_slots * self.head_dim // _THREADS)
        else:
            grid = self.heads * self.parts(name != "relative_attention_forward")
        with torch.cuda.device(self.device):
            kernels.launch(name, grid, self.params, torch.cuda.current_stream().cuda_stream)


def _with_dense_heads(x: Tensor) -> Tensor:
    """x, or a copy of it in which [..., H, d] is dense and everything starts at 16-byte boundaries."""
    dense = x.stride(-1) == 1 and x.stride(-2) == x.size(-1) and x.data_ptr() % 16 == 0
    return x if dense and all(stride % 8 == 0 for stride in x.stride()[:-1]) else x.contiguous()


def _shared_bytes(head_dim: int, backward: bool) -> int:
    """Bytes of shared memory that a block takes: `Shared::bytes` in the source."""
    tile = _TILE * head_dim * 2
    tables = _TILE * (142 + 140) + 128 * 8 + _TILE * 4
    if not backward:
        return 7 * tile + tables
    return 8 * tile + tables + 2 * _TILE * 4 + 128 + 4 * 16 * 176 + _TILE * 68 * 4


# Compiling and loading


class _Kernels:
    """The compiled module on one device."""

    _NAMES = (
        "relative_attention_forward",
        "relative_attention_backward_queries",
        "relative_attention_backward_keys",
        "relative_attention_reduce",
    )

    def __init__(self, device: int, head_dim: int, drops: bool) -> None:
        self.module = Module(_SOURCE, [f"-DHEAD_DIM={head_dim}", f"-DDROPOUT={int(drops)}"], device)
        self.shared = {}
        with torch.cuda.device(device):
            for name in self._NAMES:
                self.shared[name] = 0 if name.endswith("reduce") else _shared_bytes(head_dim, "backward" in name)
                if self.shared[name]:
                    self.module.use_shared_memory(name, self.shared[name])
            self.at_once = [self.module.blocks_at_once(name, _THREADS, self.shared[name]) for name in self._NAMES[:2]]

    def blocks(self, backward: bool) -> int:
        """Blocks that the device runs at once."""
        return self.at_once[backward]

    def launch(self, name: str, grid: int, params: _Params, stream: int) -> None:
        """Queue kernel `name` with `grid` blocks. Raises RuntimeError where the driver refuses."""
        self.module.launch(name, grid, _THREADS, params, stream, self.shared[name])


@cache
def _kernels(device: int, head_dim: int, drops: bool) -> _Kernels:
    return _Kernels(device, head_dim, drops)
