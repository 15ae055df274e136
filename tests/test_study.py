"""benchmarks/study.py: a study's runs in small, and its figure; what the shipped studies ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs

from benchmarks.study import main, write_recipes
from training.config import FIELDS, TrainingConfig, read_recipe

STUDIES = sorted((ROOT / "configs" / "recipes").glob("study_*.json"))
_BUDGET_MINUTES = 60
_RUN_MINUTES = 213 / 60  # of ten epochs of 10 M words, with its start: benchmarks/speedrun/README.md


def test_there_is_one_for_each_question():
    assert {path.stem for path in STUDIES} == {"study_ratio", "study_biphasic", "study_diffusion", "study_antlm"}


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_runs_of_a_study_are_valid_and_take_less_than_an_hour(path: Path, tmp_path: Path):
    needed = {"train_path": "x", "tokenizer_path": "y", "name": "z"}
    study = json.loads(path.read_text())
    runs = [TrainingConfig(**read_recipe(str(recipe)), **needed) for recipe in write_recipes(study, tmp_path).values()]
    assert len({tuple(str(getattr(run, name)) for name in FIELDS) for run in runs}) == len(runs)
    assert {run.max_epochs for run in runs} == {"10"}
    assert len(runs) * _RUN_MINUTES < _BUDGET_MINUTES


def test_one_command_trains_a_study_and_draws_its_figure(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    inputs, home = make_inputs(tmp_path / "inputs", documents=60), tmp_path / "home"
    study = json.loads((ROOT / "configs" / "recipes" / "study_antlm.json").read_text())
    study["_runs"] = {name: study["_runs"][name] for name in ("masked", "causal 4, masked 16, causal 4")}
    own = flags(inputs, home, validation_steps=1, max_steps=3, length_milestones="")
    # What a study is about, or its command gives, is not given again.
    taken = ("hybrid_", "learning_rate", "output_dir", "name", "wandb_mode", "max_steps")
    own = [argument for argument in own if not argument.startswith(tuple(f"--{name}" for name in taken))]
    study["max_epochs"] = "2"
    (tmp_path / "antlm.json").write_text(json.dumps(study))
    command = [str(tmp_path / "antlm.json"), "--output", str(home), *own]
    assert main([*command, "--dry_run"]) == 0
    assert capfd.readouterr().out.count("train_single_gpu.py") == 2
    assert not (home / "antlm.png").exists()
    assert main(command) == 0
    assert (home / "antlm.png").stat().st_size > 5000
    scores = json.loads((home / "antlm.json").read_text())["scores"]
    assert list(scores["masked loss, EMA"]) == list(study["_runs"])
    assert len({mean for mean, _ in scores["masked loss, EMA"].values()}) == 2
    assert "| causal 4, masked 16, causal 4 | " in capfd.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([str(inputs / "model.json"), "--output", str(home)])
    assert "cannot be read as a study, a recipe with _runs" in capfd.readouterr().err
