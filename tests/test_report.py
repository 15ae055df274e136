"""The report page: what it shows of run folders, in whatever state their files are."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.report_pages import MODES, NASTY, babylm_results, data_of, page_of, text_of, write_run
from helpers.tiny_runs import ROOT

from report import demo_page, html_report
from report.charts import sections
from report.page import figures
from report.runs import Start, downsample, pairs_in_files, read_runs, training_hours
from slurm.snapshot import code_files


def test_page_shows_everything_that_the_folder_knows(tmp_path):
    text = text_of(page_of(tmp_path, write_run(tmp_path / "first")))
    for told in (
        "first running", "40 % – step 40 of 100", "Masked validation loss 4.000", "EMA 4.000", "Tokens 164k",
        "1.6 × the corpus", "Speed 8.19k", "1.2 GiB", "8 × NVIDIA H200", "15/16 of rows masked", "LAMB",
        "rank 3 on node1: the GPU is gone", "77 (restart 1)", "--learning_rate", "0123456789ab",
        "with uncommitted changes", "2.13.0", "Minimal pairs, fused 90.0 %", "agreement 90.0 90.0 90.0",
        "The cat sat & ran", "in the text: slept", "dog 50.0 %", "in the text: cat", "100,000 tokens in 10 documents",
    ):  # fmt: skip
        assert told in text, told


def test_page_is_self_contained_and_escapes_html(tmp_path):
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


def test_charts_and_figures_know_any_objective(tmp_path):
    """Whatever has a loss in metrics.jsonl, without a list of names; z_loss is none."""
    folder = write_run(tmp_path / "first")
    with (folder / "metrics.jsonl").open("a") as file:
        for key, value in (
            ("train/span_loss", 2.5), ("train/span_accuracy", 0.5), ("valid/ema_span_loss", 2.25),
            ("valid/ema-0.999_masked_loss", 3.5), ("valid/ema-tail_masked_loss", 3.25),
        ):  # fmt: skip
            file.write(json.dumps({"step": 40, key: value}) + "\n")
    page = page_of(tmp_path, folder)
    charts = {chart["id"]: chart for chart in data_of(page)["charts"]}
    assert {line["kind"]: line["y"] for line in charts["span_loss"]["lines"]} == {
        "raw": [2.5], "smooth": [2.5], "ema": [2.25],
    }  # fmt: skip
    further = {line["label"]: (line["y"], line["dash"]) for line in charts["masked_loss"]["lines"] if "dash" in line}
    assert further == {"validation, average 0.999": ([3.5], 1), "validation, average tail": ([3.25], 2)}
    assert "further averages: 0.999 (long dashes), tail (dots)" in text_of(page)
    colours = {
        name: {line["colour"] for line in charts[f"{name}_loss"]["lines"]} for name in ("masked", "causal", "span")
    }
    assert len(set.union(*colours.values())) == 3
    assert charts["span_accuracy"]["title"] == "Span accuracy"
    assert "Span training loss 2.500" in text_of(page)
    assert "Z training loss" not in text_of(page)


def test_configuration_of_several_runs_shows_what_differs(tmp_path):
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


def test_page_needs_metrics_alone_and_no_undamaged_file(tmp_path):
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
def test_page_is_written_whatever_the_files_hold(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)
    accuracy = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": accuracy, "all": accuracy, "groups": {}, "paradigms": {"x": accuracy}}}
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


def test_best_loss_is_marked_on_the_same_data_only(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", shift=0.5)]
    others = {"identity": "cd" * 32, "held_out_identity": "ef" * 32}
    for data in ({}, others, {**others, "identity": "ab" * 32}):
        config = json.loads((runs[1] / "config.json").read_text())
        (runs[1] / "config.json").write_text(json.dumps({**config, "data": data}))
        page = page_of(tmp_path, *runs)
        assert "<b>4.000</b>" not in page
        assert "are not known to use the same data for Masked validation loss" in text_of(page)
    for folder, identity in zip(runs, ("12", "34"), strict=True):  # other corpora, one held-out set
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "data": {**others, "identity": identity}}))
    assert "<b>4.000</b>" in page_of(tmp_path, *runs)


def test_page_assets_are_in_the_snapshot_of_a_job():
    """slurm/launch.py copies code by its suffix; a finished run of the job writes its report."""
    assert {Path("report/assets") / name for name in ("page.css", "page.js")} <= set(code_files(ROOT))


def test_pair_scores_are_read_from_result_files(tmp_path):
    accuracy = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": accuracy, "all": accuracy, "groups": {"linguistics_term": {"binding": accuracy}},
                        "paradigms": {"x": accuracy}}}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps({"sets": {"blimp": {"pairs": 100, "modes": modes}}}))
    (tmp_path / "other.json").write_text('{"sets": ["a"]}')
    assert pairs_in_files(tmp_path) == {("causal", "blimp"): 0.75, ("causal", "blimp/binding"): 0.75}


def test_results_of_the_evaluations_are_shown_with_intervals(tmp_path, capsys):
    """BabyLM's of two checkpoints and of the run, fine-tuning in another folder; of a group with their spread."""
    runs = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    for number, run in enumerate(runs):
        config = json.loads((run / "config.json").read_text())
        config["flags"]["seed"] = number
        (run / "config.json").write_text(json.dumps(config))
        of = {"chck_1M": 0.25, "chck_2M": 0.375, "chck_9M": 0.125, "main": 0.5 + number / 10}
        for step, name in ((10, "chck_1M"), (30, "chck_2M")):
            (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            (run / "checkpoints" / name).symlink_to(f"step_{step:08d}")
        for name, value in of.items():  # the checkpoint chck_9M is gone
            file = run / "evaluation" / name / "zero_shot" / "results.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(babylm_results(run if name == "main" else run / "checkpoints" / name, value)))
        rte = {"mean": 0.625, "deviation": 0.02, "values": [0.6, 0.625, 0.65]}
        tasks = {"rte": {"measures": {"accuracy": rte}, "valid_examples": 277}}
        (tmp_path / f"glue_{number}.json").write_text(json.dumps({"model": f"elsewhere/{run.name}", "tasks": tasks}))
    read = read_runs([str(runs[0])])[0]
    assert read.pairs["causal", "blimp_filtered"] == 0.5
    assert read.intervals["causal", "blimp_filtered"] == (0.375, 0.625)
    assert read.metrics.series["eval/causal/blimp_filtered"] == {10: 0.25, 30: 0.375}
    page, glue = tmp_path / "x.html", [str(tmp_path / f"glue_{number}.json") for number in range(3)]
    assert html_report.main([str(runs[0]), "--results", glue[0], "-o", str(page)]) == 0
    text = text_of(page.read_text())
    assert "blimp filtered 50.0 [37.5, 62.5]" in text
    assert "wug past – -50.0 [-75.0, 0.0]" in text
    assert "rte, accuracy 62.5 ± 2.0 over 3 seeds" in text
    chart = next(each for each in data_of(page.read_text())["charts"] if each["title"] == "blimp filtered")
    assert chart["lines"][0]["s"] == [10, 30]
    assert html_report.main([*map(str, runs), "--group", "--results", *glue, "-o", str(page)]) == 0
    text = text_of(page.read_text())
    assert "3 runs in 1 group" in text
    assert "blimp_filtered, causal (%) 60.0 ± 5.77" in text
    assert "rte, accuracy (%) 62.5 ± 0.00" in text
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "other.json").write_text(json.dumps(babylm_results("d", 0.5)))
    for given, words in (("none.json", "holds no results"), ("other.json", "is of model d, which is none of these"),
                         ("nothing", "there is no file of results")):  # fmt: skip
        assert html_report.main([*map(str, runs), "--results", str(tmp_path / given), "-o", str(page)]) == 2
        assert words in capsys.readouterr().err


