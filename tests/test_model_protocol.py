"""Protocol of a model: another shape trains, saves and resumes by the same program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import make_model
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines
from torch import Tensor, nn

import model_config
from model_config import ModelConfig, ModelConfigError
from model_extra import build_model, model_class
from model_protocol import PretrainingModel
from training.checkpoint import locate
from training.forward_backward import compile_layers


class PlainBlock(nn.Module):
    """Pre-norm attention and feed-forward, as in GPT-2."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_layer_norm, self.mlp_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._qkv(x))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.mlp_layer_norm(x))))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.attention_layer_norm(x)).chunk(3, dim=-1)


class PlainEncoder(PretrainingModel):
    """A pre-norm transformer with learned positions and a head of its own."""

    roles: ClassVar[Mapping[str, str]] = {"words": "embedding", "blocks": "layers"}

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__(config, generator)
        width = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        blocks = range(config.num_hidden_layers)
        self.blocks = nn.ModuleList(
            PlainBlock(width, config.intermediate_size, config.num_attention_heads) for _ in blocks
        )
        self.head = nn.Linear(width, config.vocab_size)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05, generator=generator)

    def encode(self, input_ids, document_ids, causal, dropout=None) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        causal = torch.as_tensor(causal, device=input_ids.device).expand(len(input_ids))
        past = (place[:, None] >= place) | ~causal[:, None, None]
        allowed = (document_ids[:, :, None] == document_ids[:, None]) & past  # padding attends padding, unscored
        x = self.words(input_ids) + self.positions(place)
        for block in self.blocks:
            x = block(x, allowed[:, None])
        return x

    def predict(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    @classmethod
    def flops_per_token(cls, config: ModelConfig, row_length: int, target_fraction: float) -> float:
        width = config.hidden_size
        layer = 4 * width**2 + 2 * width * config.intermediate_size + 2 * row_length * width
        return 6.0 * (config.num_hidden_layers * layer + target_fraction * width * config.vocab_size)


LAUNCH = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import model_config
model_config.MODEL_CLASSES["plain"] = "test_model_protocol.PlainEncoder"
if __name__ == "__main__":
    import {script}
    sys.exit({script}.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with a plain model, launchers that know it, and runs on one process and on two."""
    folder = tmp_path_factory.mktemp("protocol")
    inputs = make_inputs(folder / "inputs")
    sizes = json.loads((inputs / "model.json").read_text())
    (inputs / "model.json").write_text(json.dumps({**sizes, "model_type": "plain"}))
    for ranks, script in enumerate(("train_single_gpu", "train_multi_gpu")):
        launcher = folder / f"launch_{ranks}.py"
        launcher.write_text(LAUNCH.format(root=str(ROOT), script=script))
        run(flags(inputs, folder / "runs", f"ranks_{ranks}", **OPTIONS), ranks=2 * ranks, script=launcher)
    return folder


OPTIONS = {"max_steps": 12, "save_every": 6, "validate_every": 6, "log_stats_every": 6, "validation_samples": 1}


def test_another_shape_is_trained(folder: Path):
    lines = training_lines(folder / "runs" / "ranks_0")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.3
    assert {"stats/grad_norm/embedding", "stats/grad_norm/layers", "stats/grad_norm/other"} < lines[5].keys()
    samples = (folder / "runs" / "ranks_0" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in samples} == {6, 12}


def test_another_shape_is_the_same_run_on_two_ranks(folder: Path):
    one, two = (training_lines(folder / "runs" / f"ranks_{ranks}") for ranks in (0, 1))
    for a, b in zip(one, two, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-4)


def test_another_shape_resumes(folder: Path):
    start = folder / "runs" / "ranks_0" / "checkpoints" / "step_00000006"
    arguments = flags(folder / "inputs", folder / "runs", "again", resume=start, **OPTIONS)
    run(arguments, script=folder / "launch_0.py")
    whole, again = (training_lines(folder / "runs" / name)[-6:] for name in ("ranks_0", "again"))
    assert [line["train/loss"] for line in again] == [line["train/loss"] for line in whole]
    weights, expected = (locate(folder / "runs" / name).tensors("model") for name in ("again", "ranks_0"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> PretrainingModel:
    monkeypatch.setitem(model_config.MODEL_CLASSES, "plain", f"{__name__}.PlainEncoder")
    config = ModelConfig(16, 32, 2, 2, 60, max_position_embeddings=32, model_type="plain")
    return build_model(config, torch.Generator().manual_seed(0))


def test_defaults_of_the_protocol_hold_for_any_shape(plain: PretrainingModel):
    assert plain.backward_order() == list(plain.parameters())[::-1]
    assert plain.num_parameters() == sum(parameter.numel() for parameter in plain.parameters())
    compile_layers(plain)  # nothing to compile is nothing to do
    ids, documents, targets = torch.randint(60, (2, 9)), torch.zeros(2, 9).long(), torch.tensor([3, 17])
    logits = plain(ids, documents, torch.tensor([True, False]))
    chosen = plain(ids, documents, torch.tensor([True, False]), targets)
    torch.testing.assert_close(chosen, logits.flatten(0, 1)[targets])


@pytest.mark.parametrize("model_type", model_config.MODEL_CLASSES)
def test_our_models_keep_to_the_protocol(model_type: str):
    model = make_model((model_type, "relative"))
    assert issubclass(model_class(model_type), PretrainingModel)
    order, parts = model.backward_order(), list(model.compiled_parts())
    assert set(order) == set(model.parameters())
    assert len(order) == len(set(order))
    assert order[0] is list(model.classifier.parameters())[-1]
    place = {parameter: number for number, parameter in enumerate(order)}
    first_layer = model.transformer.mlp_layers[0].mlp["1"].weight
    assert place[model.embedding.word_embedding.weight] > place[first_layer]
    assert len(parts) == 2 * model.config.num_hidden_layers + 1
    assert all(any(part in name for part in model.roles) for name, _ in model.named_parameters())


def test_missing_methods_are_named():
    class Half(PretrainingModel):
        def encode(self, input_ids, document_ids, causal, dropout=None):
            return input_ids

    with pytest.raises(TypeError, match=r"flops_per_token.*predict"):
        Half(ModelConfig(16, 32, 2, 2, 60))  # type: ignore[abstract]  # what is refused


def test_unknown_model_type_names_the_choices():
    with pytest.raises(ModelConfigError, match='model_type is "gpt"; choose "gpt-bert" or "llama" or '):
        ModelConfig(16, 32, 2, 2, 60, model_type="gpt")
