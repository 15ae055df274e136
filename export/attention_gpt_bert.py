"""Who attends whom, and from where: masks and positions of GPT-BERT and LTG-BERT; an exported folder holds a copy.

B rows of T new tokens with K keys (cached ones and new ones), H heads of d features, D = H * d,
S = 2 * position_bucket_size - 1 relative positions.
"""

import copy
import math

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .configuration_gpt_bert import GPTBertConfig


def relative_slots(past: int, length: int, bucket_size: int, max_position: int) -> Tensor:
    """Row of the position tables for each new query and each key: int64 [length, past + length] on the CPU.

    Distances are exact up to bucket_size // 2, then logarithmic; max_position - 1 and beyond share the last bucket.
    """
    mid = bucket_size // 2
    distance = torch.arange(1 - length, past + length)  # query minus key
    clipped = distance.abs().clamp(max=max_position - 1)
    # In float64, less a hair: rounding must not lift a whole number into the next bucket.
    place = (clipped.double().clamp(min=mid) / mid).log() / math.log((max_position - 1) / mid) * (mid - 1)
    far = distance.sign() * ((place - 1e-9).ceil().long() + mid)
    table = torch.where(clipped <= mid, distance, far) + bucket_size - 1
    queries, keys = torch.arange(past, past + length), torch.arange(past + length)
    return table[queries[:, None] - keys[None, :] + length - 1]


def attention_allowed(
    attention_mask: Tensor | None, batch: int, past: int, length: int, causal: bool, device: torch.device
) -> Tensor:
    """Bool [B, 1, T, K]: new query i may attend key j. Nothing is allowed to padding and nothing attends it.

    attention_mask: [B, K] with 0 at padding, or one of those that `given_pairs` takes as they are. A row is one text:
    padding inside hides itself and ends nothing, as for all of transformers (prompts that grow, padded each time).
    """
    total = past + length
    if attention_mask is not None and attention_mask.ndim > 2:
        return given_pairs(attention_mask, batch, length, total)
    allowed = torch.ones(length, total, dtype=torch.bool, device=device)
    allowed = (allowed.tril(past) if causal else allowed).expand(batch, 1, length, total)
    if attention_mask is None:
        return allowed
    if attention_mask.size(1) < total:
        raise ValueError(f"attention_mask covers {attention_mask.size(1)} tokens of {total} (cached ones count).")
    real = attention_mask[:, :total].to(device=device, dtype=torch.bool)
    return allowed & real[:, None, None, :] & real[:, None, past:, None]


def given_pairs(attention_mask: Tensor, batch: int, length: int, total: int) -> Tensor:
    """Bool [B, 1, T, K] of a mask [B or 1, T, K] or [B or 1, 1, T, at least K] that says what each query attends.

    Booleans and whole numbers: not 0 where allowed. Floating point: added to scores, so 0 where allowed, else negative.
    """
    mask = attention_mask if attention_mask.ndim == 4 else attention_mask.unsqueeze(1)
    if mask.ndim != 4 or mask.size(1) != 1 or mask.size(2) not in (1, length) or mask.size(3) < total:
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)} does not say which of {total} tokens each of "
            f"{length} attends: give [batch, {total}], [batch, {length}, {total}] or [batch, 1, {length}, {total}]."
        )
    mask = mask[..., :total]
    if not mask.is_floating_point():
        allowed = mask != 0
    elif not torch.compiler.is_compiling() and bool((mask > 0).any()):
        raise ValueError("attention_mask is floating point, hence added to scores: give a mask of 0 and 1 as integers.")
    else:
        allowed = mask >= 0
    return allowed.expand(batch, 1, length, total)


def packed_texts(position_ids: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Number of the text that each new token belongs to, int64 [B or 1, T]: one begins wherever positions begin again.

    Positions are relative, so a row that begins at another one means nothing else. Other jumps are refused.
    """
    begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
    if not torch.compiler.is_compiling():
        odd = begins & (position_ids != 0) if past == 0 else begins
        if attention_mask is not None and attention_mask.ndim == 2:
            odd = odd & attention_mask[:, past : past + odd.size(1)].to(odd.device).bool()
        if bool(odd.any()):
            raise ValueError(
                "position_ids may only count up, or begin again at 0 where another text begins in an uncached row: "
                "positions are relative here."
            )
    return begins.cumsum(dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, d] by its positions, feature i together with feature i + d/2; cos, sin [T, d/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Layout:
    """What all layers share in one pass: who may attend whom, relative or rotary positions, and the cache."""

    def __init__(
        self, config: GPTBertConfig, allowed: Tensor, past: int, cache: Cache | None, need_weights: bool
    ) -> None:
        self.need_weights, self.cache, self.past = need_weights, cache, past
        self.attends = allowed.any(dim=-1, keepdim=True)  # [B, 1, T, 1]; a query without any key gives zeros
        self.allowed = allowed | ~self.attends
        length, total = allowed.shape[-2:]
        self.total = total
        self.new = torch.arange(past, total, device=allowed.device)  # where the new tokens stand in the cache
        if config.position_embedding == "rope":
            head_dim = config.hidden_size // config.num_attention_heads
            frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
            angles = torch.arange(past, total, dtype=torch.float64)[:, None] * frequencies
            self.cos, self.sin = angles.cos().float().to(allowed.device), angles.sin().float().to(allowed.device)
        else:
            slots = relative_slots(past, length, config.position_bucket_size, config.max_position_embeddings)
            self.slots = slots.to(allowed.device)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Layout":
        """The same for a layer on another device; accelerate calls this where a device map spreads the layers."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device, non_blocking=non_blocking))
        return moved

    def position_scores(self, query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor) -> Tensor:
        """Content-to-position and position-to-content scores [B, H, T, K] of query [B, H, T, d], key [B, H, K, d]."""
        batch, heads, length, _ = query.shape
        index = self.slots.expand(batch, heads, length, self.total)
        to_position = torch.einsum("bhid,shd->bhis", query, key_pos).gather(-1, index)
        if length == 1:  # decoding: each key meets one position, so the others need not be scored
            from_position = torch.einsum("bhjd,jhd->bhj", key, query_pos[self.slots[0]]).unsqueeze(-2)
        else:
            table = torch.einsum("bhjd,shd->bhjs", key, query_pos)
            from_position = table.gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        return to_position.float() + from_position.float()
