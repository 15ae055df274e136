"""CONTRIBUTING.md's worked examples: each touches as many files as it says, and a copy of the suite trains by them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines

from training.checkpoint import open_checkpoint

FILES = {"no file": 0, "one file": 1, "two files": 2, "three files": 3, "four files": 4}


def examples() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By what is added: how many files the heading says, and the blocks of code with their languages."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Worked examples\n")[1].split("\n## ")[0]
    found = {}
    for section in text.split("\n### ")[1:]:
        title, count = section.splitlines()[0].split(": ")
        found[title] = (count, re.findall(r"^```(diff|python)\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    return found


def apply(diff: str, folder: Path) -> Path:
    """Replace the lines of each hunk, which must be in the file exactly once; a missing file is empty. Returns it."""
    header, *hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)
    path = folder / header.split()[1]
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for hunk in hunks:
        lines = [(line[:1], f"{line[1:]}\n") for line in hunk.splitlines()]
        old, new = ("".join(line for sign, line in lines if sign != other) for other in "+-")
        assert text.count(old) == 1, f"{path.name} does not hold, once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The suite with all examples in it."""
    folder = tmp_path_factory.mktemp("contributing") / "suite"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__", "runs", "*_output"))
    for title, (_, blocks) in examples().items():
        for language, block in blocks:
            if language == "diff":
                apply(block, folder)
            else:
                (folder / f"{title.split()[-1]}.py").write_text(block, encoding="utf-8")
    return folder


def test_examples_touch_as_many_files_as_they_say():
    found = examples()
    assert {"An optimizer", "A metric", "A schedule", "An objective", "A model"} <= found.keys()
    for title, (count, blocks) in found.items():
        touched = {block.split()[1] for language, block in blocks if language == "diff"}
        assert blocks, title
        assert len(touched) == FILES[count], title


@pytest.mark.slow
def test_a_run_with_the_examples_uses_them(copy, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    options = {"max_steps": 10, "validate_every": 0, "save_every": 5, "schedule": "inverse_root"}
    arguments = flags(inputs, tmp_path, optimizer="lion", plugin=copy / "metric.py", learning_rate=1e-3, **options)
    run(arguments, script=copy / "train_single_gpu.py")
    lines = training_lines(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert [line["stats/learning_rate"] for line in lines] == pytest.approx(
        [0, *(1e-3 / step**0.5 for step in range(1, 10))]
    )
    for line in lines:
        assert line["stats/denoise_rows"] in (line["stats/global_batch_size"] // 8 + more for more in (0, 1))
        assert "train/denoise_loss" in line
        assert line["mine/tokens_per_update"] == line["stats/global_batch_size"] * line["stats/seq_length"]
    saved = open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000010").tensors("optimizer")
    assert {key.split("/")[0] for key in saved} == {"momentum"}

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000010")
    run(arguments, script=copy / "train_single_gpu.py")
    assert [line["train/loss"] for line in training_lines(tmp_path / "run")] == [line["train/loss"] for line in lines]


@pytest.mark.slow
def test_a_run_with_the_model_of_the_examples_trains_it(copy, tmp_path):
    inputs = make_inputs(tmp_path / "inputs", model_type="plain")
    arguments = flags(inputs, tmp_path, max_steps=10, validate_every=5, save_every=0, validation_samples=1)
    run(arguments, script=copy / "train_single_gpu.py")
    lines = training_lines(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.3
    assert "words.weight" in open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000010").tensors("model")
