"""The data plan: published schedules to the last digit, exact ratios, every row on one rank."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan, resolve_split, rows_of_rank

GOLDEN = Path(__file__).parent / "golden" / "schedule.npz"


@st.composite
def plans(draw):
    denominator = draw(st.integers(1, 16))
    return DataPlan(
        max_steps=draw(st.integers(1, 40)),
        seq_length=draw(st.sampled_from([2, 8, 128])),
        global_batch_size=draw(st.integers(64, 400)),
        batch_reduction=draw(st.sampled_from([1.0, 1.7, 4.0])),
        hybrid_numerator=draw(st.integers(0, denominator)),
        hybrid_denominator=denominator,
        hybrid_numerator_end=draw(st.none() | st.integers(0, denominator)),
        milestones=draw(st.sampled_from([(), (0.7, 0.9), (0.5,)])),
        seed=draw(st.integers(0, 5)),
    )


def test_published_schedules_to_the_last_digit():
    golden = np.load(GOLDEN)
    plan = DataPlan(1000, 128, 32768)
    assert [plan.step(step).rows for step in range(1000)] == golden["rows"].tolist()
    assert [plan.step(step).seq_length for step in range(1000)] == golden["seq"].tolist()


def test_mask_probability_falls_linearly():
    plan = DataPlan(1000, 128, 64, mask_p_start=0.3, mask_p_end=0.15)
    assert plan.step(0).mask_p == 0.3
    assert plan.step(500).mask_p == pytest.approx(0.225)
    assert plan.step(999).mask_p == pytest.approx(0.3 - 0.15 * 0.999)


@pytest.mark.parametrize(("numerator", "denominator"), [(15, 16), (1, 1), (0, 1), (7, 8), (1, 3)])
def test_exact_row_counts(numerator, denominator):
    """After any number of rows the masked ones are floor(n * numerator / denominator)."""
    plan = DataPlan(50, 8, 100, hybrid_numerator=numerator, hybrid_denominator=denominator)
    row = masked = 0
    for step in range(50):
        batch = plan.step(step)
        objectives = [batch.objective_of(i) for i in range(batch.rows)]
        assert batch.first_row == row
        assert objectives.count(MASKED) == batch.objective_rows[MASKED]
        for objective in objectives:
            row += 1
            masked += objective == MASKED
            assert masked == row * numerator // denominator


def test_ratio_schedule_moves_the_masked_fraction():
    plan = DataPlan(200, 8, 160, 1, hybrid_numerator=16, hybrid_denominator=16, hybrid_numerator_end=0, milestones=())
    shares = [plan.step(step).objective_rows[MASKED] / 160 for step in range(200)]
    np.testing.assert_allclose(shares, 1 - np.arange(200) / 200, atol=1 / 160)
    assert abs(sum(shares) - (200 - np.arange(200) / 200 @ np.ones(200))) < 1 / 160


@given(plans())
def test_streams_continue_without_gap_from_step_to_step(plan):
    position = [0, 0]
    for step in range(plan.max_steps):
        batch = plan.step(step)
        assert list(batch.position) == position
        position[MASKED] += batch.objective_rows[MASKED] * batch.seq_length
        position[CAUSAL] += batch.objective_rows[CAUSAL] * batch.seq_length
        assert plan.tokens_before(step + 1) == sum(position)
    assert [plan.objective_tokens(objective) for objective in (MASKED, CAUSAL)] == position


@settings(max_examples=200)
@given(plans(), st.integers(1, 16), st.sampled_from(["auto", "rows"]), st.sampled_from([0.0, 0.1, 2.0]), st.data())
def test_ranks_hold_every_row_once_and_have_the_same_to_do(plan, world_size, choice, target_cost, data):
    split = resolve_split(choice, world_size, plan.ratios.phases())
    batch = replace(plan.step(data.draw(st.integers(0, plan.max_steps - 1))), target_cost=target_cost)
    costs = [1 + target_cost * batch.mask_p, 1 + target_cost]
    held = {MASKED: [], CAUSAL: []}
    sizes, loads = [], []
    for rank in range(world_size):
        shares = rows_of_rank(batch, rank, world_size, split)
        if split == "ranks" and not target_cost:
            assert len(shares) <= 1
        loads.append(sum(len(share) * costs[share.objective] for share in shares))
        sizes.append(sum(len(share) for share in shares))
        for share in shares:
            held[share.objective] += range(share.first, share.last)
    assert held[MASKED] == list(range(batch.objective_rows[MASKED]))
    assert held[CAUSAL] == list(range(batch.objective_rows[CAUSAL]))
    if split == "rows" or not target_cost:
        assert max(sizes) - min(sizes) <= 1
    else:
        assert max(loads) - min(loads) <= 2.01 * costs[1]


@pytest.mark.parametrize(
    ("choice", "world", "ratio", "result"),
    [
        ("auto", 16, (15, 16), "ranks"),
        ("auto", 8, (15, 16), "rows"),
        ("auto", 2, (2, 4), "ranks"),
        ("auto", 1, (15, 16), "rows"),
        ("auto", 1, (1, 1), "ranks"),
        ("rows", 16, (15, 16), "rows"),
        ("ranks", 4, (3, 4), "ranks"),
    ],
)
def test_resolve_split(choice, world, ratio, result):
    assert resolve_split(choice, world, [Fraction(*ratio)]) == result


def test_impossible_split_says_why():
    with pytest.raises(ValueError, match="7/8 of 4 ranks") as error:
        resolve_split("ranks", 4, [Fraction(7, 8)])
    assert "--hybrid_split rows" in str(error.value)


def test_row_keys_do_not_depend_on_the_split():
    plan = DataPlan(10, 8, 64, hybrid_numerator=3, hybrid_denominator=4)
    for split in ("rows", "ranks"):
        keys = {MASKED: [], CAUSAL: []}
        for rank in range(4):
            for share in rows_of_rank(plan.step(5), rank, 4, split):
                positions = plan.step(5).position[share.objective] + np.arange(share.first, share.last) * 8
                keys[share.objective] += plan.row_keys(share.objective, positions).tolist()
        if split == "rows":
            first = keys
    assert first == keys
    assert len(set(keys[MASKED] + keys[CAUSAL])) == plan.step(5).rows


def test_long_runs_stay_exact():
    """A million steps of large batches: sums are Python integers or far below 2**63."""
    plan = DataPlan(1_000_000, 128, 32768, hybrid_numerator=15, hybrid_numerator_end=8)
    share = np.array([float(plan.step(step).ratio / plan._denominator) for step in range(0, 1_000_000, 1000)])
    np.testing.assert_allclose(share, np.linspace(15 / 16, 8 / 16, 1001)[:-1])
    last = plan.step(999_999)
    assert last.ratio_carry + last.rows * last.ratio == plan._ratio_sums[-1]
    assert plan.objective_tokens(MASKED) + plan.objective_tokens(CAUSAL) == plan.tokens_before(1_000_000)
