"""The report page: what it says of runs, in whatever state their files are, and that a real browser shows it."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.browser import Browser, CannotRun
from helpers.tiny_runs import ROOT, flags, make_inputs, run

from report import html_report
from report.charts import sections
from report.runs import downsample, pairs_in_files, read_records, training_hours
from slurm.snapshot import code_files

MODES = ("masked", "causal", "fused")
NASTY = "</script><b>&'\""


def write_run(folder: Path, steps: int = 40, shift: float = 0.0, **options: Any) -> Path:
    """A run folder in the form of the training loop, validated and evaluated every 10 steps, restarted at step 20."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3 + shift + 6 / (1 + step / 10) + (step % 3) / 10
        lines.append({
            "step": step, "stats/tokens": 4096 * step, "train/loss": loss, "train/masked_loss": loss,
            "train/causal_loss": loss + 1, "train/masked_accuracy": 0.1, "train/causal_accuracy": 0.2,
            "train/z_loss": 20.0, "stats/learning_rate": 1e-4 * step, "stats/seq_length": 64 * (1 + step // 20),
            "stats/global_batch_size": 64, "stats/mask_p": 0.3 - step / 400, "stats/grad_norm": 1.5,
            "stats/tokens_per_second": 8192.0, "stats/peak_memory_gib": 1.25, "data/fingerprint": "5f",
        })  # fmt: skip
        if step % 10 == 0:
            valid = {f"valid/{p}{o}_loss": 4.0 + shift for p in ("", "ema_") for o in ("masked", "causal")}
            lines.append({"step": step, "stats/tokens": 4096 * step, **valid})
            pairs = {
                f"eval/{m}/blimp{part}": 0.5 + step / 100 for m in MODES for part in ("", "/agreement", "/binding")
            }
            lines.append({"step": step, "stats/tokens": 4096 * step, **pairs})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    launch = {
        "time": "2026-01-01T10:00:00+00:00", "host": "node1", "world_size": 8, "device": "NVIDIA H200",
        "job_id": "77", "restart_count": 0, "start_step": 0, "command": ["train_multi_gpu.py", "--name", NASTY],
    }  # fmt: skip
    config = {
        "flags": {"name": folder.name, "hybrid_numerator": 15, "hybrid_denominator": 16, "optimizer": "lamb",
                  "learning_rate": 0.01 + shift, "max_steps": 100, "train_path": NASTY, "mixed_precision": True},
        "model": {"model_type": "gpt-bert", "hidden_size": 384, "num_hidden_layers": 12},
        "data": {"identity": "ab" * 32, "tokens": 100_000, "documents": 10, "sources": []},
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
        "git_commit": "0123456789abcdef+",
        "launches": [launch, {**launch, "time": "2026-01-01T11:00:00+00:00", "restart_count": 1, "start_step": 20}],
        **options,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "status.json").write_text(json.dumps({"state": "running", "reason": "", "max_steps": 100}))
    (folder / "failures").mkdir()
    failure = {"rank": 3, "host": "node1", "time": 1.0, "error": "the GPU is gone", "secondary": False}
    (folder / "failures" / "77_0_3.json").write_text(json.dumps(failure))
    samples = [
        {"step": 40, "weights": "ema", "kind": "causal", "prompt": "The cat", "text": " sat & ran", "truth": " slept"},
        {"step": 40, "weights": "ema", "kind": "masked", "text": "The <mask> sat.",
         "gaps": [{"truth": " cat", "candidates": [[" dog", 0.5], [" cat", 0.25]]}]},
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def page_of(tmp_path: Path, *runs: Path) -> str:
    """The page that the command writes."""
    output = tmp_path / "out.html"
    assert html_report.main([*map(str, runs), "-o", str(output)]) == 0
    return output.read_text()


def text_of(page: str) -> str:
    """What a page shows, without its script, style and tags."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def data_of(page: str) -> dict[str, Any]:
    """The numbers that a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_page_tells_everything_that_the_folder_knows(tmp_path):
    text = text_of(page_of(tmp_path, write_run(tmp_path / "first")))
    for told in (
        "first running", "40 % – step 40 of 100", "Masked validation loss 4.000", "EMA 4.000", "Tokens 164k",
        "1.6 × the corpus", "Speed 8.19k", "1.2 GiB", "8 × NVIDIA H200", "15/16 of rows masked", "LAMB",
        "rank 3 on node1: the GPU is gone", "77 (restart 1)", "--learning_rate", "0123456789ab",
        "with uncommitted changes", "2.13.0", "Minimal pairs, fused 90.0 %", "agreement 90.0 90.0 90.0",
        "The cat sat & ran", "in the text: slept", "dog 50.0 %", "in the text: cat", "100,000 tokens in 10 documents",
    ):  # fmt: skip
        assert told in text, told


def test_page_needs_nothing_from_elsewhere_and_no_text_breaks_out(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "<!--<script>"))
    assert "<!--" not in page
    assert data_of(page)["runs"][0]["name"] == "<!--<script>"
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", page)
    assert not re.search(r"@import|url\((?!#)", page.replace("url(#${clip})", ""))
    assert "default-src 'none'" in page
    assert NASTY not in page
    assert html.escape(NASTY) in page
    assert page.count("</script>") == 2


def test_charts_hold_the_series_of_each_objective(tmp_path):
    page = data_of(page_of(tmp_path, write_run(tmp_path / "first")))
    charts = {chart["id"]: chart for chart in page["charts"]}
    lines = {line["kind"]: line for line in charts["masked_loss"]["lines"]}
    assert lines["raw"]["s"] == list(range(1, 41))
    assert lines["raw"]["y"][9] == pytest.approx(3 + 6 / 2 + 0.1, rel=1e-4)
    assert (lines["valid"]["s"], lines["valid"]["y"]) == ([10, 20, 30, 40], [4.0] * 4)
    assert lines["ema"]["y"] == [4.0] * 4
    assert {line["colour"] for line in charts["causal_loss"]["lines"]} == {"causal"}
    assert charts["seq_length"]["ticks"] == [64, 128, 192]
    assert {"learning_rate", "global_batch_size", "mask_p", "tokens_per_second", "peak_memory_gib"} <= charts.keys()
    pairs = [chart for chart in page["charts"] if chart["id"].startswith("pairs_")]
    assert [chart["title"] for chart in pairs] == ["blimp", "agreement", "binding"]
    assert [line["label"] for line in pairs[0]["lines"]] == list(MODES)
    assert page["runs"][0]["restarts"] == [20]
    assert page["runs"][0]["axes"]["tokens"][:2] == [4096, 8192]
    assert page["runs"][0]["axes"]["hours"][-1] == pytest.approx(40 * 0.5 / 3600, rel=1e-4)


def test_several_runs_are_compared_by_what_differs(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", shift=0.5)]
    page = page_of(tmp_path, *runs)
    text, data = text_of(page), data_of(page)
    configuration = text[text.index("Configuration", text.index("Restarts", 500)) :]
    assert "--learning_rate 0.01 0.51" in configuration
    assert configuration.index("settings that all of them share") < configuration.index("--optimizer lamb")
    assert "<b>4.000</b>" in page  # the better validation loss
    assert "<b>4.500</b>" not in page
    (chart,) = (chart for chart in data["charts"] if chart["id"] == "masked_loss")
    assert {(line["run"], line["colour"]) for line in chart["lines"]} == {(0, "run0"), (1, "run1")}


def test_metrics_alone_and_damaged_records_are_enough(tmp_path):
    file = tmp_path / "old" / "metrics.jsonl"
    file.parent.mkdir()
    file.write_text('{"step": 1, "train/loss": 9.0}\n{"step": 2, "train/loss": 8.0, "train/x": NaN}\n{"step": 3, "tr')
    assert [chart["id"] for chart in data_of(page_of(tmp_path, file))["charts"]] == ["loss"]
    for name in ("config.json", "status.json", "attempts.jsonl", "samples.jsonl", "blimp.json"):
        (file.parent / name).write_text('{"sets": 3, "launches": [')
    text = text_of(page_of(tmp_path, file.parent))
    assert "Steps 2" in text
    assert "Configuration" not in text


ODD = (None, 3, -1.5, "x", "\ud800", [], [1], {"a": [1]}, True, 1e308, 10**400)


def places_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places_in(one, (*path, key))


def put(value: Any, path: tuple, odd: Any) -> Any:
    """A copy of a JSON value with `odd` at a path."""
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = odd
    return copy


@pytest.mark.slow
def test_a_page_is_written_whatever_the_records_hold(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)
    share = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": share, "all": share, "groups": {}, "paradigms": {"x": share}}}
    (folder / "pairs.json").write_text(json.dumps({"sets": {"blimp": {"pairs": 100, "modes": modes}}}))
    (folder / "attempts.jsonl").write_text(json.dumps({"time": "2026", "job_id": "78", "restart_count": 0}) + "\n")
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    (folder / "folder.json").mkdir()
    (folder / "deep.json").write_text("[" * 100_000)
    names = ("config.json", "status.json", "pairs.json", "failures/77_0_3.json")
    names += ("metrics.jsonl", "samples.jsonl", "attempts.jsonl")
    for number, name in enumerate(names):
        file = folder / name
        whole = file.read_text()
        lines = whole.splitlines() if name.endswith(".jsonl") else [whole]
        *rest, last = map(json.loads, lines)
        for turn, path in enumerate(places_in(last)):
            for odd in (ODD[(turn + number + n) % len(ODD)] for n in (0, 5)):
                file.write_text("".join(json.dumps(line) + "\n" for line in (*rest, put(last, path, odd))))
                output = tmp_path / "out.html"
                assert html_report.main([str(folder), str(folder), "-o", str(output)][turn % 2 :]) == 0
                assert data_of(output.read_text())["charts"]
        file.write_text(whole)
    assert "cannot be shown" not in page_of(tmp_path, folder)


def test_a_loss_is_the_best_on_the_same_data_only(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", shift=0.5)]
    others = {"identity": "cd" * 32, "held_out_identity": "ef" * 32}
    for data in ({}, others, {**others, "identity": "ab" * 32}):
        config = json.loads((runs[1] / "config.json").read_text())
        (runs[1] / "config.json").write_text(json.dumps({**config, "data": data}))
        page = page_of(tmp_path, *runs)
        assert "<b>4.000</b>" not in page
        assert "do not record the same data for Masked validation loss" in text_of(page)
    for folder, identity in zip(runs, ("12", "34"), strict=True):  # other corpora, one held-out set
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "data": {**others, "identity": identity}}))
    assert "<b>4.000</b>" in page_of(tmp_path, *runs)


