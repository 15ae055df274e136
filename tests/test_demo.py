"""demo.py: what it keeps, repeats and deletes. The commands themselves have tests of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import demo
from demo import DemoError, Step, as_typed, prepare

ROOT = Path(__file__).resolve().parent.parent
# Appends a letter to its file each time it runs; with a third argument it also leaves the file of a complete step.
SCRIPT = "import sys; open(sys.argv[1], 'a').write('x'); [open(name, 'w').close() for name in sys.argv[2:]]"


def step(folder: Path, name: str, *more: str, finishes: bool = True) -> Step:
    output, done = folder / f"{name}.txt", folder / f"{name}.done"
    arguments = ("-c", SCRIPT, str(output), *([str(done)] if finishes else []), *more)
    return Step(name, name, arguments, (output, done), done)


def runs(folder: Path, name: str) -> int:
    return len((folder / f"{name}.txt").read_text())


def test_complete_steps_are_not_repeated(tmp_path, capfd):
    todo = [[step(tmp_path, "a")], [step(tmp_path, "b")]]
    prepare(todo, tmp_path)
    prepare(todo, tmp_path)
    assert (runs(tmp_path, "a"), runs(tmp_path, "b")) == (1, 1)
    assert "a.txt is there already" in capfd.readouterr().out


def test_a_changed_step_begins_anew_and_so_does_what_follows(tmp_path):
    prepare([[step(tmp_path, "a")], [step(tmp_path, "b")], [step(tmp_path, "c")]], tmp_path)
    (tmp_path / "a.txt").write_text("xxx")
    changed = [[step(tmp_path, "a")], [step(tmp_path, "b", str(tmp_path / "more"))], [step(tmp_path, "c")]]
    prepare(changed, tmp_path)
    assert (tmp_path / "a.txt").read_text() == "xxx"
    assert (runs(tmp_path, "b"), runs(tmp_path, "c")) == (1, 1)  # their old files were deleted first


def test_a_lost_result_is_made_again(tmp_path):
    todo = [[step(tmp_path, "a")]]
    prepare(todo, tmp_path)
    (tmp_path / "a.done").unlink()
    prepare(todo, tmp_path)
    assert (tmp_path / "a.done").exists()


def test_unfinished_work_of_the_same_command_is_kept_for_it(tmp_path):
    unfinished = step(tmp_path, "a", finishes=False)
    with pytest.raises(DemoError, match="stopped before the end"):
        prepare([[unfinished]], tmp_path)
    with pytest.raises(DemoError, match="stopped before the end"):
        prepare([[unfinished]], tmp_path)
    assert runs(tmp_path, "a") == 2  # the second went on with the first one's file


def test_a_failing_command_stops_the_demo_with_its_exit_code(tmp_path):
    failing = Step("a", "a", ("-c", "raise SystemExit(3)"), (tmp_path / "a",), tmp_path / "a")
    with pytest.raises(DemoError, match="exit code 3"):
        prepare([[failing], [step(tmp_path, "b")]], tmp_path)
    assert not (tmp_path / "b.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_command_end_and_then_stops(tmp_path, number):
    """The command gets the signal (Ctrl-C goes to the whole group), saves, and only then the demo ends."""
    child = (
        "import pathlib, signal, sys, time\n"
        "def save(*_): pathlib.Path('saved').touch(); sys.exit(0)\n"
        f"signal.signal({int(number)}, save); pathlib.Path('ready').touch(); time.sleep(60)\n"
    )
    parent = f"import demo; demo.call([('-c', {child!r})])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (tmp_path / "saved").exists()
    assert error.strip().endswith("KeyboardInterrupt")


def test_a_second_demo_in_the_same_folder_is_refused(tmp_path, capsys):
    import fcntl

    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = os.getcwd()
        try:
            assert demo.main(["--output_dir", str(tmp_path)]) == 1
        finally:
            os.chdir(before)
    assert "another demo is running" in capsys.readouterr().err


def test_commands_are_shown_as_one_would_type_them():
    assert as_typed(("python", "a.py", "--text", "two words")) == "python a.py --text 'two words'"
    shown = as_typed(("python", "train.py", *(f"--flag_{n}={n}" for n in range(30))))
    assert max(map(len, shown.splitlines())) <= 120
    assert shown.replace("\\\n", "").split() == ["python", "train.py", *(f"--flag_{n}={n}" for n in range(30))]


def test_steps_side_by_side_have_logs_of_which_news_are_passed_on(tmp_path, capfd):
    """Both run at the same time, each into its log; one that is complete is left alone the next time."""
    script = (
        "import pathlib, sys, time\n"
        "here, other = map(pathlib.Path, sys.argv[1:])\n"
        "here.touch()\n"
        "while not other.exists(): time.sleep(0.02)\n"
        "print('step      3  validation loss: 2.5'); print('step      4/9  loss 1')"
    )
    paths = tmp_path / "one", tmp_path / "two"
    pair = [
        Step(path.name, "two", ("-c", script, str(path), str(other)), (path,), path)
        for path, other in (paths, paths[::-1])
    ]
    prepare([pair], tmp_path)
    told = capfd.readouterr().out
    assert "      one     step      3  validation loss: 2.5\n" in told
    assert "      two     step      3  validation loss: 2.5\n" in told
    assert "\nstep" not in told  # the rest stays in the log
    assert "loss 1" in (tmp_path / "one.log").read_text()
    prepare([pair], tmp_path)
    assert capfd.readouterr().out.count("is there already") == 2


def options(*flags: str):
    return demo.parse_arguments(["--device", "cpu", *flags])


@pytest.mark.parametrize("corpus", ["stories", "docstrings"])
def test_flags_of_the_trainings_are_ones_it_knows(tmp_path, corpus):
    """The demo's training commands are checked against the training's own parser, without training."""
    from training.config import parse_config

    ratios = set()
    for training in demo.steps(tmp_path, options("--corpus", corpus))[-1]:
        config = parse_config(list(training.arguments[1:]), "demo")
        assert config.max_steps == demo.STEPS[corpus]
        assert training.complete.parent.parent.parent == config.run_folder
        ratios.add(config.hybrid_numerator / config.hybrid_denominator)
    assert ratios == {0, 0.25, 1}


def test_gaps_that_are_shown_are_of_held_out_combinations():
    from preprocessing.story_grammar import is_held_out

    for text, word in zip(demo.GAPS["stories"], ("dance", "keys", "herself", "them"), strict=True):
        assert is_held_out(text.replace("<mask>", word).split(".")[0]), text


@pytest.mark.slow
def test_the_whole_demo_in_few_steps(tmp_path):
    """All commands for real, from text to a page; and a second time, when only the last three run."""
    command = [sys.executable, str(ROOT / "demo.py"), "--output_dir", str(tmp_path / "out"), "--max_steps", "2"]
    first = subprocess.run([*command, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert first.returncode == 0, first.stdout + first.stderr
    page = (tmp_path / "out" / "index.html").read_text()
    for shown in ("Pairs right, scored fused", "before training", "What was held out", "Yesterday Anna"):
        assert shown in page
    assert (tmp_path / "out" / "runs" / "hybrid" / "report.html").is_file()
    assert first.stdout.count("    $ ") == 7 + 7  # what it ran, and what it suggests
    for shown in ("\nbefore training ", "\nhybrid ", "\nmasked ", "\ncausal ", "Of minimal pairs right, in percent"):
        assert shown in first.stdout
    again = subprocess.run([*command, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("is there already") == 6
    assert again.stdout.count("    $ ") == 3 + 7
