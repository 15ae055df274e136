"""Gradients across ranks: summed, not averaged, in float32 or bfloat16, while the backward pass goes on."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tiny_runs import ROOT, command, environment, flags, make_inputs, run, training_lines

import training.state
from training import gradients
from training.checkpoint import locate
from training.config import parse_config
from training.distributed import CollectiveError, World
from training.environment import Environment
from training.inputs import read_inputs
from training.state import TrainState
from training.step import train_step

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    inputs = make_inputs(folder / "inputs")
    common = {"max_steps": STEPS, "batch_reduction": 1, "length_milestones": "", "save_every": 0, "validate_every": 0}
    run(flags(inputs, folder / "runs", "one", **common))
    run(flags(inputs, folder / "runs", "bfloat16", **common, allreduce_dtype="bfloat16"), ranks=2)
    return folder / "runs"


def test_sums_in_bfloat16_are_sums_to_three_digits(folder):
    expected, found = training_lines(folder / "one"), training_lines(folder / "bfloat16")
    assert len(found) == STEPS
    assert found[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], rel=1e-5)  # before any update
    norms = [(a["stats/grad_norm"], b["stats/grad_norm"]) for a, b in zip(expected, found, strict=True)]
    assert norms[0][1] == pytest.approx(norms[0][0], rel=4e-3)
    assert norms[0][1] != pytest.approx(norms[0][0], rel=1e-6), "nothing was rounded"
    for a, b in zip(expected, found, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=2e-3), a["step"]


def test_first_moments_are_those_of_one_rank(folder):
    expected, found = (locate(folder / name).tensors("optimizer") for name in ("one", "bfloat16"))
    for name in expected:
        if name.startswith("exp_avg/"):
            assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm() + 1e-6, name


CHANGED = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import train_single_gpu
import training.state
from training.distributed import start_world

build_model = training.state.build_model

def changed(config):
    model = build_model(config)
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            {change}
    return model

training.state.build_model = changed
sys.exit(train_single_gpu.main(sys.argv[1:], start_world))
"""


def _changed(folder: Path, change: str) -> Path:
    (folder / "changed.py").write_text(CHANGED.format(root=str(ROOT), change=change))
    return folder / "changed.py"


@pytest.mark.slow
def test_weights_are_those_of_rank_0(folder: Path, tmp_path: Path):
    """Another host's random numbers may differ in their last bits; what differs here are whole numbers."""
    options = {"max_steps": STEPS, "batch_reduction": 1, "length_milestones": "", "save_every": 0, "validate_every": 0}
    script = _changed(tmp_path, "[parameter.add_(1) for parameter in model.parameters()]")
    run(flags(folder.parent / "inputs", tmp_path, **options), ranks=2, script=script)
    expected, found = training_lines(folder / "one"), training_lines(tmp_path / "run")
    assert [line["train/loss"] for line in found] == pytest.approx([line["train/loss"] for line in expected], rel=1e-5)


@pytest.mark.slow
def test_another_model_on_a_rank_is_refused(folder: Path, tmp_path: Path):
    script = _changed(tmp_path, "del model.transformer.mlp_layers[1]")
    words = command(flags(folder.parent / "inputs", tmp_path), ranks=2, script=script)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.returncode != 0
    assert "error: ranks differ: the shape of transformer.mlp_layers.1." in done.stderr
    assert "but not set on rank 1" in done.stderr


@pytest.mark.parametrize("kind", [("gpt-bert", "relative"), ("ltg-bert", "relative"), ("gpt-bert", "rope")])
def test_sums_set_out_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str]):
    """Each bucket goes off once, in order, complete, and all but the last before the embedding has its gradient."""
    model = make_model(kind)
    world = World(0, 2, torch.device("cpu"), Environment("torchrun", world_size=2))
    buckets = gradients.GradientBuckets(model, world, bucket_bytes=1)
    embedding = model.embedding.word_embedding.weight
    sent: list[torch.Tensor] = []
    contents: list[torch.Tensor] = []
    early = waits = 0

    class Work:
        def wait(self) -> None:
            nonlocal waits
            waits += 1

    def all_reduce(bucket: torch.Tensor, async_op: bool) -> Work:
        nonlocal early
        assert async_op
        assert embedding.grad is not None
        early += not embedding.grad.any()
        sent.append(bucket)
        contents.append(bucket.clone())
        return Work()

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    ids, documents = torch.randint(0, 60, (2, 12)), torch.zeros(2, 12, dtype=torch.int64)

    def loss() -> torch.Tensor:
        return model(ids, documents, torch.tensor([True, False]), torch.arange(24), None).square().sum()

    loss().backward()  # a micro-step that is not the last
    assert not sent
    buckets.zero()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    with buckets.sync():
        loss().backward()
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    assert sorted(bucket.data_ptr() for bucket in sent) == sorted(places)
    assert waits == len(sent)
    assert all(torch.equal(bucket, content) for bucket, content in zip(sent, contents, strict=True))
    last = len(list(model.embedding.parameters())) + sum("alphas" in name for name, _ in model.named_parameters())
    assert len(sent) - last <= early < len(sent)


