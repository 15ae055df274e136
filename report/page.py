"""A report as one HTML page: everything inline, nothing fetched, forbidden to fetch by its own content policy."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from data.wording import time_text
from report.charts import (
    Chart,
    axes_of,
    chance,
    further_averages,
    hue_of,
    is_set,
    pair_names,
    run_colour,
    sections,
    spoken,
)
from report.metrics import objectives, short_number
from report.runs import Run
from report.tables import MISSING, configuration, environment, evaluations, interval, ledgers, restarts, samples, table

_ASSETS = Path(__file__).resolve().parent / "assets"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E%3Crect width='32' height='32' "
    "rx='7' fill='%230067b1'/%3E%3Cpath d='M6 8c4 12 10 16 20 16' fill='none' stroke='white' stroke-width='3.4' "
    "stroke-linecap='round'/%3E%3C/svg%3E"
)
_MOST_COLUMNS = 6  # of figures side by side
_OPEN_CHARTS = 24  # of minimal pairs by phenomenon; more of them start folded
_BARS = 4  # columns of scores beside which there is room for a bar each
_STATES = ("running", "finished", "stopped", "requeued", "failed")


def page(runs: list[Run], refresh: float = 0.0) -> str:
    """The whole page. refresh: seconds after which an open page loads itself anew, 0 for never."""
    charts = sections(runs)
    parts = contents(runs, charts)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = page_data(runs, charts, refresh)
    bar = toolbar(runs, [(name, heading) for name, heading, _ in parts], data)
    return document_with_charts(title, header(runs, title), bar, body(parts, side_by_side=len(runs) == 1), data)


def document_with_charts(
    title: str, top: str, bar: str, shown: str, data: dict[str, Any], by: str = "report/html_report.py"
) -> str:
    """A page whose script draws `data`. top, bar, shown: HTML of its header, toolbar and sections."""
    inside = f"""{top}
{bar}
<main>
<noscript><p class="note">The charts of this page need JavaScript; tables and figures do not.</p></noscript>
{shown}
</main>"""
    # No text in it can end the script element that holds it.
    inline = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = f"""<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{inline}</script>
<script>
{(_ASSETS / "page.js").read_text(encoding="utf-8")}</script>"""
    return document(title, inside, script, " Drag over a chart to look closer at a part, double-click to go back.", by)


def document(title: str, inside: str, script: str = "", hint: str = "", by: str = "report/html_report.py") -> str:
    """A page with everything inline. inside: HTML of header and main; hint: a sentence at the foot; by: its maker."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="{_ICON}">
