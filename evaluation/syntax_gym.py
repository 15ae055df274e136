"""SyntaxGym's suites (Gauthier et al., 2020): do surprisals of regions keep to the formulas of a suite?

    python evaluation/syntax_gym.py MODEL --data suites/*.json --mode all --output results.json

A suite is a JSON file with "items", each with "conditions" of "regions", and "predictions": formulas such as
`(6;%match%) < (6;%mismatch%)` of surprisals in bits by region (*: the whole sentence) and condition; + and -,
comparisons, & and | join them, ( ) and [ ] group. A region's surprisal is the sum of its tokens' (the suite's metric
"mean": their mean), the space before it included. A suite's result is the mean over its predictions of the share of
items that keep to them.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer

from data.cli import Parser
from data.wording import aligned, interval_text
from evaluation.generation import run
from evaluation.minimal_pairs import as_json
from evaluation.pair_accuracy import accuracy, chosen_modes, in_modes, mean_accuracy, objectives, read_text
from evaluation.scoring import ScoringModel, add_scoring_flags, check_scoring_flags, load_for_scoring, write_results
from evaluation.surprisal import by_span, encode_by_span
from evaluation.token_log_probs import SpecialIds
from training.config import ConfigError

_TERM = re.compile(r"\(\s*(\*|\d+)\s*;\s*%([^%]+)%\s*\)")
_SIGN = re.compile(r"[<>=]=?|[\[\]&|]")
_SIGNS = {"[": "(", "]": ")", "&": " and ", "|": " or ", "=": "=="}
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.Eq, ast.BinOp,
    ast.Add, ast.Sub, ast.UnaryOp, ast.USub, ast.Constant, ast.Subscript, ast.Tuple, ast.Name, ast.Load,
)  # fmt: skip
_METRICS = ("sum", "mean")
WHOLE = "*"


@dataclass(frozen=True)
class Sentence:
    """A condition of an item. ends: where its regions end in `text`, in characters, by their numbers."""

    item: int
    condition: str
    text: str
    ends: Mapping[str, int]


@dataclass(frozen=True)
class SyntaxSuite:
    """A suite: sentences, and each formula as Python's with `v` for the values of an item."""

    name: str
    metric: str
    sentences: tuple[Sentence, ...]
    formulas: Mapping[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE.json", help="suites")
    parser.add_argument("--output", metavar="FILE.json", help="write all results here")
    return run(evaluate, parser.parse_args(arguments))


def evaluate(options: argparse.Namespace) -> None:
    """Print the results of every suite, and write what --output asks for."""
    check_scoring_flags(options)
    suites, modes = [read_suite(Path(path), "--data") for path in options.data], chosen_modes(options.mode)
    model = load_for_scoring(options)
    values = score(model, suites, modes)
    found: dict[str, Any] = {"suites": {}}
    rows = [["", *modes]]
    for suite, of in zip(suites, values, strict=True):
        found["suites"][suite.name] = entry = {mode: results(suite, of[mode]) for mode in modes}
        means = ((100 * entry[mode]["mean"][key] for key in ("accuracy", "low", "high")) for mode in modes)
        rows.append([suite.name, *(interval_text(*mean) for mean in means)])
    print("\n".join(aligned(rows)))
    write_results(options, found)


def read_suite(path: Path, flag: str) -> SyntaxSuite:
    """A suite. Raises ConfigError, a sentence with the file and what is wrong in it."""
    try:
        content = json.loads(read_text(path, flag))
        sentences = tuple(
            _sentence(number, condition["condition_name"], condition["regions"])
            for number, item in enumerate(content["items"])
            for condition in item["conditions"]
        )
        formulas = {each["formula"]: each["formula"] for each in content["predictions"]}
        metric = content.get("meta", {}).get("metric", "sum")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {path} is not valid JSON ({error})") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{flag}: {path} is no suite of SyntaxGym (lacks {error})") from None
    if metric not in _METRICS:
        raise ConfigError(f'{flag}: {path}: "metric" is {metric!r}; it must be one of {", ".join(_METRICS)}')
    if not sentences or not formulas:
        raise ConfigError(f'{flag}: {path}: "items" or "predictions" is empty')
    known = {(each.item, each.condition, region) for each in sentences for region in (*each.ends, WHOLE)}
    items = range(1 + max(each.item for each in sentences))
    for formula in formulas:
        try:
            formulas[formula] = compiled(formula)
        except (SyntaxError, ValueError):
            raise ConfigError(f"{flag}: {path}: the formula {formula!r} cannot be read") from None
        for region, condition in _TERM.findall(formula):
            lacking = next((item for item in items if (item, condition, region) not in known), None)
            if lacking is not None:
                where = f"{flag}: {path}: item {lacking + 1} has no region {region} of condition {condition!r}"
                raise ConfigError(f"{where}, which {formula!r} names")
    return SyntaxSuite(path.stem, metric, sentences, formulas)


