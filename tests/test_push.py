"""--push and export/push.py through the real huggingface_hub, to a server of our own that stands in for the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers.hub import READER, WRITER, Hub, served_hub
from helpers.tiny_exports import STEPS, make_checkpoint, make_run, random_model
from helpers.tiny_runs import ROOT, refusal
from safetensors.torch import load as load_tensors
from torch import Tensor

from export import push, to_huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own, of its HTTP client


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An exported checkpoint, and an exported run with all checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    checkpoint = make_checkpoint(folder / "one", random_model("gpt-bert", seed=12))
    assert to_huggingface.main([str(checkpoint), str(folder / "single")]) == 0
    assert to_huggingface.main([str(make_run(folder / "run")), str(folder / "all"), "--all_checkpoints"]) == 0
    return folder / "single", folder / "all"


@cache
def weights_of(seed: int) -> dict[str, Tensor]:
    return random_model("gpt-bert", seed).state_dict()


def seed_of(hub: Hub, revision: str) -> int:
    """The seed of a revision's weights; everything that a model needs is there."""
    files = hub.files("me/model", revision)
    assert {"config.json", "modeling_gpt_bert.py", "tokenizer.json", "README.md"} <= files.keys()
    weights = load_tensors(files["model.safetensors"])
    (found,) = (
        seed
        for seed in set(STEPS.values())
        if all(value.equal(weights[key]) for key, value in weights_of(seed).items())
    )
    return found


def test_an_export_is_uploaded_once(folders, tmp_path, monkeypatch, capsys):
    with served_hub(monkeypatch) as hub:
        checkpoint = make_checkpoint(tmp_path / "one", random_model("gpt-bert", seed=12))
        assert to_huggingface.main([str(checkpoint), str(tmp_path / "out"), "--push", "me/model"]) == 0
        assert f"uploaded to {hub.url}/me/model" in capsys.readouterr().out
        assert hub.files("me/model").keys() - {".gitattributes"} == {p.name for p in (tmp_path / "out").iterdir()}
        assert seed_of(hub, "main") == 12
        assert b'from_pretrained("me/model"' in hub.files("me/model")["README.md"]
        before = len(hub.commits)
        assert push.main([str(tmp_path / "out"), "me/model"]) == 0
        assert len(hub.commits) == before  # nothing has changed


def test_all_checkpoints_become_revisions(folders, monkeypatch, capsys):
    with served_hub(monkeypatch) as hub:
        assert push.main([str(folders[1]), "me/model"]) == 0
        assert hub.branches["me/model"].keys() == STEPS.keys()
        assert {name: seed_of(hub, name) for name in STEPS} == STEPS
    assert "uploaded chck_0.5e, chck_1M\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "at", "named", "there"),
    [
        ("repos/create", 1, "nothing was uploaded", {}),
        ("PUT", 1, "nothing was uploaded", {"main": None}),
        ("PUT", 2, "on the Hub are step_00000003, each whole", {"main": 3, "step_00000003": 3}),
        ("/branch/", 3, "on the Hub are step_00000003, each", {"main": 5, "step_00000003": 3, "chck_0.5e": 5}),
        ("/branch/", 5, "step_00000003, chck_0.5e, chck_1M, chck_2M, each",
         {"main": 12, "step_00000003": 3, "chck_0.5e": 5, "chck_1M": 5, "chck_2M": 7}),
    ],
)  # fmt: skip
def test_a_network_that_is_lost_leaves_whole_revisions(folders, monkeypatch, capsys, word, at, named, there):
    with served_hub(monkeypatch) as hub:
        hub.lose(word, at)
        assert push.main([str(folders[1]), "me/model"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]  # those before are the library's own, of each trial
        assert "the connection was lost or refused" in said
        assert named in said
        assert f"is whole; to go on: python export/push.py {folders[1]} me/model" in said
        assert hub.branches.get("me/model", {}).keys() == there.keys()
        for name, step in there.items():
            if step is None:
                assert hub.files("me/model", name).keys() == {".gitattributes"}
            else:
                assert seed_of(hub, name) == step
        hub.lost_at, sent = 0, set(hub.large)
        hub.requests.clear()
        assert push.main([str(folders[1]), "me/model"]) == 0
        assert {name: seed_of(hub, name) for name in hub.branches["me/model"]} == STEPS
        assert sum(line.startswith("PUT") for line in hub.requests) == len(hub.large) - len(sent)  # none of them again


def test_refusals_say_what_to_do(folders, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    single, every = folders
    with served_hub(monkeypatch, "hf_nobody") as hub:
        said = refusal(capsys, push.main, [str(single), "me/model"])
        assert "the token is not accepted: run `hf auth login`, or set HF_TOKEN; nothing was uploaded" in said
        monkeypatch.setenv("HF_TOKEN", READER)
        assert "the token may not write there" in refusal(capsys, push.main, [str(single), "me/model"])
        assert hub.branches == {}
        monkeypatch.setenv("HF_TOKEN", WRITER)
        assert "--push 'a/b/c' is no name" in refusal(capsys, push.main, [str(single), "a/b/c"])
        assert "is no exported folder" in refusal(capsys, push.main, [str(tmp_path), "me/model"])
        card = every / "README.md"
        kept = card.read_text()
        card.write_text(f"{kept}changed")
        assert "has changes that no branch has (README.md): commit" in refusal(capsys, push.main, [str(every), "a/b"])
        card.write_text(kept)
        assert hub.branches == {}
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    checkpoint = make_checkpoint(tmp_path / "run", random_model("gpt-bert"))
    arguments = [str(checkpoint), str(tmp_path / "out"), "--push", "me/model"]
    assert "--push needs a login: run `hf auth login`" in refusal(capsys, to_huggingface.main, arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_uses_hf_endpoint(folders, tmp_path, monkeypatch):
    with served_hub(monkeypatch) as hub:
        given = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
        command = [sys.executable, str(ROOT / "export" / "push.py"), str(folders[0]), "me/model"]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"uploaded to {hub.url}/me/model\n"), done.stderr
        assert seed_of(hub, "main") == 12
