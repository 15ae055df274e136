"""The loss: shares, global counts, z-loss, positions of targets; equality however a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from data.masking import IGNORE_INDEX, ModelInputs
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan
from model import ModelConfig
from ops.cross_entropy import compiled_scores, target_scores
from training.distributed import World
from training.environment import Environment
from training.loss import (
    CORRECT,
    COUNT,
    LOSS,
    SQUARED_LOG_Z,
    loss_weights,
    score_targets,
    sums_by_objective,
    target_positions,
)
from training.rank_checks import DivergenceError
from training.step import AsyncStepMetrics, InFlightStep, NonFiniteError


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
    assert weights.per_objective == (15 / 16, 1 / 16)
    assert weights.per_target == (15 / 16 / 300, 1 / 16 / 127)
    weights = loss_weights((15, 1), (300, 100), token_weighted=True)
    assert weights.per_target == pytest.approx((1 / 400, 1 / 400))


def test_an_objective_without_targets_weighs_nothing():
    weights = loss_weights((4, 4), (0, 100), token_weighted=False)
    assert weights.per_objective == (0.0, 0.5)
    assert weights.per_target == (0.0, 0.005)
    assert loss_weights((0, 0), (0, 0), token_weighted=True).per_target == (0.0, 0.0)


def model_inputs(labels: torch.Tensor, objective: torch.Tensor) -> ModelInputs:
    """Rows with these labels and objectives, of zeros else."""
    zeros = torch.zeros_like(labels)
    return ModelInputs(zeros, labels, zeros, objective == CAUSAL, objective)


def test_sums_by_objective():
    scores = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    sums = sums_by_objective(scores, torch.tensor([MASKED, MASKED, CAUSAL]))
    assert sums[MASKED].tolist() == [3.0, 2.0, 1.0, 2.0]
    assert sums[CAUSAL].tolist() == [4.0, 3.0, 1.0, 1.0]
    assert (LOSS, SQUARED_LOG_Z, CORRECT, COUNT) == (0, 1, 2, 3)


def test_scores_of_a_batch_with_both_objectives_go_to_the_right_one():
    """A model that always predicts token 7: correct exactly where the label is 7."""

    def model(input_ids, document_ids, causal, positions, keys, sizes):
        return F.one_hot(torch.full((len(positions),), 7), 10).float() * 20

    model.score = target_scores
    labels = torch.tensor([[7, IGNORE_INDEX, 3], [7, 7, IGNORE_INDEX], [IGNORE_INDEX] * 3])
    scores, objective = score_targets(model, model_inputs(labels, torch.tensor([MASKED, CAUSAL, CAUSAL])), 4, None)
    assert objective.tolist() == [MASKED, MASKED, CAUSAL, CAUSAL]
    assert sums_by_objective(scores, objective)[:, CORRECT].tolist() == [1.0, 2.0]


def test_no_targets_at_all():
    labels = torch.full((2, 3), IGNORE_INDEX)
    assert target_positions(labels, 0).tolist() == []
    scores = target_scores(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert sums_by_objective(scores, torch.zeros(0, dtype=torch.int64)).abs().sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("place", "error", "words"),
    [
        (4 + LOSS, NonFiniteError, "rank 2, causal objective: the summed loss is"),
        (-1, DivergenceError, "gradient norm is (nan|inf) on rank 2 alone"),
    ],
)
def test_a_bad_loss_or_norm_names_step_and_rank(bad: float, place: int, error: type[Exception], words: str):
    """Three ranks of which the last has a bad causal loss, or norm: every rank says so."""
    step = DataPlan(10, 16, 4, seed=0).step(6)
    local = torch.ones(9, dtype=torch.float64)
    local[place] = bad

    @dataclass(frozen=True)
    class ThreeRanks(World):
        def all_gather_objects(self, value, what):
            return [[1.0] * 9, [1.0] * 9, local.tolist()]

    for rank in range(3):
        own = local if rank == 2 else torch.ones_like(local)
        pending = InFlightStep(step, {"step": 7}, (1, 1), (0.5, 0.5), own + 2 * local, own, None, {}, 1.0)
        world = ThreeRanks(rank, 3, torch.device("cpu"), Environment("none"))
        log = AsyncStepMetrics(world, ModelConfig(32, 64, 2, 2, 320))
        with pytest.raises(error, match=f"step 7: .*{words}"):
            log.push(pending)


def test_slots_that_are_left_over_change_nothing():
    def model(input_ids, document_ids, causal, positions, keys, sizes):
        return torch.randn(6, 10, generator=torch.Generator().manual_seed(0))[positions] * weight

    model.score = target_scores
    weight = torch.ones((), requires_grad=True)
    labels = torch.tensor([[7, IGNORE_INDEX, 3], [IGNORE_INDEX, 7, IGNORE_INDEX]])
    inputs = model_inputs(labels, torch.tensor([MASKED, CAUSAL]))
    sums = []
    for slots in (3, 5, 6):
        scores, objective = score_targets(model, inputs, slots, None)
        assert objective.tolist() == [0, 0, 1] + [-1] * (slots - 3)
        sums.append(sums_by_objective(scores, objective))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    assert sums[0][:, COUNT].tolist() == [2.0, 1.0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_scores_are_those_of_the_plain_form_for_any_number_of_targets():
    """Against float64; compiled once for all numbers, and with no tensor of float32 of the size of the logits."""
    torch.manual_seed(0)
    score = compiled_scores(torch.device("cuda", 0))
    for count in (37, 4100, 513, 8):
        logits = (torch.randn(count, 16385, device="cuda") * 4).bfloat16().requires_grad_()
        labels = torch.randint(16385, (count,), device="cuda")
        labels[: count // 4] = logits[: count // 4].argmax(-1)
        upstream = torch.randn(2, count, device="cuda")
        exact = logits.detach().double().requires_grad_()
        log_z = exact.logsumexp(-1)
        expected = (
            log_z - exact.gather(1, labels[:, None])[:, 0],
            log_z.square(),
            (exact.argmax(-1) == labels).double(),
        )
        (expected[0] * upstream[0] + expected[1] * upstream[1]).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.compiler.set_stance("fail_on_recompile" if count != 37 else "default"):
            scores = score(logits, labels)
            (scores[0] * upstream[0] + scores[1] * upstream[1]).sum().backward()
        used = torch.cuda.max_memory_allocated() - before
        assert count != 4100 or used < 1.5 * logits.numel() * 2, "the gradient, and nothing else of the logits' size"
        for ours, true in zip(scores, expected, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)
        assert logits.grad is not None
        assert exact.grad is not None
        assert (logits.grad.double() - exact.grad).norm() < 3e-3 * exact.grad.norm()
