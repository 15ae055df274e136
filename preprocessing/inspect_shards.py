"""Inspection of a shard folder: what it holds, and with --verify whether all of it is intact.

python preprocessing/inspect_shards.py FOLDER [--verify] [--samples 3] [--json] [--write_offsets]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.atomic_io import json_lines
from data.cli import Parser
from data.offsets_table import TABLE_NAME, tables_beside, write_table
from data.shard_paths import find_shards, resolve_shards
from data.shards import (
    MANIFEST_NAME,
    Shard,
    ShardError,
    ShardFile,
    open_shard,
    read_manifest,
    sha256_file,
    tokenizer_hash,
)
from data.wording import count
from preprocessing.cli import CommandError, positive_int, run
from preprocessing.resumable_output import TOKENIZER_NAME
from preprocessing.tokenizer import load_tokenizer

_BLOCK = 1 << 20  # tokens or documents looked at together
_BAR = 50  # characters
_VALUES, _SHOWN_VALUES = 10_000, 20  # of a kept field: counted, and all shown where there are no more


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Totals of a folder, from manifest, headers and offsets. lengths: documents by length, the key being the power of
    two that starts the bin; targets: tokens that causal rows learn to predict; fields: of each kept field the documents
    by value, as JSON. Raises ShardError for what cannot be opened."""
    manifest = read_manifest(folder)
    shards = [open_shard(path) for path in (resolve_shards(folder) if manifest["shards"] else [])]
    bins = Counter[int]()
    shortest, longest = 2**63, 0
    for shard in shards:
        for lengths in _lengths(shard):
            starts, counts = np.unique(1 << np.log2(np.maximum(lengths, 1)).astype(np.int64), return_counts=True)
            bins.update(dict(zip(starts.tolist(), counts.tolist(), strict=True)))
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        shard.drop_cache()
    return {
        "path": str(folder),
        **{name: manifest[f"num_{name}"] for name in ("documents", "tokens", "words")},
        "shards": len(shards),
        "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "vocab_size": manifest["vocab_size"],
        "dtype": shards[0].dtype.name if shards else "",
        "tokenizer_hash": manifest["tokenizer_hash"],
        "created_by": manifest["created_by"],
        "shortest": shortest if bins else 0,
        "longest": longest,
        "lengths": dict(sorted(bins.items())),
        "targets": sum(_count_scored(shard) for shard in shards),
        "fields": count_values(folder, manifest["created_by"]),
    }


def _count_scored(shard: Shard) -> int:
    if not shard.has_marks:
        return shard.num_tokens
    starts = range(0, shard.num_tokens, _BLOCK)
    return sum(int(shard.scored(np.arange(start, min(start + _BLOCK, shard.num_tokens))).sum()) for start in starts)


def count_values(folder: Path, created_by: dict[str, Any]) -> dict[str, dict[str, int]]:
    """How many documents have which value of each kept field, most first; values beyond _VALUES are not counted."""
    counts = {name: Counter[str]() for name in created_by.get("keep_fields") or ()}
    for _, line in _sidecar_lines(folder, created_by):
        for name, value in line.items():
            text = json.dumps(value, ensure_ascii=False)
            if name in counts and (text in counts[name] or len(counts[name]) < _VALUES):
                counts[name][text] += 1
    return {name: dict(found.most_common()) for name, found in counts.items()}


