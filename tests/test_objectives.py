"""The table of objectives: a third and a fourth take their rows exactly, train, validate and resume."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines

from data.objectives import OBJECTIVES, Objective, run_objectives
from data.plan import DataPlan, resolve_split, rows_of_rank
from data.ratio_schedule import RatioPoint, RatioSchedule
from training.config import ConfigError, TrainingConfig
from training.metric_logger import read_metrics

STEPS, HALF = 12, 6
ADDED = """    Objective("denoise", causal=False, mask=1.0, all_targets=True, rows=Fraction(1, 8)),
    Objective("corrupted", causal=True, mask=0.5, all_targets=True, rows=Fraction(1, 6), weight=0.5),
"""
PACKAGES = ("data", "evaluation", "export", "ops", "report", "training")


def edited_table() -> str:
    """data/objectives.py with two more lines in its table."""
    source = (ROOT / "data" / "objectives.py").read_text()
    table, rest = source.split("\n)\nOBJECTIVE_NAMES = ")
    return f"{table}\n{ADDED})\nOBJECTIVE_NAMES = {rest}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program in which the table alone is another, and a run of it."""
    folder = tmp_path_factory.mktemp("objectives")
    copy = folder / "copy"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, copy)
    (copy / "data" / "objectives.py").write_text(edited_table())
    inputs = make_inputs(folder / "inputs")
    arguments = flags(inputs, folder / "runs", "whole", **OPTIONS)
    run(arguments, script=copy / "train_single_gpu.py")
    return folder


OPTIONS = {
    "max_steps": STEPS, "save_every": HALF, "validate_every": HALF, "length_milestones": "0.7", "hybrid_split": "rows",
}  # fmt: skip


def test_added_objectives_take_their_rows(folder: Path):
    lines = training_lines(folder / "runs" / "whole")
    assert len(lines) == STEPS
    total = sum(line["stats/global_batch_size"] for line in lines)
    for line in lines:
        rows = [line[f"stats/{name}_rows"] for name in ("masked", "causal", "denoise", "corrupted")]
        assert sum(rows) == line["stats/global_batch_size"]
    assert sum(line["stats/denoise_rows"] for line in lines) == total // 8
    left = total - total // 8
    assert sum(line["stats/corrupted_rows"] for line in lines) == left * 4 // 21  # 1/6 of all rows is 4/21 of 7/8
    left -= left * 4 // 21
    assert sum(line["stats/masked_rows"] for line in lines) == left * 3 // 4


def test_added_objectives_weigh_in_the_loss_and_are_learned(folder: Path):
    lines = training_lines(folder / "runs" / "whole")
    for line in lines:
        parts = {"masked": 1.0, "causal": 1.0, "denoise": 1.0, "corrupted": 0.5}
        weighed = [weight * line[f"stats/{n}_rows"] * line[f"train/{n}_loss"] for n, weight in parts.items()]
        assert line["train/loss"] == pytest.approx(sum(weighed) / line["stats/global_batch_size"], rel=1e-6)
    for name in ("denoise", "corrupted"):
        assert lines[-1][f"train/{name}_loss"] < lines[0][f"train/{name}_loss"] - 0.3


def test_added_objectives_are_validated(folder: Path):
    lines = [line for line in read_metrics(folder / "runs" / "whole" / "metrics.jsonl") if "valid/masked_loss" in line]
    assert [line["step"] for line in lines] == [HALF, STEPS]
    for name in ("denoise", "corrupted"):
        for measure in (f"{name}_loss", f"ema_{name}_loss", f"{name}_accuracy", f"{name}_perplexity"):
            assert f"valid/{measure}" in lines[0]
        assert f"valid/{name}_loss_32" in lines[1], "rows have grown"


@pytest.mark.slow
def test_run_with_added_objectives_resumes_and_refuses_another_table(folder: Path):
    runs, whole = folder / "runs", training_lines(folder / "runs" / "whole")
    shutil.copytree(runs / "whole", runs / "half")
    shutil.rmtree(runs / "half" / "checkpoints" / f"step_{STEPS:08d}")
    arguments = flags(folder / "inputs", runs, "half", **OPTIONS)
    refused = run(arguments, check=False)
    assert refused.returncode == 2
    assert "data/objectives.py holds other objectives than checkpoint" in refused.stderr
    run(arguments, script=folder / "copy" / "train_single_gpu.py")
    again = training_lines(runs / "half")
    assert [line["step"] for line in again] == [line["step"] for line in whole]
    for a, b in zip(whole, again, strict=True):
        assert {k: v for k, v in a.items() if "loss" in k} == {k: v for k, v in b.items() if "loss" in k}


