r"""Race for the best small hybrid on 10 M words: trains recipes, evaluates what they made, and draws up the table.

    python benchmarks/speedrun/race.py RECIPE... --corpus mix10M/*.train --dev mix10M_dev/*.dev --data race_data \
        --pairs eval_public --seeds 42 43 44 --output race

benchmarks/speedrun/README.md has the rules. Tokenizer and shards are made in --data where they are missing. Each recipe
is trained with each seed, one process a GPU (--per_gpu for more), by train_single_gpu.py, and evaluated by
evaluation/minimal_pairs.py, as a user would do; NAME_SEED.result.json in --output has what came out, and what has been
done is not done again. The table is of all results there, against --baseline: mean, standard error, Welch's t-test;
--plot draws the same, and --results adds committed ones, for which nothing needs to run:

    python benchmarks/speedrun/race.py --results benchmarks/results/2026-11-22_h200_race_ten_epochs.json --plot race.png
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from benchmarks.study import draw
from benchmarks.timing import environment
from data.cli import Parser
from data.shards import read_manifest
from report.groups import mean_and_error, welch
from training.metric_logger import read_metrics

_ROOT = Path(__file__).resolve().parent.parent.parent
_VOCABULARY = 8192
_SETS = ("blimp_fast", "supplement_fast")
_MODES = ("masked", "causal", "fused")
COLUMNS = ("dev masked", "dev causal", *(f"{name} {mode}" for name in _SETS for mode in _MODES), "M tokens", "seconds")


def _python(*arguments: object, log: Path | None = None, gpu: str | None = None) -> None:
    """One of the project's commands, to the end. Raises SystemExit with the end of its output where it fails."""
    device = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=_ROOT, env={**os.environ, **device}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if log:
        log.write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, arguments))}\n{done.stdout[-2000:]}")


def train_command(recipe: Path, seed: int, options: argparse.Namespace) -> list[str]:
    """The arguments of the run, as a user would give them."""
    output, data, name = options.output, options.data, f"{recipe.stem}_{seed}"
    return [
        "train_single_gpu.py", "--recipe", str(recipe), f"--train_path={data / 'train'}", "--resume=never",
        f"--valid_path={data / 'dev'}", f"--tokenizer_path={data / 'tokenizer.json'}", f"--output_dir={output}",
        f"--name={name}", f"--seed={seed}", "--validate_every=0", "--save_every=0", "--validation_samples=0",
        "--wandb_mode=disabled",
    ]  # fmt: skip


def pairs_command(recipe: Path, seed: int, options: argparse.Namespace) -> list[str]:
    """The arguments of its evaluation."""
    run = options.output / f"{recipe.stem}_{seed}"
    sets = [str(options.pairs / part) for part in _SETS]
    return ["evaluation/minimal_pairs.py", str(run), "--ema", "--data", *sets, "--output", f"{run}.pairs.json"]


def prepare(folder: Path, corpus: Sequence[Path], dev: Sequence[Path]) -> None:
    """Tokenizer and shards of the race, by the commands that the rules name."""
    tokenizer, script = folder / "tokenizer.json", "preprocessing/tokenize_corpus.py"
    folder.mkdir(parents=True, exist_ok=True)
    _python("preprocessing/train_tokenizer.py", "--vocab_size", _VOCABULARY, "--output", tokenizer, "--input", *corpus)
    for name, inputs in (("train", corpus), ("dev", dev)):
        _python(script, "--tokenizer_path", tokenizer, "--output", folder / name, "--input", *inputs)
        manifest = read_manifest(folder / name)
        print(f"{name}: {manifest['num_words']:,} words, {manifest['num_tokens']:,} tokens")


