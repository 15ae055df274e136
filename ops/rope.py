"""Rotary attention (RoPE, Su et al. 2021): plain fused attention, for models without relative positions.

On a CPU, in float32, and inside torch.compile: PyTorch's scaled_dot_product_attention with a boolean mask, in blocks
for long rows, so that memory is linear in T. On CUDA in bf16 or fp16 (sm_80 or later): variable-length flash attention,
where documents are sequences of their own (flash-attn's kernels where it is installed, else PyTorch's build of them).
These kernels know nothing of counter-based dropout, so probabilities are never dropped.

Some layers may see a window only: |i - j| <= window, in causal rows the past half of it. They have frequencies of their
own, and metadata of their own, which shares the documents with that of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import nvrtc
from ops.attention_metadata import LONGEST_WHOLE, allowed_between, attention_allowed, document_numbers, document_starts
from ops.blocks import Span, in_blocks
from ops.reference import reference_chosen
from ops.rope_scaling import Rotary, attention_factor, frequencies

# (query [tokens, H, d], key, value [tokens, K, d], boundaries int32 [documents + 1], longest possible document, causal,
# window or None) -> context; each key serves H / K queries
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool, int | None], Tensor]


@dataclass(frozen=True)
class VarlenSizes:
    """Of a batch whose causal rows come last, known on the host: how many others and how many of these there are, and
    at most how many documents each group touches (runs of one id in one row, padding included)."""

    rows: tuple[int, int]
    documents: tuple[int, int]


class VarlenMetadata(NamedTuple):
    """Documents of a batch as runs of tokens, causal rows last.

    other_rows: how many rows are not causal. order, inverse: permutation [B] of the rows that brings these to the
    front, and back; None where they are there. boundaries: where each document of these rows and of the causal ones
    starts, and where the last one ends: int32 [documents + 1], counted from the first token of its group. Where fewer
    documents came than VarlenSizes allows for, the others are empty and come last.
    """

    other_rows: int
    order: Tensor | None
    inverse: Tensor | None
    boundaries: tuple[Tensor, Tensor]


class RopeAttentionMetadata(NamedTuple):
    """What all layers of a kind share: document_ids int64 [B, T]; cos and sin float32 [T, 1, d/2], of `rotary_tables`.

    window: as in Rotary. varlen with its kernel, or None. Where that is None: allowed bool [B, 1, T, T] for PyTorch's
    attention or, for long rows, runs (int64 [B, T] of `document_numbers`, causal bool [B]), from which each block
    makes its own.
    """

    document_ids: Tensor
    cos: Tensor
    sin: Tensor
    window: int | None
    allowed: Tensor | None
    runs: tuple[Tensor, Tensor] | None
    varlen: VarlenMetadata | None
    kernel: VarlenKernel | None


def rotary_tables(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, float32 [T, 1, d/2], times the temperature that YaRN has."""
    turns = frequencies(rotary.head_dim, rotary.theta, rotary.scaling, positions.device)
    angles = positions.double()[:, None] * turns  # [T, d/2]
    factor = attention_factor(rotary.scaling)
    return (angles.cos() * factor).float().unsqueeze(1), (angles.sin() * factor).float().unsqueeze(1)


def rope_metadata(
    document_ids: Tensor, causal: bool | Tensor, rotary: Rotary, dtype: torch.dtype, sizes: VarlenSizes | None = None
) -> RopeAttentionMetadata:
    """Metadata for `rope_attention` from document_ids int64 [B, T] (-1: padding) and causal, a bool, bool [B] or, which
    no variable-length kernel knows, int [B, T] as in `allowed_between`.

    `dtype` is that of the queries to come: it decides which kernel can be used. For a variable-length kernel the number
    of documents is a shape: without `sizes`, which says that causal rows come last, this waits for the device.
    """
    device, (batch, length) = document_ids.device, document_ids.shape
    by_token = isinstance(causal, Tensor) and causal.ndim == 2
    plain = by_token or torch.compiler.is_compiling() or obstacle(device, dtype) or reference_chosen("attention")
    kernel, allowed, runs, varlen = None if plain else varlen_kernel(), None, None, None
    if kernel is not None:
        varlen = varlen_metadata(document_ids, causal, sizes)
    else:
        if isinstance(causal, bool):
            causal = torch.full((batch,), causal, device=device)
        causal = causal.to(device)
        if length > LONGEST_WHOLE:
            runs = (document_numbers(document_ids), causal)
        else:
            allowed = attention_allowed(document_ids, causal, rotary.window).unsqueeze(1)
    tables = rotary_tables(rotary, torch.arange(length, device=device))
    return RopeAttentionMetadata(document_ids, *tables, rotary.window, allowed, runs, varlen, kernel)


