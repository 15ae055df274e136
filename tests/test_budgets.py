"""Budgets: the length of a run in tokens, words, epochs and hours."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

import train_single_gpu
from data.positions import parse_amount
from data.shards import describe_shard, tokenizer_hash, write_manifest
from slurm.tasks import to_arguments
from tests.helpers.tiny_runs import flags, make_inputs, run, training_lines
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
    assert f" in {len(lines)} steps, the fewest that use up --max_words 2000 (" in capsys.readouterr().out
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_hours_end_a_run_early_with_a_checkpoint(inputs, tmp_path, ranks):
    given = arguments(inputs, tmp_path, max_steps=100_000, max_hours=0.0003)
    stopped = run(given, ranks)
    step = locate(tmp_path / "run").step
    assert f"stopped by --max_hours 0.0003 after step {step}\n" in stopped.stdout
    assert 0 < step < 100_000
    assert read_status(tmp_path / "run").state == "stopped"
    assert locate(tmp_path / "run").record["hours"] > 0.0002
    again = run(given, ranks)  # the hours are those of all starts: none is left
    assert f"after step {step}\n" in again.stdout
    run(arguments(inputs, tmp_path, max_steps=100_000, max_hours=0.0005), ranks)
    assert locate(tmp_path / "run").step > step
