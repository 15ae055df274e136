"""The loss: shares, global counts, z-loss, positions of targets; equality however a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from data.masking import IGNORE_INDEX, ModelInputs
from data.plan import CAUSAL, MASKED
from slurm.environment import Environment
from training.distributed import World
from training.objective import (
    CORRECT,
    COUNT,
    LOSS,
    SQUARED_LOG_Z,
    evaluate,
    loss_weights,
    sums_by_objective,
    target_positions,
    target_scores,
)
from training.setup import Inputs
from training.step import NonFiniteError, PendingStep, StepLog


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 30), st.floats(0, 1), st.integers(0, 99))
def test_target_positions_are_those_of_nonzero(rows, length, share, seed):
    torch.manual_seed(seed)
    labels = torch.randint(0, 50, (rows, length)).masked_fill(torch.rand(rows, length) > share, IGNORE_INDEX)
    expected = (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    assert torch.equal(target_positions(labels, len(expected)), expected)


def test_scores_are_cross_entropy_and_squared_log_partition():
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 17), torch.randint(0, 17, (40,))
    loss, squared, correct = target_scores(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="none"))
    torch.testing.assert_close(squared, logits.logsumexp(-1) ** 2)
    assert correct.sum() == (logits.argmax(-1) == labels).sum()


def test_weights_are_shares_of_rows_over_counts_of_targets():
    weights = loss_weights((15, 1), (300, 127), token_weighted=False)
    assert weights.share == (15 / 16, 1 / 16)
    assert weights.per_target == (15 / 16 / 300, 1 / 16 / 127)
    weights = loss_weights((15, 1), (300, 100), token_weighted=True)
    assert weights.per_target == pytest.approx((1 / 400, 1 / 400))


def test_an_objective_without_targets_weighs_nothing():
    weights = loss_weights((4, 4), (0, 100), token_weighted=False)
    assert weights.share == (0.0, 0.5)
    assert weights.per_target == (0.0, 0.005)
    assert loss_weights((0, 0), (0, 0), token_weighted=True).per_target == (0.0, 0.0)


def test_sums_by_objective():
    scores = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    sums = sums_by_objective(scores, torch.tensor([False, False, True]))
    assert sums[MASKED].tolist() == [3.0, 2.0, 1.0, 2.0]
    assert sums[CAUSAL].tolist() == [4.0, 3.0, 1.0, 1.0]
    assert (LOSS, SQUARED_LOG_Z, CORRECT, COUNT) == (0, 1, 2, 3)


def test_scores_of_a_batch_with_both_objectives_go_to_the_right_one():
    """A model that always predicts token 7: correct exactly where the label is 7."""

    def model(input_ids, document_ids, causal, positions, keys):
        return F.one_hot(torch.full((len(positions),), 7), 10).float() * 20

    labels = torch.tensor([[7, IGNORE_INDEX, 3], [7, 7, IGNORE_INDEX], [IGNORE_INDEX] * 3])
    inputs = ModelInputs(torch.zeros(3, 3).long(), labels, torch.zeros(3, 3).long(), torch.tensor([False, True, True]))
    scores, causal = evaluate(model, inputs, 4, None)
    assert causal.tolist() == [False, False, True, True]
    assert sums_by_objective(scores, causal)[:, CORRECT].tolist() == [1.0, 2.0]


def test_no_targets_at_all():
    labels = torch.full((2, 3), IGNORE_INDEX)
    assert target_positions(labels, 0).tolist() == []
    scores = target_scores(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert sums_by_objective(scores, torch.zeros(0, dtype=torch.bool)).abs().sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_loss_names_step_rank_and_objective(bad):
    """Three ranks of which the last has a bad causal loss: every rank says so."""

    @dataclass(frozen=True)
    class ThreeRanks(World):
        def gather(self, value):
            return [[1.0, 0.0], [2.0, 0.0], value]

    local = torch.zeros(2, 4, dtype=torch.float64)
    local[CAUSAL, LOSS] = bad
    pending = PendingStep({"step": 7}, (0.5, 0.5), local, local, torch.tensor(1.0), None, {}, 10, 1.0)
    world = ThreeRanks(2, 3, torch.device("cpu"), Environment("none"))
    log = StepLog(cast(Inputs, None), world)  # a bad step is noticed before anything of the run is needed
    with pytest.raises(NonFiniteError, match="step 7: rank 2, causal objective"):
        log.push(pending)