def windowed_metadata(metadata: RopeAttentionMetadata, rotary: Rotary) -> RopeAttentionMetadata:
    """Metadata of the same batch for other layers, which see `rotary.window` of what those of `metadata` see."""
    index = torch.arange(metadata.document_ids.size(1), device=metadata.document_ids.device)
    cos, sin = rotary_tables(rotary, index)
    allowed = metadata.allowed
    if allowed is not None and rotary.window is not None:
        allowed = allowed & ((index[:, None] - index).abs() <= rotary.window)
    return metadata._replace(cos=cos, sin=sin, window=rotary.window, allowed=allowed)


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why queries of `dtype` cannot go through variable-length kernels on a device; "" where they can."""
    if device.type != "cuda":
        return "they need a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they need bfloat16 or float16 and queries are {str(dtype).removeprefix('torch.')}"
    if torch.version.hip is None and (problem := nvrtc.obstacle(device)):
        return problem
    return "" if varlen_kernel() else "this PyTorch has no flash attention and flash-attn is not installed"


def rope_attention(query: Tensor, key: Tensor, value: Tensor, metadata: RopeAttentionMetadata) -> Tensor:
    """Context [B, T, H, d] of query [B, T, H, d], key and value [B, T, K, d], scores scaled by 1/sqrt(d). Each key
    serves H / K queries. Zero for padding, but with variable-length kernels, where it attends itself."""
    query, key = rotate(query, metadata.cos, metadata.sin), rotate(key, metadata.cos, metadata.sin)
    if metadata.varlen is not None and metadata.kernel is not None:
        return varlen_attention(query, key, value, metadata.varlen, metadata.kernel, metadata.window)
    if metadata.runs is not None:
        context = _attention_in_blocks(query, key, value, metadata.runs, metadata.window)
    else:
        context = _masked_attention(query, key, value, metadata.allowed)
    return context.masked_fill(metadata.document_ids[:, :, None, None] < 0, 0.0)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
    heads_first = (repeat_heads(x, query.size(2)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=allowed).transpose(1, 2)


def _attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Tensor, Tensor], window: int | None
) -> Tensor:
    def attend(queries: Span, keys: Span) -> Tensor:
        allowed = allowed_between(*runs, queries, keys, window).unsqueeze(1)
        seen = slice(*keys)
        return _masked_attention(query[:, slice(*queries)], key[:, seen], value[:, seen], allowed)

    return in_blocks(attend, query.size(1), window)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, H, d] by its positions, feature i together with feature i + d/2; cos, sin [T, 1, d/2]."""
    pair = x.float().unflatten(-1, (2, -1))  # [B, T, H, 2, d/2]
    signs = 2 * torch.arange(2, device=x.device)[:, None] - 1
    # Not a concatenation of both halves, of which compiled code would compute each for every element.
    return (pair * cos.unsqueeze(-2) + pair.flip(-2) * (sin.unsqueeze(-2) * signs)).flatten(-2).to(x.dtype)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """x [..., K, d] -> [..., heads, d], each head heads / K times in a row; x itself where K is that."""
    return x if x.size(-2) == heads else x.repeat_interleave(heads // x.size(-2), dim=-2)


def varlen_metadata(document_ids: Tensor, causal: bool | Tensor, sizes: VarlenSizes | None = None) -> VarlenMetadata:
    """Split a batch into causal rows and others, and each group into documents (runs of one id in one row)."""
    batch, order = document_ids.size(0), None
    if sizes is not None:
        other_rows, counts = sizes.rows[0], sizes.documents
    else:
        counts = (None, None)
        if isinstance(causal, bool):
            other_rows = 0 if causal else batch  # one group is empty, and no row moves
        else:
            other_rows = batch - int(causal.sum())  # waits for the device
            if 0 < other_rows < batch:
                order = causal.to(torch.int8).argsort(stable=True).to(document_ids.device)
                document_ids = document_ids[order]
    groups = (document_ids[:other_rows], document_ids[other_rows:])
    boundaries = (_boundaries(groups[0], counts[0]), _boundaries(groups[1], counts[1]))
    return VarlenMetadata(other_rows, order, None if order is None else order.argsort(), boundaries)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, metadata: VarlenMetadata, kernel: VarlenKernel, window: int | None = None
) -> Tensor:
    """Context [B, T, H, d] by a call of `kernel` for the causal rows and one for the others; as `rope_attention`."""
    if metadata.order is not None and metadata.inverse is not None:
        query, key, value = (_Permuted.apply(x, metadata.order, metadata.inverse) for x in (query, key, value))
    value = value.to(query.dtype)
    groups = (
        (slice(None, metadata.other_rows), metadata.boundaries[0], False),
        (slice(metadata.other_rows, None), metadata.boundaries[1], True),
    )
    groups, parts = [group for group in groups if group[1].numel() > 1], []  # those that have documents
    for rows, boundaries, causal in groups:
        # [rows, T, H, d] -> [rows * T, H, d]: the kernel knows documents alone, and they never cross a row's end
        of_group = (x if len(groups) == 1 else x[rows] for x in (query, key, value))
        q, k, v = (x.flatten(0, 1).contiguous() for x in of_group)
        parts.append(kernel(q, k, v, boundaries, query.size(1), causal, window).view(-1, *query.shape[1:]))
    context = torch.cat(parts)
    if metadata.order is None or metadata.inverse is None:
        return context
    return _Permuted.apply(context, metadata.inverse, metadata.order)


