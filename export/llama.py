"""Llama, Qwen3 and EuroBERT: transformers' configurations and parameters, and ours, both ways.

They are one shape: RMS norms before sublayers and at the end, rotary positions, SwiGLU, grouped queries; Qwen3 with
norms of queries and keys. Llama and Qwen3 predict the next token from each state, as everything here does, so that a
decoder's logits under causal attention stay what they were while it learns to fill in masks. EuroBERT predicts a masked
token from that token's own state, for which the configuration says `predict_masked_from` "own".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_config import ModelConfig, ModelConfigError
from ops.rope_scaling import rope_type

# Keys of ours: their name there, and what they are where a configuration leaves them out.
_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("intermediate_size", 11008),
    "num_hidden_layers": ("num_hidden_layers", 32),
    "num_attention_heads": ("num_attention_heads", 32),
    "num_key_value_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "layer_norm_eps": ("rms_norm_eps", 1e-6),
    "hidden_act": ("hidden_act", "silu"),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
}
# What a model may have otherwise than the preset, besides those: it is no part of the function of the weights.
_FREE = {
    "attention_probs_dropout_prob", "hidden_dropout_prob", "initializer", "pad_vocab_to_multiple_of",
    "position_bucket_size", "rope_theta", "rope_scaling",
}  # fmt: skip


@dataclass
class LlamaForm:
    """One of the family, by its model_type; an export.native.NativeForm."""

    model_type: str
    TRANSFORMERS_CLASS: str
    NOTE: str
    own: bool = False  # predicts a masked token from its own state

    def read_configuration(self, values: Mapping[str, Any]) -> ModelConfig:
        """ModelConfig of a config.json of the class. Raises ModelConfigError."""
        if values.get("use_sliding_window") or "sliding_attention" in (values.get("layer_types") or ()):
            raise ModelConfigError("it has layers with sliding windows, which only follow layers without here")
        rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
        if rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelConfigError("partial_rotary_factor is not 1; all features of a head are rotated here")
        if rope_type(rope) in ("default", ""):
            rope = {}
        found: dict[str, Any] = {ours: values.get(theirs, default) for ours, (theirs, default) in _KEYS.items()}
        return ModelConfig(
            **found, rope_theta=theta, rope_scaling=rope or None, model_type=self.model_type, **self._fixed(found)
        )

    def _fixed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that follow from others: EuroBERT's scores have biases where its feed-forward has."""
        if not self.own:
            return {}
        return {"predict_masked_from": "own", "decoder_bias": given["mlp_bias"]}

    def native_problem(self, config: ModelConfig) -> str:
        """Why the class cannot be this model, in a clause; "" where it can."""
        values = config.to_dict()
        given = {key: value for key, value in values.items() if key in _KEYS or key in _FREE}
        same = ModelConfig(**given, model_type=self.model_type, **self._fixed(given)).to_dict()
        # A decoder never predicts masked tokens; and the position buckets of models without are nothing.
        free = _FREE | ({"predict_masked_from"} if not self.own else set())
        if self.model_type == "qwen3" and config.mlp_bias:
            return "it has mlp_bias true, which Qwen3 does not know"
        other = [f"{key} {value!r}" for key, value in values.items() if key not in free and same[key] != value]
        return f"it has {', '.join(other)}" if other else ""

    def native_configuration(self, config: ModelConfig) -> dict[str, Any]:
        """config.json of the class, where `native_problem` knows none; without ids of special tokens."""
        theta, scaling = config.rope_theta, {"rope_type": rope_type(config.rope_scaling), **(config.rope_scaling or {})}
        if scaling["rope_type"] == "ntk":  # there it is a base of its own
            theta *= float(scaling["factor"]) ** (config.head_dim / (config.head_dim - 2))
            scaling = {"rope_type": "default"}
        return {
            "architectures": [self.TRANSFORMERS_CLASS],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, (theirs, _) in _KEYS.items()},
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_theta": theta, **scaling},
            # Names of before transformers 5, which other programs read.
            "rope_theta": theta,
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        }

    def our_parameters(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Parameters under our names, in float32; what is unknown keeps its name. Raises ModelConfigError."""
        named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        tied = named.get("lm_head.weight")
        if config.tie_word_embeddings and tied is not None:
            if not torch.equal(tied, named.get("embed_tokens.weight", tied)):
                raise ModelConfigError("tie_word_embeddings is true, but lm_head.weight differs from the word table")
            del named["lm_head.weight"]
        found: dict[str, Tensor] = {}
        for ours, parts in _names(config).items():
            if all(part in named for part in parts):
                found[ours] = torch.cat([named.pop(part) for part in parts]).float()
        found |= {name: tensor for name, tensor in named.items() if not name.endswith("rotary_emb.inv_freq")}
        return found

    def their_parameters(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Parameters under the class's names."""
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        found: dict[str, Tensor] = {}
        for ours, parts in _names(config).items():
            if ours not in tensors:
                continue
            tensor = tensors[ours]
            if ours in ("embedding.word_embedding.weight", "classifier.nonlinearity.5.weight"):
                tensor = tensor[: config.vocab_size]  # without rows that only fill up the table
            sizes = {1: [len(tensor)], 2: [queries, keys] if "in_proj_qk" in ours else [config.intermediate_size] * 2}
            for part, piece in zip(parts, tensor.split(sizes[len(parts)]), strict=True):
                found[part if part.startswith("lm_head.") else f"model.{part}"] = piece.contiguous()
        return found


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameters, each with theirs (without "model.") that lie one above the other in it."""
    names: dict[str, tuple[str, ...]] = {
        "embedding.word_embedding.weight": ("embed_tokens.weight",),
        "classifier.input_layer_norm.weight": ("norm.weight",),
        "classifier.nonlinearity.5.weight": ("lm_head.weight",),
        "classifier.nonlinearity.5.bias": ("lm_head.bias",),
    }
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"transformer.attention_layers.{layer}.", f"transformer.mlp_layers.{layer}."
        theirs = f"layers.{layer}."
        names |= {
            f"{attention}input_layer_norm.weight": (f"{theirs}input_layernorm.weight",),
            f"{attention}query_layer_norm.weight": (f"{theirs}self_attn.q_norm.weight",),
            f"{attention}key_layer_norm.weight": (f"{theirs}self_attn.k_norm.weight",),
            f"{mlp}input_layer_norm.weight": (f"{theirs}post_attention_layernorm.weight",),
        }
        for kind in ("weight", "bias"):
            query, key, value, output = (f"{theirs}self_attn.{one}_proj.{kind}" for one in "qkvo")
            names |= {
                f"{attention}in_proj_qk.{kind}": (query, key),
                f"{attention}in_proj_v.{kind}": (value,),
                f"{attention}out_proj.{kind}": (output,),
                # There the half that goes through the activation has a name of its own; here it comes second.
                f"{mlp}mlp.1.{kind}": (f"{theirs}mlp.up_proj.{kind}", f"{theirs}mlp.gate_proj.{kind}"),
                f"{mlp}mlp.4.{kind}": (f"{theirs}mlp.down_proj.{kind}",),
            }
    return names


_DECODER = (
    "it predicts the next token under causal attention, as before; bidirectional rows, in which it also predicts the "
    "token after each state, are new to it"
)
FORMS = {
    "llama": LlamaForm("llama", "LlamaForCausalLM", _DECODER),
    "qwen3": LlamaForm("qwen3", "Qwen3ForCausalLM", _DECODER),
    "eurobert": LlamaForm(
        "eurobert", "EuroBertForMaskedLM",
        'predict_masked_from is "own": in bidirectional rows a masked token is predicted from its own state, as it was;'
        " causal rows are new to it",
        own=True,
    ),
}  # fmt: skip
