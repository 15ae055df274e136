"""Ratio schedules: what they say, exact rows in every stretch of a run, and runs that follow them on any hardware."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from helpers.tiny_runs import flags, make_inputs, refusal, run, training_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_schedule import BatchSchedule
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan, resolve_split, rows_of_rank
from data.positions import Exposure, PositionError, step_of
from data.ratio_schedule import (
    RatioPoint,
    RatioSchedule,
    RatioScheduleError,
    parse_schedule,
    ratio_for,
    resolve_schedule,
)
from train_single_gpu import main
from training.config import parse_config
from training.distributed import single_world
from training.inputs import read_inputs
from training.metric_logger import read_metrics
from training.summary import describe

STEPS = 100
BATCHES = BatchSchedule(STEPS, 10, 10, 1, ())  # 100 tokens a step
EPOCHS = Exposure(1000, Fraction(1, 2))  # of ten steps, 500 words


def schedule(text: str, steps: int = STEPS) -> RatioSchedule:
    return resolve_schedule(parse_schedule(text), steps, lambda position: step_of(position, BATCHES, EPOCHS))


def fractions(text: str) -> list[Fraction]:
    found = schedule(text)
    return [Fraction(numerator, found.denominator) for numerator in found.numerators(STEPS)]


@pytest.mark.parametrize(
    "text", ["0:1/1, 25%:0/1", "0:3/3,25:0/5", "0%:1/1, 2500t:0/1", "0: 1/1, 1250w:0/1", "0e:1/1,2.5e:0/1"]
)
def test_phases_in_any_unit(text):
    assert fractions(text) == [Fraction(1)] * 25 + [Fraction(0)] * 75


def test_ramps():
    assert fractions("0:1/1, 50%:linear, 100%:0/1") == [min(Fraction(1), Fraction(100 - s, 50)) for s in range(100)]
    assert fractions("0:1/3 linear, 30:1/2, 70:1/4") == [
        Fraction(1, 3) + Fraction(s, 180) if s < 30 else Fraction(1, 2) if s < 70 else Fraction(1, 4)
        for s in range(100)
    ]


def test_repetitions():
    assert fractions("0:1/1, 1e:0/1, 2e:repeat") == [Fraction(1 - s // 10 % 2) for s in range(100)]
    triangle = fractions("0:1/1 linear, 10:0/1 linear, 20:repeat")
    assert triangle == [Fraction(abs(10 - s % 20), 10) for s in range(100)]
    assert fractions("0:1/1, 30%:0/1, 40%:repeat") == ([Fraction(1)] * 30 + [Fraction(0)] * 10) * 2 + [Fraction(1)] * 20


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is no point of it; it must be POSITION:NUM/DEN, ..."),
        ("1/1", "'1/1' is no point of it"),
        ("0:1", "'0:1' is no point of it"),
        ("0:1/1, 5:1/2 repeat", "'5:1/2 repeat' is no point of it"),
        ("0:3/2", "3/2 is no fraction of rows; give 0/1 to 1/1"),
        ("0:0/0", "0/0 is no fraction of rows"),
        ("5:1/2", "it must begin with the ratio at 0"),
        ("0:linear, 5:1/2", "it must begin with the ratio at 0"),
        ("0:1/2, x:1/1", "'x' is no position in a run"),
        ("0:1/2, 5:repeat, 6:1/1", "nothing may follow POSITION:repeat"),
        ("0:1/2 linear", "0:linear leads to no other point; add one, such as 100%:0/1"),
        ("0:1/1, 5:0/1, 10%:repeat", "with 10%:repeat, all its positions are counted in fraction"),
        ("0:1/1, 50%:0/1, 25%:1/1", "25% is step 25, not behind step 50 before it"),
        ("0:1/1, 3:0/1, 3%:1/1", "3% is step 3, not behind step 3 before it"),
        ("0:1/1, 101:0/1", "101 lies behind the end of the run, which has 100 steps"),
        ("0:1/1, 100%:0/1", "what begins at 100% is never used: the run has 100 steps"),
        ("0:1/1 linear, 20:0/1, 30:repeat", "the run ends within the ramp from step 90"),
        ("0:1/1, 0:repeat", "0 is step 0, not behind step 0 before it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(text, sentence):
    with pytest.raises((RatioScheduleError, PositionError)) as refused:
        schedule(text)
    assert str(refused.value).startswith(sentence)


def test_words_say_steps():
    assert str(schedule("0:15/16")) == "15/16"
    assert str(schedule("0:1/1, 25%:0/1")) == "1/1 until step 25, then 0/1"
    assert str(schedule("0:1/1, 50%:linear, 100%:0/1")) == "1/1 until step 50, then 1/1 evenly to 0/1 at step 100"
    assert str(schedule("0:1/1, 1e:0/1, 2e:repeat")).endswith("and 4 further changes")


def test_auto_lets_causal_rows_see_each_token_16_times():
    for repetitions in range(19, 1000):
        causal = 1 - ratio_for(repetitions)
        assert abs(causal - Fraction(16, repetitions)) <= Fraction(1, 128)
    assert ratio_for(1) == ratio_for(16) == Fraction(1, 8)
    assert ratio_for(32) == Fraction(1, 2)
    assert ratio_for(1e9) == Fraction(63, 64)


def test_the_published_ratio_and_its_even_change_are_schedules():
    ramp = DataPlan(50, 8, 100, 2.0, 16, 16, hybrid_numerator_end=3)
    same = DataPlan(
        50,
        8,
        100,
        2.0,
        hybrid_schedule=resolve_schedule(parse_schedule("0:1/1 linear, 50:3/16"), 50, lambda p: int(p.value)),
    )
    constant, phase = (
        DataPlan(50, 8, 100),
        DataPlan(50, 8, 100, hybrid_schedule=RatioSchedule((RatioPoint(0, Fraction(30, 32)),))),
    )
    for a, b in ((ramp, same), (constant, phase)):
        assert [a.step(step).objective_rows for step in range(50)] == [
            b.step(step).objective_rows for step in range(50)
        ]


FRACTIONS = st.builds(lambda d, n: Fraction(n % (d + 1), d), st.integers(1, 9), st.integers(0, 9))


@st.composite
def plans(draw) -> DataPlan:
    steps = draw(st.integers(2, 30))
    cuts = sorted(draw(st.sets(st.integers(1, steps - 1), max_size=4)))
    points = [RatioPoint(step, draw(FRACTIONS), draw(st.booleans()) and step != [0, *cuts][-1]) for step in [0, *cuts]]
    sizes = (steps, 4, draw(st.integers(16, 90)), draw(st.sampled_from([1.0, 1.7])))
    return DataPlan(
        *sizes, milestones=draw(st.sampled_from([(), (0.5,)])), hybrid_schedule=RatioSchedule(tuple(points))
    )


@settings(max_examples=100)
@given(plans(), st.integers(1, 8), st.data())
def test_rows_are_exact_in_every_window_and_shared_out_on_any_world_size(plan, world_size, data):
    """Less than one row from what the fractions add up to, whatever the first and last row are."""
    share = [Fraction(plan.step(s).ratio, plan.step(s).denominator) for s in range(plan.max_steps)]
    exact, masked = [Fraction(0)], [0]
    for step in map(plan.step, range(plan.max_steps)):
        for row in range(step.rows):
            exact.append(exact[-1] + share[step.step])
            masked.append(masked[-1] + (step.objective_of(row) == MASKED))
        assert masked[-1] - masked[-1 - step.rows] == step.objective_rows[MASKED]
        if share[step.step] in (0, 1):
            assert step.objective_rows[CAUSAL if share[step.step] == 1 else MASKED] == 0
    begin, end = sorted(data.draw(st.integers(0, len(exact) - 1)) for _ in range(2))
    assert abs((masked[end] - masked[begin]) - (exact[end] - exact[begin])) < 1
    for choice in ("rows", "auto"):
        split = resolve_split(choice, world_size, plan.ratios.phases())
        for step in map(plan.step, range(plan.max_steps)):
            parts = [rows_of_rank(step, rank, world_size, split) for rank in range(world_size)]
            sizes = [sum(map(len, part)) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            held = {MASKED: [], CAUSAL: []}
            for part in (each for rank in parts for each in rank):
                held[part.objective] += range(part.first, part.last)
            assert [len(held[o]) for o in (MASKED, CAUSAL)] == list(step.objective_rows)
            assert all(rows == list(range(len(rows))) for rows in held.values())


def test_ranks_where_every_phase_allows():
    one, zero, half = Fraction(1), Fraction(0), Fraction(1, 2)
    assert resolve_split("auto", 3, [one, zero]) == "ranks"
    assert resolve_split("auto", 3, [one, half]) == "rows"
    assert resolve_split("auto", 4, [one, half]) == "ranks"
    assert resolve_split("auto", 4, None) == "rows"
    with pytest.raises(ValueError, match="1/2 of 3 ranks is no whole number"):
        resolve_split("ranks", 3, [one, half])
    with pytest.raises(ValueError, match="the ratio changes evenly"):
        resolve_split("ranks", 4, None)


def test_warm_up_takes_the_largest_batch_of_each_phase_to_come():
    text = "0:1/1, 20:0/1, 40:repeat"
    plan = DataPlan(100, 8, 100, 2.0, milestones=(0.5,), hybrid_schedule=schedule(text))
    rows = [plan.step(step).rows for step in range(100)]
    phases = {(length, kind): [] for length in (8, 16) for kind in (0, 1)}
    for step in range(100):
        phases[8 * (1 + (step >= 49)), step // 20 % 2].append(step)
    for first in (0, 60):
        to_come = [[step for step in steps if step >= first] for steps in phases.values()]
        assert plan.largest_steps(first) == sorted(max(steps, key=rows.__getitem__) for steps in to_come if steps)
    assert len(plan.largest_steps(0)) == 4
    assert len(DataPlan(100, 8, 100, 2.0, milestones=(0.5,)).largest_steps(3)) == 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("ratio") / "inputs", documents=100)


RUN = {"max_steps": 12, "save_every": 5, "validate_every": 6, "hybrid_schedule": "0:1/1, 4:0/1, 8:1/2 linear, 100%:1/1"}


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    assert main(flags(inputs, output, data_fingerprint=True, **RUN), single_world) == 0
    return output / "run"


def test_a_run_goes_through_phases_without_one_objective(whole):
    lines = training_lines(whole)
    for line in lines[:4]:
        assert (line["stats/causal_rows"], "train/causal_loss" in line) == (0, False)
    for line in lines[4:8]:
        assert (line["stats/masked_rows"], "train/masked_loss" in line) == (0, False)
        assert line["train/loss"] == line["train/causal_loss"]
    assert all(line["stats/causal_rows"] and line["stats/masked_rows"] for line in lines[8:])
    validations = [line for line in read_metrics(whole / "metrics.jsonl") if "valid/masked_loss" in line]
    assert [line["step"] for line in validations] == [6, 12]
    assert all("valid/causal_loss" in line for line in validations)


def assert_same(whole: Path, other: Path) -> None:
    expected, found = training_lines(whole), training_lines(other)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(expected, found, strict=True):
        assert a["data/fingerprint"] == b["data/fingerprint"]
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)


def test_resumed_in_the_middle_of_a_phase_it_is_the_same_run(inputs, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for step in (10, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    assert main(flags(inputs, tmp_path, data_fingerprint=True, local_batch_size=7, **RUN), single_world) == 0
    assert_same(whole, tmp_path / "run")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_same_run_on_any_number_of_ranks(inputs, whole, tmp_path, ranks):
    run(flags(inputs, tmp_path, data_fingerprint=True, local_batch_size=5, **RUN), ranks)
    assert_same(whole, tmp_path / "run")


def test_phases_of_one_objective_each_by_ranks(inputs, tmp_path):
    options = {**RUN, "hybrid_schedule": "0:0/1, 25%:1/1", "hybrid_split": "ranks"}
    assert main(flags(inputs, tmp_path, **options), single_world) == 0
    assert [line["stats/masked_rows"] > 0 for line in training_lines(tmp_path / "run")] == [False] * 3 + [True] * 9


def test_auto_says_its_reason(inputs, tmp_path):
    config = parse_config(flags(inputs, tmp_path, hybrid_schedule="auto", max_steps=3000), "")
    found = read_inputs(config)
    times = found.plan.tokens_before(3000) / found.corpus.tokens_before_epoch(1)
    assert found.plan.ratios.phases() == (ratio_for(times),)
    told = describe(found, single_world(config), "rows", 1000, 0)
    assert f"{ratio_for(times)} (by auto: the run reads the corpus {times:.1f} times, and causal rows gain from" in told


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hybrid_schedule": "0:5"}, "--hybrid_schedule is '0:5'; '0:5' is no point of it; it must be POSITION"),
        ({"hybrid_schedule": "auto", "hybrid_numerator_end": 1}, "both say how the ratio moves: give one of them"),
        ({"hybrid_schedule": "0:1/1, 31:0/1"}, "--hybrid_schedule is '0:1/1, 31:0/1'; 31 lies behind the end of"),
        ({"hybrid_schedule": "0:1/1, 5w:0/1"}, "words are not known"),
        ({"hybrid_schedule": "0:1/1 linear, 30:0/1", "hybrid_split": "ranks"}, "because the ratio changes evenly"),
    ],
)  # fmt: skip
def test_flags_are_refused_in_one_sentence(inputs, tmp_path, capsys, options, sentence):
    assert sentence in refusal(capsys, main, flags(inputs, tmp_path, **options), single_world)


def test_a_run_keeps_its_schedule(inputs, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    other = {**RUN, "hybrid_schedule": "0:1/1, 4:0/1"}
    assert "--hybrid_schedule was" in refusal(capsys, main, flags(inputs, tmp_path, **other), single_world)
