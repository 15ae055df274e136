"""Attention metadata: who attends whom in a batch, and which slot of the position tables serves which distance.

Made once for all layers of a forward pass. RelativeAttentionMetadata is what the reference implementation reads,
FusedAttentionMetadata what the CUDA kernels read; that of rotary attention is in ops/rope.py.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64  # rows of a block, columns of a step, and slots, in the source
_NO_STEP = 2**30
# Above this many elements the one-hot tensors of RelativeAttentionMetadata cost more memory than they save time.
_MAX_ONE_HOT = 2**28
LONGEST_WHOLE = 1024  # tokens of a row: the reference takes longer ones in blocks of BLOCK queries
BLOCK = 512


class RelativeAttentionMetadata(NamedTuple):
    """Who attends whom in a batch, and from which slot of the position tables; computed once for all layers.

    document_ids: int64 [B, T]; causal: bool [B], or int [B, T] as in `allowed_between`.
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


class LongRelativeMetadata(NamedTuple):
    """The same for rows so long that the reference runs in blocks of queries: nothing here grows with T x T.

    document_ids: int64 [B, T]. documents: int64 [B, T] of `document_numbers`. causal: as above.
    slots: int64 [2 T - 1] of `slots_by_distance`.
    """

    document_ids: Tensor
    documents: Tensor
    causal: Tensor
    slots: Tensor


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


def slots_by_distance(length: int, bucket_size: int, max_position: int, device: torch.device) -> Tensor:
    """Row of the position tables for each distance i - j, from 1 - length on: int64 [2 * length - 1]."""
    distance = torch.arange(1 - length, length, device=device)
    return bucket(distance, bucket_size, max_position) + bucket_size - 1


def relative_slots(length: int, bucket_size: int, max_position: int, device: torch.device) -> Tensor:
    """Row of the position tables for query i and key j: int64 [length, length] in [0, 2 * bucket_size - 2]."""
    table = slots_by_distance(length, bucket_size, max_position, device)
    positions = torch.arange(length, device=device)
    return table[positions[:, None] - positions[None, :] + length - 1]


def document_starts(document_ids: Tensor) -> Tensor:
    """Bool [B, T]: where a document begins, which is a run of one id in a row; an id that comes back begins another."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)  # the first token of a row always begins one
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def document_numbers(document_ids: Tensor) -> Tensor:
    """The number of each token's document in its row, from 1 on: int64 [B, T]. Padding counts as documents, too."""
    return document_starts(document_ids).cumsum(1)


def attention_allowed(document_ids: Tensor, causal: Tensor, window: int | None = None) -> Tensor:
    """Bool [B, T, T]: query i and key j are of one document, key j is not hidden by `causal`, and |i - j| <= window.
    Padding tokens (negative ids) count as documents here, too; callers zero what comes out for them."""
    whole = (0, document_ids.size(1))
    return allowed_between(document_numbers(document_ids), causal, whole, whole, window)


def allowed_between(
    documents: Tensor, causal: Tensor, queries: tuple[int, int], keys: tuple[int, int], window: int | None = None
) -> Tensor:
    """`attention_allowed` for queries and keys from a first to before a last token: bool [B, queries, keys].

    documents: int64 [B, T] of `document_numbers`. causal: bool [B], rows in which no token attends to those ahead of
    it; or int [B, T], the column up to which each does, which nowhere falls in a document: 0 for causal tokens, T for
    those that see their whole document, the same for all tokens of a prefix or block that is read in both directions.
    """
    query, key = (torch.arange(*part, device=documents.device) for part in (queries, keys))
    ahead = key - query[:, None]  # [queries, keys]
    same = documents[:, slice(*queries), None] == documents[:, None, slice(*keys)]
    seen = ~causal[:, None, None] if causal.ndim == 1 else key < causal[:, slice(*queries), None]
    allowed = same & ((ahead <= 0) | seen)
    return allowed if window is None else allowed & (ahead.abs() <= window)


