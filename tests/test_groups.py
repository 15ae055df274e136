"""Groups of runs: which belong together, means, errors and significance; the page in a real browser."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import Browser, CannotRun
from helpers.report_pages import text_of, write_run

from report import html_report
from report.groups import group_runs, mean_and_error, scores_of, welch
from report.runs import read_runs

RATES, SEEDS = (0.02, 0.005), (1, 2, 3)


def score(rate: float, seed: int) -> float:
    return 0.7 + rate + seed**2 / 1000


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two rates with three seeds each, on different machines and in different folders, and one other model."""
    output = tmp_path_factory.mktemp("runs")
    found = []
    for number, (rate, seed) in enumerate([*((r, s) for r in RATES for s in SEEDS), (0.005, 9)]):
        folder = write_run(output / f"run{number}")
        config = json.loads((folder / "config.json").read_text())
        config["flags"] |= {"learning_rate": rate, "seed": seed, "local_batch_size": number, "save_every": number}
        config["flags"] |= {"train_path": f"/machine{number}/corpus", "config_file": "/x/base.json"}
        if seed == 9:
            config["flags"]["config_file"] = "/y/large.json"
            config["model"]["hidden_size"] = 768
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "status.json").write_text(json.dumps({"state": "finished" if seed != 2 else "running"}))
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval/" not in line]
        parts = {"": 0.0, "/binding": 0.1, "/islands": -0.3}
        values = {
            f"eval/{mode}/blimp{part}": score(rate, seed) + of for part, of in parts.items() for mode in ("fused",)
        }
        (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 40, **values})]) + "\n")
        found.append(folder)
    return found


def test_runs_are_grouped_by_what_changes_training(runs):
    read = read_runs([str(run) for run in runs])
    groups = group_runs(read)
    assert [group.runs for group in groups] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [group.label for group in groups] == ["0.02 · base.json", "0.005 · base.json", "0.005 · large.json"]
    assert list(groups[0].settings) == ["flags.learning_rate", "flags.config_file"]
    assert [group.runs for group in group_runs(read, ["learning_rate"])] == [(0, 1, 2), (3, 4, 5, 6)]
    assert [group.runs for group in group_runs(read, ["model.hidden_size"])] == [(0, 1, 2, 3, 4, 5), (6,)]
    assert len(group_runs(read[:3])) == 1


def test_scores_means_and_errors(runs):
    scores = {each.name: each for each in scores_of(read_runs([str(run) for run in runs[:6]]))}
    assert list(scores) == ["masked loss, EMA", "causal loss, EMA", "blimp, fused", "binding", "islands"]
    assert scores["binding"].set == ("fused", "blimp")
    values = [scores["blimp, fused"].values[number] for number in range(3)]
    assert values == pytest.approx([score(0.02, seed) for seed in SEEDS])
    mean, error = mean_and_error(values)
    assert (mean, error) == pytest.approx((np.mean(values), np.std(values, ddof=1) / np.sqrt(3)))
    assert mean_and_error([0.5]) == (0.5, None)


def test_welch_p_values_are_those_of_students_distribution():
    # scipy.stats.ttest_ind(..., equal_var=False)
    assert welch([1, 2, 3], [2, 3, 4.5]) == pytest.approx(0.28028685711650725, rel=1e-9)
    assert welch([1, 2, 3, 4], [10, 11, 12, 13]) == pytest.approx(6.2801256e-05, rel=1e-6)
    assert welch([1, 2], [1, 2]) == 1
    assert welch([1, 1], [2, 2]) == 0


def page_of(tmp_path: Path, runs: list[Path], *flags: str) -> str:
    output = tmp_path / "group.html"
    assert html_report.main([*map(str, runs), "--group", *flags, "-o", str(output)]) == 0
    return output.read_text()


def test_page_has_means_significance_settings_and_phenomena(runs, tmp_path, capsys):
    text = text_of(page_of(tmp_path, runs))
    assert "7 runs in 3 groups" in text
    assert "Not finished, shown at their newest step: run1, run4." in text
    first, second = ([100 * score(rate, seed) for seed in SEEDS] for rate in RATES)
    error = statistics.stdev(first) / 3**0.5
    assert f"{statistics.fmean(first):.1f} ± {error:.2f}" in text
    assert f"{statistics.fmean(second):.1f} ± {error:.2f} p {welch(first, second):.2g}" in text
    assert "against 0.02 · base.json, two-sided" in text
    assert "A group of one run has no error." in text
    page = page_of(tmp_path, runs, "--by", "learning_rate", "--baseline", "run3")
    assert "against 0.005, two-sided" in text_of(page)
    assert f'aria-label="0.005: {np.mean([*second, 100 * score(0.005, 9)]):.1f} ±' in page
    assert page.count("<circle") == 3 * 7
    assert "binding" in page
    binding = np.mean(first) / 100 + 0.1  # of a phenomenon, coloured from one half on
    assert f'--hue:var(--masked);--mix:{60 * (binding - 0.5) / 0.5:.0f}%">{100 * binding:.1f}<' in page
    assert "--hue:var(--causal)" in page
    for flags, words in (
        (["--by", "colour"], "--by colour: no run has such a setting"),
        (["--baseline", "x"], "--baseline x is no name of these runs: run0"),
        (["--watch"], "--group and --watch do not go together"),
    ):
        assert html_report.main([*map(str, runs), "--group", *flags, "-o", str(tmp_path / "x.html")]) == 2
        assert words in capsys.readouterr().err
    assert html_report.main([str(runs[0]), "--by", "seed"]) == 2
    assert "give --group, too" in capsys.readouterr().err


def test_page_in_a_browser_light_and_dark_on_a_phone(runs, tmp_path):
    page_of(tmp_path, runs)
    try:
        browser = Browser()
    except CannotRun as error:
        pytest.skip(str(error))  # no Chromium, and no apt or no root to install it; the message says which
    try:
        for width in (390, 1280):
            inks = []
            for scheme in ("light", "dark"):
                browser.open(tmp_path / "group.html", width=width, scheme=scheme)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.evaluate("[...document.querySelectorAll('svg')].every(s => s.getBBox().height > 50)")
                inks.append(browser.evaluate("getComputedStyle(document.querySelector('.heat td span')).color"))
                assert browser.messages == []
                assert browser.requests == [(tmp_path / "group.html").as_uri()]
            assert inks[0] != inks[1]
    finally:
        browser.close()
