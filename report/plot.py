"""One or several runs as one PNG: losses, accuracy, schedules, throughput and gradient norm against tokens.

    python report/plot.py RUN... [-o FILE.png] [--x tokens|step]

RUN is a run folder or a metrics.jsonl file. A run that is still training can be drawn at any time: a last line that is
only half written is left out. The colour tells the objective, the line style tells the run.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.cli import Parser, run_command
from report.metrics import Metrics, ReportError, default_output, load_all_metrics, objectives, short_number, thin, trend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays distinct under every common colour blindness.
OBJECTIVE_COLOURS = {"masked": "#0072B2", "causal": "#D55E00"}
_OTHER_COLOURS = ["#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # of other objectives; after the last they start again
INK, PALE, GRID = "#222222", "#767676", "#E4E4E4"
# A run is known by its dashes everywhere, and by this colour too where a panel has no objectives. After the last they
# start again.
RUN_DASHES = ["solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (9, 2)), (0, (3, 1.2, 1, 1.2, 1, 1.2))]
RUN_COLOURS = [INK, "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7A7A7A"]
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.edgecolor": "#9A9A9A",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
_LOSS_PREFIXES = {"training": "train/", "validation": "valid/", "EMA": "valid/ema_"}


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 drawn, 2 with one sentence on stderr where nothing could be drawn)."""
    parser = Parser(
        prog="report/plot.py",
        description="Draw losses, accuracy, schedules, speed and gradient norm of one or several runs into one PNG.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder or a metrics.jsonl file; several are overlaid"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.png",
        help="where to write the picture (default: RUN/metrics.png for one run, metrics.png here for several)",
    )  # fmt: skip
    parser.add_argument(
        "--x", choices=("tokens", "step"), default="tokens",
        help="horizontal axis: tokens trained on, or step (default: tokens)",
    )  # fmt: skip
    options = parser.parse_args(arguments)

    def write() -> None:
        runs = load_all_metrics(options.runs)
        for gap in (gap for run in runs for gap in run.gaps):
            print(gap, file=sys.stderr)
        output = default_output(options.output, options.runs, "metrics.png")
        draw(runs, output, options.x)
        print(output)

    return run_command(write, ReportError, OSError)


