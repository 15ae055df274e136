"""Rows begin with `<s>` and the average of the weights has a warm-up, but not in runs begun before these flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import flags, make_inputs, training_lines
from safetensors.torch import load_file

from train_single_gpu import main
from training.distributed import single_world
from training.metric_logger import read_metrics
from training.schedules import average_decay


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("row_start") / "inputs", documents=60)


def train(inputs: Path, output: Path, name: str = "run", **options) -> int:
    short = {"max_steps": 4, "save_every": 2, "validate_every": 0, "global_batch_size": 16, **options}
    return main(flags(inputs, output, name, **short), single_world)


def as_before_the_flags(run: Path) -> None:
    """Leave `run` as training left it after step 2 when there was no --row_start and no --ema_warmup."""
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    for record in (run / "config.json", run / "checkpoints" / "step_00000002" / "checkpoint.json"):
        content = json.loads(record.read_text())
        assert content["flags"].pop("row_start") is False
        assert content["flags"].pop("ema_warmup") is False
        record.write_text(json.dumps(content))


def averages(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step_00000004" / "ema.safetensors")


@pytest.mark.slow
def test_run_from_before_the_flags_resumes_as_it_began(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path, row_start=False, ema_warmup=False) == 0
    run = tmp_path / "run"
    whole, average = training_lines(run), averages(run)
    assert "rows do not begin with <s>" not in capsys.readouterr().out
    as_before_the_flags(run)
    shutil.copytree(run, tmp_path / "contrary")
    assert train(inputs, tmp_path, "contrary", row_start=True) == 2
    assert "--row_start was False and is now True" in capsys.readouterr().err
    assert train(inputs, tmp_path, "branch", resume=run / "checkpoints" / "step_00000002") == 0
    assert capsys.readouterr().out.count("note: rows do not begin with <s>") == 1
    for _ in range(2):  # the second time it has the flag, from the first
        assert train(inputs, tmp_path) == 0
        chosen = json.loads((run / "config.json").read_text())["flags"]
        assert (chosen["row_start"], chosen["ema_warmup"]) == (False, False)
        for name, tensor in averages(run).items():
            torch.testing.assert_close(tensor, average[name])
        shutil.rmtree(run / "checkpoints" / "step_00000004")
    told = capsys.readouterr().out
    assert told.count("note: rows do not begin with <s>") == told.count("note: the average of the weights has no") == 1
    for found in (training_lines(run), training_lines(tmp_path / "branch")):
        assert [line["train/loss"] for line in found[-2:]] == pytest.approx(
            [line["train/loss"] for line in whole[2:]], rel=1e-6
        )


def test_new_run_has_the_later_default_and_keeps_it(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path, max_steps=2) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["flags"]["row_start"] is True
    assert train(inputs, tmp_path, max_steps=2, row_start=False) == 2
    assert "--row_start was True and is now False" in capsys.readouterr().err


@pytest.mark.slow
def test_ema_of_a_short_run_is_as_good_as_its_weights(inputs, tmp_path):
    """Without a warm-up it is nearly the initial weights here, with losses some two nats above those of the weights."""
    assert train(inputs, tmp_path, max_steps=30, save_every=0, validate_every=30, global_batch_size=64) == 0
    found = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "valid/masked_loss" in line][-1]
    for objective in ("masked", "causal"):
        assert found[f"valid/ema_{objective}_loss"] < found[f"valid/{objective}_loss"] + 0.1


def test_ema_decay_is_a_function_of_the_step():
    decays = [average_decay(done, 0.999, warm_up=True) for done in range(1, 20_001)]
    assert decays[0] == pytest.approx(2 / 11)
    assert decays == sorted(decays)
    assert decays[8988] < decays[8990] == decays[-1] == 0.999
    assert average_decay(1, 0.999, warm_up=False) == 0.999
