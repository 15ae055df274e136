"""Small corpora, a tokenizer and what comes out of tokenising them, for the tests of tokenize_corpus."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

from data.shard_paths import resolve_shards
from data.shards import open_shard
from preprocessing import tokenize_corpus
from preprocessing.inputs import find_inputs
from preprocessing.tokenize_corpus import Summary, tokenize_files
from preprocessing.tokenize_pool import EncoderSettings
from preprocessing.tokenizer import load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the of and to in a is that it was for on are as with his they at be this have from or one had by"


def make_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    texts = []
    for number in range(count):
        words = generator.choices(
            [*WORDS.split(), "naïve", "été.", "<mask>", "</s>", "'s"], k=generator.randrange(1, 60)
        )
        texts.append(f"{number} " + " ".join(words).replace("was for", "was\nfor"))
    return texts


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of 340 entries."""
    path = folder / "tokenizer.json"
    train_tokenizer(iter(make_texts(300)), 340, 2).save(str(path))
    return path


def make_corpus(folder: Path) -> Path:
    """The folder with 1,200 documents in four formats."""
    texts = make_texts(1200)
    (folder / "a.txt").write_text("\n\n".join(texts[:300]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[300:600]))
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(texts[600:900]).encode()))
    lines = "".join(json.dumps(text) + "\n" for text in texts[900:])
    import zstandard  # GPU machines, which run other tests of these corpora, need not have it

    (folder / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    return folder


def tokenize(
    corpus: Path, output: Path, tokenizer_path: Path, fraction: float = 0.0, skip: bool = False, **options
) -> Summary | None:
    settings = EncoderSettings(tokenizer_path, skip_bad_lines=skip, validation_fraction=fraction)
    """The totals, or None if the folder was complete already."""
    made = tokenize_files(find_inputs([corpus]), output, settings, **options)
    return made if isinstance(made, Summary) else None


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(folder: Path) -> list[list[int]]:
    """Token ids of every document of a shard folder."""
    shards = [open_shard(path) for path in resolve_shards(folder)]
    return [shard.document(index).tolist() for shard in shards for index in range(shard.num_documents)]


def decoded(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in stored(folder)]


def run(*arguments: object) -> int:
    return tokenize_corpus.main([str(argument) for argument in arguments])


def command(source: Path, output: Path, tokenizer_path: Path, *flags: object) -> list[str]:
    fixed = ["--input", source, "--output", output, "--tokenizer_path", tokenizer_path]
    fixed += ["--validation_fraction", 0.1, "--shard_size", 200_000, "--journal_seconds", 0]
    return [sys.executable, str(ROOT / "preprocessing" / "tokenize_corpus.py"), *map(str, [*fixed, *flags])]
