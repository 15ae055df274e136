"""Gradients across ranks: summed, not averaged, in float32 or bfloat16."""

from pathlib import Path

import pytest
from runs import flags, make_inputs, run, training_lines

from training.checkpoint import locate

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    inputs = make_inputs(folder / "inputs")
    common = {"max_steps": STEPS, "batch_reduction": 1, "length_milestones": "", "save_every": 0, "validate_every": 0}
    run(flags(inputs, folder / "runs", "one", **common))
    run(flags(inputs, folder / "runs", "bfloat16", **common, allreduce_dtype="bfloat16"), ranks=2)
    return folder / "runs"


def test_sums_in_bfloat16_are_sums_to_three_digits(folder):
    expected, found = training_lines(folder / "one"), training_lines(folder / "bfloat16")
    assert len(found) == STEPS
    assert found[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], rel=1e-5)  # before any update
    norms = [(a["stats/grad_norm"], b["stats/grad_norm"]) for a, b in zip(expected, found, strict=True)]
    assert norms[0][1] == pytest.approx(norms[0][0], rel=4e-3)
    assert norms[0][1] != pytest.approx(norms[0][0], rel=1e-6), "nothing was rounded"
    for a, b in zip(expected, found, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=2e-3), a["step"]


def test_first_moments_are_those_of_one_rank(folder):
    expected, found = (locate(folder / name).tensors("optimizer") for name in ("one", "bfloat16"))
    for name in expected:
        if name.startswith("exp_avg/"):
            assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm() + 1e-6, name
