"""Masked rows without a masked token: they contribute nothing, and above all no causal labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import flags, make_inputs, training_lines

from data.corpus import Corpus
from data.loader import BatchBuilder, RowBatch, ValidationSet
from data.masking import IGNORE_INDEX, MaskingOptions
from data.objectives import MASKED
from data.plan import DataPlan
from data.shards import write_shard
from evaluation import perplexity
from evaluation.validation import validate
from model import ModelConfig
from model_extra import GPTBert
from train_single_gpu import main
from training.checkpoint import write_checkpoint
from training.distributed import World, single_world
from training.environment import Environment
from training.loss import COUNT, hybrid_loss

ROWS = 8  # of a validation batch
OPTIONS = MaskingOptions(vocab_size=300)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("targets") / "inputs", documents=60)


def corpus_of(folder: Path, *lengths: int) -> Corpus:
    folder.mkdir(exist_ok=True)
    documents = [np.arange(20, 20 + length) % 200 + 20 for length in lengths]
    write_shard(folder / "x.shard", documents, "ab" * 32, 300)
    return Corpus(folder / "x.shard", tokenizer_hash=None, bos_id=1, eos_id=2)


def model_of(inputs: Path) -> GPTBert:
    return GPTBert(ModelConfig.from_json(inputs / "model.json"), torch.Generator().manual_seed(0)).eval()


def unmasked_batch(folder: Path, numerator: int) -> RowBatch:
    """Eight rows, `numerator` of four masked, at a masked share of 0."""
    plan = DataPlan(2, 16, 8, 1.0, numerator, 4, mask_p_start=0.0, milestones=())
    builder = BatchBuilder(corpus_of(folder, *[40] * 9), plan, OPTIONS)
    return builder.step(0, 0, 1, "rows", 8).batch


@pytest.mark.parametrize("numerator", [4, 3])
@pytest.mark.parametrize("spare", [0, 9])
def test_rows_without_masks_are_not_scored(inputs, tmp_path, numerator, spare):
    """Nor where places in the head are more than the targets, as for CUDA graphs."""
    batch = unmasked_batch(tmp_path, numerator)
    labels = batch.inputs(OPTIONS).labels
    assert not (labels[batch.objective == MASKED] != IGNORE_INDEX).any()
    targets = batch.targets.sum(axis=1)
    assert targets[MASKED] == 0
    model, key = model_of(inputs), torch.zeros((), dtype=torch.int64)
    loss, sums, _ = hybrid_loss(model, batch, OPTIONS, (1.0, 0.0), 1e-4, key, int(targets.sum()) + spare)
    assert sums[:, COUNT].tolist() == targets.tolist()
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("numerator", [2, 1])
def test_a_run_may_begin_or_end_without_masks(inputs, tmp_path, numerator):
    """Half or all of its rows are masked ones, at shares from 0 and to 0."""
    for name, start, end in (("rising", 0, 0.3), ("none", 0, 0)):
        chosen = {"hybrid_numerator": 1, "hybrid_denominator": numerator, "mask_p_start": start, "mask_p_end": end}
        short = {"max_steps": 3, "global_batch_size": 16, "validate_every": 0, "save_every": 0, "log_stats_every": 1}
        assert main(flags(inputs, tmp_path, name, **chosen, **short), single_world) == 0
        lines = training_lines(tmp_path / name)
        assert "train/masked_loss" not in lines[0]
        assert ("train/causal_loss" in lines[0]) == (numerator == 2)
        assert ("train/masked_loss" in lines[2]) == (end > 0)
        if numerator == 1:
            assert lines[0]["train/loss"] == lines[0]["stats/grad_norm"] == 0


def test_validation_ends_in_a_short_row(inputs, tmp_path):
    """Two full batches, and a batch of one row of 1 to 7 tokens: all tokens are counted, whatever is masked."""
    model, world = model_of(inputs), World(0, 1, torch.device("cpu"), Environment("none"))
    without = 0
    for tokens in range(1, 8):
        corpus = corpus_of(tmp_path, 16 * ROWS * 2 - 1 + tokens)
        held_out = ValidationSet(corpus, OPTIONS, 16)
        *_, last = held_out.batches(MASKED, 0, 1, ROWS)
        assert len(last) == 1
        without += not last.targets.any()
        assert (last.inputs(OPTIONS).labels != IGNORE_INDEX).sum() == last.targets.sum()
        found = validate(model, held_out, world, ROWS, False, "")
        assert set(found) >= {"masked_loss", "causal_loss"}
    assert without >= 3


def test_a_text_of_two_words(inputs, tmp_path, capsys):
    """Causal and token by token it has a perplexity; where no token happens to be masked, one sentence says so."""
    files = {
        name: (inputs / source).read_bytes()
        for name, source in {"config.json": "model.json", "tokenizer.json": "tokenizer.json"}.items()
    }
    model = write_checkpoint(tmp_path, 1, {"model": model_of(inputs).state_dict()}, {}, files)
    (tmp_path / "text.txt").write_text("the cat")
    command = [str(model), "--data", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert perplexity.main([*command, "--mode", "causal"]) == 0
    assert perplexity.main([*command, "--every_token"]) == 0
    assert perplexity.main([*command, "--mask_p", "0.01"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --data: the text has no token to predict in mode masked; ")
    assert error.count("\n") == 1