class _Permuted(torch.autograd.Function):
    """x.index_select(0, order) for a permutation: its gradient is one too, where index_select's is a sum by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


@lru_cache
def varlen_kernel() -> VarlenKernel | None:
    """The variable-length flash attention of this installation, or None."""
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _torch_varlen_kernel()

    def flash_attn(query, key, value, boundaries, longest, causal, window):
        ends = (boundaries, boundaries, longest, longest)
        return flash_attn_varlen_func(query, key, value, *ends, causal=causal, window_size=_sides(causal, window))

    return flash_attn


def _torch_varlen_kernel() -> VarlenKernel | None:
    """PyTorch's own build of it, by the operators beneath torch.nn.attention.varlen, which since 2.11 know windows but
    not everywhere that a key may serve several queries."""
    if not torch.backends.cuda.is_flash_attention_available():
        return None

    def torch_varlen(query, key, value, boundaries, longest, causal, window):
        return _flash(query, key, value, boundaries, longest, causal, *_sides(causal, window))[0]

    return torch_varlen


@torch.library.custom_op("hybrid::varlen_attention", mutates_args=(), device_types="cuda")
def _flash(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, causal: bool, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Context [tokens, H, d], and the logarithms of its denominators, float32 [H, tokens]."""
    given = (query, key, value, boundaries, boundaries, longest, longest, 0.0, causal, False)
    sides = {"window_size_left": before, "window_size_right": after}
    context, logarithms, *_ = torch.ops.aten._flash_attention_forward(*given, **sides)
    return context, logarithms


@torch.library.custom_op("hybrid::varlen_attention_backward", mutates_args=(), device_types="cuda")
def _flash_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, context: Tensor, logarithms: Tensor,
    longest: int, causal: bool, before: int, after: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a generator, for dropout
    given = (dout, query, key, value, context, logarithms, boundaries, boundaries, longest, longest, 0.0, causal)
    sides = {"window_size_left": before, "window_size_right": after}
    return torch.ops.aten._flash_attention_backward(*given, state, torch.empty(0, device=query.device), **sides)


@_flash.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.size(1), query.size(0)), dtype=torch.float32)


@_flash_backward.register_fake
def _(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, boundaries, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _flash_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None


_flash.register_autograd(_differentiate, setup_context=_save)


def _sides(causal: bool, window: int | None) -> tuple[int, int]:
    """How many tokens before and after its own a query sees, as flash attention counts them; -1 is all."""
    reach = -1 if window is None else window
    return reach, 0 if causal else reach


def _boundaries(document_ids: Tensor, count: int | None) -> Tensor:
    """First token of each of at most `count` documents of rows [B, T], flattened, and then the number of tokens: int32
    [count + 1]. As many as there are, if None."""
    starts = document_starts(document_ids).flatten()
    if count is None:
        return F.pad(starts.nonzero().flatten(), (0, 1), value=starts.numel()).to(torch.int32)
    # The number of the document that a token starts; all other tokens write to index count + 1, which is cut off.
    index = torch.where(starts, starts.cumsum(0) - 1, count + 1)
    token = torch.arange(starts.numel(), device=starts.device, dtype=torch.int32)
    found = torch.full((count + 2,), starts.numel(), device=starts.device, dtype=torch.int32)
    return found.scatter_(0, index, token)[: count + 1]
