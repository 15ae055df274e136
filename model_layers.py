"""The layers of a transformer, in the shape that ModelConfig gives them: norms, attention, feed-forward, encoder.

Parameters have the names of LTG-BERT's published code. What comes before and after the layers is in model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_config import ModelConfig
from ops.attention import AttentionMetadata, attend
from ops.dropout import DropoutStates, drop_tokens, dropout, head_keys, token_keys
from ops.gated_norm import ACTIVATIONS, REFERENCE, GatedNorm, choose_gated_norm
from ops.residual import FusedResidualStream, ResidualStream, residual_stream

# Sites of dropout (ops/dropout.py): two of the whole model, then four of each layer.
EMBEDDING_SITE, HEAD_SITE, _FIRST_LAYER_SITE = 0, 1, 2
_RELATIVE, _PROBABILITIES, _ATTENTION_OUTPUT, _FEED_FORWARD, _SITES_PER_LAYER = range(5)

_GELU_FORMS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


class Norm(nn.Module):
    """Layer norm or RMS norm (Zhang and Sennrich, 2019) of the last `width` features, as the configuration has it."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.rms, self.shape, self.eps = config.norm == "rms_norm", (width,), config.layer_norm_eps
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        if not self.rms:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(at_least_float32(x), self.shape, self.weight, self.eps)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class InputNorm(Norm):
    """Norm of a sublayer's input: what the residual stream, which does plain layer norm itself, has left of it.

    In training mode its weights are left to `linear`, which multiplies them into a matrix: that is an operation on
    [out, in] numbers instead of [tokens, in], forwards and backwards.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] as `ResidualStream.normalised` gives it -> the normalised input, in training mode unweighted."""
        if self.rms:
            return F.rms_norm(at_least_float32(x), self.shape, None if self.training else self.weight, self.eps)
        if self.training:
            return x
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """`layer` of what `forward` gives, [..., D]."""
        weight, bias = layer.weight, layer.bias
        if self.training and self.bias is not None:
            shift = (weight * self.bias).sum(1)
            bias = shift if bias is None else bias + shift
        if self.training and self.weight is not None:
            weight = weight * self.weight
        return F.linear(x, weight, bias)


def linear_of_norm(layer: nn.Module, norm: nn.Module | None, x: Tensor) -> Tensor:
    """A linear layer of x, which is the output of `norm` where that is an InputNorm."""
    return norm.linear(layer, x) if isinstance(norm, InputNorm) and isinstance(layer, nn.Linear) else layer(x)


def optional_norm(config: ModelConfig, width: int, wanted: bool, kind: type[Norm] = Norm) -> nn.Module:
    """The configuration's norm, or what does nothing."""
    return kind(config, width) if wanted else nn.Identity()


class TokenDropout(nn.Module):
    """Dropout of tokens at one site; a module, so that it can be compiled into one kernel."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, states: DropoutStates | None) -> Tensor:
        """[B, T, D] -> the same."""
        return drop_tokens(x, self.p, states, self.site)


class Sublayer(nn.Module):
    """What attention and feed-forward of a layer share: norms as `norm_position` says, and the residual connection."""

    def __init__(self, config: ModelConfig, output_site: int, input_norm: bool = True) -> None:
        super().__init__()
        self.config, self.output_site = config, output_site
        self.input_norm = input_norm and config.norm_position != "post"
        self.input_layer_norm = optional_norm(config, config.hidden_size, self.input_norm, InputNorm)
        self.output_layer_norm = optional_norm(config, config.hidden_size, config.norm_position == "sandwich")
        self.sum_layer_norm = optional_norm(config, config.hidden_size, config.norm_position == "post")

    def read(self, stream: ResidualStream | FusedResidualStream) -> Tensor:
        """What this sublayer is called with, [B, T, D]."""
        return stream.normalised() if self.input_norm else stream.x

    def add_to(
        self, stream: ResidualStream | FusedResidualStream, update: Tensor, p: float, states: DropoutStates | None
    ) -> None:
        """Add this sublayer's output [B, T, D], of which a fraction p is dropped, to the residual stream."""
        stream.add(update, p, states, self.output_site)
        stream.x = self.sum_layer_norm(stream.x)


