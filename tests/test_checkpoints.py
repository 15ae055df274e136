"""Saving, and which checkpoints are a run's: roll-backs, branches, disks that fail. Runs in this process."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_runs import flags, make_inputs, training_lines
from safetensors.torch import load_file

import train_single_gpu
import training.checkpoint
import training.saves
from report.metrics import load_metrics
from training import errors
from training.checkpoint import (
    SaveError,
    find_newest,
    locate,
    prune,
    set_aside,
    write_checkpoint,
)
from training.distributed import single_world
from training.status import FAILED, list_checkpoints, newest_step, read_status

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
    return train_single_gpu.main(flags(inputs, output, name, **shared), single_world)


@pytest.fixture
def after_step(monkeypatch) -> Callable[[int, Callable[[], None]], None]:
    """Have something happen right after a step of every run to come; once."""
    original = train_single_gpu.train_step

    def arrange(step: int, act: Callable[..., None]) -> None:
        def train_step(state, *arguments):
            done = original(state, *arguments)
            if state.step == step:
                monkeypatch.setattr(train_single_gpu, "train_step", original)
                act(state)
            return done

        monkeypatch.setattr(train_single_gpu, "train_step", train_step)

    return arrange


def stop(_state) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash(_state) -> None:
    raise RuntimeError("a crash")


def written(run: Path, step: int) -> None:
    """Wait for a checkpoint that is written in the background."""
    while not (run / "checkpoints" / f"step_{step:08d}").exists():
        time.sleep(0.01)


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
    assert train(inputs, tmp_path, resume=back, keep_last=1) == 143
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
    prune([tmp_path], 2500, 1, ())
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
    prune([tmp_path], 4000, 1, ())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00004000"]
    assert len(list(tmp_path.iterdir())) == 3


def test_checkpoints_have_the_rights_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        place = write_checkpoint(tmp_path, 1, TENSORS, {}, {"config.json": b"{}"})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o640}


def test_training_goes_on_while_a_checkpoint_is_written(inputs, whole, tmp_path, monkeypatch, after_step, capsys):
    """What is written is the state of its step, and the next save waits for it."""
    after, flush = threading.Event(), training.checkpoint._flush

    def slow(path: Path) -> None:
        assert ".tmp_step_00000004" not in path.parts or after.wait(60)
        flush(path)

    monkeypatch.setattr(training.checkpoint, "_flush", slow)
    after_step(7, lambda _state: names(tmp_path / "run") == [".tmp_step_00000004"] and after.set())
    assert train(inputs, tmp_path) == 0
    assert names(tmp_path / "run") == names(whole)
    for name in names(whole):
        for file in ("model", "ema", "optimizer"):
            expected, found = (load_file(run / "checkpoints" / name / f"{file}.safetensors") for run in
                               (whole, tmp_path / "run"))  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_save_is_due_after_so_many_minutes(inputs, whole, tmp_path, monkeypatch):
    """At steps that the clock of rank 0 decides; nothing else changes."""
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: 60.0 * len(training_lines(tmp_path / "run"))})
    monkeypatch.setattr(training.saves, "time", clock)
    assert train(inputs, tmp_path, save_every=8, save_minutes=3, keep_last=0) == 0
    assert names(tmp_path / "run") == [f"step_{step:08d}" for step in (3, 6, 8, 11, 12)]
    torch.testing.assert_close(locate(tmp_path / "run").tensors("model"), locate(whole).tensors("model"))


def test_host_without_memory_for_a_copy_writes_while_training_waits(inputs, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training.saves, "memory_left", lambda: 0)
    assert train(inputs, tmp_path) == 0
    assert capsys.readouterr().out.count("note: the host lacks memory for a copy of the state") == 1
    torch.testing.assert_close(
        locate(tmp_path / "run").tensors("optimizer"), locate(whole).tensors("optimizer"), rtol=0, atol=0
    )


# Disks that fail


@pytest.fixture
def refused(monkeypatch) -> Callable[[Callable[[Path], bool]], list[Path]]:
    """Have the disk refuse files of checkpoints; returns those that it has refused."""
    monkeypatch.setattr(training.saves, "_PAUSE_SECONDS", 0.0)
    original, found = training.checkpoint._flush, []

    def arrange(refuses: Callable[[Path], bool]) -> list[Path]:
        def flush(path: Path) -> None:
            if path.name == "model.safetensors" and refuses(path):
                found.append(path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            original(path)

        monkeypatch.setattr(training.checkpoint, "_flush", flush)
        return found

    return arrange


def test_a_save_that_fails_is_tried_again_at_once_and_with_the_next(inputs, tmp_path, capsys, refused):
    found = refused(lambda _path: len(found) < 3)  # both times in step 4, the first time in step 8
    assert train(inputs, tmp_path) == 0
    said = capsys.readouterr().out
    assert "Stale file handle; the run continues without this save (1 of --max_failed_saves 3 in a row)" in " ".join(
        said.split()
    )
    assert f"tried again, {tmp_path}/run/checkpoints/step_00000008 was written" in said
    assert names(tmp_path / "run") == ["step_00000008", "step_00000012"]


@pytest.mark.parametrize(("last", "limit"), [(8, 2), (6, 9), (12, 9)])
def test_a_run_that_can_save_no_more_ends_and_says_so(inputs, tmp_path, capsys, refused, after_step, last, limit):
    """After so many failed saves in a row; at once where there will be no later one: a stop, or the last step."""
    refused(lambda path: path.parent.name != ".tmp_step_00000001")
    if last == 6:
        after_step(last, stop)
    assert train(inputs, tmp_path, max_failed_saves=limit, save_steps="1") == errors.HARDWARE.code
    error = capsys.readouterr().err
    assert f"step_{last:08d} could not be written" in error
    assert "step_00000001 is intact" in error
    assert read_status(tmp_path / "run").state == FAILED
    assert last <= training_lines(tmp_path / "run")[-1]["step"] <= STEPS  # others go on until they hear of it
    assert names(tmp_path / "run") == ["step_00000001"]


def test_what_the_run_folder_cannot_take_goes_to_the_spare_one_and_is_found_there(
    inputs, whole, tmp_path, capsys, refused, after_step
):
    refused(lambda path: "spare" not in path.parts)
    after_step(10, crash)
    assert train(inputs, tmp_path, spare_checkpoint_dir=tmp_path / "spare", keep_last=1) == errors.BUG.code
    (spare,) = (tmp_path / "spare").glob("run_*/checkpoints")
    assert [path.name for path in spare.iterdir()] == ["step_00000008"]
    assert locate(tmp_path / "run").path == spare / "step_00000008"
    assert locate(spare.parent).step == 8
    refused(lambda _path: False)
    capsys.readouterr()
    assert train(inputs, tmp_path, keep_last=1) == 0
    assert "steps 8 -> 12" in capsys.readouterr().out
    assert names(tmp_path / "run") == ["step_00000012"]
    assert not list(spare.iterdir())
    spare.rmdir()
    assert train(inputs, tmp_path) == 0
    assert f"note: {spare}, where --spare_checkpoint_dir let the run save, is not there" in capsys.readouterr().out
    torch.testing.assert_close(locate(tmp_path / "run").tensors("model"), locate(whole).tensors("model"))


@pytest.mark.parametrize("spare", [False, True])
def test_a_run_folder_that_vanishes_is_not_made_anew(inputs, tmp_path, capsys, refused, after_step, spare):
    """As if its file system had been unmounted: what would be written there now, nobody would find."""
    refused(lambda _path: False)
    folder, moved = tmp_path / "out" / "run", tmp_path / "moved"
    after_step(6, lambda _state: (written(folder, 4), folder.rename(moved), folder.mkdir()))
    options = {"spare_checkpoint_dir": tmp_path / "spare"} if spare else {}
    code, said = train(inputs, tmp_path / "out", max_failed_saves=1, **options), capsys.readouterr()
    assert f"{folder} is not the folder that the run has opened" in (said.out if spare else said.err)
    assert code == (0 if spare else errors.HARDWARE.code)
    assert not (folder / "checkpoints").exists()
    assert names(moved) == ["step_00000004"]
    assert 8 <= len(training_lines(moved)) <= 12
    shutil.rmtree(folder)
    moved.rename(folder)  # mounted again
    assert locate(folder).step == (12 if spare else 4)


def test_a_restarted_job_without_its_run_folder_does_not_begin_anew_in_silence(inputs, tmp_path, capsys, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    for said in (True, False):
        assert train(inputs, tmp_path, max_steps=1) == 0
        assert (f"there is no {tmp_path}/run: is its disk mounted here?" in capsys.readouterr().out) == said


@pytest.mark.parametrize("part", ["model", "ema", "optimizer"])
def test_nothing_that_is_not_finite_is_saved(inputs, tmp_path, capsys, after_step, part):
    def spoil(state) -> None:
        parameter = next(iter(state.model.parameters()))
        moments = state.optimizer.state[parameter]["exp_avg_sq"]
        next(iter({"model": [parameter.data], "ema": state.ema.state_dict().values(), "optimizer": [moments]}[part]))[
            0
        ] = math.nan

    after_step(8, spoil)
    assert train(inputs, tmp_path, keep_last=1) == errors.NOT_FINITE.code
    error = capsys.readouterr().err
    assert f"step 8, before its checkpoint: {part}/" in error
    assert f"the last good checkpoint is {tmp_path}/run/checkpoints/step_00000004" in error
    assert names(tmp_path / "run") == ["step_00000004"]


# What else a start says


def test_metrics_are_on_the_disk_before_a_checkpoint_is_and_gaps_are_told(
    inputs, tmp_path, capsys, monkeypatch, after_step
):
    events, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    after_step(6, stop)
    train(inputs, tmp_path, validate_every=5, validation_samples=1)
    last = events.index("step_00000006")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert events.index("step_00000004") < last - events[last::-1].index(name) < last
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(line for line in lines if not line.startswith((b'{"step": 2,', b'{"step": 6,'))))
    capsys.readouterr()
    assert train(inputs, tmp_path) == 0
    assert f"note: {metrics} lacks 2 steps, the first of them 2" in capsys.readouterr().out
    assert load_metrics(metrics).gaps == ["run: its metrics lack 2 training steps between the first and the last."]


@pytest.mark.slow
def test_a_copied_run_is_another_run_and_a_moved_one_is_not(inputs, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000012")
    assert train(inputs, tmp_path) == 0
    assert f"is a copy of {whole}: it gets a wandb run of its own" in capsys.readouterr().out

    def run_id(folder: Path) -> str:
        return json.loads((folder / "config.json").read_text())["wandb_id"]

    copied = run_id(tmp_path / "run")
    assert copied != run_id(whole)
    (tmp_path / "run").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "step_00000012")
    assert train(inputs, tmp_path, "moved") == 0
    assert run_id(tmp_path / "moved") == copied
    assert "wandb run of its own" not in capsys.readouterr().out


def test_what_a_branch_changes_is_told(inputs, whole, tmp_path, capsys):
    model = {**json.loads((inputs / "model.json").read_text()), "hidden_dropout_prob": 0.0}
    (tmp_path / "model.json").write_text(json.dumps(model))
    shards = sorted((inputs / "train").glob("*.shard"))
    changed = {"config_file": tmp_path / "model.json", "optimizer": "adamw", "train_path": shards[0]}
    back = whole / "checkpoints" / "step_00000008"
    assert train(inputs, tmp_path, resume=back, **changed) == 0
    said = capsys.readouterr().out
    for change in ("hidden_dropout_prob was 0.1 and is now 0.0", "holds other data", "the moments of the old one"):
        assert re.search(f"note: branching off with a change: .*{change}", said), change
    (tmp_path / "model.json").write_text(json.dumps({**model, "hidden_size": 48}))
    assert train(inputs, tmp_path, "other", resume=back, **changed) == 2
    assert "does not fit checkpoint" in capsys.readouterr().err


def test_a_file_system_that_cannot_flush_folders_is_used_all_the_same(tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    number = errno.EINVAL
    assert write_checkpoint(tmp_path, 1, TENSORS, {}, {}).is_dir()
    number = errno.EIO
    with pytest.raises(SaveError):
        write_checkpoint(tmp_path, 2, TENSORS, {}, {})
