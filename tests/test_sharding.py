"""--sharding zero1 and full: the run without, whatever the optimizer, the number of ranks and where it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.ranks import Outcome, Run, run_ranks
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines
from safetensors.torch import load_file
from torch import nn

import train_single_gpu
import training.state
from export.load_model import load_model
from model_config import ModelConfig
from training.checkpoint import CheckpointError, locate, open_checkpoint, read_initial_weights
from training.config import parse_config
from training.distributed import Mesh, World, single_world
from training.environment import Environment
from training.inputs import read_inputs
from training.metric_logger import read_metrics
from training.state import TrainState, _empty_model

OPTIONS = {
    "max_steps": 8, "save_every": 4, "validate_every": 0, "valid_path": "", "collective_timeout": 0.5,
    "check_ranks_every": 3, "log_stats_every": 3, "warmup_proportion": 0.2, "ema_decay": "0.999,0.3",
    "tail_average": "6",
}  # fmt: skip
OPTIMIZERS = {"lamb": "lamb", "normuon": "normuon", "nadam": "torch.optim.NAdam"}
NAMES = ("lamb_whole", "lamb_bfloat16")
# name: what it must equal
SAME = {
    **{f"{name}_two": f"{name}_one" for name in OPTIMIZERS},
    "lamb_full": "lamb_one",
    "nadam_traced": "nadam_plain",
    "lamb_two_four": "lamb_one",
    "normuon_one_four": "normuon_one",
    "nadam_two_one": "nadam_one",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Runs of 1 rank without, of 2 and 4 with sharding; those with two numbers of ranks resume what others began."""
    folder = tmp_path_factory.mktemp("sharding")
    inputs, home = make_inputs(folder / "inputs"), folder / "runs"

    def options(name: str, sharding: str, resume: str = "", **further) -> list[str]:
        given = {**OPTIONS, "sharding": sharding, "optimizer": OPTIMIZERS[name.partition("_")[0]], **further}
        given |= {"resume": home / resume / "checkpoints" / "step_00000004"} if resume else {}
        if name.startswith("lamb"):
            held_out = {"validate_every": 4, "validation_samples": 1, "valid_path": inputs / "valid" / "*.shard"}
            given |= {"max_gradient": 0, **held_out}
        return flags(inputs, home, name, **given)

    def single(*arguments: str) -> None:
        assert train_single_gpu.main(options(*arguments), single_world) == 0

    for optimizer in OPTIMIZERS:
        single(f"{optimizer}_one", "none")
    two = {f"{optimizer}_two": Run(options(f"{optimizer}_two", "zero1")) for optimizer in ("lamb", "normuon")}
    # The last steps have two micro-batches on one rank and one on the other.
    uneven = options("nadam_two", "full", local_batch_size=28, activation_checkpointing="layer")
    two |= {
        "nadam_two": Run(uneven, fault="gives_back"),
        "lamb_full": Run(options("lamb_full", "full"), fault="stale_once"),
    }
    short = {"max_steps": 2, "length_milestones": "", "batch_reduction": 1, "tail_average": "1", "max_gradient": 0}
    short["mixed_precision"] = True  # in which weights travel rounded
    two["nadam_plain"] = Run(options("nadam_plain", "none", **short))
    two["nadam_traced"] = Run(options("nadam_traced", "full", compile=True, **short), fault="gives_back")
    two["lamb_whole"] = Run(options("lamb_whole", "none"))
    two["lamb_bfloat16"] = Run(options("lamb_bfloat16", "zero1", allreduce_dtype="bfloat16"))
    coupled = options("nadam_coupled", "zero1", optimizer="tests.helpers.odd_optimizer.Coupled")
    two |= {"coupled": Run(coupled), "bad": Run(options("nadam_bad", "zero1"), fault="infinite_average")}
    outcomes = dict(zip(two, run_ranks(list(two.values())), strict=True))
    single("nadam_two_one", "zero1", "nadam_two")
    four = {
        "lamb_two_four": Run(options("lamb_two_four", "none", "lamb_two")),
        "normuon_one_four": Run(options("normuon_one_four", "full", "normuon_one", sharding_ranks=2)),
        "copies": Run(options("nadam_copies", "full", sharding_ranks=2), fault="flipped_part"),
        "uneven": Run(options("nadam_uneven", "zero1", sharding_ranks=3)),
    }
    return home, outcomes | dict(zip(four, run_ranks(list(four.values()), world_size=4), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), SAME.items())
