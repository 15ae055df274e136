"""Budgets: the length of a run in tokens, words, epochs and hours."""

from __future__ import annotations

import json
import re
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from helpers.tiny_runs import flags, make_inputs, run, training_lines

import train_single_gpu
from data.positions import parse_amount
from data.shards import describe_shard, tokenizer_hash, write_manifest
from export.load_model import load_model
from slurm.tasks import to_arguments
from training.checkpoint import locate
from training.config import ConfigError, parse_config
from training.inputs import read_inputs
from training.status import read_status

WORDS = {"part_0.shard": 9000, "part_1.shard": 8000}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs whose training shards have a manifest with words."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), dropout=0.0)
    shards = [describe_shard(folder / "train" / name, words) for name, words in WORDS.items()]
    write_manifest(folder / "train", shards, tokenizer_hash(folder / "tokenizer.json"), 320, {})
    return folder


def arguments(inputs: Path, output: Path, **options) -> list[str]:
    """Of a run without a length of its own."""
    given = flags(inputs, output, **{"train_path": inputs / "train", "validate_every": 0, "save_every": 0, **options})
    return given if "max_steps" in options else [each for each in given if not each.startswith("--max_steps=")]


@pytest.mark.parametrize(("flag", "value"), [("tokens", "12k"), ("words", "5000"), ("epochs", "0.75"), ("tokens", "1")])
def test_the_fewest_steps_that_spend_a_budget(inputs, tmp_path, flag, value):
    found = read_inputs(parse_config(arguments(inputs, tmp_path, **{f"max_{flag}": value}), ""))
    steps, spent = found.config.max_steps, {}
    assert found.plan.max_steps == steps
    for number in (steps - 1, steps) if steps > 1 else (steps,):
        plan = read_inputs(parse_config(arguments(inputs, tmp_path, max_steps=number), "")).plan
        spent[number] = plan.tokens_before(number)
    tokens, exposure = found.corpus.tokens_before_epoch(1), found.corpus.exposure
    per_unit = {"tokens": 1, "words": Fraction(tokens, sum(WORDS.values())), "epochs": tokens}[flag]
    wanted = parse_amount(value, flag).value * per_unit
    assert spent[steps] >= wanted
    assert spent.get(steps - 1, 0) < wanted
    assert exposure.words_in(tokens) == sum(WORDS.values())


