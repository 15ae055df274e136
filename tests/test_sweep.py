"""Sweeps and the runs they make: values, names, flags, paths, times, and their mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT

from slurm.job_options import LaunchError, parse_minutes
from slurm.launch import main
from slurm.sweep import SweepError, combinations, format_table, make_axis, parse_axis
from slurm.tasks import plan_tasks, to_arguments
from training.config import parse_config

NEEDED = ["--train_path=shards/*.shard", "--config_file=model.json", "--tokenizer_path=t.json", "--name=run"]


def holds_list(flag: str) -> bool:
    return flag == "length_milestones"


# Sweeps


def test_sweep_is_the_product_of_its_values():
    axes = [parse_axis("learning_rate=1e-2,5e-3", holds_list), parse_axis("--seed=1,2,3", holds_list)]
    found = combinations(axes)
    assert [values for values, _ in found[:4]] == [
        {"learning_rate": "1e-2", "seed": "1"},
        {"learning_rate": "1e-2", "seed": "2"},
        {"learning_rate": "1e-2", "seed": "3"},
        {"learning_rate": "5e-3", "seed": "1"},
    ]
    assert found[5][1] == "-learning_rate=5e-3-seed=3"
    assert combinations([]) == [({}, "")]


@pytest.mark.parametrize(
    ("text", "values", "labels"),
    [
        ("length_milestones=0.7:0.9,0.5,:", ("0.7,0.9", "0.5", ""), ("0.7+0.9", "0.5", "none")),
        ("config-file=configs/a.json,configs/b.json", ("configs/a.json", "configs/b.json"), ("a.json", "b.json")),
        ("train_path=x/train,y/train", ("x/train", "y/train"), ("x_train", "y_train")),
        ("wandb_project=a b,c:d", ("a b", "c:d"), ("a_b", "c_d")),
    ],
)
def test_sweep_values_and_run_names(text, values, labels):
    axis = parse_axis(text, holds_list)
    assert (axis.values, axis.labels) == (values, labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate", "is not FLAG=VALUE"),
        ("seed=", "empty value"),
        ("seed=1,,2", "empty value"),
        ("seed=1,1", "give each value once"),
    ],
)
def test_bad_sweeps_are_refused(text, message):
    with pytest.raises(SweepError, match=message):
        parse_axis(text, holds_list)


def test_flag_is_swept_once():
    with pytest.raises(SweepError, match="given twice"):
        combinations([make_axis("seed", ["1"]), make_axis("seed", ["2"])])


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00", 4), ("4:01", 5), ("4:00:00", 240), ("1-2", 1560), ("1-2:30", 1590), ("2-00:00:01", 2881)],
)
def test_time_limits_as_sbatch_reads_them(text, minutes):
    assert parse_minutes(text) == minutes


def test_unlimited_and_invalid_time_limits():
    assert parse_minutes("UNLIMITED") == 0
    for text in ("4h", "1-", "1:2:3:4", "", "-5"):
        with pytest.raises(LaunchError, match="none of SLURM's forms"):
            parse_minutes(text)


def test_tables_leave_out_empty_columns():
    assert format_table(["a", "bb", "c"], [[1, "", "x"], [22, "", ""]]) == "a   c\n1   x\n22"


# Runs


def test_relative_paths_are_those_of_the_submitting_folder(tmp_path):
    (task,) = plan_tasks([*NEEDED, "--resume=../old", "--valid_path=/abs/v"], [], tmp_path)
    assert f"--train_path={tmp_path}/shards/*.shard" in task.arguments
    assert f"--config_file={tmp_path}/model.json" in task.arguments
    assert f"--resume={tmp_path}/../old" in task.arguments
    assert "--valid_path=/abs/v" in task.arguments
    assert task.run_folder == f"{tmp_path}/runs/run"
    (task,) = plan_tasks([*NEEDED, "--resume=never", "--checkpoint_filename="], [], tmp_path)
    assert "--resume=never" in task.arguments
    assert not any(argument.startswith("--checkpoint_filename") for argument in task.arguments)


def test_arguments_reproduce_the_configuration(tmp_path, monkeypatch):
    """Also what came from a recipe, which may change while the job waits."""
    monkeypatch.chdir(tmp_path)
    recipe = {"length_milestones": [], "compile": False, "mixed_precision": True, "document_end": False, "seed": 7}
    Path("r.json").write_text(json.dumps({**recipe, "save_steps": [10, 20], "learning_rate": 1e-3}))
    given = [*NEEDED, "--recipe=r.json", "--token_weighted_loss", "--learning_rate=3e-05", "--name=-odd name"]
    config = parse_config(given, "")
    again = to_arguments(config)
    assert not any("recipe" in argument for argument in again)
    assert parse_config(again, "") == config
    assert (config.length_milestones, config.compile, config.save_steps) == ((), False, (10, 20))


def test_sweep_runs_have_their_own_names_and_values(tmp_path):
    axes = [make_axis("length_milestones", ["0.5,0.8", ""]), make_axis("document_end", ["true", "false"])]
    tasks = plan_tasks(NEEDED, axes, tmp_path)
    assert [task.index for task in tasks] == [0, 1, 2, 3]
    assert tasks[0].name == "run-length_milestones=0.5+0.8-document_end=true"
    assert len({task.run_folder for task in tasks}) == 4
    configs = [parse_config(task.arguments, "") for task in tasks]
    assert [config.length_milestones for config in configs] == [(0.5, 0.8), (0.5, 0.8), (), ()]
    assert [config.document_end for config in configs] == [True, False, True, False]
    assert [config.name for config in configs] == [task.name for task in tasks]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "--train_path=x"], "--config_file is ''; it is required"),
        (["--", *NEEDED, "--lerning_rate=1"], "did you mean --learning_rate"),
        (["--sweep", "learning_rate=1,abc", "--", *NEEDED], "--learning_rate"),
        (["--sweep", "learning_rate=1,-1", "--", *NEEDED], "--learning_rate is -1.0; it must be above 0"),
        (["--sweep", "rate=1", "--", *NEEDED], "training has no such flag"),
        (["--sweep", "name=a,b", "--", *NEEDED], "names of runs are made from"),
        (["--sweep", "compile=1", "--", *NEEDED], "true and false"),
        (["--learning_rate", "1", "--", *NEEDED], "--learning_rate is a flag of training and belongs after --"),
        (["--gpus", "4", "--", *NEEDED], "unknown flag or value '--gpus'"),
        (["--time", "4h", "--", *NEEDED], "--time '4h' is none of SLURM's forms"),
        (["--nodes", "0", "--", *NEEDED], "--nodes is 0; it must be at least 1"),
        (["--sbatch", "array=1-3", "--", *NEEDED], "--sbatch array is set by the launcher"),
        (["--sbatch", "=3", "--", *NEEDED], "is not KEY=VALUE"),
        (["--local", "--nodes", "2", "--", *NEEDED], "--local is this machine alone"),
        (["--log_folder", "x%j", "--dry_run", "--", *NEEDED], "has a % in its name"),
        (["--status", "nowhere"], "neither a job folder"),
        (["--", *NEEDED, f"--name={'n' * 250}"], "too long for a folder"),
    ],
)
def test_mistakes_are_refused_before_submission(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert message in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_submission_without_submitit_or_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--", *NEEDED]) == 2
    assert "sbatch is not installed on this host" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["--", *NEEDED]) == 2
    assert "pip install 'submitit>=1.5'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["launch", "requeue"])
def test_launch_and_requeue_import_little(module):
    """Help is fast, and a job's requeue may run outside of the container that has torch."""
    code = f"import sys; import slurm.{module}; assert not {{'torch', 'submitit', 'tokenizers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