def _sentence(item: int, condition: str, regions: Sequence[Mapping[str, Any]]) -> Sentence:
    text, ends = "", {}
    for region in regions:
        content = region["content"].strip()
        text = f"{text} {content}" if text and content else text + content
        ends[str(region["region_number"])] = len(text)
    return Sentence(item, condition, text, ends)


def compiled(formula: str) -> Any:
    """Python's code of a formula, of the values `v[region, condition]`. Raises ValueError or SyntaxError."""
    terms = _TERM.sub(lambda found: f"v[{found[1]!r}, {found[2]!r}]", formula)
    pieces = re.split(r"(v\['.*?', .*?\])", terms)  # names of conditions are not to be touched
    pieces[::2] = [_SIGN.sub(lambda found: _SIGNS.get(found[0], found[0]), piece) for piece in pieces[::2]]
    tree = ast.parse("".join(pieces).strip(), mode="eval")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if names - {"v"} or not all(isinstance(node, _ALLOWED) for node in ast.walk(tree)):
        raise ValueError(formula)
    return compile(tree, "formula", "eval")


def score(model: ScoringModel, suites: Sequence[SyntaxSuite], modes: Sequence[str]) -> list[dict[str, list[Any]]]:
    """For each suite and mode what formulas read of its items: surprisals in bits by region and condition."""
    regions = Regions(suites, model.loaded.tokenizer, model.special)
    model.say_of_positions(regions.texts)
    scores = model.score(dict.fromkeys(objectives(modes), regions.texts))
    sums = in_modes({name: regions.surprisals(of) for name, of in scores.items()}, modes)
    by_mode = {mode: regions.by_item(of) for mode, of in sums.items()}
    return [{mode: by_mode[mode][number] for mode in modes} for number in range(len(suites))]


class Regions:
    """The regions of all sentences of suites; `texts` are the sentences, tokenised."""

    def __init__(self, suites: Sequence[SyntaxSuite], tokenizer: Tokenizer, special: SpecialIds) -> None:
        self._suites, every = suites, [sentence for suite in suites for sentence in suite.sentences]
        ends = [list(sentence.ends.values()) for sentence in every]
        self._counts = [len(of) for of in ends]
        self.texts = encode_by_span(tokenizer, [each.text for each in every], ends, special)
        self._tokens = by_span(self.texts, np.ones(len(self.texts.ids)), self._counts)

    def surprisals(self, scores: np.ndarray) -> np.ndarray:
        """Bits of all regions, one after the other, from the tokens' log-probabilities [1, N]."""
        return by_span(self.texts, -scores[0] / math.log(2), self._counts)

    def by_item(self, sums: np.ndarray) -> list[list[dict[Any, float]]]:
        """For each suite what formulas read of its items, from the surprisals of all regions."""
        bounds, found, first = np.cumsum(self._counts)[:-1], [], 0
        for suite in self._suites:
            part = slice(first, first := first + len(suite.sentences))
            found.append(_by_item(suite, np.split(sums, bounds)[part], np.split(self._tokens, bounds)[part]))
        return found


def _by_item(suite: SyntaxSuite, sums: Sequence[np.ndarray], sizes: Sequence[np.ndarray]) -> list[dict[Any, float]]:
    items: list[dict[Any, float]] = [{} for _ in range(1 + max(each.item for each in suite.sentences))]
    for sentence, values, tokens in zip(suite.sentences, sums, sizes, strict=True):
        own, whole = values, values.sum()
        if suite.metric == "mean":
            own, whole = values / np.maximum(tokens, 1), whole / max(1, tokens.sum())
        of = items[sentence.item]
        of.update(
            {(region, sentence.condition): float(value) for region, value in zip(sentence.ends, own, strict=True)}
        )
        of[WHOLE, sentence.condition] = float(whole)
    return items


def results(suite: SyntaxSuite, items: Sequence[Mapping[Any, float]]) -> dict[str, Any]:
    """The share of items that keep to each formula, and the mean over formulas, with 95 % intervals, as JSON."""
    by_formula = {
        formula: accuracy(np.array([float(bool(eval(code, {"__builtins__": {}}, {"v": item}))) for item in items]))
        for formula, code in suite.formulas.items()
    }
    every = {formula: as_json(found) for formula, found in by_formula.items()}
    return {"mean": as_json(mean_accuracy(list(by_formula.values()))), "predictions": every}


if __name__ == "__main__":
    sys.exit(main())
