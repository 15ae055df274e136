"""ModernBERT (Warner et al., 2024, arXiv 2412.13663): transformers' configuration and parameters, and ours, both ways.

Its head predicts a hidden token from that token's own state, ours from the state before it. So the configuration says
`predict_masked_from` "own": in rows without causal attention logits i are then made from state i + 1, with its head as
it is, and what the model knows of masked tokens is kept exactly. Under causal attention, which it has never seen, state
i predicts the token at i + 1, as always. Its causal rows begin with that new task; its masked ones go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model_config import ModelConfig, ModelConfigError
from ops.rope_scaling import ntk_theta, rope_type

MODEL_TYPE: str = "modernbert"
TRANSFORMERS_CLASS: str = "ModernBertForMaskedLM"
NOTE: str = (
    'predict_masked_from is "own": in bidirectional rows a masked token is predicted from its own state, as it was; '
    "in causal rows the next token from the state before it, which the model has to learn"
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Keys of its configuration that ours has, too: their name there, and what they are where it leaves them out.
_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50368),
    "hidden_size": ("hidden_size", 768),
    "intermediate_size": ("intermediate_size", 1152),
    "num_hidden_layers": ("num_hidden_layers", 22),
    "num_attention_heads": ("num_attention_heads", 12),
    "max_position_embeddings": ("max_position_embeddings", 8192),
    "layer_norm_eps": ("norm_eps", 1e-5),
    "norm_bias": ("norm_bias", False),
    "hidden_act": ("hidden_activation", "gelu"),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "classifier_bias": ("classifier_bias", False),
    "decoder_bias": ("decoder_bias", True),
    "tie_word_embeddings": ("tie_word_embeddings", True),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "hidden_dropout_prob": ("mlp_dropout", 0.0),
    "initializer_range": ("initializer_range", 0.02),
}


def read_configuration(values: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json of transformers' ModernBertForMaskedLM. Raises ModelConfigError."""
    if (activation := values.get("classifier_activation", "gelu")) != "gelu":
        raise ModelConfigError(f'classifier_activation is "{activation}"; the head here has "gelu" alone')
    if values.get("rope_scaling") is not None:
        raise ModelConfigError("rope_scaling is for layers with windows, too, which keep their positions here")
    found: dict[str, Any] = {ours: values.get(theirs, default) for ours, (theirs, default) in _KEYS.items()}
    rope = values.get("rope_parameters") or {}
    everywhere, local = (rope.get(kind) or {} for kind in (_FULL, _SLIDING))
    if local.get("rope_type", "default") != "default":
        raise ModelConfigError("rope_parameters scale layers with windows, which keep their positions here")
    found["rope_theta"] = everywhere.get("rope_theta", values.get("global_rope_theta", 160000.0))
    if everywhere.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in everywhere.items() if key != "rope_theta"}
    every = _global_every(values, found["num_hidden_layers"])
    windows = {"sliding_window": 0, "global_attn_every_n_layers": 1, "local_rope_theta": 0.0}
    if every != 1:
        theta = local.get("rope_theta", values.get("local_rope_theta", 10000.0)) or found["rope_theta"]
        windows = {
            "sliding_window": values.get("local_attention", 128) // 2,
            "global_attn_every_n_layers": every,
            "local_rope_theta": theta,
        }
    return ModelConfig(model_type=MODEL_TYPE, predict_masked_from="own", **found, **windows)


def _global_every(values: Mapping[str, Any], layers: int) -> int:
    """ModelConfig.global_attn_every_n_layers. Raises ModelConfigError where no number describes the layers."""
    types = values.get("layer_types")
    if types is None:
        return int(values.get("global_attn_every_n_layers", 3))
    for every in range(layers + 1):
        if list(types) == [_FULL if every and layer % every == 0 else _SLIDING for layer in range(layers)]:
            return every
    raise ModelConfigError(f"layer_types is {types}; here every n-th layer from the first on is global")


def native_problem(config: ModelConfig) -> str:
    """Why transformers' ModernBertForMaskedLM cannot be this model, in a clause; "" where it can."""
    free = {*_KEYS, "rope_theta", "rope_scaling", "sliding_window", "global_attn_every_n_layers", "local_rope_theta"}
    given = {key: value for key, value in config.to_dict().items() if key in free}
    same = ModelConfig(**{**given, "model_type": MODEL_TYPE, "predict_masked_from": "own"}).to_dict()
    known = {"model_type", "initializer", "position_bucket_size", "pad_vocab_to_multiple_of"}
    other = [f"{key} {value!r}" for key, value in config.to_dict().items() if key not in known and same[key] != value]
    if other:
        return f"it has {', '.join(other)}, where ModernBERT differs"
    return ""


