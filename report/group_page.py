"""A report of groups of runs as one HTML page: scores with errors and significance, against settings, and heat maps."""

from __future__ import annotations

import html
from collections.abc import Sequence

from report.charts import chance, run_colour, spoken
from report.groups import Group, Score, group_runs, mean_and_error, scores_of, shown, welch
from report.metrics import ReportError
from report.page import body, chip, document, guarded, same_data, swatch
from report.runs import Run
from report.tables import MISSING, configuration, escape, setting_name, table

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 300, 176, 46, 26, 10  # of a chart of scores against a setting
_BESIDE = 6  # scores that are columns; more of them are rows
_DRAWN = 12  # charts of a setting that are not folded
_STRONGEST = 60  # percent of colour in a cell of a heat map, so that its number stays readable


def group_page(runs: list[Run], by: Sequence[str] = (), baseline: str = "") -> str:
    """The whole page. by: the settings that groups differ in (default: all that differ). baseline: a run of the group
    that others are compared with (default: the first run). Raises ReportError."""
    groups, scores = group_runs(runs, by), scores_of(runs)
    if not scores:
        raise ReportError("these runs have no held-out loss and no zero-shot score yet: there is nothing to compare.")
    names = [run.name for run in runs]
    if baseline and baseline not in names:
        raise ReportError(f"--baseline {baseline} is no name of these runs: {', '.join(names)[:300]}.")
    number = names.index(baseline) if baseline else 0
    base = next(group for group in groups if number in group.runs)
    whole = [score for score in scores if score.set is None]
    parts = [
        ("scores", "Scores", score_table(groups, whole, base, same_data("validation loss", runs))),
        ("settings", "Scores against settings", guarded(setting_charts, groups, whole)),
        ("heat", "By phenomenon", guarded(heat_maps, groups, [score for score in scores if score.set])),
        ("runs", "Runs", run_table(runs, groups, whole)),
        ("configuration", "Configuration", guarded(configuration, [runs[group.runs[0]] for group in groups])),
    ]
    parts = [part for part in parts if part[2]]
    count = f"{len(runs)} run{'s' * (len(runs) != 1)} in {len(groups)} group{'s' * (len(groups) != 1)}"
    links = "".join(f'<a href="#{name}">{html.escape(heading)}</a>' for name, heading, _ in parts)
    top = (
        f"<header><p class='kicker'>Groups of runs</p><h1>{count}</h1>{_lead(runs, groups)}</header>"
        f'<nav class="toolbar"><div class="links">{links}</div></nav>'
    )
    return document(count, f"{top}\n<main>\n{body(parts, side_by_side=False)}\n</main>")


