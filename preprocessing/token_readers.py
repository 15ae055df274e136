"""Readers of tokenised corpora in other projects' formats: Megatron, nanoGPT, NumPy, Hugging Face datasets, GPT-BERT.

Every format becomes blocks: token ids, and where among them documents end. Flat files are memory-mapped. A document
longer than a block comes in pieces, so that memory does not depend on the files.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.wording import count
from preprocessing.cli import CommandError
from preprocessing.inputs import InputFile
from preprocessing.tables import open_table

# llm.c and modded-nanogpt begin a nanoGPT stream with 256 int32: this number, the version, the number of tokens.
_LLM_C_MAGIC, _LLM_C_HEADER = 20240520, 1024
GPT_BERT = "gpt-bert"
FORMATS = ("megatron", "nanogpt", "npy", "datasets", GPT_BERT)
_BY_SUFFIX = {".npy": "npy", ".arrow": "datasets", ".parquet": "datasets"}
_BLOCK_TOKENS = 1 << 19  # the first piece of a long document decodes to all the characters that decide its split
_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_ROWS = 256
_BLOCK_TENSORS = 1000
_MEGATRON = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, ends of documents and a first 0
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Block:
    """Tokens in a row, and where among them documents end: whole documents; or a piece of a long one, without an end
    unless it is the last piece."""

    tokens: np.ndarray  # [N] integers
    ends: np.ndarray  # [documents] int64, ascending
    after: dict[str, int]  # position behind the block
    first: int  # number of its first token or row in the file


@dataclass(frozen=True)
class TokenFile:
    """An input file whose form was checked. `blocks` reads on from a position; {} is the beginning."""

    path: Path
    unit: str  # "token", "row" or "document": how a place in the file is given
    blocks: Callable[[Mapping[str, int]], Iterator[Block]]


def _flat_blocks(tokens: np.ndarray, end: int, position: Mapping[str, int]) -> Iterator[Block]:
    """Of one stream, in which every `end` ends a document, as does the end of the file."""
    start, piece = position.get("token", 0), position.get("piece", 0)
    while start < len(tokens):
        block = tokens[start : start + _BLOCK_TOKENS]
        ends = np.flatnonzero(block == end) + 1
        if start + len(block) == len(tokens) and not (len(ends) and ends[-1] == len(block)):
            ends = np.append(ends, len(block))
        ends = ends[:1] if piece else ends
        piece = int(not len(ends))
        block = block if piece else block[: ends[-1]]
        yield Block(block, ends, {"token": start + len(block), "piece": piece}, start)
        start += len(block)


def _ended_blocks(
    tokens: np.ndarray, documents: int, ends_of: Callable[[int, int], np.ndarray], position: Mapping[str, int]
) -> Iterator[Block]:
    """Of documents one after the other; ends_of(i, j): where the documents from i up to j end among the tokens."""
    start, document, piece = (position.get(key, 0) for key in ("token", "document", "piece"))
    while document < documents:
        ends = ends_of(document, min(document + _BLOCK_DOCUMENTS, documents))
        ends = ends[: np.searchsorted(ends, start + _BLOCK_TOKENS, "right")] - start
        ends = ends[:1] if piece else ends
        piece = int(not len(ends))
        block = tokens[start : start + (_BLOCK_TOKENS if piece else int(ends[-1]))]
        document += len(ends)
        yield Block(block, ends, {"token": start + len(block), "document": document, "piece": piece}, start)
        start += len(block)


def _nanogpt(path: Path, end: int) -> TokenFile:
    if path.stat().st_size % 2:
        raise CommandError(f"--input {path} has an odd number of bytes, so it is no stream of uint16; copy it again")
    tokens = np.memmap(path, "<u2", "r")
    header = np.fromfile(path, "<i4", _LLM_C_HEADER // 4)
    if len(header) and header[0] == _LLM_C_MAGIC:
        tokens = tokens[_LLM_C_HEADER // 2 :]
        if len(header) < _LLM_C_HEADER // 4 or header[1] != 1 or header[2] != len(tokens):
            raise CommandError(
                f"--input {path} has llm.c's header, but not of version 1 with the {len(tokens):,} uint16 tokens that "
                "follow it"
            )
    return TokenFile(path, "token", partial(_flat_blocks, tokens, end))


def _npy(path: Path, end: int | None) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise CommandError(f"--input {path} is damaged or no .npy file ({str(error).splitlines()[0]})") from None
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu" or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", stored column by column"
        raise CommandError(
            f"--input {path} holds {array.dtype} of shape {list(array.shape)}{order}; save integers as one stream "
            "(1-D) or one document a row (2-D, C order)"
        )
    if array.ndim == 1:
        return TokenFile(path, "token", partial(_flat_blocks, array, _given(end, path)))
    rows, width = array.shape

    def ends_of(first: int, last: int) -> np.ndarray:
        return np.arange(first + 1, last + 1) * width

    return TokenFile(path, "token", partial(_ended_blocks, array.reshape(-1), rows, ends_of))


def _given(end: int | None, path: Path) -> int:
    if end is None:
        raise CommandError(f"--input {path} is one stream of tokens; say with --document_end what ends a document")
    return end


def _megatron(path: Path) -> TokenFile:
    """The tokens are beside the index: sequences one after the other, and documents of one or more sequences."""
    index = path.with_suffix(".idx")
    with open(index, "rb") as file:
        header = file.read(_MEGATRON.size)
    if len(header) < _MEGATRON.size or not header.startswith(b"MMIDIDX\0\0"):
        raise CommandError(f"--input {index} is not an index of Megatron (MMIDIDX)")
    _, version, code, sequences, boundaries = _MEGATRON.unpack(header)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise CommandError(
            f"--input {index} has version {version} and dtype code {code}; version 1 with integers "
            f"(codes {', '.join(map(str, _MEGATRON_DTYPES))}) is read"
        )
    expected = _MEGATRON.size + 12 * sequences + 8 * boundaries
    if index.stat().st_size != expected or not sequences or not boundaries:
        raise CommandError(
            f"--input {index} has {index.stat().st_size:,} bytes where its header asks for {expected:,}, for "
            f"{count(sequences, 'sequence')}; copy it again"
        )
    sizes = np.memmap(index, "<i4", "r", _MEGATRON.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _MEGATRON.size + 4 * sequences, (sequences,))
    firsts = np.memmap(index, "<i8", "r", _MEGATRON.size + 12 * sequences, (boundaries,))
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    total = 0  # bytes
    for start in range(0, sequences, _BLOCK_TOKENS):
        lengths = sizes[start : start + _BLOCK_TOKENS].astype(np.int64) * dtype.itemsize
        behind = total + np.cumsum(lengths)
        if (lengths < 0).any() or (pointers[start : start + _BLOCK_TOKENS] != behind - lengths).any():
            raise CommandError(f"--input {index} is damaged: its sequences do not lie one after the other")
        total = int(behind[-1])
    blocks = (firsts[start : start + _BLOCK_TOKENS + 1] for start in range(0, boundaries, _BLOCK_TOKENS))
    if firsts[0] != 0 or firsts[-1] != sequences or any((np.diff(block) < 0).any() for block in blocks):
        raise CommandError(f"--input {index} is damaged: its documents do not span its {count(sequences, 'sequence')}")
    if path.stat().st_size != total or not total:
        raise CommandError(f"--input {path} has {path.stat().st_size:,} bytes where its index asks for {total:,}")

    def ends_of(first: int, last: int) -> np.ndarray:
        numbers = firsts[first + 1 : last + 1]
        last_byte = pointers[np.minimum(numbers, sequences - 1)]
        return np.where(numbers == sequences, total, last_byte) // dtype.itemsize

    return TokenFile(path, "token", partial(_ended_blocks, np.memmap(path, dtype, "r"), boundaries - 1, ends_of))


def _datasets(path: Path) -> TokenFile:
    """A file of Arrow, as save_to_disk or datasets' cache has it, or of Parquet: a document a row of `input_ids`."""
    kind = "parquet" if path.suffix == ".parquet" else "arrow"
    with open_table(path, kind) as table:
        column = table.schema.field("input_ids").type if "input_ids" in table.schema.names else None
        if column is None or not table.is_list(column) or not table.is_integer(column.value_type):
            raise CommandError(
                f"--input {path} needs a column input_ids of lists of integers; it has "
                + ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            )
    return TokenFile(path, "row", partial(_table_blocks, path, kind))