def _one(recipe: Path, seed: int, options: argparse.Namespace, gpu: str | None) -> dict[str, Any]:
    """Train and evaluate; returns the result that NAME_SEED.result.json gets."""
    name, output = f"{recipe.stem}_{seed}", options.output
    began = time.monotonic()
    _python(*train_command(recipe, seed, options), log=output / f"{name}.log", gpu=gpu)
    seconds = time.monotonic() - began
    _python(*pairs_command(recipe, seed, options), gpu=gpu)
    lines, scores = read_metrics(output / name / "metrics.jsonl"), output / f"{name}.pairs.json"
    valid = next(line for line in reversed(lines) if "valid/ema_masked_loss" in line)
    result = {
        "recipe": recipe.stem,
        "seed": seed,
        "flags": json.loads(recipe.read_text(encoding="utf-8")),
        "tokens": lines[-1]["stats/tokens"],
        "seconds": seconds,
        **{key: value for key, value in valid.items() if key.startswith("valid/")},
        "pairs": json.loads(scores.read_text(encoding="utf-8")),
        "environment": environment(),
    }
    (output / f"{name}.result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def run_races(options: argparse.Namespace) -> None:
    """All recipes with all seeds that have no result yet, as many at once as GPUs (times --per_gpu) take."""
    import torch

    tasks = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
    tasks = [(path, seed) for path, seed in tasks if not (options.output / f"{path.stem}_{seed}.result.json").exists()]
    if options.dry_run:
        for task in tasks:
            print(f"{shlex.join(train_command(*task, options))}\n{shlex.join(pairs_command(*task, options))}")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus: Queue[str | None] = Queue()
    for gpu in [*range(torch.cuda.device_count())] * options.per_gpu or [None]:
        gpus.put(gpu if gpu is None else visible[gpu] if visible[0] else str(gpu))

    def one(recipe: Path, seed: int) -> None:
        gpu = gpus.get()
        try:
            print(_row(f"{recipe.stem} {seed}", [_values(_one(recipe, seed, options, gpu))], None), flush=True)
        except SystemExit as failure:
            print(failure, flush=True)
        finally:
            gpus.put(gpu)

    with ThreadPoolExecutor(gpus.qsize()) as pool:
        for future in [pool.submit(one, *task) for task in tasks]:
            future.result()


def _values(result: dict[str, Any]) -> dict[str, float]:
    values = {f"dev {name}": _held_out_loss(result, f"valid/ema_{name}_loss") for name in ("masked", "causal")}
    for name in _SETS if "pairs" in result else ():  # a run may have been measured by its losses alone
        for mode in _MODES:
            values[f"{name} {mode}"] = 100 * result["pairs"]["sets"][name]["modes"][mode]["mean"]["accuracy"]
    return {**values, "M tokens": result["tokens"] / 1e6, "seconds": result["seconds"]}


def _held_out_loss(result: dict[str, Any], key: str) -> float:
    """In rows of the run's last length (of 512 tokens, by the rules), whatever the length of its first ones."""
    return next((value for name, value in result.items() if name.startswith(f"{key}_")), result[key])


def _row(name: str, runs: list[dict[str, float]], baseline: list[dict[str, float]] | None) -> str:
    cells = []
    for column in COLUMNS:
        values, others = ([run[column] for run in of if column in run] for of in (runs, baseline or ()))
        digits = 3 if column.startswith("dev") else 1
        cell = f"{statistics.fmean(values):.{digits}f}" if values else "-"
        if len(values) > 1:
            cell += f" ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
            if len(others) > 1 and column != "M tokens":
                cell += f" (p {welch(others, values):.2g})"
        cells.append(cell)
    return f"| {name} | {len(runs)} | " + " | ".join(cells) + " |"


def read_results(folder: Path | None, collections: Sequence[Path]) -> dict[str, list[dict[str, float]]]:
    """The figures of each recipe's runs: of the results in a folder, and of files with several by name."""
    files = sorted(folder.glob("*.result.json")) if folder else []
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for path in collections:
        results += json.loads(path.read_text(encoding="utf-8")).values()
    found: dict[str, list[dict[str, float]]] = {}
    for result in results:
        found.setdefault(result["recipe"], []).append(_values(result))
    return found


def table(found: dict[str, list[dict[str, float]]], baseline: str) -> str:
    """The results' means over seeds, one line a recipe, with p-values against the recipe `baseline`."""
    rows = [_row(name, runs, found.get(baseline) if name != baseline else None) for name, runs in found.items()]
    header = "| recipe | runs | " + " | ".join(COLUMNS) + " |\n" + "| --- " * (len(COLUMNS) + 2) + "|"
    return "\n".join([header, *rows])


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    paths: dict[str, Any] = {"type": _absolute, "metavar": "PATH"}
    parser.add_argument("recipes", nargs="*", type=_absolute, metavar="RECIPE", help="recipe file, as for --recipe")
    parser.add_argument("--corpus", nargs="+", default=[], help="texts to train on, where --data is not there", **paths)
    parser.add_argument("--dev", nargs="+", default=[], help="texts that are held out, likewise", **paths)
    parser.add_argument("--data", help="folder of tokenizer and shards", **paths)
    parser.add_argument("--pairs", help=f"folder that holds {' and '.join(_SETS)}", **paths)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44], metavar="SEED", help="default: 42 43 44")
    parser.add_argument("--per_gpu", type=int, default=1, metavar="N", help="runs at once on a GPU")
    parser.add_argument("--output", help="folder of run folders, logs and results", **paths)
    parser.add_argument("--results", nargs="+", default=[], help="files of collected results, for the table", **paths)
    parser.add_argument("--plot", help="picture of the table", **paths)
    parser.add_argument("--dry_run", action="store_true", help="print the commands of the runs; run nothing")
    parser.add_argument("--baseline", default="lamb_1_1", metavar="NAME", help="recipe to compare with")
    options = parser.parse_args()
    if options.recipes:
        if not (options.data and options.pairs and options.output):
            parser.error("--data, --pairs and --output are needed to run recipes")
        if not (options.data / "dev").is_dir() and not options.dry_run:
            if not (options.corpus and options.dev):
                parser.error(f"--data {options.data} is not there yet; --corpus and --dev say what to make it of")
            prepare(options.data, options.corpus, options.dev)
        run_races(options)
    found = read_results(options.output, options.results)
    print(table(found, options.baseline))
    if options.plot and found:
        values = {c: {name: [run[c] for run in runs if c in run] for name, runs in found.items()} for c in COLUMNS}
        scores = {c: {name: mean_and_error(runs) for name, runs in of.items() if runs} for c, of in values.items()}
        columns = {c: points for c, points in scores.items() if points}
        draw("recipe", columns, options.plot)
    return 0


def _absolute(path: str) -> Path:
    """The project's commands run in its root, wherever this one was called."""
    return Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
