"""Plot of minimal pairs: accuracy by phenomenon and mode with 95 % intervals, one panel per set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.generation import UsageError
from evaluation.pair_accuracy import PHENOMENON
from report.plot import INK, OBJECTIVE_COLOURS, PALE, STYLE, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {**OBJECTIVE_COLOURS, "fused": "#009E73"}
_MARKS = {"masked": "o", "causal": "s", "fused": "D"}
_ENDINGS = (".png", ".pdf", ".svg")


def check_plot(path: str) -> None:
    """Refuse a picture that could not be drawn in the end. Raises UsageError."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if Path(path).suffix not in _ENDINGS:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}.")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the results of `minimal_pairs.evaluate` into `path`; it is whole or absent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {name: _rows(found) for name, found in results["sets"].items()}
    heights = [max(2, len(rows)) for rows in panels.values()]
    with pyplot.rc_context(STYLE):
        size = (9.5, 1.6 + 0.42 * sum(heights) + 0.6 * len(heights))
        figure, axes = pyplot.subplots(
            len(panels), 1, figsize=size, squeeze=False, layout="constrained", height_ratios=heights, sharex=True
        )
        for panel, (name, rows) in zip(axes[:, 0], panels.items(), strict=True):
            _draw_set(panel, name, rows, results["sets"][name])
        axes[-1, 0].set_xlabel("accuracy in %, with 95 % intervals")
        axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
        save_picture(figure, path)


def _rows(found: dict[str, Any]) -> list[tuple[str, dict[str, dict[str, float]]]]:
    """Labels with each mode's accuracy: the mean of files, then phenomena, or files where a set names no phenomena."""
    modes = found["modes"]
    first = next(iter(modes.values()))
    field = PHENOMENON if PHENOMENON in first["groups"] else None
    parts = {mode: entry["groups"][field] if field else entry["paradigms"] for mode, entry in modes.items()}
    names = sorted(next(iter(parts.values())))
    rows = [("mean of files", {mode: entry["mean"] for mode, entry in modes.items()})]
    return rows + [(name.replace("_", " "), {mode: part[name] for mode, part in parts.items()}) for name in names]


def _draw_set(
    axes: Axes, name: str, rows: list[tuple[str, dict[str, dict[str, float]]]], found: dict[str, Any]
) -> None:
    modes = list(found["modes"])
    for number, mode in enumerate(modes):
        shift = 0.22 * (number - (len(modes) - 1) / 2)
        cells = [by_mode[mode] for _, by_mode in rows]
        x = [100 * cell["accuracy"] for cell in cells]
        reach = [
            [100 * (cell["accuracy"] - cell["low"]) for cell in cells],
            [100 * (cell["high"] - cell["accuracy"]) for cell in cells],
        ]
        temperature = found["modes"][mode]["temperature"]
        label = mode if temperature == 1 else f"{mode}, T={temperature:g}"
        y = [row + shift for row in range(len(rows))]
        style = {"fmt": _MARKS[mode], "color": _COLOURS[mode], "ms": 5, "elinewidth": 1.3, "label": label}
        axes.errorbar(x, y, xerr=reach, **style)
    axes.axvline(50, color=PALE, lw=1, ls=(0, (3, 2)))
    axes.axhline(0.5, color=INK, lw=0.6)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(f"{name} ({found['pairs']:,} pairs)", loc="left")
