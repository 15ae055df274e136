"""A run that is cut off anywhere and resumed anywhere is the run that would have been."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers.held_run import HeldRun
from helpers.tiny_runs import flags, make_inputs, run, training_lines

from training.checkpoint import find_newest, locate
from training.status import list_checkpoints

STEPS = 30


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("resume") / "inputs")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The run that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    run(flags(inputs, output, save_every=4))
    return output / "run"


def assert_same_run(whole: Path, other: Path) -> None:
    expected, found = training_lines(whole), training_lines(other)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for a, b in zip(expected, found, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5), a["step"]
        assert b["stats/learning_rate"] == a["stats/learning_rate"]
    a, b = locate(whole), locate(other)
    assert a.step == b.step == STEPS
    for part in ("model", "ema", "optimizer"):
        left, right = a.tensors(part), b.tensors(part)
        assert left.keys() == right.keys()
        for key in left:
            assert (left[key] - right[key]).norm() / left[key].norm().clamp(min=1e-6) < 1e-3, (part, key)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (4, 2)])
def test_killed_anywhere_and_resumed_on_another_number_of_ranks(inputs, whole, tmp_path, before, after):
    target = random.Random(before).randrange(6, 25)
    arguments, folder = flags(inputs, tmp_path, save_every=4), tmp_path / "run"
    held = HeldRun(arguments, tmp_path / "held", target, before)
    held.wait()
    held.processes.send_signal(signal.SIGKILL)
    held.release()
    assert locate(folder).step == target // 4 * 4 - 4 * (target % 4 == 0)  # a step that is held is not saved yet
    run(arguments, after)
    assert_same_run(whole, folder)


@pytest.mark.slow
def test_killed_inside_a_save(inputs, whole, tmp_path):
    """Killed while the temporary folder of a save exists: the save before it counts, and the rubbish goes."""
    arguments, folder = flags(inputs, tmp_path, save_every=4), tmp_path / "run"
    checkpoints = folder / "checkpoints"
    held = HeldRun(arguments, tmp_path / "held", 8, inside_save=True)
    held.wait()
    assert list(checkpoints.glob(".tmp_step_*"))
    held.processes.send_signal(signal.SIGKILL)
    held.release()
    assert locate(folder).step == 4
    run(arguments)
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_exits_with_the_command_that_resumes(inputs, whole, tmp_path, number):
    arguments, folder = flags(inputs, tmp_path, save_every=0), tmp_path / "run"
    held = HeldRun(arguments, tmp_path / "held", 5)
    held.wait()
    held.processes.send_signal(number)
    said, codes = held.release()
    assert codes == [0 if number == signal.SIGINT else 128 + number], said  # where nobody pressed a key: not finished
    assert said.count(f"{signal.Signals(number).name}: the run finishes this step or batch, saves and stops") == 1
    step = locate(folder).step
    assert step == 5
    assert f"stopped by {signal.Signals(number).name} after step {step}" in said
    resume = said.split("resume with: ")[1].splitlines()[0]
    assert resume.startswith(f"{sys.executable} ")
    assert "train_single_gpu.py" in resume
    assert resume.endswith("--resume auto")
    run(arguments)
    assert_same_run(whole, folder)


@pytest.mark.slow
def test_one_rank_signalled_stops_all(inputs, whole, tmp_path):
    arguments, folder = flags(inputs, tmp_path, save_every=0), tmp_path / "run"
    held = HeldRun(arguments, tmp_path / "held", 5, ranks=2)
    held.wait()
    os.kill(held.processes.pids[1], signal.SIGUSR1)
    said, codes = held.release()
    assert any(codes), (codes, said)  # the run is not finished
    assert "stopped by SIGUSR1" in said
    run(arguments, 0)
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "record"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(inputs, whole, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints" / "step_00000028"
    shutil.rmtree(folder / "checkpoints" / "step_00000030")
    victim = newest / ("checkpoint.json" if damage == "record" else "optimizer.safetensors")
    content = victim.read_bytes()
    if damage in ("truncate", "record"):
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        victim.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    else:
        victim.unlink()
    done = run(flags(inputs, tmp_path, save_every=4))
    assert str(newest) in done.stdout
    assert "damaged" in done.stdout
    assert "steps 24 -> 30" in done.stdout
    assert_same_run(whole, folder)


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_do(inputs, whole):
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*") if path.is_file())
    done = run(flags(inputs, whole.parent, save_every=4))
    assert "nothing to do" in done.stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*") if path.is_file()) == before


@pytest.mark.slow
def test_a_used_folder_is_refused_unless_the_run_resumes(inputs, whole):
    done = run(flags(inputs, whole.parent, save_every=4, resume="never"), check=False)
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
    done = run(flags(inputs, whole.parent, save_every=4, learning_rate=5e-3), check=False)
    assert done.returncode == 2
    assert "--learning_rate was 0.01 and is now 0.005" in done.stderr


@pytest.mark.slow
def test_a_run_can_branch_off(inputs, whole, tmp_path):
    checkpoint = whole / "checkpoints" / "step_00000012"
    done = run(flags(inputs, tmp_path, "branch", learning_rate=5e-3, resume=checkpoint))
    assert "branching off with a change: --learning_rate was 0.01 and is now 0.005" in done.stdout
    lines = training_lines(tmp_path / "branch")
    assert [line["step"] for line in lines] == list(range(13, STEPS + 1))
    assert lines[0]["stats/learning_rate"] < training_lines(whole)[12]["stats/learning_rate"]


@pytest.mark.slow
def test_what_is_kept(inputs, tmp_path):
    run(flags(inputs, tmp_path, save_every=5, save_steps="3,7", keep_last=2))
    kept = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == [30, 25, 7, 3]
    assert find_newest(tmp_path / "run" / "checkpoints")[1] == []


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_folder(inputs, tmp_path):
    arguments = flags(inputs, tmp_path)
    held = HeldRun(arguments, tmp_path / "held", 1)
    held.wait()
    try:
        done = run(arguments, check=False)
        assert done.returncode == 2
        assert "another process is training" in done.stderr
    finally:
        held.processes.send_signal(signal.SIGKILL)
        held.release()


@pytest.mark.slow
def test_initial_weights_are_taken_and_checked(inputs, whole, tmp_path):
    start_line = training_lines(whole)[0]["train/masked_loss"]
    run(flags(inputs, tmp_path, initial_weights=whole, max_steps=3, save_every=0))
    first = training_lines(tmp_path / "run")[0]
    assert first["step"] == 1
    assert first["train/masked_loss"] < start_line - 1  # it knows something already
    done = run(flags(inputs, tmp_path, "none", initial_weights=tmp_path / "nowhere"), check=False)
    assert done.returncode == 2
    assert "--initial_weights" in done.stderr
    other = make_inputs(tmp_path / "wider", hidden_size=48)
    done = run(flags(other, tmp_path, "wide", initial_weights=whole), check=False)
    assert done.returncode == 2
    assert "does not fit the model" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 1)])
def test_one_objective_alone(inputs, tmp_path, numerator, denominator):
    run(flags(inputs, tmp_path, hybrid_numerator=numerator, hybrid_denominator=denominator, max_steps=4, save_every=0))
    for line in training_lines(tmp_path / "run"):
        assert ("train/masked_loss" in line, "train/causal_loss" in line) == (numerator == 1, numerator == 0)
        assert line["stats/masked_rows"] == (line["stats/global_batch_size"] if numerator else 0)