def draw(runs: list[Metrics], output: Path, x_axis: str = "tokens") -> None:
    """Draw the runs, overlaid, into `output`, which is whole or absent. `x_axis` is "tokens" or "step"; where a run did
    not count tokens, it is "step" for all. Raises ReportError: no matplotlib, or one that cannot write that ending."""
    try:
        import matplotlib
    except ImportError:
        raise ReportError("drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not all("stats/tokens" in run.series for run in runs):
        x_axis = "step"  # the one axis that all of them have
    with pyplot.rc_context(STYLE):
        save_picture(build_figure(runs, x_axis), output)


def save_picture(figure: Figure, output: Path) -> None:
    """Save and close a figure; the file is whole or absent. Raises ReportError for an ending of no format."""
    from matplotlib import pyplot

    temporary = output.with_name(f".{output.stem}.{os.getpid()}{output.suffix or '.png'}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=120)
        os.replace(temporary, output)
    except ValueError as error:
        raise ReportError(f"{output} cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
        pyplot.close(figure)


def build_figure(runs: list[Metrics], x_axis: str) -> Figure:
    """All panels: the losses large at the left, accuracy and speed beside them, the schedules below."""
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    figure = pyplot.figure(figsize=(15, 9.6), layout=ConstrainedLayoutEngine(w_pad=0.11, h_pad=0.07))
    grid = figure.add_gridspec(4, 4, height_ratios=[0.13, 1, 1, 0.8])
    draw_header(figure.add_subplot(grid[0, :]), runs)
    panels = {
        "loss": figure.add_subplot(grid[1:3, :2]),
        "accuracy": figure.add_subplot(grid[1, 2:]),
        "speed": figure.add_subplot(grid[2, 2]),
        "gradient": figure.add_subplot(grid[2, 3]),
        "rate": figure.add_subplot(grid[3, 0]),
        "length": figure.add_subplot(grid[3, 1]),
        "rows": figure.add_subplot(grid[3, 2]),
        "mask": figure.add_subplot(grid[3, 3]),
    }
    draw_objectives(panels["loss"], runs, x_axis, "loss", "loss (nats per target)")
    add_perplexity_axis(panels["loss"])
    add_key(panels["loss"], runs)
    draw_objectives(panels["accuracy"], runs, x_axis, "accuracy", "accuracy")
    panels["accuracy"].yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    rates = list(runs[0].series.get("stats/mfu", {}).values()) if len(runs) == 1 else []
    mfu = f" (MFU {100 * float(np.median(rates)):.0f} %)" if rates else ""
    for name, key, title, kind in (
        ("speed", "stats/tokens_per_second", f"tokens per second{mfu}", "noisy"),
        ("gradient", "stats/grad_norm", "gradient norm, before clipping", "noisy"),
        ("rate", "stats/learning_rate", "learning rate", "line"),
        ("length", "stats/seq_length", "row length (tokens)", "stepped"),
        ("rows", "stats/global_batch_size", "rows per step", "stepped"),
        ("mask", "stats/mask_p", "mask probability", "line"),
    ):
        draw_series(panels[name], runs, x_axis, key, title, kind)
    for name, axes in panels.items():
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        axes.xaxis.set_major_locator(MaxNLocator(7 if name in ("loss", "accuracy") else 4))
        axes.margins(x=0.015)
        if name in ("loss", "rate", "length", "rows", "mask"):
            axes.set_xlabel("tokens trained on" if x_axis == "tokens" else "step", color=PALE)
    return figure


def draw_header(axes: Axes, runs: list[Metrics]) -> None:
    """The title, and a line of results of the one run or a key of the several."""
    from matplotlib.lines import Line2D

    axes.set_axis_off()
    title = as_text(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    axes.text(0, 1.05, title, fontsize=16, fontweight="bold", transform=axes.transAxes, va="top")
    if len(runs) == 1:
        axes.text(0, 0.1, result_text(runs[0]), color=PALE, transform=axes.transAxes, va="top")
    else:
        handles = [Line2D([], [], color=c, linestyle=d, label=as_text(r.name)) for r, d, c in with_styles(runs)]
        columns = min(len(runs), 4)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.35), ncols=columns, handlelength=3.2)


def as_text(name: str) -> str:
    """A name that matplotlib takes as it is: between dollar signs it would read mathematics."""
    return name.replace("$", r"\$")


def add_key(axes: Axes, runs: list[Metrics]) -> None:
    """A legend of colours and marks in the upper right of the loss panel, which a falling loss leaves free."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=colour, lw=4, label=name) for name, colour in objective_colours(runs).items()]
    marks += [
        Line2D([], [], color=PALE, lw=1.8, label="training (smoothed)"),
        Line2D([], [], color=PALE, lw=0.8, marker="o", ms=5, label="validation"),
        Line2D([], [], color=PALE, lw=0.8, marker="D", ms=5, mfc="white", label="validation, EMA weights"),
    ]
    axes.legend(handles=marks, loc="upper right", handlelength=2.4, frameon=True, framealpha=0.8, edgecolor="none")


def result_text(run: Metrics) -> str:
    """One line on where the run stands: steps, tokens and the last loss per objective, on validation if it ran."""
    steps = max(max(values) for values in run.series.values())
    parts = [f"{steps:,} step{'' if steps == 1 else 's'}"]
    if tokens := run.series.get("stats/tokens"):
        parts.append(f"{short_number(max(tokens.values()))} tokens")
    for objective in objectives([run]):
        last = {kind: run.last(f"{prefix}{objective}_loss") for kind, prefix in _LOSS_PREFIXES.items()}
        if last["validation"] is not None:
            ema = f" (EMA {last['EMA']:.3f})" if last["EMA"] is not None else ""
            parts.append(f"{objective} validation loss {last['validation']:.3f}{ema}")
        elif last["training"] is not None:
            parts.append(f"{objective} training loss {last['training']:.3f}")
    return "   ·   ".join(parts)


def objective_colours(runs: list[Metrics]) -> dict[str, str]:
    """The colour of each objective that any run has; those of masked and causal are always the same."""
    others = itertools.cycle(_OTHER_COLOURS)
    return {name: OBJECTIVE_COLOURS.get(name) or next(others) for name in objectives(runs)}


def with_styles(runs: list[Metrics]) -> list[tuple[Metrics, Any, str]]:
    """Give each run its dashes and its colour for panels without objectives."""
    return [(run, RUN_DASHES[n % len(RUN_DASHES)], RUN_COLOURS[n % len(RUN_COLOURS)]) for n, run in enumerate(runs)]


def draw_objectives(axes: Axes, runs: list[Metrics], x_axis: str, measure: str, title: str) -> None:
    """Draw "train/", "valid/" and "valid/ema_" series of a measure, one colour per objective. A run without a loss per
    objective shows the loss of its mix in black."""
    axes.set_title(title, loc="left")
    drawn: list[np.ndarray] = []
    colours = objective_colours(runs)
    for run, dashes, _ in with_styles(runs):
        found = False
        for objective, colour in colours.items():
            found |= draw_training(axes, run, x_axis, f"train/{objective}_{measure}", colour, dashes, len(runs), drawn)
            for prefix, face, mark in (("valid/", colour, "o"), ("valid/ema_", "white", "D")):
                x, y = run.points(f"{prefix}{objective}_{measure}", x_axis)
                if len(x):
                    axes.plot(x, y, color=colour, linestyle=dashes, lw=0.8, marker=mark, ms=4.5, mfc=face, mew=1.1)
                    drawn.append(y)
                    found = True
        if not found:
            draw_training(axes, run, x_axis, f"train/{measure}", INK, dashes, len(runs), drawn)
    if not drawn:
        return note_absence(axes)
    values = np.concatenate(drawn)
    margin = 0.04 * (values.max() - values.min()) or 0.05 * abs(values.max()) or 0.05
    axes.set_ylim(values.min() - margin, values.max() + margin)  # the raw line may leave the panel; the story is inside


def draw_training(
    axes: Axes, run: Metrics, x_axis: str, key: str, colour: str, dashes: Any, num_runs: int, drawn: list[np.ndarray]
) -> bool:
    """Draw one training series smoothed, and raw too for up to two runs; append what the panel must show to `drawn`."""
    x, y = run.points(key, x_axis)
    if not len(x):
        return False
    if num_runs <= 2:
        axes.plot(*thin(x, y), color=colour, lw=0.7, alpha=0.22)
    x, smoothed = trend(x, y)
    axes.plot(x, smoothed, color=colour, linestyle=dashes, lw=1.8, marker="o" if len(x) == 1 else "", ms=4)
    drawn.append(smoothed)
    return True


def draw_series(axes: Axes, runs: list[Metrics], x_axis: str, key: str, title: str, kind: str) -> None:
    """Draw a series of every run, from zero up. kind: "noisy", raw and smoothed, on a logarithmic axis where it spans
    more than a factor of 30; or a schedule exactly as it was applied, "line" or, where it jumps, "stepped"."""
    axes.set_title(title, loc="left")
    drawn: list[np.ndarray] = []
    for run, dashes, colour in with_styles(runs):
        x, y = run.points(key, x_axis)
        if kind == "noisy":
            draw_training(axes, run, x_axis, key, colour, dashes, len(runs), drawn)
        elif len(x):
            style, mark = "steps-pre" if kind == "stepped" else "default", "o" if len(x) == 1 else ""
            axes.plot(x, y, color=colour, linestyle=dashes, lw=1.6, drawstyle=style, marker=mark, ms=4)
            drawn.append(y)
    if not drawn:
        return note_absence(axes)
    values = np.concatenate(drawn)
    if kind == "noisy" and values.min() > 0 and values.max() > 30 * values.min():
        return axes.set_yscale("log")
    axes.set_ylim(0, 1.12 * values.max() or 1.0)
    levels = np.unique(values)
    if kind == "line":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    elif kind == "stepped" and len(levels) <= 5:
        axes.set_yticks(levels, [f"{value:g}" for value in levels])
    else:
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))


def note_absence(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not recorded", color=PALE, ha="center", va="center", transform=axes.transAxes)
    axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    axes.grid(False)


def add_perplexity_axis(axes: Axes) -> None:
    """Mark perplexity, exp(loss), at the right of the loss panel, where the losses are those of a working run."""
    low, high = axes.get_ylim()
    if not axes.lines or high > 50:
        return
    ticks = [m * 10.0**e for e in range(-2, 22) for m in (1, 2, 5) if low <= math.log(m * 10.0**e) <= high]
    ticks = ticks[:: 1 + len(ticks) // 14]
    functions = (lambda loss: np.exp(np.minimum(loss, 700)), lambda perplexity: np.log(np.maximum(perplexity, 1e-300)))
    second = axes.secondary_yaxis("right", functions=functions)
    second.set_yticks(ticks, [short_number(tick) for tick in ticks])
    second.set_ylabel("perplexity", color=PALE)
    second.spines["right"].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