def test_a_job_takes_the_page_along():
    """slurm/launch.py copies code by its suffix; a finished run of the job writes its report."""
    assert {Path("report/assets") / name for name in ("page.css", "page.js")} <= set(code_files(ROOT))


def test_scores_are_read_from_result_files(tmp_path):
    share = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": share, "all": share, "groups": {"linguistics_term": {"binding": share}},
                        "paradigms": {"x": share}}}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps({"sets": {"blimp": {"pairs": 100, "modes": modes}}}))
    (tmp_path / "other.json").write_text('{"sets": ["a"]}')
    assert pairs_in_files(tmp_path) == {("causal", "blimp"): 0.75, ("causal", "blimp/binding"): 0.75}


def test_scores_of_files_alone_are_shown(tmp_path):
    """As README advises: a run that scored no pairs while it trained, and a result file in its folder."""
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for folder in runs:
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval/" not in line]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    share = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": share, "all": share, "groups": {}, "paradigms": {"x": share}}}
    (runs[0] / "pairs.json").write_text(json.dumps({"sets": {"blimp": {"pairs": 100, "modes": modes}}}))
    for shown in (runs[:1], runs):
        page = page_of(tmp_path, *shown)
        assert "Minimal pairs, causal 75.0 %" in text_of(page)
        assert not [chart for chart in data_of(page)["charts"] if chart["id"].startswith("pairs_")]