def test_pair_scores_of_result_files_alone_are_shown(tmp_path):
    """As README advises: a run that scored no pairs while it trained, and a result file in its folder."""
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for folder in runs:
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval/" not in line]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    accuracy = {"accuracy": 0.75, "low": 0.7, "high": 0.8, "pairs": 100}
    modes = {"causal": {"mean": accuracy, "all": accuracy, "groups": {}, "paradigms": {"x": accuracy}}}
    (runs[0] / "pairs.json").write_text(json.dumps({"sets": {"blimp": {"pairs": 100, "modes": modes}}}))
    for shown in (runs[:1], runs):
        page = page_of(tmp_path, *shown)
        assert "Minimal pairs, causal 75.0 %" in text_of(page)
        assert not [chart for chart in data_of(page)["charts"] if chart["id"].startswith("pairs_")]


def test_downsampling_keeps_extremes():
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


def test_training_time_leaves_out_validation_and_saving(tmp_path):
    (run,) = read_runs([str(write_run(tmp_path / "a"))])
    assert training_hours(run.metrics)[40] == pytest.approx(40 * 4096 / 8192 / 3600)
    assert sections([run])["schedules"]
    started = [Start("2026-11-22T10:00:00+00:00", "host", "", "", 0), Start("2026-11-22T10:00:15+00:00", "", "", "", 9)]
    status = {"state": "stopped", "time": "2026-11-22T10:00:40+00:00"}
    assert replace(run, starts=started, status=status).useful == pytest.approx(20 / 40)
    assert replace(run, starts=started, status={"state": "stopped"}).useful is None
    times = {"ranks/slowest": 5.0, "ranks/compute_seconds_median": 0.2, "ranks/compute_seconds_max": 0.25}
    run.metrics.series.update({name: {40: value} for name, value in times.items()})
    assert list(figures(run).items())[-1] == ("Slowest rank", ("5", "computes 25.0 % longer than the median"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "none is no run"),
        (["run", "-o", "away/x.html"], "there is no folder away"),
        (["run", "-o", "run"], "--output run is a folder"),
        (["run", "--watch", "--interval", "0"], "--interval is 0"),
    ],
)
def test_refusals_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    assert html_report.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(sentence, error)
    assert not list(tmp_path.glob("**/*.html"))


