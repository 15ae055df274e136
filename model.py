"""LTG-BERT (Samuel et al., 2023): its blocks, and the model for masked and causal language modelling.

Parameters have the names of the published code, so its checkpoints load. The model knows no ranks, flags or files, and
ops/ chooses the kernels that compute it. ModelConfig is in model_config.py; GPT-BERT, which adds a gate and
depth-weighted averaging, in model_extra.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_config import ModelConfig
from model_config import ModelConfigError as ModelConfigError
from model_protocol import PretrainingModel
from ops.attention import AttentionMetadata, attend, choose_relative_metadata, query_dtype
from ops.dropout import (
    DropoutKeys,
    DropoutStates,
    drop_tokens,
    dropout,
    dropout_states,
    head_keys,
    random_keys,
    token_keys,
)
from ops.gated_norm import REFERENCE, GatedNorm, choose_gated_norm
from ops.residual import residual_stream
from ops.rope import RopeAttentionMetadata, VarlenSizes, rope_metadata, windowed_metadata
from ops.rope_scaling import Rotary

# Sites of dropout (ops/dropout.py): two of the whole model, then four of each layer.
_EMBEDDING_SITE, _HEAD_SITE, _FIRST_LAYER_SITE = 0, 1, 2
_RELATIVE, _PROBABILITIES, _ATTENTION_OUTPUT, _FEED_FORWARD, _SITES_PER_LAYER = range(5)


class Embedding(nn.Module):
    """Words, and with relative positions the table that all layers' position queries and keys are made from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "relative":
            slots = 2 * config.position_bucket_size - 1
            self.relative_embedding = nn.Parameter(torch.empty(slots, config.hidden_size))
            self.relative_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, states: DropoutStates | None) -> tuple[Tensor, Tensor | None]:
        """int64 [B, T] -> embedded words [B, T, D], and the position table [2b-1, D] (None with "rope")."""
        words = F.layer_norm(self.word_embedding(input_ids), (self.config.hidden_size,), eps=self.config.layer_norm_eps)
        words = drop_tokens(words, self.config.hidden_dropout_prob, states, _EMBEDDING_SITE)
        if self.config.position_embedding == "rope":
            return words, None
        return words, self.relative_layer_norm(self.relative_embedding)


class Attention(nn.Module):
    """Multi-head attention of layer `index`, between the layer norm of its input and the dropout of its output."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.first_site = _FIRST_LAYER_SITE + index * _SITES_PER_LAYER
        self.output_site = self.first_site + _ATTENTION_OUTPUT
        self.in_proj_qk = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.add_value_projection()
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def add_value_projection(self) -> None:
        """Create what `value_and_gate` uses."""
        self.in_proj_v = nn.Linear(self.config.hidden_size, self.config.hidden_size)

    def value_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values, and what gates the context (before GELU) or None, each [B, T, D], from the normalised input."""
        return self.in_proj_v(x), None

    def output(self, context: Tensor, gate: Tensor | None, gated_norm: GatedNorm = REFERENCE) -> Tensor:
        """Context [B, T, D] and gate, as `value_and_gate` returns it, -> the sublayer's output [B, T, D]."""
        shape, eps = (self.config.hidden_size,), self.config.layer_norm_eps
        if gate is None:
            return self.out_proj(F.layer_norm(context, shape, eps=eps))
        return self.out_proj(gated_norm.separate(context, gate, eps, "none"))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None,
        metadata: AttentionMetadata,
        states: DropoutStates | None,
        gated_norm: GatedNorm = REFERENCE,
    ) -> Tensor:
        """The output before dropout [B, T, D] for the normalised input x [B, T, D].

        positions: the table [2b-1, D], or None with "rope". metadata: of the batch, the same for all layers.
        states: what dropout is keyed by; None drops nothing.
        """
        config, p = self.config, self.config.attention_probs_dropout_prob
        heads = (config.num_attention_heads, config.head_dim)
        query_key = self.in_proj_qk(x).unflatten(-1, (2, *heads))  # [B, T, 2, H, d]
        value, gate = self.value_and_gate(x)
        value = value.unflatten(-1, heads)
        keys = columns = query_key_pos = None
        if positions is not None:
            if states is not None and p > 0:
                keys = head_keys(states.tokens, self.first_site + _PROBABILITIES, heads[0])  # [B, H, T]
                columns = states.columns
                positions = dropout(positions, p, token_keys(states.table, self.first_site + _RELATIVE), columns)
            query_key_pos = self.in_proj_qk(positions).unflatten(-1, (2, *heads))  # [2b-1, 2, H, d]
        context = attend(query_key, value, query_key_pos, metadata, p, keys, columns)  # [B, T, H, d]
        return self.output(context.flatten(-2), gate, gated_norm)


