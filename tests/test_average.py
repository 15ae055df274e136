"""evaluation/average.py: the mean of checkpoints' weights is a checkpoint of weights alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tiny_runs import refusal

from evaluation.average import main
from training.checkpoint import open_checkpoint, read_initial_weights, write_checkpoint


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """A run's folder of three checkpoints with weights that are multiples of one model's."""
    weights = make_model().state_dict()
    files = {"config.json": b"{}", "tokenizer.json": b"{}"}
    for step, factor in ((10, 7.0), (20, 1.0), (30, 2.0)):
        model = {name: value * factor for name, value in weights.items()}
        ema = {name: -value for name, value in model.items()}
        write_checkpoint(tmp_path / "run" / "checkpoints", step, {"model": model, "ema": ema}, {"flags": {}}, files)
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize(("ema", "sign"), [(False, 1), (True, -1)])
def test_mean_of_the_newest_or_of_named_checkpoints(checkpoints: Path, tmp_path: Path, ema: bool, sign: int):
    named = [str(checkpoints / f"step_000000{step}") for step in (20, 30)]
    flags = ["--ema"] * ema
    assert main([str(tmp_path / "run"), "--last", "2", "--output", str(tmp_path / "a"), *flags]) == 0
    assert main([*named, "--output", str(tmp_path / "b"), *flags]) == 0
    for folder in ("a", "b"):
        assert open_checkpoint(tmp_path / folder).step == 30
        found = read_initial_weights(str(tmp_path / folder))
        for name, value in make_model().state_dict().items():
            torch.testing.assert_close(found[name], sign * 1.5 * value)


def test_what_cannot_be_averaged_is_refused(checkpoints: Path, tmp_path: Path, capsys):
    run, output = str(tmp_path / "run"), ["--output", str(tmp_path / "out")]
    assert "1 checkpoints are too few for an average" in refusal(capsys, main, [run, *output])
    assert "3 checkpoints are too few for --last 4" in refusal(capsys, main, [run, "--last", "4", *output])
    assert "exists" in refusal(capsys, main, [run, "--last", "2", "--output", run])
    files = {"config.json": b"{}", "tokenizer.json": b"{}"}
    write_checkpoint(checkpoints, 40, {"model": {"x": torch.ones(2)}}, {"flags": {}}, files)
    assert "holds another model than" in refusal(capsys, main, [run, "--last", "2", *output])
    assert not (tmp_path / "out").exists()