def test_watch_ends_by_itself_with_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "live", steps=5)
    (folder / "status.json").write_text(json.dumps({"state": "finished", "reason": "", "max_steps": 5}))
    assert html_report.main([str(folder), "--watch"]) == 0
    assert "all runs are finished" in capsys.readouterr().out
    assert (folder / "report.html").exists()
    assert not [name for name in os.listdir(folder) if name.endswith(".partial")]


def test_demo_page_says_where_the_first_run_is_ahead_level_and_behind(tmp_path, capsys):
    """By the accuracies in the runs' files, from those of untrained weights on; samples and pairs are shown."""
    runs = [write_run(tmp_path / name) for name in ("hybrid", "masked")]
    scores = {
        "hybrid": {"masked": 0.9, "causal": 0.8, "fused": 0.99},
        "masked": {"masked": 0.91, "causal": 0.6, "fused": 1},
    }
    for run in runs:
        line = {"step": 41, **{f"eval/{mode}/blimp": value for mode, value in scores[run.name].items()}}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 42, "eval/fused/blimp": 0.9}) + "\n")
    (tmp_path / "pairs").mkdir()
    pair = {"sentence_good": "It <b>sleeps.", "sentence_bad": "It sleep.", "held_out": "it sleep"}
    (tmp_path / "pairs" / "agreement.jsonl").write_text(json.dumps(pair) + "\n")
    before = {"mean": {"accuracy": 0.5}, "groups": {}, "paradigms": {}}
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "scores.json").write_text(
        json.dumps({"sets": {"blimp": {"modes": dict.fromkeys(("masked", "causal", "fused"), before)}}})
    )
    flags = ["--pairs", str(tmp_path / "pairs"), "--before", str(tmp_path / "before"), "-o", str(tmp_path / "x.html")]
    assert demo_page.main([*map(str, runs), *flags]) == 0
    told, shown = capsys.readouterr().out, text_of((tmp_path / "x.html").read_text())
    verdict = (
        "hybrid is ahead in causal (80.0 against 60.0 of masked); it is level with the best in masked (90.0 against "
        "91.0 of masked); it is behind in fused (90.0 against 100.0 of masked). Of held-out losses: hybrid is level "
        "with the best in masked (4.000 against 4.000 of masked), causal (4.000 against 4.000 of masked)."
    )
    for text in (" ".join(told.split()), shown):
        assert verdict in text
    assert "before training 50.0 50.0 50.0" in " ".join(told.split())
    assert "It <b>sleeps. It sleep. it sleep" in shown
    lines = data_of((tmp_path / "x.html").read_text())["charts"][1]["lines"]
    assert [line["y"][0] for line in lines] == [0.5, 0.5]
    assert demo_page.main([str(tmp_path / "none"), "-o", str(tmp_path / "y.html")]) == 2
