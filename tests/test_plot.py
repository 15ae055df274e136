"""report/plot.py: what it reads from complete, growing and damaged files, and that what it draws is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from report import plot
from report.metrics import load_all_metrics, load_metrics, smooth, thin
from report.plot import build_figure

ROOT = Path(__file__).resolve().parent.parent


def write_run(folder: Path, steps: int = 40, causal: bool = True, tokens: bool = True) -> Path:
    """A run folder in the format of the training loop, validated every 10 steps."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        record = {
            "step": step, "train/loss": 8 - step / 10, "train/masked_loss": 8.5 - step / 10,
            "train/masked_accuracy": 0.1, "stats/learning_rate": 1e-2 * step, "stats/grad_norm": 1.5,
            "stats/global_batch_size": 64 // (1 + step // 20), "stats/seq_length": 64 * (1 + step // 20),
            "stats/mask_p": 0.3 - step / 400, "stats/tokens_per_second": 1e4, "data/fingerprint": "5f",
        }  # fmt: skip
        if causal:
            record |= {"train/causal_loss": 7.5 - step / 10, "train/causal_accuracy": 0.2}
        if tokens:
            record["stats/tokens"] = 4096 * step
        lines.append(record)
        if step % 10 == 0:
            valid = {"step": step, "valid/masked_loss": 6.0, "valid/ema_masked_loss": 5.5, "valid/masked_accuracy": 0.3}
            lines.append(valid | ({"stats/tokens": 4096 * step} if tokens else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def panels(runs, x_axis="tokens"):
    """The panels of a figure by their titles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = build_figure(runs, x_axis)
    pyplot.close(figure)
    found = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}
    assert len(found) == 8
    return found


def lines_of(axes, colour, marker):
    """The lines of a colour with a marker, or with marker None those without any."""
    found = [line for line in axes.lines if line.get_color() == colour]
    return [line for line in found if (None if line.get_marker() in ("", "None") else line.get_marker()) == marker]


def test_series_hold_finite_numbers_by_step(tmp_path):
    run = load_metrics(write_run(tmp_path / "one"))
    assert run.name == "one"
    assert run.series["train/masked_loss"][10] == 7.5
    assert run.series["valid/ema_masked_loss"] == {10: 5.5, 20: 5.5, 30: 5.5, 40: 5.5}
    assert "data/fingerprint" not in run.series
    x, y = run.points("valid/masked_loss", "tokens")
    assert x.tolist() == [40960, 81920, 122880, 163840]
    assert y.tolist() == [6.0] * 4
    assert run.points("valid/masked_loss", "step")[0].tolist() == [10, 20, 30, 40]
    assert run.points("train/absent", "tokens")[0].tolist() == []


def test_metrics_leave_out_an_unfinished_last_line_and_count_bad_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "train/loss": 9.0}\n'
        "not json\n"
        '[1, 2]\n{"train/loss": 1.0}\n\n'
        '{"step": 2, "train/loss": NaN, "train/z_loss": null}\n'
        '{"step": 3, "train/loss": Infinity}\n'
        '{"step": 4, "train/loss": 8.0}\n'
        '{"step": 5, "train/lo'
    )
    run = load_metrics(file)
    assert run.series == {"train/loss": {1: 9.0, 4: 8.0}}
    assert run.skipped_lines == 3


def test_metrics_take_the_later_line_of_a_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {s}, "train/loss": {v}}}\n' for s, v in [(1, 9), (3, 7), (2, 5), (3, 4)]))
    run = load_metrics(file)
    assert list(run.series["train/loss"].items()) == [(1, 9.0), (2, 5.0), (3, 4.0)]
    assert run.last("train/loss") == 4.0
    assert run.last("valid/masked_loss") is None


def test_metrics_of_runs_of_the_same_name_are_named_by_path(tmp_path):
    paths = [str(write_run(tmp_path / a / b, steps=2)) for a, b in (("x", "demo"), ("y", "demo"), ("x", "other"))]
    assert [run.name for run in load_all_metrics(paths)] == [paths[0], paths[1], "other"]


def test_smoothing_keeps_constants_and_straight_lines_and_does_not_lag():
    np.testing.assert_allclose(smooth(np.full(30, 3.0), 5), 3.0)
    line = np.arange(30.0)
    np.testing.assert_allclose(smooth(line, 5)[5:-5], line[5:-5])
    np.testing.assert_array_equal(smooth(line, 0), line)
    assert smooth(np.array([2.0]), 4).tolist() == [2.0]
    noisy = np.random.default_rng(0).normal(size=2000)
    assert smooth(noisy, 40).std() < 0.2


def test_thinning_averages_neighbours():
    x, y = thin(np.arange(10.0), np.arange(10.0) ** 2, limit=4)
    assert x.tolist() == [1.0, 4.0, 7.0, 9.0]
    assert y.tolist() == [5 / 3, 50 / 3, 149 / 3, 81.0]
    x, y = thin(np.arange(4.0), np.ones(4), limit=4)
    assert x.tolist() == [0, 1, 2, 3]


def test_objectives_have_their_colours_and_validation_its_marks(tmp_path):
    run = load_metrics(write_run(tmp_path / "one"))
    axes = panels([run])["loss (nats per target)"]
    masked, causal = plot.OBJECTIVE_COLOURS["masked"], plot.OBJECTIVE_COLOURS["causal"]
    assert len(lines_of(axes, masked, None)) == len(lines_of(axes, causal, None)) == 2  # raw and smoothed
    (validation,) = lines_of(axes, masked, "o")
    (averaged,) = lines_of(axes, masked, "D")
    assert validation.get_ydata().tolist() == [6.0] * 4
    assert averaged.get_ydata().tolist() == [5.5] * 4
    assert not lines_of(axes, causal, "o")
    low, high = axes.get_ylim()
    assert low < 3.5
    assert high > 8.3


def test_other_objectives_are_drawn_in_their_own_colour(tmp_path):
    run = load_metrics(write_run(tmp_path / "one"))
    for step in (10, 20):
        run.series.setdefault("valid/span_loss", {})[step] = 5.0
        run.series.setdefault("train/z_loss", {})[step] = 5.0
    colours = plot.objective_colours([run])
    assert list(colours) == ["masked", "causal", "span"]
    assert len(set(colours.values())) == 3
    axes = panels([run])["loss (nats per target)"]
    (line,) = lines_of(axes, colours["span"], "o")
    assert line.get_ydata().tolist() == [5.0, 5.0]
    assert "span" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert "span validation loss 5.000" in plot.result_text(run)


def test_runs_have_their_own_dashes_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "RUN_DASHES", ["solid", "dashed", "dotted"])  # matplotlib tells only these apart by name
    runs = load_all_metrics(
        [str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b", steps=7)), str(write_run(tmp_path / "c", 1))]
    )
    for title, axes in panels(runs).items():
        assert {line.get_linestyle() for line in axes.lines} == {"-", "--", ":"}, title


def test_schedules_are_drawn_as_applied(tmp_path):
    run = load_metrics(write_run(tmp_path / "one"))
    drawn = panels([run])
    (length,) = drawn["row length (tokens)"].lines
    assert length.get_drawstyle() == "steps-pre"
    assert length.get_ydata().tolist() == [64 * (1 + step // 20) for step in range(1, 41)]
    assert [label.get_text() for label in drawn["row length (tokens)"].get_yticklabels()] == ["64", "128", "192"]
    (rate,) = drawn["learning rate"].lines
    np.testing.assert_allclose(rate.get_ydata(), [1e-2 * step for step in range(1, 41)])


def test_mix_is_drawn_against_steps_without_objectives_or_tokens(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "train/loss": 9.0}\n{"step": 2, "train/loss": 8.0}\n')
    drawn = panels([load_metrics(file)], "step")
    assert {line.get_color() for line in drawn["loss (nats per target)"].lines} == {plot.INK}
    for title in ("accuracy", "learning rate", "tokens per second", "mask probability"):
        assert not drawn[title].lines
        assert [text.get_text() for text in drawn[title].texts] == ["not recorded"]
    assert plot.main([str(file), "-o", str(tmp_path / "out.png")]) == 0  # though --x is tokens by default


@pytest.mark.parametrize("steps", [1, 40])
def test_command_writes_a_picture_without_warnings(tmp_path, capsys, steps):
    run = write_run(tmp_path / "run", steps, causal=steps > 1)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/')  # the run goes on while it is drawn
    assert plot.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'metrics.png'}\n"
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "metrics.png"]


def test_names_are_no_mathematics(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("costs_$5_and_$6^", "a$b")]
    for shown in (runs[:1], runs):
        assert plot.main([*map(str, shown), "-o", str(tmp_path / "out.png")]) == 0


def test_diverged_run_is_drawn(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(f'{{"step": {s}, "train/loss": {10.0**s}, "stats/grad_norm": {10.0**s}}}\n' for s in range(1, 9))
    )
    assert plot.main([str(file)]) == 0


def test_refusals_are_one_sentence(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    run = write_run(tmp_path / "run", 2)
    for arguments, sentence in [
        ([str(tmp_path / "none")], "none is no run"),
        ([str(tmp_path)], "is no run"),
        ([str(empty)], "holds no metrics yet"),
        ([str(run), "-o", str(tmp_path / "a.nope")], "a.nope cannot be written"),
        ([str(run), "-o", str(run / "metrics.jsonl" / "a.png")], "metrics.jsonl"),
    ]:
        assert plot.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert sentence in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_matplotlib_is_asked_for_in_one_sentence(tmp_path):
    run = write_run(tmp_path / "run", 2)
    blocked = "import sys; sys.modules['matplotlib'] = None; from report.plot import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", blocked, str(run)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: drawing needs matplotlib, which is not installed: pip install matplotlib\n"


def test_command_runs_from_another_folder(tmp_path):
    write_run(tmp_path / "run", 3)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = [sys.executable, str(ROOT / "report" / "plot.py"), "run", "-o", "out.png"]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out.png\n", "")
    assert (tmp_path / "out.png").exists()
