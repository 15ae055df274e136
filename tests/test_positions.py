"""Positions in a run: what a text means, and the step that a number of tokens, words or epochs comes to."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_schedule import BatchSchedule
from data.corpus import Corpus
from data.plan import DataPlan
from data.positions import (
    Exposure,
    Position,
    PositionError,
    checkpoint_name,
    parse_amounts,
    parse_position,
    step_of,
    steps_for,
)
from data.shards import write_manifest, write_shard

SCHEDULES = st.builds(
    BatchSchedule,
    max_steps=st.integers(1, 60),
    seq_length=st.integers(1, 9),
    global_batch_size=st.integers(16, 99),
    batch_reduction=st.sampled_from([1.0, 1.7, 4.0]),
    milestones=st.sampled_from([(), (0.7, 0.9), (0.2, 0.5)]),
)


@pytest.mark.parametrize(
    ("text", "value", "unit", "again"),
    [
        ("0.25", Fraction(1, 4), "fraction", "25%"),
        ("25%", Fraction(1, 4), "fraction", "25%"),
        ("500", 500, "steps", "500"),
        ("10k", 10_000, "steps", "10k"),
        ("10Mt", 10_000_000, "tokens", "10Mt"),
        ("1.5Gt", 1_500_000_000, "tokens", "1500Mt"),
        ("2Bt", 2_000_000_000, "tokens", "2Gt"),
        ("162_000_000t", 162_000_000, "tokens", "162Mt"),
        ("1Mw", 1_000_000, "words", "1Mw"),
        ("2e", 2, "epochs", "2e"),
        ("0.5e", Fraction(1, 2), "epochs", "0.5e"),
        ("0", 0, "steps", "0"),
    ],
)
def test_forms(text, value, unit, again):
    assert parse_position(text) == Position(Fraction(value), unit)
    assert str(parse_position(text)) == again
    assert parse_position(again) == parse_position(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "101%", "1.5t", "1Mx", "10 Mt", "1e3", "nan", "5M%", "._t"])
def test_what_is_no_position(text):
    with pytest.raises(PositionError, match=f"^{text!r} is .*; give a fraction of the run"):
        parse_position(text)


def test_ranges_of_amounts_and_the_names_of_checkpoints():
    names = [checkpoint_name(each) for each in parse_amounts("1M..10M/1M,10M..100M/10M,200M..1000M/100M", "words")]
    tens = [*range(1, 11), *range(20, 101, 10), *range(200, 1001, 100)]
    assert names == [f"chck_{number}M" for number in tens]  # BabyLM's revisions
    assert [checkpoint_name(each) for each in parse_amounts("1.5M, 20k", "words")] == ["chck_20k", "chck_1500k"]
    assert [checkpoint_name(each) for each in parse_amounts("0.5..2/0.5", "epochs")] == [
        "chck_0.5e", "chck_1e", "chck_1.5e", "chck_2e",
    ]  # fmt: skip
    assert [str(each) for each in parse_amounts("10..25/10,3", "tokens")] == ["3t", "10t", "20t"]
    assert parse_amounts("", "tokens") == []
    for text in ("1..2", "1/2", "5..1/1", "1..1M/1", "0", "1..x/1"):
        with pytest.raises(PositionError, match=r"give (a range|it as|a fraction)"):
            parse_amounts(text, "tokens")


@given(SCHEDULES)
def test_the_batch_schedule_is_that_of_single_steps(schedule):
    for step, (rows, factor) in enumerate(zip(schedule.rows.tolist(), schedule.factors.tolist(), strict=True)):
        assert factor == 2 ** sum((step + 1) / schedule.max_steps >= each for each in schedule.milestones)
        size, x = schedule.global_batch_size / factor, step / schedule.max_steps
        assert rows == int(size / schedule.batch_reduction * (1 - x) + size * x + 0.5)


@given(SCHEDULES, st.integers(0, 40_000), st.integers(1, 3000), st.fractions(Fraction(1, 9), 2, max_denominator=40))
def test_the_step_of_an_amount_is_the_first_before_which_it_was_used(schedule, tokens, epoch, ratio):
    exposure = Exposure(epoch, ratio)
    for amount in (
        Position(Fraction(tokens), "tokens"),
        Position(Fraction(tokens), "words"),
        Position(Fraction(tokens, 1000), "epochs"),
    ):
        used = {
            "tokens": lambda step: schedule.tokens_before(step),
            "words": lambda step: schedule.tokens_before(step) * ratio,
            "epochs": lambda step: Fraction(schedule.tokens_before(step), epoch),
        }[amount.unit]
        steps = [step for step in range(schedule.max_steps + 1) if used(step) >= amount.value]
        if steps:
            assert step_of(amount, schedule, exposure) == steps[0]
        else:
            with pytest.raises(PositionError, match="lies behind the end of the run"):
                step_of(amount, schedule, exposure)


def test_the_step_of_fractions_and_steps():
    schedule, exposure = BatchSchedule(30, 8, 16), Exposure(100, None)
    assert [step_of(parse_position(text), schedule, exposure) for text in ("0%", "0.1", "25%", "100%", "7", "30")] == [
        0, 3, 8, 30, 7, 30,
    ]  # fmt: skip
    with pytest.raises(PositionError, match=r"^31 lies behind the end of the run, which has 30 steps"):
        step_of(parse_position("31"), schedule, exposure)


@settings(max_examples=60, deadline=None)
@given(SCHEDULES, st.integers(1, 30_000))
def test_a_budget_is_spent_by_the_smallest_number_of_steps(schedule, tokens):
    def of(steps):
        return BatchSchedule(
            steps, schedule.seq_length, schedule.global_batch_size, schedule.batch_reduction, schedule.milestones
        )

    expected = next(steps for steps in range(1, 40_000) if of(steps).tokens_before(steps) >= tokens)
    assert steps_for(tokens, of) == expected


def test_a_budget_of_too_many_steps_is_refused():
    class OneToken(BatchSchedule):
        def tokens_before(self, step: int) -> int:
            return step

    assert steps_for(10**6, lambda steps: OneToken(steps, 1, 1)) == 10**6
    with pytest.raises(PositionError, match=r"tokens are more than 16,777,216 steps; raise --global_batch_size"):
        steps_for(10**13, lambda steps: OneToken(steps, 1, 1))


def test_the_plan_uses_the_schedule():
    plan = DataPlan(40, 8, 64)
    assert [plan.tokens_before(step) for step in range(41)] == plan.schedule.token_sums.tolist()
    assert sum(plan.objective_tokens(number) for number in (0, 1)) == plan.tokens_before(40)


def shard_folder(folder, documents: int, length: int, words: int):
    folder.mkdir()
    tokens = [np.full(length, 20) for _ in range(documents)]
    shard = write_shard(folder / "a.shard", tokens, "ab" * 32, 300, words=words)
    write_manifest(folder, [shard], "ab" * 32, 300, {})
    return folder


def test_words_and_epochs_of_a_mix_count_repeats(tmp_path):
    shard_folder(tmp_path / "a", 10, 4, words=20)  # 60 tokens with <s> and </s>
    shard_folder(tmp_path / "b", 10, 7, words=60)  # 90
    sources = [{"path": "a", "repeat": 2}, {"path": "b", "repeat": 0.5}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    exposure = Corpus(tmp_path / "mix.json", tokenizer_hash=None, bos_id=1, eos_id=2).exposure
    assert exposure == Exposure(165, Fraction(70, 165))
    assert exposure.tokens_of(parse_position("7w")) == 17  # 16.5
    assert exposure.tokens_of(parse_position("2e")) == 330
    assert exposure.words_in(17) == 7


def test_words_that_no_manifest_has(tmp_path):
    shard_folder(tmp_path / "a", 3, 4, words=0)
    exposure = Corpus(tmp_path / "a", tokenizer_hash=None, bos_id=1, eos_id=2).exposure
    assert exposure.tokens_of(parse_position("2e")) == 36
    with pytest.raises(PositionError, match=r"words are not known: .*/a has no number of words in a manifest"):
        exposure.words_in(3)
