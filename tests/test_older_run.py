"""A run folder made by commit df7372a (version 0.1.0) resumes and evaluates as it did with that commit's own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, run

from evaluation import minimal_pairs, perplexity
from training.metric_logger import read_metrics

FIXTURE = ROOT / "tests" / "fixtures" / "run_of_df7372a"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
WEIGHTS = {"weights": [], "average": ["--ema"]}
# Sums of float32 in another order, as another version or processor forms them, and what ten steps make of that.
ROUNDING = 1e-4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in which training may write; the run's paths are relative to it."""
    copy = shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(copy)
    return copy


def command(run_folder: Path) -> list[str]:
    """The flags that the run was started with."""
    return json.loads((run_folder / "config.json").read_text())["launches"][0]["command"][1:]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def approximately(key: str, value: float):
    """`value` up to rounding, which may also turn the one or other target of nearly equal logits."""
    return pytest.approx(value, rel=ROUNDING, abs=0.02 if "accuracy" in key else None)


def assert_evaluates(step: int) -> None:
    """The newest checkpoint gives the pairs' scores and the perplexities that df7372a found at `step`."""
    for name, flags in WEIGHTS.items():
        expected = EXPECTED["evaluation"][f"step {step}"][name]
        pairs = ["run", *flags, "--device=cpu", "--document_end", "--data=pairs"]
        assert minimal_pairs.main([*pairs, "--output=pairs.json", "--scores=scores.jsonl"]) == 0
        modes = json.loads(Path("pairs.json").read_text())["sets"]["pairs"]["modes"]
        assert {mode: found["all"]["accuracy"] for mode, found in modes.items()} == expected["accuracy"]
        scores = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
        for key, values in expected["scores"].items():
            assert [pair[key] for pair in scores] == pytest.approx(values, rel=ROUNDING)

        text = ["run", *flags, "--device=cpu", "--seq_length=32", "--data=inputs/shards/validation"]
        assert perplexity.main([*text, "--output=text.json"]) == 0
        [found] = json.loads(Path("text.json").read_text())["texts"].values()
        for key, value in expected["perplexity"].items():
            assert found[key] == approximately(key, value), key


def test_fixture_is_complete():
    """What the rules of .gitignore would leave out is there: the killed run, its shards and its weights."""
    assert checkpoints(FIXTURE) == ["step_00000010", "step_00000020"]
    assert len(list(FIXTURE.rglob("*.safetensors"))) == 6
    assert len(list(FIXTURE.rglob("*.shard"))) == 2
    assert read_metrics(FIXTURE / "run" / "metrics.jsonl")[-1]["step"] == 22
    assert "row_start" not in json.loads((FIXTURE / "run" / "config.json").read_text())["flags"]


def test_older_checkpoint_evaluates_as_it_did(folder, capsys):
    assert_evaluates(20)


@pytest.mark.slow
def test_older_run_resumes_as_it_would_have_gone_on(folder, capsys):
    """Its losses, gradient norms, validation and final weights are those that df7372a reached after the same kill."""
    done = run(command(folder / "run"))
    assert "steps 20 -> 30" in done.stdout
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["step"] > 20]
    assert len(lines) == len(EXPECTED["metrics"])
    for found, expected in zip(lines, EXPECTED["metrics"], strict=True):
        for key, value in expected.items():
            assert found[key] == approximately(key, value), (expected["step"], key)
    assert_evaluates(30)


@pytest.mark.slow
def test_older_run_refuses_what_it_did_not_have(folder):
    """Its rows do not begin with `<s>`, and it stays so: asked to, the resume is refused and changes nothing."""
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    refused = run([*command(folder / "run"), "--row_start"], check=False)
    assert refused.returncode == 2
    assert "--row_start was False and is now True" in refused.stderr
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before
    assert checkpoints(folder) == ["step_00000010", "step_00000020"]
