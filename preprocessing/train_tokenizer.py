"""Training of the byte-level BPE tokenizer that tokenize_corpus.py and the model use.

    python preprocessing/train_tokenizer.py --input corpus/ --output tokenizer.json --vocab_size 16384

Reads exactly what tokenize_corpus.py reads: documents, not the files' escaped JSON. Text is not normalised and no space
is added, so every text comes back from its ids unchanged; see tokenizer.py for the way it is cut.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer, trainers
from tqdm import tqdm

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import count
from preprocessing.cli import CommandError, add_input_flags, positive_int, run
from preprocessing.inputs import CorpusError, InputFile, find_inputs
from preprocessing.parsing import parse_chunk
from preprocessing.readers import read_chunks
from preprocessing.tokenizer import (
    ALPHABET,
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    DocumentEncoder,
    cut_text,
    load_tokenizer,
    new_tokenizer,
)

_LONGEST_TOKEN = 32  # bytes: lines of dashes and the like would fill a small vocabulary
_PIECE_CHARACTERS = 1 << 16  # the library collects 256 texts before it looks at them


@dataclass(frozen=True)
class Report:
    """How a tokenizer does on (a sample of) its training text."""

    words: int  # stretches between white space
    tokens: int
    sampled: float  # fraction of the documents that were encoded, 0 to 1
    unused: list[int]  # ids that never occurred, special tokens left out


def read_documents(
    files: Sequence[InputFile], text_field: str = "text", skip_bad_lines: bool = False, progress: str = ""
) -> Iterator[str]:
    """The documents of a corpus one by one (very long ones in parts), with a progress bar if it gets a title.

    Raises CorpusError for what cannot be read, and for a malformed line unless told to skip."""
    before = [0, *accumulate(file.size for file in files)]  # bytes before each file
    with tqdm(total=before[-1], unit="B", unit_scale=True, desc=progress, disable=not progress) as bar:
        for chunk in read_chunks(files, text_field):
            yield from parse_chunk(chunk, text_field, skip_bad_lines)[0]
            bar.update(before[chunk.end.file] + chunk.progress - bar.n)


def train_tokenizer(texts: Iterator[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries: the special tokens at ids 0-15, the 256 bytes, then merges of pairs
    that occur at least `min_frequency` times. The same texts give the same tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # the library counts on all cores, with the same result
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=list(ALPHABET),
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in cut_text(text, _PIECE_CHARACTERS))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def report(tokenizer: Tokenizer, texts: Iterator[str], every: int) -> Report:
    """Encodes every `every`-th text and counts."""
    used = np.zeros(tokenizer.get_vocab_size(), bool)
    encoder = DocumentEncoder(tokenizer)
    words = tokens = 0
    for number, text in enumerate(texts):
        if number % every == 0:
            ids, _ = encoder.encode([text])
            used[ids] = True
            words += len(text.split())
            tokens += len(ids)
    unused = [int(number) for number in np.flatnonzero(~used) if number >= len(SPECIAL_TOKENS)]
    return Report(words, tokens, 1 / every, unused)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Train a byte-level BPE tokenizer with the special tokens at ids 0-15.")
    add_input_flags(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="tokenizer.json to write")
    parser.add_argument(
        "--vocab_size",
        type=positive_int,
        default=16384,
        metavar="N",
        help=f"entries, {len(SPECIAL_TOKENS)} special tokens and 256 bytes included; at least {SMALLEST_VOCABULARY}",
    )
    parser.add_argument(
        "--min_frequency",
        type=positive_int,
        default=10,
        metavar="N",
        help="times a pair must occur in the input to become an entry",
    )
    parser.add_argument(
        "--report_megabytes",
        type=float,
        default=100.0,
        metavar="MB",
        help="input, spread over all of it, to encode for the figures printed at the end",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a different tokenizer at --output")
    return parser.parse_args(argv)


def command(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if arguments.vocab_size < SMALLEST_VOCABULARY:
        raise CommandError(
            f"--vocab_size {arguments.vocab_size} is too small: the special tokens and the 256 bytes take "
            f"{SMALLEST_VOCABULARY} entries, so give more"
        )
    if not arguments.report_megabytes > 0:
        raise CommandError(f"--report_megabytes {arguments.report_megabytes} must be above 0")
    if output.is_dir() or not output.parent.is_dir():
        raise CommandError(f"--output {output} cannot be written; give a file in a folder that exists")
    files = find_inputs(arguments.input, arguments.other_files)
    if output.exists() and not arguments.overwrite:
        print(f"{output} exists: training to see whether it would be the same (--overwrite replaces it)")

    show = sys.stderr.isatty()
    reading = (files, arguments.text_field, arguments.skip_bad_lines)
    texts = read_documents(*reading, progress="reading" if show else "")
    tokenizer = train_tokenizer(texts, arguments.vocab_size, arguments.min_frequency)
    if tokenizer.get_vocab_size() == SMALLEST_VOCABULARY and not any(read_documents(*reading)):
        raise CorpusError(f"--input holds no text in {count(len(files), 'file')}; check --input and --text_field")
    content = tokenizer.to_str(pretty=True).encode()
    if output.exists() and output.read_bytes() == content:
        print(f"{output} is unchanged")
    elif output.exists() and not arguments.overwrite:
        raise CommandError(f"--output {output} holds another tokenizer; give another name or add --overwrite")
    else:
        write_atomically(output, content)
        print(f"wrote {output}")
    every = max(1, round(sum(file.size for file in files) / (arguments.report_megabytes * 1e6)))
    tokenizer = load_tokenizer(output)
    texts = read_documents(*reading, progress="encoding" if show else "")
    print_report(tokenizer, report(tokenizer, texts, every), arguments.vocab_size)
    return 0


def print_report(tokenizer: Tokenizer, result: Report, wanted: int) -> None:
    """The lines that end a run."""
    size = tokenizer.get_vocab_size()
    print(f"{size:,} entries: {len(SPECIAL_TOKENS)} special tokens, 256 bytes, {size - SMALLEST_VOCABULARY:,} merges")
    if size < wanted:
        print(f"note: fewer than the {wanted:,} asked for, as the text has no more pairs of --min_frequency")
    sampled = "" if result.sampled == 1 else f" (in {result.sampled:.1%} of the documents)"
    per_word = result.tokens / max(result.words, 1)
    print(f"{result.words:,} words, {result.tokens:,} tokens, {per_word:.3f} tokens per word{sampled}")
    single = sum(number < SMALLEST_VOCABULARY for number in result.unused)
    merges = [tokenizer.id_to_token(number) for number in result.unused if number >= SMALLEST_VOCABULARY]
    examples = f", such as {' '.join(str(merge) for merge in merges[:8])}" if merges else ""
    print(f"{len(result.unused):,} unused ids: {single} bytes and {len(merges):,} merges{examples}")


def main(argv: Sequence[str] | None = None) -> int:
    return run(command, parse_arguments(argv), "no tokenizer was written; run again to start from the beginning")


if __name__ == "__main__":
    sys.exit(main())