class Attention(Sublayer):
    """Multi-head attention of layer `index`, between the residual stream and the dropout of its output. With fewer
    heads of keys and values than of queries (K < H), each serves H / K queries (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        first_site = _FIRST_LAYER_SITE + index * _SITES_PER_LAYER
        super().__init__(config, first_site + _ATTENTION_OUTPUT, index > 0 or config.first_norm)
        self.first_site = first_site
        queries, keys = self.widths = tuple(
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.in_proj_qk = nn.Linear(config.hidden_size, queries + keys, config.attention_bias)
        self.add_value_projection()
        self.out_proj = nn.Linear(queries, config.hidden_size, config.attention_bias)
        self.context_layer_norm = optional_norm(config, queries, config.context_norm)
        if config.qk_norm:  # Henry et al. (2020), as in Qwen3
            self.query_layer_norm = nn.RMSNorm(config.head_dim, config.layer_norm_eps)
            self.key_layer_norm = nn.RMSNorm(config.head_dim, config.layer_norm_eps)

    def add_value_projection(self) -> None:
        """Create what `value_and_gate` uses."""
        self.in_proj_v = nn.Linear(self.config.hidden_size, self.widths[1], self.config.attention_bias)

    def queries_and_keys(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Queries above keys [..., H + K, d] of x [..., D]: the normalised input, with its norm, or the position
        table."""
        config = self.config
        pair = linear_of_norm(self.in_proj_qk, norm, x).unflatten(-1, (-1, config.head_dim))
        if not config.qk_norm:
            return pair
        query, key = at_least_float32(pair).split((config.num_attention_heads, config.num_key_value_heads), dim=-2)
        return torch.cat([self.query_layer_norm(query), self.key_layer_norm(key)], dim=-2).to(pair.dtype)

    def value_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [B, T, K d], and what gates the context (before GELU) [B, T, H d] or None, of the normalised input."""
        return linear_of_norm(self.in_proj_v, self.input_layer_norm, x), None

    def output(self, context: Tensor, gate: Tensor | None, gated_norm: GatedNorm = REFERENCE) -> Tensor:
        """Context [B, T, H d] and gate, as `value_and_gate` returns it, -> the sublayer's output [B, T, D]."""
        if gate is None:
            context = self.context_layer_norm(context)
        elif self.config.context_norm and self.config.bare_norm:
            context = gated_norm.separate(context, gate, self.config.layer_norm_eps, "none")
        else:
            context = self.context_layer_norm(context * F.gelu(gate))
        return self.output_layer_norm(self.out_proj(context))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None,
        metadata: AttentionMetadata,
        states: DropoutStates | None,
        gated_norm: GatedNorm = REFERENCE,
    ) -> Tensor:
        """The output before dropout [B, T, D] for x [B, T, D] as the residual stream gives it.

        positions: the table [2b-1, D], or None with "rope". metadata: of the batch, the same for all layers.
        states: what dropout is keyed by; None drops nothing.
        """
        config, p = self.config, self.config.attention_probs_dropout_prob
        x = self.input_layer_norm(x)
        query_key = self.queries_and_keys(x, self.input_layer_norm)  # [B, T, H + K, d]
        value, gate = self.value_and_gate(x)
        value = value.unflatten(-1, (-1, config.head_dim))
        keys = columns = query_key_pos = None
        if positions is not None:
            if states is not None and p > 0:
                site = self.first_site + _PROBABILITIES
                keys = head_keys(states.tokens, site, config.num_attention_heads)  # [B, H, T]
                columns = states.columns
                positions = dropout(positions, p, token_keys(states.table, self.first_site + _RELATIVE), columns)
            query_key_pos = self.queries_and_keys(positions)  # [2b-1, H + K, d]
        context = attend(query_key, value, query_key_pos, metadata, p, keys, columns)  # [B, T, H, d]
        return self.output(context.flatten(-2), gate, gated_norm)


class FeedForward(Sublayer):
    """Feed-forward network of layer `index`, between the residual stream and the dropout of its output. With
    `gated_mlp` one of the GLU kind (Shazeer, 2020): GEGLU, SwiGLU, ... Its keys are the published list's indices."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, _FIRST_LAYER_SITE + index * _SITES_PER_LAYER + _FEED_FORWARD)
        expand = nn.Linear(config.hidden_size, (1 + config.gated_mlp) * config.intermediate_size, config.mlp_bias)
        contract = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.mlp = nn.ModuleDict({"1": expand, "4": contract})
        self.inner_layer_norm = optional_norm(config, config.intermediate_size, config.mlp_norm)

    def forward(self, x: Tensor, gated_norm: GatedNorm = REFERENCE) -> Tensor:
        """The output before dropout [B, T, D] for x [B, T, D] as the residual stream gives it."""
        config = self.config
        x = self.input_layer_norm(x)
        inner = linear_of_norm(self.mlp["1"], self.input_layer_norm, x)  # [B, T, 2 F], value beside gate; [B, T, F]
        if config.has_gated_norm:
            inner = gated_norm.paired(inner, config.layer_norm_eps, _GELU_FORMS[config.hidden_act])
        else:
            of_pair, of_gate = gated_norm.plain, ACTIVATIONS[config.hidden_act]
            inner = self.inner_layer_norm(of_pair(inner, config.hidden_act) if config.gated_mlp else of_gate(inner))
        return self.output_layer_norm(self.mlp["4"](inner))


class Encoder(nn.Module):
    """The layers, each an attention and a feed-forward sublayer that add to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers)
        self.attention_layers = nn.ModuleList(self.attention_class()(config, index) for index in layers)
        self.mlp_layers = nn.ModuleList(FeedForward(config, index) for index in layers)

    def attention_class(self) -> type[Attention]:
        """The class of all attention sublayers."""
        return Attention

    def forward(
        self, x: Tensor, positions: Tensor | None, metadata: Sequence[AttentionMetadata], states: DropoutStates | None
    ) -> Tensor:
        """Embedded words [B, T, D] -> hidden [B, T, D]; the other arguments are those of `Attention.forward`, metadata
        for each layer."""
        config, device = self.config, x.device
        stream = residual_stream(x, self.stream_eps(), 2 * config.num_hidden_layers, self.depth_weights())
        gate_norm = choose_gated_norm(device, config.num_attention_heads * config.head_dim)
        feed_forward_norm = choose_gated_norm(device, config.intermediate_size)
        for attention, feed_forward, of_batch in zip(self.attention_layers, self.mlp_layers, metadata, strict=True):
            attention, feed_forward = cast(Attention, attention), cast(FeedForward, feed_forward)
            update = attention(attention.read(stream), positions, of_batch, states, gate_norm)
            attention.add_to(stream, update, config.attention_probs_dropout_prob, states)
            update = feed_forward(feed_forward.read(stream), feed_forward_norm)
            feed_forward.add_to(stream, update, config.hidden_dropout_prob, states)
        return stream.x

    def stream_eps(self) -> float | None:
        """Of the layer norm that the residual stream does; None where it does none."""
        return self.config.layer_norm_eps if self.config.stream_normalises else None

    def depth_weights(self) -> Sequence[Tensor] | None:
        """For sublayer k the weights [k + 2] of an average over all states so far; None for plain sums."""
        return None
