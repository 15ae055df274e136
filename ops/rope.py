"""Rotary attention (RoPE, Su et al. 2021): plain fused attention, for models without relative positions.

On a CPU, in float32, and inside torch.compile: PyTorch's scaled_dot_product_attention with a boolean mask. On CUDA in
bf16 or fp16 (sm_80 or later): variable-length flash attention, where documents are sequences of their own (flash-attn's
kernels where it is installed, else those in torch.nn.attention.varlen). These kernels know nothing of counter-based
dropout, so probabilities are never dropped here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import nvrtc
from ops.attention_metadata import attention_allowed, document_starts
from ops.reference import reference_chosen

# (query, key, value [tokens, H, d], boundaries int32 [documents + 1], longest possible document, causal) -> context
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]


@dataclass(frozen=True)
class VarlenSizes:
    """Of a batch, known on the host: how many rows are causal, and at most how many documents they and the others touch
    (runs of one id in one row, padding included)."""

    causal_rows: int
    causal_documents: int
    other_documents: int


class VarlenMetadata(NamedTuple):
    """Documents of a batch as runs of tokens, causal rows first.

    causal_rows: how many rows are causal. order, inverse: permutation [B] of the rows that brings these to the front,
    and back; None where all rows agree. boundaries: where each document of the causal rows and of the others starts,
    and where the last one ends: int32 [documents + 1], counted from the first token of its group. Where fewer documents
    came than VarlenSizes allows for, the others are empty and come last.
    """

    causal_rows: int
    order: Tensor | None
    inverse: Tensor | None
    boundaries: tuple[Tensor, Tensor]


class RopeAttentionMetadata(NamedTuple):
    """What all layers share: document_ids int64 [B, T]; cos and sin float32 [T, 1, d/2]; allowed bool [B, 1, T, T]
    for PyTorch's attention (None where `varlen` is used); varlen with its kernel, or None."""

    document_ids: Tensor
    cos: Tensor
    sin: Tensor
    allowed: Tensor | None
    varlen: VarlenMetadata | None
    kernel: VarlenKernel | None


def rope_metadata(
    document_ids: Tensor,
    causal: bool | Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    sizes: VarlenSizes | None = None,
) -> RopeAttentionMetadata:
    """Metadata for `rope_attention` from document_ids int64 [B, T] (-1: padding) and causal, a bool or bool [B].

    `dtype` is that of the queries to come: it decides which kernel can be used. For a variable-length kernel the number
    of documents is a shape: without `sizes` this waits for the device, to count them.
    """
    device, (batch, length) = document_ids.device, document_ids.shape
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequencies  # [T, d/2]
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
    plain = torch.compiler.is_compiling() or obstacle(device, dtype) or reference_chosen("attention")
    kernel = None if plain else varlen_kernel()
    if kernel is not None:
        return RopeAttentionMetadata(document_ids, cos, sin, None, varlen_metadata(document_ids, causal, sizes), kernel)
    if isinstance(causal, bool):
        causal = torch.full((batch,), causal, device=device)
    allowed = attention_allowed(document_ids, causal.to(device)).unsqueeze(1)
    return RopeAttentionMetadata(document_ids, cos, sin, allowed, None, None)


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why queries of `dtype` cannot go through variable-length kernels on a device; "" where they can."""
    if device.type != "cuda":
        return "they need a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they need bfloat16 or float16 and queries are {str(dtype).removeprefix('torch.')}"
    if torch.version.hip is None and (problem := nvrtc.obstacle(device)):
        return problem
    return "" if varlen_kernel() else "neither flash-attn nor torch.nn.attention.varlen is installed"


def rope_attention(query: Tensor, key: Tensor, value: Tensor, metadata: RopeAttentionMetadata) -> Tensor:
    """Context [B, T, H, d] of query, key and value [B, T, H, d], scores scaled by 1/sqrt(d); zero for padding."""
    query, key = rotate(query, metadata.cos, metadata.sin), rotate(key, metadata.cos, metadata.sin)
    if metadata.varlen is not None and metadata.kernel is not None:
        context = varlen_attention(query, key, value, metadata.varlen, metadata.kernel)
    else:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        context = F.scaled_dot_product_attention(*heads_first, attn_mask=metadata.allowed).transpose(1, 2)
    return context.masked_fill(metadata.document_ids[:, :, None, None] < 0, 0.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, H, d] by its positions, feature i together with feature i + d/2; cos, sin [T, 1, d/2]."""
    first, second = x.float().chunk(2, dim=-1)  # [B, T, H, d/2] each
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def varlen_metadata(document_ids: Tensor, causal: bool | Tensor, sizes: VarlenSizes | None = None) -> VarlenMetadata:
    """Split a batch into causal rows and others, and each group into documents (runs of one id in one row)."""
    batch = document_ids.size(0)
    if isinstance(causal, bool):
        order, causal_rows = None, batch if causal else 0  # one group is empty, and no row moves
    else:
        order = causal.to(torch.int8).argsort(descending=True, stable=True)
        causal_rows = int(causal.sum()) if sizes is None else sizes.causal_rows  # the sum waits for the device
        order = order.to(document_ids.device) if 0 < causal_rows < batch else None
    if order is not None:
        document_ids = document_ids[order]
    groups = (document_ids[:causal_rows], document_ids[causal_rows:])
    inverse = None if order is None else order.argsort()
    counts = (None, None) if sizes is None else (sizes.causal_documents, sizes.other_documents)
    return VarlenMetadata(
        causal_rows, order, inverse, (_boundaries(groups[0], counts[0]), _boundaries(groups[1], counts[1]))
    )


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, metadata: VarlenMetadata, kernel: VarlenKernel
) -> Tensor:
    """Context [B, T, H, d] by one call of `kernel` for the causal rows and one for the others."""
    if metadata.order is not None and metadata.inverse is not None:
        query, key, value = (_Permuted.apply(x, metadata.order, metadata.inverse) for x in (query, key, value))
    value = value.to(query.dtype)
    parts = []
    for rows, boundaries, causal in (
        (slice(None, metadata.causal_rows), metadata.boundaries[0], True),
        (slice(metadata.causal_rows, None), metadata.boundaries[1], False),
    ):
        if boundaries.numel() > 1:  # the group has documents
            # [rows, T, H, d] -> [rows * T, H, d]: the kernel knows documents alone, and they never cross a row's end
            q, k, v = (x[rows].flatten(0, 1).contiguous() for x in (query, key, value))
            parts.append(kernel(q, k, v, boundaries, query.size(1), causal).view_as(query[rows]))
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

    def flash_attn(query, key, value, boundaries, longest, causal):
        return flash_attn_varlen_func(query, key, value, boundaries, boundaries, longest, longest, causal=causal)

    return flash_attn


def _torch_varlen_kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_window = "window_size" in inspect.signature(varlen_attn).parameters  # its name for causality since torch 2.11

    def torch_varlen(query, key, value, boundaries, longest, causal):
        options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)} if has_window else {"is_causal": causal}
        context = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
        assert isinstance(context, Tensor)  # it is a tuple only where statistics are asked for
        return context

    return torch_varlen


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
