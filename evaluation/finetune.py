"""Fine-tuning of a pretrained model: labels of texts and of words, SuperGLUE's forms, and sentence embeddings.

    python evaluation/finetune.py MODEL --tasks FOLDER --output glue.json
    python evaluation/finetune.py MODEL --train cola.train.jsonl --valid cola.valid.jsonl

FOLDER holds NAME/train.jsonl and NAME/valid.jsonl, or NAME.train.jsonl and so on: a JSON object a line, with `sentence`
or `sentence1` and `sentence2` (or other fields that GLUE and SuperGLUE use) and `label`; `tokens` and `tags` (or .conll
files) for labels of words; `anchor`, `positive` and maybe `negative` for embeddings. NAME/task.json may set what cannot
be seen from them; NAME/test.jsonl is what --predictions answers. Learning rate and number of epochs are chosen on a
part of train that is held out; then the model is trained on all of train with each seed, to report on the validation
file.
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
from data.wording import aligned
from evaluation.finetune_data import read_task
from evaluation.finetune_forms import Outputs, task_measures
from evaluation.finetune_predictions import write_predictions
from evaluation.finetune_progress import Progress
from evaluation.finetune_task import CHOICES, EMBEDDINGS, TAGS, Task, find_tasks, sibling
from evaluation.finetune_training import Finetuner, Settings
from evaluation.generation import UsageError, add_model_flags, check, load, run
from model import LTGBert
from training.forward_backward import compile_layers


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run(finetune, parse_arguments(arguments))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_flags(parser)

    def add(flag: str, default: Any, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, type=type(default), default=default, metavar=metavar, help=text, **more)

    parser.add_argument("--tasks", type=Path, metavar="FOLDER", help="folder of tasks")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of --tasks only these (default: all)")
    parser.add_argument("--train", type=Path, metavar="FILE", help="one task: what to learn from, JSONL")
    parser.add_argument("--valid", type=Path, metavar="FILE", help="one task: what to report on, JSONL")
    parser.add_argument("--test", type=Path, metavar="FILE", help="one task: what --predictions answers, JSONL")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write everything there, task by task")
    parser.add_argument(
        "--progress", type=Path, metavar="FOLDER",
        help="keep there what is done, to go on from it when the same command starts again; removed in the end",
    )  # fmt: skip
    parser.add_argument(
        "--predictions", type=Path, metavar="FOLDER",
        help="write the first seed's answers to each task's test file there, in the form of its test server",
    )  # fmt: skip
    parser.add_argument(
        "--learning_rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4], metavar="X",
        help="candidates for the peak learning rate of AdamW (default: 3e-5 1e-4 3e-4)",
    )  # fmt: skip
    add("--epochs", 10, "N", "the schedule is N epochs long; training stops after the best one")
    add("--batch_size", 32, "N", "examples per step")
    add("--max_length", 512, "N", "tokens of an example; longer ones are cut")
    add("--num_seeds", 3, "N", "final trainings, for mean and deviation")
    add("--selection_seeds", 1, "N", "trainings per learning rate for the choice of settings")
    add("--seed", 0, "N", "first seed")
    add("--held_out", 0.1, "X", "fraction of train on which settings are chosen")
    add("--patience", 0, "N", "while choosing, end after N epochs without a better score (default: 0, never)")
    parser.add_argument(
        "--class_weights", choices=("none", "balanced"), default="none",
        help="balanced: each class has the same weight in the loss, however rare (default: none, or as task.json says)",
    )  # fmt: skip
    add("--weight_decay", 0.01, "X", "of AdamW")
    add("--warmup_proportion", 0.06, "X", "fraction of the schedule with a rising learning rate")
    add("--max_gradient", 1.0, "X", "norm to which gradients are clipped")
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
    if options.progress and options.predictions:
        raise UsageError("--progress keeps results and no models, which --predictions needs: give one of them.")
    for task in tasks if options.predictions else ():
        if task.test is None:
            say(f"{task.name}: has no test file, so --predictions leaves it out")
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
    if options.progress:
        sizes = {task.name: [len(task.train), len(task.valid), *task.classes] for task in tasks}
        about = {name: report[name] for name in ("model", "ema", "settings")}
        finetuner.progress = Progress(options.progress, {**about, "tasks": sizes})
    for task in tasks:
        report["tasks"][task.name] = run_task(finetuner, task, options.predictions)
        report["average"] = statistics.fmean(found["score"] for found in report["tasks"].values())
        if options.output:
            save(options.output, report)
    if finetuner.progress is not None:
        finetuner.progress.remove()
    print(table(report))


def make_settings(options: argparse.Namespace) -> Settings:
    """Settings from flags. Raises UsageError, naming the flag, for values out of range."""
    check(options, "epochs batch_size num_seeds selection_seeds", lambda n: n >= 1, "give 1 or more")
    check(options, "patience", lambda n: n >= 0, "give a number of epochs, or 0 to never end early")
    check(options, "seed", lambda n: 0 <= n < 2**31, f"give a number from 0 to {2**31 - 1}")
    check(options, "max_length", lambda n: n >= 8, "give 8 tokens or more")
    check(options, "held_out", lambda x: 0 < x <= 0.5, "give a fraction above 0 and up to 0.5")
    check(options, "warmup_proportion", lambda x: 0 <= x < 1, "give a fraction from 0 to below 1")
    check(options, "weight_decay", lambda x: 0 <= x < math.inf, "give 0 or more")
    check(options, "max_gradient", lambda x: x > 0, "give a number above 0 (inf: no clipping)")
    for rate in options.learning_rates:
        if not 0 < rate <= 1:
            raise UsageError(f"--learning_rates has {rate:g}: give numbers above 0 and up to 1, such as 3e-5.")
    return Settings(
        tuple(dict.fromkeys(options.learning_rates)), options.epochs, options.batch_size, options.max_length,
        options.num_seeds, options.selection_seeds, options.seed, options.held_out, options.weight_decay,
        options.warmup_proportion, options.max_gradient, options.mixed_precision, options.patience,
    )  # fmt: skip


def read_tasks(options: argparse.Namespace) -> list[Task]:
    """The tasks that flags name, all read and checked. Raises UsageError."""
    if (options.tasks is None) == (options.train is None and options.valid is None):
        raise UsageError("there is no task, or too much: give either --tasks FOLDER, or --train FILE and --valid FILE.")
    if options.tasks is None:
        if options.train is None or options.valid is None:
            raise UsageError("one of --train and --valid is missing: give both.")
        name = options.train.parent.resolve().name if options.train.stem == "train" else options.train.stem
        settings = sibling(options.train, "task", ".json")
        test = options.test if options.predictions else None
        tasks = [read_task(name.removesuffix(".train"), options.train, options.valid, settings, test)]
    else:
        found = find_tasks(options.tasks)
        known = [name for name, *_ in found]
        for name in options.only:
            if name not in known:
                raise UsageError(f"--only names {name}: the tasks in {options.tasks} are {', '.join(known)}.")
        tasks = []
        for name, train, valid in found:
            if not options.only or name in options.only:
                test = sibling(train, "test") if options.predictions and sibling(train, "test").is_file() else None
                tasks.append(read_task(name, train, valid, sibling(train, "task", ".json"), test))
    return [task.balanced() for task in tasks] if options.class_weights == "balanced" else tasks


def run_task(finetuner: Finetuner, task: Task, predictions: Path | None = None) -> dict[str, Any]:
    """Choose settings on train, train with each seed, and measure the validation file. Reports on standard error.
    predictions: the folder that gets the first seed's answers to the test file."""
    settings, started = finetuner.settings, time.monotonic()
    train, valid = (finetuner.encode(part, task) for part in (task.train, task.valid))
    if train.cut or valid.cut:
        how = "are read in parts" if task.form == TAGS else "are cut"
        say(f"{task.name}: {train.cut} + {valid.cut} rows are longer than {settings.max_length} tokens and {how}")
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
        if predictions and task.test is not None and seed == settings.seed:
            test = finetuner.encode(task.test, task)
            files = write_predictions(predictions, task, finetuner.predict(finetuner.model, test), test)
            say(f"{task.name}: {', '.join(map(str, files))}")
        say(f"{task.name}: seed {seed}: {task.metric} {100 * last[0][task.metric]:.1f} on the validation file")
    columns = {name: [one[name] for one in found] for name in found[0]}
    return {
        "metric": task.metric,
        "score": statistics.fmean(columns[task.metric]),
        "measures": {name: over_seeds(values) for name, values in columns.items()},
        "form": task.form,
        "simplest": simplest(finetuner, task),
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


def simplest(finetuner: Finetuner, task: Task) -> float | None:
    """The task's measure of an answer that is always the most frequent label of train (regression: a constant, 0). None
    for embeddings, of which there is no such answer."""
    if task.form == EMBEDDINGS:
        return None
    if not task.classes:
        return 0.0
    flat = np.concatenate(list(task.train.labels)) if task.form == TAGS else task.train.labels
    always = np.eye(len(task.classes))[np.bincount(flat).argmax()]
    valid = finetuner.encode(task.valid, task)
    if task.form == CHOICES:
        outputs: Outputs = [always[:, None]] * len(valid)
    else:
        outputs = [np.tile(always, (len(row), 1)) if task.form == TAGS else always for row in valid.rows]
    return task_measures(task, outputs, valid, task.valid)[task.metric]


def over_seeds(values: list[float]) -> dict[str, Any]:
    """A measure's values with their mean and standard deviation, None of a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": values}


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
            "-" if found["simplest"] is None else f"{100 * found['simplest']:.1f}", f"{100 * main_measure['mean']:.1f}",
            "-" if main_measure["deviation"] is None else f"{100 * main_measure['deviation']:.1f}",
            ", ".join(also), f"{found['learning_rate']:g}", str(found["epochs"]),
            f"{100 * found['held_out_score']:.1f}",
        ])  # fmt: skip
    if len(report["tasks"]) > 1:
        rows.append(["average", "", "", "", "", f"{100 * report['average']:.1f}", "", "", "", "", ""])
    lines = aligned(rows, left=(0, 3, 7))  # columns of words
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