def test_long_lines_keep_their_extremes():
    x = np.arange(200_000.0)
    y = np.sin(x / 9000)
    y[77_777], y[123_456] = 50.0, -50.0
    short_x, short_y = downsample(x, y)
    assert len(short_x) <= 1000
    assert np.all(np.diff(short_x) > 0)
    assert (short_x[0], short_x[-1]) == (0, 199_999)
    assert short_y[short_x == 77_777] == 50.0
    assert short_y[short_x == 123_456] == -50.0
    assert np.array_equal(short_y, y[short_x.astype(int)])
    assert downsample(x[:9], y[:9])[0].tolist() == list(range(9))


def test_training_time_leaves_gaps_out(tmp_path):
    (record,) = read_records([str(write_run(tmp_path / "a"))])
    assert training_hours(record.run)[40] == pytest.approx(40 * 4096 / 8192 / 3600)
    assert sections([record])["schedules"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "none is no run"),
        (["run", "-o", "away/x.html"], "there is no folder away"),
        (["run", "-o", "run"], "--output run is a folder"),
        (["run", "--watch", "--interval", "0"], "--interval is 0"),
        (["run", "--prompt", "x"], "add --samples"),
        (["run", "--samples", "--gap", "x"], "has no <mask>"),
        (["run", "--samples"], "has no checkpoint yet|is not a checkpoint"),
        (["run", "--watch", "--samples"], "exclude each other"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    assert html_report.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(sentence, error)
    assert not list(tmp_path.glob("**/*.html"))


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    """A run of the training script, on documents long enough for samples."""
    folder = tmp_path_factory.mktemp("report")
    run(
        flags(
            make_inputs(folder / "inputs"), folder, max_steps=12, validate_every=6, save_every=6, validation_samples=3
        )
    )
    return folder / "run"


def test_a_finished_run_has_its_report_and_samples_of_every_validation(real_run):
    text = text_of((real_run / "report.html").read_text())
    assert "run finished" in text
    assert "After step 12, averaged weights (EMA)." in text
    samples = [json.loads(line) for line in (real_run / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["kind"]) for s in samples] == [
        (n, k) for n in (6, 12) for k in ["causal"] * 3 + ["masked"] * 3
    ]
    for sample in samples:
        if sample["kind"] == "masked":
            assert sample["text"].count("<mask>") == len(sample["gaps"]) == 2
            for gap in sample["gaps"]:
                shares = [share for _, share in gap["candidates"]]
                assert shares == sorted(shares, reverse=True)
                assert 0 < sum(shares) <= 1
                assert gap["truth"].strip().isalpha()
        else:
            assert sample["truth"]


def test_samples_of_the_newest_checkpoint_with_own_texts(real_run, tmp_path):
    before = (real_run / "samples.jsonl").read_text()
    try:
        arguments = ["--samples", "--prompt", "the cat", "--gap", "the <mask> sees", "--device", "cpu"]
        assert html_report.main([str(real_run), "-o", str(tmp_path / "x.html"), *arguments]) == 0
        found = [json.loads(line) for line in (real_run / "samples.jsonl").read_text().splitlines()]
        assert {s["step"] for s in found} == {6, 12}
        causal, masked = [s for s in found if s["step"] == 12]
        assert (causal["prompt"], causal["truth"], masked["text"]) == ("the cat", None, "the <mask> sees")
        assert masked["gaps"][0]["truth"] is None
        # Without texts: held-out documents, and the same weights give what the training loop wrote.
        assert html_report.main([str(real_run), "-o", str(tmp_path / "x.html"), "--samples", "--device", "cpu"]) == 0
        again = [json.loads(line) for line in (real_run / "samples.jsonl").read_text().splitlines()]
        assert [s.get("prompt") for s in again] == [json.loads(line).get("prompt") for line in before.splitlines()]
        assert [s.get("text") for s in again] == [json.loads(line)["text"] for line in before.splitlines()]
    finally:
        (real_run / "samples.jsonl").write_text(before)


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        running = Browser()
    except CannotRun as error:
        pytest.skip(str(error))  # no Chromium, and no apt or no root to install it; the message says which
    yield running
    running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("count", [1, 3])
def test_browser_shows_it_without_errors_requests_or_sideways_scrolling(tmp_path, browser, count, width, scheme):
    runs = [write_run(tmp_path / f"a_run_with_rather_a_long_name_{n}", shift=n / 3) for n in range(count)]
    page_of(tmp_path, *runs)
    browser.open(tmp_path / "out.html", width=width, scheme=scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg path'))")
    contrast = "getComputedStyle(document.body).{}"
    colours = [browser.evaluate(contrast.format(name)) for name in ("color", "backgroundColor")]
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert abs(ink - paper) > 500
    assert (ink < paper) == (scheme == "light")
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.messages == []
    assert browser.requests == [(tmp_path / "out.html").as_uri()]


def place(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of an element that was scrolled into view."""
    found = browser.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center', "
        "behavior: 'instant'}); const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
    )
    return tuple(found)


def test_pointer_keys_and_controls(tmp_path, browser):
    page_of(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", shift=0.5))
    browser.open(tmp_path / "out.html")
    x, y, width, height = place(browser, "[data-chart=masked_loss] .plot")
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    tip = browser.evaluate("document.getElementById('tip').innerText")
    assert "tokens" in tip
    assert "a, validation, EMA" in tip
    assert "4.500 (ppl 90)" in " ".join(tip.split())
    axis = "document.querySelector('[data-chart=masked_loss] svg').textContent"
    assert "tokens trained on" in browser.evaluate(axis)
    browser.evaluate("document.querySelector('[data-axis=hours]').click()")
    assert "training time (s)" in browser.evaluate(axis)
    browser.evaluate("document.querySelector('[data-axis=s]').click()")
    drawn = "document.querySelectorAll('[data-chart=masked_loss] svg path').length"
    both = browser.evaluate(drawn)
    browser.evaluate("document.querySelector('[data-run=\"1\"]').click()")
    assert browser.evaluate(drawn) == both / 2
    # Dragging takes a part of the range, a double click the whole.
    before = browser.evaluate(axis)
    for kind, at in (("mousePressed", 0.5), ("mouseMoved", 0.7), ("mouseReleased", 0.7)):
        browser.mouse(kind, x + width * at, y + height / 2, pressed=True)
    assert browser.evaluate(axis) != before
    browser.evaluate("document.getElementById('reset').click()")
    assert browser.evaluate(axis) == before
    browser.evaluate("document.querySelector('.plot').focus()")
    key = "document.querySelector('.plot').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    browser.evaluate(key)
    assert browser.evaluate("!document.getElementById('tip').hidden")
    assert browser.messages == []


@pytest.mark.slow
def test_watch_follows_a_run_and_an_open_page_keeps_its_place(tmp_path, browser):
    folder = write_run(tmp_path / "live", steps=5)
    page = tmp_path / "live.html"
    command = [sys.executable, "-m", "report.html_report", str(folder), "-o", str(page), "--watch", "--interval", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(page.exists)
        browser.open(page)
        browser.evaluate("document.querySelector('[data-axis=s]').click()")
        browser.evaluate("window.scrollTo({top: 700, behavior: 'instant'})")
        seen = browser.loads
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 77, "train/masked_loss": 1.0, "stats/tokens": 315392, "stats/tokens_per_second": 1}\n')
        wait_for(lambda: "step 77 of 100" in text_of(page.read_text()))
        # In one expression, since the page may load itself anew between two; null while it does.
        state = (
            "document.readyState === 'complete' ? [document.querySelector('dd').innerText.includes('77'), "
            "window.scrollY, document.querySelector('[data-axis=s]').ariaPressed] : null"
        )
        wait_for(lambda: browser.loads > seen and (browser.evaluate(state) or [False])[0])
        wait_for(lambda: browser.evaluate(state) == [True, 700, "true"])
        assert browser.messages == []
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "Traceback" not in out + err
        assert data_of(page.read_text())["refresh"] == 0  # the last page stays as it is
    finally:
        process.kill()
        process.communicate()


def wait_for(holds: Any, seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this does not come true"
        time.sleep(0.05)


def test_watch_ends_by_itself_with_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "live", steps=5)
    (folder / "status.json").write_text(json.dumps({"state": "finished", "reason": "", "max_steps": 5}))
    assert html_report.main([str(folder), "--watch"]) == 0
    assert "all runs are finished" in capsys.readouterr().out
    assert (folder / "report.html").exists()
    assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
