"""Reading corpora: which files, cut into chunks of whole documents, in bounded memory.

This is the sequential part (reading, decompressing, finding a place to cut) and is cheap; documents.py parses a chunk,
in any process. What a chunk holds follows from the input alone.
"""

from __future__ import annotations

import glob
import gzip
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from preprocessing.command_line import CommandError
from preprocessing.tokenizer import cut_place

CHUNK_BYTES = 1 << 20
DOCUMENT_BYTES = 2 << 20  # a longer document of a text file is cut in parts
LINE_BYTES = 64 << 20  # a longer line of a JSONL file is malformed: nothing can parse half a line

_KINDS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
_TEXT_IF_NAMED = (".train", ".dev", ".test")  # BabyLM's names; a folder of them would mix training and held-out text
_COMPRESSIONS = (".gz", ".zst")
BLANK = " \t\r\x0b\x0c"  # what a blank line may hold
_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+".encode())


class CorpusError(CommandError):
    """Input text that cannot be found or read; the message names file and line."""


@dataclass(frozen=True)
class InputFile:
    """One file of the input. `name` is relative to what the user named, so it does not depend on where that lies."""

    path: Path
    name: str
    kind: str  # "text", "jsonl" or "parquet"
    compression: str  # "", ".gz" or ".zst"
    size: int  # bytes on the disk
    modified: int  # nanoseconds since 1970


@dataclass(frozen=True)
class Position:
    """A place between two chunks."""

    file: int = 0  # index of the file
    offset: int = 0  # bytes into the decompressed file, or rows into a Parquet file
    line: int = 1  # number of the line there (Parquet: row), from 1
    inside: bool = False  # a document is cut here


@dataclass(frozen=True)
class Chunk:
    """Documents as they stand in a file. Where `opens` or `closes` is False it is a part of one document: an earlier
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


# ---------------------------------------------------------------------------------------------------- finding files


def find_inputs(arguments: Sequence[str | Path]) -> list[InputFile]:
    """The files that --input names, in its order; folders and globs in sorted order. Raises CorpusError for a path
    that does not exist, holds nothing readable, has an unknown suffix, or is named twice."""
    found = [file for argument in arguments for file in _expand(str(argument))]
    seen: set[Path] = set()
    for file in found:
        resolved = file.path.resolve()
        if resolved in seen:
            raise CorpusError(f"--input names {file.path} twice; name each file once")
        seen.add(resolved)
    return found


def _expand(argument: str) -> list[InputFile]:
    path = Path(argument)
    if path.is_dir():
        return _folder_files(path)
    if path.is_file():
        return [_describe(path, path.name)]
    if not glob.has_magic(argument):
        raise CorpusError(f"--input {argument} does not exist; give files, folders or globs in quotes")
    files: list[InputFile] = []
    for match in sorted(Path(match) for match in glob.glob(argument, recursive=True)):
        files += _folder_files(match) if match.is_dir() and "**" not in argument else []
        files += [_describe(match, match.name)] if match.is_file() else []
    if not files:
        raise CorpusError(f"--input {argument} matches no file; check the glob and put it in quotes")
    return files


def _folder_files(folder: Path) -> list[InputFile]:
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path, path.relative_to(folder)) for path in inside]
    visible = [(path, name) for path, name in names if not any(part.startswith(".") for part in name.parts)]
    files = [_describe(path, name.as_posix()) for path, name in visible if _kind(path)[0] in _KINDS]
    if not files:
        raise CorpusError(
            f"--input {folder} holds no .txt, .jsonl (also .gz, .zst) or .parquet file; name other files by a glob"
        )
    return files


def _kind(path: Path) -> tuple[str, str]:
    """The suffix that tells the format, and the compression's ("" for none)."""
    compression = path.suffix.lower() if path.suffix.lower() in _COMPRESSIONS else ""
    inner = Path(path.stem).suffix.lower() if compression else path.suffix.lower()
    return ("" if inner == ".parquet" and compression else inner), compression


def _describe(path: Path, name: str) -> InputFile:
    suffix, compression = _kind(path)
    kind = "text" if suffix in _TEXT_IF_NAMED else _KINDS.get(suffix)
    if kind is None:
        raise CorpusError(f"--input {path} has no known format; names end in .txt, .jsonl (also .gz, .zst), .parquet")
    status = path.stat()
    return InputFile(path, name, kind, compression, status.st_size, status.st_mtime_ns)


# --------------------------------------------------------------------------------------------------- reading chunks


def read_chunks(files: Sequence[InputFile], text_field: str = "text", start: Position | None = None) -> Iterator[Chunk]:
    """The input from `start` to its end. Raises CorpusError for a file that cannot be read."""
    start = start or Position()
    for index in range(start.file, len(files)):
        position = start if index == start.file else Position(file=index)
        file = files[index]
        if file.kind == "parquet":
            yield from _parquet_chunks(file, text_field, position)
            continue
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
        elif file.compression == ".zst":
            zstandard = _zstandard(file.path)
            errors = (*errors, zstandard.ZstdError)
            stream = io.BufferedReader(_ZstdReader(on_disk, zstandard.ZstdDecompressor()), CHUNK_BYTES)
        try:
            yield stream, on_disk
        except errors as error:
            raise CorpusError(f"{file.path} is damaged or truncated ({error}); get it again") from None


class _ZstdReader(io.RawIOBase):
    """Decompressed frames, one after the other. Unlike the package's own reader it notices a truncated file."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(1 << 16)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends inside a compressed frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise CorpusError(f"reading {path} needs a package that is not installed: pip install zstandard") from None
    return zstandard


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
    """Cuts after blank lines. A document is cut in parts exactly if its first DOCUMENT_BYTES hold no blank line, and
    where follows from its own text, so what the parts are does not depend on what lies before the document. (Two MiB of
    nothing but white space would hide the blank line in it.)"""
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
            while not end and not ended:  # pass over the rest of the line
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
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CorpusError(f"reading {file.path} needs a package that is not installed: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(file.path, buffer_size=CHUNK_BYTES) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                names = ", ".join(schema.names)
                raise CorpusError(f"{file.path} has no column '{column}'; set --text_field to one of {names}")
            kind = schema.field(column).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise CorpusError(f"{file.path}: the column '{column}' holds {kind}, not text; set --text_field")
            yield from _parquet_rows(file, table, column, position)
    except pyarrow.ArrowException as error:
        raise CorpusError(
            f"{file.path} is damaged or not Parquet ({str(error).splitlines()[0]}); get it again"
        ) from None


def _parquet_rows(file: InputFile, table: Any, column: str, position: Position) -> Iterator[Chunk]:
    rows = table.metadata.num_rows
    groups = [table.metadata.row_group(index).num_rows for index in range(table.metadata.num_row_groups)]
    first, skip = 0, position.offset
    while first < len(groups) and skip >= groups[first]:
        skip -= groups[first]
        first += 1
    values: list[bytes | None] = []
    for batch in table.iter_batches(batch_size=64, row_groups=range(first, len(groups)), columns=[column]):
        values += batch.column(0).cast("large_string").cast("large_binary").to_pylist()[skip:]
        skip = max(0, skip - batch.num_rows)
        done = position.offset + len(values)
        if done == rows or sum(len(value or b"") for value in values) >= CHUNK_BYTES:
            after = Position(position.file, done, done + 1)
            yield Chunk(str(file.path), "parquet", position.line, values, after, file.size * done // rows)
            position, values = after, []
