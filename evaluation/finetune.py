"""Fine-tuning of a pretrained model on classification and regression tasks, in the manner of GLUE.

    python evaluation/finetune.py MODEL --tasks FOLDER --output glue.json
    python evaluation/finetune.py MODEL --train cola.train.jsonl --valid cola.valid.jsonl

FOLDER holds NAME/train.jsonl and NAME/valid.jsonl, or NAME.train.jsonl and NAME.valid.jsonl, for each task: a JSON
object a line, with `sentence` or `sentence1` and `sentence2` (or other fields that GLUE uses) and `label`. A file
NAME/task.json (or NAME.task.json) may set "texts", "label", "kind", "metric", "labels" and "positive".

Learning rate and number of epochs are chosen on a part of train that is held out for this; then the model is trained on
all of train with each seed, and the validation file is used once for each, to report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from data.atomic_io import write_atomically
from data.cli import Parser
from evaluation.finetune_data import Task, find_tasks, read_task
from evaluation.finetune_metrics import measures
from evaluation.finetune_training import Finetuner, Settings
from evaluation.generation import UsageError, add_model_flags, load, run
from model import LTGBert
from training.forward_backward import compile_layers


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run(finetune, parse_arguments(arguments))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("Fine-tune a pretrained model on classification and regression tasks, in the manner of GLUE.")
    add_model_flags(parser)

    def add(flag: str, default: Any, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, type=type(default), default=default, metavar=metavar, help=text, **more)

    parser.add_argument("--tasks", type=Path, metavar="FOLDER", help="folder of tasks")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of --tasks only these (default: all)")
    parser.add_argument("--train", type=Path, metavar="FILE", help="one task: what to learn from, JSONL")
    parser.add_argument("--valid", type=Path, metavar="FILE", help="one task: what to report on, JSONL")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write everything there, task by task")
    parser.add_argument(
        "--learning_rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4], metavar="X",
        help="candidates for the peak learning rate of AdamW (default: 3e-5 1e-4 3e-4)",
    )  # fmt: skip
    add("--epochs", 10, "N", "the schedule is N epochs long; training stops after the best one (default: 10)")
    add("--batch_size", 32, "N", "examples per step (default: 32)")
    add("--max_length", 512, "N", "tokens of an example; longer ones are cut (default: 512)")
    add("--num_seeds", 3, "N", "final trainings, for mean and deviation (default: 3)")
    add("--selection_seeds", 1, "N", "trainings per learning rate for the choice of settings (default: 1)")
    add("--seed", 0, "N", "first seed (default: 0)")
    add("--held_out", 0.1, "X", "fraction of train on which settings are chosen (default: 0.1)")
    add("--weight_decay", 0.01, "X", "of AdamW (default: 0.01)")
    add("--warmup_proportion", 0.06, "X", "fraction of the schedule with a rising learning rate (default: 0.06)")
    add("--max_gradient", 1.0, "X", "norm to which gradients are clipped (default: 1.0)")
    parser.add_argument(
        "--mixed_precision", action=argparse.BooleanOptionalAction, default=True,
        help="bf16 autocast, on CUDA alone (default: on); with relative positions it also selects the fused kernels",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=False,
        help="torch.compile the layers: worth its minute of waiting for large tasks (default: off)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def finetune(options: argparse.Namespace) -> None:
    """Check everything, then fine-tune on every task, write the JSON file after each, and print a table."""
    settings = make_settings(options)
    tasks = read_tasks(options)
    if options.output and not options.output.resolve().parent.is_dir():
        raise UsageError(f"--output is {options.output}: there is no folder {options.output.parent}.")
    if options.output and options.output.is_dir():
        raise UsageError(
            f"--output is {options.output}: it is a folder; give a file such as {options.output}/glue.json."
        )
    loaded = load(options.model, options.ema, options.device)
    encoder = loaded.model
    assert isinstance(encoder, LTGBert)
    if options.compile:
        compile_layers(encoder)
    finetuner = Finetuner(encoder, loaded.tokenizer, settings, loaded.special)
    report: dict[str, Any] = {
        "model": str(options.model),
        "ema": options.ema,
        "device": torch.cuda.get_device_name() if loaded.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": dataclasses.asdict(settings),
        "tasks": {},
    }
    for task in tasks:
        report["tasks"][task.name] = run_task(finetuner, task)
        report["average"] = statistics.fmean(found["score"] for found in report["tasks"].values())
        if options.output:
            save(options.output, report)
    print(table(report))


def make_settings(options: argparse.Namespace) -> Settings:
    """Settings from flags. Raises UsageError, naming the flag, for values out of range."""
    for flag in ("epochs", "batch_size", "num_seeds", "selection_seeds"):
        if getattr(options, flag) < 1:
            raise UsageError(f"--{flag} is {getattr(options, flag)}: give 1 or more.")
    if not 0 <= options.seed < 2**31:
        raise UsageError(f"--seed is {options.seed}: give a number from 0 to {2**31 - 1}.")
    if options.max_length < 8:
        raise UsageError(f"--max_length is {options.max_length}: give 8 tokens or more.")
    for rate in options.learning_rates:
        if not 0 < rate <= 1:
            raise UsageError(f"--learning_rates has {rate:g}: give numbers above 0 and up to 1, such as 3e-5.")
    if not 0 < options.held_out <= 0.5:
        raise UsageError(f"--held_out is {options.held_out:g}: give a fraction above 0 and up to 0.5.")
    if not 0 <= options.warmup_proportion < 1:
        raise UsageError(f"--warmup_proportion is {options.warmup_proportion:g}: give a fraction from 0 to below 1.")
    if not 0 <= options.weight_decay < math.inf:
        raise UsageError(f"--weight_decay is {options.weight_decay:g}: give 0 or more.")
    if not options.max_gradient > 0:
        raise UsageError(f"--max_gradient is {options.max_gradient:g}: give a number above 0 (inf: no clipping).")
    return Settings(
        tuple(dict.fromkeys(options.learning_rates)), options.epochs, options.batch_size, options.max_length,
        options.num_seeds, options.selection_seeds, options.seed, options.held_out, options.weight_decay,
        options.warmup_proportion, options.max_gradient, options.mixed_precision,
    )  # fmt: skip


def read_tasks(options: argparse.Namespace) -> list[Task]:
    """The tasks that flags name, all read and checked. Raises UsageError."""
    if (options.tasks is None) == (options.train is None and options.valid is None):
        raise UsageError("there is no task, or too much: give either --tasks FOLDER, or --train FILE and --valid FILE.")
    if options.tasks is None:
        if options.train is None or options.valid is None:
            raise UsageError("one of --train and --valid is missing: give both.")
        name = options.train.parent.resolve().name if options.train.name == "train.jsonl" else options.train.stem
        return [read_task(name.removesuffix(".train"), options.train, options.valid, task_settings(options.train))]
    found = find_tasks(options.tasks)
    known = [name for name, *_ in found]
    for name in options.only:
        if name not in known:
            raise UsageError(f"--only names {name}: the tasks in {options.tasks} are {', '.join(known)}.")
    return [read_task(*files) for files in found if not options.only or files[0] in options.only]


def task_settings(train: Path) -> Path:
    """Where the settings of a task are, which may not be there: beside train.jsonl or NAME.train.jsonl."""
    return train.with_name(
        train.name.replace("train.jsonl", "task.json") if "train.jsonl" in train.name else "task.json"
    )


def run_task(finetuner: Finetuner, task: Task) -> dict[str, Any]:
    """Choose settings on train, train with each seed, and measure the validation file. Reports on standard error."""
    settings, started = finetuner.settings, time.monotonic()
    train, valid = (finetuner.encode(part) for part in (task.train, task.valid))
    if train.cut or valid.cut:
        say(f"{task.name}: {train.cut} + {valid.cut} examples are longer than {settings.max_length} tokens and are cut")
    choice = finetuner.choose(task, say)
    seeds, found = list(range(settings.seed, settings.seed + settings.num_seeds)), []
    for seed in seeds:
        last = finetuner.train(task, train, valid, choice.learning_rate, choice.epochs, seed, last_only=True)
        if not last:
            raise UsageError(
                f"task {task.name}: training diverges with seed {seed} at learning rate {choice.learning_rate:g}, "
                "which was best on the held-out part; leave it out of --learning_rates."
            )
        found.append(last[0])
        say(f"{task.name}: seed {seed}: {task.metric} {100 * last[0][task.metric]:.1f} on the validation file")
    columns = {name: [one[name] for one in found] for name in found[0]}
    return {
        "metric": task.metric,
        "score": statistics.fmean(columns[task.metric]),
        "measures": {
            name: {"mean": statistics.fmean(v), "deviation": deviation(v), "values": v} for name, v in columns.items()
        },
        "simplest": simplest(task),
        "seeds": seeds,
        "learning_rate": choice.learning_rate,
        "epochs": choice.epochs,
        "held_out_score": choice.score,
        "held_out_scores": [[None if math.isnan(x) else x for x in row] for row in choice.scores],
        "classes": list(task.classes),
        "train_examples": len(task.train),
        "valid_examples": len(task.valid),
        "cut_examples": [train.cut, valid.cut],
        "seconds": round(time.monotonic() - started, 1),
    }


def simplest(task: Task) -> float:
    """The task's measure of an answer that is always the most frequent label of train (regression: a constant, 0)."""
    if not task.classes:
        return 0.0
    outputs = np.zeros((len(task.valid), len(task.classes)))
    outputs[:, np.bincount(task.train.labels).argmax()] = 1
    return measures(outputs, task.valid.labels, len(task.classes), task.positive)[task.metric]


