"""The models of configs/: published numbers of parameters, and a hybrid step of each in small."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_runs import flags, make_inputs, run, training_lines
from torch import Tensor

from evaluation.kv_cache import CachedDecoder
from model import LTGBert, ModelConfig
from model_extra import build_model
from model_protocol import PretrainingModel
from ops.dropout import DropoutKeys
from training.forward_backward import compile_layers
from training.optimizers import Lamb

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# Millions of parameters as published, and how many of them are counted there: all, or all but an untied head.
PUBLISHED = {
    "small": (30, "all"),
    "base": (119, "all"),
    "ltg_bert_base": (98, "all"),
    "modernbert_base": (149, "all"),
    "modernbert_large": (395, "all"),
    "eurobert_210m": (212, "body"),
    "eurobert_610m": (608, "body"),
    "eurobert_2.1b": (2107, "body"),
    "neobert": (222, "body"),
    "llama_3.2_1b": (1236, "all"),
}


def preset(name: str) -> ModelConfig:
    return ModelConfig.from_json(CONFIGS / f"{name}.json")


def test_every_preset_is_checked():
    others = {"demo", "tiny", "small_no_dropout", "large"}
    assert PUBLISHED.keys() | others == {path.stem for path in CONFIGS.glob("*.json")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str):
    millions, counted = PUBLISHED[name]
    with torch.device("meta"):
        model = build_model(preset(name))
    head = sum(p.numel() for key, p in model.named_parameters() if key.startswith("classifier.nonlinearity.5."))
    count = model.num_parameters() - (head if counted == "body" else 0)
    assert count / 1e6 == pytest.approx(millions, rel=0.007)


def small(name: str) -> PretrainingModel:
    """The preset's shape in small: as many queries to a key, and layers of every kind."""
    config = preset(name)
    groups = config.num_attention_heads // config.num_key_value_heads
    sizes = {"num_attention_heads": 2 * groups, "num_key_value_heads": 2, "hidden_size": 32 * groups, "head_dim": 16}
    sizes |= {"embedding_size": 32 * groups, "intermediate_size": 40, "num_hidden_layers": 4, "vocab_size": 50}
    sizes |= {"sliding_window": 3} if config.sliding_window else {}
    return build_model(dataclasses.replace(config, **sizes), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_learns_from_masked_and_causal_rows(name: str):
    """Every parameter has a gradient, and three steps lower the loss of both objectives."""
    model = small(name).train()
    ids = torch.randint(5, 50, (4, 24), generator=torch.Generator().manual_seed(1))
    causal = torch.tensor([True, False, True, False])
    masked = ids.masked_fill(~causal[:, None] & (torch.arange(24) % 3 == 1), 4)
    documents = (torch.arange(24) // 13).expand(4, 24)
    positions = torch.cat([torch.arange(0, 12), 24 + torch.arange(0, 22, 3)])
    labels = ids.roll(-1, 1).flatten()[positions]
    optimizer = Lamb(model.parameters(), lr=0.02)

    def losses() -> Tensor:
        keys = DropoutKeys(torch.arange(4), torch.tensor(1))
        loss = F.cross_entropy(model(masked, documents, causal, positions, keys), labels, reduction="none")
        return torch.stack([loss[:12].mean(), loss[12:].mean()])

    first = losses()
    for step in range(3):
        optimizer.zero_grad()
        losses().sum().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            assert step or parameter.grad.any(), key
        optimizer.step()
    assert (losses() < first).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["modernbert_base", "eurobert_610m", "neobert"])
def test_compiled_layers_and_kernels_on_cuda_match_the_cpu(name: str):
    """In bf16, of two shapes, so that sizes become variables; with gradients."""
    exact, fast = small(name).train(), small(name).train().cuda()
    compile_layers(fast)
    for rows, length in ((4, 24), (3, 24), (3, 56)):
        ids = torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(rows))
        documents, causal = (torch.arange(length) // 13).expand(rows, length), torch.arange(rows) % 2 == 0
        results = []
        for model, device in ((exact, "cpu"), (fast, "cuda")):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device == "cuda"):
                logits = model(ids.to(device), documents.to(device), causal.to(device))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().to(device))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            results.append(torch.cat([loss[None].cpu(), *(x.flatten().cpu() for x in gradients)]))
        assert (results[1] - results[0]).norm() < 0.03 * results[0].norm(), (rows, length)


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_each_decodes_with_a_cache_as_without(name: str):
    model = small(name).double().eval()
    for parameter in model.parameters():
        parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=torch.Generator().manual_seed(2)))
    assert isinstance(model, LTGBert)
    ids = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    whole, decoder = model.encode(ids, torch.zeros_like(ids), True), CachedDecoder(model, torch.zeros(2).long())
    for first, last in ((0, 7), (7, 8), (8, 12)):
        torch.testing.assert_close(decoder.append(ids[:, first:last]), whole[:, last - 1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_windows_and_grouped_queries_train_alike_on_two_ranks_and_after_a_resume(tmp_path: Path):
    """ModernBERT's layers with one key for two queries, predicting hidden tokens from their own states."""
    shape = {"model_type": "modernbert", "num_hidden_layers": 4, "num_key_value_heads": 1, "sliding_window": 4}
    shape |= {"global_attn_every_n_layers": 3, "local_rope_theta": 100.0, "predict_masked_from": "own"}
    inputs = make_inputs(tmp_path / "inputs", **shape)
    options = {"max_steps": 8, "save_every": 5, "validate_every": 0}
    run(flags(inputs, tmp_path, "one", **options))
    run(flags(inputs, tmp_path, "two", hybrid_split="rows", local_batch_size=7, **options), 2)
    expected, found = training_lines(tmp_path / "one"), training_lines(tmp_path / "two")
    for a, b in zip(expected, found, strict=True):
        for key in ("train/masked_loss", "train/causal_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)
    assert expected[-1]["train/loss"] < expected[0]["train/loss"] - 0.1
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one" / "checkpoints" / "step_00000005", again / "checkpoints" / "step_00000005")
    shutil.copy(tmp_path / "one" / "config.json", again)
    run(flags(inputs, tmp_path, "again", **options))
    assert [line["train/loss"] for line in training_lines(again)] == [line["train/loss"] for line in expected[5:]]