def test_same_run(runs: tuple[Path, dict[str, list[Outcome]]], name: str, expected: str):
    home, outcomes = runs
    assert all(outcome.code == 0 for outcome in outcomes.get(name, ())), outcomes[name]
    found = training_lines(home / name)
    for line, other in zip(found, training_lines(home / expected)[-len(found) :], strict=True):
        assert {key for key in line if not key.startswith("ranks/")} == set(other)
        for key in (key for key in line if key.endswith("_loss") or "_norm" in key):
            assert line[key] == pytest.approx(other[key], rel=1e-3 if "norm" in key else 1e-5), (line["step"], key)
    for file in ("model", "ema", "ema_0.3", "ema_tail", "optimizer"):
        a, b = (locate(home / run).tensors(file) for run in (expected, name))
        assert a.keys() == b.keys()
        for key in a:
            assert (a[key] - b[key]).double().norm() <= 5e-3 * a[key].double().norm().clamp(min=1e-6), (file, key)


@pytest.mark.slow
def test_weights_that_travel_rounded_are_those_that_autocast_rounds(runs: tuple[Path, dict[str, list[Outcome]]]):
    plain, traced = (training_lines(runs[0] / name)[0]["train/loss"] for name in ("nadam_plain", "nadam_traced"))
    assert plain == traced


