"""Corpus readers: files cut into chunks of whole documents, in bounded memory.

This is the sequential part (reading, decompressing, finding where to cut) and is cheap; parsing.py parses a chunk,
in any process. What a chunk holds follows from the input alone.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from preprocessing.fields import kept_fields
from preprocessing.hub_datasets import open_part
from preprocessing.inputs import CorpusError, InputFile, check_unchanged, open_input
from preprocessing.tables import open_table
from preprocessing.tokenizer import cut_place

CHUNK_BYTES = 1 << 20
DOCUMENT_BYTES = 2 << 20  # a longer document of a text file is cut in pieces
ROWS = 64  # of a table, read at once
LINE_BYTES = 64 << 20  # a longer line of a JSONL file is malformed: nothing can parse half a line
_COMPRESSED_BYTES = 1 << 9  # unpacked at once: of text that repeats itself this may be 12 MB
_ZSTD_WINDOW = 1 << 31  # bytes: zstd --long=31, its largest; the library would stop at --long=27

BLANK = " \t\r\x0b\x0c"  # what a blank line may hold
_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+".encode())
WHOLE_FILE = "file"  # a separator


@dataclass(frozen=True)
class Layout:
    """Where in the input documents are."""

    text_field: str = "text"  # dotted name, in JSON and tables
    separator: str | None = None  # of text files: any string, WHOLE_FILE, or None for blank lines
    keep_fields: tuple[str, ...] = ()  # dotted names of what goes into the sidecars
    targets: str = "all"  # or ASSISTANT: of conversations, only what the assistant says is marked as targets

    @property
    def pattern(self) -> re.Pattern[bytes] | None:
        """What ends a document of a text file; None where only the end of the file does."""
        if self.separator is None:
            return _BLANK_LINES
        if self.separator == WHOLE_FILE:
            return None
        return re.compile(re.escape(self.separator.encode()).replace(b"\\\n", b"\r?\n"))


def layout_of(arguments: argparse.Namespace) -> Layout:
    """What the flags of cli.add_input_flags say."""
    written = {name: getattr(arguments, name) for name in ("keep_fields", "targets") if hasattr(arguments, name)}
    return Layout(arguments.text_field, arguments.document_separator, **written)


@dataclass(frozen=True)
class Position:
    """A point between two chunks."""

    file: int = 0  # index of the file
    offset: int = 0  # bytes into the decompressed file, or rows into a table
    line: int = 1  # number of the line there (of a table: row), from 1
    inside: bool = False  # a document is cut here


@dataclass(frozen=True)
class Chunk:
    """Documents as they stand in a file. Where `opens` or `closes` is False it is a piece of one document: an earlier
    chunk holds its beginning, or a later one its end."""

    path: str
    kind: str
    line: int  # number of the first line (of a table: row)
    payload: bytes | list[Any]  # of a table: of each row the bytes of its text, its messages, or None
    end: Position
    progress: int  # bytes of the file on the disk that lie before `end`
    opens: bool = True
    closes: bool = True
    problem: str = ""  # why the chunk, one malformed line, was not read
    fields: list[bytes] | None = None  # of a table: the kept fields of each row

    @property
    def num_bytes(self) -> int:
        """Bytes of decompressed text, JSON included."""
        if isinstance(self.payload, bytes):
            return len(self.payload)
        return sum(map(_size, self.payload))


def read_chunks(
    files: Sequence[InputFile], layout: Layout | None = None, start: Position | None = None
) -> Iterator[Chunk]:
    """The input from `start` to its end. Raises CorpusError for a file that cannot be read, or that changes."""
    layout, start = layout or Layout(), start or Position()
    for index in range(start.file, len(files)):
        file = files[index]
        is_remote = isinstance(file.path, str)
        check_unchanged(file)
        for chunk in _file_chunks(file, layout, start if index == start.file else Position(file=index)):
            if not is_remote:
                check_unchanged(file)  # before anybody uses the chunk
            yield chunk
        if is_remote:  # a request
            check_unchanged(file)


def _file_chunks(file: InputFile, layout: Layout, position: Position) -> Iterator[Chunk]:
    if file.kind in ("parquet", "arrow", "dataset"):
        yield from _table_chunks(file, layout, position)
        return
    with _opened(file) as (stream, on_disk):
        _skip(stream, file, position.offset)
        if position.offset == 0 and stream.peek(3)[:3] == b"\xef\xbb\xbf":  # a byte order mark is no text
            position = replace(position, offset=len(stream.read(3)))
        is_text = file.kind == "text"
        chunks = _text_chunks(stream, layout, position) if is_text else _jsonl_chunks(stream, position)
        for chunk in chunks:
            done = on_disk.tell() if file.compression else chunk.end.offset
            yield replace(chunk, path=str(file.path), progress=done)


@contextmanager
def _opened(file: InputFile) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """The decompressed file and the file on the disk; whatever reading raises becomes a CorpusError."""
    errors: tuple[type[BaseException], ...] = (OSError, EOFError)
    with open_input(file) as on_disk:
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


def _text_chunks(stream: BinaryIO, layout: Layout, position: Position) -> Iterator[Chunk]:
    """Cuts after separators. A document is cut in pieces exactly if its first DOCUMENT_BYTES hold none, and where
    follows from its own text, so the pieces do not depend on what lies before the document. (Two MiB of nothing but
    white space would hide the blank line in it.) Chunks depend on nothing but the position before them."""
    buffer, ended, pattern = b"", False, layout.pattern
    overlap = 2 * len(layout.separator.encode()) if layout.separator and pattern else 0  # no cut inside a separator
    while True:
        buffer, ended = _fill(stream, buffer, CHUNK_BYTES)
        end = _separator_end(buffer[:CHUNK_BYTES], pattern, first=position.inside)  # it may hold more, for the last one
        if not end and not ended:
            buffer, ended = _fill(stream, buffer, DOCUMENT_BYTES)
            end = _separator_end(buffer, pattern, first=position.inside)
        closes = bool(end) or ended
        end = end or (len(buffer) if ended else cut_place(buffer[: max(1, len(buffer) - overlap)]))
        if not buffer:
            if position.inside:  # the file ended right at a cut
                yield Chunk("", "text", position.line, b"", replace(position, inside=False), 0, opens=False)
            return
        payload, buffer = buffer[:end], buffer[end:]
        after = _advanced(position, payload, inside=not closes)
        yield Chunk("", "text", position.line, payload, after, 0, opens=not position.inside, closes=closes)
        position = after


def _separator_end(buffer: bytes, pattern: re.Pattern[bytes] | None, first: bool) -> int:
    """End of the first or the last separator in the buffer; 0 if there is none."""
    if pattern is None:
        return 0
    if first:
        match = pattern.search(buffer)
        return match.end() if match else 0
    end = 0
    for match in pattern.finditer(buffer, max(0, buffer.rfind(b"\n\n")) if pattern is _BLANK_LINES else 0):
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


def _size(value: bytes | list[Any] | None) -> int:
    """Bytes of a row's text, of messages about so many."""
    return len(value or b"") if not isinstance(value, list) else sum(len(str(each.get("content"))) for each in value)


