"""Overlap of a corpus with evaluation data: documents that share n-grams of words with it, as a report and as a list.

python preprocessing/overlap.py shards/train --against shards/validation blimp/*.jsonl [--output overlap.jsonl]

The criterion is GPT-3's (Brown et al. 2020, arXiv 2005.14165, appendix C): a document overlaps where 13 words in a row
also stand in the evaluation data, without regard to case, punctuation and spaces. Tokens are decoded, normalised (NFKC,
case folded) and cut into runs of letters and digits; Chinese and Japanese characters are a word each. Evaluation texts
pass through the corpus's tokenizer first, so that one that loses something (accents, rare characters) hides no match.

An evaluation item is a line of a file or a document of a shard; no n-gram reaches from one string of a JSON line, or
column of a .tsv, into the next. They are held as 64-bit hashes, 50 bytes a word (120 while they are sorted). A match is
verified word by word; of two n-grams with one hash (3 in a million among ten million) only the first is found.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer

from data.atomic_io import write_atomically
from data.cli import Parser
from data.shard_paths import find_shards
from data.shards import MANIFEST_NAME, Shard, open_shard, tokenizer_hash
from data.wording import count
from preprocessing.cli import CommandError, check_file, positive_int, run
from preprocessing.resumable_output import TOKENIZER_NAME
from preprocessing.tokenizer import load_tokenizer

_CHARACTER_WORDS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"  # kana and Chinese characters
_WORD = re.compile(f"[{_CHARACTER_WORDS}]|[^\\W_{_CHARACTER_WORDS}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word loses bits
_TEXT_SUFFIXES = (".jsonl", ".txt", ".tsv")
_LISTED_WORDS = 100  # of a longer matching text the beginning
_EXAMPLES, _EXAMPLE_CHARACTERS = 5, 160


class Item(NamedTuple):
    """An evaluation item. number: its line, from 1, or its document in a shard, from 0."""

    file: str
    number: int
    texts: list[str]


class Match(NamedTuple):
    """What a document shares. number: n-grams that match; text: the longest run of them; item: where that begins."""

    number: int
    text: str
    item: int


def split_words(text: str) -> list[str]:
    """The normalised words of a text."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _hash_words(words: Sequence[str]) -> np.ndarray:
    """uint64 [words]: Python's own hash, which is keyed anew in each process."""
    return np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)


def _hash_ngrams(words: np.ndarray, n: int) -> np.ndarray:
    """uint64 [max(words - n + 1, 0)]: a polynomial modulo 2^64 over each n word hashes in a row."""
    hashes = np.zeros(max(len(words) - n + 1, 0), np.uint64)
    for offset in range(n if len(hashes) else 0):
        hashes = hashes * _MULTIPLIER + words[offset : offset + len(hashes)]
    return hashes