def test_one_flag_says_how_long_the_run_is(inputs, tmp_path):
    def parse(recipe: dict, **options):
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        return parse_config([*arguments(inputs, tmp_path, **options), f"--recipe={tmp_path / 'recipe.json'}"], "")

    assert parse({"max_steps": 7}, max_tokens="1k").budget == ("max_tokens", parse_amount("1k", "tokens"))
    assert (parse({"max_epochs": 2}, max_steps=9).budget, parse({"max_epochs": 2}).max_epochs) == (None, "2")
    for recipe, options, sentence in (
        ({}, {"max_steps": 7, "max_words": "1M"}, "--max_steps and --max_words both say how long the run is; give one"),
        ({"max_epochs": 2, "max_tokens": "1k"}, {}, "--max_tokens and --max_epochs in the recipe both say"),
        ({}, {"max_hours": 2}, "--max_hours is 2, which ends a run early but gives the schedules no length; give"),
        ({"max_words": [1]}, {}, "'max_words' is [1]; it must be number"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            parse(recipe, **options)
    for options in ({"max_words": "1k"}, {"max_steps": 15625, "max_hours": 1}):
        config = parse_config(arguments(inputs, tmp_path, **options), "")
        assert parse_config(to_arguments(config), "") == config


def test_words_that_are_not_known_are_no_budget(inputs, tmp_path):
    given = arguments(inputs, tmp_path, max_words="1k", train_path=inputs / "valid" / "*.shard", valid_path="")
    config = parse_config(given, "")
    with pytest.raises(ConfigError, match=r"^--max_words 1k: words are not known: .* has no number of words in a man"):
        read_inputs(config)


def test_a_run_of_so_many_words_counts_them_and_resumes(inputs, tmp_path, capsys):
    given = arguments(inputs, tmp_path, max_words="2000", save_every=2)
    assert train_single_gpu.main(given) == 0
    lines, found = training_lines(tmp_path / "run"), read_inputs(parse_config(given, ""))
    assert f" in {len(lines)} steps, the fewest that use up --max_words 2000\n" in capsys.readouterr().out
    assert lines[-2]["stats/words"] < 2000 <= lines[-1]["stats/words"]
    for line in lines:
        tokens = found.plan.objective_tokens_before(line["step"])
        parts = [found.corpus.exposure.words_in(each) for each in tokens]
        assert [line["stats/masked_words"], line["stats/causal_words"]] == parts
        assert line["stats/words"] == found.corpus.exposure.words_in(line["stats/tokens"])
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert (recorded["max_words"], recorded["max_steps"]) == ("2000", len(lines))
    assert train_single_gpu.main(arguments(inputs, tmp_path, max_steps=len(lines))) == 0
    assert "is complete" in capsys.readouterr().out
    assert train_single_gpu.main(arguments(inputs, tmp_path, max_words="3000")) == 2
    assert "--max_steps was" in capsys.readouterr().err


MIXES = {
    "stages": {
        "stages": [
            {"from": "0", "sources": [{"path": "train/part_0.shard", "weight": 1}]},
            {"from": "40%", "sources": [{"path": "train/part_1.shard", "weight": 1}]},
        ]
    },
    "weights": {
        "sources": [{"path": "train/part_0.shard", "weight": 0.2}, {"path": "train/part_1.shard", "weight": 0.8}]
    },
}


@pytest.mark.parametrize("mix", MIXES)
def test_words_of_a_mix_are_those_of_its_sources(inputs, tmp_path, mix):
    """The second source has a third of the words a token."""
    shutil.copytree(inputs, folder := tmp_path / "inputs")
    words = {"part_0.shard": 9000, "part_1.shard": 3000}
    shards = [describe_shard(folder / "train" / name, number) for name, number in words.items()]
    write_manifest(folder / "train", shards, tokenizer_hash(folder / "tokenizer.json"), 320, {})
    (folder / "mix.json").write_text(json.dumps(MIXES[mix]))

    def read(**options):
        given = arguments(folder, tmp_path, train_path=folder / "mix.json", save_words="500..4000/500", **options)
        return read_inputs(parse_config(given, ""))

    found = read(max_words="4000")
    steps = found.config.max_steps
    seen = [found.exposure_after(step)["stats/words"] for step in range(steps + 1)]
    assert seen == sorted(seen)
    assert seen[steps] >= 4000 > read(max_steps=steps - 1).exposure_after(steps - 1)["stats/words"]
    for step in range(steps + 1):
        assert seen[step] == found.ledger(step)["words"]
    for step, names in found.named_checkpoints.items():
        for name in names:
            least = parse_amount(name.removeprefix("chck_"), "words").value
            assert seen[step] >= least > seen[step - 1]
    assert sum(map(len, found.named_checkpoints.values())) == 8


@pytest.mark.slow
def test_hours_end_a_run_early_with_a_checkpoint(inputs, tmp_path):
    ranks = 2
    given = arguments(inputs, tmp_path, max_steps=5_000, max_hours=0.0003)
    stopped = run(given, ranks)
    step = locate(tmp_path / "run").step
    assert f"stopped by --max_hours 0.0003 after step {step}\n" in stopped.stdout
    assert 0 < step < 5_000
    assert read_status(tmp_path / "run").state == "stopped"
    assert locate(tmp_path / "run").record["hours"] > 0.0002
    again = run(given, ranks)  # the hours are those of all starts: none is left
    assert f"after step {step}\n" in again.stdout
    run(arguments(inputs, tmp_path, max_steps=5_000, max_hours=0.0005), ranks)
    assert locate(tmp_path / "run").step > step


NAMED = {"max_words": "2400", "save_words": "500..2000/500,9k", "save_epochs": "0.1", "save_every": 5}


def named_steps(inputs: Path, output: Path) -> dict[str, int]:
    """The first step after which so many words were seen, by the names of checkpoints."""
    found = read_inputs(parse_config(arguments(inputs, output, **NAMED), ""))
    seen = [found.exposure_after(step)["stats/words"] for step in range(found.config.max_steps + 1)]
    tokens = [found.plan.tokens_before(step) for step in range(found.config.max_steps + 1)]
    names = {"chck_500": 500, "chck_1k": 1000, "chck_1500": 1500, "chck_2k": 2000}
    steps = {name: next(step for step, words in enumerate(seen) if words >= least) for name, least in names.items()}
    tenth = found.corpus.tokens_before_epoch(1) / 10
    return steps | {"chck_0.1e": next(step for step, sum_ in enumerate(tokens) if sum_ >= tenth)}


def weights(folder: Path, name: str) -> dict:
    return locate(folder / "checkpoints" / name).tensors("ema")


def test_checkpoints_by_words_are_kept_at_the_exact_step(inputs, tmp_path, capsys):
    steps = named_steps(inputs, tmp_path)
    assert train_single_gpu.main(arguments(inputs, tmp_path, **NAMED, keep_last=1)) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "run" / "checkpoints"
    assert "5 named checkpoints: chck_" in printed
    assert "; behind the end of the run: chck_9k" in printed
    last = locate(tmp_path / "run").step
    assert {path.name: locate(path).step for path in folder.glob("chck_*")} == steps
    assert {path.name for path in folder.glob("step_*")} == {f"step_{step:08d}" for step in (*steps.values(), last)}
    assert locate(folder / "chck_500").record["files"].keys() >= {"optimizer.safetensors"}

    shutil.rmtree(folder / f"step_{last:08d}")  # as if it had been killed: it meets the later ones once more
    newest = max(steps.values())
    before = weights(tmp_path / "run", "chck_2k")
    (folder / "chck_2k").unlink()  # killed between the checkpoint and its name
    assert train_single_gpu.main(arguments(inputs, tmp_path, **NAMED, keep_last=1)) == 0
    assert f"chck_2k is {folder / f'step_{newest:08d}'}" in capsys.readouterr().out
    assert {path.name: locate(path).step for path in folder.glob("chck_*")} == steps
    for key, value in weights(tmp_path / "run", "chck_2k").items():
        assert value.equal(before[key])


def test_named_checkpoints_of_weights_alone_are_models(inputs, tmp_path, capsys):
    steps = named_steps(inputs, tmp_path)
    given = arguments(inputs, tmp_path, **NAMED, save_weights_only=True)
    assert train_single_gpu.main(given) == 0
    folder = tmp_path / "run" / "checkpoints"
    last = locate(tmp_path / "run").step
    assert {path.name for path in folder.glob("step_*")} == {f"step_{step:08d}" for step in (*range(5, last, 5), last)}
    for name, step in steps.items():
        assert locate(folder / name).step == step
        assert locate(folder / name).record["files"].keys().isdisjoint({"optimizer.safetensors"})
        assert not (folder / name).is_symlink()
        assert load_model(folder / name, ema=True)[2].hidden_size == 32
    capsys.readouterr()
    assert train_single_gpu.main([*given, "--name=other", f"--resume={folder / 'chck_500'}"]) == 2
    assert "holds weights alone; --initial_weights starts from them" in capsys.readouterr().err
    assert train_single_gpu.main(arguments(inputs, tmp_path, **NAMED, name="full")) == 0
    for name in steps:
        for key, value in weights(tmp_path / "full", name).items():
            assert value.equal(weights(tmp_path / "run", name)[key])


@pytest.mark.slow
def test_ranks_save_the_same_named_checkpoints(inputs, tmp_path):
    ranks = 4
    slow = {**NAMED, "warmup_proportion": 0.5}  # the first step would turn rounding errors into whole ones
    run(arguments(inputs, tmp_path, name="one", **slow))
    run(arguments(inputs, tmp_path, name="many", save_weights_only=True, **slow), ranks)
    for name, step in named_steps(inputs, tmp_path).items():
        assert locate(tmp_path / "many" / "checkpoints" / name).step == step
        found, expected = weights(tmp_path / "many", name), weights(tmp_path / "one", name)
        assert all(value.allclose(expected[key], atol=2e-3) for key, value in found.items())
