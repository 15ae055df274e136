"""Attention: the choice between kernels and reference, and the reference implementation of relative attention.

Disentangled relative attention (DeBERTa, LTG-BERT) adds content, content-to-position and position-to-content scores:

    score(i, j) = (q_i . k_j + q_i . key_pos[s] + k_j . query_pos[s]) / sqrt(3 d),   s = slot(i - j)

The reference is plain PyTorch. Its position terms come from tables of one score per token and slot, never from
tensors of T x T x head_dim; rows above LONGEST_WHOLE tokens go through it in blocks, in memory linear in T. Tensors are
batch first; a boolean mask is True where attention is allowed. The kernels are in ops/attention_cuda.py, rotary
attention in ops/rope.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import attention_cuda
from ops.attention_cuda import fused_relative_attention
from ops.attention_metadata import (
    LONGEST_WHOLE,
    FusedAttentionMetadata,
    LongRelativeMetadata,
    RelativeAttentionMetadata,
    allowed_between,
    fused_metadata,
    long_relative_metadata,
    relative_metadata,
)
from ops.blocks import Span, in_blocks
from ops.dropout import apply_mask, keep_mask, keep_scale
from ops.reference import reference_chosen
from ops.rope import RopeAttentionMetadata, repeat_heads, rope_attention

AttentionMetadata = RelativeAttentionMetadata | LongRelativeMetadata | FusedAttentionMetadata | RopeAttentionMetadata


# The choice


def query_dtype(parameters: Tensor) -> torch.dtype:
    """The dtype of what a linear layer with these parameters returns: autocast's where that is on."""
    device = parameters.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameters.dtype


def use_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, slots: int, drops: bool, trains: bool) -> bool:
    """Whether relative attention of queries of `dtype` runs by the CUDA kernels.

    drops: with dropout of probabilities. trains: with a backward pass to come, which needs more shared memory.
    Not while torch.compile traces: then the metadata would have to be part of the graph, and its tables are made on the
    host. Training compiles sublayers, which get the metadata as an argument (training/forward_backward.py).
    HYBRID_REFERENCE=attention in the environment keeps the reference (ops/reference.py).
    """
    if torch.compiler.is_compiling() or reference_chosen("attention") or dtype != torch.bfloat16:
        return False
    return attention_cuda.available(device, head_dim, slots, drops, trains)


def choose_relative_metadata(
    document_ids: Tensor,
    causal: bool | Tensor,
    buckets: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    drops: bool,
) -> RelativeAttentionMetadata | LongRelativeMetadata | FusedAttentionMetadata:
    """Metadata of a batch with relative positions, for the kernels where `use_kernel` says so, else for the reference.

    document_ids: int64 [B, T] (negative: padding). causal: a bool, bool [B], or int [B, T] as in `allowed_between`.
    buckets: bucket size and largest position. dtype: of the queries to come. drops: with dropout of probabilities.
    """
    device = document_ids.device
    if isinstance(causal, bool):
        causal = torch.full(document_ids.shape[:1], causal, device=device)
    # A copy, since torch.compile tells a view of a larger batch from a tensor of its own.
    causal = causal.to(device, copy=True)
    if use_kernel(device, dtype, head_dim, 2 * buckets[0] - 1, drops, torch.is_grad_enabled()):
        return fused_metadata(document_ids, causal, *buckets)
    if document_ids.size(1) > LONGEST_WHOLE:
        return long_relative_metadata(document_ids, causal, *buckets)
    return relative_metadata(document_ids, causal, *buckets, dtype)


def attend(
    query_key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    metadata: AttentionMetadata,
    dropout_p: float = 0.0,
    dropout_keys: Tensor | None = None,
    dropout_columns: Tensor | None = None,
) -> Tensor:
    """Context [B, T, H, d] by the implementation that the metadata is made for; zero for padding tokens.

    query_key: [B, T, H + K, d], queries before keys. value: [B, T, K, d]; each serves H / K queries. positions:
    [2b-1, H + K, d], the position table seen as queries and as keys; None with rotary positions, which drop nothing.
    The rest as in `relative_attention`.
    """
    heads = query_key.size(-2) - value.size(-2)
    if isinstance(metadata, RopeAttentionMetadata):
        query, key = query_key.split((heads, value.size(-2)), dim=-2)
        return rope_attention(query, key, value, metadata)
    assert positions is not None
    dropped = (dropout_p, dropout_keys, dropout_columns)
    query_key, positions = _paired(query_key, heads), _paired(positions, heads)  # [B, T, 2, H, d], [2b-1, 2, H, d]
    value = repeat_heads(value, heads)
    if isinstance(metadata, FusedAttentionMetadata):
        return fused_relative_attention(query_key, value, positions, metadata, *dropped)
    (query, key), (query_pos, key_pos) = query_key.unbind(-3), positions.unbind(-3)
    return relative_attention(query, key, value, query_pos, key_pos, metadata, *dropped)


def _paired(query_key: Tensor, heads: int) -> Tensor:
    """Queries and keys [..., H + K, d] -> [..., 2, H, d]: a view where each query has a key of its own."""
    keys = query_key.size(-2) - heads
    if keys == heads:
        return query_key.unflatten(-2, (2, heads))
    query, key = query_key.split((heads, keys), dim=-2)
    return torch.stack([query, repeat_heads(key, heads)], dim=-3)


