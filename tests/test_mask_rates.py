"""Mask rates by row: their distributions, exact counts and weights, and masked diffusion against all of its masks."""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.exact_diffusion import corpus_of, exact_bound, loss_of_hidden, sharp_model
from helpers.tiny_runs import flags, make_inputs, refusal, training_lines

from data.counter_rng import fold_numpy
from data.loader import WEIGHT_UNITS, BatchBuilder, StepBatch
from data.mask_rates import LONGEST_SPAN, MaskRateError, MaskRates
from data.masking import IGNORE_INDEX, MaskingOptions, RowRates
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan
from train_single_gpu import main
from training.distributed import single_world
from training.loss import LOSS, hybrid_loss

KEYS = fold_numpy(7, np.arange(100_000)).view(np.int64)
P = 0.6  # the scheduled probability


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("uniform", 1 / 2, 12**-0.5),
        ("uniform:0.1,0.3", 0.2, 0.2 * 12**-0.5),
        ("cosine", 1 - 2 / pi, (1.5 - 4 / pi - (1 - 2 / pi) ** 2) ** 0.5),  # E (1 - cos)^2 = 1 - 4 / pi + 1 / 2
        ("beta:2,5", 2 / 7, (10 / (49 * 8)) ** 0.5),
        ("beta:0.5,0.5", 1 / 2, 8**-0.5),
        ("bimodal:0.75,0.12", 0.24, 0.48 * (0.75 * 0.25) ** 0.5),
    ],
)
def test_distributions_have_their_mean_and_deviation(text, mean, deviation):
    rates = RowRates(MaskRates.parse(text), P)
    found = rates.of(KEYS)
    assert isinstance(found, np.ndarray)
    assert rates.distribution.mean(P) == pytest.approx(mean)
    assert found.mean() == pytest.approx(mean, abs=5 * deviation / len(KEYS) ** 0.5)
    assert found.std() == pytest.approx(deviation, rel=0.02)
    assert found.min() > 0
    assert found.max() < 1
    np.testing.assert_array_equal(rates.of(KEYS[500:600]), found[500:600])


@pytest.mark.parametrize(
    "text",
    ["", "even", "uniform:0.5", "uniform:0.5,0.5", "uniform:0,2", "beta:1", "beta:0,1", "bimodal:0.5", "cosine:x"],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(MaskRateError):
        MaskRates.parse(text)


def rows_of_one_document(folder: Path, document: list[int], rows: int, options: MaskingOptions, **plan) -> StepBatch:
    """Masked rows that all hold `<s> document </s>`, with other masks each."""
    plan = DataPlan(1, len(document) + 2, rows, 1, 1, 1, milestones=(), mask_p_start=P, **plan)
    return BatchBuilder(corpus_of(folder, *[document] * 1000), plan, options).step(0, 0, 1, "rows", rows)


def test_uniform_rates_mask_every_number_of_every_set_of_tokens_equally_often(tmp_path):
    options = MaskingOptions(vocab_size=300, span_length=1, random_p=0, keep_p=0)
    rows, document = 30_000, [20, 21, 22, 23]
    batch = rows_of_one_document(tmp_path, document, rows, options, mask_rates=MaskRates("uniform")).batch
    hidden = (batch.inputs(options).labels != IGNORE_INDEX).numpy() @ (1 << np.arange(6))
    expected = {
        sum(1 << i for i in some): 1 / (4 * comb(4, k)) for k in range(1, 5) for some in combinations(range(4), k)
    }
    counts = np.bincount(hidden, minlength=64)
    assert counts.sum() == sum(counts[number] for number in expected)
    squares = [(counts[number] - rows * p) ** 2 / (rows * p) for number, p in expected.items()]
    assert sum(squares) < 36.1  # chi square of 14 degrees of freedom: one in a thousand


@pytest.mark.parametrize("longest", range(1, LONGEST_SPAN + 1))
def test_spans_of_all_lengths_are_equally_frequent(tmp_path, longest):
    """A long row of which few tokens are hidden: runs of these are spans, but for those that touch or are cut."""
    options = MaskingOptions(vocab_size=300, span_length=longest)
    plan = DataPlan(1, 4000, 40, 1, 1, 1, milestones=(), mask_p_start=0.02)
    corpus = corpus_of(tmp_path, *[[20] * 3998] * 50)
    labels = BatchBuilder(corpus, plan, options).step(0, 0, 1, "rows", 40).batch.inputs(options).labels
    edges = np.diff(np.pad((labels != IGNORE_INDEX).numpy().astype(int), ((0, 0), (1, 1))), axis=1)
    lengths = np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]
    found = np.bincount(lengths, minlength=longest + 1)
    assert found[1 : longest + 1].sum() > 0.9 * found.sum()
    np.testing.assert_allclose(found[1 : longest + 1] / found.sum(), 1 / longest, atol=0.06)


