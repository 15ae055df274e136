"""evaluation/average.py: the mean of checkpoints' weights is a checkpoint of weights alone; averages that runs keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tiny_runs import flags, make_inputs, refusal

from evaluation.average import main
from export.load_model import load_model
from export.to_huggingface import Choices, export
from train_single_gpu import main as train
from training.checkpoint import locate, open_checkpoint, read_initial_weights, write_checkpoint
from training.metric_logger import read_metrics
from training.schedules import average_decay


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


def test_averages_that_a_run_keeps_are_those_of_its_checkpoints(tmp_path: Path, capsys):
    """Each decay by its recursion, the tail as their mean, also when cut off in it; by name in other programs."""
    inputs, run, decays = make_inputs(tmp_path / "inputs", documents=60), tmp_path / "run", (0.999, 0.4, 0.25)
    short = {"max_steps": 6, "save_every": 1, "validate_every": 0, "length_milestones": "", "validation_steps": 1}
    arguments = flags(inputs, tmp_path, ema_decay="0.999,0.4,0.25", tail_average="50%", **short)
    assert train(arguments) == 0
    said = capsys.readouterr().out
    assert "EMA 0.999, 0.4, 0.25 with a warm-up, mean of the last 3 steps" in said
    assert "of it for further averages" in said
    steps = [open_checkpoint(run / "checkpoints" / f"step_{step:08}") for step in range(1, 7)]
    names = ["ema", "ema_0.4", "ema_0.25"]
    assert [
        f"{name}.safetensors" in steps[step].record["files"] for step in (2, 3) for name in (*names, "ema_tail")
    ] == ([True, True, True, False, True, True, True, True])
    last, weights = steps[-1], [step.tensors("model") for step in steps]
    for key in weights[0]:
        for name, decay in zip(names, decays, strict=True):
            expected = steps[0].tensors(name)[key].double()
            for done in range(2, 7):
                expected = torch.lerp(weights[done - 1][key].double(), expected, average_decay(done, decay, True))
            torch.testing.assert_close(last.tensors(name)[key], expected.float())
    assert main([str(run), "--last", "3", "--output", str(tmp_path / "mean")]) == 0
    expected = read_initial_weights(str(tmp_path / "mean"))
    tail = load_model(run, ema="tail")[0].state_dict()
    assert all(torch.allclose(tail[key], expected[key], atol=1e-6) for key in expected)
    validated = [line for line in read_metrics(run / "metrics.jsonl") if "valid/ema-tail_causal_loss" in line]
    assert [line["step"] for line in validated] == [6]
    assert validated[0]["valid/ema-0.4_masked_loss"] != validated[0]["valid/ema_masked_loss"]
    for step in (6, 5):  # again from within the tail
        last.path.with_name(f"step_{step:08}").rename(tmp_path / f"gone_{step}")
    assert train(arguments) == 0
    again = locate(run)
    for name in (*names, "ema_tail"):
        a, b = again.tensors(name), open_checkpoint(tmp_path / "gone_6").tensors(name)
        assert all(torch.equal(a[key], b[key]) for key in b), name
    export(run, tmp_path / "exported", Choices(ema="0.25"))
    exported, expected = load_model(tmp_path / "exported")[0].state_dict(), again.tensors("ema_0.25")
    assert all(torch.equal(exported[key], expected[key]) for key in expected)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert (
        f"| validation: masked loss | {read_metrics(run / 'metrics.jsonl')[-1]['valid/ema-0.25_masked_loss']:.4g} |"
        in card
    )
    assert "averaged weights (ema_0.25 of the checkpoint)" in card
    assert "has no ema_0.7.safetensors; it holds ema.safetensors, ema_0.25.safetensors" in refusal(
        capsys, main, [str(run), str(run), "--average", "0.7", "--output", str(tmp_path / "none")]
    )