@pytest.mark.parametrize("words", ["CUDA error: the launch timed out", "Inductor worker: Broken pipe"])
def test_an_error_of_a_device_or_compiler_is_not_told_as_another_ranks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
):
    read = read_inputs(parse_config(flags(folder.parent / "inputs", tmp_path), ""))
    world = World(0, 2, torch.device("cpu"), Environment("torchrun", world_size=2))
    monkeypatch.setattr(training.state, "broadcast_parameters", lambda model, world: None)
    state = TrainState.create(read.config, read.model_config, read.builder.options, world)
    monkeypatch.setattr(state.forward_backward, "_forward", Mock(side_effect=RuntimeError(words)))
    with pytest.raises(RuntimeError) as caught:
        train_step(state, read.builder.step(0, 0, 2, "rows", 16), (100, 100), read.config, read.plan)
    assert str(caught.value) == words


def test_an_error_of_a_sum_is_told_as_one_between_ranks(monkeypatch: pytest.MonkeyPatch):
    model = make_model(("gpt-bert", "relative"))
    buckets = gradients.GradientBuckets(model, World(0, 2, torch.device("cpu"), Environment("torchrun", world_size=2)))
    monkeypatch.setattr(gradients.dist, "all_reduce", Mock(side_effect=RuntimeError("Connection closed by peer")))
    ids, documents = torch.randint(0, 60, (2, 12)), torch.zeros(2, 12, dtype=torch.int64)
    loss = model(ids, documents, torch.tensor([True, False]), torch.arange(24), None).square().sum()
    words = "lost contact with another rank in all_reduce of gradients"
    with pytest.raises(CollectiveError, match=words), buckets.sync():
        loss.backward()


SMALL_BUCKETS = """
import functools, sys
sys.path.insert(0, {root!r})
import train_single_gpu
from training.distributed import start_world
from training.state import TrainState
TrainState.create = functools.partial(TrainState.create, bucket_bytes=20_000)
sys.exit(train_single_gpu.main(sys.argv[1:], start_world))
"""


@pytest.fixture
def small_buckets(tmp_path: Path) -> Path:
    """A script like train_multi_gpu.py that sums gradients of a small model in many pieces, too."""
    (tmp_path / "small.py").write_text(SMALL_BUCKETS.format(root=str(ROOT)))
    return tmp_path / "small.py"


@pytest.mark.slow
def test_sums_in_many_pieces_are_those_of_one_rank(folder: Path, tmp_path: Path, small_buckets: Path):
    options = {"max_steps": STEPS, "batch_reduction": 1, "length_milestones": "", "save_every": 0, "validate_every": 0}
    run(flags(folder.parent / "inputs", tmp_path, **options), ranks=2, script=small_buckets)
    expected, found = training_lines(folder / "one"), training_lines(tmp_path / "run")
    # A norm shows more of the order of sums than a loss: 1.5e-5 here, the same at each run.
    for key, bound in (("train/loss", 1e-5), ("stats/grad_norm", 5e-5)):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=bound)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_recorded_steps_of_two_gpus_are_those_of_one(tmp_path: Path, small_buckets: Path):
    """float32, so that what differs is the order of sums; graphs of every row length are recorded and replayed."""
    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    options = {"device": "cuda", "learning_rate": 1e-3, "local_batch_size": 8, "max_steps": 24, "validate_every": 0}
    variants = (
        ("one", 0, "", "float32", "none"),
        ("two", 2, "", "float32", "none"),
        ("hooks", 2, "graphs", "float32", "none"),
        ("bfloat16", 2, "", "bfloat16", "none"),
        ("zero1", 2, "", "float32", "zero1"),
        ("zero1_reference", 2, "optimizer", "float32", "zero1"),
        ("zero1_bfloat16", 2, "", "bfloat16", "zero1"),
        ("full", 2, "", "float32", "full"),
    )

    def train(name: str, ranks: int, reference: str, dtype: str, sharding: str) -> list[float]:
        choices = {"compile": True, "mixed_precision": False, "allreduce_dtype": dtype, "sharding": sharding}
        words = command(flags(inputs, tmp_path, name, **options, **choices), ranks, small_buckets if ranks else None)
        chosen = {**environment(), "HYBRID_REFERENCE": reference}
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=chosen, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        assert "without CUDA graphs" not in done.stderr
        return [line["train/loss"] for line in training_lines(tmp_path / name)]

    with ThreadPoolExecutor() as pool:  # what takes long is to compile
        names = [name for name, *_ in variants]
        losses = dict(zip(names, pool.map(lambda each: train(*each), variants), strict=True))
    for name in losses:
        bound = 2e-3 if name.endswith("bfloat16") else 1e-5
        assert losses[name] == pytest.approx(losses["one"], rel=bound), name
    assert losses["bfloat16"] != pytest.approx(losses["two"], rel=1e-9), "nothing was rounded"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("sharding", ["none", "zero1", "full"])
def test_a_normal_step_of_two_gpus_never_waits_for_the_device(tmp_path: Path, sharding: str):
    """Rows of three lengths, graphs and many buckets; test_weight_update.py has other runs, of one GPU."""
    inputs = make_inputs(tmp_path / "inputs", hidden_size=64)
    options = {"device": "cuda", "batch_reduction": 1, "max_steps": 120, "log_stats_every": 2, "check_ranks_every": 5}
    done = run(
        flags(inputs, tmp_path, sharding=sharding, **options), 2, script=ROOT / "tests" / "helpers" / "no_host_sync.py"
    )
    records = json.loads(done.stdout.splitlines()[-1])
    assert len(records) == 3
    assert min(map(len, records.values())) > 10, "a row length has too few steps after those that record graphs"