# The reference


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    metadata: RelativeAttentionMetadata | LongRelativeMetadata,
    dropout_p: float = 0.0,
    dropout_keys: Tensor | None = None,
    dropout_columns: Tensor | None = None,
) -> Tensor:
    """Context [B, T, H, d] of query, key and value [B, T, H, d]; zero for padding tokens.

    query_pos, key_pos: [2b-1, H, d], the position table seen as queries and as keys.
    dropout_keys, dropout_columns: int32 [B, H, T] of `ops.dropout.head_keys` and int32 [>= T] of its column keys;
    None drops nothing.
    Scores are added up and normalised in float32, whatever the inputs' dtype.
    """
    scale = 1 / math.sqrt(3 * query.size(-1))
    query, query_pos = query * scale, query_pos * scale
    dropped = (dropout_p, dropout_keys, dropout_columns)
    if isinstance(metadata, LongRelativeMetadata):
        context = _attention_in_blocks(query, key, value, query_pos, key_pos, metadata, dropped)
    else:
        if metadata.one_hot is None:
            terms = gather_positions(query, key, query_pos, key_pos, metadata.slots)
        else:
            terms = expand_by_product(query, key, query_pos, key_pos, metadata.one_hot)
        context = _weighted_values(query, key, value, (*terms, metadata.bias), dropped)
    return context.masked_fill(metadata.document_ids[:, :, None, None] < 0, 0.0)


def _attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    metadata: LongRelativeMetadata,
    dropped: tuple[float, Tensor | None, Tensor | None],
) -> Tensor:
    (p, keys, columns), length = dropped, query.size(1)
    to_slots, from_slots = _scores_with_slots(query, key_pos), _scores_with_slots(key, query_pos)  # [B, H, T, 2b-1]

    def attend_block(queries: Span, all_keys: Span) -> Tensor:
        first, last = queries
        index = torch.arange(*queries, device=query.device)[:, None] - torch.arange(length, device=query.device)
        index = metadata.slots[index + length - 1]  # [n, T]
        bias = torch.zeros(index.shape, device=query.device)
        bias = bias.masked_fill(~allowed_between(metadata.documents, metadata.causal, queries, all_keys), -math.inf)
        to_position = _pick(to_slots[:, :, first:last], index)
        from_position = _pick(from_slots, index.t()).transpose(-1, -2)
        part = None if keys is None else keys[:, :, first:last]
        terms = (to_position, from_position, bias.unsqueeze(1))
        return _weighted_values(query[:, first:last], key, value, terms, (p, part, columns))

    return in_blocks(attend_block, length)


def _weighted_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: tuple[Tensor, Tensor, Tensor],
    dropped: tuple[float, Tensor | None, Tensor | None],
) -> Tensor:
    """Context [B, n, H, d] of scaled queries [B, n, H, d]; terms: what is added to their scores, [B, H or 1, n, T]."""
    p, keys, columns = dropped
    # [B, H, n, d] x [B, H, d, T] -> [B, H, n, T]; a new tensor, so what follows may add to it in place
    scores = (query.transpose(1, 2) @ key.permute(0, 2, 3, 1)).float()
    to_position, from_position, bias = terms
    probabilities = scores.add_(to_position).add_(from_position).add_(bias).softmax(dim=-1)
    if keys is not None and columns is not None and p > 0:
        columns = columns[: probabilities.size(-1)]
        probabilities = apply_mask(probabilities, keep_mask(keys, columns, p))
        value = value * keep_scale(p)  # the same as scaling the probabilities, on far fewer elements
    return (probabilities.to(value.dtype) @ value.transpose(1, 2)).transpose(1, 2)


def _scores_with_slots(content: Tensor, position: Tensor) -> Tensor:
    """Scores of tokens [B, T, H, d] with all slots [2b-1, H, d]: [B, H, T, 2b-1]."""
    return torch.einsum("bthd,shd->bhts", content, position)


def _pick(scores: Tensor, slots: Tensor) -> Tensor:
    """Of scores [B, H, n, 2b-1] those of slots int64 [n, m]: [B, H, n, m]."""
    return scores.gather(-1, slots.expand(*scores.shape[:2], *slots.shape))


def gather_positions(
    query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Content-to-position and position-to-content scores, two tensors [B, H, T, T], gathered from [B, H, T, 2b-1]."""
    # Of query i's scores with all slots the one of each key j, and of key j's likewise.
    to_position = _pick(_scores_with_slots(query, key_pos), slots)
    return to_position, _pick(_scores_with_slots(key, query_pos), slots.t()).transpose(-1, -2)


def expand_by_product(
    query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor, one_hot: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The same scores as `gather_positions`, as products with one-hot matrices.

    Exact (each sum has one term), and on a GPU several times faster than gathering, above all backwards: the
    gradient is a matrix product too, where a gather's is a scatter with atomic additions.
    """
    batch, length, heads, _ = query.shape
    width = one_hot[0].size(1)

    def scores(content: Tensor, position: Tensor, selection: Tensor) -> Tensor:
        position = F.pad(position, (0, 0, 0, 0, 0, width - position.size(0)))  # [S, H, d]
        # One matrix product for each token: its scores with all slots times a selection of one slot a column.
        table = torch.einsum("bthd,shd->tbhs", content, position).reshape(length, batch * heads, width)
        return torch.bmm(table, selection).view(length, batch, heads, length)  # [T, B*H, S] x [T, S, T]

    to_position = scores(query, key_pos, one_hot[0]).permute(1, 2, 0, 3)  # [i, B, H, j] -> [B, H, i, j]
    from_position = scores(key, query_pos, one_hot[1]).permute(1, 2, 3, 0)  # [j, B, H, i] -> [B, H, i, j]
    return to_position, from_position