def relative_metadata(
    document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int, dtype: torch.dtype = torch.float32
) -> RelativeAttentionMetadata:
    """Metadata for the reference from document_ids int64 [B, T] (negative: padding) and causal as `allowed_between`.
    `dtype` is that of the queries and keys to come. Never waits for the device."""
    length, device = document_ids.size(1), document_ids.device
    slots = relative_slots(length, bucket_size, max_position, device)
    allowed = attention_allowed(document_ids, causal).unsqueeze(1)
    bias = torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, -math.inf)
    width = -(-(2 * bucket_size - 1) // 8) * 8  # rows of bfloat16 then begin at 16 bytes, for tensor cores
    one_hot = None
    if device.type == "cuda" and width * length**2 <= _MAX_ONE_HOT:
        one_hot = one_hot_slots(slots, width, dtype)
    return RelativeAttentionMetadata(document_ids, causal, slots, bias, one_hot)


def long_relative_metadata(
    document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int
) -> LongRelativeMetadata:
    """Metadata for the reference in blocks, from the same as `relative_metadata`."""
    slots = slots_by_distance(document_ids.size(1), bucket_size, max_position, document_ids.device)
    return LongRelativeMetadata(document_ids, document_numbers(document_ids), causal, slots)


def one_hot_slots(slots: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RelativeAttentionMetadata.one_hot for slots int64 [T, T]: two tensors [T, width, T]."""
    numbers = torch.arange(width, device=slots.device)[None, :, None]
    return (slots[:, None, :] == numbers).to(dtype), (slots.t()[:, None, :] == numbers).to(dtype)


class FusedAttentionMetadata(NamedTuple):
    """What the kernels of ops/attention_cuda.py read of a batch, computed once for all layers; all on one device.

    spans: int32 [B, T, 2], first and last + 1 token of each token's document (0, 0 for padding); where tokens have
        ends of their own [2, B, T, 2], the keys that each attends to and the queries that attend to it, see
        `visible_spans`. causal: bool [B], then nowhere set.
    slots: int32 [2 P + 1] (P >= T, a power of two from 64 on), slot of the distances -P .. P.
    fragments: int32 [F, 32, 2], parts of the one-hot matrix [distance, slot] as operands of mma.m16n8k16: each 16
        distances (16 k + 1 .. 16 k + 16) by a group of 8 slots. groups: int32 [8, 4], for each group the first and last
        k with any of its slots, and what to add to k for the index of the fragment.
    """

    spans: Tensor
    causal: Tensor
    slots: Tensor
    fragments: Tensor
    groups: Tensor


def fused_metadata(document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int) -> FusedAttentionMetadata:
    """Metadata for the kernels from document_ids int [B, T] (negative: padding) and causal as `allowed_between`."""
    padded = padded_length(document_ids.size(1))
    tables = position_tables(padded, bucket_size, max_position, document_ids.device)
    if causal.ndim == 1:
        return FusedAttentionMetadata(document_spans(document_ids), causal, *tables)
    return FusedAttentionMetadata(
        visible_spans(document_ids, causal), torch.zeros_like(causal[:, 0], dtype=torch.bool), *tables
    )


def document_spans(document_ids: Tensor) -> Tensor:
    """First and last + 1 token of the run of equal ids that each token is in: int [B, T] -> int32 [B, T, 2]."""
    return torch.stack(_ends_of_runs(document_ids), dim=-1).masked_fill_((document_ids < 0)[..., None], 0).int()


def visible_spans(document_ids: Tensor, ends: Tensor) -> Tensor:
    """First and last + 1 of the keys that each token attends to, and of the queries that attend to it: int32
    [2, B, T, 2].

    ends: int [B, T], up to where each token sees what is ahead of it (`allowed_between`). Since they nowhere fall, the
    queries of a key are one stretch, too: from the first whose end is behind it to the end of the document.
    """
    start, stop = _ends_of_runs(document_ids)
    index = torch.arange(document_ids.size(1), device=document_ids.device).expand_as(stop).contiguous()
    end = torch.maximum(ends, index + 1).minimum(stop)  # rises along the row, from document to document, too
    first = torch.searchsorted(end, index, right=True)
    spans = torch.stack([torch.stack(pair, dim=-1) for pair in ((start, end), (first, stop))])
    return spans.masked_fill_((document_ids < 0)[..., None], 0).int()


def _ends_of_runs(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last + 1 token of the run of equal ids that each token is in; int64 [B, T] each."""
    length = document_ids.size(1)
    index = torch.arange(length, device=document_ids.device)
    new = document_starts(document_ids)
    start = torch.where(new, index, 0).cummax(dim=1).values  # the latest start up to each token
    last = new.roll(-1, dims=1)  # the next token begins a run; after the last one comes the first, which does
    end = torch.where(last, index + 1, length).flip(1).cummin(dim=1).values.flip(1)  # the earliest end from each on
    return start, end


def padded_length(length: int) -> int:
    """Length of the tables for rows of `length` tokens: a power of two, so that there are few."""
    return max(TILE, 1 << (length - 1).bit_length())


@cache
def position_tables(
    padded: int, bucket_size: int, max_position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """FusedAttentionMetadata's slots, fragments and groups for rows of up to `padded` tokens, a multiple of 64. Made
    once and kept for good: a captured CUDA graph knows no more of them than their addresses."""
    distance = torch.arange(-padded, padded + 1)
    slots = bucket(distance, bucket_size, max_position) + bucket_size - 1  # [2 P + 1], never falling
    # Step k has the distances 16 k + 1 .. 16 k + 16; slots[1:] begins with distance 1 - P, so with step -P / 16.
    first_step, steps = -padded // 16, padded // 8
    by_step = slots[1:].view(steps, 16)
    # Slots never fall from one distance to the next, so those of a step lie between its first and its last one.
    first_group, last_group = by_step[:, 0] // 8, by_step[:, -1] // 8
    lane = torch.arange(32)
    # Operand B: lane 4 g + t holds column g of rows 2 t, 2 t + 1 (first register) and 2 t + 8, 2 t + 9.
    rows = (lane % 4 * 2)[:, None] + torch.tensor([0, 1, 8, 9])  # [32, 4]
    fragments, groups = [], []
    for group in range(TILE // 8):  # of 8 slots, the columns of an operand
        members = ((first_group <= group) & (group <= last_group)).nonzero().flatten()
        if not len(members):
            groups.append((_NO_STEP, -_NO_STEP, -_NO_STEP, 0))  # no steps, and an index that exists
            continue
        first, last = int(members[0]), int(members[-1])  # all in between are members, too
        groups.append((first + first_step, last + first_step, len(fragments) - first - first_step, 0))
        for step in range(first, last + 1):
            one = (by_step[step][rows] == (group * 8 + lane // 4)[:, None]).long() * 0x3F80  # [32, 4] of bfloat16 1.0
            # Two values of 16 bits to a register, the earlier row in the lower half.
            fragments.append(torch.stack((one[:, 0] | one[:, 1] << 16, one[:, 2] | one[:, 3] << 16), dim=-1))
    fragments.append(torch.zeros_like(fragments[0]))  # the kernel reads one ahead
    return slots.int().to(device), torch.stack(fragments).int().to(device), torch.tensor(groups).int().to(device)
