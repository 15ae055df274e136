"""LAMBADA (Paperno et al., 2016): does a model find the last word of a text that only its whole context tells?

    python evaluation/lambada.py MODEL --data lambada_test.jsonl --output results.json

A line of the file is a JSON object with "text". The last word, with the space before it, is right where each of its
tokens is the most probable one; masked, with a mask for each token from there on. The perplexity is that of the word.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer

from data.cli import Parser
from evaluation.generation import run
from evaluation.minimal_pairs import as_json
from evaluation.pair_accuracy import OBJECTIVES, accuracy, chosen_modes, read_lines, text_of
from evaluation.scoring import add_scoring_flags, check_scoring_flags, load_for_scoring, write_results
from evaluation.token_log_probs import SpecialIds, TokenizedSentences, encode_sentences, sentence_sums
from training.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False, modes=OBJECTIVES)
    parser.add_argument("--data", required=True, metavar="FILE.jsonl", help="JSON lines with the texts")
    parser.add_argument("--output", metavar="FILE.json", help="write all results here")
    return run(evaluate, parser.parse_args(arguments))


def evaluate(options: argparse.Namespace) -> None:
    """Print accuracy and perplexity, and write what --output asks for."""
    check_scoring_flags(options)
    texts = read_texts(Path(options.data), "--data")
    model, modes = load_for_scoring(options), chosen_modes(options.mode, OBJECTIVES)
    last = encode_last_words(texts, model.loaded.tokenizer, model.special)
    model.say_of_positions(last)
    found: dict[str, Any] = {"texts": len(texts)}
    for mode, scores in model.score(dict.fromkeys(modes, last), word_l2r=True, best=True).items():
        found[mode] = of = results(last, scores)
        low, right, high = (100 * of["accuracy"][key] for key in ("low", "accuracy", "high"))
        print(f"{mode:<7} accuracy {right:.1f} % [{low:.1f}, {high:.1f}], perplexity {of['perplexity']:,.2f}")
    write_results(options, found)


def read_texts(path: Path, flag: str) -> dict[str, str]:
    """The texts of a file by where they stand. Raises ConfigError."""
    return {where: text_of(value, "text", where).strip() for where, value in read_lines(path, flag, "text")}


def encode_last_words(texts: Mapping[str, str], tokenizer: Tokenizer, special: SpecialIds) -> TokenizedSentences:
    """The texts with their last words to be scored, each as one word. Raises ConfigError for one without a token."""
    ends = [len(text) - len(text.split()[-1]) for text in texts.values()]
    contexts = [len(text[:end].rstrip()) for text, end in zip(texts.values(), ends, strict=True)]
    sentences = encode_sentences(tokenizer, list(texts.values()), special, contexts)
    if not sentences.counts.all():
        where = list(texts)[int(sentences.counts.argmin())]
        raise ConfigError(f"{where}: the last word has no token of the model's tokenizer.")
    words = np.arange(len(sentences.ids))
    for start, first, last in zip(sentences.starts[:-1], sentences.first, sentences.scored, strict=True):
        words[start + first : start + last + 1] = start + first
    return replace(sentences, words=words)


def results(sentences: TokenizedSentences, scores: np.ndarray) -> Mapping[str, Any]:
    """Accuracy with its 95 % interval and perplexity by word, as JSON; scores [2, N]: log-probabilities, best ones."""
    sums, best = sentence_sums(sentences, scores)
    return {
        "accuracy": as_json(accuracy((best == sentences.counts).astype(float))),
        "perplexity": float(np.exp(min(700.0, -sums.mean()))),
    }


if __name__ == "__main__":
    sys.exit(main())
