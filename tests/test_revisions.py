"""All checkpoints of a run as branches of one git repository: in a bare one, in clones of it, and on the Hub."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.tiny_exports import load, random_model, tokenizer_text

from export import to_huggingface
from export.load_model import load_model
from training.checkpoint import give_name, locate, write_checkpoint


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 3, 5 and 12 with other weights each; 5 has two names, 7 is weights alone."""
    run = tmp_path_factory.mktemp("runs") / "run"
    for step, name in ((3, ""), (5, ""), (7, "chck_2M"), (12, "")):
        model = random_model("gpt-bert", seed=step)
        files = {"config.json": json.dumps(model.config.to_dict()), "tokenizer.json": tokenizer_text()}
        encoded = {key: text.encode() for key, text in files.items()}
        tensors = {"model": model.state_dict(), "ema": random_model("gpt-bert", seed=step + 100).state_dict()}
        path = write_checkpoint(run / "checkpoints", step, tensors, {"tokens": 0, "flags": {}}, encoded, name)
        if step == 5:
            give_name(path, "chck_1M")
            give_name(path, "chck_0.5e")
    return run


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


STEPS = {"step_00000003": 3, "chck_1M": 5, "chck_0.5e": 5, "chck_2M": 7, "step_00000012": 12, "main": 12}


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


def test_branches_are_uploaded_to_the_hub(run_folder, tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    api, uploaded = mock.create_autospec(huggingface_hub.HfApi, instance=True), {}

    def upload(repo_id, folder_path, revision="main", **_):
        uploaded[revision] = load_model(folder_path)[0].state_dict()

    api.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    out = tmp_path / "out"
    assert to_huggingface.main([str(run_folder), str(out), "--all_checkpoints", "--push=me/model"]) == 0
    assert [call.kwargs["branch"] for call in api.create_branch.call_args_list] == list(uploaded)[1:]
    assert uploaded.keys() == STEPS.keys()
    for branch, step in STEPS.items():
        expected = random_model("gpt-bert", seed=step).state_dict()
        assert all(value.equal(expected[key]) for key, value in uploaded[branch].items())
    assert git(out, "branch", "--show-current") == "main\n"


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
