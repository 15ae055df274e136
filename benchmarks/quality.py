"""Quality of trained models: a table of runs' held-out losses and minimal pairs, and their curves side by side.

    python benchmarks/quality.py RUN [RUN...] [--labels NAME ...] [--plot curves.png] [--output curves.json]

RUN is a run folder. Losses and gradient norms are means over a hundredth of a run, held-out losses those of the
averaged weights. How the committed figures were made: benchmarks/README.md, "Training on 10 M words".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.cli import Parser
from report.plot import STYLE
from training.metric_logger import read_metrics

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555")
_TRAINED = {"masked": "train/masked_loss", "causal": "train/causal_loss", "norm": "stats/grad_norm"}
_MODES = ("masked", "causal", "fused")


def read(folder: Path) -> dict[str, Any]:
    """Curves of a run, each a list of [millions of tokens, value]. Raises FileNotFoundError without metrics."""
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise FileNotFoundError(f"{folder / 'metrics.jsonl'} is missing or empty; RUN must be a run folder")
    steps = [line for line in lines if "train/loss" in line]
    size = max(1, len(steps) // 100)
    curves: dict[str, Any] = {name: [] for name in _TRAINED}
    for begin in range(0, len(steps), size):
        part = steps[begin : begin + size]
        for name, key in _TRAINED.items():
            if values := [line[key] for line in part if key in line]:
                curves[name].append([part[-1]["stats/tokens"] / 1e6, round(sum(values) / len(values), 4)])
    for line in lines:
        for key, value in line.items():
            name = {"valid/ema_masked_loss": "held_out_masked", "valid/ema_causal_loss": "held_out_causal"}.get(key)
            if name is None and key.startswith("eval/") and len(key.split("/")) == 3:
                name = key
            if name is not None:
                curves.setdefault(name, []).append([line["stats/tokens"] / 1e6, round(value, 4)])
    return curves


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Each run's last values."""
    columns = ["held_out_masked", "held_out_causal", *sorted({k for run in runs.values() for k in run if "/" in k})]
    lines = [f"{'':<24}" + "".join(f"{column.removeprefix('eval/'):>22}" for column in columns)]
    for label, run in runs.items():
        values = [f"{run[c][-1][1]:.3f}" if run.get(c) else "" for c in columns]
        lines.append(f"{label:<24}" + "".join(f"{value:>22}" for value in values))
    return "\n".join(lines)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Four panels: loss of training, norm of gradients, held-out losses, minimal pairs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, ((loss, norm), (held_out, pairs)) = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
        for (label, run), colour in zip(runs.items(), _COLOURS, strict=False):
            trained = run["masked"] or run["causal"]
            loss.plot(
                *zip(*trained, strict=True), color=colour, label=label if run["masked"] else f"{label} (causal loss)"
            )
            norm.plot(*zip(*run["norm"], strict=True), color=colour)
            for name, line in (("held_out_masked", "-"), ("held_out_causal", "--")):
                if run.get(name):
                    held_out.plot(*zip(*run[name], strict=True), line, color=colour, marker="o", markersize=3)
            for mode, line in zip(_MODES, ("-", "--", ":"), strict=True):
                for key in (key for key in run if key.startswith(f"eval/{mode}/")):
                    points = [(x, 100 * y) for x, y in run[key]]
                    pairs.plot(*zip(*points, strict=True), line, color=colour, marker="o", markersize=3)
        norm.set_yscale("log")
        loss.set_ylim(top=min(5.0, loss.get_ylim()[1]))
        held_out.set_ylim(top=min(4.5, held_out.get_ylim()[1]))
        loss.legend()
        for mode, line in zip(_MODES, ("-", "--", ":"), strict=True):
            pairs.plot([], [], line, color="#555555", label=mode)
        pairs.legend()
        titles = {
            loss: "training loss, masked rows",
            norm: "norm of gradients",
            held_out: "held-out loss, averaged weights: masked solid, causal dashed",
            pairs: "minimal pairs right, in %, averaged weights",
        }
        for axes, title in titles.items():
            axes.set_title(title, loc="left")
            axes.set_xlabel("million tokens")
        figure.savefig(path, dpi=75)
        pyplot.close(figure)


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names to show (default: the folders')")
    parser.add_argument("--plot", type=Path, help="picture to draw")
    parser.add_argument("--output", type=Path, help="JSON file for the curves")
    options = parser.parse_args()
    labels = options.labels or [run.name for run in options.runs]
    if len(labels) != len(options.runs) or len(options.runs) > len(_COLOURS):
        parser.error(f"{len(options.runs)} RUNs and {len(labels)} --labels; give as many, at most {len(_COLOURS)}")
    try:
        runs = {label: read(run) for label, run in zip(labels, options.runs, strict=True)}
    except FileNotFoundError as problem:
        parser.error(str(problem))
    print(table(runs))
    if options.plot:
        draw(runs, options.plot)
    if options.output:
        options.output.write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
