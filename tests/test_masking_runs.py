"""Runs with rates of masking by row, masks of whole words, and rows that are read in other ways are the same resumed
and on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.tiny_runs import flags, make_inputs, run, training_lines

from train_single_gpu import main
from training.distributed import single_world
from training.metric_logger import read_metrics

KINDS = {
    "rates": {"mask_rate": "cosine", "mask_rate_loss_power": 1, "mask_span_length": 1, "mask_random_p": 0},
    "words": {"masking": "words", "causal_rows": "causal=1,prefix=1,blocks:4=1,meap=1"},
}
# With a warm-up: the first step of Adam's moments makes whole steps of rounding errors.
COMMON = {"max_steps": 8, "warmup_proportion": 0.3, "save_every": 3, "validate_every": 4, "data_fingerprint": True}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> tuple[Path, dict, Path]:
    """Inputs, flags and the run of one process."""
    folder, options = tmp_path_factory.mktemp(request.param), COMMON | KINDS[request.param]
    inputs = make_inputs(folder / "inputs", documents=100)
    assert main(flags(inputs, folder, **options), single_world) == 0
    return inputs, options, folder / "run"


def assert_same(whole: Path, other: Path) -> None:
    expected, found = training_lines(whole), training_lines(other)
    assert [line["step"] for line in found] == list(range(1, 9))
    for a, b in zip(expected, found, strict=True):
        for key in ("data/fingerprint", "stats/mask_p"):
            assert a[key] == b[key]
        losses = {key for key in a if key.startswith("train/") and key.endswith("_loss")}
        assert {key for key in b if key.startswith("train/") and key.endswith("_loss")} == losses
        for key in ("train/loss", *losses):
            assert b[key] == pytest.approx(a[key], rel=3e-5)  # of a few rows


@pytest.mark.slow
def test_every_kind_of_row_is_learned_from_and_validated(kind):
    _, options, whole = kind
    kinds = {"masked", "causal", *(("prefix", "blocks", "meap") if "causal_rows" in options else ())}
    lines = training_lines(whole)
    for name in kinds:
        assert sum(line[f"stats/{name}_rows"] for line in lines) > 0
        assert lines[-1][f"train/{name}_loss"] > 0
    (first, *_) = [line for line in read_metrics(whole / "metrics.jsonl") if "valid/masked_loss" in line]
    found = {key.removeprefix("valid/").removesuffix("_loss") for key in first if key.endswith("_loss")}
    assert {name for name in found if "ema" not in name} == kinds


@pytest.mark.slow
def test_resumed_it_is_the_same_run(kind, tmp_path):
    inputs, options, whole = kind
    shutil.copytree(whole, tmp_path / "run")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    assert main(flags(inputs, tmp_path, local_batch_size=7, **options), single_world) == 0
    assert_same(whole, tmp_path / "run")


@pytest.mark.slow
def test_same_run_on_four_ranks(kind, tmp_path):
    inputs, options, whole = kind
    run(flags(inputs, tmp_path, local_batch_size=5, **options), 4)
    assert_same(whole, tmp_path / "run")
