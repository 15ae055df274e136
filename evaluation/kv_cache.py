"""KV cache: causal decoding in which each token is computed once, from what its layers kept of the tokens before it.

A causal model's states never change when text is appended, so a layer needs of the past only its keys, its values and,
with relative positions, the score that each key gives to each slot of the position table. Everything else, the gate,
the feed-forward sublayers and the depth-weighted averages, belongs to the new tokens alone. `UncachedDecoder` is
the reference: it runs the whole model over the whole row each time.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model import LTGBert, ModelConfig
from model_layers import Attention, FeedForward
from ops.attention_metadata import bucket
from ops.residual import ResidualStream
from ops.rope import rotary_tables, rotate
from ops.rope_scaling import Rotary

_CHUNK = 256  # tokens of a prompt read at once: bounds the scores, [B, H, chunk, T]
_SMALLEST_CAPACITY = 64


class LanguageModel(Protocol):
    """The part of LTGBert that decoding uses."""

    def encode(self, input_ids: Tensor, document_ids: Tensor, causal: bool | Tensor, /) -> Tensor: ...

    def predict(self, hidden: Tensor, /) -> Tensor: ...

    def __call__(self, input_ids: Tensor, document_ids: Tensor, causal: bool, positions: Tensor, /) -> Tensor: ...


class UncachedDecoder:
    """Reference of CachedDecoder: runs the model over all tokens so far at each call."""

    def __init__(self, model: LanguageModel, padding: Tensor, prefix: bool = False) -> None:
        """As in CachedDecoder. prefix: what comes first is read in both directions, by a model that `takes_ends`."""
        self._model, self._padding, self._prefix, self._end = model, padding, prefix, 0
        self._ids = torch.empty(len(padding), 0, dtype=torch.int64, device=padding.device)

    def append(self, input_ids: Tensor) -> Tensor:
        """As in CachedDecoder."""
        self._ids = torch.cat([self._ids, input_ids], dim=1)
        self._end = self._end or self._ids.size(1)
        positions = torch.arange(self._ids.size(1), device=self._ids.device)
        document_ids = -(positions < self._padding[:, None]).long()
        causal = torch.full_like(self._ids, self._end) if self._prefix else True
        return self._model.encode(self._ids, document_ids, causal)[:, -1]

    def select_rows(self, rows: Tensor) -> None:
        """As in CachedDecoder."""
        self._ids, self._padding = self._ids[rows], self._padding[rows]


class CachedDecoder:
    """Reads B rows of one document each from left to right with `model`, which is in evaluation mode.

    Rows are as long as each other: shorter texts begin with padding, which nothing attends. Rows may grow beyond
    max_position_embeddings, as in `encode`."""

    def __init__(self, model: LTGBert, padding: Tensor) -> None:
        """padding: int64 [B], how many tokens at the start of each row are padding (whatever their ids)."""
        self._model, self._padding, self._length = model, padding, 0
        device = padding.device
        positions = None
        if model.config.position_embedding == "relative":
            positions = model.embedding.relative_layer_norm(model.embedding.relative_embedding)
        self._layers = [
            _AttentionCache(
                cast(Attention, layer), positions, model.config, model.config.rotary(index), len(padding), device
            )
            for index, layer in enumerate(model.transformer.attention_layers)
        ]

    def append(self, input_ids: Tensor) -> Tensor:
        """Append input_ids int64 [B, n], n >= 1, to the rows; return the hidden states [B, D] of the last of them."""
        hidden = torch.empty(0)
        for chunk in input_ids.split(_CHUNK, dim=1):
            hidden = self._append_chunk(chunk)
        return hidden

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows alone: int64 [B'], indices into the present batch; a row may be named several times."""
        self._padding = self._padding[rows]
        for layer in self._layers:
            layer.select_rows(rows)

    def _append_chunk(self, input_ids: Tensor) -> Tensor:
        encoder, start = self._model.transformer, self._length
        self._length += input_ids.size(1)
        positions = torch.arange(self._length, device=input_ids.device)
        distance = positions[start:, None] - positions  # [n, T]
        # A token of padding attends itself, so that no row of scores is empty; nothing else ever reads it.
        allowed = (distance >= 0) & (positions >= self._padding[:, None, None]) | (distance == 0)  # [B, n, T]
        bias = torch.zeros(allowed.shape, device=input_ids.device).masked_fill_(~allowed, -math.inf).unsqueeze(1)
        words, _ = self._model.embedding(input_ids, None)
        stream = ResidualStream(words, encoder.stream_eps(), encoder.depth_weights())
        for cache, feed_forward in zip(self._layers, encoder.mlp_layers, strict=True):
            cache.attention.add_to(stream, cache.attend(cache.attention.read(stream), distance, bias), 0.0, None)
            feed_forward = cast(FeedForward, feed_forward)
            feed_forward.add_to(stream, feed_forward(feed_forward.read(stream)), 0.0, None)
        return stream.x[:, -1]


