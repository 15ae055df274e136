"""LTG-BERT (Samuel et al., 2023) for masked and causal language modelling: embedding, layers, head.

Parameters have the names of the published code, so its checkpoints load. The model knows no ranks, flags or files, and
ops/ chooses the kernels that compute it. ModelConfig, with the switches that make other shapes of it, is in
model_config.py, the layers are in model_layers.py; GPT-BERT, which adds a gate and depth-weighted averaging, in
model_extra.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_config import MODEL_CLASSES, ModelConfig
from model_config import ModelConfigError as ModelConfigError
from model_layers import EMBEDDING_SITE, HEAD_SITE, Encoder, TokenDropout, optional_norm
from model_protocol import PretrainingModel
from ops.attention import AttentionMetadata, choose_relative_metadata, query_dtype
from ops.dropout import DropoutKeys, DropoutStates, drop_tokens, dropout_states, random_keys
from ops.rope import RopeAttentionMetadata, VarlenSizes, rope_metadata, windowed_metadata
from ops.rope_scaling import Rotary


class Embedding(nn.Module):
    """Words, and with relative positions the table that all layers' position queries and keys are made from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embedding = nn.Embedding(config.padded_vocab_size, config.embedding_size)
        if config.embedding_size != config.hidden_size:  # factorised, as in ALBERT (Lan et al., 2020)
            self.projection = nn.Linear(config.embedding_size, config.hidden_size, bias=False)
        self.word_layer_norm = optional_norm(config, config.hidden_size, config.embedding_norm)
        self.dropout = TokenDropout(config.hidden_dropout_prob, EMBEDDING_SITE)
        if config.position_embedding == "relative":
            slots = 2 * config.position_bucket_size - 1
            self.relative_embedding = nn.Parameter(torch.empty(slots, config.hidden_size))
            self.relative_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, states: DropoutStates | None) -> tuple[Tensor, Tensor | None]:
        """int64 [B, T] -> embedded words [B, T, D], and the position table [2b-1, D] (None with "rope")."""
        words = self.word_embedding(input_ids)
        if self.config.embedding_size != self.config.hidden_size:
            words = self.projection(words)
        words = self.dropout(self.word_layer_norm(words), states)
        if self.config.position_embedding == "rope":
            return words, None
        return words, self.relative_layer_norm(self.relative_embedding)


class Output(nn.Module):
    """Scores of all words: the word table, which it may share with the embedding, and a bias of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not config.tie_word_embeddings:
            self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.embedding_size))
        if config.decoder_bias:
            self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.padding = config.padded_vocab_size - config.vocab_size

    def forward(self, x: Tensor, word_embedding: Tensor) -> Tensor:
        """x [..., E], word_embedding [V, E] -> logits [..., V]; those of ids that only fill up the table are -1e30."""
        weight, bias = getattr(self, "weight", word_embedding), getattr(self, "bias", None)
        if self.padding:
            bias = weight.new_zeros(len(weight) - self.padding) if bias is None else bias
            bias = F.pad(bias, (0, self.padding), value=-1e30)
        return F.linear(x, weight, bias)


class Classifier(nn.Module):
    """The language modelling head. Its keys are the published list's indices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, embedded = config.hidden_size, config.embedding_size
        self.input_layer_norm = optional_norm(config, width, config.norm_position != "post")
        parts: dict[str, nn.Module] = {"5": Output(config)}
        if config.head_transform or embedded != width:
            bias = config.head_transform and config.classifier_bias
            parts = {"1": nn.Linear(width, embedded, bias), **parts}
        self.nonlinearity = nn.ModuleDict(parts)
        self.transform_layer_norm = optional_norm(config, embedded, config.head_transform)

    def forward(self, x: Tensor, word_embedding: Tensor, states: DropoutStates | None) -> Tensor:
        """x [..., D], word_embedding [V, E], states (tokens [...]) or None -> logits [..., V]."""
        x = self.input_layer_norm(x)
        if "1" in self.nonlinearity:
            x = self.nonlinearity["1"](x)
        if self.config.head_transform:
            x = self.transform_layer_norm(F.gelu(x))
        x = drop_tokens(x, self.config.hidden_dropout_prob, states, HEAD_SITE)
        return self.nonlinearity["5"](x, word_embedding)