def _table_blocks(path: Path, kind: str, position: Mapping[str, int]) -> Iterator[Block]:
    row = position.get("row", 0)
    with open_table(path, kind) as table:
        for batch, _ in table.batches(["input_ids"], row, _BLOCK_ROWS):
            lists = batch.column("input_ids")
            flat = lists.flatten()  # rows that are null hold nothing
            if flat.null_count:
                raise CommandError(f"--input {path}: from row {row:,} on, an id in input_ids is null")
            ends = np.cumsum(table.lengths(lists), dtype=np.int64)
            after = {"row": row + len(lists)}
            yield Block(flat.to_numpy(zero_copy_only=False), ends, after, row)
            row = after["row"]


def load_published(path: Path) -> Any:
    """What torch.save wrote, on the CPU, mapped rather than read where the format allows. Raises CommandError."""
    import pickle

    import torch

    if not path.is_file():
        raise CommandError(f"--input {path} does not exist or is no file")
    try:
        # A training state may hold its command-line arguments; a Namespace of plain values can do no harm.
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # torch.save's old format has no maps
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise CommandError(f"--input {path} is not a file of plain tensors and is not loaded ({reason})") from None
    except (RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["it ends too early"])[0]
        raise CommandError(f"--input {path} is damaged or not a file of torch.save ({reason}); copy it again") from None


