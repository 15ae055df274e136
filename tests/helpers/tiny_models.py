"""Small models for the tests of model.py and model_extra.py."""

from __future__ import annotations

import torch
from torch import Tensor

from model import LTGBert, ModelConfig
from model_extra import build_model
from ops import rope

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 60,
    "max_position_embeddings": 20,
    "position_bucket_size": 6,
}


def make_model(kind: tuple[str, str] = ("gpt-bert", "relative"), dropout: float = 0.0, **changes) -> LTGBert:
    values = SIZES | {"model_type": kind[0], "position_embedding": kind[1]}
    values |= {"attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout} | changes
    model = build_model(ModelConfig.from_dict(values), torch.Generator().manual_seed(0))
    with torch.no_grad():  # so that no averaging weight is 0 and hides a term
        for name, parameter in model.named_parameters():
            if "alphas" in name:
                parameter += 0.1
    return model


def each_document_alone(query, key, value, boundaries, longest, causal, window) -> Tensor:
    """What a variable-length kernel does, with windows as flash attention counts them."""
    before, after = rope._sides(causal, window)
    parts = []
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        if start == end:  # room for a document that did not come
            continue
        ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]
        allowed = ((before < 0) | (ahead >= -before)) & ((after < 0) | (ahead <= after))
        parts.append(
            rope._masked_attention(query[None, start:end], key[None, start:end], value[None, start:end], allowed)
        )
    return torch.cat(parts, 1)[0]
