"""Import of corpora that other projects have tokenised: Megatron, nanoGPT, NumPy, Hugging Face datasets, GPT-BERT.

    python preprocessing/import_tokens.py --input my_text_document.bin --output shards/ --tokenizer_path tokenizer.json

Begin, end and padding tokens at either end of a document are taken off, since the loader puts its own there; inside a
document they stay. Documents that are empty after that are dropped. Words, and whether a document is held out, follow
from the decoded text as they follow from the text in tokenize_corpus.py: the split is the same where the tokenizer
gives texts back exactly. Memory does not depend on the files (token_readers.py): a long document is decoded in pieces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from data.cli import Parser
from data.shards import token_dtype
from data.special_tokens import read_special_tokens
from data.wording import count
from preprocessing.cli import DEFAULT_SHARD_SIZE, CommandError, add_shard_flags, run
from preprocessing.inputs import InputFile, check_unchanged
from preprocessing.resumable_output import FolderPlan, OutputFolder, Totals, complete_line
from preprocessing.slices import EncodedChunk
from preprocessing.token_readers import FORMATS, GPT_BERT, Block, TokenFile, find_token_files
from preprocessing.tokenize_pool import is_validation
from preprocessing.tokenizer import load_tokenizer, special_ids, vocabulary_size

_SAVE_SECONDS = 10.0


class DocumentImporter:
    """Blocks to documents as shards hold them."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], validation_fraction: float) -> None:
        """ends: ids that are taken off at either end of a document."""
        self._tokenizer = tokenizer
        self._fraction = validation_fraction
        self._is_special = np.zeros(vocabulary_size(tokenizer), bool)
        self._is_special[special_ids(tokenizer)] = True
        self._is_end = np.zeros_like(self._is_special)
        self._is_end[list(ends)] = True

    def encode(self, files: Sequence[TokenFile], position: Mapping[str, Any], progress: bool) -> Iterator[EncodedChunk]:
        """What lies behind a position. Beside the place in a file it holds, of a document that goes on, `held`, the end
        tokens last read, which are taken off if it ends there, and `in_word`, whether its text is inside a word."""
        held, in_word = position.get("held"), position.get("in_word", False)  # held: None outside a document
        for number in range(position.get("file", 0), len(files)):
            file = files[number]
            # "document": of a GPT-BERT file whose import an older version of this program has begun.
            at = position.get("at", {"row": position.get("document", 0)})
            start = at if number == position.get("file", 0) else {}
            for block in tqdm(file.blocks(start), unit="block", desc=file.path.name, disable=not progress):
                tokens, closes = self._checked(file, block), len(block.ends) > 0
                if held is None and closes:
                    chunk = self._documents(tokens, block.ends)
                else:
                    chunk, held, in_word = self._piece(tokens, held, closes, in_word)
                yield replace(chunk, position={"file": number, "at": block.after, "held": held, "in_word": in_word})

    def _checked(self, file: TokenFile, block: Block) -> np.ndarray:
        """The ids as int64. Raises CommandError for one that the tokenizer does not have."""
        tokens = block.tokens.astype(np.int64)
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= len(self._is_end)):
            index = int(np.argmax((tokens < 0) | (tokens >= len(self._is_end))))
            inside = index if file.unit == "token" else int(np.searchsorted(block.ends, index, "right"))
            raise CommandError(
                f"--input {file.path}, {file.unit} {block.first + inside:,}: id {block.tokens[index]} is not one of "
                f"the tokenizer's {len(self._is_end):,} ids; give --tokenizer_path the tokenizer that made the file"
            )
        return tokens

    def _documents(self, tokens: np.ndarray, ends: np.ndarray) -> EncodedChunk:
        """Whole documents."""
        inner = np.flatnonzero(~self._is_end[tokens])
        low, high = np.searchsorted(inner, np.concatenate([[0], ends[:-1]])), np.searchsorted(inner, ends)
        kept = low < high  # documents that hold something
        starts, stops = inner[low[kept]], inner[high[kept] - 1] + 1
        texts = self._tokenizer.decode_batch([tokens[a:b].tolist() for a, b in zip(starts, stops, strict=True)])
        edges = np.zeros(len(tokens) + 1, np.int8)
        edges[starts] += 1
        edges[stops] -= 1
        inside = tokens[np.cumsum(edges)[:-1] > 0]
        return self._chunk(inside, stops - starts, texts, len(tokens), int((~kept).sum()))

    def _piece(
        self, tokens: np.ndarray, held: list[int] | None, closes: bool, in_word: bool
    ) -> tuple[EncodedChunk, list[int] | None, bool]:
        """A piece of a long document, then `held` and `in_word` behind it."""
        read = len(tokens)
        tokens = np.concatenate([np.array(held or [], np.int64), tokens])
        inner = np.flatnonzero(~self._is_end[tokens])
        if held is None and not len(inner):  # nothing but end tokens so far: it has not begun
            return self._chunk(tokens[:0], np.empty(0, np.int64), [], read, 0), None, False
        start = int(inner[0]) if held is None else 0
        stop = int(inner[-1]) + 1 if len(inner) else 0
        text = self._tokenizer.decode(tokens[start:stop].tolist())
        after = None if closes else tokens[stop:].tolist()
        chunk = self._chunk(tokens[start:stop], np.array([stop - start]), [text], read, 0)
        stripped = start + (len(tokens) - stop if closes else 0)
        chunk = replace(chunk, opens=held is None, closes=closes, counts={**chunk.counts, "stripped_tokens": stripped})
        if text and in_word and held is not None and not text[0].isspace():
            chunk.words[0] -= 1  # counted with the piece before
        return chunk, after, not text[-1].isspace() if text else in_word

    def _chunk(self, tokens: np.ndarray, lengths: np.ndarray, texts: list[str], read: int, empty: int) -> EncodedChunk:
        return EncodedChunk(
            tokens=tokens.astype(token_dtype(len(self._is_end))),
            lengths=lengths.astype(np.int64),
            words=np.array([len(text.split()) for text in texts], np.int64),
            validation=np.array([is_validation(text, self._fraction) for text in texts], bool),
            position={},
            counts={
                "empty_documents": empty,
                "stripped_tokens": read - len(tokens),
                "special_tokens": int(self._is_special[tokens].sum()),
            },
        )


