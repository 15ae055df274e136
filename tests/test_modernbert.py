"""transformers' ModernBERT becomes ours and goes back: hidden states, logits, configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_exports import library, tokenizer_text
from safetensors.torch import load_file

from export import from_huggingface, to_huggingface
from export.load_model import load_model
from export.modernbert import native_configuration, read_configuration
from model import ModelConfigError
from ops.rope_scaling import ntk_theta

LENGTH = 40


def published(folder: Path, **changes: Any) -> Any:
    """A small random ModernBertForMaskedLM in which every parameter matters, saved with a tokenizer."""
    transformers = library()
    torch.manual_seed(3)
    values = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "max_position_embeddings": 64, "local_attention": 8, "pad_token_id": 3,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, **changes,
    }  # fmt: skip
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_text())
    return model


SCALED = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 16,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False},
        {"rope_parameters": SCALED, "tie_word_embeddings": False, "hidden_activation": "silu"},
    ],
    ids=["published", "biases", "scaled"],
)
def test_imported_and_native_again(tmp_path: Path, capsys, changes: dict):
    """Two texts, of which one is shorter; hidden states and logits to 1e-5, and back the very same file."""
    theirs = published(tmp_path / "folder", **changes)
    assert from_huggingface.main([str(tmp_path / "folder"), str(tmp_path / "ours")]) == 0
    assert "predict_masked_from" in capsys.readouterr().out
    model, _, config = load_model(tmp_path / "ours")
    assert [config.rotary(layer).window for layer in range(4)] == [None, 4, 4, None]

    ids = torch.randint(5, 320, (2, LENGTH))
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [29]])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long(), output_hidden_states=True)
        documents = torch.where(real, 0, -1)
        hidden, logits = model.encode(ids, documents, False), model(ids, documents, False)
    final = model.classifier.input_layer_norm(hidden)
    torch.testing.assert_close(final[real], expected.hidden_states[-1][real], rtol=1e-5, atol=1e-5)
    # Position i predicts the token at i + 1 from that token's own state, which is theirs.
    read = real[:, 1:]
    torch.testing.assert_close(logits[:, :-1][read], expected.logits[:, 1:][read], rtol=1e-5, atol=1e-5)

    assert to_huggingface.main([str(tmp_path / "ours"), str(tmp_path / "back"), "--native"]) == 0
    first, back = (load_file(tmp_path / name / "model.safetensors") for name in ("folder", "back"))
    assert all(torch.equal(back[name], tensor) for name, tensor in first.items())
    again, told = library().AutoModelForMaskedLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(again) is type(theirs)
    assert not any(told.values())
    with torch.no_grad():
        torch.testing.assert_close(again(ids, attention_mask=real.long()).logits, expected.logits)


def test_configurations_of_before_transformers_5():
    """As the Hub's folders have them."""
    old = {
        "model_type": "modernbert", "num_hidden_layers": 22, "global_attn_every_n_layers": 3, "local_attention": 128,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_eps": 1e-5,
    }  # fmt: skip
    config = read_configuration(old)
    preset = json.loads((Path(__file__).parents[1] / "configs" / "modernbert_base.json").read_text())
    assert config.to_dict().items() >= preset.items()
    assert read_configuration(native_configuration(config)) == config
    longer = dataclasses.replace(config, rope_scaling={"type": "ntk", "factor": 4.0})
    assert read_configuration(native_configuration(longer)).rotary(0).theta == ntk_theta(64, 160000.0, 4.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2}, "every n-th layer"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "layers with windows, too"),
        ({"classifier_activation": "relu"}, "the head here has"),
        ({"hidden_activation": "quick_gelu"}, 'hidden_act is "quick_gelu"'),
    ],
)
def test_other_shapes_are_refused(changes: dict, told: str):
    values = {"model_type": "modernbert", "num_hidden_layers": 6, **changes}
    if "layer_types" in changes:
        values["layer_types"] = values["layer_types"][::-1]
    with pytest.raises(ModelConfigError, match=told):
        read_configuration(values)
