"""Surprisal by word, for psycholinguistics: how unexpected is each word of a text, left to right and by its context?

    python evaluation/surprisal.py MODEL --data sentences.txt --output surprisal.csv

A line of the file is a text, read by itself; a line of the output a word (what white space separates): line and place,
both from 1, the word, its number of tokens, and its surprisal in bits, the sum over its tokens, of which the first
holds the space before it. causal: given all tokens before. masked: given all other tokens, each token masked in turn,
with --word_l2r together with those that follow in the same word (Kauf and Ivanova, 2023), which give its beginning
away.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import count
from evaluation.generation import UsageError, run
from evaluation.pair_accuracy import OBJECTIVES, chosen_modes, read_text
from evaluation.scoring import add_scoring_flags, check_scoring_flags, load_for_scoring
from evaluation.token_log_probs import SpecialIds, TokenizedSentences, encode_sentences

_WORD = re.compile(r"\S+")
_OUTSIDE = -1  # the word of <s>, </s>


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False, modes=OBJECTIVES)
    parser.add_argument("--data", required=True, metavar="FILE", help="a text file, one text a line")
    parser.add_argument("--word_l2r", action="store_true", help="masked: hide also the following tokens of the word")
    parser.add_argument("--output", required=True, metavar="FILE.csv", help="the words with their surprisals")
    return run(measure, parser.parse_args(arguments))


def measure(options: argparse.Namespace) -> None:
    """Write the surprisals of all words, and print their means."""
    check_scoring_flags(options)
    lines = [(number, line) for number, line in enumerate(read_text(Path(options.data), "--data").split("\n"), 1)]
    lines = [(number, line.strip()) for number, line in lines if line.strip()]
    if not lines:
        raise UsageError(f"--data: {options.data} holds no text; give a file with one text a line.")
    model, modes = load_for_scoring(options), chosen_modes(options.mode, OBJECTIVES)
    texts = [line for _, line in lines]
    ends = [[match.end() for match in _WORD.finditer(text)] for text in texts]
    counts = [len(of) for of in ends]
    sentences = encode_by_span(model.loaded.tokenizer, texts, ends, model.special)
    model.say_of_positions(sentences)

    scores = model.score(dict.fromkeys(modes, sentences), word_l2r=options.word_l2r)
    surprisals = {mode: by_span(sentences, -of[0] / math.log(2), counts) for mode, of in scores.items()}
    tokens = by_span(sentences, np.ones(len(sentences.ids)), counts)
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["line", "place", "word", "tokens", *modes])
    words = [(number, place, word) for number, line in lines for place, word in enumerate(line.split(), 1)]
    for index, word in enumerate(words):
        values = (f"{surprisals[mode][index]:.6f}" if tokens[index] else "" for mode in modes)
        writer.writerow([*word, int(tokens[index]), *values])
    write_atomically(options.output, table.getvalue().encode())
    means = ", ".join(f"{mode} {surprisals[mode].sum() / max(1, (tokens > 0).sum()):.3f}" for mode in modes)
    print(f"{options.output}: {count(len(words), 'word')} in {count(len(lines), 'text')}; bits a word: {means}")


def encode_by_span(
    tokenizer: Tokenizer, texts: Sequence[str], ends: Sequence[Sequence[int]], special: SpecialIds
) -> TokenizedSentences:
    """Tokenised texts whose `words` are spans of characters, counted from 0 in each text. ends: where each span of each
    text ends, at least one; a token is of the span that its last character is in."""
    sentences = encode_sentences(tokenizer, texts, special)
    words = np.full(len(sentences.ids), _OUTSIDE)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    for encoding, of, start in zip(encodings, ends, sentences.starts[:-1], strict=True):
        last = [end for _, end in encoding.offsets]
        words[start + 1 : start + 1 + len(last)] = np.minimum(np.searchsorted(of, last), len(of) - 1)
    return replace(sentences, words=words)


def by_span(sentences: TokenizedSentences, values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Sums of the tokens' values [N] over the spans, `counts` of each text, one text after the other: [sum(counts)]."""
    before = np.repeat(np.cumsum(counts) - counts, np.diff(sentences.starts))
    inside = sentences.words != _OUTSIDE
    return np.bincount((before + sentences.words)[inside], values[inside].astype(np.float64), minlength=sum(counts))


if __name__ == "__main__":
    sys.exit(main())
