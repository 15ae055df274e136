"""Switches of ModelConfig: definitions against a plain reference, training on ranks and resumed, costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import SIZES
from helpers.tiny_runs import flags, make_inputs, run, training_lines
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model import LTGBert, ModelConfig
from model_extra import build_model
from ops.cross_entropy import target_scores
from training.checkpoint import locate
from training.forward_backward import compile_layers

SIX = SIZES | {"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "post": {
        "model_type": "ltg-bert", "norm_position": "post", "norm_weight": True, "norm_bias": True, "hidden_act": "gelu",
        "gated_mlp": False, "mlp_bias": True, "context_norm": False, "mlp_norm": False, "position_embedding": "rope",
        "head_transform": False, "embedding_norm": False,
    },
    "sandwich": {
        "norm_position": "sandwich", "norm": "rms_norm", "norm_weight": True, "qk_norm": True, "hidden_act": "relu2",
        "embedding_size": 12, "pad_vocab_to_multiple_of": 16, "tie_word_embeddings": False, "decoder_bias": False,
        "depth_weighted_averaging": False, "position_embedding": "rope", "classifier_bias": False,
    },
    "averages": {
        "attention_gate": False, "norm_weight": True, "hidden_act": "silu", "attention_bias": False,
        "embedding_size": 8, "head_transform": False, "position_embedding": "rope",
    },
}  # fmt: skip


def shaped(changes: dict[str, Any], sizes: dict[str, Any] = SIX) -> LTGBert:
    """A model without dropout, all of whose parameters are random."""
    without = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    generator = torch.Generator().manual_seed(0)
    model = build_model(ModelConfig.from_dict(sizes | without | changes), generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    assert isinstance(model, LTGBert)
    return model


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [T, d] turned by its positions, features i and i + d / 2 as one complex number."""
    half = x.size(-1) // 2
    turns = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([turned.real, turned.imag], dim=-1)


