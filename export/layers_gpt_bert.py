"""Layers of GPT-BERT and LTG-BERT for the transformers library; an exported folder holds a copy of this file.

Parameters have the published names. Tensors are batch first: B rows of T new tokens with K keys (cached ones and new
ones), H heads of d features, D = H * d, S = 2 * position_bucket_size - 1 relative positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_gpt_bert import Layout, rotate
from .configuration_gpt_bert import GPTBertConfig


class Embedding(nn.Module):
    """Words, and with relative positions the table that all layers' position queries and keys are made from."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps, elementwise_affine=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.has_table = config.position_embedding != "rope"
        if self.has_table:
            self.relative_embedding = nn.Parameter(torch.empty(2 * config.position_bucket_size - 1, config.hidden_size))
            self.relative_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the word table [B, T, D] -> embeddings [B, T, D], and the position table [S, D] or None."""
        table = self.relative_layer_norm(self.relative_embedding) if self.has_table else None
        return self.dropout(self.word_layer_norm(words)), table


class Attention(GradientCheckpointingLayer):
    """Pre-norm attention with relative positions (disentangled, as in DeBERTa) or rotary ones; no residual."""

    def __init__(self, config: GPTBertConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, index
        # Read by functions of the attention interface; whether a pass is causal they are told each time.
        self.is_causal, self.num_key_value_groups, self.head_dim = config.is_decoder, 1, config.head_dim
        width = config.hidden_size
        self.heads = (config.num_attention_heads, config.head_dim)
        self.gated = config.model_type == "gpt-bert"
        self.in_proj_qk = nn.Linear(width, 2 * width)
        if self.gated:
            self.in_proj_vg = nn.Linear(width, 2 * width)
        else:
            self.in_proj_v = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.pre_layer_norm = nn.LayerNorm(width, config.layer_norm_eps, elementwise_affine=False)
        self.post_layer_norm = nn.LayerNorm(width, config.layer_norm_eps, elementwise_affine=False)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def project_positions(self, table: Tensor, cache: Cache | None, past: int) -> tuple[Tensor, Tensor]:
        """The position table as queries and as keys, each [S, H, d].

        While texts are written (no gradients) a cache keeps them beside its keys and values, and no longer than those:
        past is the number of its tokens, and with an empty cache they are computed anew.
        """
        keep = cache is not None and not self.training and not torch.is_grad_enabled()
        kept = cache.__dict__.setdefault("projected_positions", {}) if cache is not None and keep else {}
        if past == 0 or self.layer_idx not in kept:
            kept[self.layer_idx] = self.in_proj_qk(self.dropout(table)).unflatten(-1, (2, *self.heads)).unbind(-3)
        return kept[self.layer_idx]

    def forward(self, x: Tensor, table: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] -> [B, T, D], and the probabilities [B, H, T, K] where the implementation has them."""
        x = self.pre_layer_norm(x)
        query, key = self.in_proj_qk(x).unflatten(-1, (2, *self.heads)).permute(2, 0, 3, 1, 4)  # each [B, H, T, d]
        value, gate = self.in_proj_vg(x).chunk(2, dim=-1) if self.gated else (self.in_proj_v(x), None)
        value = value.unflatten(-1, self.heads).transpose(1, 2)
        if table is None:
            query, key = rotate(query, layout.cos, layout.sin), rotate(key, layout.cos, layout.sin)
        if layout.cache is not None:
            places = {"cache_position": layout.new}  # transformers 4 cannot place new tokens in a static cache without
            key, value = layout.cache.update(key, value, self.layer_idx, places)
            if key.size(2) < layout.total:
                raise ValueError(
                    f"The cache kept {key.size(2)} of {layout.total} tokens, and all are attended: take sliding_window "
                    "out of the configuration."
                )
            key, value = key[:, :, : layout.total], value[:, :, : layout.total]  # a static cache is longer
        scaling, drop, positions = 1 / math.sqrt(self.head_dim), 0.0, None
        if table is not None:
            scaling = 1 / math.sqrt(3 * self.head_dim)
            drop = self.dropout.p if self.training else 0.0  # with rotary positions, pretraining drops none either
            positions = self.project_positions(table, layout.cache, layout.past)
        context, probabilities = layout.attend(self, query, key, value, scaling, drop, positions)
        if gate is not None:
            context = context * F.gelu(gate)
        return self.dropout(self.out_proj(self.post_layer_norm(context))), probabilities