def _table_chunks(file: InputFile, layout: Layout, position: Position) -> Iterator[Chunk]:
    """Cuts after rows. Values travel as bytes: the parser says which row is not UTF-8."""
    stream = open_input(file) if isinstance(file.path, str) and file.kind != "dataset" else None
    opened = open_part(str(file.path)) if file.kind == "dataset" else open_table(file.path, file.kind, stream)
    with opened as table:
        table.check_text(layout.text_field)
        names = (layout.text_field, *layout.keep_fields)
        columns = list(dict.fromkeys(name for name in map(table.column_of, names) if name in table.schema.names))
        values: list[Any] = []
        fields: list[bytes] = []
        done, size = position.offset, 0

        def chunk(read: float) -> Chunk:
            after, progress = Position(position.file, done, done + 1), int(file.size * read)
            kept = fields if layout.keep_fields else None
            return Chunk(str(file.path), file.kind, position.line, values, after, progress, fields=kept)

        for batch, read in table.batches(columns, position.offset, ROWS):
            values += table.texts(batch, layout.text_field)
            if layout.keep_fields:
                fields += [kept_fields(each, layout.keep_fields) for each in table.records(batch, layout.keep_fields)]
            done, size = done + batch.num_rows, size + sum(map(_size, values[-batch.num_rows :]))
            if size >= CHUNK_BYTES:
                yield chunk(read)
                position, values, fields, size = Position(position.file, done, done + 1), [], [], 0
        if values:
            yield chunk(1.0)