class LTGBert(PretrainingModel):
    """LTG-BERT for masked and causal language modelling.

    In evaluation mode nothing is dropped. In training mode dropout is counter-based (ops/dropout.py): keyed by the
    DropoutKeys that are passed, or by fresh ones from PyTorch's generator where none are.
    """

    model_type: ClassVar[str] = "ltg-bert"
    takes_ends: ClassVar[bool] = True
    encoder_class: ClassVar[type[Encoder]] = Encoder
    roles: ClassVar[Mapping[str, str]] = {
        "embedding": "embedding",
        "attention_layers": "attention",
        "mlp_layers": "mlp",
        "dwa": "dwa",
        "classifier": "head",
    }

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        """Random weights from `generator`, or from PyTorch's global one."""
        if MODEL_CLASSES[config.model_type].rpartition(".")[2] != type(self).__name__:
            config = config.as_type(self.model_type)
        super().__init__(config)
        self.embedding = Embedding(config)
        self.transformer = self.encoder_class(config)
        self.classifier = Classifier(config)
        self.initialize(generator)
        # Queries and keys, values and gate, the halves of a GLU. Where heads share keys, queries and gate count as
        # several projections of the keys' size.
        above = 1 + config.num_attention_heads // config.num_key_value_heads
        self.projections = {
            "in_proj_qk.weight": above,
            "in_proj_vg.weight": above,
            "mlp.1.weight": 1 + config.gated_mlp,
        }
        if config.tie_word_embeddings:
            self.register_load_state_dict_pre_hook(_accept_published_keys)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: as published, truncated normal matrices, smaller ones in deeper feed-forwards; with
        initializer "normal" all matrices from one normal distribution."""
        published, std = self.config.initializer == "ltg", math.sqrt(2 / (5 * self.config.hidden_size))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and published:
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
            elif parameter.ndim == 2:
                parameter.normal_(std=self.config.initializer_range, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()
        if not published:
            return
        for index, layer in enumerate(self.transformer.mlp_layers):
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(math.sqrt(1 / (2 * (1 + index))))

    @classmethod
    def flops_per_token(cls, config: ModelConfig, row_length: int, target_fraction: float) -> float:
        """Two per multiply-add, backward twice forward. Attention counts the full row, of which documents and causality
        save some."""
        width, embedded = config.hidden_size, config.embedding_size
        queries = config.num_attention_heads * config.head_dim
        windows = [config.rotary(index).window for index in range(config.num_hidden_layers)]
        seen = sum(row_length if window is None else min(row_length, 2 * window + 1) for window in windows)
        factor = width * embedded * (embedded != width)
        head = (width * embedded if config.head_transform else factor) + embedded * config.padded_vocab_size
        layers = config.num_hidden_layers * sum(config.matrices_of_a_layer)
        return 6.0 * (factor + layers + 2 * seen * queries + target_fraction * head)

    def backward_order(self) -> list[nn.Parameter]:
        """Head and layers from the last to the first. What all layers use comes last: embeddings (a tied head's too),
        weights of depth averaging."""
        encoder, embedded = self.transformer, set(self.embedding.parameters())
        layers = [part for pair in zip(encoder.attention_layers, encoder.mlp_layers, strict=True) for part in pair]
        parts = [reversed(list(part.parameters())) for part in (self.classifier, *reversed(layers))]
        early = [parameter for part in parts for parameter in part if parameter not in embedded]
        return list(dict.fromkeys([*early, *self.parameters()]))

    def compiled_parts(self) -> Iterable[nn.Module]:
        """Every sublayer, the head, and the dropout of embedded words."""
        dropout = [self.embedding.dropout] if self.config.hidden_dropout_prob else []
        return *self.transformer.attention_layers, *self.transformer.mlp_layers, self.classifier, *dropout

    def encode(
        self, input_ids: Tensor, document_ids: Tensor, causal: bool | Tensor, dropout: DropoutKeys | None = None
    ) -> Tensor:
        """As in PretrainingModel, which says of each argument what it is."""
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
        return dropout_states(
            keys, length, max(config.hidden_size, config.embedding_size, length), 2 * config.position_bucket_size - 1
        )

    def predict(self, hidden: Tensor, states: DropoutStates | None = None) -> Tensor:
        """Logits [..., V] of the *next* token from hidden [..., D]. states: what the head's dropout is keyed by in
        training mode, its `tokens` of shape [...]; fresh random ones where they are left out."""
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
    """Hidden states [B, T, D] of which position i predicts the token at i + 1: that token's own, where it is an input
    that i sees; in causal rows never."""
    following = torch.cat([hidden[:, 1:], hidden[:, -1:]], dim=1)
    if isinstance(causal, bool):
        return hidden if causal else following
    causal = causal.to(hidden.device)
    unseen = (
        causal[:, None] if causal.ndim == 1 else causal <= torch.arange(1, hidden.size(1) + 1, device=hidden.device)
    )
    return torch.where(unseen[..., None], hidden, following)


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