<style>
{(_ASSETS / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{inside}
<footer>Written {datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")} UTC by
<code>{by}</code>.{hint}</footer>
{script}
</body>
</html>
"""


def contents(runs: list[Run], charts: dict[str, list[Chart]]) -> list[tuple[str, str, str]]:
    """Id, heading and HTML of every section that is not empty."""
    parts = [
        ("loss", "Loss", chart_section(charts["loss"], runs, _loss_key(runs))),
        ("accuracy", "Accuracy", chart_section(charts["accuracy"], runs)),
        ("pairs", "Zero-shot", pair_section(charts["pairs"], runs)),
        ("evaluations", "Fine-tuning and texts", guarded(evaluations, runs)),
        ("samples", "Samples", guarded(samples, runs)),
        ("schedules", "Schedules", chart_section(charts["schedules"], runs)),
        ("speed", "Speed and memory", chart_section(charts["speed"], runs)),
        ("stability", "Stability", chart_section(charts["stability"], runs)),
        ("data-used", "Data used", guarded(ledgers, runs)),
        ("restarts", "Restarts", guarded(restarts, runs)),
        ("configuration", "Configuration", guarded(configuration, runs)),
        ("environment", "Environment", guarded(environment, runs)),
    ]
    return [part for part in parts if part[2]]


def body(parts: list[tuple[str, str, str]], side_by_side: bool) -> str:
    """The sections one below the other; side_by_side: configuration and environment share a row."""
    drawn = [
        f'<section id="{name}"><h2>{html.escape(heading)}</h2>\n{content}</section>' for name, heading, content in parts
    ]
    if side_by_side and [name for name, _, _ in parts[-2:]] == ["configuration", "environment"]:
        drawn[-2:] = [f'<div class="beside">{drawn[-2]}{drawn[-1]}</div>']
    return "\n".join(drawn)


def page_data(runs: list[Run], charts: dict[str, list[Chart]], refresh: float) -> dict[str, Any]:
    """What the page's script draws, for JSON."""
    return {
        "refresh": refresh,
        "runs": [
            {
                "name": run.name,
                "colour": run_colour(number),
                "axes": axes_of(run),
                "restarts": sorted({start.step for start in run.starts if start.step > 0}),
            }
            for number, run in enumerate(runs)
        ],
        "charts": [chart for group in charts.values() for chart in group],
    }


def guarded(make: Callable[..., str], *arguments: Any) -> str:
    """A part of the page from what a run's files hold; a note where they hold what it cannot show."""
    try:
        return make(*arguments)
    except Exception as error:  # files of other versions, edited or damaged: the other parts are still worth seeing
        reason = html.escape(f"{type(error).__name__}: {error}"[:200])
        return f'<p class="note">The run\'s files hold something that cannot be shown here ({reason}).</p>'


# Header


def header(runs: list[Run], title: str) -> str:
    """Title, state, and the figures of the one run or a table of those of the several."""
    if len(runs) == 1:
        run = runs[0]
        parts = [f"<header><p class='kicker'>Training report</p><h1>{html.escape(title)}{chip(run)}</h1>"]
        if line := guarded(model_line, run):
            parts.append(line)
        found = figures(run)
        columns = len(found) if len(found) <= _MOST_COLUMNS else -(-len(found) // 2)
        cells = "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}"
            + (f"<small>{html.escape(remark)}</small>" if remark else "")
            + "</dd></div>"
            for name, (value, remark) in found.items()
        )
        parts.append(f"{progress(run)}<dl class='figures' style='--columns:{columns}'>{cells}</dl></header>")
        return "\n".join(parts)
    return f"<header><p class='kicker'>Training report</p><h1>{html.escape(title)}</h1>{comparison(runs)}</header>"


def swatch(number: int) -> str:
    """The mark of a run's colour."""
    return f'<i class="swatch" style="background:var(--{run_colour(number)})"></i>'


def chip(run: Run) -> str:
    """The run's state as a small label."""
    state = "requeued" if run.state == "requeue_wanted" else run.state
    return f'<span class="chip {state}">{state}</span>' if state in _STATES else ""


def model_line(run: Run) -> str:
    """Model, ratio of the objectives and device in one line; "" where nothing is known."""
    model, flags = run.config.get("model", {}), run.config.get("flags", {})
    parts = []
    if model:
        parts.append(
            f"{model.get('model_type', 'model')} {model.get('hidden_size')} × {model.get('num_hidden_layers')} layers"
        )
    if flags.get("hybrid_schedule"):
        parts.append(f"rows masked by the schedule {flags['hybrid_schedule']}")
    elif "hybrid_numerator" in flags:
        parts.append(f"{flags['hybrid_numerator']}/{flags['hybrid_denominator']} of rows masked")
    if "optimizer" in flags:
        parts.append(f"{flags['optimizer'].upper()}, peak learning rate {flags['learning_rate']:g}")
    if run.starts and run.starts[-1].device:
        parts.append(run.starts[-1].device)
    return f'<p class="lead">{html.escape("  ·  ".join(parts))}</p>' if parts else ""


def progress(run: Run) -> str:
    """How far a run is that is not finished, with the time that is left where it runs."""
    total = run.max_steps
    if not total or run.step >= total:
        return ""
    done = run.step / total
    text = f"step {run.step:,} of {total:,}"
    if run.state == "running" and run.hours and done > 0:
        text += f", about {time_text(3600 * max(run.hours.values()) * (1 - done) / done)} to go"
    return (
        f'<p class="progress"><progress max="1" value="{done:.4f}">{done:.0%}</progress>'
        f"<span>{100 * done:.0f} % – {html.escape(text)}</span></p>"
    )


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """The figures that sum up a run, by name the value as text and a remark; those that it did not log are left out."""
    metrics, total = run.metrics, run.max_steps
    found = {"Steps": (f"{run.step:,}", f"of {total:,}" if total and total != run.step else "")}
    if run.tokens is not None:
        corpus = run.config.get("data", {}).get("tokens")
        epochs = f"{run.tokens / corpus:.2g} × the corpus" if isinstance(corpus, int) and corpus > 0 else ""
        found["Tokens"] = (short_number(run.tokens), epochs)
    for objective in objectives([metrics]):
        for prefix, what in (("valid/", "validation loss"), ("train/", "training loss")):
            loss = metrics.last(f"{prefix}{objective}_loss")
            if loss is not None:
                ema = metrics.last(f"{prefix}ema_{objective}_loss")
                remark = f"EMA {ema:.3f}" if ema is not None else ""
                found[f"{objective.capitalize()} {what}"] = (f"{loss:.3f}", remark)
                break
    found |= {f"Minimal pairs, {mode}": (f"{100 * accuracy:.1f} %", "") for mode, accuracy in overall(run).items()}
    if rates := metrics.series.get("stats/tokens_per_second"):
        mfu = metrics.series.get("stats/mfu")
        remark = f"tokens/s, MFU {100 * float(np.median(list(mfu.values()))):.0f} %" if mfu else "tokens/s"
        found["Speed"] = (short_number(float(np.median(list(rates.values())))), remark)
    if run.hours:
        remark = f"{100 * min(1.0, run.useful):.1f} % of all time" if run.useful is not None else ""
        found["Training time"] = (time_text(3600 * max(run.hours.values())), remark)
    if memory := metrics.series.get("stats/peak_memory_gib"):
        found["Peak memory"] = (f"{max(memory.values()):.1f} GiB", "a device")
    slowest, median = (metrics.last(f"ranks/{name}") for name in ("slowest", "compute_seconds_median"))
    if slowest is not None and median:
        more = (metrics.last("ranks/compute_seconds_max") or median) / median - 1
        found["Slowest rank"] = (f"{slowest:.0f}", f"computes {100 * more:.1f} % longer than the median")
    return found


def overall(run: Run) -> dict[str, float]:
    """The minimal-pair score of each mode, the mean over sets of pairs (and of other choices between two)."""
    found = {}
    for mode in pair_names([run])[0]:
        scores = {name: accuracy for (m, name), accuracy in run.pairs.items() if m == mode and chance(name) == 0.5}
        sets = {name: accuracy for name, accuracy in scores.items() if is_set(name)} or scores
        if sets:
            found[mode] = float(np.mean(list(sets.values())))
    return found


def comparison(runs: list[Run]) -> str:
    """A table of the figures of several runs, one a column, the best of each row marked."""
    by_run = [figures(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for found in by_run for name in found):
        cells = [html.escape(name)]
        values = [found[name][0] for found in by_run if name in found]
        for found in by_run:
            if name not in found:
                cells.append(MISSING)
                continue
            value, remark = map(html.escape, found[name])
            best = same_data(name, runs) and _is_best(name, found[name][0], values)
            strong = f"<b>{value}</b>" if best else value
            cells.append(f"{strong}<small>{remark}</small>" if remark else strong)
        rows.append(cells)
    head = [f"{swatch(number)}{html.escape(r.name)}{chip(r)}" for number, r in enumerate(runs)]
    names = [row[0] for row in rows if "loss" in row[0] and not same_data(row[0], runs)]
    note = (
        f"<p class='note'>The runs are not known to use the same data for {', '.join(names)}: "
        "none is marked as the best.</p>"
    )
    return table(["", *head], rows, "numbers compared") + (note if names else "")


def same_data(name: str, runs: list[Run]) -> bool:
    """Whether runs measured figure `name`, if it is a loss, on the same tokens, by the fingerprints in config.json."""
    if "loss" not in name:
        return True
    data = [run.config.get("data", {}) for run in runs]
    trained = [of.get("identity") for of in data]
    held_out = [of.get("held_out_identity") for of in data]
    known = held_out if "validation" in name and any(held_out) else trained  # old runs know the first alone
    return bool(known[0]) and all(each == known[0] for each in known)


def _is_best(name: str, value: str, values: Sequence[str]) -> bool:
    """Whether a loss is the lowest or a score the highest of several; other figures have no best."""
    if len(values) < 2 or len(set(values)) < 2:
        return False
    numbers = [float(v.rstrip(" %")) for v in values] if "loss" in name or "pairs" in name else []
    if not numbers:
        return False
    return float(value.rstrip(" %")) == (min(numbers) if "loss" in name else max(numbers))


def toolbar(runs: list[Run], parts: Iterable[tuple[str, str]], data: dict[str, Any]) -> str:
    """Links to the sections, the choice of the horizontal axis, and which runs are shown."""
    links = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title in parts)
    shown = ""
    if len(runs) > 1:
        shown = "".join(
            f'<label class="run"><input type="checkbox" checked data-run="{n}">{swatch(n)}{html.escape(r.name)}</label>'
            for n, r in enumerate(runs)
        )
        shown = f'<div class="group" role="group" aria-label="Runs">{shown}</div>'
    axes = [("tokens", "Tokens"), ("s", "Steps"), ("hours", "Time")]
    offered = [(k, t) for k, t in axes if all(k in each["axes"] for each in data["runs"])]
    buttons = "".join(f'<button type="button" data-axis="{k}">{t}</button>' for k, t in offered)
    return (
        f'<nav class="toolbar"><div class="links">{links}</div><div class="controls">'
        f'<div class="group switch" role="group" aria-label="Horizontal axis">{buttons}</div>'
        f'<label class="run"><input type="checkbox" id="log">Log loss</label>'
        f'{shown}<button type="button" id="reset" hidden>Whole range</button></div></nav>'
    )


# Charts


def _loss_key(runs: list[Run]) -> str:
    """A legend of the marks that occur in the loss charts."""
    keys = {key for run in runs for key in run.metrics.series}
    marks = [("line", "training, smoothed")]
    if any(key.startswith("valid/") for key in keys):
        marks.append(("dot", "validation"))
    if any(key.startswith("valid/ema_") for key in keys):
        marks.append(("ring", "validation, averaged weights (EMA)"))
    if names := further_averages(runs):
        shapes = ("line", "long dashes", "dots")  # as the page's DASHES
        listed = ", ".join(f"{name} ({shapes[dash % 3]})" for dash, name in enumerate(names, 1))
        marks.append(("ring", f"validation, further averages: {html.escape(listed)}"))
    if any(start.step > 0 for run in runs for start in run.starts):
        marks.append(("tick", "restart"))
    return "<p class='key'>" + "".join(f'<span><i class="{m}"></i>{text}</span>' for m, text in marks) + "</p>"


def chart_section(charts: list[Chart], runs: list[Run], key: str = "") -> str:
    """A section of charts; "" without any."""
    if not charts:
        return ""
    large = [figure(chart, runs) for chart in charts if not chart.get("small")]
    small = [figure(chart, runs) for chart in charts if chart.get("small")]
    parts = [key]
    if large:
        parts.append(f'<div class="grid large">{"".join(large)}</div>')
    if small:
        parts.append(f'<div class="grid {"many" if len(small) > 4 else "small"}">{"".join(small)}</div>')
    return "\n".join(parts)


def figure(chart: Chart, runs: list[Run]) -> str:
    """An empty chart for the script to draw, with a description for those who cannot see it."""
    ends = []
    for line in chart["lines"]:
        if line["kind"] != "raw" and not (line["kind"] == "smooth" and len(runs) > 1):
            name = runs[line["run"]].name if len(runs) > 1 else ""
            ends.append(" ".join(filter(None, [name, line["label"], f"{line['y'][-1]:.4g}"])))
    summary = f"{chart['title']}. Last: {'; '.join(ends[:12])}." if ends else chart["title"]
    unit = f' <span class="unit">{html.escape(chart["unit"])}</span>' if chart.get("unit") else ""
    return (
        f'<figure data-chart="{html.escape(chart["id"])}"><figcaption>{html.escape(chart["title"])}{unit}</figcaption>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{html.escape(summary)}"></div></figure>'
    )


def pair_section(charts: list[Chart], runs: list[Run]) -> str:
    """Minimal-pair scores: over training as charts, the newest as a table."""
    modes, names = pair_names(runs)
    if not any(run.pairs for run in runs):
        return ""
    marks = ""
    if len(runs) == 1:
        marks = "".join(f'<span><i class="line {html.escape(m)}"></i>{html.escape(m)}</span>' for m in modes)
    else:
        marks = "".join(f'<span><i class="dash{n % 3}"></i>{html.escape(m)}</span>' for n, m in enumerate(modes))
    meaning = (
        "fraction of items whose right choice is the most probable (WUG, age of acquisition: rho; reading: gain in R2);"
        " dotted: chance"
    )
    parts = [f"<p class='key'>{marks}<span class='muted'>{meaning}</span></p>"]
    if whole := [figure(chart, runs) for chart in charts if not chart["small"]]:
        parts.append(f'<div class="grid large">{"".join(whole)}</div>')
    phenomena = [chart for chart in charts if chart["small"]]
    for name in dict.fromkeys(chart["set"] for chart in phenomena):
        drawn = [figure(chart, runs) for chart in phenomena if chart["set"] == name]
        opened = " open" if len(phenomena) <= _OPEN_CHARTS else ""
        parts.append(
            f"<details{opened}><summary>{html.escape(spoken(name))} by phenomenon, over training</summary>"
            f'<div class="grid many">{"".join(drawn)}</div></details>'
        )
    return "\n".join([*parts, pair_table(runs, modes, names)])


def pair_table(runs: list[Run], modes: list[str], names: list[str]) -> str:
    """The newest scores, in percent, with intervals: a row per set and phenomenon, a column per mode and run."""
    columns = [(n, mode) for mode in modes for n, r in enumerate(runs) if any(m == mode for m, _ in r.pairs)]
    head = ["Newest scores (%)"]
    head += [f"{swatch(n)}{html.escape(mode)}" if len(runs) > 1 else html.escape(mode) for n, mode in columns]
    rows = []
    for name in names:
        label = html.escape(spoken(name))
        cells = [f"<b>{label}</b>" if is_set(name) else label]
        for n, mode in columns:
            accuracy = runs[n].pairs.get((mode, name))
            hue = hue_of(mode, n) if len(runs) == 1 else run_colour(n)
            bar = f'<i class="bar" style="--fraction:{accuracy or 0:.4f};--hue:var(--{hue})"></i>'
            shown = f"{100 * (accuracy or 0):.1f}{bar if len(columns) <= _BARS and chance(name) else ''}"
            cells.append(MISSING if accuracy is None else shown + interval(runs[n].intervals.get((mode, name))))
        rows.append(cells)
    return table(head, rows, "numbers")
