"""Flags: what their metadata says is what command line, recipe and configuration hold to."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from data.flag_rules import GROUPS
from slurm.tasks import with_absolute_paths
from training.config import FIELDS, ConfigError, TrainingConfig, parse_config

NEEDED = TrainingConfig(train_path="a", config_file="b", tokenizer_path="c", name="d")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train_path": ""}, "--train_path is ''; it is required"),
        ({"name": ".."}, "--name is '..'; it names a folder: no slashes"),
        ({"max_steps": 0}, "--max_steps is 0; it must be at least 1"),
        ({"max_fruitless_starts": 0}, "--max_fruitless_starts is 0; it must be at least 1"),
        ({"seq_length": 1}, "--seq_length is 1; it must be at least 2: a row needs a next token"),
        ({"n_special_tokens": -1}, "--n_special_tokens is -1; it must be at least 0"),
        ({"save_every": -1}, "--save_every is -1; it must be at least 0"),
        ({"weight_decay": -0.1}, "--weight_decay is -0.1; it must be at least 0"),
        ({"step_timeout": 0.0}, "--step_timeout is 0.0; it must be above 0"),
        ({"learning_rate": math.inf}, "--learning_rate is inf; it must be a finite number"),
        ({"mask_p_end": math.nan}, "--mask_p_end is nan; it must be a finite number"),
        ({"mask_p_end": 1.1}, "--mask_p_end is 1.1; it is a fraction and must be between 0 and 1"),
        ({"ema_decay": 1.0}, "--ema_decay is 1.0; it must be at least 0 and below 1"),
        ({"length_milestones": (0.9, 0.7)}, "--length_milestones is '0.9,0.7'; it must be rising numbers above 0 and"),
        ({"max_words": "10Mt"}, "--max_words is '10Mt'; it is a number of words above 0, such as"),
        ({"max_epochs": "0"}, "--max_epochs is '0'; it is a number of epochs above 0, such as"),
        ({"save_steps": (0, 5)}, "--save_steps is '0,5'; steps count from 1"),
        (
            {"hybrid_numerator_end": 17},
            "--hybrid_numerator_end is 17; it must be between 0 and --hybrid_denominator (16)",
        ),
        (
            {"hybrid_numerator_end": -2},
            "--hybrid_numerator_end is -2; it must be between 0 and --hybrid_denominator (16)",
        ),
        (
            {"warmup_proportion": 0.7, "cooldown_proportion": 0.4},
            "--warmup_proportion is 0.7; with --cooldown_proportion",
        ),
        ({"evaluate_every": 5}, "--evaluate_every is 5 but there is no --evaluate_data"),
        ({"resume": "never", "checkpoint_filename": "x"}, "both say where to resume from; give one of them"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(values: dict, sentence: str):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(NEEDED, **values)
    assert sentence in str(refused.value)


def test_every_default_keeps_its_rules_and_every_number_has_one():
    for name, spec in FIELDS.items():
        required = name in ("train_path", "config_file", "tokenizer_path", "name")
        assert all(rule.holds(spec.default) for rule in spec.metadata["rules"]) != required, name
        if spec.metadata["kind"] in (int, float) and not name.startswith("hybrid_numerator"):
            assert spec.metadata["rules"], name


def test_group_decides_what_a_resumed_run_may_change():
    exceptions = {
        name for name, spec in FIELDS.items() if spec.metadata["fixed"] != GROUPS[spec.metadata["group"]].fixed
    }
    lengths = {"max_tokens", "max_words", "max_epochs", "max_hours"}  # --max_steps is what they come to
    assert exceptions == {"hybrid_split", "local_batch_size", *lengths}
    assert {name for name, group in GROUPS.items() if group.fixed} == {"objective", "batches", "optimization"}
    assert {spec.metadata["group"] for spec in FIELDS.values()} == GROUPS.keys()


def test_paths_mean_the_same_from_anywhere():
    names = {name for name, spec in FIELDS.items() if spec.metadata["path"]}
    assert names == {
        name for name in FIELDS if name.endswith(("_path", "_dir", "_file", "_data", "_filename", "_weights"))
    } | {"resume", "plugin", "anneal_from"}
    plugins = with_absolute_paths(dataclasses.replace(NEEDED, plugin=("x.py", "/y.py")), Path("/from")).plugin
    assert plugins == ("/from/x.py", "/y.py")
    for name in names - {"checkpoint_filename", "plugin"}:
        config = dataclasses.replace(NEEDED, **{name: "x/y"})
        assert getattr(with_absolute_paths(config, Path("/from")), name) == "/from/x/y", name
    assert with_absolute_paths(NEEDED, Path("/from")).resume == "auto"
    assert with_absolute_paths(NEEDED, Path("/from")).spare_checkpoint_dir == ""


def test_recipe_values_have_the_flag_s_type(tmp_path: Path):
    recipe = tmp_path / "recipe.json"
    arguments = [f"--recipe={recipe}", "--train_path=a", "--config_file=b", "--tokenizer_path=c", "--name=d"]
    recipe.write_text(
        json.dumps({"save_steps": [1, 5], "length_milestones": [0.5], "max_gradient": 1, "row_start": None})
    )
    config = parse_config(arguments, "")
    assert (config.save_steps, config.length_milestones, config.row_start) == ((1, 5), (0.5,), None)
    assert isinstance(config.max_gradient, float)
    for name, value in (
        ("save_steps", [1.5]),
        ("seed", 1.0),
        ("document_end", None),
        ("masking", "odd"),
        ("seed", True),
    ):
        recipe.write_text(json.dumps({name: value}))
        with pytest.raises(ConfigError, match=f"{name}.*it must be"):
            parse_config(arguments, "")
