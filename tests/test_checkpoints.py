"""Which checkpoints are a run's: roll-backs, branches, what is deleted, and who may read them. Runs in this process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import flags, make_inputs, training_lines

import training.loop
from training.checkpoint import find_newest, locate, prune, set_aside, write_checkpoint
from training.checkpoint_names import list_checkpoints, newest_step
from training.distributed import single_world

STEPS = 12
TENSORS = {name: {"w": torch.ones(4)} for name in ("model", "ema", "optimizer")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("checkpoints") / "inputs", documents=100)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, whatever started the tests."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


def train(inputs: Path, output: Path, name: str = "run", **options) -> int:
    """A run in this process; returns its exit code."""
    shared = {"max_steps": STEPS, "save_every": 4, "validate_every": 0, "global_batch_size": 32, **options}
    return training.loop.main(flags(inputs, output, name, **shared), "", single_world)


@pytest.fixture
def after_step(monkeypatch) -> Callable[[int, Callable[[], None]], None]:
    """Have something happen right after a step of every run to come; once."""
    original = training.loop.train_step

    def arrange(step: int, act: Callable[..., None]) -> None:
        def train_step(state, *arguments):
            done = original(state, *arguments)
            if state.step == step:
                monkeypatch.setattr(training.loop, "train_step", original)
                act(state)
            return done

        monkeypatch.setattr(training.loop, "train_step", train_step)

    return arrange


def stop(_state) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash(_state) -> None:
    raise RuntimeError("a crash")


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    assert train(inputs, output) == 0
    return output / "run"


def test_a_run_that_was_rolled_back_keeps_its_new_branch(inputs, whole, tmp_path, capsys, after_step):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    back = folder / "checkpoints" / "step_00000004"
    after_step(6, stop)
    assert train(inputs, tmp_path, resume=back, keep_last=1) == 0
    said = capsys.readouterr().out
    assert f"{folder}/checkpoints/step_00000012 is kept as abandoned_step_00000012" in said
    assert names(folder) == ["abandoned_step_00000008", "abandoned_step_00000012", "step_00000006"]
    abandoned = folder / "checkpoints" / "abandoned_step_00000012"
    assert [line["step"] for line in training_lines(abandoned)] == list(range(1, 13))
    assert locate(folder).step == 6
    assert train(inputs, tmp_path) == 0
    assert "steps 6 -> 12" in capsys.readouterr().out
    assert [line["step"] for line in training_lines(folder)] == list(range(1, 13))
    found, before = locate(folder).tensors("model"), locate(abandoned).tensors("model")
    torch.testing.assert_close(found, before)

    assert train(inputs, tmp_path, resume=abandoned) == 2
    assert "branch off from it with --name NEW" in capsys.readouterr().err
    assert train(inputs, tmp_path, resume=folder / "checkpoints" / "step_00000012") == 0
    assert "abandoned_step_00000012_2" not in names(folder)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_restart_after_a_roll_back_goes_on_from_there(
    inputs, whole, tmp_path, monkeypatch, after_step, capsys, restarts
):
    """torchrun gives the same command again: back to the old step, once more, would be no way forward."""
    shutil.copytree(whole, tmp_path / "run")
    back = tmp_path / "run" / "checkpoints" / "step_00000004"
    after_step(10, crash)
    assert train(inputs, tmp_path, resume=back) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    capsys.readouterr()
    assert train(inputs, tmp_path, resume=back) == 0
    assert f"steps {8 if restarts else 4} -> 12" in capsys.readouterr().out
    assert len(training_lines(tmp_path / "run")) == STEPS


def test_the_command_of_a_branch_can_be_given_again(inputs, whole, tmp_path, after_step, capsys):
    branch = {"resume": whole / "checkpoints" / "step_00000004", "learning_rate": 5e-3, "name": "branch"}
    for crashed, begins in ((6, 4), (10, 4), (None, 8)):
        if crashed:
            after_step(crashed, crash)
        assert train(inputs, tmp_path, **branch) == (1 if crashed else 0)
        assert f"steps {begins} -> 12" in capsys.readouterr().out
    assert [line["step"] for line in training_lines(tmp_path / "branch")] == list(range(5, 13))
    other = whole / "checkpoints" / "step_00000008"
    assert train(inputs, tmp_path, **{**branch, "resume": other}) == 2
    assert "holds another run already" in capsys.readouterr().err


def test_checkpoints_may_be_a_link_to_another_disk(inputs, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "scratch")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    assert train(inputs, tmp_path, resume=tmp_path / "run" / "checkpoints" / "step_00000008") == 0
    assert "steps 8 -> 12" in capsys.readouterr().out


def test_a_run_folder_whose_newest_checkpoint_is_damaged_is_not_taken_in_silence(inputs, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "old")
    damaged = tmp_path / "old" / "checkpoints" / "step_00000012"
    (damaged / "model.safetensors").write_bytes(b"x")
    assert train(inputs, tmp_path, resume=tmp_path / "old") == 0
    assert f"note: checkpoint {damaged} is damaged" in capsys.readouterr().out
    assert damaged.is_dir()  # of another run
    assert locate(tmp_path / "old").step == 8
    assert f"note: checkpoint {damaged} is damaged" in capsys.readouterr().err


def test_nothing_whole_is_deleted_for_what_is_damaged_or_newer(tmp_path):
    for step in (2000, 3000):
        write_checkpoint(tmp_path, step, TENSORS, {}, {})
    (tmp_path / "step_00003000" / "model.safetensors").write_bytes(b"damaged")
    write_checkpoint(tmp_path, 2500, TENSORS, {}, {})
    prune(tmp_path, 2500, 1, ())
    assert find_newest(tmp_path)[0].step == 2500
    assert len(set_aside(tmp_path, 2500)) == 1
    assert newest_step(tmp_path) == 2500
    write_checkpoint(tmp_path, 3000, TENSORS, {}, {})
    set_aside(tmp_path, 2500)
    assert sorted(path.name for path in tmp_path.glob("ab*")) == [
        "abandoned_step_00003000",
        "abandoned_step_00003000_2",
    ]
    write_checkpoint(tmp_path, 4000, TENSORS, {}, {})
    prune(tmp_path, 4000, 1, ())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00004000"]
    assert len(list(tmp_path.iterdir())) == 3


def test_checkpoints_have_the_rights_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        place = write_checkpoint(tmp_path, 1, TENSORS, {}, {"config.json": b"{}"})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o640}
