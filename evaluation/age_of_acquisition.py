"""Age of acquisition: do the checkpoints of a run learn words in the order in which children do?

    python evaluation/age_of_acquisition.py runs/my_first/checkpoints/chck_* --ages cdi.csv --contexts contexts.jsonl

--ages is a CSV file with a line for each word: `word`, and columns whose names end in a number of months (16, X17) with
the share of children who say it, or `aoa`, its age in months. --contexts has JSON lines of `word` and a `context` that
it follows. BabyLM's files, or your own.

The definition is ours, after Chang and Bergen (2022, Word Acquisition in Neural Language Models, section 3): BabyLM's
rules name surprisals at all checkpoints, a sigmoid over log10 of the words seen and a correlation with children's ages,
and its own code for it is known to be broken. A word's surprisal at a checkpoint is its mean over contexts. It is
acquired where the sigmoid, fitted by least squares, falls below the middle between chance (all tokens of the vocabulary
alike) and the lowest surprisal that the word has at any checkpoint. Children acquire it where a logistic curve, fitted
to the shares by maximum likelihood, passes one half. Words acquired outside of what was measured, on either side, are
left out and counted; the others' log10 words are correlated with months.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.cli import Parser
from evaluation.finetune_metrics import pearson, spearman
from evaluation.generation import UsageError, run
from evaluation.pair_accuracy import OBJECTIVES, chosen_modes, read_lines, read_text, text_of
from evaluation.reading_times import encode_places, surprisals
from evaluation.scoring import about, add_scoring_flags, check_scoring_flags, load_for_scoring, write_json
from evaluation.token_log_probs import sentence_sums
from evaluation.zero_shot import spearman_interval

_WORDS = re.compile(r"chck_(\d+(?:\.\d+)?)([kMB])$")
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}
_DEFINITION = "of this suite, after Chang and Bergen (2022); not BabyLM's, whose code for it is known to be broken"
_FEWEST = 5  # checkpoints, for a curve of four parameters
_FEWEST_WORDS = 4
_STEEPEST = 200.0  # of sigmoids, over the range of what was measured


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False, modes=OBJECTIVES, several=True)
    parser.add_argument("--ages", required=True, metavar="FILE.csv", help="words and shares of children, or ages")
    parser.add_argument("--contexts", required=True, metavar="FILE.jsonl", help="texts that words stand behind")
    parser.add_argument("--output", metavar="FILE.json", help="write results, with each word's ages, there")
    return run(measure, parser.parse_args(arguments))


def measure(options: argparse.Namespace) -> None:
    """Print the correlations, and write what --output asks for."""
    check_scoring_flags(options)
    seen = {path: words_seen(path) for path in options.model}
    if len(set(seen.values())) < _FEWEST:
        raise UsageError(f"MODEL: {len(set(seen.values()))} checkpoints make no curve; give {_FEWEST} or more.")
    models, ages = sorted(seen, key=lambda path: seen[path]), read_ages(Path(options.ages))
    places = [place for place in read_contexts(Path(options.contexts)) if place[1] in ages]
    words = list(dict.fromkeys(word for _, word in places))
    if not words:
        raise UsageError(f"--contexts {options.contexts} has no word of --ages {options.ages}.")
    modes, index = chosen_modes(options.mode, OBJECTIVES), {word: number for number, word in enumerate(words)}
    of_word = np.array([index[word] for _, word in places])
    curves: dict[str, list[np.ndarray]] = {mode: [] for mode in modes}
    chance = np.zeros(len(words))
    for path in models:
        model = load_for_scoring(argparse.Namespace(**{**vars(options), "model": path}))
        tokenizer = model.loaded.tokenizer
        encoded = {mode: encode_places(tuple(places), tokenizer, model.special, mode == "causal") for mode in modes}
        scores = model.score({mode: sentences for mode, (sentences, _) in encoded.items()})
        for mode, (sentences, owners) in encoded.items():
            found = surprisals(sentence_sums(sentences, scores[mode])[0], owners, len(places))
            curves[mode].append(np.bincount(of_word, found) / np.bincount(of_word))
            tokens = np.bincount(owners, sentences.counts, minlength=len(places))  # of each word at its places
            chance = np.bincount(of_word, tokens) / np.bincount(of_word) * math.log(tokenizer.get_vocab_size())
    x = np.log10([seen[path] for path in models])
    found = {mode: compared(x, np.array(of), chance, [ages[word] for word in words]) for mode, of in curves.items()}
    for mode, of in found.items():
        shown = "too few words"
        if "spearman" in of:
            shown = f"Spearman's rho {of['spearman']:.3f} [{of['low']:.3f}, {of['high']:.3f}], r {of['pearson']:.3f}"
        print(
            f"{mode}: {shown}, over {of['words']} words; left out: {of['outside_checkpoints']} not acquired within the "
            f"checkpoints, {of['outside_months']} not by children within the months"
        )
    months = {word: None if math.isnan(ages[word]) else ages[word] for word in words}
    for of in found.values():
        of["log10_words"] = dict(zip(words, of["log10_words"], strict=True))
    if options.output:
        datasets = {"age_of_acquisition": {"items": len(words), "modes": found}}
        of_newest = about(argparse.Namespace(model=str(models[-1]), ema=options.ema))
        measured = {"checkpoints": [str(path) for path in models], "definition": _DEFINITION, "months": months}
        write_json(options.output, {**of_newest, "datasets": datasets, **measured})


def words_seen(path: str) -> float:
    """Words that a checkpoint has seen, by its name. Raises UsageError."""
    named = _WORDS.search(Path(path).name)
    if named is None:
        raise UsageError(f"MODEL {path}: is not named by words seen, such as chck_10M (--save_words).")
    return float(named[1]) * _UNITS[named[2]]


def read_ages(path: Path) -> dict[str, float]:
    """Months at which children acquire each word; NaN outside of those that were asked about. Raises UsageError."""
    rows = list(csv.DictReader(io.StringIO(read_text(path, "--ages"))))
    columns = rows[0].keys() if rows else ()
    months = {name: float(ends[0]) for name in columns if (ends := re.search(r"(\d+)$", name))}
    if "word" not in columns or not ("aoa" in columns or len(months) > 1):
        raise UsageError(f"--ages {path} needs the columns word, and aoa or months such as 16, 17, ...")
    ages: dict[str, float] = {}
    for number, row in enumerate(rows, 2):
        word = (row["word"] or "").strip()
        if word in ages:
            raise UsageError(f"--ages {path}, line {number}: the word {word!r} is there twice.")
        given = {name: row[name] for name in ("aoa", *months) if row.get(name) not in (None, "", "NA")}
        try:
            numbers = {name: float(text) for name, text in given.items()}
        except ValueError:
            raise UsageError(f"--ages {path}, line {number}: {given} are not all numbers.") from None
        shares = {months[name]: value for name, value in numbers.items() if name in months}
        if not all(0 <= share <= 1 for share in shares.values()):
            raise UsageError(f"--ages {path}, line {number}: shares of children are fractions from 0 to 1.")
        ages[word] = numbers["aoa"] if "aoa" in numbers else half_age(shares)
    return ages


def read_contexts(path: Path) -> list[tuple[str, str]]:
    """Texts, and the word that follows each. Raises ConfigError."""
    lines = read_lines(path, "--contexts", "context")
    return [
        (text_of(value, "context", where, may_be_empty=True).rstrip(), text_of(value, "word", where).strip())
        for where, value in lines
    ]


def half_age(shares: dict[float, float]) -> float:
    """Months at which a logistic curve through shares by months passes one half; NaN outside of these months."""
    months, share = np.array(list(shares)), np.array(list(shares.values()))
    if len(set(shares)) < 2:
        return math.nan
    x = np.stack([np.ones(len(months)), (months - months.mean()) / months.std()], axis=1)
    at = np.zeros(2)
    for _ in range(50):  # Newton's method; the ridge keeps shares of 0 and 1 alone from running away
        p = 1 / (1 + np.exp(-(x @ at).clip(-30, 30)))
        at += np.linalg.solve(x.T * (p * (1 - p)) @ x + 1e-6 * np.eye(2), x.T @ (share - p) - 1e-6 * at)
    age = months.mean() - months.std() * at[0] / at[1] if at[1] > 0 else math.nan
    return age if months.min() <= age <= months.max() else math.nan


def compared(x: np.ndarray, curves: np.ndarray, chance: np.ndarray, months: list[float]) -> dict[str, Any]:
    """Correlation of the model's ages with children's, as JSON; none of fewer than four words. x: log10 of words seen
    [n], rising. curves: surprisals [n, W]; chance, months: [W]."""
    own = np.array([acquired(x, curve, (of + curve.min()) / 2) for curve, of in zip(curves.T, chance, strict=True)])
    theirs = np.array(months)
    both = np.isfinite(own) & np.isfinite(theirs)
    found: dict[str, Any] = {"words": int(both.sum())}
    if both.sum() >= _FEWEST_WORDS:
        rho, r = spearman(own[both], theirs[both]), pearson(own[both], theirs[both])
        low, high = spearman_interval(rho, found["words"])
        found = {"spearman": rho, "low": low, "high": high, "pearson": r, **found}
    outside = {"outside_checkpoints": int(np.isnan(own).sum()), "outside_months": int(np.isnan(theirs).sum())}
    return {**found, **outside, "log10_words": [None if np.isnan(age) else float(age) for age in own]}


def acquired(x: np.ndarray, curve: np.ndarray, cut: float) -> float:
    """Where the sigmoid through a curve [n] over x [n] falls below `cut`; NaN outside of x, or where it does not."""
    if not np.isfinite(curve).all():
        return math.nan
    center, slope, high, low = falling_sigmoid(x, curve)
    if not low < cut < high:
        return math.nan
    at = center + math.log((high - cut) / (cut - low)) / slope
    return at if x[0] <= at <= x[-1] else math.nan


def falling_sigmoid(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    """Center, slope, and the values far left and far right of the sigmoid that is nearest to y [n] by least squares.

    For a center and a slope the values are a linear fit; these two are searched on grids that close in on the best.
    Where y does not fall, both values are its mean."""
    span = x[-1] - x[0]
    centers, slopes = (x[0] - span / 2, x[-1] + span / 2), (math.log(1 / span), math.log(_STEEPEST / span))
    best = (-1.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(8):
        center, slope = np.meshgrid(np.linspace(*centers, 41), np.linspace(*slopes, 41), indexing="ij")
        steps = 1 / (1 + np.exp((-np.exp(slope) * (x[:, None, None] - center)).clip(-60, 60)))  # [n, 41, 41]
        around = steps - steps.mean(axis=0)
        product, square = np.tensordot(y - y.mean(), around, 1), (around**2).sum(axis=0)
        explained = np.where((product < 0) & (square > 1e-12), product**2 / np.maximum(square, 1e-12), 0.0)
        at = np.unravel_index(explained.argmax(), explained.shape)
        if explained[at] > best[0]:
            height = product[at] / square[at] if explained[at] else 0.0
            high = float(y.mean() - height * steps.mean(axis=0)[at])
            best = (float(explained[at]), float(center[at]), float(slope[at]), high, float(high + height))
        width, height = np.ptp(centers) / 8, np.ptp(slopes) / 8
        centers = (best[1] - width, best[1] + width)
        slopes = (best[2] - height, min(best[2] + height, math.log(_STEEPEST / span)))
    return best[1], math.exp(best[2]), best[3], best[4]


if __name__ == "__main__":
    sys.exit(main())
