"""Corpus readers: files cut into chunks of whole documents, in bounded memory.

This is the sequential part (reading, decompressing, finding where to cut) and is cheap; parsing.py parses a chunk,
in any process. What a chunk holds follows from the input alone.
"""

from __future__ import annotations

import gzip
import importlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from preprocessing.inputs import CorpusError, InputFile, check_unchanged
from preprocessing.tokenizer import cut_place

CHUNK_BYTES = 1 << 20
DOCUMENT_BYTES = 2 << 20  # a longer document of a text file is cut in pieces
LINE_BYTES = 64 << 20  # a longer line of a JSONL file is malformed: nothing can parse half a line
_COMPRESSED_BYTES = 1 << 9  # unpacked at once: of text that repeats itself this may be 12 MB
_ZSTD_WINDOW = 1 << 31  # bytes: zstd --long=31, its largest; the library would stop at --long=27

BLANK = " \t\r\x0b\x0c"  # what a blank line may hold
_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+".encode())


@dataclass(frozen=True)
class Position:
    """A point between two chunks."""

    file: int = 0  # index of the file
    offset: int = 0  # bytes into the decompressed file, or rows into a Parquet file
    line: int = 1  # number of the line there (Parquet: row), from 1
    inside: bool = False  # a document is cut here


@dataclass(frozen=True)
class Chunk:
    """Documents as they stand in a file. Where `opens` or `closes` is False it is a piece of one document: an earlier
    chunk holds its beginning, or a later one its end."""

    path: str
    kind: str
    line: int  # number of the first line (Parquet: row)
    payload: bytes | list[bytes | None]
    end: Position
    progress: int  # bytes of the file on the disk that lie before `end`
    opens: bool = True
    closes: bool = True
    problem: str = ""  # why the chunk, one malformed line, was not read

    @property
    def num_bytes(self) -> int:
        """Bytes of decompressed text, JSON included."""
        if isinstance(self.payload, bytes):
            return len(self.payload)
        return sum(len(value) for value in self.payload if value is not None)


# --------------------------------------------------------------------------------------------------- reading chunks


def read_chunks(files: Sequence[InputFile], text_field: str = "text", start: Position | None = None) -> Iterator[Chunk]:
    """The input from `start` to its end. Raises CorpusError for a file that cannot be read, or that changes."""
    start = start or Position()
    for index in range(start.file, len(files)):
        check_unchanged(files[index])
        for chunk in _file_chunks(files[index], text_field, start if index == start.file else Position(file=index)):
            check_unchanged(files[index])  # before anybody uses the chunk
            yield chunk


def _file_chunks(file: InputFile, text_field: str, position: Position) -> Iterator[Chunk]:
    if file.kind == "parquet":
        yield from _parquet_chunks(file, text_field, position)
        return
    with _opened(file) as (stream, on_disk):
        _skip(stream, file, position.offset)
        if position.offset == 0 and stream.peek(3)[:3] == b"\xef\xbb\xbf":  # a byte order mark is no text
            position = replace(position, offset=len(stream.read(3)))
        chunks = _text_chunks(stream, position) if file.kind == "text" else _jsonl_chunks(stream, position)
        for chunk in chunks:
            done = on_disk.tell() if file.compression else chunk.end.offset
            yield replace(chunk, path=str(file.path), progress=done)


@contextmanager
def _opened(file: InputFile) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """The decompressed file and the file on the disk; whatever reading raises becomes a CorpusError."""
    errors: tuple[type[BaseException], ...] = (OSError, EOFError)
    with open(file.path, "rb") as on_disk:
        stream: Any = on_disk
        if file.compression == ".gz":
            import zlib

            errors = (*errors, zlib.error)
            stream = io.BufferedReader(gzip.GzipFile(fileobj=on_disk), CHUNK_BYTES)  # type: ignore[arg-type]
        elif file.compression:
            new_frame, error = _decompressor(file)
            errors = (*errors, error)
            stream = io.BufferedReader(_FrameReader(on_disk, new_frame), CHUNK_BYTES)
        try:
            yield stream, on_disk
        except errors as error:
            check_unchanged(file)
            if "memory" in str(error):  # of zstd: a window beyond 2 GiB, or beyond what the machine has
                raise CorpusError(f"{file.path} takes too much memory to unpack ({error}); compress it anew") from None
            raise CorpusError(f"{file.path} is damaged or truncated ({error}); get it again") from None


