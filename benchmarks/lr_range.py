"""Learning rate range test (Smith 2015, arXiv 1506.01186, section 3.3) of any recipe: a rate that rises until it fails.

    python benchmarks/lr_range.py --output lr_range [--low 1e-5 --high 1 --steps 400] FLAGS OF train_single_gpu.py ...

One short run whose rate rises exponentially from --low to --high, with the flags' own model, batch and optimizer (the
batch of the run's end, rows of its first length). lr_range.json in OUTPUT has the losses by rate, lr_range.png their
curve. Three rates are marked on the smoothed loss: where it falls fastest by decade, where it is lowest, and from where
a tenth of what it had gained is lost. A peak rate for training is sought between the first two: a short test cannot see
what a whole run, its warm-up and its decay make of a rate, so try two or three of them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import train_single_gpu
from benchmarks.timing import environment
from data.cli import Parser
from report.plot import INK, RUN_COLOURS, STYLE
from training.config import FIELDS
from training.errors import DONE, NOT_FINITE
from training.metric_logger import read_metrics

_FEWEST = 20  # steps of which a curve can be read
# What a recipe may say of the course of a whole run and what beside a run takes time; back to the defaults, or none.
_PLAIN = ("warmup_proportion", "cooldown_proportion", "decay_proportion", "decay_shape")
_ALONE = {
    "batch_reduction": 1, "length_milestones": "", "valid_path": "", "validate_every": 0, "save_every": 0,
    "evaluate_data": "", "evaluate_every": 0, "wandb_mode": "disabled", "resume": "never", "name": "run",
}  # fmt: skip


def smoothed(values: list[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    found, average = [], 0.0
    for number, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        found.append(average / (1 - decay**number))
    return found


def marks(rates: list[float], losses: list[float]) -> dict[str, float | None]:
    """Rates at which the smoothed loss falls fastest by decade (up to its minimum) and is lowest, and the first one
    behind that where a tenth of what was gained is lost; None where it is not."""
    curve = smoothed(losses)
    lowest = min(range(len(curve)), key=curve.__getitem__)
    width = max(1, len(curve) // 50)
    inner = range(width, max(width + 1, min(lowest, len(curve) - width)))
    slopes = {
        i: (curve[i + width] - curve[i - width]) / math.log(rates[i + width] / rates[i - width])
        for i in inner
        if i + width < len(curve)
    }
    steepest = min(slopes, key=slopes.__getitem__, default=lowest)
    lost = curve[lowest] + 0.1 * (curve[0] - curve[lowest])
    rises = next((rates[i] for i in range(lowest, len(curve)) if curve[i] > lost), None)
    return {"steepest": rates[steepest], "lowest": rates[lowest], "rises": rises}


def measure(folder: Path, flags: list[str], low: float, high: float, steps: int) -> tuple[list[float], list[float]]:
    """Rates and losses of a run in `folder`, up to one that is not finite. Raises SystemExit where it fails."""
    forced = {**_ALONE, **{name: FIELDS[name].default for name in _PLAIN}, "output_dir": folder}
    forced |= {"learning_rate": high, "max_steps": steps, "schedule": f"0:{low / high!r} exponential, 100%:1"}
    shutil.rmtree(folder / "run", ignore_errors=True)
    code = train_single_gpu.main([*flags, *(f"--{name}={value}" for name, value in forced.items())])
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "train/loss" in line]
    lines = [line for line in lines if math.isfinite(line["train/loss"])]
    if code not in (DONE, NOT_FINITE.code) or len(lines) < _FEWEST:
        raise SystemExit(f"error: the run ended after {len(lines)} steps, too few for a curve (its words stand above)")
    return [line["stats/learning_rate"] for line in lines], [line["train/loss"] for line in lines]


def draw(rates: list[float], losses: list[float], found: dict[str, float | None], path: Path) -> None:
    """The curve, its smoothed form and the marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(rates, losses, color="#BBBBBB", linewidth=0.8, label="loss")
        axes.plot(rates, smoothed(losses), color=INK, label="smoothed")
        for (name, rate), colour in zip(found.items(), RUN_COLOURS[1:], strict=False):
            if rate is not None:
                axes.axvline(rate, color=colour, linestyle="--", label=f"{name}: {rate:.2g}")
        axes.set_xscale("log")
        axes.set_ylim(min(losses) - 0.1, max(losses[0], *smoothed(losses)[: len(losses) // 2]) + 0.3)
        axes.set_xlabel("learning rate")
        axes.legend()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(__doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="folder for results and the run")
    parser.add_argument("--low", type=float, default=1e-5, metavar="RATE", help="where the rate begins")
    parser.add_argument("--high", type=float, default=1.0, metavar="RATE", help="where it ends (default: 1)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="steps of the run")
    options, flags = parser.parse_known_args(arguments)
    if not 0 < options.low < options.high:
        parser.error(f"--low is {options.low:g} and --high {options.high:g}; give rates above 0, the lower one first")
    if options.steps < _FEWEST:
        parser.error(f"--steps is {options.steps}; of fewer than {_FEWEST} no curve can be read")
    options.output.mkdir(parents=True, exist_ok=True)
    rates, losses = measure(options.output, flags, options.low, options.high, options.steps)
    found = marks(rates, losses)
    path = options.output / "lr_range.json"
    about = {"flags": flags, "low": options.low, "high": options.high, "steps": options.steps}
    results = {"environment": environment(), "settings": about, "found": found, "rates": rates, "losses": losses}
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(rates, losses, found, path.with_suffix(".png"))
    for name, rate in found.items():
        print(f"{name:<10}{'not reached' if rate is None else f'{rate:.3g}'}")
    print(f"{path} and {path.with_suffix('.png').name}: {len(rates)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
