"""How long evaluation/babylm.py takes for all zero-shot tasks at the sizes of the official files, by model size.

    python benchmarks/zero_shot.py --blimp eval_public/blimp_fast --supplement eval_public/supplement_fast \
        --tokenizer tokenizer.json [--configs configs/small.json configs/base.json] [--output zero_shot.json]

A folder is made in the pipeline's layout: BLiMP and its supplement by repeating the files given, all else of synthetic
sentences of their words, as long as the tasks' own. Models have random weights and the tokenizer's vocabulary. A run
is a process: start, loading, tokenising, scoring in all modes (masked, causal, fused), writing. Numbers of items: BLiMP
filtered 59,875 pairs, supplement 5,218; COMPS 49,340 and 3 x 13,896 (Misra et al., 2023, table 1); EWoK-core's 4,374
items in both directions (Ivanova et al., 2024); reading 1,726 words (de Varda et al., 2024); entity tracking 3 files
of 6 x 600 items and WUG 2 x 200 are assumed.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import write_results
from data.cli import Parser
from model import ModelConfig
from model_extra import build_model
from training.checkpoint import write_checkpoint

_ROOT = Path(__file__).resolve().parent.parent
_BLIMP, _SUPPLEMENT, _EWOK, _TRACKED, _WUG, _READ = 59_875, 5_218, 8_748, 600, 200, 1_726
_COMPS = {
    "comps_base": 49_340, "comps_wugs": 13_896, "comps_wugs_dist-before": 13_896,
    "comps_wugs_dist-in-between": 13_896,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    configs = [str(_ROOT / "configs" / name) for name in ("small.json", "base.json")]
    parser.add_argument("--configs", nargs="+", default=configs, help="sizes of the models")
    parser.add_argument("--blimp", type=Path, required=True, metavar="FOLDER", help="files of pairs, to be repeated")
    parser.add_argument("--supplement", type=Path, required=True, metavar="FOLDER", help="likewise")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="its vocabulary is the models'")
    parser.add_argument("--fraction", type=float, default=1.0, metavar="X", help="of each number of items (default: 1)")
    parser.add_argument("--device", default="auto", help="as of evaluation/babylm.py (default: auto)")
    parser.add_argument("--output", default="", metavar="FILE.json", help="where results go")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder / "full_eval", options)
        for config in options.configs:
            found.append({"config": config, **timed(folder, data, config, options)})
            print(found[-1], flush=True)
            write_results(options, runs=found)
    return 0


def timed(folder: Path, data: Path, config: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a run of babylm.py over all tasks, and its numbers of items by dataset."""
    tokenizer = options.tokenizer.read_bytes()
    sizes = json.loads(Path(config).read_text()) | {"vocab_size": len(json.loads(tokenizer)["model"]["vocab"])}
    files = {"config.json": json.dumps(sizes).encode(), "tokenizer.json": tokenizer}
    model = build_model(ModelConfig(**sizes), torch.Generator().manual_seed(0))
    run = folder / Path(config).stem
    write_checkpoint(run / "checkpoints", 1, {"model": model.state_dict()}, {"tokens": 0, "flags": {}}, files)
    command = [sys.executable, str(_ROOT / "evaluation" / "babylm.py"), str(run), "--data", str(data)]
    start = time.perf_counter()
    subprocess.run([*command, "--device", options.device, "--output", str(folder / "results")], check=True)
    seconds = time.perf_counter() - start
    [results] = (folder / "results" / run.name).rglob("results.json")
    items = {name: each["items"] for name, each in json.loads(results.read_text())["datasets"].items()}
    return {"seconds": round(seconds, 1), "items": items}


def write_data(folder: Path, options: argparse.Namespace) -> Path:
    """All zero-shot tasks in the pipeline's layout."""
    choose = random.Random(0)

    def number(items: int) -> int:
        return max(6, int(options.fraction * items))

    words = repeated(options.blimp, folder / "blimp_filtered", number(_BLIMP))
    repeated(options.supplement, folder / "supplement_filtered", number(_SUPPLEMENT))

    def text(length: int) -> str:
        return " ".join(choose.choices(words, k=length))

    def ewok(_: int) -> dict[str, Any]:
        texts = {name: text(8) for name in ("Context1", "Context2", "Target1", "Target2")}
        return {"Domain": "any", "ContextType": "direct", "ContextDiff": "a", "TargetDiff": "b", **texts}

    def tracking(index: int) -> dict[str, Any]:
        operations = index % 6
        boxes = ", ".join(f"Box {box} contains the {text(1)}" for box in range(7))
        moves = "".join(f" Move the {text(1)} from Box {n} to Box {n + 1}." for n in range(operations))
        choices = [f" the {text(1)} and the {text(1)}." for _ in range(5)]
        return {"input_prefix": f"{boxes}.{moves} Box 3 contains", "options": choices, "numops": operations}

    def comps(_: int) -> dict[str, Any]:
        return {"prefix_acceptable": text(4), "prefix_unacceptable": text(4), "property_phrase": text(4)}

    def wug(_: int) -> dict[str, Any]:
        return {"sentences": f"{text(10)}\t{text(10)}", "ratio": choose.random()}

    write_lines(folder / "ewok_filtered" / "any.jsonl", ewok, number(_EWOK))
    for name in ("regular", "ambiref", "move_contents"):
        write_lines(folder / "entity_tracking" / f"{name}.jsonl", tracking, 6 * number(_TRACKED))
    for name, items in _COMPS.items():
        write_lines(folder / "comps" / f"{name}.jsonl", comps, number(items))
    for name in ("wug_adj_nominalization", "wug_past_tense"):
        write_lines(folder / name / f"{name}.jsonl", wug, number(_WUG))
    write_reading(folder / "reading" / "reading_data.csv", text, number(_READ))
    return folder


def repeated(source: Path, target: Path, pairs: int) -> list[str]:
    """Write the pairs of a folder's files in turn, file by file, until there are so many; returns their words."""
    target.mkdir(parents=True)
    files = sorted(source.glob("*.jsonl"))
    words: list[str] = []
    for index, file in enumerate(files):
        lines = file.read_text().splitlines()
        share = pairs * (index + 1) // len(files) - pairs * index // len(files)
        (target / file.name).write_text("".join(f"{line}\n" for line in islice(cycle(lines), share)))
        words += [word for line in lines[:20] for word in json.loads(line)["sentence_good"].split()]
    return words


def write_lines(file: Path, make: Callable[[int], dict[str, Any]], number: int) -> None:
    """A file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(make(index))}\n" for index in range(number)))


def write_reading(file: Path, text: Callable[[int], str], number: int) -> None:
    """A table of reading times of sentences of eight words."""
    file.parent.mkdir(parents=True)

    def rows() -> Iterator[list[str | float]]:
        for index in range(number):
            words = text(9).split()
            place = index % 8
            before = [" ".join(words[:place]), words[place], " ".join(words[: max(0, place - 1)]), words[place - 1]]
            yield [*before, len(words[place]) % 5, *(200 + (37 * index + 11 * column) % 97 for column in range(5))]

    times = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound", "self_paced_reading_time")
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["item", "word", "prev_item", "prev_word", "Subtlex_log10", *times], *rows()])


if __name__ == "__main__":
    sys.exit(main())
