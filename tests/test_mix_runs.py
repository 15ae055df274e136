"""Runs on a mix in stages, validated on named sets: the same on any number of ranks and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny_runs import flags, make_inputs, refusal, run, training_lines

import train_single_gpu
from data.corpus import CorpusError
from data.mix import named_paths
from training.metric_logger import read_metrics

STEPS = 8
SOURCES = ({"path": "train/part_0.shard", "name": "web"}, {"path": "train/part_1.shard", "name": "books"})


def weights(*amounts: float) -> list[dict]:
    return [{**source, "weight": amount} for source, amount in zip(SOURCES, amounts, strict=True)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    inputs = make_inputs(tmp_path_factory.mktemp("mix") / "inputs")
    mix = {"stages": [{"from": 0, "sources": weights(4, 1)}, {"from": "50%", "sources": weights(1, 4)}]}
    (inputs / "mix.json").write_text(json.dumps({**mix, "max_repeats": 4}))
    return inputs


def arguments(inputs: Path, output: Path, name: str, **options) -> list[str]:
    sets = f"plain={inputs}/valid/part_0.shard,other={inputs}/valid/part_1.shard"
    fixed = {"valid_path": sets, "max_steps": STEPS, "validate_every": STEPS, "save_every": 5, "data_fingerprint": True}
    return flags(inputs, output, name, train_path=inputs / "mix.json", **fixed | options)


@pytest.fixture(scope="module")
def one(inputs, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = run(arguments(inputs, runs, "one"))
    assert "stage 2 from step 4 (50%) to 8:" in done.stdout
    assert "web: 80.00% of tokens asked for, " in done.stdout
    return runs / "one"


def prints(folder: Path) -> list:
    return [line["data/fingerprint"] for line in training_lines(folder)]


def test_metrics_count_tokens_and_epochs_by_source(one):
    lines = training_lines(one)
    for line in lines:
        tokens = [line[f"data/{name}_tokens"] for name in ("web", "books")]
        assert sum(tokens) == pytest.approx(line["stats/tokens"], abs=2)
    for name in ("masked", "causal"):
        for line in lines:
            losses = [line[key] for source in ("web", "books") if (key := f"train/{source}/{name}_loss") in line]
            assert min(losses) - 1e-6 <= line[f"train/{name}_loss"] <= max(losses) + 1e-6
    fraction = [line["data/web_tokens"] / line["stats/tokens"] for line in lines]
    assert fraction[3] == pytest.approx(0.8, abs=0.04)
    assert fraction[7] < fraction[3] - 0.2
    epochs = [line["data/books_epochs"] for line in lines]
    assert epochs == sorted(epochs)
    page = (one / "report.html").read_text()
    assert "Data used" in page
    assert "Masked loss, books" in page
    assert f"{lines[-1]['data/books_tokens']:,.0f}" in page


def test_named_sets_have_curves_of_their_own(one):
    [found] = [line for line in read_metrics(one / "metrics.jsonl") if "valid/masked_loss" in line]
    for key in ("masked_loss", "ema_causal_accuracy", "causal_loss_64", "ema_masked_perplexity_64"):
        assert found[f"valid/{key}"] == found[f"valid/plain/{key}"] != found[f"valid/other/{key}"]
    assert "Masked loss, other" in (one / "report.html").read_text()


def test_resume_in_the_middle_of_a_stage_is_the_same_run(one, inputs):
    """From step 5 of 8, the second stage's second step."""
    shutil.copytree(one, one.parent / "resumed")
    shutil.rmtree(one.parent / "resumed" / "checkpoints" / "step_00000008")
    done = run(arguments(inputs, one.parent, "resumed"))
    assert "steps 5 -> 8" in done.stdout
    assert prints(one.parent / "resumed") == prints(one)


def test_longer_branch_says_what_it_cannot_keep(one, inputs):
    start = str(one / "checkpoints" / "step_00000005")
    done = run(arguments(inputs, one.parent, "longer", resume=start, max_steps=9, validate_every=0, valid_path=""))
    assert "rows come in another order from here on, and some of this epoch's may come again" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "split"), [(2, "rows"), (4, "ranks")])
def test_ranks_make_the_same_run(one, inputs, ranks, split):
    name = f"{ranks}_{split}"
    run(arguments(inputs, one.parent, name, hybrid_split=split), ranks)
    for line, expected in zip(training_lines(one.parent / name), training_lines(one), strict=True):
        for key in ("data/fingerprint", "data/web_tokens", "data/books_epochs"):
            assert line[key] == expected[key]
        losses, others = ({k: v for k, v in of.items() if k.endswith("_loss")} for of in (line, expected))
        assert "train/web/masked_loss" in losses
        assert losses == pytest.approx(others, rel=1e-5)


def test_paths_of_held_out_sets(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert named_paths(str(tmp_path / "a=b")) == {"": str(tmp_path / "a=b")}
    assert named_paths("") == {}
    assert named_paths("valid/*.shard") == {"": "valid/*.shard"}
    assert named_paths("web=a/b, books=c=d/*") == {"web": "a/b", "books": "c=d/*"}
    for wrong in ("web=a,web=b", "web=a,books="):
        with pytest.raises(CorpusError, match="each set has a name and a path"):
            named_paths(wrong)


def test_held_out_set_that_is_trained_on_is_refused(inputs, tmp_path, capsys):
    sets = f"a={inputs}/valid/part_0.shard,b={inputs}/train/part_1.shard"
    error = refusal(capsys, train_single_gpu.main, arguments(inputs, tmp_path, "x", valid_path=sets))
    assert "give shards that are held out" in error