class FeedForward(nn.Module):
    """GEGLU of layer `index`, between the layer norm of its input and the dropout of its output.

    Its keys are the published list's indices.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.output_site = _FIRST_LAYER_SITE + index * _SITES_PER_LAYER + _FEED_FORWARD
        expand = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        contract = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.mlp = nn.ModuleDict({"1": expand, "4": contract})

    def forward(self, x: Tensor, gated_norm: GatedNorm = REFERENCE) -> Tensor:
        """The output before dropout [B, T, D] for the normalised input x [B, T, D]."""
        pair = self.mlp["1"](x)  # [B, T, 2 F], value and gate side by side
        return self.mlp["4"](gated_norm.paired(pair, self.config.layer_norm_eps, "tanh"))


class Encoder(nn.Module):
    """The layers, each an attention and a feed-forward sublayer that add to the residual stream."""

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers)
        self.attention_layers = nn.ModuleList(self.attention_class(config, index) for index in layers)
        self.mlp_layers = nn.ModuleList(FeedForward(config, index) for index in layers)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None,
        metadata: Sequence[AttentionMetadata],
        states: DropoutStates | None,
    ) -> Tensor:
        """Embedded words [B, T, D] -> hidden [B, T, D]; the other arguments are those of `Attention.forward`, metadata
        for each layer."""
        config, device = self.config, x.device
        stream = residual_stream(x, config.layer_norm_eps, 2 * config.num_hidden_layers, self.depth_weights())
        gate_norm = choose_gated_norm(device, config.hidden_size)
        feed_forward_norm = choose_gated_norm(device, config.intermediate_size)
        for attention, feed_forward, of_batch in zip(self.attention_layers, self.mlp_layers, metadata, strict=True):
            update = attention(stream.normalised(), positions, of_batch, states, gate_norm)
            stream.add(update, config.attention_probs_dropout_prob, states, cast(Attention, attention).output_site)
            update = feed_forward(stream.normalised(), feed_forward_norm)
            stream.add(update, config.hidden_dropout_prob, states, cast(FeedForward, feed_forward).output_site)
        return stream.x

    def depth_weights(self) -> Sequence[Tensor] | None:
        """For sublayer k the weights [k + 2] of an average over all states so far; None for plain sums."""
        return None


class Output(nn.Module):
    """Scores of all words: the word table, which it shares with the embedding, and a bias of its own."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, x: Tensor, word_embedding: Tensor) -> Tensor:
        """x [..., D], word_embedding [V, D] -> logits [..., V]."""
        return F.linear(x, word_embedding, self.bias)


