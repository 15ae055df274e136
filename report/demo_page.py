"""The page of the demo: runs that differ in their objectives alone, compared at a glance.

    python report/demo_page.py runs/hybrid runs/masked runs/causal --pairs pairs/ --before before/ -o index.html

A chart for each mode of scoring minimal pairs and each held-out loss, one table, what the models write and fill in
before and after, and what was held out. Every figure comes from the runs' files, and whether the first run wins is said
as it is. The terminal gets the same in short.
"""

from __future__ import annotations

import html
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import json_objects, write_atomically
from data.cli import Parser, run_command
from data.wording import aligned
from report.charts import Chart, chart_of, is_set, pair_names, rounded_line, run_colour, spoken
from report.metrics import ReportError, objectives
from report.page import body, document_with_charts, figure, page_data, pair_table, swatch, toolbar
from report.runs import Run, pair_keys, pairs_in_files, read_runs
from report.tables import MISSING, escape, sample_list, table

_EXAMPLES = 2  # pairs of each phenomenon that the page shows
_LEVEL = {"pairs": 0.02, "loss": 0.02}  # smaller differences decide nothing: about two standard errors of 450 pairs


@dataclass(frozen=True)
class Measure:
    """One thing that the runs are compared by. kind: "pairs", an accuracy, or "loss". before: of untrained weights."""

    name: str
    kind: str
    values: list[float | None]
    before: float | None = None

    def text(self, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{100 * value:.1f}" if self.kind == "pairs" else f"{value:.3f}"

    def gain(self, of: int, over: int) -> float | None:
        """By how much a run is better than another."""
        one, other = self.values[of], self.values[over]
        if one is None or other is None:
            return None
        return one - other if self.kind == "pairs" else other - one


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 written, 2 with one sentence on stderr where nothing could be)."""
    parser = Parser("Compare runs that differ in their objectives, on one page and in the terminal.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is compared with the others")
    parser.add_argument("--pairs", type=Path, metavar="FOLDER", help="the minimal pairs, to show some of them")
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER",
        help="folder with what evaluation/minimal_pairs.py --output wrote of the untrained weights",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html", help="the page")
    options = parser.parse_args(arguments)

    def write() -> None:
        runs = read_runs(options.runs)
        before = pairs_in_files(options.before) if options.before else {}
        files = sorted(options.pairs.glob("*.jsonl")) if options.pairs else []
        pairs = {path.stem: json_objects(path) for path in files}
        write_atomically(options.output, demo_page(runs, before, pairs).encode(errors="replace"))
        print("\n".join(in_short(runs, measures(runs, before))))

    return run_command(write, ReportError, OSError)


# What is compared


def measures(runs: list[Run], before: dict[tuple[str, str], float]) -> list[Measure]:
    """Accuracies by mode over all sets of minimal pairs, then held-out losses of the averaged weights by objective."""
    modes, names = pair_names(runs)
    found = [
        Measure(f"{mode}{f', {spoken(name)}' if len(list(filter(is_set, names))) > 1 else ''}", "pairs",
                [run.pairs.get((mode, name)) for run in runs], before.get((mode, name)))
        for name in names if is_set(name) for mode in modes
    ]  # fmt: skip
    for objective in objectives(run.metrics for run in runs):
        losses = [run.metrics.last(f"valid/ema_{objective}_loss") for run in runs]
        if any(loss is not None for loss in losses):
            found.append(Measure(f"{objective} loss", "loss", losses))
    return found


def verdict(runs: list[Run], found: Sequence[Measure]) -> list[str]:
    """How far each run is behind at worst, then where the first is ahead, level with the best, or behind."""
    said = [at_worst(runs, found)]
    for kind, what in (("pairs", "minimal pairs right, in percent"), ("loss", "held-out losses")):
        groups: dict[str, list[str]] = {"is ahead in": [], "is level with the best in": [], "is behind in": []}
        for measure in (each for each in found if each.kind == kind):
            gains = {n: gain for n in range(1, len(runs)) if (gain := measure.gain(0, n)) is not None}
            if not gains:
                continue
            rival, worst = min(gains, key=lambda n: gains[n]), max(gains, key=lambda n: gains[n])
            outcome = list(groups)[0 if gains[rival] > _LEVEL[kind] else 2 if gains[rival] < -_LEVEL[kind] else 1]
            shown = [f"{measure.text(measure.values[n])} of {runs[n].name}" for n in dict.fromkeys((rival, worst))]
            own = measure.text(measure.values[0])
            groups[outcome].append(f"{measure.name.removesuffix(' loss')} ({own} against {' and '.join(shown)})")
        parts = [f"{outcome} {', '.join(names)}" for outcome, names in groups.items() if names]
        if parts:
            said.append(f"Of {what}: {runs[0].name} {'; it '.join(parts)}.")
    return list(filter(None, said))


def at_worst(runs: list[Run], found: Sequence[Measure]) -> str:
    """By how much each run is behind the best of all, where it is worst; "" for a run alone."""
    parts = []
    for n, run in enumerate(runs):
        behind = {"pairs": [0.0], "loss": [0.0]}
        for measure in found:
            behind[measure.kind] += [
                -gain for other in range(len(runs)) if (gain := measure.gain(n, other)) is not None
            ]
        shown = [f"{100 * max(behind['pairs']):.1f} points"] if any(m.kind == "pairs" for m in found) else []
        parts.append(f"{run.name} by {' and '.join([*shown, format(max(behind['loss']), '.2f') + ' nats'])}")
    text = "Behind the best of them in the worst case, in minimal pairs and held-out losses: "
    return f"{text}{', '.join(parts)}." if len(runs) > 1 else ""


def in_short(runs: list[Run], found: Sequence[Measure]) -> list[str]:
    """Table, verdict and samples as lines of a terminal."""
    rows = [("before training", [m.text(m.before) for m in found])] if any(m.before is not None for m in found) else []
    rows += [(run.name, [m.text(m.values[n]) for m in found]) for n, run in enumerate(runs)]
    lines = aligned([["", *(m.name for m in found)], *([name, *cells] for name, cells in rows)])
    lines += [""] + [line for text in verdict(runs, found) for line in textwrap.wrap(text, 110)] + [""]
    for step in sample_steps(runs[0]):
        lines.append(f"{runs[0].name}, step {step}:")
        for sample in samples_at(runs[0], step):
            if sample.get("kind") == "causal":
                lines.append(f"  {sample['prompt']} |{sample['text']}")
            else:
                gaps = [
                    ", ".join(f"{word.strip()} {100 * p:.0f} %" for word, p in g["candidates"][:3])
                    for g in sample["gaps"]
                ]
                lines.append("  " + sample["text"].replace("<mask>", "[{}]").format(*gaps))
    return lines


# The page


def demo_page(runs: list[Run], before: dict[tuple[str, str], float], pairs: dict[str, list[dict[str, Any]]]) -> str:
    """The whole page. pairs: those of each file."""
    found, charts = measures(runs, before), mode_charts(runs, before)
    parts = [
        ("learned", "What was learned", compared(runs, found, charts, sum(map(len, pairs.values())))),
        ("samples", "What they write", written(runs)),
        ("phenomena", "By phenomenon", pair_table(runs, *pair_names(runs)) if pairs else ""),
        ("held-out", "What was held out", held_out(pairs)),
    ]
    parts = [part for part in parts if part[2]]
    data = page_data(runs, {"modes": charts}, 0)
    names = ", ".join(f"{swatch(n)}{escape(run.name)}" for n, run in enumerate(runs))
    steps = f"{runs[0].step:,} steps each from the same weights, on the same text" if len(runs) > 1 else ""
    top = (
        "<header><p class='kicker'>make demo</p><h1>Hybrid, masked and causal training</h1>"
        f"<p class='lead'>{names}: {steps}.</p>"
        + "".join(f"<p class='lead'>{html.escape(text)}</p>" for text in verdict(runs, found))
        + "</header>"
    )
    links = [(name, heading) for name, heading, _ in parts]
    return document_with_charts(
        "Demo", top, toolbar(runs, links, data), body(parts, False), data, "report/demo_page.py"
    )


def mode_charts(runs: list[Run], before: dict[tuple[str, str], float]) -> list[Chart]:
    """A chart for each mode of scoring, from the untrained weights on, and for each held-out loss: a line a run."""
    modes, names = pair_names(runs)
    charts: list[Chart] = []
    for name, mode in ((name, mode) for name in filter(is_set, names) for mode in modes):
        start = {0: before[mode, name]} if (mode, name) in before else {}
        keys = [pair_keys(run.metrics).get((mode, name), "") for run in runs]
        series = [start | run.metrics.series.get(key, {}) for run, key in zip(runs, keys, strict=True)]
        lines = [rounded_line(values, n, run_colour(n), mode) for n, values in enumerate(series)]
        options = {"format": "percent", "reference": 0.5, "range": [0.4, 1.0], "small": False}
        charts += chart_of(f"mode_{len(charts)}", f"Pairs right, scored {mode}", lines, **options)
    for objective in objectives(run.metrics for run in runs):
        series = [run.metrics.series.get(f"valid/ema_{objective}_loss", {}) for run in runs]
        lines = [rounded_line(values, n, run_colour(n), objective) for n, values in enumerate(series)]
        title = f"Held-out {objective} loss"
        charts += chart_of(f"mode_{len(charts)}", title, lines, format="loss", small=False)
    return charts


def compared(runs: list[Run], found: Sequence[Measure], charts: list[Chart], pairs: int) -> str:
    """The figure and the table; the best value of each column is marked."""
    drawn = "".join(figure(chart, runs) for chart in charts)
    before = [MISSING if measure.before is None else measure.text(measure.before) for measure in found]
    rows = [["before training", *before]] if set(before) - {MISSING} else []
    for n, run in enumerate(runs):
        cells = []
        for measure in found:
            text = measure.text(measure.values[n])
            gains = [measure.gain(n, other) for other in range(len(runs)) if other != n]
            best = gains and all(gain is not None and gain >= 0 for gain in gains)
            cells.append(f"<b>{text}</b>" if best else text)
        rows.append([f"{swatch(n)}{escape(run.name)}", *cells])
    key = "".join(f"<span>{swatch(n)}{escape(run.name)}</span>" for n, run in enumerate(runs))
    note = "dotted: chance" if pairs else ""
    meaning = (
        f"<p class='muted'>Percent of {pairs:,} minimal pairs whose right sentence is the more probable, by mode of "
        "scoring (masked: each word hidden in turn; causal: from left to right; fused: their mean), then held-out "
        "losses in nats per target. Averaged weights (EMA); less than 2 points apart is noise.</p>"
    )
    head = ["", *(escape(measure.name) for measure in found)]
    return (
        f"<p class='key'>{key}<span class='muted'>{note}</span></p><div class='grid three'>{drawn}</div>"
        f"{table(head, rows, 'numbers compared')}{meaning * bool(pairs)}"
    )


def sample_steps(run: Run) -> list[int]:
    """The first and the last step of which there are samples."""
    found = sorted({sample["step"] for sample in run.samples if isinstance(sample.get("step"), int)})
    return found[:1] + found[-1:] if len(found) > 1 else found


def samples_at(run: Run, step: int) -> list[dict[str, Any]]:
    return [sample for sample in run.samples if sample.get("step") == step]


def written(runs: list[Run]) -> str:
    """Samples of the first run after and before training, those of the others folded."""
    parts = []
    for n, run in enumerate(runs):
        for place, step in enumerate(reversed(sample_steps(run))):
            shown = sample_list(samples_at(run, step))
            name = f"{swatch(n)}{escape(run.name)}, {'before' if place else 'after'} training (step {step:,})"
            parts.append(
                f"<h3>{name}</h3>{shown}" if n == 0 else f"<details><summary>{name}</summary>{shown}</details>"
            )
    return "".join(parts)


def held_out(pairs: dict[str, list[dict[str, Any]]]) -> str:
    """What no story has, and some pairs of each phenomenon."""
    rows = []
    for name, found in pairs.items():
        for pair in found[:: max(1, len(found) // _EXAMPLES)][:_EXAMPLES]:
            good, bad = str(pair.get("sentence_good", "")), str(pair.get("sentence_bad", ""))
            rows.append([escape(spoken(name)), escape(good), escape(bad), escape(pair.get("held_out", ""))])
    text = (
        "<p class='muted'>No sentence of the stories is made of the content words in the last column, in any form and "
        "order; of a text of two sentences that is so for the first.</p>"
    )
    return text + table(["Phenomenon", "Right", "Wrong", "Words that no sentence had"], rows) if rows else ""


if __name__ == "__main__":
    sys.exit(main())
