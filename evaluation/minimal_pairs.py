"""Minimal pairs, such as BLiMP: which of two sentences does a model find more probable?

    python evaluation/minimal_pairs.py MODEL --data blimp/ supplement/ --mode all --output scores.json --plot scores.png

Files hold a JSON object a line with "sentence_good" and "sentence_bad"; other fields group the results. A folder is one
set of pairs, the mean of its files' accuracies its result. evaluation/pair_accuracy.py says how sentences are scored.

The temperature is 1 unless --select_temperature is given: then each set's temperature is chosen for each mode on one
half of every file, and results are those of the other half.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import aligned, interval_text
from evaluation.generation import UsageError, check, run
from evaluation.minimal_pairs_plot import check_plot, draw
from evaluation.pair_accuracy import (
    Accuracy,
    Grouped,
    Pair,
    PairSet,
    accuracy,
    by_group,
    chosen_modes,
    correctness,
    encode_pairs,
    grouping_fields,
    in_modes,
    mean_of_paradigms,
    members_of,
    objectives,
    read_pair_sets,
)
from evaluation.scoring import ScoringModel, add_scoring_flags, check_scoring_flags, load_for_scoring, write_results
from evaluation.token_log_probs import sentence_sums

TEMPERATURES = tuple(step / 10 for step in range(5, 31))  # that --select_temperature chooses from


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Score a model on minimal pairs, such as BLiMP.")
    add_scoring_flags(parser, document_end=False)
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="PATH",
        help="JSONL files with sentence_good and sentence_bad, or folders of them; every folder is one set",
    )  # fmt: skip
    parser.add_argument(
        "--word_l2r", action="store_true",
        help="masked: hide also the sub-words that follow in the same word (PLL-word-l2r, Kauf and Ivanova 2023)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="logits are divided by it (default: 1)"
    )
    parser.add_argument(
        "--select_temperature", action="store_true",
        help=f"choose it from {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g} on one half of each file, report the other",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE.json", help="write all results here")
    parser.add_argument("--scores", metavar="FILE.jsonl", help="write every pair with its sentences' scores here")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results by phenomenon (needs matplotlib)")
    return run(evaluate, parser.parse_args(arguments))


def evaluate(options: argparse.Namespace) -> None:
    """Print the results of every set, and write what the flags ask for."""
    check_scoring_flags(options, ("output", "scores", "plot"))
    check(options, "temperature", lambda x: 0 < x < math.inf, "give a number above 0")
    if options.select_temperature and options.temperature != 1:
        raise UsageError("--temperature and --select_temperature both say which temperature to use: give one of them.")
    if options.plot:
        check_plot(options.plot)
    sets = read_pair_sets(options.data, "--data")
    model, modes = load_for_scoring(options), chosen_modes(options.mode)
    temperatures = TEMPERATURES if options.select_temperature else (options.temperature,)

    scores = score(model, sets, modes, word_l2r=options.word_l2r, temperatures=temperatures)
    results: dict[str, Any] = {"document_end": model.document_end, "word_l2r": options.word_l2r, "sets": {}}
    for number, each in enumerate(sets):
        by_mode = {mode: scores[mode][number] for mode in modes}
        found = summarise(each, by_mode, temperatures, options.select_temperature)
        results["sets"][each.name] = found
        print("\n".join(table(each.name, found)), flush=True)
    if options.scores:
        write_atomically(options.scores, score_lines(sets, scores, temperatures).encode())
    write_results(options, results)
    if options.plot:
        draw(results, Path(options.plot))


def score(
    model: ScoringModel, sets: Sequence[PairSet], modes: Sequence[str], **options: Any
) -> dict[str, list[np.ndarray]]:
    """For each mode the scores of each set: float64 [K temperatures, pairs, 2]. options: of ScoringModel.score."""
    pairs = [pair for each in sets for pair in each.pairs]
    texts = encode_pairs(pairs, model.loaded.tokenizer, model.special)
    by_token = model.score(dict.fromkeys(objectives(modes), texts), **options)
    sums = {name: sentence_sums(texts, of) for name, of in by_token.items()}
    ends = np.cumsum([len(each.pairs) for each in sets])[:-1]
    return {mode: np.split(of.reshape(len(of), -1, 2), ends, axis=1) for mode, of in in_modes(sums, modes).items()}


def selecting_half(pairs: Sequence[Pair]) -> np.ndarray:
    """Which pairs, bool [n], a temperature is chosen on: half of each file, by a hash of the sentences. The order of
    lines plays no part. Of an odd number of pairs, the smaller half."""
    chosen = np.zeros(len(pairs), bool)
    for members in members_of(pair.paradigm for pair in pairs).values():
        order = sorted(members, key=lambda i: hashlib.sha256(f"{pairs[i].good}\n{pairs[i].bad}".encode()).digest())
        chosen[order[: len(order) // 2]] = True
    return chosen


def select_temperature(pairs: Sequence[Pair], right: np.ndarray, temperatures: Sequence[float]) -> int:
    """Index of the temperature with the best mean over files; right: [K, n]. Of equals, the one closest to 1."""
    means = [mean_of_paradigms(pairs, line).value for line in right]
    return max(range(len(means)), key=lambda k: (means[k], -abs(math.log(temperatures[k])), k))


def summarise(
    pair_set: PairSet, scores: dict[str, np.ndarray], temperatures: Sequence[float], selects: bool
) -> dict[str, Any]:
    """Results of a set as JSON; scores: for each mode [K, pairs, 2]. Raises UsageError where no half can be made."""
    pairs = pair_set.pairs
    chosen_on = selecting_half(pairs) if selects else np.zeros(len(pairs), bool)
    if selects and not chosen_on.any():
        raise UsageError(f"--select_temperature: {pair_set.name} has no file with two pairs, so there are no halves.")
    reported = [pair for pair, used in zip(pairs, chosen_on, strict=True) if not used]
    found: dict[str, Any] = {"pairs": len(reported), "modes": {}}
    if selects:
        found["pairs_for_temperature"] = int(chosen_on.sum())
    for mode, values in scores.items():
        right = correctness(values)
        best = 0
        if selects:
            choosing = [pair for pair, used in zip(pairs, chosen_on, strict=True) if used]
            best = select_temperature(choosing, right[:, chosen_on], temperatures)
        ties = int((right[best, ~chosen_on] == 0.5).sum())
        entry = {"temperature": temperatures[best], "ties": ties, **accuracies(reported, right[best, ~chosen_on])}
        if selects:
            at_one = right[list(temperatures).index(1.0), ~chosen_on]
            entry["mean_at_temperature_1"] = as_json(mean_of_paradigms(reported, at_one))
        found["modes"][mode] = entry
    return found


def accuracies(pairs: Sequence[Grouped], right: np.ndarray) -> dict[str, Any]:
    """All results of pairs, right 1, wrong 0, tied 0.5 ([n]), as JSON."""
    groups = {}
    for field in grouping_fields(pairs):
        having = [index for index, pair in enumerate(pairs) if field in pair.fields]
        groups[field] = by_group([str(pairs[index].fields[field]) for index in having], right[having])
    return {
        "mean": as_json(mean_of_paradigms(pairs, right)),
        "all": as_json(accuracy(right)),
        "groups": {field: {name: as_json(found) for name, found in of.items()} for field, of in groups.items()},
        "paradigms": {
            name: as_json(found) for name, found in by_group([pair.paradigm for pair in pairs], right).items()
        },
    }


def as_json(found: Accuracy) -> dict[str, float]:
    """An accuracy and its 95 % interval."""
    return {"accuracy": found.value, "low": found.low, "high": found.high, "pairs": found.pairs}


def score_lines(sets: Sequence[PairSet], scores: dict[str, list[np.ndarray]], temperatures: Sequence[float]) -> str:
    """Every pair as a line of JSON, with the scores of both sentences by mode at the temperature closest to 1."""
    k = min(range(len(temperatures)), key=lambda index: abs(math.log(temperatures[index])))
    lines = []
    for number, each in enumerate(sets):
        for index, pair in enumerate(each.pairs):
            line = {"set": each.name, "paradigm": pair.paradigm, "sentence_good": pair.good, "sentence_bad": pair.bad}
            for mode, values in scores.items():
                line[f"{mode}_good"], line[f"{mode}_bad"] = values[number][k, index].tolist()
            lines.append(json.dumps(line, ensure_ascii=False))
    return "".join(line + "\n" for line in lines)


def table(name: str, found: dict[str, Any]) -> list[str]:
    """A set's results as lines: percentages with 95 % intervals, one column per mode."""
    modes = found["modes"]
    first, entries = next(iter(modes.values())), modes.values()
    temperatures = {mode: entry["temperature"] for mode, entry in modes.items()}
    heads = [mode if t == 1 else f"{mode}, T={t:g}" for mode, t in temperatures.items()]
    rows = [["", *heads, "pairs"], _row("mean of files", [entry["mean"] for entry in entries])]
    if "pairs_for_temperature" in found:
        rows.append(_row("  at temperature 1", [entry["mean_at_temperature_1"] for entry in entries]))
    rows.append(_row("all pairs", [entry["all"] for entry in entries]))
    for field, groups in [*first["groups"].items(), ("file", first["paradigms"])]:
        if set(groups) <= {"True", "False"}:
            continue  # in the JSON alone
        rows.append([f"by {field}"] + [""] * (1 + len(modes)))
        part = [entry["paradigms"] if field == "file" else entry["groups"][field] for entry in entries]
        rows += [_row(f"  {value}", [each[value] for each in part]) for value in sorted(groups)]
    others = found.get("pairs_for_temperature")
    halves = f", temperature chosen on {others:,} others" if others else ""
    lines = [f"{name}: {found['pairs']:,} pairs in {len(first['paradigms'])} files{halves}", *aligned(rows)]
    if any(entry["ties"] for entry in modes.values()):
        counts = ", ".join(f"{mode} {entry['ties']:,}" for mode, entry in modes.items())
        lines.append(f"ties (both sentences equally probable), each counted as half right: {counts}")
    return [*lines, ""]


def _row(label: str, cells: Sequence[dict[str, float]]) -> list[str]:
    percent = [interval_text(100 * cell["accuracy"], 100 * cell["low"], 100 * cell["high"]) for cell in cells]
    return [label, *percent, f"{cells[0]['pairs']:,}"]


if __name__ == "__main__":
    sys.exit(main())
