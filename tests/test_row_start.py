"""Rows begin with `<s>`; a run begun before there was --row_start goes on as it began."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import flags, make_inputs, training_lines

from training.distributed import single_world
from training.loop import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("row_start") / "inputs", documents=60)


def train(inputs: Path, output: Path, name: str = "run", **options) -> int:
    short = {"max_steps": 4, "save_every": 2, "validate_every": 0, "global_batch_size": 16, **options}
    return main(flags(inputs, output, name, **short), "", single_world)


def as_before_the_flag(run: Path) -> None:
    """Leave `run` as training left it after step 2 when there was no --row_start."""
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    for record in (run / "config.json", run / "checkpoints" / "step_00000002" / "checkpoint.json"):
        content = json.loads(record.read_text())
        assert content["flags"].pop("row_start") is False
        record.write_text(json.dumps(content))


def test_a_run_from_before_the_flag_goes_on_as_it_began(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path, row_start=False) == 0
    run = tmp_path / "run"
    whole = training_lines(run)
    assert "rows do not begin with <s>" not in capsys.readouterr().out
    as_before_the_flag(run)
    shutil.copytree(run, tmp_path / "contrary")
    assert train(inputs, tmp_path, "contrary", row_start=True) == 2
    assert "--row_start was False and is now True" in capsys.readouterr().err
    assert train(inputs, tmp_path, "branch", resume=run / "checkpoints" / "step_00000002") == 0
    assert capsys.readouterr().out.count("note: rows do not begin with <s>") == 1
    for _ in range(2):  # the second time it has the flag, from the first
        assert train(inputs, tmp_path) == 0
        assert json.loads((run / "config.json").read_text())["flags"]["row_start"] is False
        shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert capsys.readouterr().out.count("note: rows do not begin with <s>") == 1
    for found in (training_lines(run), training_lines(tmp_path / "branch")):
        assert [line["train/loss"] for line in found[-2:]] == pytest.approx(
            [line["train/loss"] for line in whole[2:]], rel=1e-6
        )


def test_a_new_run_has_it_and_keeps_to_it(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path, max_steps=2) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["flags"]["row_start"] is True
    assert train(inputs, tmp_path, max_steps=2, row_start=False) == 2
    assert "--row_start was True and is now False" in capsys.readouterr().err
