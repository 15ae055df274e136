"""Llama, Qwen3 and EuroBERT: parity with transformers' own classes, read from them and written for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_exports import library, tokenizer_text

from export import from_huggingface, to_huggingface
from export.llama import FORMS
from export.load_model import load_model
from model import ModelConfig, ModelConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = [
    ("llama", "LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 8}),
    ("qwen3", "Qwen3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "hidden_act": "gelu"}),
    ("eurobert", "EuroBertConfig", {"mlp_bias": True, "num_key_value_heads": 1}),
]


def their_model(model_type: str, config_class: str, changes: dict[str, Any]) -> Any:
    """A model of transformers' own, all of whose parameters are random."""
    transformers = library()
    if not hasattr(transformers, config_class):  # releases before the family; requirements.lock's has all of them
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES | changes)
    model = getattr(transformers, FORMS[model_type].TRANSFORMERS_CLASS)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize(("model_type", "config_class", "changes"), FAMILIES)
@torch.no_grad()
def test_logits_are_theirs_and_the_way_back_gives_the_same_model(
    model_type: str, config_class: str, changes: dict[str, Any], tmp_path: Path, capsys
):
    """Imported from shards with an index, a model that training starts from; the native folder is MODEL, too."""
    theirs = their_model(model_type, config_class, changes)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer_text())
    assert from_huggingface.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert to_huggingface.main([str(tmp_path / "ours"), str(tmp_path / "native"), "--native"]) == 0
    again, told = type(theirs).from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(told.values())
    ids = torch.randint(5, 320, (2, 23), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=0)
    assert to_huggingface.main([str(tmp_path / "ours"), str(tmp_path / "code")]) == 2
    assert "by its model_type; try --native" in capsys.readouterr().err
    for folder in ("ours", "native"):
        model, _, config = load_model(tmp_path / folder)
        logits = model.predict(model.encode(ids, torch.zeros_like(ids), model_type != "eurobert"))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert config.predict_masked_from == ("own" if model_type == "eurobert" else "previous")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"use_sliding_window": True}, "sliding windows"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"hidden_act": "relu"}, 'hidden_act is "relu"'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling "dynamic" changes the base'),
    ],
)
def test_other_shapes_are_refused(values: dict[str, Any], told: str):
    with pytest.raises(ModelConfigError, match=told):
        FORMS["qwen3"].read_configuration(SIZES | values)


def test_native_classes_take_their_own_shape_alone():
    base = FORMS["llama"].read_configuration(SIZES).to_dict()
    base |= {"pad_vocab_to_multiple_of": 64, "hidden_dropout_prob": 0.1, "initializer": "ltg"}  # no part of it
    assert FORMS["llama"].native_problem(ModelConfig(**base)) == ""
    for changes, told in (
        ({"attention_gate": True}, "attention_gate True"),
        ({"norm_position": "sandwich"}, "norm_pos"),
    ):
        assert told in FORMS["llama"].native_problem(ModelConfig(**base | changes))
    assert "mlp_bias true" in FORMS["qwen3"].native_problem(ModelConfig(**base | {"qk_norm": True, "mlp_bias": True}))
    assert "predict_masked_from" in FORMS["eurobert"].native_problem(ModelConfig(**base | {"model_type": "eurobert"}))
    stretched = FORMS["llama"].native_configuration(
        ModelConfig(**base | {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}})
    )
    assert stretched["rope_parameters"] == {"rope_theta": pytest.approx(1e4 * 4 ** (12 / 10)), "rope_type": "default"}
