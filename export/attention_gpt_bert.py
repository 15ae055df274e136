"""Who attends whom, from where, and by which implementation; an exported folder of GPT-BERT or LTG-BERT has a copy.

B rows of T new tokens with K keys (cached ones and new ones), H heads of d features, D = H * d,
S = 2 * position_bucket_size - 1 relative positions.
"""

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_gpt_bert import GPTBertConfig

_BLOCK = 128  # queries, and keys, of a block of FlexAttention's masks
# Its own choice of tiles may ask for more shared memory than the device has, an H200 with heads of 64 for one.
_TILES: Any = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}


def slots_by_distance(bucket_size: int, max_position: int) -> Tensor:
    """Row of the position tables for each distance, query minus key, from 1 - max_position on: int64 [2 P - 1].

    Distances are exact up to bucket_size // 2, then logarithmic; max_position - 1 and beyond share the last bucket.
    """
    mid = bucket_size // 2
    distance = torch.arange(1 - max_position, max_position)
    # In float64, less a hair: rounding must not lift a whole number into the next bucket.
    place = (distance.abs().double().clamp(min=mid) / mid).log() / math.log((max_position - 1) / mid) * (mid - 1)
    far = distance.sign() * ((place - 1e-9).ceil().long() + mid)
    return torch.where(distance.abs() <= mid, distance, far) + bucket_size - 1


class AttentionMask(NamedTuple):
    """Which of K keys each of T new queries attends, in memory linear in both: key j where first[i] <= j < last[i].

    first, last: int64 [B or 1, T]; `plain` where these are 0 and, with `causal`, one above the query, else K.
    real: bool [B, K], False at padding, which neither attends nor is attended; None where there is none.
    pairs: bool [B, 1, T, K] where the caller has given them all, which stand in for `causal` and `real`.
    """

    first: Tensor
    last: Tensor
    total: int
    causal: bool
    plain: bool
    real: Tensor | None
    pairs: Tensor | None

    def attends(self) -> Tensor | None:
        """Bool [B, T]: which queries attend any key; None if all."""
        if self.pairs is not None:
            return self.dense().any(dim=-1)[:, 0]
        return None if self.real is None else self.real[:, self.total - self.first.size(1) :]

    def dense(self) -> Tensor:
        """The same as bool [B or 1, 1, T, K]."""
        key = torch.arange(self.total, device=self.first.device)
        allowed = ((self.first[..., None] <= key) & (key < self.last[..., None])).unsqueeze(1)
        if self.pairs is not None:
            return allowed & self.pairs
        if self.real is None:
            return allowed
        return allowed & self.real[:, None, None, :] & self.real[:, None, self.total - self.first.size(1) :, None]

    def blocks(self, batch: int) -> Any:
        """The same for B rows as FlexAttention's BlockMask, without a tensor of T x K; None where all is allowed."""
        from torch.nn.attention.flex_attention import BlockMask

        if self.plain and not self.causal and self.real is None and self.pairs is None:
            return None
        length, attends, real, pairs = self.first.size(1), self.attends(), self.real, self.pairs
        rows = next((x.size(0) for x in (pairs, real) if x is not None), self.first.size(0))
        first, last = self.first.expand(rows, -1), self.last.expand(rows, -1)
        if attends is not None:
            first, last = first.masked_fill(~attends, self.total), last.masked_fill(~attends, 0)

        def in_blocks(x: Tensor, value: int) -> Tensor:
            return F.pad(x, (0, -x.size(-1) % _BLOCK), value=value).unflatten(-1, (-1, _BLOCK))

        begin = torch.arange(0, self.total, _BLOCK, device=first.device)
        firsts, lasts = in_blocks(first, self.total), in_blocks(last, 0)
        some = (firsts.amin(-1, True) < begin + _BLOCK) & (lasts.amax(-1, True) > begin)  # [B, T / 128, K / 128]
        whole = (firsts.amax(-1, True) <= begin) & (lasts.amin(-1, True) >= begin + _BLOCK)
        if pairs is not None:
            whole = torch.zeros_like(whole)
        elif real is not None:
            keys = in_blocks(real.int(), 0)
            some, whole = some & (keys.amax(-1)[:, None] > 0), whole & (keys.amin(-1)[:, None] > 0)

        first, last = first.expand(batch, -1), last.expand(batch, -1)

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (first[row, query] <= key) & (key < last[row, query])
            if pairs is not None:
                return seen & pairs[row, 0, query, key]
            return seen if real is None else seen & real[row, key]

        def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
            order = blocks.int().argsort(dim=-1, descending=True, stable=True)
            return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)

        return BlockMask.from_kv_blocks(
            *listed(some & ~whole), *listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=allowed,
            seq_lengths=(length, self.total),
        )  # fmt: skip