class Classifier(nn.Module):
    """The language modelling head. Its keys are the published list's indices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.nonlinearity = nn.ModuleDict({"1": transform, "5": Output(config.vocab_size)})

    def forward(self, x: Tensor, word_embedding: Tensor, states: DropoutStates | None) -> Tensor:
        """x [..., D], word_embedding [V, D], states (tokens [...]) or None -> logits [..., V]."""
        shape, eps = (self.config.hidden_size,), self.config.layer_norm_eps
        x = F.gelu(self.nonlinearity["1"](F.layer_norm(x, shape, eps=eps)))
        x = drop_tokens(F.layer_norm(x, shape, eps=eps), self.config.hidden_dropout_prob, states, _HEAD_SITE)
        return self.nonlinearity["5"](x, word_embedding)


class LTGBert(PretrainingModel):
    """LTG-BERT for masked and causal language modelling.

    In evaluation mode nothing is dropped. In training mode dropout is counter-based (ops/dropout.py): keyed by the
    DropoutKeys that are passed, or by fresh ones from PyTorch's generator where none are.
    """

    model_type: ClassVar[str] = "ltg-bert"
    encoder_class: ClassVar[type[Encoder]] = Encoder
    attention_projections: ClassVar[int] = 4  # query, key, value, output
    roles: ClassVar[Mapping[str, str]] = {
        "embedding": "embedding",
        "attention_layers": "attention",
        "mlp_layers": "mlp",
        "dwa": "dwa",
        "classifier": "head",
    }
    # Query and key; value and gate; the two halves of GEGLU.
    projections: ClassVar[Mapping[str, int]] = {"in_proj_qk.weight": 2, "in_proj_vg.weight": 2, "mlp.1.weight": 2}

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        """Random weights from `generator`, or from PyTorch's global one."""
        super().__init__(dataclasses.replace(config, model_type=self.model_type))
        self.embedding = Embedding(config)
        self.transformer = self.encoder_class(config)
        self.classifier = Classifier(config)
        self.initialize(generator)
        self.register_load_state_dict_pre_hook(_accept_published_keys)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, as published: truncated normal matrices, smaller ones in deeper feed-forwards."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()
        for index, layer in enumerate(self.transformer.mlp_layers):
            for parameter in layer.parameters():
                parameter.mul_(math.sqrt(1 / (2 * (1 + index))))

    @classmethod
    def flops_per_token(cls, config: ModelConfig, row_length: int, target_fraction: float) -> float:
        """Two per multiply-add, backward twice forward. Attention counts the full row, of which documents and causality
        save some."""
        width, inner = config.hidden_size, config.intermediate_size
        layer = cls.attention_projections * width * width + 3 * width * inner
        windows = [config.rotary(index).window for index in range(config.num_hidden_layers)]
        seen = sum(row_length if window is None else min(row_length, 2 * window + 1) for window in windows)
        head = width * width + width * config.vocab_size
        return 6.0 * (config.num_hidden_layers * layer + 2 * seen * width + target_fraction * head)

    def backward_order(self) -> list[nn.Parameter]:
        """Head and layers from the last to the first. What all layers use comes last: embeddings (a tied head's too),
        weights of depth averaging."""
        encoder, embedded = self.transformer, set(self.embedding.parameters())
        layers = [part for pair in zip(encoder.attention_layers, encoder.mlp_layers, strict=True) for part in pair]
        parts = [reversed(list(part.parameters())) for part in (self.classifier, *reversed(layers))]
        early = [parameter for part in parts for parameter in part if parameter not in embedded]
        return list(dict.fromkeys([*early, *self.parameters()]))

    def compiled_parts(self) -> Iterable[nn.Module]:
        """Every sublayer, and the head."""
        return *self.transformer.attention_layers, *self.transformer.mlp_layers, self.classifier

    def encode(
        self, input_ids: Tensor, document_ids: Tensor, causal: bool | Tensor, dropout: DropoutKeys | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] of input_ids int64 [B, T].

        document_ids: int64 [B, T]; tokens attend only inside their document (a run of one id), and -1 is padding,
        which attends nothing. causal: a bool, or bool [B] with one flag for each row. dropout: keys of the rows'
        dropout, used in training mode alone.
        """
        return self._encode(input_ids, document_ids, causal, dropout, None)[0]

    def _encode(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        causal: bool | Tensor,
        dropout: DropoutKeys | None,
        sizes: VarlenSizes | None,
    ) -> tuple[Tensor, DropoutStates | None]:
        if input_ids.ndim != 2 or input_ids.shape != document_ids.shape:
            raise ValueError(
                f"input_ids of shape {tuple(input_ids.shape)} and document_ids of shape {tuple(document_ids.shape)}: "
                "both must be [rows, row length]."
            )
        batch, length = input_ids.shape
        states = self._dropout_states(batch, length, input_ids.device, dropout)
        words, positions = self.embedding(input_ids, states)
        metadata = self._layer_metadata(self._attention_metadata(document_ids, causal, sizes))
        return self.transformer(words, positions, metadata, states), states

    def _layer_metadata(self, metadata: AttentionMetadata) -> list[AttentionMetadata]:
        """For each layer `metadata`, which is that of layers without a window, or what its window makes of it."""
        layers = [self.config.rotary(layer) for layer in range(self.config.num_hidden_layers)]
        local = next((rotary for rotary in layers if rotary.window is not None), None)
        if local is None or not isinstance(metadata, RopeAttentionMetadata):
            return [metadata] * len(layers)
        windowed = windowed_metadata(metadata, local)
        return [metadata if rotary.window is None else windowed for rotary in layers]

    def _attention_metadata(
        self, document_ids: Tensor, causal: bool | Tensor, sizes: VarlenSizes | None = None
    ) -> AttentionMetadata:
        config, dtype = self.config, query_dtype(self.embedding.word_embedding.weight)
        if config.position_embedding == "rope":
            everywhere = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
            return rope_metadata(document_ids, causal, everywhere, dtype, sizes)
        buckets = config.position_bucket_size, config.max_position_embeddings
        drops = self.training and config.attention_probs_dropout_prob > 0
        return choose_relative_metadata(document_ids, causal, buckets, config.head_dim, dtype, drops)

    def _dropout_states(
        self, rows: int, length: int, device: torch.device, keys: DropoutKeys | None
    ) -> DropoutStates | None:
        config = self.config
        if not self.training or config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0:
            return None
        keys = random_keys(rows, device) if keys is None else keys
        return dropout_states(keys, length, max(config.hidden_size, length), 2 * config.position_bucket_size - 1)

    def predict(self, hidden: Tensor, states: DropoutStates | None = None) -> Tensor:
        """Logits [..., V] of the *next* token from hidden [..., D].

        states: what the head's dropout is keyed by in training mode, its `tokens` of shape [...]; fresh random ones
        where they are left out.
        """
        if states is None:
            tokens = hidden[..., 0].numel()
            states = self._dropout_states(tokens, 1, hidden.device, None)
            states = states and states._replace(tokens=states.tokens.view(hidden.shape[:-1]))
        return self.classifier(hidden, self.embedding.word_embedding.weight, states)

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        causal: bool | Tensor,
        target_positions: Tensor | None = None,
        dropout: DropoutKeys | None = None,
        sizes: VarlenSizes | None = None,
    ) -> Tensor:
        """Logits [N, V] at target_positions, int64 [N] flat indices into B * T; [B, T, V] at all positions if None.

        sizes: spares models with "rope" a wait for the device. The other arguments are those of `encode`. With no
        target at all (N = 0) the result still depends on every parameter, with gradient zero.
        """
        hidden, states = self._encode(input_ids, document_ids, causal, dropout, sizes)
        if self.config.predict_masked_from == "own":
            hidden = _own_states(hidden, causal)
        if target_positions is not None:
            hidden = hidden.flatten(0, 1).index_select(0, target_positions)
            if states is not None:
                states = states._replace(tokens=states.tokens.flatten().index_select(0, target_positions))
        return self.predict(hidden, states)


def _own_states(hidden: Tensor, causal: bool | Tensor) -> Tensor:
    """Hidden states [B, T, D] of which position i predicts the token at i + 1: in rows without causal attention that
    token's own, where it is an input."""
    following = torch.cat([hidden[:, 1:], hidden[:, -1:]], dim=1)
    if isinstance(causal, bool):
        return hidden if causal else following
    return torch.where(causal.to(hidden.device)[:, None, None], hidden, following)


def _accept_published_keys(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Drop what published checkpoints hold besides parameters: position indices and the tied table's second name."""
    words = state_dict.get(f"{prefix}embedding.word_embedding.weight")
    tied = state_dict.pop(f"{prefix}classifier.nonlinearity.5.weight", None)
    if tied is not None and words is not None and not torch.equal(tied, words):
        raise ValueError(
            "classifier.nonlinearity.5.weight differs from embedding.word_embedding.weight, but the model ties them; "
            "this checkpoint is of another architecture."
        )
    for key in [key for key in state_dict if key.endswith(".position_indices")]:
        del state_dict[key]
