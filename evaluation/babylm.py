"""BabyLM's zero-shot tasks: all that a folder of the evaluation pipeline holds, for any number of checkpoints.

    python evaluation/babylm.py runs/my_first --ema --data evaluation_data/full_eval --output results
    python evaluation/babylm.py runs/my_first/checkpoints/chck_* --data evaluation_data/fast_eval --mode causal

Folders are known by how their names begin: blimp, supplement, ewok, entity_tracking, comps, wug_adj, wug_past, reading;
what is left out is said. Accuracies are means over UIDs, of entity tracking over files of these, with 95 % intervals;
ties count as 1 / k, "official" in the JSON counts them as right, as BabyLM's script does. WUG is Spearman's rho with
people's choices, reading the gain in R2 that surprisals bring.

--output gets FOLDER/MODEL/REVISION/zero_shot/: results.json, and BACKEND/TASK/DATASET/predictions.json for the
leaderboard (backends causal, mlm for masked, fused). REVISION is the name of a checkpoint (chck_1M), else main.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import aligned, count, interval_text
from evaluation import reading_times, zero_shot
from evaluation.generation import UsageError, run
from evaluation.pair_accuracy import chosen_modes, objectives
from evaluation.reading_times import ReadingTimes, encode_places, read_reading_times, surprisals
from evaluation.scoring import (
    ScoringModel,
    add_scoring_flags,
    check_output,
    check_scoring_flags,
    load_for_scoring,
    write_json,
)
from evaluation.token_log_probs import SpecialIds, TokenizedSentences, joined, sentence_sums
from evaluation.zero_shot import READING, Dataset, by_item, encode_items, find_datasets
from export.hf_format import is_exported
from training.checkpoint import locate
from training.ema import weights_file

_BACKENDS = {"masked": "mlm", "causal": "causal", "fused": "fused"}
# For each objective, by dataset: the sentences, and for reading times the place that each belongs to.
Encoded = dict[str, dict[str, tuple[TokenizedSentences, np.ndarray | None]]]
_MOST_SHOTS = 1000
_MAIN = "main"  # the revision of what is no checkpoint by its name


@dataclass(frozen=True)
class Suite:
    """All datasets; `words` are those of reading times by the names of their datasets."""

    datasets: tuple[Dataset, ...]
    words: dict[str, ReadingTimes]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False, several=True)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="the pipeline's folder, or any part of it")
    parser.add_argument(
        "--shots", type=int, default=0, metavar="N",
        help="before each item show N others of its UID with the right choice (one-shot: 1; default: 0, zero-shot)",
    )  # fmt: skip
    parser.add_argument("--shots_seed", type=int, default=0, metavar="N", help="which others are shown")
    parser.add_argument(
        "--separator", default="\n", metavar="TEXT", help="what stands behind each that is shown (default: a new line)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="write results and predictions below this folder")
    return run(evaluate, parser.parse_args(arguments))


def evaluate(options: argparse.Namespace) -> None:
    """Print the results of every model, and write what --output asks for."""
    check_scoring_flags(options, files=())  # --output names a folder
    if not 0 <= options.shots <= _MOST_SHOTS:
        raise UsageError(f"--shots is {options.shots}: give a number of examples from 0 to {_MOST_SHOTS}.")
    names = [model_name(path, options.ema, options.shots) for path in options.model]
    for path, name in zip(options.model, names, strict=True):
        if options.output and names.count(name) > 1:
            raise UsageError(f"MODEL {path}: two models would write to {'/'.join(name)}; rename one of the folders.")
        if options.output:
            check_output(str(Path(options.output, *name, "zero_shot", "results.json")), "--output")
        if not is_exported(Path(path)):
            locate(path, say=lambda _: None)  # a model that is not there is said before the first is scored
    datasets, notes = find_datasets(Path(options.data), "--data")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    datasets = [
        zero_shot.with_examples(each, options.shots, options.shots_seed, options.separator) for each in datasets
    ]
    if options.shots and (plain := [each.name for each in datasets if not any(item.shown for item in each.items)]):
        print(f"note: without examples, as no choice is right there: {', '.join(plain)}", file=sys.stderr)
    readings = {each.name: read_reading_times(each.path, "--data") for each in datasets if each.task == READING}
    suite, modes = Suite(tuple(datasets), readings), chosen_modes(options.mode)

    every: list[dict[str, Any]] = []
    encoded, encoded_by = {}, None
    for path, name in zip(options.model, names, strict=True):
        model = load_for_scoring(argparse.Namespace(**{**vars(options), "model": path}))
        tokenizer = model.loaded.tokenizer
        if encoded_by != (by := (tokenizer.to_str(), model.special)):  # checkpoints of a run share theirs
            encoded, encoded_by = encode(suite, tokenizer, model.special, objectives(modes)), by
        scores = score(model, suite, encoded, modes)
        found = {
            "model": str(path),
            "revision": name[1],
            "weights": weights_file(options.ema) if options.ema else "trained",
            "document_end": model.document_end,
            "shots": options.shots,
            "datasets": {each.name: summarise(each, suite, scores) for each in suite.datasets},
        }
        print("\n".join(table(f"{'/'.join(name)}", found["datasets"], modes)), flush=True)
        if options.output:
            write(Path(options.output, *name, "zero_shot"), suite, scores, found)
        every.append(found)
    if len(every) > 1:
        print("\n".join(overview(["/".join(name) for name in names], every, modes)))


def model_name(path: str, ema: bool | str, shots: int = 0) -> tuple[str, str]:
    """The names of a model and of its revision: a checkpoint of a run, or a folder called chck_..., is a revision."""
    folder = Path(os.path.abspath(path))  # chck_1M may be a link to a checkpoint
    suffix = f"-{weights_file(ema)}" * bool(ema) + (f"-{shots}shot" if shots else "")
    if folder.parent.name == "checkpoints":
        return f"{folder.parent.parent.name}{suffix}", folder.name
    if folder.name.startswith("chck_"):
        return f"{folder.parent.name}{suffix}", folder.name
    return f"{folder.name}{suffix}", _MAIN


# Scoring


def encode(suite: Suite, tokenizer: Tokenizer, special: SpecialIds, needed: Sequence[str]) -> Encoded:
    """What there is to score, for each of the objectives that are needed."""
    choices = {each.name: encode_items(each.items, tokenizer, special) for each in suite.datasets if each.items}
    found: Encoded = {}
    for objective in needed:
        found[objective] = {name: (sentences, None) for name, sentences in choices.items()}
        for name, data in suite.words.items():
            found[objective][name] = encode_places(data.places, tokenizer, special, objective == "causal")
    return found


def score(
    model: ScoringModel, suite: Suite, encoded: Encoded, modes: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """For each mode and dataset the choices' scores [items, C], or surprisals in nats [2 n]. encoded: of the objectives
    that the modes need. All texts of all tasks share batches."""
    choices = [part for part, owners in next(iter(encoded.values())).values() if owners is None]
    model.say_of_positions(*choices)
    if empty := sum(int((part.counts == 0).sum()) for part in choices):
        print(f"note: {count(empty, 'choice')} without a token of the tokenizer: log-probability 0", file=sys.stderr)
    items = {each.name: each.items for each in suite.datasets}
    scores: dict[str, dict[str, np.ndarray]] = {}
    texts = {objective: joined([part for part, _ in parts.values()]) for objective, parts in encoded.items()}
    for objective, by_token in model.score(texts).items():
        parts, found = encoded[objective], {}
        ends = np.cumsum([len(part) for part, _ in parts.values()])[:-1]
        sums = np.split(sentence_sums(texts[objective], by_token)[0], ends)
        for (name, (_, owners)), own in zip(parts.items(), sums, strict=True):
            if owners is None:
                found[name] = by_item(items[name], own)
            else:
                found[name] = surprisals(own, owners, len(suite.words[name].places))
        scores[objective] = found
    if "fused" in modes:
        scores["fused"] = {name: (scores["masked"][name] + scores["causal"][name]) / 2 for name in scores["masked"]}
    return {mode: scores[mode] for mode in modes}


# Results


def summarise(dataset: Dataset, suite: Suite, scores: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """A dataset's results as JSON."""
    if dataset.task == READING:
        words = suite.words[dataset.name]
        modes = {mode: reading_times.results(words, found[dataset.name]) for mode, found in scores.items()}
        return {"task": dataset.task, "items": len(words.places) // 2, "modes": modes}
    modes = {mode: zero_shot.results(dataset.items, found[dataset.name]) for mode, found in scores.items()}
    return {"task": dataset.task, "items": len(dataset.items), "modes": modes}


def headlines(name: str, found: dict[str, Any]) -> list[tuple[str, dict[str, tuple[float, float, float]]]]:
    """A dataset's lines of the table: by mode the value and its interval, in percent but for rho."""
    cells: dict[str, dict[str, tuple[float, float, float]]] = {}
    for mode, entry in found["modes"].items():
        if "spearman" in entry:
            cells.setdefault(f"{name} (rho)", {})[mode] = (entry["spearman"], entry["low"], entry["high"])
        elif "mean" in entry:
            mean = entry["mean"]
            cells.setdefault(name, {})[mode] = (100 * mean["accuracy"], 100 * mean["low"], 100 * mean["high"])
        for part, label in (("eye_tracking", "eyes"), ("self_paced", "self-paced")):
            if part in entry:
                gain = entry[part]
                values = (100 * gain["gain"], 100 * gain["low"], 100 * gain["high"])
                cells.setdefault(f"{name}, {label} (R2 +)", {})[mode] = values
    return list(cells.items())


def table(title: str, datasets: dict[str, Any], modes: Sequence[str]) -> list[str]:
    """A model's results as lines: percentages, rho and gains in R2 (in percent) with 95 % intervals."""
    rows = [["", *modes, "items"]]
    for name, of in datasets.items():
        for label, cells in headlines(name, of):
            digits = 3 if label.endswith("(rho)") else 2 if label.endswith("(R2 +)") else 1
            rows.append([label, *(interval_text(*cells[mode], digits) for mode in modes), f"{of['items']:,}"])
    lines = [title, *aligned(rows)]
    ties = {mode: sum(of["modes"][mode].get("ties", 0) for of in datasets.values()) for mode in modes}
    if any(ties.values()):
        counts = ", ".join(f"{mode} {number:,}" for mode, number in ties.items())
        lines.append(f"ties between the right choice and k - 1 others, each counted as 1 / k: {counts}")
    return [*lines, ""]


def overview(names: Sequence[str], every: Sequence[dict[str, Any]], modes: Sequence[str]) -> list[str]:
    """All models beside each other: for each mode a line a model, a column a result."""
    lines = []
    rows = [dict(row for name, of in found["datasets"].items() for row in headlines(name, of)) for found in every]
    for mode in modes:
        values = [[f"{cells[mode][0]:.2f}" for cells in row.values()] for row in rows]
        table = [[mode, *rows[0]], *([name, *row] for name, row in zip(names, values, strict=True))]
        lines += [*aligned(table), ""]
    return lines


def write(folder: Path, suite: Suite, scores: dict[str, dict[str, np.ndarray]], found: dict[str, Any]) -> None:
    """results.json, and BabyLM's file of predictions for each backend, task and dataset."""
    for mode, of in scores.items():
        for each in suite.datasets:
            if each.task == READING:
                content = reading_times.predictions(of[each.name])
            else:
                content = zero_shot.predictions(each.items, of[each.name])
            file = folder / _BACKENDS[mode] / each.task / each.name / "predictions.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(content, ensure_ascii=False).encode())
    write_json(folder / "results.json", found)


if __name__ == "__main__":
    sys.exit(main())