class _AttentionCache:
    """One layer's attention and what it keeps of the tokens read: tensors [B, H, capacity, ...] that double when full.

    The position terms of score(i, j) = q_i.k_j + q_i.key_pos[s] + k_j.query_pos[s] depend on i - j >= 0 through the
    slot s alone. The second is looked up in a table of the new query, the third in one made when key j was read."""

    def __init__(
        self,
        attention: Attention,
        positions: Tensor | None,
        config: ModelConfig,
        rotary: Rotary,
        rows: int,
        device: torch.device,
    ) -> None:
        self.attention, self._config, self._rotary, self._length = attention, config, rotary, 0
        heads, width = config.num_attention_heads, config.head_dim
        self._groups = heads // config.num_key_value_heads  # queries of each key
        dtype = attention.out_proj.weight.dtype
        widths = [width, width]
        self._scale = 1 / math.sqrt(width)
        if positions is not None:
            self._scale = 1 / math.sqrt(3 * width)
            pair = attention.queries_and_keys(positions)[config.position_bucket_size - 1 :].permute(1, 2, 0)
            query_pos, key_pos = pair.split((heads, config.num_key_value_heads))
            self._query_pos, self._key_pos = query_pos, self._repeat(key_pos)  # [H, d, b]: slots of the past alone
            self._slots = bucket(
                torch.arange(config.max_position_embeddings, device=device),
                config.position_bucket_size,
                config.max_position_embeddings,
            )
            widths.append(config.position_bucket_size)
        # The scores of keys with each slot are by query heads.
        counts = (config.num_key_value_heads, config.num_key_value_heads, heads)
        self._kept = [
            torch.empty(rows, count, 0, size, dtype=dtype, device=device)
            for count, size in zip(counts, widths, strict=False)
        ]

    def attend(self, x: Tensor, distance: Tensor, bias: Tensor) -> Tensor:
        """Output [B, n, D] for the n newest tokens x [B, n, D] as the residual stream gives them. distance: int64 [n,
        T]. bias: float [B, 1, n, T]."""
        attention, config = self.attention, self._config
        x = attention.input_layer_norm(x)
        heads = (config.num_attention_heads, config.num_key_value_heads)
        query, key = attention.queries_and_keys(x).split(heads, dim=-2)  # [B, n, H, d], [B, n, K, d]
        value, gate = attention.value_and_gate(x)
        value = value.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        if config.position_embedding == "rope":
            places = torch.arange(self._length, self._length + x.shape[1], device=x.device)
            tables = rotary_tables(self._rotary, places)
            query, key = rotate(query, *tables), rotate(key, *tables)
            if self._rotary.window is not None:
                bias = bias.masked_fill(distance > self._rotary.window, -math.inf)
            key, value = self._append(key.transpose(1, 2), value)
            scores = (query.transpose(1, 2) * self._scale) @ self._repeat(key, 1).transpose(-1, -2)
        else:
            query, key = query.transpose(1, 2) * self._scale, key.transpose(1, 2)
            from_new = self._repeat(key, 1) @ (self._query_pos * self._scale)
            key, value, from_key = self._append(key, value, from_new)
            slots = self._slots[distance.clamp(0, config.max_position_embeddings - 1)]  # [n, T]
            index = slots.expand(query.size(0), heads[0], *slots.shape)
            scores = query @ self._repeat(key, 1).transpose(-1, -2)
            scores = scores + (query @ self._key_pos).gather(-1, index)
            scores = scores + from_key.gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        probabilities = (scores.float() + bias).softmax(dim=-1).to(value.dtype)
        context = (probabilities @ self._repeat(value, 1)).transpose(1, 2).flatten(-2)
        return attention.output(context, gate)

    def _repeat(self, x: Tensor, dim: int = 0) -> Tensor:
        """Keys' heads -> as many as queries have."""
        return x if self._groups == 1 else x.repeat_interleave(self._groups, dim)

    def select_rows(self, rows: Tensor) -> None:
        self._kept = [tensor[rows] for tensor in self._kept]

    def _append(self, *new: Tensor) -> list[Tensor]:
        """Keep the new tokens' tensors [B, H, n, ...]; return those of all tokens, [B, H, T, ...]."""
        start, self._length = self._length, self._length + new[0].size(2)
        capacity = self._kept[0].size(2)
        if self._length > capacity:
            more = max(_SMALLEST_CAPACITY, self._length, 2 * capacity) - capacity
            self._kept = [F.pad(tensor, (0, 0, 0, more)) for tensor in self._kept]
        for tensor, part in zip(self._kept, new, strict=True):
            tensor[:, :, start : self._length] = part
        return [tensor[:, :, : self._length] for tensor in self._kept]
