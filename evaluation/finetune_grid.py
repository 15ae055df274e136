"""The results of a grid of fine-tuning jobs as one: of each task the rate that was best held out, over all seeds.

    python evaluation/finetune_grid.py grid_*.json --output glue.json

Each file is what evaluation/finetune.py --output wrote for some tasks, with one rate and some seeds. The validation
file decides nothing: of each task's rates the one with the highest mean held-out score over its jobs counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import json_object
from data.cli import Parser
from evaluation.finetune import over_seeds, save, table
from evaluation.generation import UsageError, run

_ABOUT = ("model", "ema")  # which have to be the same in all files


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="results of evaluation/finetune.py")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the joined results there")
    return run(collect, parser.parse_args(arguments))


def collect(options: argparse.Namespace) -> None:
    """Print the table of all tasks, and write what --output asks for."""
    found: dict[str, dict[float, list[dict[str, Any]]]] = {}
    about: dict[str, Any] = {}
    for path in options.files:
        content = json_object(path)
        if not isinstance(content.get("tasks"), dict) or not content["tasks"]:
            raise UsageError(f"{path}: holds no results of evaluation/finetune.py (its --output).")
        of = {name: content.get(name) for name in _ABOUT}
        if (about := about or of) != of:
            raise UsageError(f"{path}: is of model {of['model']} (ema {of['ema']}), and the first of {about['model']}.")
        for name, entry in content["tasks"].items():
            entries = found.setdefault(name, {}).setdefault(entry["learning_rate"], [])
            if repeated := {seed for other in entries for seed in other["seeds"]} & set(entry["seeds"]):
                raise UsageError(
                    f"{path}: task {name} with rate {entry['learning_rate']:g} and seed {min(repeated)} is there twice."
                )
            entries.append(entry)
    tasks = {name: joined(by_rate) for name, by_rate in sorted(found.items())}
    report = {**about, "tasks": tasks, "average": statistics.fmean(entry["score"] for entry in tasks.values())}
    if options.output:
        save(options.output, report)
    print(table(report))


def joined(by_rate: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    """One task's entry over the seeds of the rate whose mean held-out score is the highest."""
    means = {rate: statistics.fmean(of["held_out_score"] for of in entries) for rate, entries in by_rate.items()}
    best = max(means, key=lambda rate: means[rate])
    entries = by_rate[best]
    names = entries[0]["measures"]
    values = {name: [value for of in entries for value in of["measures"][name]["values"]] for name in names}
    return {
        **entries[0],
        "score": statistics.fmean(values[entries[0]["metric"]]),
        "measures": {name: over_seeds(of) for name, of in values.items()},
        "seeds": [seed for of in entries for seed in of["seeds"]],
        "epochs": statistics.median(of["epochs"] for of in entries),
        "held_out_score": means[best],
        "held_out_by_rate": {f"{rate:g}": mean for rate, mean in means.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