def _lead(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    names = ", ".join(setting_name(name) for name in groups[0].settings)
    line = f"Groups differ in {names}." if names else "All runs have the same settings but for seeds."
    unfinished = [run.name for run in runs if run.state != "finished"]
    note = f"<p class='note'>Not finished, shown at their newest step: {escape(', '.join(unfinished)[:400])}.</p>"
    return f'<p class="lead">{line}</p>' + (note if unfinished else "")


def number_of(value: float, score: Score, error: float | None = None) -> str:
    """A score as text, with its standard error."""
    scale, digits = (100, 1) if score.percent else (1, 3)
    text = f"{scale * value:.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits + 1 if score.percent else digits}f}"


def _values(group: Group, score: Score) -> list[float]:
    return [score.values[number] for number in group.runs if number in score.values]


def score_table(groups: Sequence[Group], scores: Sequence[Score], base: Group, same_data: bool = True) -> str:
    """A row a group, a column a score, or of many scores the other way round: mean ± standard error, the best marked,
    and the p-value against the base group.

    same_data: whether losses are of the same held-out tokens; else they are not compared."""
    best = {}
    for score in scores:
        if score.lower_is_better and not same_data:
            continue
        means = [mean_and_error(values)[0] for group in groups if (values := _values(group, score))]
        if len(set(means)) > 1:
            best[score.name] = min(means) if score.lower_is_better else max(means)
    columns = []
    for number, group in enumerate(groups):
        cells = [f"{swatch(number)}{escape(group.label)}", str(len(group.runs))]
        for score in scores:
            values, others = _values(group, score), _values(base, score)
            if not values:
                cells.append(MISSING)
                continue
            mean, error = mean_and_error(values)
            cell = escape(number_of(mean, score, error))
            cell = f"<b>{cell}</b>" if best.get(score.name) == mean else cell
            comparable = same_data or not score.lower_is_better
            if comparable and group is not base and len(values) > 1 and len(others) > 1:
                cell += f"<small>p {welch(others, values):.2g}</small>"
            cells.append(cell)
        columns.append(cells)
    names = [escape(score.name + (" (%)" if score.percent else "")) for score in scores]
    head = [", ".join(setting_name(name) for name in base.settings) or "Group", "Runs", *names]
    lines = [head, *columns] if len(scores) <= _BESIDE else [list(row) for row in zip(head, *columns, strict=True)]
    compared = (
        f" p: Welch's t-test against {escape(base.label)}, two-sided, not corrected for the number of comparisons."
        if len(groups) > 1
        else ""
    )
    few = " A group of one run has no error." if any(len(group.runs) < 2 for group in groups) else ""
    if not same_data:
        few += " The runs are not known to have the same held-out data: losses are not compared."
    note = f"<p class='muted'>Mean ± standard error over runs; the best mean is marked.{compared}{few}</p>"
    return note + table(lines[0], lines[1:], "numbers wide")


# Against settings


def setting_charts(groups: Sequence[Group], scores: Sequence[Score]) -> str:
    """For each setting that groups differ in a chart of each score; "" where groups do not differ."""
    parts = []
    for name in groups[0].settings:
        drawn = [chart for score in scores if (chart := setting_chart(name, groups, score))]
        parts.append(f'<h3>{setting_name(name)}</h3><div class="grid many">{"".join(drawn[:_DRAWN])}</div>')
        if rest := drawn[_DRAWN:]:
            folded = f'<div class="grid many">{"".join(rest)}</div>'
            parts.append(f"<details><summary>{len(rest)} more scores</summary>{folded}</details>")
    key = "Dots: runs, coloured by group; bars: mean ± standard error over all runs with the value."
    return f"<p class='muted'>{key}</p>{''.join(parts)}" if parts else ""


def setting_chart(setting: str, groups: Sequence[Group], score: Score) -> str:
    """A chart of a score by the values of a setting; "" where it is of one value alone."""
    found: dict[str, list[tuple[int, float]]] = {}
    order = sorted({shown(group.settings[setting]) for group in groups}, key=_by_number)
    for label in order:
        for number, group in enumerate(groups):
            if shown(group.settings[setting]) == label:
                found.setdefault(label, []).extend((number, value) for value in _values(group, score))
    found = {label: values for label, values in found.items() if values}
    every = [value for values in found.values() for _, value in values]
    if len(found) < 2:
        return ""
    low, high = min(every), max(every)
    margin = 0.08 * (high - low) or abs(high) * 0.01 or 0.01
    low, high = low - margin, high + margin

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    drawn, told = [_axis(low, high, score, y)], []
    step = (_WIDTH - _LEFT - 8) / len(found)
    for place, (label, values) in enumerate(found.items()):
        x = _LEFT + (place + 0.5) * step
        mean, error = mean_and_error([value for _, value in values])
        told.append(f"{label}: {number_of(mean, score, error)}")
        for index, (number, value) in enumerate(values):
            shift = (index - (len(values) - 1) / 2) * min(7, 0.5 * step / len(values))
            drawn.append(
                f'<circle cx="{x + shift:.1f}" cy="{y(value):.1f}" r="3.2" fill="var(--{run_colour(number)})" '
                'fill-opacity="0.75"/>'
            )
        half = min(14, 0.3 * step)
        drawn.append(_line(x - half, y(mean), x + half, y(mean), 2))
        if error:
            drawn.append(_line(x, y(mean - error), x, y(mean + error), 1.5))
        short = label if len(label) * 6.5 < step else f"{label[: max(2, int(step / 6.5) - 1)]}…"
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(short)}</text>')
    title = escape(score.name + (" (%)" if score.percent else ""))
    return (
        f'<figure><figcaption>{title}</figcaption><div class="plot" role="img" '
        f'aria-label="{html.escape("; ".join(told))}"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(drawn)}</svg>'
        "</div></figure>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--ink)" stroke-width="{width}"/>'


def _axis(low: float, high: float, score: Score, y) -> str:
    """Three horizontal lines with their values."""
    parts = []
    for fraction in (0.1, 0.5, 0.9):
        value = low + fraction * (high - low)
        digits = (2 if high - low < 0.02 else 1) if score.percent else 3
        text = f"{100 * value if score.percent else value:.{digits}f}"
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="var(--grid)"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>'
        )
    return "".join(parts)


def _by_number(label: str) -> tuple[int, float, str]:
    try:
        return 0, float(label), ""
    except ValueError:
        return 1, 0.0, label


# Heat maps


def heat_maps(groups: Sequence[Group], scores: Sequence[Score]) -> str:
    """For each suite with parts and mode a table of group means, coloured from chance on; all but the best
    mode of a suite folded."""
    parts, seen = [], set()
    order = {"fused": 0, "masked": 1, "causal": 2}
    for mode, suite in sorted(
        {score.set for score in scores if score.set}, key=lambda found: (found[1], order.get(found[0], 3))
    ):
        rows = []
        for score in scores:
            if score.set != (mode, suite):
                continue
            means = [mean_and_error(values)[0] if (values := _values(group, score)) else None for group in groups]
            rows.append([escape(spoken(score.name)), *(_heat_cell(mean, chance(suite) or 0.0) for mean in means)])
        head = [escape(f"{suite}, {mode} (%)"), *(f"{swatch(n)}{escape(g.label)}" for n, g in enumerate(groups))]
        drawn = table(head, rows, "numbers heat")
        summary = f"<details><summary>{escape(f'{suite}, {mode}')}</summary>{drawn}</details>"
        parts.append(summary if suite in seen else drawn)
        seen.add(suite)
    return "".join(parts)


def _heat_cell(mean: float | None, guess: float) -> str:
    """A number on its colour, which is none at what a guess would give."""
    if mean is None:
        return MISSING
    hue = "masked" if mean >= guess else "causal"
    mix = _STRONGEST * min(1.0, (mean - guess) / (1 - guess) if mean >= guess else 1 - mean / guess)
    return f'<span style="--hue:var(--{hue});--mix:{mix:.0f}%">{100 * mean:.1f}</span>'


def run_table(runs: Sequence[Run], groups: Sequence[Group], scores: Sequence[Score]) -> str:
    """Every run with its seed, step and scores."""
    rows = []
    for number, group in enumerate(groups):
        for index in group.runs:
            run, seed = runs[index], runs[index].config.get("flags", {}).get("seed")
            values = [number_of(score.values[index], score) if index in score.values else MISSING for score in scores]
            state = "" if run.state == "finished" else chip(run)
            cells = [MISSING if seed is None else escape(seed), f"{run.step:,}", *values]
            rows.append([f"{swatch(number)}{escape(run.name)}{state}", *cells])
    head = ["Run", "Seed", "Steps", *(escape(score.name) for score in scores)]
    return table(head, rows, "numbers named wide")
