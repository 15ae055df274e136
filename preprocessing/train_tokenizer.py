"""Training of the byte-level tokenizer (BPE, WordPiece or Unigram) that tokenize_corpus.py and the model use.

    python preprocessing/train_tokenizer.py --input corpus/ --output tokenizer.json --vocab_size 16384

Reads exactly what tokenize_corpus.py reads: documents, not the files' escaped JSON. Text is not normalised unless a
flag says so and no space is added, so every text comes back from its ids; see tokenizer.py for the way it is cut.
Normalisation, cut and kind are recorded in the tokenizer.json that is written.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer, models, trainers
from tqdm import tqdm

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import count
from preprocessing.cli import (
    CommandError,
    add_input_flags,
    add_overwrite_flag,
    check_file,
    positive_int,
    run,
    write_file,
)
from preprocessing.inputs import CorpusError, InputFile, find_inputs
from preprocessing.parsing import parse_chunk
from preprocessing.readers import Layout, layout_of, read_chunks
from preprocessing.tokenizer import (
    ALPHABET,
    CONTINUED,
    DEFAULT_FORM,
    SPECIAL_TOKENS,
    DocumentEncoder,
    TokenizerForm,
    cut_text,
    load_tokenizer,
    new_tokenizer,
    wordpiece_model,
)

_LONGEST_TOKEN = 32  # bytes: lines of dashes and the like would fill a small vocabulary
_PIECE_CHARACTERS = 1 << 16  # the library collects 256 texts before it looks at them
_MIN_FREQUENCY = 10
_SAMPLE_KEY = b"preprocessing/train_tokenizer.py"


@dataclass(frozen=True)
class SourceReport:
    """How a tokenizer does on (a sample of) one --input PATH."""

    source: str
    sampled: float  # fraction of the documents that were encoded, 0 to 1
    words: int  # stretches between white space
    bytes: int  # of the text in UTF-8, before any normalisation
    tokens: int
    unknown: int  # tokens that are <unk>
    used: np.ndarray  # bool [vocabulary]: ids that occurred

    @property
    def unused(self) -> list[int]:
        """Ids that never occurred, special tokens left out."""
        return [int(number) for number in np.flatnonzero(~self.used) if number >= len(SPECIAL_TOKENS)]

    def figures(self) -> dict[str, float | int | str]:
        """What --report writes."""
        kept = ("source", "sampled", "words", "bytes", "tokens")
        return {key: value for key, value in vars(self).items() if key in kept} | {
            "tokens_per_word": self.tokens / max(self.words, 1),
            "bytes_per_token": self.bytes / max(self.tokens, 1),
            "unknown_fraction": self.unknown / max(self.tokens, 1),
            "unused_ids": len(self.unused),
        }


@dataclass(frozen=True)
class Sample:
    """The documents whose keyed hash lies below `bound`: at most --sample_bytes of text, the same in any order."""

    bound: int
    documents: int
    bytes: int
    of_documents: int
    of_bytes: int

    def holds(self, text: str) -> bool:
        return _keyed_hash(text) < self.bound


def read_documents(
    files: Sequence[InputFile], layout: Layout | None = None, skip_bad_lines: bool = False, progress: str = ""
) -> Iterator[str]:
    """The documents of a corpus one by one (very long ones in parts), with a progress bar if it gets a title.

    Raises CorpusError for what cannot be read, and for a malformed line unless told to skip."""
    before = [0, *accumulate(file.size for file in files)]  # bytes before each file
    with tqdm(total=before[-1], unit="B", unit_scale=True, desc=progress, disable=not progress) as bar:
        for chunk in read_chunks(files, layout):
            yield from parse_chunk(chunk, layout, skip_bad_lines).texts
            bar.update(before[chunk.end.file] + chunk.progress - bar.n)


def _keyed_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=_SAMPLE_KEY).digest(), "big")


def choose_sample(texts: Iterator[str], sample_bytes: int) -> Sample:
    """The documents with the lowest hashes, as many as `sample_bytes` bytes of text hold; equal documents are all in it
    or all out of it."""
    bound, held = 1 << 64, 0
    kept: list[tuple[int, int]] = []  # a heap of (-hash, bytes): the highest hash first
    of_documents = of_bytes = 0
    for text in texts:
        size, number = len(text.encode()), _keyed_hash(text)
        of_documents, of_bytes = of_documents + 1, of_bytes + size
        if number < bound:
            heapq.heappush(kept, (-number, size))
            held += size
        while held > sample_bytes or (kept and -kept[0][0] >= bound):
            highest, size = heapq.heappop(kept)
            bound, held = -highest, held - size
    return Sample(bound, len(kept), held, of_documents, of_bytes)


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, min_frequency: int, form: TokenizerForm = DEFAULT_FORM
) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries: the special tokens at ids 0-15, the bytes, then what is learnt.

    min_frequency: times that a pair must occur to be merged, for BPE and WordPiece. These are the same for the same
    texts; Unigram sums in no fixed order, so its scores are rounded, and pieces of equal worth may take turns."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # the library counts on all cores, with the same result
    tokenizer = new_tokenizer(form)
    pieces = (piece for text in texts for piece in cut_text(text, _PIECE_CHARACTERS))
    shared: dict[str, Any] = {"vocab_size": vocab_size, "initial_alphabet": list(ALPHABET), "show_progress": False}
    special = list(SPECIAL_TOKENS)
    if form.kind == "unigram":
        trainer = trainers.UnigramTrainer(
            special_tokens=special, unk_token=SPECIAL_TOKENS[0], max_piece_length=_LONGEST_TOKEN, **shared
        )
        tokenizer.train_from_iterator(pieces, trainer)
        tokenizer.model = _ordered_unigram(tokenizer, vocab_size)
        return tokenizer
    shared |= {"min_frequency": min_frequency, "max_token_length": _LONGEST_TOKEN}
    if form.kind == "bpe":
        tokenizer.train_from_iterator(pieces, trainers.BpeTrainer(special_tokens=special, **shared))
        return tokenizer
    # Bytes that continue a word are named to the trainer, which else numbers those it meets, in no fixed order.
    continued = [CONTINUED + byte for byte in ALPHABET]
    tokenizer.train_from_iterator(
        pieces,
        trainers.BpeTrainer(special_tokens=special + continued, continuing_subword_prefix=CONTINUED, **shared),
    )
    learnt = tokenizer.get_vocab()
    tokenizer = new_tokenizer(form)  # in which bytes are no special tokens
    tokenizer.model = wordpiece_model(learnt)
    tokenizer.add_special_tokens(special)
    return tokenizer


def _ordered_unigram(tokenizer: Tokenizer, vocab_size: int) -> models.Unigram:
    """The trained model with its pieces in a fixed order. Bytes that the text does not hold get one score, below all
    others: the library numbers them at random, in steps of 0.0001 from the lowest score up."""
    scores = {piece: round(score, 4) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]}
    learnt = scores.keys() - set(SPECIAL_TOKENS) - set(ALPHABET)
    lowest = min(scores.values())
    numbered = lowest + 0.0001 * (len(ALPHABET) + 1)
    single = [(byte, scores[byte] if scores[byte] > numbered else lowest - 1) for byte in ALPHABET]
    ordered = sorted(((piece, scores[piece]) for piece in learnt), key=lambda entry: (-entry[1], entry[0]))
    vocabulary = [*((token, 0.0) for token in SPECIAL_TOKENS), *single, *ordered][:vocab_size]
    return models.Unigram(vocabulary, unk_id=0, byte_fallback=False)


def report(tokenizer: Tokenizer, texts: Iterator[str], every: int, source: str = "") -> SourceReport:
    """Encodes every `every`-th text and counts."""
    used = np.zeros(tokenizer.get_vocab_size(), bool)
    encoder = DocumentEncoder(tokenizer)
    words = size = tokens = unknown = 0
    for number, text in enumerate(texts):
        if number % every == 0:
            ids, _ = encoder.encode([text])
            used[ids] = True
            words += len(text.split())
            size += len(text.encode())
            tokens += len(ids)
            unknown += int((ids == 0).sum())
    return SourceReport(source, 1 / every, words, size, tokens, unknown, used)


def total_of(reports: Sequence[SourceReport]) -> SourceReport:
    """All sources together."""
    sums = {key: sum(getattr(each, key) for each in reports) for key in ("words", "bytes", "tokens", "unknown")}
    used = np.logical_or.reduce([each.used for each in reports])
    return SourceReport(source="all", sampled=reports[0].sampled, used=used, **sums)


def _add_form_flags(parser: Parser) -> None:
    """The flags of TokenizerForm."""
    parser.add_argument(
        "--kind", choices=("bpe", "wordpiece", "unigram"), default="bpe",
        help="way that pieces are learnt and a word is cut into them. All work on bytes, so that no text is unknown "
        "and none is lost, spaces before punctuation included (which BERT's WordPiece decoder drops: other programs "
        "must use the decoder in the file). Unigram may differ in pieces of equal worth when it is trained again",
    )  # fmt: skip
    parser.add_argument(
        "--normalization", choices=("none", "nfc", "nfkc"), default="none",
        help="Unicode form that text is brought into; nfkc loses what it holds to be a matter of form, such as ² for 2",
    )  # fmt: skip
    parser.add_argument("--lowercase", action="store_true", help="bring text into lower case, which loses the case")
    parser.add_argument(
        "--digits", choices=("split", "keep"), default="split",
        help="whether each digit is a token, or a number may be one",
    )  # fmt: skip


def command(arguments: argparse.Namespace) -> int:
    form = TokenizerForm(arguments.kind, arguments.normalization, arguments.lowercase, arguments.digits)
    _check_arguments(arguments, form)
    output: Path = arguments.output
    files = find_inputs(arguments.input, arguments.other_files)
    if output.exists() and not arguments.overwrite:
        print(f"{output} exists: training to see whether it would be the same (--overwrite replaces it)")

    tokenizer = _train(arguments, files, form)
    write_file(output, tokenizer.to_str(pretty=True).encode(), arguments.overwrite, "another tokenizer")
    tokenizer = load_tokenizer(output)
    reports = _reports(arguments, files, tokenizer)
    total = total_of(reports)
    print_report(tokenizer, total, arguments.vocab_size, form)
    print_sources(reports)
    if arguments.report:
        figures = {"tokenizer": asdict(form) | {"vocab_size": tokenizer.get_vocab_size()}, "total": total.figures()}
        figures["sources"] = [each.figures() for each in reports]
        write_atomically(arguments.report, (json.dumps(figures, indent=2, ensure_ascii=False) + "\n").encode())
        print(f"wrote {arguments.report}")
    return 0


def _check_arguments(arguments: argparse.Namespace, form: TokenizerForm) -> None:
    if arguments.vocab_size < form.smallest_vocabulary:
        both = " as they begin and continue a word" if form.kind == "wordpiece" else ""
        raise CommandError(
            f"--vocab_size {arguments.vocab_size} is too small: the special tokens and the 256 bytes{both} take "
            f"{form.smallest_vocabulary} entries, so give more"
        )
    if form.kind == "unigram" and arguments.min_frequency is not None:
        raise CommandError("--min_frequency has no meaning for --kind unigram, which merges no pairs; leave it out")
    if not arguments.report_megabytes > 0:
        raise CommandError(f"--report_megabytes {arguments.report_megabytes} must be above 0")
    for flag, path in (("output", arguments.output), ("report", arguments.report)):
        if path:
            check_file(f"--{flag}", path)
    if arguments.report and arguments.report.resolve() == arguments.output.resolve():
        raise CommandError(f"--report {arguments.report} is the file of --output too; give another name")


def _train(arguments: argparse.Namespace, files: Sequence[InputFile], form: TokenizerForm) -> Tokenizer:
    """The tokenizer of all documents, or of the sample that --sample_bytes asks for."""
    show = sys.stderr.isatty()
    reading = (files, layout_of(arguments), arguments.skip_bad_lines)
    no_text = CorpusError(f"--input holds no text in {count(len(files), 'file')}; check --input and --text_field")
    if form.kind == "unigram" and not any(read_documents(*reading)):  # it cannot be trained on nothing
        raise no_text
    sample = None
    if arguments.sample_bytes:
        sample = choose_sample(read_documents(*reading, progress="choosing" if show else ""), arguments.sample_bytes)
        if sample.of_bytes and not sample.bytes:
            raise CommandError(
                f"--sample_bytes {arguments.sample_bytes} is too small to hold the document that was drawn first; "
                "give more"
            )
        print(
            f"trained on {sample.bytes:,} of {sample.of_bytes:,} bytes of text "
            f"({sample.bytes / max(sample.of_bytes, 1):.1%}), in {sample.documents:,} of "
            f"{count(sample.of_documents, 'document')}"
        )
    texts = read_documents(*reading, progress="reading" if show else "")
    chosen = (text for text in texts if sample is None or sample.holds(text))
    tokenizer = train_tokenizer(chosen, arguments.vocab_size, arguments.min_frequency or _MIN_FREQUENCY, form)
    if tokenizer.get_vocab_size() == form.smallest_vocabulary and not any(read_documents(*reading)):
        raise no_text
    return tokenizer


def _reports(arguments: argparse.Namespace, files: Sequence[InputFile], tokenizer: Tokenizer) -> list[SourceReport]:
    """The figures of each --input PATH, of whose documents about --report_megabytes in all are encoded."""
    every = max(1, round(sum(file.size for file in files) / (arguments.report_megabytes * 1e6)))
    reports = []
    for source in arguments.input:
        with redirect_stdout(None):  # what it does not read has been told
            paths = {file.path for file in find_inputs([source], arguments.other_files)}
        mine = [file for file in files if file.path in paths]
        progress = f"encoding {source}" if sys.stderr.isatty() else ""
        texts = read_documents(mine, layout_of(arguments), arguments.skip_bad_lines, progress)
        reports.append(report(tokenizer, texts, every, str(source)))
    return reports


def print_report(tokenizer: Tokenizer, result: SourceReport, wanted: int, form: TokenizerForm) -> None:
    """The lines on the tokenizer and on all input together."""
    size = tokenizer.get_vocab_size()
    learnt = "merges" if form.kind == "bpe" else "pieces"
    twice = " twice" if form.kind == "wordpiece" else ""
    smallest = form.smallest_vocabulary
    print(f"{size:,} entries: {len(SPECIAL_TOKENS)} special tokens, 256 bytes{twice}, {size - smallest:,} {learnt}")
    if size < wanted:
        lacking = "pieces" if form.kind == "unigram" else "pairs of --min_frequency"
        print(f"note: fewer than the {wanted:,} asked for, as the text has no more {lacking}")
    sampled = "" if result.sampled == 1 else f" (in {result.sampled:.1%} of the documents)"
    per_word = result.tokens / max(result.words, 1)
    print(f"{result.words:,} words, {result.tokens:,} tokens, {per_word:.3f} tokens per word{sampled}")
    single = sum(number < smallest for number in result.unused)
    entries = [tokenizer.id_to_token(number) for number in result.unused if number >= smallest]
    examples = f", such as {' '.join(str(entry) for entry in entries[:8])}" if entries else ""
    print(f"{len(result.unused):,} unused ids: {single} bytes and {len(entries):,} {learnt}{examples}")


def print_sources(reports: Sequence[SourceReport]) -> None:
    """A table with a line for each source."""
    width = max(len("source"), *(len(each.source) for each in reports))
    print(f"{'source':{width}}  {'words':>12}  tokens/word  bytes/token  unknown  unused ids")
    for each in reports:
        found = each.figures()
        print(
            f"{each.source:{width}}  {each.words:12,}  {found['tokens_per_word']:11.3f}  "
            f"{found['bytes_per_token']:11.3f}  {found['unknown_fraction']:7.2%}  {found['unused_ids']:10,}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Train a byte-level tokenizer with the special tokens at ids 0-15.")
    add_input_flags(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="tokenizer.json to write")
    _add_form_flags(parser)
    parser.add_argument(
        "--vocab_size", type=positive_int, default=16384, metavar="N",
        help=f"entries, {len(SPECIAL_TOKENS)} special tokens and 256 bytes included; at least "
        f"{DEFAULT_FORM.smallest_vocabulary}, for WordPiece {TokenizerForm('wordpiece').smallest_vocabulary}",
    )  # fmt: skip
    parser.add_argument(
        "--min_frequency", type=positive_int, metavar="N",
        help="times a pair must occur in the input to become an entry, for BPE and WordPiece (default: "
        f"{_MIN_FREQUENCY})",
    )  # fmt: skip
    parser.add_argument(
        "--sample_bytes", type=positive_int, metavar="N",
        help="train on at most N bytes of text: documents of all of --input, chosen by a hash of their text and so the "
        "same whatever the order of files (default: all; the input is read once more to choose)",
    )  # fmt: skip
    parser.add_argument(
        "--report_megabytes", type=float, default=100.0, metavar="MB",
        help="input, spread over all of it, to encode for the figures printed at the end",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures of each --input as JSON")
    add_overwrite_flag(parser, "a different tokenizer at --output")
    return run(command, parser.parse_args(argv), "no tokenizer was written; run again to start from the beginning")


if __name__ == "__main__":
    sys.exit(main())
