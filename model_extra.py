"""GPT-BERT (Charpentier and Samuel, 2024): LTG-BERT with a gate in attention and depth-weighted averaging."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor, nn

from model import LTGBert
from model_config import MODEL_CLASSES, ModelConfig
from model_layers import Attention, Encoder, linear_of_norm
from model_protocol import PretrainingModel


class GatedAttention(Attention):
    """Attention whose context is multiplied by GELU of a second projection of its input."""

    def add_value_projection(self) -> None:
        self.in_proj_vg = nn.Linear(self.config.hidden_size, sum(self.widths), self.config.attention_bias)

    def value_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        queries, keys = self.widths
        value, gate = linear_of_norm(self.in_proj_vg, self.input_layer_norm, x).split((keys, queries), dim=-1)
        return value, gate


class DepthWeightedAveraging(nn.Module):
    """The weights of all averages over depth; at first each passes on its newest state alone."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.alphas = nn.ParameterList(torch.zeros(k + 2) for k in range(sublayers))
        with torch.no_grad():
            for alpha in self.alphas:
                alpha[-1] = 1.0


class DepthWeightedEncoder(Encoder):
    """LTG-BERT's layers with gated attention and an average over depth after each sublayer, or one of the two."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.depth_weighted_averaging:
            self.dwa_modules = DepthWeightedAveraging(2 * config.num_hidden_layers)

    def attention_class(self) -> type[Attention]:
        return GatedAttention if self.config.attention_gate else Attention

    def depth_weights(self) -> Sequence[Tensor] | None:
        return list(self.dwa_modules.alphas) if self.config.depth_weighted_averaging else None


class GPTBert(LTGBert):
    """GPT-BERT for masked and causal language modelling, and all other shapes of ModelConfig; used as LTGBert is."""

    model_type: ClassVar[str] = "gpt-bert"
    encoder_class: ClassVar[type[Encoder]] = DepthWeightedEncoder


def model_class(model_type: str) -> type[PretrainingModel]:
    """The class that model_config.MODEL_CLASSES names, imported when it is asked for."""
    module, name = MODEL_CLASSES[model_type].rsplit(".", 1)
    return getattr(import_module(module), name)


def build_model(config: ModelConfig, generator: torch.Generator | None = None) -> PretrainingModel:
    """The model that `config.model_type` names, with random weights from `generator` or PyTorch's global one."""
    return model_class(config.model_type)(config, generator)