def native_configuration(config: ModelConfig) -> dict[str, Any]:
    """config.json of ModernBertForMaskedLM, where `native_problem` knows none; without ids of special tokens."""
    rotary = [config.rotary(layer) for layer in range(config.num_hidden_layers)]
    everywhere = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None and rope_type(config.rope_scaling) == "ntk":  # there another base
        everywhere["rope_theta"] = ntk_theta(config.head_dim, config.rope_theta, config.rope_scaling["factor"])
    elif config.rope_scaling is not None:
        everywhere |= {**config.rope_scaling, "rope_type": rope_type(config.rope_scaling)}
    local = {"rope_theta": config.local_rope_theta or config.rope_theta, "rope_type": "default"}
    return {
        "architectures": [TRANSFORMERS_CLASS],
        "model_type": MODEL_TYPE,
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _KEYS.items()},
        "classifier_activation": "gelu",
        "embedding_dropout": config.hidden_dropout_prob,
        "local_attention": 2 * config.sliding_window,
        "layer_types": [_FULL if one.window is None else _SLIDING for one in rotary],
        "rope_parameters": {_FULL: everywhere, _SLIDING: local},
        # Names of before transformers 5, which other programs read.
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "global_rope_theta": everywhere["rope_theta"],
        "local_rope_theta": local["rope_theta"],
    }


def _names(config: ModelConfig) -> dict[str, str]:
    """Our parameters that are theirs as they are, with the names they have there."""
    names = {
        "embedding.word_embedding.weight": "model.embeddings.tok_embeddings.weight",
        "embedding.word_layer_norm": "model.embeddings.norm",
        "classifier.input_layer_norm": "model.final_norm",
        "classifier.nonlinearity.1": "head.dense",
        "classifier.transform_layer_norm": "head.norm",
        "classifier.nonlinearity.5": "decoder",
    }
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"transformer.attention_layers.{layer}.", f"transformer.mlp_layers.{layer}."
        theirs = f"model.layers.{layer}."
        names |= {
            f"{attention}input_layer_norm": f"{theirs}attn_norm",
            f"{attention}out_proj": f"{theirs}attn.Wo",
            f"{mlp}input_layer_norm": f"{theirs}mlp_norm",
            f"{mlp}mlp.4": f"{theirs}mlp.Wo",
        }
    return names


def our_parameters(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Parameters under our names, in float32, from those of ModernBertForMaskedLM; what is unknown keeps its name.
    Raises ModelConfigError."""
    tied, words = tensors.get("decoder.weight"), tensors.get("model.embeddings.tok_embeddings.weight")
    if config.tie_word_embeddings and tied is not None and words is not None and not torch.equal(tied, words):
        raise ModelConfigError("tie_word_embeddings is true, but decoder.weight differs from the word table")
    found: dict[str, Tensor] = {}
    back = {theirs: ours for ours, theirs in _names(config).items()}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name == "decoder.weight" and config.tie_word_embeddings:
            continue
        if module.endswith("attn.Wqkv"):
            ours = f"transformer.attention_layers.{layer}."
            query, key, value = tensor.chunk(3)
            found |= {f"{ours}in_proj_qk.{kind}": torch.cat([query, key]), f"{ours}in_proj_v.{kind}": value}
        elif module.endswith("mlp.Wi"):  # there the half that goes through the activation comes first
            found[f"transformer.mlp_layers.{layer}.mlp.1.{kind}"] = _halves_exchanged(tensor)
        else:
            found[back.get(name) or f"{back.get(module, module)}.{kind}"] = tensor
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


def their_parameters(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Parameters of ModernBertForMaskedLM from ours."""
    names, found = _names(config), {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        place, _, part = module.rpartition(".")
        layer = f"model.layers.{name.split('.')[2]}." if name.startswith("transformer.") else ""
        if part == "in_proj_qk":
            found[f"{layer}attn.Wqkv.{kind}"] = torch.cat([tensor, tensors[f"{place}.in_proj_v.{kind}"]])
        elif module.endswith("mlp.1"):
            found[f"{layer}mlp.Wi.{kind}"] = _halves_exchanged(tensor)
        elif part != "in_proj_v":
            found[names.get(name) or f"{names[module]}.{kind}"] = tensor
    for name in ("model.embeddings.tok_embeddings.weight", "decoder.weight"):
        if name in found:  # without rows that only fill up the table
            found[name] = found[name][: config.vocab_size]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _halves_exchanged(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat([second, first])
