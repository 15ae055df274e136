"""All checkpoints of a run as branches of one git repository: in a bare one, in clones of it, and on the Hub."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from helpers.tiny_exports import STEPS, load, make_run, random_model

from export import to_huggingface
from export.load_model import load_model
from training.checkpoint import locate


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


def test_every_checkpoint_is_a_branch_of_a_bare_repository(run_folder, tmp_path, capsys):
    bare, out = tmp_path / "model.git", tmp_path / "out"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(bare)], check=True)
    assert to_huggingface.main([str(run_folder), str(out), "--all_checkpoints", f"--push={bare}"]) == 0
    assert f"uploaded to {bare}" in capsys.readouterr().out
    assert set(git(bare, "for-each-ref", "--format=%(refname:short)", "refs/heads").split()) == STEPS.keys()
    assert git(bare, "log", "--format=%s", "main").splitlines() == [
        "step_00000012", "chck_2M", "chck_0.5e, chck_1M", "step_00000003",
    ]  # fmt: skip
    assert git(out, "status", "--porcelain") == ""
    for branch, step in STEPS.items():
        clone = tmp_path / branch
        subprocess.run(["git", "clone", "-q", "--branch", branch, str(bare), str(clone)], check=True)
        found = load_model(clone)[0].state_dict()
        assert all(value.equal(found[key]) for key, value in random_model("gpt-bert", seed=step).state_dict().items())


@pytest.mark.slow
def test_a_clone_of_a_branch_loads_with_transformers(run_folder, tmp_path):
    out = tmp_path / "out"
    assert to_huggingface.main([str(run_folder), str(out), "--all_checkpoints", "--ema"]) == 0
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--branch", "chck_2M", str(out), str(clone)], check=True)
    ours, ids = random_model("gpt-bert", seed=107), torch.tensor([[1, 20, 30, 40]])
    with torch.no_grad():
        theirs = load("AutoModel", clone)(ids, is_causal=True).last_hidden_state
        torch.testing.assert_close(theirs, ours.encode(ids, torch.zeros_like(ids), True), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_exported(run_folder, tmp_path, capsys, monkeypatch):
    def refuse(*arguments: object) -> str:
        assert to_huggingface.main([*map(str, arguments), "--all_checkpoints"]) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "has no checkpoints; --all_checkpoints takes those of a run folder" in refuse(tmp_path, out)
    assert "failed: " in refuse(run_folder, tmp_path / "there", f"--push={tmp_path}")  # no repository
    monkeypatch.setenv("PATH", "")
    assert "error: --all_checkpoints makes a git repository, and git cannot be run: No such" in refuse(run_folder, out)
    assert not out.exists()
    assert locate(run_folder).step == 12