class EvaluationNgrams:
    """The n-grams of evaluation items, and which of them have been met in the corpus."""

    def __init__(self, items: Iterable[Item], n: int) -> None:
        self.n = n
        self.items: list[tuple[str, int]] = []  # file and number of each
        words, starts, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        total = 0
        for item in items:
            for text in item.texts:
                hashed = _hash_words(split_words(text))
                if len(hashed) >= n:
                    words.append(hashed)
                    starts.append(np.arange(total, total + len(hashed) - n + 1))
                    owners.append(np.full(len(starts[-1]), len(self.items)))
                    total += len(hashed)
            self.items.append((item.file, item.number))
        self._words, self._owners, every_start = np.concatenate(words), np.concatenate(owners), np.concatenate(starts)
        hashes = _hash_ngrams(self._words, n)[every_start]  # none that reaches from a text into the next
        self._hashes, first, self._slots = np.unique(hashes, return_index=True, return_inverse=True)
        self._first_start, self._first_owner = every_start[first], self._owners[first]  # of each distinct n-gram
        self._met = np.zeros(len(self._hashes), bool)

    def match(self, words: Sequence[str]) -> Match | None:
        """What a document of the corpus shares with the items; its n-grams count as met from now on."""
        hashed = _hash_words(words)
        hashes = _hash_ngrams(hashed, self.n)
        if not len(hashes) or not len(self._hashes):
            return None
        slots = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        at = np.flatnonzero(self._hashes[slots] == hashes)
        window = np.arange(self.n)
        same = self._words[self._first_start[slots[at], None] + window] == hashed[at[:, None] + window]
        at = at[same.all(axis=1)]
        if not len(at):
            return None
        self._met[slots[at]] = True
        bounds = np.flatnonzero(np.diff(at, prepend=-2, append=at[-1] + 2) != 1)  # of runs of n-grams in a row
        longest = int(np.argmax(np.diff(bounds)))
        begin, end = int(at[bounds[longest]]), int(at[bounds[longest + 1] - 1]) + self.n
        text = " ".join(words[begin : min(end, begin + _LISTED_WORDS)])
        return Match(len(at), text, int(self._first_owner[slots[begin]]))

    def items_by_file(self) -> dict[str, tuple[int, int, int]]:
        """Of each file the items that share an n-gram with the corpus, those that have any n-gram, and all items."""
        every = Counter(file for file, _ in self.items)
        usable = Counter(self.items[owner][0] for owner in np.unique(self._owners).tolist())
        met = Counter(self.items[owner][0] for owner in np.unique(self._owners[self._met[self._slots]]).tolist())
        return {file: (met[file], usable[file], number) for file, number in every.items()}


def open_shards(path: str | Path, given: Path | None) -> tuple[list[Shard], Tokenizer]:
    """The shards that a path names, and their tokenizer: the one given, or the one beside the first shard."""
    found = find_shards(path)
    tokenizer_path = given or found[0].path.parent / TOKENIZER_NAME
    if not tokenizer_path.is_file():
        raise CommandError(f"{tokenizer_path} does not exist; give the tokenizer of {path} as --tokenizer_path")
    digest = tokenizer_hash(tokenizer_path)
    return [open_shard(shard.path, digest, shard.sha256) for shard in found], load_tokenizer(tokenizer_path)


def decoded_documents(shard: Shard, tokenizer: Tokenizer) -> Iterator[str]:
    for number in range(shard.num_documents):
        yield tokenizer.decode(shard.document(number).tolist(), skip_special_tokens=False)
    shard.drop_cache()


def read_items(path: Path, tokenizer_path: Path | None) -> Iterator[Item]:
    """The evaluation items of a text file, a folder of text files, or shards. Raises CommandError, ShardError."""
    if path.is_dir() and not (path / MANIFEST_NAME).exists():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXT_SUFFIXES and file.is_file())
        if files:
            for file in files:
                yield from _text_items(file)
            return
    if path.suffix in _TEXT_SUFFIXES:
        yield from _text_items(path)
    elif path.is_file() and path.suffix != ".shard":
        raise CommandError(f"--against {path} is neither a shard nor one of {', '.join(_TEXT_SUFFIXES)}; convert it")
    else:
        shards, tokenizer = open_shards(path, tokenizer_path)
        for shard in shards:
            for number, text in enumerate(decoded_documents(shard, tokenizer)):
                yield Item(str(shard.path), number, [text])


