"""The memory estimate beside what runs have taken."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from data.positions import Exposure
from model import ModelConfig
from model_extra import build_model
from training.config import TrainingConfig
from training.inputs import make_plan
from training.summary import memory_estimate

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# Kernels that there were not at first.
PLAIN = {"residual", "residual without averages", "gate norm", "feed-forward norm", "loss"}
LTG, ROPE = {"model_type": "ltg-bert"}, {"position_embedding": "rope"}


@cache
def parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return build_model(model).num_parameters()


def estimate(model: ModelConfig, tokens: int, row_length: int = 128, missing=(), ranks: int = 1, **flags) -> float:
    """GiB for a run of benchmarks/throughput.py: four micro-batches a step, unless flags say otherwise."""
    rows = tokens // row_length
    values = {"global_batch_size": 4 * rows * ranks, "batch_reduction": 1.0, "length_milestones": (), "max_steps": 40}
    given = {"mixed_precision": True, "compile": True, "seq_length": row_length, "local_batch_size": rows}
    config = TrainingConfig("-", "", "-", "-", name="-", **{**values, **given, **flags})
    split = "ranks" if ranks > 1 else "rows"
    return (
        memory_estimate(
            config, model, make_plan(config, Exposure(1, None)), parameters(model), set(missing), ranks, split
        )
        / 2**30
    )


@pytest.mark.parametrize(
    ("name", "changes", "run", "measured"),
    [
        *[("base", {}, {"tokens": 32768, "row_length": length}, 15.3) for length in (128, 256, 512)],
        ("base", {}, {"tokens": 32768, "row_length": 2048}, 15.1),
        ("base", LTG, {"tokens": 32768}, 13.4),
        *[("base", ROPE, {"tokens": 32768, "row_length": length}, 16.2) for length in (128, 512)],
        ("small", {}, {"tokens": 131072}, 26.1),
        ("small", {}, {"tokens": 81920, "global_batch_size": 640}, 16.0),
        # Earlier versions (results/2026-11-21_h200_throughput_attention.json).
        ("base", {}, {"tokens": 32768, "missing": PLAIN}, 22.3),
        ("base", LTG, {"tokens": 32768, "missing": PLAIN}, 19.2),
        ("small", {}, {"tokens": 131072, "missing": PLAIN}, 40.2),
        ("base", {}, {"tokens": 32768, "missing": PLAIN, "compile": False}, 30.7),
        *[
            ("base", {}, {"tokens": 32768, "row_length": length, "missing": PLAIN | {"attention"}}, measured)
            for length, measured in ((128, 27.9), (256, 31.3), (512, 38.1))
        ],
    ],
)
def test_within_a_tenth_of_what_was_measured_on_an_h200(name: str, changes: dict, run: dict, measured: float):
    model = ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()) | changes)
    assert estimate(model, **run) == pytest.approx(measured, rel=0.1)


def test_a_rank_that_is_causal_alone_has_a_target_at_every_position():
    model = ModelConfig.from_json(CONFIGS / "base.json")
    alone, together = (estimate(model, 32768, ranks=ranks) for ranks in (16, 1))
    targets = 32768 - 128 * (64 + 192 * 0.3)  # beside the micro-batch of both
    assert alone - together == pytest.approx(targets * model.vocab_size * 4 / 2**30)


def test_sharding_takes_moments_and_average_apart():
    model = ModelConfig.from_json(CONFIGS / "base.json")
    none, zero1 = (estimate(model, 32768, ranks=4, sharding=sharding) * 2**30 for sharding in ("none", "zero1"))
    assert none - zero1 == pytest.approx(12 * 3 / 4 * parameters(model))


def test_activations_computed_anew_are_not_kept():
    """Base, 12 layers: a sublayer's activations stay once instead of twelve times."""
    model = ModelConfig.from_json(CONFIGS / "base.json")
    none, mlp, layer = (
        estimate(model, 32768, activation_checkpointing=which) * 2**30 for which in ("none", "mlp", "layer")
    )
    assert none - mlp == pytest.approx(11 * 32768 * 2 * 3 * model.intermediate_size)
    assert mlp - layer == pytest.approx(12 * 32768 * 2 * 6 * model.hidden_size)
