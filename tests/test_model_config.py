"""ModelConfig: those of the repository, JSON and back, and one sentence for what cannot be a model."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import SIZES

from model import LTGBert, ModelConfig, ModelConfigError
from model_extra import GPTBert, build_model

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(("name", "millions"), [("tiny", 1.4), ("small", 30), ("base", 119), ("large", 415)])
def test_configurations_in_the_repository(name: str, millions: float):
    config = ModelConfig.from_json(CONFIGS / f"{name}.json")
    with torch.device("meta"):
        model = build_model(config)
    assert isinstance(model, GPTBert)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.02)
    assert model.config == config
    assert config.attention_probs_dropout_prob == config.hidden_dropout_prob == 0.1


ROPE = {"position_embedding": "rope"}


def test_configuration_round_trip(tmp_path: Path):
    config = ModelConfig.from_dict(SIZES | {"model_type": "ltg-bert", "position_embedding": "rope", "rope_theta": 5e4})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_json(path) == config
    model = build_model(config)
    assert type(model) is LTGBert
    assert model.config == config
    assert GPTBert(config).config.model_type == "gpt-bert"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 2"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a whole number"),
        ({"vocab_size": 60.5}, "vocab_size is 60.5; it must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0; it must be at least 0 and below 1"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob is -0.1"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0; it must be above 0"),
        ({"position_embedding": "sine"}, 'position_embedding is "sine"; choose "relative" or "rope"'),
        ({"position_embedding": "rope", "hidden_size": 30}, "heads of 15 features"),
        ({"predict_masked_from": "next"}, 'predict_masked_from is "next"; choose "previous" or "own"'),
        ({"sliding_window": 8}, 'sliding_window is 8, which position_embedding "rope" alone knows'),
        (ROPE | {"sliding_window": 8}, "global_attn_every_n_layers 1, by which every layer is global"),
        (ROPE | {"local_rope_theta": 1e4}, "but sliding_window is 0, so that no layer has a window"),
        (ROPE | {"sliding_window": -1}, "sliding_window is -1; it must be at least 0"),
        (ROPE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'take "ntk"'),
        (ROPE | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; it must be at least 1"),
        (ROPE | {"rope_scaling": {"type": "llama3", "factor": 2}}, 'needs the key "original_max_position_embeddings"'),
        (ROPE | {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, 'knows no key "beta"'),
        (ROPE | {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        ({"position_bucket_size": 1}, "position_bucket_size is 1; it must be at least 2"),
        ({"max_position_embeddings": 4}, "max_position_embeddings is 4; with position_bucket_size 6 it must be at"),
        ({"norm_bias": 1}, "norm_bias is 1; it must be true or false"),
        ({"norm": "batch_norm"}, 'norm is "batch_norm"; choose "layer_norm" or "rms_norm"'),
        ({"norm": "rms_norm", "norm_bias": True}, 'norm_bias is true but norm "rms_norm" has no bias'),
        ({"norm_position": "post"}, 'depth_weighted_averaging is true but norm_position is "post"'),
        ({"attention_gate": True, "model_type": "ltg-bert"}, 'attention_gate is true but model_type is "ltg-bert"'),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"model_type": "bert"}, 'model_type is "bert"; choose'),
        ({"hidden_sizes": 32}, 'unknown key "hidden_sizes"; did you mean "hidden_size"?'),
        ({"zzz": 1}, 'unknown key "zzz"; the keys are hidden_size, '),
    ],
)
def test_impossible_configurations(tmp_path: Path, changes: dict, message: str):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(SIZES | changes))
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_configurations(tmp_path: Path):
    path = tmp_path / "config.json"
    with pytest.raises(ModelConfigError, match="there is no such model configuration"):
        ModelConfig.from_json(path)
    with pytest.raises(ModelConfigError, match="cannot be read"):
        ModelConfig.from_json(tmp_path)
    for content, message in (
        (b"{", "is not a JSON file"),
        (b"\xff\xfe\x00", "is not a JSON file"),
        (b"[1]", "holds no JSON object"),
        (json.dumps({k: v for k, v in SIZES.items() if k != "vocab_size"}).encode(), '"vocab_size" is missing'),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelConfigError, match=message):
            ModelConfig.from_json(path)


def test_configuration_is_frozen():
    config = ModelConfig.from_dict(SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 64  # type: ignore[misc] - what must be refused
