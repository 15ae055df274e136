"""Tables and texts of a report: restarts, configuration, sample completions, environment."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from typing import Any

from data.ledger import ledger_rows
from report.runs import Run
from training.config import FIELDS

_OF_THE_FOLDER = ("flags.name", "flags.output_dir")  # say where a run lies, not what it is
MISSING = '<span class="muted">–</span>'


def escape(value: Any) -> str:
    """A value as text in HTML."""
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "texts") -> str:
    """A table that scrolls by itself where it is too wide. Cells are HTML. kind: "texts" or "numbers"."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def heading(run: Run, runs: Sequence[Run]) -> str:
    """The run's name above its part of a section, where there are several runs."""
    return f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""


# Restarts


def restarts(runs: Sequence[Run]) -> str:
    """A table of the starts of each run that started more than once; "" where none did."""
    parts = []
    for run in runs:
        if len(run.starts) < 2:
            continue
        jobs = any(start.job for start in run.starts)
        rows = []
        for number, start in enumerate(run.starts, start=1):
            outcome = escape(start.outcome[:300]) or MISSING
            cells = [str(number), escape(start.time.replace("T", " ").replace("+00:00", " UTC")), f"{start.step:,}"]
            cells += [escape(start.device) or MISSING, escape(start.host), *([escape(start.job)] if jobs else [])]
            rows.append([*cells, outcome])
        head = ["Start", "Time", "From step", "Devices", "Host", *(["SLURM job"] if jobs else []), "Then"]
        parts.append(heading(run, runs) + table(head, rows))
    return "".join(parts)


# Evaluations


def interval(found: tuple[float, float] | None) -> str:
    """A 95 % interval of fractions in small print; "" without one."""
    return "" if found is None else f"<small>[{100 * found[0]:.1f}, {100 * found[1]:.1f}]</small>"


def evaluations(runs: Sequence[Run]) -> str:
    """What evaluation/ measured beside zero-shot scores: tasks of fine-tuning and perplexities; "" without any."""
    found = [{(each.name, each.mode, each.measure): each for each in run.results} for run in runs]
    rows = []
    for key in dict.fromkeys(key for of in found for key in of):
        cells = [escape(", ".join(filter(None, (key[0], key[2], key[1]))))]
        for of in found:
            small = f"<small>{escape(of[key].interval)}</small>" if key in of and of[key].interval else ""
            cells.append(escape(of[key].text()) + small if key in of else MISSING)
        rows.append(cells)
    note = "Perplexities; all others in percent, ± standard deviation over the seeds of one fine-tuned run."
    head = ["Task or text", *(escape(run.name) if len(runs) > 1 else "Value" for run in runs)]
    return f"<p class='muted'>{note}</p>{table(head, rows, 'numbers')}" if rows else ""


# Data used


def ledgers(runs: Sequence[Run]) -> str:
    """What the newest checkpoint of each run has used of each source; "" without ledgers."""
    parts = []
    for run in runs:
        if not run.ledger:
            continue
        head, rows = ledger_rows(run.ledger)
        note = f"Up to step {run.ledger['step']:,}. The last columns are repetitions by objective."
        cells = [[escape(cell) for cell in row] for row in rows]
        parts.append(f"{heading(run, runs)}<p class='muted'>{note}</p>{table(head, cells, 'numbers')}")
    return "".join(parts)