def _decompressor(file: InputFile) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a decompressor for one frame (zstd) or stream (bzip2, xz), and what that raises on damage."""
    if file.compression == ".bz2":
        return _needed(file, "bz2", "use a Python that was built with it").BZ2Decompressor, OSError
    if file.compression == ".xz":
        lzma = _needed(file, "lzma", "use a Python that was built with it")
        return lzma.LZMADecompressor, lzma.LZMAError
    zstandard = _needed(file, "zstandard")
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj, zstandard.ZstdError


class _FrameReader(io.RawIOBase):
    """Decompressed frames, one after the other. Unlike the readers of the packages it notices a file that ends inside a
    frame (zstandard), or goes on with anything else behind one (lzma, bz2)."""

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._file, self._new_frame = file, new_frame
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(_COMPRESSED_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends inside a compressed frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def _needed(file: InputFile, module: str, remedy: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        remedy = remedy or f"pip install {module.split('.')[0]}"
        raise CorpusError(f"reading {file.path} needs a package that is not installed: {remedy}") from None


def _skip(stream: BinaryIO, file: InputFile, offset: int) -> None:
    if not file.compression:
        stream.seek(offset)
        return
    while offset > 0:
        offset -= len(stream.read(min(offset, CHUNK_BYTES))) or offset


def _fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """The buffer with `size` bytes, or with all that is left; and whether the file ended."""
    if len(buffer) < size:
        buffer += stream.read(size - len(buffer))
    return buffer, len(buffer) < size


def _text_chunks(stream: BinaryIO, position: Position) -> Iterator[Chunk]:
    """Cuts after blank lines. A document is cut in pieces exactly if its first DOCUMENT_BYTES hold no blank line, and
    where follows from its own text, so the pieces do not depend on what lies before the document. (Two MiB of nothing
    but white space would hide the blank line in it.)"""
    buffer, ended = b"", False
    while True:
        buffer, ended = _fill(stream, buffer, CHUNK_BYTES)
        end = _blank_lines_end(buffer, first=position.inside)
        if not end and not ended:
            buffer, ended = _fill(stream, buffer, DOCUMENT_BYTES)
            end = _blank_lines_end(buffer, first=position.inside)
        closes = bool(end) or ended
        end = end or (len(buffer) if ended else cut_place(buffer))
        if not buffer:
            if position.inside:  # the file ended right at a cut
                yield Chunk("", "text", position.line, b"", replace(position, inside=False), 0, opens=False)
            return
        payload, buffer = buffer[:end], buffer[end:]
        after = _advanced(position, payload, inside=not closes)
        yield Chunk("", "text", position.line, payload, after, 0, opens=not position.inside, closes=closes)
        position = after


def _blank_lines_end(buffer: bytes, first: bool) -> int:
    """End of the first or the last blank lines in the buffer; 0 if there are none."""
    if first:
        match = _BLANK_LINES.search(buffer)
        return match.end() if match else 0
    end = 0
    for match in _BLANK_LINES.finditer(buffer, max(0, buffer.rfind(b"\n\n"))):
        end = match.end()
    return end


def _jsonl_chunks(stream: BinaryIO, position: Position) -> Iterator[Chunk]:
    """Cuts after line breaks."""
    buffer, ended, size = b"", False, CHUNK_BYTES
    while True:
        buffer, ended = _fill(stream, buffer, size)
        end = len(buffer) if ended else buffer.rfind(b"\n") + 1
        if not end and not ended:
            if size < LINE_BYTES:
                size *= 2
                continue
            while not end and not ended:  # skip the rest of the line
                position = replace(position, offset=position.offset + len(buffer))
                buffer, ended = _fill(stream, b"", CHUNK_BYTES)
                end = buffer.find(b"\n") + 1
            end = end or len(buffer)
            after = replace(position, offset=position.offset + end, line=position.line + 1)
            problem = f"is longer than {LINE_BYTES >> 20} MiB"
            yield Chunk("", "jsonl", position.line, b"", after, 0, problem=problem)
            position, buffer = after, buffer[end:]
        elif end:
            payload, buffer = buffer[:end], buffer[end:]
            after = _advanced(position, payload)
            yield Chunk("", "jsonl", position.line, payload, after, 0)
            position = after
        if ended and not buffer:
            return
        size = CHUNK_BYTES


def _advanced(position: Position, payload: bytes, inside: bool = False) -> Position:
    lines = payload.count(b"\n")
    return Position(position.file, position.offset + len(payload), position.line + lines, inside)


def _parquet_chunks(file: InputFile, column: str, position: Position) -> Iterator[Chunk]:
    """Cuts after rows. Values travel as bytes: the parser says which row is not UTF-8."""
    pyarrow = _needed(file, "pyarrow")
    _needed(file, "pyarrow.parquet")
    try:
        with pyarrow.parquet.ParquetFile(file.path, buffer_size=CHUNK_BYTES) as table:
            kinds = {field.name: field.type for field in table.schema_arrow}
            textual = [name for name, kind in kinds.items() if _is_text(kind, pyarrow.types)]
            if column not in textual:
                found = f"holds {kinds[column]}, not text" if column in kinds else "is not there"
                remedy = f"set --text_field to one of {', '.join(textual)}" if textual else "no other column holds text"
                raise CorpusError(f"{file.path}: the column '{column}' {found}; {remedy}")
            yield from _parquet_rows(file, table, column, position)
    except pyarrow.ArrowException as error:
        raise CorpusError(
            f"{file.path} is damaged or not Parquet ({str(error).splitlines()[0]}); get it again"
        ) from None


def _is_text(kind: Any, types: Any) -> bool:
    """Whether a column's values are strings, or bytes, which may be UTF-8."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _parquet_rows(file: InputFile, table: Any, column: str, position: Position) -> Iterator[Chunk]:
    rows = table.metadata.num_rows
    groups = [table.metadata.row_group(index).num_rows for index in range(table.metadata.num_row_groups)]
    first, skip = 0, position.offset
    while first < len(groups) and skip >= groups[first]:
        skip -= groups[first]
        first += 1
    values: list[bytes | None] = []
    for batch in table.iter_batches(batch_size=64, row_groups=range(first, len(groups)), columns=[column]):
        column_values = batch.column(0)
        if hasattr(column_values, "dictionary_decode"):
            column_values = column_values.dictionary_decode()
        values += column_values.cast("large_binary").to_pylist()[skip:]
        skip = max(0, skip - batch.num_rows)
        done = position.offset + len(values)
        if done == rows or sum(len(value or b"") for value in values) >= CHUNK_BYTES:
            after = Position(position.file, done, done + 1)
            yield Chunk(str(file.path), "parquet", position.line, values, after, file.size * done // rows)
            position, values = after, []