def import_tokens(
    inputs: Sequence[Path],
    output: Path,
    tokenizer_path: Path,
    *,
    form: str = "auto",
    document_end: str | None = None,
    special_tokens: str = "",
    validation_fraction: float = 0.0,
    shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    progress: bool = False,
) -> Totals | None:
    """Token files to a shard folder; None if the folder was complete already. Raises CommandError or ShardError."""
    tokenizer = load_tokenizer(tokenizer_path)
    special, end = read_special_tokens(tokenizer_path, special_tokens), _end_id(document_end, tokenizer)
    sources, files = find_token_files(inputs, form, end)
    script = f"preprocessing/{'import_gpt_bert' if form == GPT_BERT else 'import_tokens'}.py"
    options = {"document_end": end, "validation_fraction": validation_fraction}
    given = {"script": script, **{name: value for name, value in options.items() if value or form != GPT_BERT}}
    plan = FolderPlan(output, files, tokenizer_path, special_tokens, shard_size, given)
    folder = OutputFolder(plan)
    with folder.making(0, _SAVE_SECONDS, overwrite) as slices:
        if slices is None:
            return None
        if not slices.progress.complete:
            ends = special.ends | ({end} if end is not None else set())
            importer = DocumentImporter(tokenizer, ends, validation_fraction)
            chunks = importer.encode(sources, slices.progress.position, progress)
            slices.write(_while_unchanged(chunks, files))
    totals = folder.assemble()
    if totals is not None and not any(totals.shards.values()):
        raise CommandError(f"--input holds no tokens but begin and end tokens in {count(len(files), 'file')}")
    return totals


def _while_unchanged(chunks: Iterator[EncodedChunk], files: Sequence[InputFile]) -> Iterator[EncodedChunk]:
    yield from chunks
    for file in files:
        check_unchanged(file)


def _end_id(text: str | None, tokenizer: Tokenizer) -> int | None:
    if text is None:
        return None
    number = int(text) if text.isdecimal() else tokenizer.token_to_id(text)
    if number is None or number >= vocabulary_size(tokenizer):
        raise CommandError(
            f"--document_end {text} is no token of the tokenizer, nor one of its {vocabulary_size(tokenizer):,} ids"
        )
    return number


def command(arguments: argparse.Namespace) -> int:
    totals = import_tokens(
        arguments.input,
        arguments.output,
        arguments.tokenizer_path,
        form=arguments.format,
        document_end=arguments.document_end,
        special_tokens=arguments.special_tokens,
        validation_fraction=arguments.validation_fraction,
        shard_size=arguments.shard_size,
        overwrite=arguments.overwrite,
        progress=sys.stderr.isatty(),
    )
    if totals is None:
        print(complete_line(arguments.output))
        return 0
    counts = totals.counts
    print("\n".join(totals.lines()))
    print(f"dropped: {count(counts['empty_documents'], 'empty document')}")
    print(f"dropped: {count(counts['stripped_tokens'], 'begin, end and padding token')} at ends")
    print(f"kept: {count(counts['special_tokens'], 'special id')} inside documents (never masked in training)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Import tokenised corpora; run again after an interruption, it continues.")
    parser.add_argument(
        "--input", nargs="+", required=True, type=Path, metavar="PATH",
        help="files, folders of them, or the name that Megatron's .bin and .idx share",
    )  # fmt: skip
    add_shard_flags(parser, "tokenizer.json that made the files")
    parser.add_argument(
        "--format", choices=("auto", *FORMATS), default="auto",
        help="auto: by suffix; a .bin is Megatron's if an .idx lies beside it, else nanoGPT's",
    )  # fmt: skip
    parser.add_argument(
        "--document_end", metavar="ID|TOKEN",
        help="what ends a document in a stream (nanogpt, 1-D npy), such as '</s>'; digits are an id",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    return run(command, arguments, f"{arguments.output} is unfinished; the same command continues where it stopped")


if __name__ == "__main__":
    sys.exit(main())