class TanhGEGLU(nn.Module):
    """The first half of the features times GELU (its tanh form) of the second."""

    def forward(self, x: Tensor) -> Tensor:
        linear, gate = x.chunk(2, dim=-1)
        return linear * F.gelu(gate, approximate="tanh")


class FeedForward(GradientCheckpointingLayer):
    """Pre-norm GEGLU without the residual connection. `mlp` has the published indices."""

    def __init__(self, config: GPTBertConfig, index: int) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps, elementwise_affine=False),
            nn.Linear(width, 2 * inner, bias=False),
            TanhGEGLU(),
            nn.LayerNorm(inner, eps, elementwise_affine=False),
            nn.Linear(inner, width, bias=False),
            nn.Dropout(config.hidden_dropout_prob),
        )
        for number in (1, 4):
            self.mlp[number].init_scale = math.sqrt(1 / (2 * (1 + index)))  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class DepthWeightedAveraging(nn.Module):
    """Weights of the averages over depth: number k mixes the embeddings and the outputs of sublayers 0 to k."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.alphas = nn.ParameterList(torch.empty(k + 2) for k in range(sublayers))

    def forward(self, number: int, states: list[Tensor]) -> Tensor:
        """Average of the states so far, each [B, T, D]."""
        weights = self.alphas[number]
        mixed = weights[0] * states[0]
        for weight, state in zip(weights[1:], states[1:], strict=True):
            mixed = torch.addcmul(mixed, weight, state)
        return mixed


class Encoder(nn.Module):
    """The layers, each an attention and a feed-forward sublayer."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.attention_layers = nn.ModuleList(Attention(config, index) for index in layers)
        self.mlp_layers = nn.ModuleList(FeedForward(config, index) for index in layers)
        self.averages = config.model_type == "gpt-bert"
        if self.averages:
            self.dwa_modules = DepthWeightedAveraging(2 * config.num_hidden_layers)

    def forward(self, x: Tensor, table: Tensor | None, layout: Layout) -> tuple[list[Tensor], list[Tensor | None]]:
        """Embeddings [B, T, D] -> these and the hidden states after each layer, and each layer's probabilities."""
        hidden, weights, states = [x], [], [x]
        for index, (attention, feed_forward) in enumerate(zip(self.attention_layers, self.mlp_layers, strict=True)):
            output, probabilities = attention(x, table, layout)
            x = self.join(2 * index, x.to(output.device) + output, states)
            output = feed_forward(x)  # device maps may place each sublayer on another device
            x = self.join(2 * index + 1, x.to(output.device) + output, states)
            hidden.append(x)
            weights.append(probabilities)
        return hidden, weights

    def join(self, number: int, x: Tensor, states: list[Tensor]) -> Tensor:
        """The next sublayer's input, after sublayer `number`; notes x among the states."""
        if not self.averages:
            return x
        states.append(x)
        return self.dwa_modules(number, states)


class Head(nn.Module):
    """Transform and projection of hidden states. `nonlinearity` has the published indices."""

    def __init__(self, config: GPTBertConfig, outputs: int, dropout: float) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.nonlinearity = nn.Sequential(
            nn.LayerNorm(width, eps, elementwise_affine=False),
            nn.Linear(width, width),
            nn.GELU(),
            nn.LayerNorm(width, eps, elementwise_affine=False),
            nn.Dropout(dropout),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinearity(x)


def new_head(config: GPTBertConfig, outputs: int) -> Head:
    """A head to be trained, with the configuration's dropout for classifiers."""
    dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return Head(config, outputs, dropout)
