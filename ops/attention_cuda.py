"""CUDA kernels of disentangled relative attention, forward and backward; the reference is in ops/attention.py.

The source is ops/cuda/relative_attention.cu, compiled at run time by NVRTC, which torch's CUDA wheels bring along, and
kept in a cache folder (ops/nvrtc.py). bfloat16, head sizes 32, 64 and 128, at most 64 position slots, rows of any
length; tensor cores through wgmma on Hopper (sm_90a) and mma.sync elsewhere from sm_80 on. A block keeps two stages of
columns in shared memory, or one where two do not fit: 99 KiB (RTX 30 to 50, A10, L4, L40S) are enough for heads of 32
and 64 and for the forward pass of heads of 128, whose backward pass needs 144 (A100). Deterministic: no atomics, and
the same inputs give the same bits on the same kind of GPU. Nothing here waits for the device, except the first call
for a device, head size, row length and dropout or none, which compiles or loads.

    if available(device, head_dim, slots, drops, trains):
        metadata = fused_metadata(document_ids, causal, bucket_size, max_position)       once for all layers
        context = fused_relative_attention(query_key, value, positions, metadata, p, keys, columns)
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops import nvrtc
from ops.attention_metadata import TILE, FusedAttentionMetadata, padded_length
from ops.dropout import keep_scale, kept_from
from ops.nvrtc import FLOAT, INT32, INT64, POINTER, Module, Params, aligned, fields

_SOURCE = Path(__file__).parent / "cuda" / "relative_attention.cu"
_THREADS = 128
_HEAD_DIMS = (32, 64, 128)


def fused_relative_attention(
    query_key: Tensor,
    value: Tensor,
    positions: Tensor,
    metadata: FusedAttentionMetadata,
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
    tensors = query_key.bfloat16(), value.bfloat16(), positions.bfloat16()
    context, _ = _attention(*tensors, *metadata, dropout_p, dropout_keys, dropout_columns)
    return context


def obstacle(device: torch.device, head_dim: int, slots: int, trains: bool) -> str:
    """Why a device cannot run the kernels for these sizes; "" where it can. Compiles nothing."""
    if problem := nvrtc.obstacle(device):
        return problem
    if head_dim not in _HEAD_DIMS:
        return f"heads have {head_dim} features and not 32, 64 or 128"
    if slots > TILE:
        return f"position_bucket_size is {(slots + 1) // 2}, above {TILE // 2}"
    limit = nvrtc.shared_memory(device)
    if not _stages(head_dim, False, limit) or (trains and not _stages(head_dim, True, limit)):
        need, kib = _shared_bytes(head_dim, trains, 1) / 1024, limit // 1024
        return f"heads of {head_dim} features need {need:.0f} KiB of shared memory a block and the device has {kib}"
    return ""


@cache
def available(device: torch.device, head_dim: int, slots: int, drops: bool = False, trains: bool = True) -> bool:
    """Whether the kernels run there: no obstacle, compiled and loaded (without `drops`, those that drop nothing).

    Warns where they should run but cannot be compiled or loaded.
    """
    if obstacle(device, head_dim, slots, trains):
        return False
    consequence = "relative attention runs without its CUDA kernels, several times slower"
    return nvrtc.loads(lambda: _kernels(nvrtc.number_of(device), head_dim, drops), consequence)


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
    inputs = _Inputs(
        query_key, value, positions, spans, causal, slots, fragments, groups, dropout_p, dropout_keys, dropout_columns
    )
    arguments = _Arguments(inputs)
    batch, length, heads, _ = value.shape
    context = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=value.device)
    arguments.params.set(out=context, lse=lse)
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
    inputs = _Inputs(
        query_key, value, positions, spans, causal, slots, fragments, groups, dropout_p, dropout_keys, dropout_columns
    )
    arguments = _Arguments(inputs)
    if dcontext.shape != value.shape or dcontext.dtype != value.dtype:
        raise ValueError(f"fused attention was given a gradient {dcontext.dtype} {list(dcontext.shape)} of its context")
    dcontext = aligned(dcontext)
    dquery_key, dvalue, dpositions = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_key, value, positions)
    )
    heads, head_dim = value.shape[2:]
    parts = arguments.parts(True)
    # Each block of a head sums its part of the gradient of the tables; relative_attention_reduce adds up the parts.
    partial = torch.empty(2, heads, parts, TILE, head_dim, dtype=torch.float32, device=value.device)
    arguments.params.set(
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
    if arguments.spans.ndim == 4:  # rows of that kernel are keys: whom they are attended by
        arguments.params.set(spans=arguments.spans[1])
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


class _Params(Params):
    """Field by field what `struct Params` in the source is."""

    _fields_ = (
        fields(
            POINTER, "query key value context dcontext query_pos key_pos out dquery dkey dvalue dpositions lse delta"
        )
        + fields(POINTER, "partial spans causal slots fragments groups row_hash column_hash")
        + fields(INT64, "qk_batch qk_token v_batch v_token dqk_batch dqk_token pos_slot")
        + fields(INT32, "batch length heads n_slots padded parts threshold")
        + fields(FLOAT, "scale keep_scale")
    )


class _Inputs(NamedTuple):
    """What both passes read: the arguments of `_attention`."""

    query_key: Tensor
    value: Tensor
    positions: Tensor
    spans: Tensor
    causal: Tensor
    slots: Tensor
    fragments: Tensor
    groups: Tensor
    dropout_p: float
    dropout_keys: Tensor | None
    dropout_columns: Tensor | None


class _Arguments:
    """A `Params` of these inputs, and launches with it."""

    def __init__(self, inputs: _Inputs) -> None:
        _check(inputs)
        self.spans = inputs.spans.contiguous()
        self.batch, self.length, self.heads, self.head_dim = inputs.value.shape
        self.device, self.drops = inputs.value.device, inputs.dropout_keys is not None
        # [B, T, 2, H, d], [B, T, H, d] and [2b-1, 2, H, d]
        query_key, value, positions = map(_with_dense_heads, (inputs.query_key, inputs.value, inputs.positions))
        self.params = _Params(
            query=query_key,
            key=query_key.select(2, 1),  # the same strides as the query's, from another address on
            value=value,
            query_pos=positions,
            key_pos=positions.select(1, 1),
            spans=self.spans,
            causal=inputs.causal.contiguous(),
            slots=inputs.slots,
            fragments=inputs.fragments,
            groups=inputs.groups,
            qk_batch=query_key.stride(0),
            qk_token=query_key.stride(1),
            v_batch=value.stride(0),
            v_token=value.stride(1),
            pos_slot=positions.stride(0),
            batch=self.batch,
            length=self.length,
            heads=self.heads,
            n_slots=positions.size(0),
            padded=inputs.slots.size(0) // 2,  # distances -padded .. padded
            scale=(3 * self.head_dim) ** -0.5,
            keep_scale=1.0,
        )
        if inputs.dropout_keys is not None and inputs.dropout_columns is not None:
            self.params.set(
                row_hash=inputs.dropout_keys.contiguous(),
                column_hash=inputs.dropout_columns.contiguous(),
                threshold=kept_from(inputs.dropout_p),
                keep_scale=keep_scale(inputs.dropout_p),
            )

    def parts(self, backward: bool) -> int:
        """Blocks per head: as many as run at once, or as there is work for."""
        work = self.batch * -(-self.length // TILE)  # tiles of rows in a head
        at_once = _kernels(self.device.index, self.head_dim, self.drops).at_once[backward]
        return max(1, min(work, at_once // self.heads))

    def launch(self, name: str) -> None:
        """Queue a kernel on the current stream of the tensors' device."""
        if not self.batch * self.length:
            return
        kernels = _kernels(self.device.index, self.head_dim, self.drops)
        if name == "relative_attention_reduce":  # a thread an element of dpositions [slots, 2, H, d]
            grid = -(-2 * self.heads * self.params.n_slots * self.head_dim // _THREADS)
        else:
            grid = self.heads * self.parts(name != "relative_attention_forward")
        kernels.module.launch(name, grid, _THREADS, self.params, kernels.shared[name])


def _check(inputs: _Inputs) -> None:
    """Raise ValueError where the kernels would read what is not there."""
    query_key, value, positions, spans = inputs.query_key, inputs.value, inputs.positions, inputs.spans
    keys, columns = inputs.dropout_keys, inputs.dropout_columns
    batch, length, heads, head_dim = value.shape
    wrong = ""
    if head_dim not in _HEAD_DIMS or positions.size(0) > TILE:
        wrong = f"heads of {head_dim} features and {positions.size(0)} slots; see available()"
    elif query_key.shape != (batch, length, 2, heads, head_dim) or positions.shape[1:] != (2, heads, head_dim):
        wrong = f"query_key {list(query_key.shape)}, positions {list(positions.shape)} and value {list(value.shape)}"
    elif spans.numel() != batch * length * 2 * (1 + (spans.ndim == 4)) or spans.shape[-3:] != (batch, length, 2):
        wrong = f"metadata of {list(spans.shape[-3:-1])} tokens for value {list(value.shape)}"
    elif inputs.slots.size(0) != 2 * padded_length(length) + 1:
        wrong = f"tables of {inputs.slots.size(0)} distances for value {list(value.shape)}"
    elif not (query_key.dtype == value.dtype == positions.dtype == torch.bfloat16):
        wrong = f"query_key {query_key.dtype}, value {value.dtype} and positions {positions.dtype}, not bfloat16"
    elif keys is not None and columns is not None and (keys.shape != (batch, heads, length) or len(columns) < length):
        wrong = f"dropout keys {list(keys.shape)} and {len(columns)} columns"
    if wrong:
        raise ValueError(f"fused attention was given {wrong}")


def _with_dense_heads(x: Tensor) -> Tensor:
    """x, or a copy of it in which [..., H, d] is dense and everything starts at 16-byte boundaries."""
    dense = x.stride(-1) == 1 and x.stride(-2) == x.size(-1) and x.data_ptr() % 16 == 0
    return x if dense and all(stride % 8 == 0 for stride in x.stride()[:-1]) else aligned(x)


def _shared_bytes(head_dim: int, backward: bool, stages: int) -> int:
    """Bytes of shared memory that a block takes: `Shared::bytes` in the source."""
    tile = TILE * head_dim * 2
    tables = TILE * (142 + 140) + 128 * 8 + TILE * 4
    if not backward:
        return (3 + 2 * stages) * tile + tables
    return (4 + 2 * stages) * tile + tables + 2 * TILE * 4 + 128 + 4 * 16 * 176 + TILE * 68 * 4


def _stages(head_dim: int, backward: bool, limit: int) -> int:
    """Stages of columns for which `limit` bytes of shared memory are enough: 2, 1, or 0 where none fits."""
    return next((stages for stages in (2, 1) if _shared_bytes(head_dim, backward, stages) <= limit), 0)


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
        limit = nvrtc.shared_memory(device)
        stages = [_stages(head_dim, backward, limit) for backward in (False, True)]
        defined = {"HEAD_DIM": head_dim, "DROPOUT": int(drops)}
        defined |= {"FORWARD_STAGES": max(1, stages[0]), "BACKWARD_STAGES": max(1, stages[1])}
        self.module = Module(_SOURCE, [f"-D{name}={value}" for name, value in defined.items()], device)
        self.shared: dict[str, int] = dict.fromkeys(self._NAMES, 0)
        self.at_once = [0, 0]
        with torch.cuda.device(device):
            for name in self._NAMES[:3]:
                backward = "backward" in name
                if not stages[backward]:  # forwards alone, see `obstacle`
                    continue
                self.shared[name] = _shared_bytes(head_dim, backward, stages[backward])
                self.module.use_shared_memory(name, self.shared[name])
                if name != self._NAMES[2]:
                    self.at_once[backward] = self.module.blocks_at_once(name, _THREADS, self.shared[name])


@cache
def _kernels(device: int, head_dim: int, drops: bool) -> _Kernels:
    return _Kernels(device, head_dim, drops)
