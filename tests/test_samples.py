"""Sample completions: what training writes at each validation, and the command on the newest checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.report_pages import text_of, write_run
from helpers.tiny_runs import flags, make_inputs, run

from evaluation import samples
from report import html_report


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    """A run of the training script, on documents long enough for samples."""
    folder = tmp_path_factory.mktemp("samples")
    options = {"max_steps": 12, "validate_every": 6, "save_every": 6, "validation_samples": 3}
    run(flags(make_inputs(folder / "inputs"), folder, **options))
    return folder / "run"


@pytest.fixture
def copied_run(real_run, tmp_path) -> Path:
    """The same run in a folder that a test may write into."""
    return Path(shutil.copytree(real_run, tmp_path / "run"))


def test_finished_run_has_its_report_and_samples_of_every_validation(real_run):
    text = text_of((real_run / "report.html").read_text())
    assert "run finished" in text
    assert "After step 12, averaged weights (EMA)." in text
    found = samples_of(real_run)
    assert [(s["step"], s["kind"]) for s in found] == [(n, k) for n in (6, 12) for k in ["causal"] * 3 + ["masked"] * 3]
    for sample in found:
        if sample["kind"] == "masked":
            assert sample["text"].count("<mask>") == len(sample["gaps"]) == 2
            for gap in sample["gaps"]:
                probabilities = [probability for _, probability in gap["candidates"]]
                assert probabilities == sorted(probabilities, reverse=True)
                assert 0 < sum(probabilities) <= 1
                assert gap["truth"].strip().isalpha()
        else:
            assert sample["truth"]


def test_samples_of_the_newest_checkpoint_with_own_texts(copied_run):
    texts = ["--prompt", "the cat", "--prompt", "", "--gap", "the <mask> sees"]
    assert samples.main([str(copied_run), *texts, "--device", "cpu"]) == 0
    found = samples_of(copied_run)
    assert {s["step"] for s in found} == {6, 12}
    causal, empty, masked = [s for s in found if s["step"] == 12]  # in place of those of training
    assert (causal["prompt"], causal["truth"], masked["text"]) == ("the cat", None, "the <mask> sees")
    assert (empty["prompt"], empty["weights"]) == ("", "ema")
    assert masked["gaps"][0]["truth"] is None
    assert html_report.main([str(copied_run)]) == 0
    assert "the cat" in text_of((copied_run / "report.html").read_text())
    earlier = copied_run / "checkpoints" / "step_00000006"  # a checkpoint by name: its run's file again
    assert samples.main([str(earlier), "--prompt", "a mouse", "--device", "cpu"]) == 0
    assert [s["prompt"] for s in samples_of(copied_run) if s["step"] == 6] == ["a mouse"]
    assert not (earlier / "samples.jsonl").exists()


def test_samples_of_held_out_documents_equal_those_of_training(copied_run):
    """The same weights give what the training loop wrote."""
    before = samples_of(copied_run)
    assert samples.main([str(copied_run), "--device", "cpu"]) == 0
    assert [(s.get("prompt"), s["text"]) for s in samples_of(copied_run)] == [
        (s.get("prompt"), s["text"]) for s in before
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "none is not a folder"),
        (["run"], "has no checkpoint yet|is not a checkpoint"),
        (["run", "--gap", "x"], "there is no <mask> in the text 'x'"),
    ],
)
def test_refusals_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    assert samples.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert re.search(sentence, error)


def test_run_without_held_out_data_needs_texts(copied_run, capsys):
    config = json.loads((copied_run / "config.json").read_text())
    for path, sentence in (("", "was trained without --valid_path"), (str(copied_run / "gone"), "cannot be read")):
        config["flags"]["valid_path"] = path
        (copied_run / "config.json").write_text(json.dumps(config))
        assert samples.main([str(copied_run), "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert "give texts with --prompt and --gap" in error