def make_mask(
    attention_mask: Tensor | None, texts: Tensor | None, rows: int, past: int, length: int, causal: bool,
    device: torch.device,
) -> AttentionMask:  # fmt: skip
    """Who attends whom among `past` cached and `length` new tokens: nothing attends padding, and padding nothing.

    attention_mask: [B, K] with 0 at padding, or one of those that `given_pairs` takes as they are. Padding inside a
    text hides itself and ends nothing, as for all of transformers (prompts that grow, padded each time). texts: of
    `packed_texts`, where nothing is cached; texts attend themselves alone.
    """
    total, real, pairs = past + length, None, None
    if attention_mask is not None and attention_mask.ndim > 2:
        pairs, causal = given_pairs(attention_mask.to(device), rows, length, total), False
    elif attention_mask is not None:
        if attention_mask.size(1) < total:
            raise ValueError(f"attention_mask covers {attention_mask.size(1)} tokens of {total} (cached ones count).")
        real = attention_mask[:, :total].to(device=device, dtype=torch.bool)
        if not torch.compiler.is_compiling() and bool(real.all()):
            real = None
    query = torch.arange(past, total, device=device)[None]
    first, last = torch.zeros_like(query), torch.full_like(query, total)
    if texts is not None:
        begins = texts.diff(prepend=texts[:, :1] - 1) != 0
        first = torch.where(begins, query, 0).cummax(dim=1).values
        last = torch.where(begins.roll(-1, 1), query + 1, total).flip(1).cummin(dim=1).values.flip(1)
    last = (query + 1).expand_as(first) if causal else last
    return AttentionMask(first, last, total, causal, texts is None, real, pairs)


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
    """Rotate x [B, H, T, d] by its positions, feature i together with feature i + d/2; cos, sin [B or 1, 1, T, d/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The reference. attention_mask [B or 1, H or 1, T, K]: bool, or floating point to be added to the scores."""
    scores = scaling * (query @ key.transpose(-1, -2)).float()
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    else:
        scores = scores + attention_mask
    probabilities = F.dropout(scores.softmax(dim=-1).to(value.dtype), dropout)
    return (probabilities @ value).transpose(1, 2), probabilities


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float,
    dropout: float = 0.0, *, layout: "Layout", positions: tuple[Tensor, Tensor] | None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """PyTorch's FlexAttention, compiled on a GPU: no tensor of T x K. The position terms are read from tables of one
    score per token and slot."""
    if dropout:
        raise ValueError(
            "flex_attention drops no probabilities: train with attn_implementation='sdpa', or with "
            "attention_probs_dropout_prob=0."
        )
    score_mod: Callable[..., Tensor] | None = None
    if positions is not None:
        query_pos, key_pos = positions
        to_position = torch.einsum("bhid,shd->bhis", query * scaling, key_pos)
        from_position = torch.einsum("bhjd,shd->bhjs", key * scaling, query_pos)
        slots, most = layout.slots, layout.slots.size(0) // 2

        def with_positions(value: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            slot = slots[(query - key).clamp(-most, most) + most]
            return value + to_position[row, head, query, slot] + from_position[row, head, key, slot]

        score_mod = with_positions

    on_gpu = query.device.type == "cuda"
    attend = _compiled_flex_attention() if on_gpu and not torch.compiler.is_compiling() else _flex_attention()
    blocks = layout.shared("blocks", lambda: layout.mask.blocks(query.size(0)))
    options = _TILES if on_gpu else None
    context = attend(query, key, value, score_mod=score_mod, block_mask=blocks, scale=scaling, kernel_options=options)
    return context.transpose(1, 2), None


def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention  # pyright: ignore[reportReturnType] - a tuple only where statistics are asked for


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(_flex_attention())


# Functions of the attention interface that know relative positions, and make what they need of a Layout.
flex_attention.takes_layout = True  # pyright: ignore[reportFunctionMemberAccess]
_OURS: dict[str, Callable[..., Any]] = {"eager": eager_attention, "flex_attention": flex_attention}
_DENSE = ("eager", "sdpa")


class Layout:
    """What all layers share in one pass: who may attend whom, relative or rotary positions, cache, implementation.

    implementation: "eager", "sdpa", "flex_attention" or another name in transformers' ALL_ATTENTION_FUNCTIONS. Such a
    function gets queries, keys and values [B, H, T or K, d], attention_mask as the model got it, scaling, dropout,
    is_causal, and `options`, the model's other keyword arguments; rotary positions follow position_ids literally. One
    that has an attribute takes_layout gets this object as `layout`, no attention_mask, and `positions`, the position
    table as queries and as keys [S, H, d] or None. Decoding, with few scores, leaves these to "sdpa".
    """

    def __init__(
        self, config: GPTBertConfig, implementation: str, mask: AttentionMask, past: int, cache: Cache | None,
        attention_mask: Tensor | None, position_ids: Tensor | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.config, self.mask, self.past, self.cache, self.options = config, mask, past, cache, options
        self.total, self.given = mask.total, attention_mask
        length, device = mask.first.size(1), mask.first.device
        self.function = attention_function(implementation)
        self.takes_layout = getattr(self.function, "takes_layout", False)
        if self.takes_layout and (past or length == 1):
            implementation, self.takes_layout = "sdpa", False
            self.function = attention_function(implementation)
        self._shared: dict[str, Any] = {}
        self.all_states = False  # whether the states of all layers are asked for, and not the last ones alone
        self.implementation = implementation
        self.new = torch.arange(past, self.total, device=device)  # where the new tokens stand in the cache
        self.attends = mask.attends()
        self.allowed: Tensor | None = None
        if config.position_embedding == "rope":
            foreign = not knows_layout(implementation)
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
            places = position_ids.to(device) if foreign and position_ids is not None else self.new[None]
            angles = places.double()[..., None] * config.rope_theta**-steps
            self.cos, self.sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)  # [B, 1, T, d/2]
            self.allowed = self._smallest_mask() if implementation in _DENSE else None
        else:
            self.slots = slots_by_distance(config.position_bucket_size, config.max_position_embeddings).to(device)
            if implementation in _DENSE:
                most = config.max_position_embeddings - 1
                distance = self.new[:, None] - torch.arange(self.total, device=device)
                self.pair_slots = self.slots[distance.clamp(-most, most) + most]  # [T, K]
                self.allowed = self._dense_mask()

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """What an implementation makes of this layout once for all layers."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def _smallest_mask(self) -> Tensor | None:
        """Bool [B or 1, 1, T or 1, K] for rotary attention; None where is_causal says all."""
        mask = self.mask
        if self.implementation == "sdpa" and mask.plain and mask.pairs is None:
            length = mask.first.size(1)
            if mask.real is None and (not mask.causal or self.past == 0 or length == 1):
                return None
            if mask.real is not None and (not mask.causal or length == 1):
                return (mask.real | ~mask.real.any(dim=-1, keepdim=True))[:, None, None, :]
        return self._dense_mask()

    def _dense_mask(self) -> Tensor:
        """Bool [B or 1, 1, T, K]. Queries that attend nothing may attend anything: their context is zeroed."""
        allowed = self.mask.dense()
        return allowed if self.attends is None else allowed | ~self.attends[:, None, :, None]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Layout":
        """The same for a layer on another device; accelerate calls this where a device map spreads the layers."""

        def to_device(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, to_device(value))
        moved.mask, moved._shared = AttentionMask(*map(to_device, self.mask)), {}
        return moved

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float,
        positions: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Context [B, T, D], and the probabilities [B, H, T, K] where the implementation returns them.

        query [B, H, T, d]; key, value [B, H, K, d]. positions: the table as queries and as keys, each [S, H, d].
        """
        options, mask, causal = dict(self.options), self.given, self.mask.causal
        if self.takes_layout:
            options, mask = {**options, "layout": self, "positions": positions}, None
        elif self.implementation in _DENSE:
            mask = self.allowed
            if positions is not None:
                bias = scaling * self.position_scores(query, key, *positions)
                mask = bias.masked_fill(~self.allowed, torch.finfo(query.dtype).min)  # pyright: ignore[reportOptionalOperand]
                mask = mask if self.implementation == "eager" else mask.to(query.dtype)
            causal = causal and mask is None and query.size(2) > 1  # what PyTorch calls causal
        elif positions is not None:
            raise ValueError(
                f"attn_implementation={self.implementation!r} knows no relative positions: load the model with 'sdpa', "
                "'flex_attention' or 'eager'."
            )
        context, weights = self.function(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, is_causal=causal, **options
        )
        context = context.reshape(query.size(0), query.size(2), -1)  # of [B, T, H, d], or [B * T, D] from vLLM
        return context if self.attends is None else context.masked_fill(~self.attends[..., None], 0.0), weights

    def position_scores(self, query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor) -> Tensor:
        """Content-to-position and position-to-content scores [B, H, T, K] of query [B, H, T, d], key [B, H, K, d]."""
        batch, heads, length, _ = query.shape
        index = self.pair_slots.expand(batch, heads, length, self.total)
        to_position = torch.einsum("bhid,shd->bhis", query, key_pos).gather(-1, index)
        if length == 1:  # decoding: each key meets one position, so the others need not be scored
            from_position = torch.einsum("bhjd,jhd->bhj", key, query_pos[self.pair_slots[0]]).unsqueeze(-2)
        else:
            table = torch.einsum("bhjd,shd->bhjs", key, query_pos)
            from_position = table.gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        return to_position.float() + from_position.float()


def knows_layout(implementation: str) -> bool:
    """Whether it is one that masks and packed texts are made for here, and not by who registered it."""
    return implementation in _DENSE or getattr(attention_function(implementation), "takes_layout", False)


def attention_function(implementation: str) -> Callable[..., Any]:
    """The function of this name, ours or one of the attention interface."""
    return _OURS.get(implementation) or ALL_ATTENTION_FUNCTIONS[implementation]