def deviation(values: list[float]) -> float | None:
    """Standard deviation of a sample; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def save(path: Path, report: dict[str, Any]) -> None:
    try:
        write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"--output is {path}: it cannot be written ({error.strerror}).") from None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """A line for each task: measures in percent, mean and deviation over seeds, and the settings that were chosen."""
    rows = [
        ["task", "train", "valid", "measure", "always same", "mean", "deviation", "also", "rate", "epochs", "held out"]
    ]
    for name, found in report["tasks"].items():
        main_measure = found["measures"][found["metric"]]
        also = [f"{k} {100 * v['mean']:.1f}" for k, v in found["measures"].items() if k != found["metric"]]
        rows.append([
            name, f"{found['train_examples']:,}", f"{found['valid_examples']:,}", found["metric"],
            f"{100 * found['simplest']:.1f}", f"{100 * main_measure['mean']:.1f}",
            "-" if main_measure["deviation"] is None else f"{100 * main_measure['deviation']:.1f}",
            ", ".join(also), f"{found['learning_rate']:g}", str(found["epochs"]),
            f"{100 * found['held_out_score']:.1f}",
        ])  # fmt: skip
    if len(report["tasks"]) > 1:
        rows.append(["average", "", "", "", "", f"{100 * report['average']:.1f}", "", "", "", "", ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 3, 7)  # columns of words
    lines = [
        "  ".join(
            c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