def _tensor_blocks(path: Path, position: Mapping[str, int]) -> Iterator[Block]:
    """Of the published GPT-BERT: a list of int16 tensors, one per document."""
    documents = load_published(path)
    if not isinstance(documents, list):
        raise CommandError(f"--input {path} holds a {type(documents).__name__}, not a list of documents (1-D tensors)")
    for first in range(position.get("row", 0), len(documents), _BLOCK_TENSORS):
        ids = [_tensor_ids(path, n, documents[n]) for n in range(first, min(first + _BLOCK_TENSORS, len(documents)))]
        yield Block(np.concatenate(ids), np.cumsum([len(each) for each in ids]), {"row": first + len(ids)}, first)


def _tensor_ids(path: Path, number: int, document: Any) -> np.ndarray:
    import torch

    where = f"--input {path}, document {number}"
    if not isinstance(document, torch.Tensor) or document.ndim != 1 or document.is_floating_point():
        found = f"{document.dtype} {list(document.shape)}" if isinstance(document, torch.Tensor) else type(document)
        raise CommandError(f"{where}: expected a 1-D tensor of token ids, found {found}")
    ids = document.to(torch.int64).numpy()
    if ids.size and ids.min() < 0:
        raise CommandError(
            f"{where}: id {ids.min()} is negative, as ids above 32,767 become in int16, so the file cannot be used; "
            "tokenize the text again with tokenize_corpus.py"
        )
    return ids


def find_token_files(inputs: Sequence[Path], form: str, end: int | None) -> tuple[list[TokenFile], list[InputFile]]:
    """The token files of files and folders, in order, their form checked, and all that they consist of."""
    tokens: list[TokenFile] = []
    files: list[InputFile] = []
    for path in [found for given in inputs for found in _expand(given)]:
        kind = _format(path) if form == "auto" else form
        parts = [path.with_suffix(".bin"), path.with_suffix(".idx")] if kind == "megatron" else [path]
        for part in parts:
            if not part.is_file():
                raise CommandError(f"--input {path} is of format {kind}, but {part} is missing")
            status = part.stat()
            if not status.st_size:
                raise CommandError(f"--input {part} has 0 bytes; get it again or remove it")
            if any(part.samefile(file.path) for file in files):
                raise CommandError(f"--input names {part} twice; name each file once")
            files.append(InputFile(part, part.name, kind, "", status.st_size, status.st_mtime_ns))
        opened = {"megatron": _megatron, "datasets": _datasets, "npy": lambda path: _npy(path, end)}
        opened["nanogpt"] = lambda path: _nanogpt(path, _given(end, path))
        opened[GPT_BERT] = lambda path: TokenFile(path, "document", partial(_tensor_blocks, path))
        tokens.append(opened[kind](parts[0]))
    return tokens, files


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        splits = [folder.name for folder in sorted(path.iterdir()) if (folder / "dataset_info.json").is_file()]
        if splits:
            raise CommandError(f"--input {path} holds the splits {', '.join(splits)}; name one, as {path / splits[0]}")
        known = [found for found in sorted(path.iterdir()) if found.suffix in (".bin", *_BY_SUFFIX)]
        found = [each for each in known if not each.name.startswith(("cache-", "."))]  # cache-*: of datasets' map
        if not found:
            raise CommandError(f"--input {path} holds no .bin, .npy, .arrow or .parquet")
        return found
    if path.is_file():
        return [path]
    if path.with_name(f"{path.name}.idx").is_file():  # Megatron's own way to name the pair
        return [path.with_name(f"{path.name}.idx")]
    raise CommandError(f"--input {path} does not exist; give files, folders or the prefix of a .bin and .idx")


def _format(path: Path) -> str:
    if path.suffix == ".idx" or (path.suffix == ".bin" and path.with_suffix(".idx").is_file()):
        return "megatron"
    kind = "nanogpt" if path.suffix == ".bin" else _BY_SUFFIX.get(path.suffix)
    if kind is None:
        raise CommandError(f"--input {path} has no known suffix; say what it is with --format {'|'.join(FORMATS)}")
    return kind