# Configuration


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json that describe the run, by dotted name."""
    found: dict[str, Any] = {}
    for group in ("flags", "model", "data"):
        values = config.get(group)
        if isinstance(values, dict):
            found.update({f"{group}.{name}": value for name, value in values.items() if name != "sources"})
    return found


def configuration(runs: Sequence[Run]) -> str:
    """What differs between runs, or for one run from the defaults; then everything, folded."""
    values = [flattened(run.config) for run in runs]
    if not any(values):
        return ""
    names = [n for n in dict.fromkeys(n for found in values for n in found) if n not in _OF_THE_FOLDER]
    if len(runs) == 1:
        known = {name: default for name in names if (default := _default(name)) is not None}  # None: by the device
        changed = [name for name, default in known.items() if values[0][name] != default]
        rows = [[setting_name(n), _code(values[0][n]), escape(_default(n))] for n in changed]
        first = table(["Set for this run", "Value", "Default"], rows) if rows else ""
        every = table(["Setting", "Value"], [[setting_name(n), _code(values[0][n])] for n in names])
        return f"{first}<details><summary>All {len(names)} settings</summary>{every}</details>"
    absent = object()
    different = [n for n in names if len({json.dumps(v.get(n), sort_keys=True) for v in values}) > 1]
    head = ["Setting", *(escape(run.name) for run in runs)]
    rows = [[setting_name(n), *(_code(v[n]) if n in v else MISSING for v in values)] for n in different]
    same = [n for n in names if n not in different and values[0].get(n, absent) is not absent]
    common = table(["Setting", "Value"], [[setting_name(n), _code(values[0][n])] for n in same])
    first = table(head, rows) if rows else "<p>These runs have the same configuration.</p>"
    return f"{first}<details><summary>{len(same)} settings that all of them share</summary>{common}</details>"


def setting_name(name: str) -> str:
    """A setting as HTML, a flag with its help."""
    group, _, flag = name.partition(".")
    known = FIELDS.get(flag) if group == "flags" else None
    hint = f' title="{html.escape(known.metadata["help"])}"' if known else ""
    return f"<code{hint}>{'--' if group == 'flags' else f'{group}.'}{html.escape(flag)}</code>"


def _code(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else value
    return f"<code>{escape(text)}</code>" if value not in ("", None, []) else MISSING


def _default(name: str) -> Any:
    """The default of a flag as config.json would hold it; None for what is no flag."""
    group, _, flag = name.partition(".")
    if group != "flags" or flag not in FIELDS:
        return None
    default = FIELDS[flag].default
    return list(default) if isinstance(default, tuple) else default


# Sample completions


def samples(runs: Sequence[Run]) -> str:
    """The newest sample completions of each run, earlier ones folded; "" without any."""
    parts = []
    for run in runs:
        by_step: dict[int, list[dict[str, Any]]] = {}
        for sample in run.samples:
            if isinstance(sample.get("step"), int):
                by_step.setdefault(sample["step"], []).append(sample)
        if not by_step:
            continue
        *earlier, newest = sorted(by_step)
        averaged = any(sample.get("weights") == "ema" for sample in by_step[newest])
        when = f"After step {newest:,}{', averaged weights (EMA)' * averaged}."
        parts.append(f"{heading(run, runs)}<p class='muted'>{when}</p>{sample_list(by_step[newest])}")
        parts += [
            f"<details><summary>Step {step:,}</summary>{sample_list(by_step[step])}</details>"
            for step in reversed(earlier)
        ]
    return "".join(parts)


def sample_list(found: Sequence[dict[str, Any]]) -> str:
    """Continuations and filled gaps side by side."""
    causal = "".join(_continuation(sample) for sample in found if sample.get("kind") == "causal")
    masked = "".join(_filling(sample) for sample in found if sample.get("kind") == "masked")
    parts = []
    if causal:
        parts.append(f"<div><h4>Continued, reading from left to right</h4>{causal}</div>")
    if masked:
        parts.append(f"<div><h4>Gaps filled, reading in both directions</h4>{masked}</div>")
    return f'<div class="samples">{"".join(parts)}</div>'


def _continuation(sample: dict[str, Any]) -> str:
    truth = sample.get("truth")
    in_text = f"<p class='truth'>in the text: {escape(str(truth).strip())} ...</p>" if truth else ""
    return (
        f"<blockquote><span class='muted'>{escape(str(sample.get('prompt', '')))}</span>"
        f"<mark>{escape(str(sample.get('text', '')))}</mark>{in_text}</blockquote>"
    )


def _filling(sample: dict[str, Any]) -> str:
    """A text with its gaps as boxes, and under it what the model would put into each."""
    before, *after = str(sample.get("text", "")).split("<mask>")
    gaps = sample.get("gaps") or []
    text, lists = escape(before), []
    for number, (piece, gap) in enumerate(zip(after, gaps, strict=False), start=1):
        text += f"<mark class='gap'>{number if len(gaps) > 1 else '?'}</mark>{escape(piece)}"
        truth = gap.get("truth")
        words = "".join(
            f"<li{' class=right' if truth is not None and word == truth else ''} style='--fraction:{probability:.4f}'>"
            f"<span>{escape(str(word).strip() or repr(word))}</span><span>{100 * probability:.1f} %</span></li>"
            for word, probability in gap.get("candidates", [])
        )
        in_text = f"<span class='muted'>in the text: {escape(str(truth).strip())}</span>" if truth is not None else ""
        lists.append(f"<div>{in_text}<ol>{words}</ol></div>")
    return f"<blockquote>{text}<div class='gaps'>{''.join(lists)}</div></blockquote>"


# Environment


def environment(runs: Sequence[Run]) -> str:
    """Versions, commit, data and command line of each run; "" where nothing is known."""
    found = [_environment(run) for run in runs]
    names = list(dict.fromkeys(name for values in found for name in values))
    if not names:
        return ""
    head = ["", *(escape(run.name) for run in runs)] if len(runs) > 1 else ["Property", "Value"]
    rows = [[escape(name), *(values.get(name, MISSING) for values in found)] for name in names]
    commands = []
    for run in runs:
        launches = run.config.get("launches") or [{}]
        command = launches[-1].get("command")
        if isinstance(command, list):
            line = shlex.join(str(part) for part in command)
            commands.append(f"{heading(run, runs)}<pre>{escape(line).replace(' --', ' <wbr>--')}</pre>")
    folded = f"<details><summary>Command line</summary>{''.join(commands)}</details>" if commands else ""
    return table(head, rows) + folded


def _environment(run: Run) -> dict[str, str]:
    config, found = run.config, {}
    for name, version in (config.get("versions") or {}).items():
        found[name] = escape(version)
    if commit := config.get("git_commit"):
        dirty = " with uncommitted changes" if commit.endswith("+") else ""
        found["git commit"] = f"<code>{escape(commit.rstrip('+')[:12])}</code>{dirty}"
    if run.starts:
        last = run.starts[-1]
        found["started"] = escape(run.starts[0].time.replace("T", " ").replace("+00:00", " UTC"))
        found |= {"device": escape(last.device) or MISSING, "host": escape(last.host)}
    data = config.get("data") or {}
    if "tokens" in data:
        found["corpus"] = f"{data['tokens']:,} tokens in {data.get('documents', 0):,} documents"
    if "identity" in data:
        found["data fingerprint"] = f"<code>{escape(str(data['identity'])[:16])}</code>"
    return found