FOUR = (
    *OBJECTIVES,
    Objective("third", causal=False, mask=1.0, all_targets=True, rows=Fraction(1, 8)),
    Objective("fourth", causal=True, mask=0.0, all_targets=True, rows=Fraction(1, 4)),
)
KINDS = run_objectives("causal=1,prefix=2,blocks:4=1")


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("objectives", [FOUR, KINDS], ids=["added", "causal_rows"])
def test_rows_of_objectives_on_any_number_of_ranks(objectives: tuple[Objective, ...], world_size: int):
    four = objectives is FOUR
    ratio = Fraction(4, 5) if four else Fraction(1, 2)
    sizes = {"hybrid_numerator": ratio.numerator, "hybrid_denominator": ratio.denominator}
    plan = DataPlan(40, 8, 67, **sizes, milestones=(0.5,), objectives=objectives)
    split = resolve_split("auto", world_size, [ratio], objectives)
    assert split == ("ranks" if world_size == 8 else "rows")  # 4, 1, 1 and 2 ranks of eight; or 4, 1, 2 and 1
    position, rows = [0] * len(objectives), 0
    for step in map(plan.step, range(plan.max_steps)):
        assert list(step.position) == position
        of_rows = [step.objective_of(row) for row in range(step.rows)]
        assert [of_rows.count(number) for number in range(len(objectives))] == list(step.objective_rows)
        held: list[list[int]] = [[] for _ in objectives]
        for rank in range(world_size):
            for part in rows_of_rank(step, rank, world_size, split):
                held[part.objective] += range(part.first, part.last)
        assert held == [list(range(count)) for count in step.objective_rows]
        position = [a + b * step.seq_length for a, b in zip(position, step.objective_rows, strict=True)]
        rows += step.rows
    assert plan.tokens_before(plan.max_steps) == sum(position)
    if not four:
        counts = np.sum([plan.step(step).objective_rows for step in range(plan.max_steps)], axis=0)
        causal = rows - rows // 2
        blocks = (causal - causal // 2) // 2
        assert counts.tolist() == [rows // 2, causal - causal // 2 - blocks, causal // 2, blocks]


def test_ratio_schedule_divides_masked_rows_from_whatever_the_others_are():
    ratios = RatioSchedule((RatioPoint(0, Fraction(1)), RatioPoint(20, Fraction(0))))
    plan = DataPlan(40, 8, 64, hybrid_schedule=ratios, objectives=run_objectives("prefix"), milestones=())
    for step in range(40):
        at = plan.step(step)
        assert at.objective_rows == ((at.rows, 0, 0) if step < 20 else (0, 0, at.rows))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prefx", "'prefx' is none of causal, prefix, blocks:SIZE and meap"),
        ("", "'' is none of"),
        ("blocks", "blocks need their size in tokens, such as blocks:16"),
        ("prefix:8", "nothing else has one"),
        ("blocks:0", "need their size"),
        ("causal=0", "has no part of the rows"),
        ("meap,causal,meap=2", "meap is there twice"),
    ],
)
def test_causal_rows_that_cannot_be_are_refused(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        run_objectives(text)
    with pytest.raises(ConfigError, match=f"--causal_rows is {text!r}; "):
        TrainingConfig(train_path="x", config_file="x", tokenizer_path="x", name="x", causal_rows=text)


def test_objective_without_targets_is_refused():
    with pytest.raises(ValueError, match="'idle' hides no tokens and has no other targets"):
        Objective("idle", causal=True, mask=0.0, all_targets=False)


def test_first_two_objectives_are_the_published_ones():
    assert run_objectives("causal") == OBJECTIVES
    masked = Objective("masked", causal=False, mask=1.0, all_targets=False)
    causal = Objective("causal", causal=True, mask=0.0, all_targets=True)
    assert OBJECTIVES[:2] == (masked, causal)
    assert {masked.rows, causal.rows, masked.part, causal.part} == {0}
    assert masked.weight == causal.weight == 1
    assert not masked.looks_ahead
    assert not causal.looks_ahead
