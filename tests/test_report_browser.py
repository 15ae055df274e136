"""The report page in a real browser: no errors, no requests, pointer and keys, and following a run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.browser import Browser, CannotRun
from helpers.report_pages import data_of, page_of, text_of, write_run
from helpers.tiny_runs import ROOT


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
def test_page_has_no_errors_requests_or_sideways_scrolling(tmp_path, browser, count, width, scheme):
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


def box_of(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of an element that was scrolled into view."""
    found = browser.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center', "
        "behavior: 'instant'}); const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
    )
    return tuple(found)


def test_page_answers_pointer_keys_and_controls(tmp_path, browser):
    page_of(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", shift=0.5))
    browser.open(tmp_path / "out.html")
    x, y, width, height = box_of(browser, "[data-chart=masked_loss] .plot")
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
def test_watch_follows_a_run_and_an_open_page_keeps_its_scroll_position(tmp_path, browser):
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
