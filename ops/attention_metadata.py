"""What the kernels of ops/attention_cuda.py know of a batch: documents, causal rows, and tables of positions."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention import bucket, document_starts

TILE = 64  # rows of a block, columns of a step, and slots, in the source
_NO_STEP = 2**30


class FusedAttentionMetadata(NamedTuple):
    """What the kernels know of a batch, computed once for all layers; all on one device.

    spans: int32 [B, T, 2], first and last + 1 token of each token's document (0, 0 for padding). causal: bool [B].
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


def fused_layout(document_ids: Tensor, causal: Tensor, bucket_size: int, max_position: int) -> FusedAttentionMetadata:
    """Layout from document_ids int [B, T] (negative: padding; a document is a run of equal ids) and causal bool [B]."""
    padded = padded_length(document_ids.size(1))
    tables = position_tables(padded, bucket_size, max_position, document_ids.device)
    return FusedAttentionMetadata(document_spans(document_ids), causal, *tables)


def document_spans(document_ids: Tensor) -> Tensor:
    """First and last + 1 token of the run of equal ids that each token is in: int [B, T] -> int32 [B, T, 2]."""
    length = document_ids.size(1)
    index = torch.arange(length, device=document_ids.device)
    new = document_starts(document_ids)
    start = torch.where(new, index, 0).cummax(dim=1).values
    last = new.roll(-1, dims=1)  # the next token begins a run; after the last one comes the first, which does
    end = torch.where(last, index + 1, length).flip(1).cummin(dim=1).values.flip(1)
    spans = torch.stack((start, end), dim=-1)
    return spans.masked_fill_((document_ids < 0)[..., None], 0).int()


def padded_length(length: int) -> int:
    """Length of the tables for rows of `length` tokens: a power of two, so that there are few."""
    return max(TILE, 1 << (length - 1).bit_length())


@cache
def position_tables(
    padded: int, bucket_size: int, max_position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """FusedAttentionMetadata's slots, fragments and groups for rows of up to `padded` tokens, a multiple of 64.

    Made once and kept for good: a recorded CUDA graph knows no more of them than their addresses.
    """
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
    for group in range(TILE // 8):
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