def test_weights_are_summed_exactly_whatever_the_ranks(tmp_path):
    options = MaskingOptions(vocab_size=300, rate_power=0.5)
    plan = DataPlan(3, 16, 50, 1, 3, 4, milestones=(), mask_rates=MaskRates("cosine"))
    builder = BatchBuilder(corpus_of(tmp_path, *[list(range(20, 90))] * 40), plan, options)
    whole = builder.step(1, 0, 1, "rows", 8)
    weights = whole.batch.target_weights
    assert weights is not None
    masked = (whole.batch.objective == MASKED).numpy()
    assert (weights[~masked] == 1).all()
    hidden = whole.batch.mask_counts.numpy()[masked]
    maskable = np.count_nonzero(whole.batch.tokens[:, 1:].numpy()[masked] >= 16, axis=1)
    np.testing.assert_allclose(weights[masked], (hidden / maskable) ** -0.5, rtol=1e-6)
    sums = whole.target_weights
    assert sums[CAUSAL] == whole.targets[CAUSAL] * WEIGHT_UNITS
    assert sums[MASKED] / WEIGHT_UNITS == pytest.approx(
        float(weights[masked].double() @ torch.from_numpy(hidden).double())
    )
    for ranks in (2, 3, 5):
        parts = [builder.step(1, rank, ranks, "rows", 8).target_weights for rank in range(ranks)]
        np.testing.assert_array_equal(np.sum(parts, axis=0), sums)


def test_masked_diffusion_is_the_mean_over_all_orders_of_the_tokens(tmp_path):
    """Three ways to one number: every order of prediction, every set of hidden tokens, and the training loss."""
    document, rows = [20, 17, 22, 19], 6000
    model = sharp_model(24)
    exact = exact_bound(model, document)
    orders = list(permutations(range(4)))
    by_order = sum(
        loss_of_hidden(model, document, order[place:])[order[place]] for order in orders for place in range(4)
    )
    assert by_order / len(orders) == pytest.approx(exact, rel=1e-5)

    found = {}
    for gamma in (1.0, 0.0):
        options = MaskingOptions(vocab_size=24, span_length=1, random_p=0, keep_p=0, rate_power=gamma)
        step = rows_of_one_document(tmp_path, document, rows, options, mask_rates=MaskRates("uniform"))
        key, batches = torch.zeros((), dtype=torch.int64), [step.batch.slice(i, i + 300) for i in range(0, rows, 300)]
        with torch.no_grad():
            sums = [hybrid_loss(model, batch, options, (1.0, 0.0), 0.0, key)[1] for batch in batches]
        parts = [part[MASKED, LOSS].item() for part in sums]
        total = step.target_weights[MASKED] / WEIGHT_UNITS
        if gamma:
            assert total == pytest.approx(rows * len(document), rel=1e-6)
        error = np.std(parts, ddof=1) * len(parts) ** 0.5 / total
        found[gamma] = (sum(parts) / total, error)
    per_token = exact / len(document)
    assert abs(found[1.0][0] - per_token) < 4 * found[1.0][1]
    assert abs(found[0.0][0] - per_token) > 8 * found[0.0][1], "the test could not tell one weight from another"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("rates") / "inputs", documents=100)


def test_bimodal_rates_move_with_the_schedule(inputs, tmp_path):
    options = {"mask_rate": "bimodal:0.6,0.12", "mask_p_start": 0.4, "mask_p_end": 0.85, "max_steps": 3}
    assert main(flags(inputs, tmp_path, masking="even", **options), single_world) == 0
    found = [line["stats/mask_p"] for line in training_lines(tmp_path / "run")]
    assert found == pytest.approx([0.6 * 0.12 + 0.4 * (0.4 + 0.15 * step) for step in range(3)])


def test_a_wrong_distribution_is_refused_in_one_sentence(inputs, tmp_path, capsys):
    said = refusal(capsys, main, flags(inputs, tmp_path, mask_rate="normal"), single_world)
    assert "--mask_rate is 'normal'; it must be fixed, uniform," in said
    said = refusal(capsys, main, flags(inputs, tmp_path, mask_span_length=7), single_world)
    assert "--mask_span_length is 7; spans have 1 to 6 tokens" in said