def _sidecar_lines(folder: Path, created_by: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and kept fields of all documents of a folder. Raises ShardError for a line that is damaged."""
    number = 0
    for entry in created_by.get("sidecars", ()):
        for _, content in json_lines(folder / entry["file"]):
            if content is None:
                raise ShardError(f"{folder / entry['file']} is damaged; make the folder again")
            yield number, content
            number += 1


def _lengths(shard: Shard) -> Iterator[np.ndarray]:
    """Document lengths in blocks; int64."""
    for start in range(0, shard.num_documents, _BLOCK):
        yield np.diff(shard.offsets[start : start + _BLOCK + 1].astype(np.int64))


def verify_folder(folder: Path) -> list[str]:
    """Checks every byte of a folder against its manifest, and every id and offset; a sentence for each damaged file."""
    manifest = read_manifest(folder)
    found: list[str] = []
    for entry in manifest["shards"]:
        try:
            _verify_shard(folder / entry["file"], entry, manifest)
        except ShardError as error:
            found.append(str(error))
    for entry in manifest["created_by"].get("sidecars", ()):
        path = folder / entry["file"]
        if not path.is_file() or sha256_file(path) != entry["sha256"]:
            found.append(f"{path} is {'damaged' if path.is_file() else 'missing'}: it is not as the manifest says")
    found += [
        f"{folder / MANIFEST_NAME} is damaged: num_{key} is not the sum over its shards"
        for key in ("documents", "tokens", "words")
        if manifest[f"num_{key}"] != sum(entry[key] for entry in manifest["shards"])
    ]
    if not found and (folder / TABLE_NAME).exists():
        found += _verify_table(folder)
    copy = folder / TOKENIZER_NAME
    if copy.exists():
        try:
            if tokenizer_hash(copy) != manifest["tokenizer_hash"]:
                found.append(f"{copy} is not the tokenizer that the shards were made with")
        except ShardError as error:
            found.append(str(error))
    return found


def _verify_shard(path: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> None:
    shard = open_shard(path, manifest["tokenizer_hash"])
    checks = (
        ("size", path.stat().st_size, entry["bytes"]),
        ("number of documents", shard.num_documents, entry["documents"]),
        ("number of tokens", shard.num_tokens, entry["tokens"]),
        ("vocabulary size", shard.vocab_size, manifest["vocab_size"]),
        ("SHA-256", sha256_file(path), entry["sha256"]),
    )
    for name, found, expected in checks:
        if found != expected:
            raise ShardError(f"{path} is damaged: its {name} is {found} where the manifest says {expected}")
    if any((lengths < 0).any() for lengths in _lengths(shard)):
        raise ShardError(f"{path} is damaged: its document offsets do not ascend")
    for start in range(0, shard.num_tokens, _BLOCK):
        largest = int(shard.tokens[start : start + _BLOCK].max())
        if largest >= shard.vocab_size:
            raise ShardError(f"{path} is damaged: it holds id {largest}, outside its {shard.vocab_size} ids")
        shard.drop_cache()


def _verify_table(folder: Path) -> list[str]:
    """Compares the table of offsets with the shards."""
    shards = [open_shard(path, sha256=sha256) for path, sha256, *_ in find_shards(folder)]
    with suppress(ShardError, KeyError), tables_beside(shards) as tables:
        for shard in shards:
            tables[folder].read_offsets(shard, starts := np.empty(shard.num_documents, np.int64))
            if (starts != shard.offsets[:-1]).any():
                raise ShardError
        return []
    return [f"{folder / TABLE_NAME} is not of these shards; make it again with --write_offsets, or remove it"]


def sample_documents(folder: Path, count: int, tokens: int) -> list[tuple[int, int, str]]:
    """(number, length in tokens, decoded beginning) of documents spread evenly over a folder."""
    tokenizer = load_tokenizer(folder / TOKENIZER_NAME)
    shards = [open_shard(path, tokenizer_hash(folder / TOKENIZER_NAME)) for path in resolve_shards(folder)]
    firsts = np.cumsum([0, *(shard.num_documents for shard in shards)])
    count = min(count, int(firsts[-1]))
    chosen = [int((2 * number + 1) * firsts[-1] // (2 * count)) for number in range(count)]
    samples = []
    for number in chosen:
        index = int(np.searchsorted(firsts, number, side="right")) - 1
        document = shards[index].document(number - int(firsts[index]))
        text = tokenizer.decode(document[:tokens].tolist(), skip_special_tokens=False)
        samples.append((number, len(document), text))
    return samples


def print_contents(contents: dict[str, Any]) -> None:
    """The readable form."""
    documents, words, tokens = (contents[name] for name in ("documents", "words", "tokens"))
    print(contents["path"])
    per_word = f" ({tokens / words:.3f} per word)" if words else ""
    print(f"  {count(documents, 'document')}, {count(words, 'word')}, {count(tokens, 'token')}{per_word}")
    dtype, targets = contents["dtype"] or "no tokens", contents["targets"]
    print(f"  {count(contents['shards'], 'shard')}, {contents['bytes'] / 1e6:,.1f} MB, {dtype}")
    print(f"  {contents['vocab_size']:,} ids, tokenizer {contents['tokenizer_hash'][:12]}")
    if targets < tokens:
        print(f"  {targets:,} tokens ({targets / tokens:.1%}) are targets of causal rows")
    print(f"  made by {contents['created_by'].get('script', 'an unknown program')}")
    mean = f"mean {tokens / max(documents, 1):,.1f}"
    print(f"  document length in tokens: {contents['shortest']:,} to {contents['longest']:,}, {mean}")
    most = max(contents["lengths"].values(), default=1)
    for start, number in contents["lengths"].items():
        bar = "#" * max(1, round(_BAR * number / most))
        print(f"  {start:>9,} - {2 * start - 1:<9,} {number:>12,}  {bar}")
    for name, values in contents["fields"].items():
        if len(values) > _SHOWN_VALUES:
            some = f"{len(values):,} values" if len(values) < _VALUES else f"{_VALUES:,} values or more"
            print(f"  {name}: {some}, such as {', '.join(list(values)[:3])}")
        else:
            print(f"  {name}: {', '.join(f'{value} {number:,}' for value, number in values.items())}")


def _folders(path: Path) -> list[Path]:
    """The folder itself, or its splits."""
    splits = [path / name for name in ("train", "validation") if (path / name / MANIFEST_NAME).is_file()]
    if not path.is_dir():
        raise CommandError(f"{path} is not a folder; give a shard folder made by preprocessing/tokenize_corpus.py")
    return [path] if (path / MANIFEST_NAME).exists() or not splits else splits


def command(arguments: argparse.Namespace) -> int:
    damage: list[str] = []
    contents: list[dict[str, Any]] = []
    for folder in _folders(arguments.folder):
        if arguments.write_offsets:
            find_shards(folder)  # all are there
            write_table(folder, [ShardFile(**entry) for entry in read_manifest(folder)["shards"]])
        if arguments.verify:
            damage += verify_folder(folder)
        if damage:
            continue
        contents.append(inspect_folder(folder))
        if arguments.json:
            continue
        print_contents(contents[-1])
        if arguments.samples > 0 and contents[-1]["documents"] and (folder / TOKENIZER_NAME).exists():
            samples = sample_documents(folder, arguments.samples, arguments.sample_tokens)
            chosen = {number for number, _, _ in samples}
            fields = {n: line for n, line in _sidecar_lines(folder, contents[-1]["created_by"]) if n in chosen}
            for number, length, text in samples:
                print(f"\n  document {number:,} ({length:,} tokens)")
                if number in fields:
                    print(f"    {json.dumps(fields[number], ensure_ascii=False)}")
                print("    " + text.replace("\n", "\n    "))
            print()
    if arguments.json:
        print(json.dumps({"folders": contents, "damage": damage}))
    elif arguments.verify and not damage:
        print("verified: every file is as the manifest says")
    for sentence in damage:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if damage else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Show totals, document lengths and samples of a shard folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="shard folder, or one with train and validation")
    parser.add_argument(
        "--verify", action="store_true", help="check checksums, sizes, offsets and ids; exit 1 on damage"
    )
    parser.add_argument(
        "--write_offsets", action="store_true",
        help=f"write {TABLE_NAME}, so that a node opens one file for the lengths of all documents and not each shard "
        "(tokenize_corpus.py has written it where there are 64 shards or more)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="documents to decode and print, spread over the folder"
    )
    parser.add_argument(
        "--sample_tokens", type=positive_int, default=80, metavar="N", help="tokens to print of each sample"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, without samples")
    return run(command, parser.parse_args(argv), "nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
