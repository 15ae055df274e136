"""The stories in examples/, as people would run them, at tiny size; slurm_cluster.sh's is in test_slurm_examples.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, environment, make_texts

OLDER_RUN = ROOT / "tests" / "fixtures" / "run_of_df7372a" / "run"  # any trained model will do
STORIES = sorted((ROOT / "examples").glob("*.sh"))
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1,  # the story sets it
    "max_position_embeddings": 64,
    "position_bucket_size": 8,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "layer_norm_eps": 1e-5,
}
SHORT = (
    "--device=cpu", "--seq_length=16", "--length_milestones=", "--global_batch_size=16", "--local_batch_size=16",
    "--max_steps=6", "--validate_every=6", "--validation_samples=0", "--save_every=6", "--wandb_mode=disabled",
)  # fmt: skip


def tell(story: str, *arguments: object, folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a story in `folder`, with variables beside those of any test."""
    command = ["bash", str(ROOT / "examples" / story), *map(str, arguments)]
    given = {name: str(value) for name, value in variables.items()}
    surroundings = {**environment(), "PYTHON": sys.executable, "HF_HOME": str(folder / "huggingface"), **given}
    return subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=600, check=False
    )


def write_texts(path: Path) -> None:
    path.write_text("\n\n".join(make_texts(120, seed=7)) + "\n")


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.name)
def test_story_is_executable_and_explains_itself(story, tmp_path):
    assert os.access(story, os.X_OK)
    done = tell(story.name, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_own_texts_become_a_model_and_a_second_call_continues(tmp_path):
    write_texts(tmp_path / "texts.txt")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    for steps in ("wrote out/tokenizer.json", "step 6"):
        done = tell("own_texts.sh", "texts.txt", "out", *SHORT, folder=tmp_path, MODEL="tiny.json", VOCABULARY=290)
        assert done.returncode == 0, done.stdout + done.stderr
        assert steps in done.stdout
        assert "Look at out/runs/own/report.html" in done.stdout
    out = tmp_path / "out"
    status = json.loads((out / "runs" / "own" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 6)
    assert (out / "runs" / "own" / "report.html").is_file()
    [result] = json.loads((out / "perplexity.json").read_text())["texts"].values()
    assert result["masked"]["loss"] > 0


@pytest.mark.slow
def test_a_language_becomes_a_published_model_with_a_ledger(tmp_path):
    write_texts(tmp_path / "texts.txt")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "one two three", "sentence_bad": "three one two"}\n')
    short = [flag for flag in SHORT if not flag.startswith(("--max_steps", "--validate", "--save"))]
    choices = {"MODEL": "tiny.json", "VOCABULARY": 290, "EPOCHS": 2, "PAIRS": "pairs.jsonl", "LICENSE": "mit"}
    done = tell("my_language.sh", "texts.txt", "eu", "out", *short, folder=tmp_path, **choices)
    assert done.returncode == 0, done.stdout + done.stderr
    published = tmp_path / "out" / "published"
    card = (published / "README.md").read_text()
    assert 'language:\n  - "eu"' in card
    assert 'license: "mit"' in card
    assert "| minimal pairs | " in card
    assert "| perplexity | validation | masked | perplexity | " in card
    assert "repetitions" in card.lower()
    branches = subprocess.run(["git", "-C", str(published), "branch"], capture_output=True, text=True, check=True)
    assert {"chck_1e", "chck_2e", "main"} <= set(branches.stdout.replace("*", "").split())
    assert json.loads((tmp_path / "out" / "pairs.json").read_text())["sets"]


@pytest.mark.slow
def test_a_model_is_fine_tuned_and_published(tmp_path):
    task = tmp_path / "tasks" / "length"
    task.mkdir(parents=True)
    for name, seed, count in (("train", 1, 40), ("valid", 2, 20)):
        lines = [{"sentence": text[:60], "label": int(len(text) > 100)} for text in make_texts(count, seed)]
        (task / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = ("--epochs=1", "--learning_rates", "1e-3", "--num_seeds=1", "--device=cpu")
    done = tell("finetune_and_publish.sh", OLDER_RUN, "tasks", "published", *small, folder=tmp_path, LANGUAGE="de")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if "was not there." in line]) == 3  # fill-mask, from outside
    published = tmp_path / "published"
    assert "length" in (published / "tasks.json").read_text()
    card = (published / "model" / "README.md").read_text().split("---\n")[1]
    assert 'license: "apache-2.0"' in card
    assert "de" in card.split("language")[1]
