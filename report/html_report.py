"""One or several runs as one HTML page that needs no network: losses, scores, schedules, speed, restarts, samples.

    python report/html_report.py RUN... [-o report.html] [--watch]
    python report/html_report.py RUN... --group [--by learning_rate] [--baseline NAME] [--results FOLDER...]

RUN is a run folder or a metrics.jsonl file, finished or still training. With --watch the page is written anew as
metrics arrive, and an open page follows. With --group runs that differ in seeds alone are taken together: means,
errors, significance, scores by settings. JSON files that evaluation/ has written into a run folder (or its
evaluation/), and those of --results, are shown with their intervals; of several checkpoints as curves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import write_atomically
from data.cli import Parser, run_command
from data.results import given_results, read_results
from report.group_page import group_page
from report.metrics import ReportError, default_output, folder_of, load_metrics
from report.page import page
from report.plot import draw
from report.runs import Run, read_runs
from training.status import SAMPLES

if TYPE_CHECKING:
    from training.metric_logger import MetricLogger

_WATCHED = ("metrics.jsonl", "status.json", "config.json", "attempts.jsonl", SAMPLES)
_LARGEST_FRACTION = 0.1  # of the time that --watch spends writing pages


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 written, 2 with one sentence on stderr where nothing could be)."""
    parser = Parser(
        prog="report/html_report.py",
        description="Show one or several runs as one HTML page that needs no network.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder or a metrics.jsonl file; several are compared"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.html",
        help="where to write the page (default: RUN/report.html for one run, report.html here for several)",
    )  # fmt: skip
    parser.add_argument(
        "--group", action="store_true",
        help="take runs that differ in nothing but seeds together: means, errors, significance, scores by settings",
    )  # fmt: skip
    parser.add_argument(
        "--by", nargs="+", default=[], metavar="SETTING",
        help="with --group: flags (or model.KEY) that groups differ in (default: all settings that differ)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", default="", metavar="NAME",
        help="with --group: a run of what to compare with (default: the first)",
    )  # fmt: skip
    parser.add_argument(
        "--results", nargs="+", default=[], metavar="PATH",
        help="more results of evaluation/ (babylm.py --output FOLDER, finetune.py --output FILE) of these runs",
    )  # fmt: skip
    parser.add_argument(
        "--watch", action="store_true",
        help="write the page anew as metrics arrive, until all runs are finished or Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=float, default=10.0, metavar="SECONDS",
        help="with --watch: least time between two pages (default: 10)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    return run_command(lambda: make(options), ReportError, OSError)


def make(options: argparse.Namespace) -> None:
    """Write the page that the flags ask for. Raises ReportError and OSError."""
    output = default_output(options.output, options.runs, "report.html")
    check(options, output)
    if options.watch:
        watch(options.runs, output, options.interval)
    else:
        runs = read_runs(options.runs, results_at(options.results))
        write(runs, output, content=group_page(runs, options.by, options.baseline) if options.group else "")
        print(output)


def check(options: argparse.Namespace, output: Path) -> None:
    """Refuse what cannot work before anything is read. Raises ReportError."""
    if output.is_dir():
        raise ReportError(f"--output {output} is a folder: name a file in it, such as {output / 'report.html'}.")
    if not output.parent.is_dir():
        raise ReportError(f"--output {output}: there is no folder {output.parent}; make it first.")
    if (options.by or options.baseline) and not options.group:
        raise ReportError("--by and --baseline are about groups: give --group, too.")
    if (options.group or options.results) and options.watch:
        flag = "--group" if options.group else "--results"
        raise ReportError(f"{flag} and --watch do not go together: leave one of them out.")
    if not options.interval > 0:
        raise ReportError(f"--interval is {options.interval:g}: give a number of seconds above 0.")


def results_at(paths: Sequence[str]) -> list[Path]:
    """The files that --results names, those of folders included. Raises ReportError where there is none."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = [file for file in given_results(path) if path.is_file() or read_results(file)]
        if not path.exists() or not files:
            raise ReportError(f"--results {path}: there is no file of results, as evaluation/ writes with --output.")
        found += files
    return found


def write(runs: list[Run], output: Path, refresh: float = 0.0, content: str = "") -> None:
    """Write the page of runs, or another of them, which appears complete or not at all. Raises OSError."""
    for gap in (gap for run in runs for gap in run.metrics.gaps):
        print(gap, file=sys.stderr)
    content = content or page(runs, refresh)
    write_atomically(output, content.encode(errors="replace"))  # half a surrogate pair is no text


def publish_report(folder: Path, log: MetricLogger, step: int) -> None:
    """Write a finished run's report.html, and give it and its figures to wandb; what fails is only told."""
    page_file, picture = folder / "report.html", folder / "metrics.png"
    try:
        write(read_runs([str(folder)]), page_file)
        log.say(f"report: {page_file}")
        if log.takes_media:
            with suppress(ReportError):  # matplotlib is optional
                draw([load_metrics(folder)], picture)
            files = {"report": page_file, "figures/metrics": picture}
            log.log_media({key: file for key, file in files.items() if file.exists()}, step)
    except Exception as error:  # the run is complete and saved: nothing here may turn it into a failure
        log.say(f"note: no report was written ({type(error).__name__}: {error}); report/html_report.py can")


def watch(runs: list[str], output: Path, interval: float) -> None:
    """Keep the page up to date until every run is finished, or Ctrl-C; the last page no longer reloads itself."""
    print(f"{output} follows {', '.join(runs)}; Ctrl-C ends", flush=True)
    seen, took = None, 0.0
    try:
        while True:
            now = _file_versions(runs)
            if now != seen:
                began = time.monotonic()
                found = _read_when_ready(runs)
                if found and all(run.state == "finished" for run in found):
                    write(found, output)
                    print(f"{output}: all runs are finished", flush=True)
                    return
                if found:
                    write(found, output, refresh=interval)
                    seen = now
                took = time.monotonic() - began
            time.sleep(max(interval, took / _LARGEST_FRACTION))
    except KeyboardInterrupt:
        if seen is not None:
            write(read_runs(runs), output)
        print(f"\n{output}", file=sys.stderr)


def _file_versions(runs: list[str]) -> dict[Path, tuple[int, int, int]]:
    """Inode, size and time of every file that is watched, if it is there."""
    found = {}
    for path in (folder_of(run) / name for run in runs for name in _WATCHED):
        with suppress(OSError):
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _read_when_ready(runs: list[str]) -> list[Run]:
    """The runs; [] while one that exists has no metrics yet. Raises ReportError for what is no run."""
    for run in runs:
        if not Path(run).exists():
            raise ReportError(f"{run} is no run: name a folder with a metrics.jsonl file in it, or such a file.")
    try:
        return read_runs(runs)
    except ReportError:
        return []


if __name__ == "__main__":
    sys.exit(main())
