"""The memory estimate beside what runs have taken."""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import ROOT, flags, make_inputs, refusal, run, training_lines

import train_single_gpu
from data.positions import Exposure
from model import ModelConfig
from model_extra import build_model
from training import step
from training.config import ConfigError, TrainingConfig, parse_config
from training.distributed import single_world
from training.forward_backward import ForwardBackward
from training.inputs import make_plan, read_inputs
from training.state import TrainState
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


def test_full_sharding_takes_layers_apart():
    """What a rank has of 20 bytes a parameter; a Llama of 13 B on four H200 and one of 5 B on one fit into 139 GiB."""
    base = ModelConfig.from_json(CONFIGS / "base.json")
    zero1, full = (estimate(base, 32768, ranks=16, sharding=sharding) * 2**30 for sharding in ("zero1", "full"))
    layer = sum(base.matrices_of_a_layer)
    assert zero1 - full == pytest.approx(8 * 15 / 16 * 12 * layer - 8 * layer)
    llama = json.loads((CONFIGS / "llama_3.2_1b.json").read_text()) | {"vocab_size": 32000, "num_key_value_heads": 40}
    llama |= {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "rope_scaling": None}
    thirteen, five = (ModelConfig.from_dict(llama | {"num_hidden_layers": layers}) for layers in (40, 15))
    assert (round(parameters(thirteen) / 1e9, 1), round(parameters(five) / 1e9, 1)) == (12.9, 4.9)
    options = {"row_length": 2048, "activation_checkpointing": "layer", "hybrid_numerator": 3, "hybrid_denominator": 4}
    of_four = {
        sharding: estimate(thirteen, 16384, ranks=4, sharding=sharding, **options)
        for sharding in ("none", "zero1", "full")
    }
    print(of_four, estimate(five, 8192, **options))
    assert of_four["full"] < 139 < of_four["zero1"] < of_four["none"]
    assert estimate(five, 8192, **options) < 139


def test_activations_computed_anew_are_not_kept():
    """Base, 12 layers: a sublayer's activations stay once instead of twelve times."""
    model = ModelConfig.from_json(CONFIGS / "base.json")
    none, mlp, layer = (
        estimate(model, 32768, activation_checkpointing=which) * 2**30 for which in ("none", "mlp", "layer")
    )
    assert none - mlp == pytest.approx(11 * 32768 * 2 * 3 * model.intermediate_size)
    assert mlp - layer == pytest.approx(12 * 32768 * 2 * 6 * model.hidden_size)


@pytest.mark.slow
def test_the_largest_micro_batch_is_found_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """From the largest that the estimate does not rule out, an eighth less at each try."""
    read = read_inputs(parse_config(flags(make_inputs(tmp_path / "inputs"), tmp_path, local_batch_size="auto"), ""))
    read = dataclasses.replace(read, config=dataclasses.replace(read.config, mixed_precision=False, compile=False))
    world = single_world(dataclasses.replace(read.config, device="cpu"))
    state = TrainState.create(read.config, read.model_config, read.builder.options, world)
    tried, real = [], step.warm_up
    monkeypatch.setattr(step, "device_bytes", lambda device: 2**34)

    def lacking(limit: int):
        def warm_up(state, builder, split: str, rows: int) -> str:
            tried.append(rows)
            real(state, builder, split, rows)
            if rows > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ""

        return warm_up

    monkeypatch.setattr(step, "warm_up", lacking(40))
    found = step.fit_micro_batch(state, read, "rows")
    assert tried == [64, 56, 49, 42, 36]
    assert found.config.local_batch_size == 36
    assert "--local_batch_size auto: 36 rows of 16 tokens fit (try 5): 576 tokens" in capsys.readouterr().out
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in state.model.parameters())
    assert step.fit_micro_batch(state, found, "rows") is found  # a number given is a number taken
    monkeypatch.setattr(step, "warm_up", lacking(0))
    with pytest.raises(ConfigError, match="not even a row fits into the device"):
        step.fit_micro_batch(state, read, "rows")

    def capture(*_: object) -> None:  # whose end fails because its middle did
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("use_count > 0")

    monkeypatch.setattr(step, "warm_up", real)
    monkeypatch.setattr(ForwardBackward, "_capture", capture)
    state.forward_backward.captures = True
    with pytest.raises(ConfigError, match="not even a row"), pytest.warns(UserWarning, match="without CUDA graphs"):
        step.fit_micro_batch(state, read, "rows")
    state.forward_backward.captures = False
    monkeypatch.setattr(step, "warm_up", lacking(0))
    monkeypatch.setattr(step, "device_bytes", lambda device: 2**22)
    tried.clear()
    monkeypatch.setattr(step, "warm_up", lacking(64))
    assert step.fit_micro_batch(state, read, "rows").config.local_batch_size == tried[0] < 36


def test_no_micro_batch_fills_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = flags(make_inputs(tmp_path / "inputs"), tmp_path, local_batch_size="auto")
    assert "a CPU has none of its own" in refusal(capsys, train_single_gpu.main, arguments)
    words = "would not compare; give a number of rows"
    assert words in refusal(capsys, train_single_gpu.main, [*arguments, "--validation_steps=2"])


@pytest.mark.gpu
def test_the_micro_batch_that_was_found_trains(tmp_path: Path):
    """Within a part of the GPU's memory that the first try does not fit into; with CUDA graphs, and validation."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
    options = {"device": "cuda", "local_batch_size": "auto", "global_batch_size": 65536, "batch_reduction": 1}
    arguments = flags(make_inputs(tmp_path / "inputs", **sizes), tmp_path, **options, max_steps=4, length_milestones="")
    script = tmp_path / "part.py"
    script.write_text(PART.format(root=str(ROOT)))
    done = run(arguments, script=script)
    found = re.search(r"--local_batch_size auto: (\d+) rows of 16 tokens fit", done.stdout)
    assert found is not None
    assert 1 < int(found[1]) < 65536
    assert len(training_lines(tmp_path / "run")) == 4


PART = """
import sys
sys.path.insert(0, {root!r})
import torch
import train_single_gpu
from training import step
from training.distributed import single_world
part = 3 * 2**30
torch.cuda.set_per_process_memory_fraction(part / torch.cuda.get_device_properties(0).total_memory)
step.device_bytes = lambda device: part
sys.exit(train_single_gpu.main(sys.argv[1:], single_world))
"""