def _text_items(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig")
                content = json.loads(text) if path.suffix == ".jsonl" and text.strip() else text.split("\t")
            except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
                kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
                raise CommandError(f"{path}, line {number}, is not valid {kind}; correct it or leave it out") from None
            if text.strip():
                yield Item(str(path), number, list(_strings(content)))


def _strings(content: Any) -> Iterator[str]:
    """Every string value, however deep it lies; keys are none."""
    stack = [content]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value.encode(errors="replace").decode()  # JSON may hold half a surrogate pair
        elif isinstance(value, dict | list):
            stack += value.values() if isinstance(value, dict) else value


def _through(tokenizer: Tokenizer, items: Iterable[Item]) -> Iterator[Item]:
    """Items as they would stand in the corpus: encoded and decoded."""
    for item in items:
        encoded = tokenizer.encode_batch(item.texts, add_special_tokens=False)
        yield item._replace(texts=[tokenizer.decode(each.ids, skip_special_tokens=False) for each in encoded])


def command(arguments: argparse.Namespace) -> int:
    if arguments.output:
        check_file("--output", arguments.output)
    shards, tokenizer = open_shards(arguments.shards, arguments.tokenizer_path)
    paths = dict.fromkeys(arguments.against)  # each once
    items = (item for path in paths for item in read_items(path, arguments.tokenizer_path))
    evaluation = EvaluationNgrams(_through(tokenizer, items), arguments.ngram)
    both = {shard.path.resolve() for shard in shards} & {Path(file).resolve() for file, _ in evaluation.items}
    if both:
        raise CommandError(f"{min(both)} is in SHARDS and in --against; leave it out of one of them")
    overlaps, ngrams = [], 0
    for shard in shards:
        for number, text in enumerate(decoded_documents(shard, tokenizer)):
            words = split_words(text)
            size = max(len(words) - arguments.ngram + 1, 0)
            ngrams += size
            if match := evaluation.match(words):
                file, line = evaluation.items[match.item]
                place = {"shard": str(shard.path), "document": number, "ngrams": match.number, "of": size}
                overlaps.append({**place, "file": file, "line": line, "text": match.text})
    if arguments.output:
        write_atomically(arguments.output, "".join(json.dumps(each) + "\n" for each in overlaps).encode())
    _report(arguments, evaluation, overlaps, sum(shard.num_documents for shard in shards), ngrams)
    return 0


def _report(
    arguments: argparse.Namespace,
    evaluation: EvaluationNgrams,
    overlaps: list[dict[str, Any]],
    documents: int,
    ngrams: int,
) -> None:
    met = sum(each["ngrams"] for each in overlaps)
    print(f"{arguments.shards}, {arguments.ngram}-grams of words")
    print(f"  {len(overlaps):,} of {count(documents, 'document')} ({_percent(len(overlaps), documents)}) overlap")
    print(f"  {met:,} of {count(ngrams, 'n-gram')} ({_percent(met, ngrams)}) stand in the evaluation data")
    for file, (touched, usable, every) in evaluation.items_by_file().items():
        short = f"; {every - usable:,} too short to be found" if usable < every else ""
        print(f"  {file}: {touched:,} of {count(every, 'item')} ({_percent(touched, every)}) in the corpus{short}")
    for each in sorted(overlaps, key=lambda each: -each["ngrams"])[:_EXAMPLES]:
        text = each["text"][:_EXAMPLE_CHARACTERS] + "..." * (len(each["text"]) > _EXAMPLE_CHARACTERS)
        print(f"\n  {each['shard']}, document {each['document']}: {each['ngrams']:,} of {each['of']:,} n-grams")
        print(f"    {each['file']}, {each['line']}: {text}")


def _percent(number: int, of: int) -> str:
    return f"{100 * number / max(of, 1):.3g}%"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Report and list the documents of a corpus that share n-grams of words with evaluation data.")
    parser.add_argument("shards", metavar="SHARDS", help="shard folder, .shard file, or a glob of these in quotes")
    parser.add_argument(
        "--against", nargs="+", required=True, type=Path, metavar="PATH",
        help="evaluation data: .jsonl (every string in a line), .txt and .tsv (lines), folders of these, and shards, "
        "such as the held-out part",
    )  # fmt: skip
    parser.add_argument("--ngram", type=positive_int, default=13, metavar="N", help="words in a row that must be equal")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.jsonl", help="write the documents to leave out, one JSON object a line"
    )
    parser.add_argument(
        "--tokenizer_path", type=Path, metavar="FILE", help="tokenizer of all shards (default: the one beside them)"
    )
    return run(command, parser.parse_args(argv), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