@pytest.mark.slow
def test_same_bits(runs: tuple[Path, dict[str, list[Outcome]]]):
    """Of two ranks, whose sums have one order: steps, validation of weights and average, samples, checkpoints."""
    one, two = (read_metrics(runs[0] / name / "metrics.jsonl") for name in ("lamb_whole", "lamb_two"))
    assert len(one) == 10
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in (key for key in a if key.startswith(("train/", "valid/", "stats/parameter_norm"))):
            assert a[key] == b[key], (a["step"], key)
    texts = [(runs[0] / name / "samples.jsonl").read_text() for name in ("lamb_whole", "lamb_two")]
    assert texts[0] == texts[1] != ""
    for file in ("model", "ema", "optimizer"):
        whole, parts = (locate(runs[0] / name).tensors(file) for name in ("lamb_whole", "lamb_two"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_every_rank_writes_its_part(runs: tuple[Path, dict[str, list[Outcome]]]):
    """In files that other programs find by their index; a save that fails on a rank is tried again by all."""
    path = locate(runs[0] / "lamb_full").path
    index = json.loads((path / "model.safetensors.index.json").read_text())
    parts = {
        name: load_file(path / name)
        for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    }
    assert {key: name for name, part in parts.items() for key in part} == index["weight_map"]
    assert index["metadata"]["total_size"] >= sum(
        4 * tensor.numel() for part in parts.values() for tensor in part.values()
    )
    assert all(part.keys() for part in parts.values())
    assert not (path / "model.safetensors").exists()
    assert read_initial_weights(str(runs[0] / "lamb_full")).keys() == index["weight_map"].keys()
    assert load_model(path)[0].state_dict().keys() == index["weight_map"].keys()
    text = runs[1]["lamb_full"][0].text
    assert "step_00000004 could not be written: Stale file handle (rank 1 on " in text
    assert "; tried again, " in text
    (path / "ema-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: ema-00002-of-00002.safetensors has 0 bytes"):
        open_checkpoint(path)


@pytest.mark.slow
def test_sums_in_bfloat16_are_rounded(runs: tuple[Path, dict[str, list[Outcome]]]):
    whole, rounded = ([line["train/loss"] for line in training_lines(runs[0] / name)] for name in NAMES)
    assert rounded == pytest.approx(whole, rel=2e-3)
    assert rounded[3:] != whole[3:]


@pytest.mark.slow
def test_the_start_says_what_it_saves(runs: tuple[Path, dict[str, list[Outcome]]]):
    text = runs[1]["lamb_two"][0].text
    assert "sharding      zero1, moments and average in 2 parts, at most 5" in text
    assert "; saves about 0 MiB a device" in text
    text = runs[1]["lamb_full"][0].text
    assert "sharding      full, moments and average, weights and gradients of layers in 2 parts, at most 5" in text


@pytest.mark.slow
def test_an_optimizer_of_all_parameters_together_is_refused(runs: tuple[Path, dict[str, list[Outcome]]]):
    for outcome in runs[1]["coupled"]:
        assert outcome.code == 2
        assert "error: --sharding zero1: Coupled computes float:d from all parameters together" in outcome.text


@pytest.mark.slow
def test_copies_of_the_state_that_differ_end_the_run(runs: tuple[Path, dict[str, list[Outcome]]]):
    assert {outcome.code for outcome in runs[1]["copies"]} == {1, 75}
    assert "step 6: ranks 0-3 (" in runs[1]["copies"][0].text
    assert (
        "differ in copies of the state, first in what each group of --sharding_ranks has" in runs[1]["copies"][0].text
    )
    assert {outcome.code for outcome in runs[1]["uneven"]} == {2}
    assert "--sharding_ranks is 3, by which 4 ranks cannot be divided" in runs[1]["uneven"][0].text


@pytest.mark.slow
def test_a_bad_average_of_one_rank_ends_all(runs: tuple[Path, dict[str, list[Outcome]]]):
    assert [outcome.code for outcome in runs[1]["bad"]] == [3, 1]
    assert "before its checkpoint: ema/" in runs[1]["bad"][0].text
    assert not list((runs[0] / "nadam_bad" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_resume_draws_no_weights(runs: tuple[Path, dict[str, list[Outcome]]], monkeypatch: pytest.MonkeyPatch):
    checkpoint = locate(runs[0] / "lamb_one")
    arguments = flags(runs[0].parent / "inputs", runs[0], "lamb_one", **OPTIONS)
    read = read_inputs(parse_config(arguments, ""))
    draw = Mock(side_effect=lambda tensor, *_, **__: tensor if tensor.is_meta else pytest.fail("weights are drawn"))
    monkeypatch.setattr("torch.nn.init.trunc_normal_", draw)
    world = World(0, 1, torch.device("cpu"), Environment("none"))
    state = TrainState.create(read.config, read.model_config, read.builder.options, world, checkpoint)
    assert draw.called
    expected = checkpoint.tensors("model")
    assert all(torch.equal(value, expected[name]) for name, value in state.model.state_dict().items())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_no_model_of_ours_has_to_be_drawn(path: Path):
    model = _empty_model(ModelConfig.from_json(path), torch.device("meta"))
    assert model is not None
    assert model.num_parameters() > 100_000


class Tied(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


class Table(nn.Linear):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(4, 4)
        self.table = torch.arange(4)


@pytest.mark.parametrize("kind", [Tied, Table])
def test_a_model_that_no_file_fills_is_drawn(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]):
    monkeypatch.setattr(training.state, "build_model", kind)
    assert _empty_model(ModelConfig.from_json(ROOT / "configs" / "base.json"), torch.device("cpu")) is None


def test_owners_have_about_as_much():
    sizes = [50, 3, 8, 8, 8, 8, 20, 20]
    owners, largest = Mesh(3, 0).share_out(sizes)
    assert largest == 50 / 125
    assert [sum(size for size, of in zip(sizes, owners, strict=True) if of == rank) for rank in range(3)] == [
        50,
        39,
        36,
    ]
    assert Mesh(4, 0).share_out([1, 1]) == ([0, 1], 0.5)  # ranks without any


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_layers_take_less_memory_of_each_gpu(tmp_path: Path):
    """100 M parameters on two: about 14 bytes of each with zero1 and 10 with full, beside activations; the same run."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 8}
    inputs, peaks, losses = make_inputs(tmp_path / "inputs", **sizes), {}, {}
    options = {"device": "cuda", "max_steps": 3, "validate_every": 0, "save_every": 0, "length_milestones": ""}
    for sharding in ("zero1", "full"):
        run(flags(inputs, tmp_path, sharding, sharding=sharding, activation_checkpointing="layer", **options), 2)
        lines = training_lines(tmp_path / sharding)
        peaks[sharding], losses[sharding] = lines[-1]["stats/peak_memory_gib"], [line["train/loss"] for line in lines]
    assert losses["full"] == pytest.approx(losses["zero1"], rel=2e-3)
    assert peaks["full"] < 0.9 * peaks["zero1"]