class Reference:
    """Logits of one document [T], written out from the parameters of a model with rotary positions."""

    def __init__(self, model: LTGBert, ids: Tensor, causal: bool) -> None:
        self.config, self.given = model.config, dict(model.named_parameters())
        self.ids, self.causal = ids, causal

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.given[f"{name}.weight"], self.given.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, wanted: bool = True) -> Tensor:
        if not wanted:
            return x
        x = x - x.mean(-1, keepdim=True) if self.config.norm == "layer_norm" else x
        x = x / (x.square().mean(-1, keepdim=True) + self.config.layer_norm_eps).sqrt()
        return x * self.given.get(f"{name}.weight", 1.0) + self.given.get(f"{name}.bias", 0.0)

    def head(self, x: Tensor, name: str) -> Tensor:
        """Queries or keys of one head [T, d], normalised and turned."""
        if self.config.qk_norm:
            x = F.rms_norm(x, x.shape[-1:], self.given[name], self.config.layer_norm_eps)
        return rotated(x, self.config.rope_theta)

    def attention(self, x: Tensor, name: str) -> Tensor:
        config, (heads, keys) = self.config, (self.config.num_attention_heads, self.config.num_key_value_heads)
        both = self.linear(x, f"{name}.in_proj_qk").view(len(x), heads + keys, -1)
        values = self.linear(x, f"{name}.in_proj_v" + "g" * config.attention_gate)
        value = values[:, : keys * config.head_dim].view(len(x), keys, -1)
        contexts = []
        for head in range(heads):
            mine = head * keys // heads
            query = self.head(both[:, head], f"{name}.query_layer_norm.weight")
            key = self.head(both[:, heads + mine], f"{name}.key_layer_norm.weight")
            scores = query @ key.T / config.head_dim**0.5
            future = torch.ones_like(scores).triu(1).bool() & self.causal
            contexts.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, mine])
        context = torch.cat(contexts, dim=-1)
        if config.attention_gate:
            context = context * F.gelu(values[:, keys * config.head_dim :])
        return self.linear(self.norm(context, f"{name}.context_layer_norm", config.context_norm), f"{name}.out_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        config = self.config
        kinds = {"gelu": F.gelu, "silu": F.silu, "relu2": lambda y: y.clamp(min=0) ** 2}
        inner = self.linear(x, f"{name}.mlp.1")
        value, gate = inner.chunk(2, dim=-1) if config.gated_mlp else (torch.ones(1), inner)
        inner = value * kinds[config.hidden_act](gate)
        return self.linear(self.norm(inner, f"{name}.inner_layer_norm", config.mlp_norm), f"{name}.mlp.4")

    def logits(self) -> Tensor:
        config, given, place = self.config, self.given, self.config.norm_position
        x = given["embedding.word_embedding.weight"][self.ids]
        x = self.linear(x, "embedding.projection") if config.embedding_size != config.hidden_size else x
        x = self.norm(x, "embedding.word_layer_norm", config.embedding_norm)
        states = [x]
        for layer in range(config.num_hidden_layers):
            for kind, sublayer in (("attention", self.attention), ("mlp", self.feed_forward)):
                name = f"transformer.{kind}_layers.{layer}"
                update = sublayer(self.norm(x, f"{name}.input_layer_norm", place != "post"), name)
                x = x + self.norm(update, f"{name}.output_layer_norm", place == "sandwich")
                x = self.norm(x, f"{name}.sum_layer_norm", place == "post")
                states.append(x)
                if config.depth_weighted_averaging:
                    alphas = given[f"transformer.dwa_modules.alphas.{len(states) - 2}"]
                    x = sum((alpha * state for alpha, state in zip(alphas, states, strict=True)), torch.zeros(()))
        x = self.norm(x, "classifier.input_layer_norm", place != "post")
        x = self.linear(x, "classifier.nonlinearity.1") if "classifier.nonlinearity.1.weight" in given else x
        x = self.norm(F.gelu(x), "classifier.transform_layer_norm") if config.head_transform else x
        words = "embedding.word_embedding" if config.tie_word_embeddings else "classifier.nonlinearity.5"
        return x @ given[f"{words}.weight"][: config.vocab_size].T + given.get("classifier.nonlinearity.5.bias", 0.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_shapes_are_what_they_are_written_out(name: str, causal: bool):
    model, ids = shaped(SHAPES[name]), torch.randint(5, 60, (1, 18), generator=torch.Generator().manual_seed(1))
    logits = model(ids, torch.zeros_like(ids), causal)[0]
    torch.testing.assert_close(logits[:, :60], Reference(model, ids[0], causal).logits(), rtol=1e-4, atol=1e-5)
    assert (logits[:, 60:].softmax(-1).numel() == 0) or (logits.softmax(-1)[:, 60:] == 0).all()
    trained = model.train()(ids, torch.zeros_like(ids), causal)[0]  # weights of norms are multiplied into matrices
    torch.testing.assert_close(trained, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position_embedding", ["relative", "rope"])
@torch.no_grad()
def test_grouped_queries_are_heads_with_equal_keys_and_values(position_embedding: str):
    shape = {"position_embedding": position_embedding, "qk_norm": True}
    grouped, whole = shaped(shape), shaped(shape | {"num_key_value_heads": 6})
    widths = {"in_proj_qk": (48, 16), "in_proj_vg": (16, 48)}

    def repeated(name: str, tensor: Tensor) -> Tensor:
        part = next((part for part in widths if part in name), None)
        if part is None:
            return tensor
        parts = list(tensor.split(widths[part]))
        number = widths[part].index(16)
        parts[number] = parts[number].unflatten(0, (2, 8)).repeat_interleave(3, dim=0).flatten(0, 1)
        return torch.cat(parts)

    whole.load_state_dict({name: repeated(name, tensor) for name, tensor in grouped.state_dict().items()})
    ids = torch.randint(5, 60, (2, 18), generator=torch.Generator().manual_seed(1))
    documents, causal = torch.arange(18).expand(2, 18) // 7, torch.tensor([True, False])
    torch.testing.assert_close(grouped(ids, documents, causal), whole(ids, documents, causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_floating_point_operations_are_those_of_the_products(name: str):
    model, ids = shaped(SHAPES[name]), torch.randint(5, 60, (2, 18))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, torch.zeros_like(ids), False)
    # A third is the forward pass. Attention itself, left out by rows of no length, is passed over by the counter, too.
    estimate = model.flops_per_token(model.config, 0, 1.0) / 3 * ids.numel()
    assert counter.get_total_flops() == pytest.approx(estimate, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_on_cuda_are_those_on_the_cpu(name: str):
    """bf16 through the kernels that take the shape, and compiled; ids that fill up the vocabulary cost nothing."""
    sizes = SIZES | {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2}
    model, ids = shaped(SHAPES[name], sizes), torch.randint(5, 60, (4, 40), generator=torch.Generator().manual_seed(1))
    inputs = ids, torch.arange(40).expand(4, 40) // 15, torch.tensor([True, False, False, True])
    with torch.no_grad():
        expected = model(*inputs).flatten(0, 1)
        scores = target_scores(expected, ids.flatten())
    model.cuda()
    for compiled in (False, True):
        if compiled:
            compile_layers(model)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(*(tensor.cuda() for tensor in inputs)).flatten(0, 1)
        found = target_scores(logits, ids.flatten().cuda())
        assert (logits.cpu() - expected)[:, :60].norm() < 0.05 * expected[:, :60].norm()
        torch.testing.assert_close(found[0].cpu(), scores[0], rtol=0.1, atol=0.2)
        model.zero_grad()
        found[0].mean().backward()
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


TRAINED = SHAPES["sandwich"] | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "depth_weighted_averaging": True,
    "position_embedding": "relative", "model_type": "qwen3", "attention_gate": True, "tie_word_embeddings": True,
}  # fmt: skip
OPTIONS = {"max_steps": 8, "save_every": 4, "validate_every": 8, "log_stats_every": 4, "optimizer": "normuon"}


@pytest.mark.slow
def test_a_shape_of_many_switches_is_the_same_run_on_two_ranks_and_when_resumed(tmp_path: Path):
    inputs = make_inputs(tmp_path / "inputs", **TRAINED)
    run(flags(inputs, tmp_path, "one", **OPTIONS))
    run(flags(inputs, tmp_path, "two", hybrid_split="rows", local_batch_size=7, **OPTIONS), ranks=2)
    one, two = training_lines(tmp_path / "one"), training_lines(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        for key in ("train/masked_loss", "train/causal_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-4), (a["step"], key)
    assert one[-1]["train/loss"] < one[0]["train/loss"] - 0.2
    start = tmp_path / "one" / "checkpoints" / "step_00000004"
    run(flags(inputs, tmp_path, "again", resume=start, **OPTIONS))
    weights, expected = (locate(tmp_path / name).tensors("model") for name in ("again", "one"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
