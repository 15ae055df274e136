"""Disentangled relative attention (DeBERTa, LTG-BERT): content, content-to-position and position-to-content scores.

    score(i, j) = (q_i . k_j + q_i . key_pos[s] + k_j . query_pos[s]) / sqrt(3 d),   s = slot(i - j)

This is the plain PyTorch form. Its position terms come from tables of one score per token and slot, never from
tensors of T x T x head_dim. Tensors are batch first; a boolean mask is True where attention is allowed.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.dropout import apply_mask, keep_mask, keep_scale

# Above this many elements the one-hot tensors of `expand_by_product` cost more memory than they save time.
_MAX_ONE_HOT = 2**28


class RelativeAttentionMetadata(NamedTuple):
    """Who attends whom in a batch, and from which slot of the position tables; computed once for all layers.

    document_ids: int64 [B, T]; causal: bool [B].
    slots: int64 [T, T], the slot of query i and key j.
    bias: float32 [B, 1, T, T], 0 where query i may attend key j and -inf elsewhere. A padding token attends the
        padding around it, so that no row of scores is empty and its softmax is defined; its context is zeroed.
    one_hot: [T, S, T], 1 at [i, slots[i, j], j], and the same with queries and keys exchanged (S is the number of
        slots rounded up to a multiple of 8), or None where position scores are to be gathered.
    """

    document_ids: Tensor
    causal: Tensor
    slots: Tensor
    bias: Tensor
    one_hot: tuple[Tensor, Tensor] | None


def bucket(distance: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Signed bucket of each signed distance: int64 of any shape, exact near zero and logarithmic further away.

    With mid = bucket_size // 2: distances below mid are their own bucket; up to max_position - 1 the rest share the
    buckets mid .. bucket_size - 1 by their logarithm; everything beyond falls into the last one.
    """
    mid = bucket_size // 2
    clipped = distance.abs().clamp(max=max_position - 1)
    # In float64, less a hair: where the formula's value is a whole number (always at max_position - 1), rounding
    # must not lift it into the next bucket, which at the far end does not exist.
    position = (clipped.double().clamp(min=mid) / mid).log() / math.log((max_position - 1) / mid) * (mid - 1)
    logarithmic = (position - 1e-9).ceil().long() + mid
    return torch.where(clipped <= mid, distance, distance.sign() * logarithmic)


def relative_slots(length: int, bucket_size: int, max_position: int, device: torch.device) -> Tensor:
    """Row of the position tables for query i and key j: int64 [length, length] in [0, 2 * bucket_size - 2]."""
    positions = torch.arange(length, device=device)
    distance = torch.arange(1 - length, length, device=device)
    table = bucket(distance, bucket_size, max_position) + bucket_size - 1
    return table[positions[:, None] - positions[None, :] + length - 1]


def document_starts(document_ids: Tensor) -> Tensor:
    """Bool [B, T]: where a document begins, which is a run of one id in a row; an id that comes back begins another."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def attention_allowed(document_ids: Tensor, causal: Tensor) -> Tensor:
    """Bool [B, T, T]: query i and key j are of one document, and j <= i in rows where `causal` [B] is set.

    Padding tokens (negative ids) count as documents here, too; callers zero what comes out for them.
    """
    documents = document_starts(document_ids).cumsum(1)
    length = documents.size(1)
    past = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, :, None] == documents[:, None, :]) & (past | ~causal[:, None, None])


def relative_layout(
    document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int, dtype: torch.dtype = torch.float32
) -> RelativeAttentionMetadata:
    """Layout for `relative_attention` from document_ids int64 [B, T] (negative: padding) and causal bool [B].

    `dtype` is that of the queries and keys to come. Never waits for the device.
    """
    length, device = document_ids.size(1), document_ids.device
    slots = relative_slots(length, bucket_size, max_position, device)
    allowed = attention_allowed(document_ids, causal).unsqueeze(1)
    bias = torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, -math.inf)
    width = -(-(2 * bucket_size - 1) // 8) * 8
    one_hot = None
    if device.type == "cuda" and width * length**2 <= _MAX_ONE_HOT:
        one_hot = one_hot_slots(slots, width, dtype)
    return RelativeAttentionMetadata(document_ids, causal, slots, bias, one_hot)


def one_hot_slots(slots: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RelativeAttentionMetadata.one_hot for slots int64 [T, T]: two tensors [T, width, T]."""
    numbers = torch.arange(width, device=slots.device)[None, :, None]
    return (slots[:, None, :] == numbers).to(dtype), (slots.t()[:, None, :] == numbers).to(dtype)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    layout: RelativeAttentionMetadata,
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
    # [B, H, T, d] x [B, H, d, T] -> [B, H, T, T]; scores are this function's own from here on, so added to in place
    scores = (query.transpose(1, 2) @ key.permute(0, 2, 3, 1)).float()
    if layout.one_hot is None:
        to_position, from_position = gather_positions(query, key, query_pos, key_pos, layout.slots)
    else:
        to_position, from_position = expand_by_product(query, key, query_pos, key_pos, layout.one_hot)
    scores = scores.add_(to_position).add_(from_position).add_(layout.bias)
    probabilities = scores.softmax(dim=-1)
    if dropout_keys is not None and dropout_columns is not None and dropout_p > 0:
        columns = dropout_columns[: probabilities.size(-1)]
        probabilities = apply_mask(probabilities, keep_mask(dropout_keys, columns, dropout_p))
        value = value * keep_scale(dropout_p)  # the same as scaling the probabilities, on far fewer elements
    context = (probabilities.to(value.dtype) @ value.transpose(1, 2)).transpose(1, 2)
    return context.masked_fill(layout.document_ids[:, :, None, None] < 0, 0.0)


def gather_positions(
    query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Content-to-position and position-to-content scores, two tensors [B, H, T, T], gathered from [B, H, T, 2b-1]."""
    batch, length, heads, _ = query.shape
    index = slots.expand(batch, heads, length, length)
    to_position = torch.einsum("bihd,shd->bhis", query, key_pos).gather(-1, index)
    from_position = torch.einsum("bjhd,shd->bhjs", key, query_pos).gather(-1, index.transpose(-1, -2))
    return to_position, from_position.transpose(-1, -2)


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
        position = F.pad(position, (0, 0, 0, 0, 0, width - position.size(0)))
        table = torch.einsum("bthd,shd->tbhs", content, position).reshape(length, batch * heads, width)
        return torch.bmm(table, selection).view(length, batch, heads, length)  # [T, B*H, S] x [T, S, T]

    to_position = scores(query, key_pos, one_hot[0]).permute(1, 2, 0, 3)
    from_position = scores(key, query_pos, one_hot[1]).permute(1, 2, 3, 0)
    return to_position, from_position
