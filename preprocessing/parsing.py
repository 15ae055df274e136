"""Parsing chunks of a corpus into documents.

- text: what stands between separators: blank lines (white space counts as blank), another string, or the ends of files.
  Blank lines around a document are dropped, other line breaks kept, CRLF read as LF. A document beyond 2 MiB comes in
  pieces, so that a whole file may be one document.
- JSONL: a string, or an object's `text_field`, exactly as it stands. Blank lines are skipped.
- Parquet, Arrow: the column `text_field`, exactly as it stands.
In these `a.b` reaches into nested fields, and of a list of texts each is a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from preprocessing.fields import find_field, join_texts
from preprocessing.inputs import CorpusError
from preprocessing.readers import BLANK, WHOLE_FILE, Chunk, Layout

_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+")
_NESTING = 500  # json's own limit depends on the caller's depth in the stack, so on the number of workers
_JSON_ESCAPE = re.compile(r"\\.")
_JSON_STRING = re.compile(r'"[^"]*"')
_JSON_BRACKET = re.compile(r"[\[\]{}]")
_LEADING_BLANK_LINES = re.compile(f"\\A(?:[{BLANK}]*\n)+")


def parse_chunk(chunk: Chunk, layout: Layout | None = None, skip_bad_lines: bool = False) -> tuple[list[str], int]:
    """The documents of a chunk, empty ones included (of a piece: one string, maybe empty), and how many malformed lines
    were skipped. Raises CorpusError for the first malformed line unless told to skip."""
    documents: list[str] = []
    bad = 0
    for line, found in _parsed(chunk, layout or Layout()):
        if isinstance(found, str):
            documents.append(found)
            continue
        if not skip_bad_lines:
            where = "line" if chunk.kind in ("text", "jsonl") else "row"
            raise CorpusError(f"{chunk.path}, {where} {line}: {found.problem}; correct it or add --skip_bad_lines")
        bad += 1
    return documents, bad


@dataclass(frozen=True)
class _Bad:
    problem: str


def _parsed(chunk: Chunk, layout: Layout) -> Iterator[tuple[int, str | _Bad]]:
    if chunk.problem:
        yield chunk.line, _Bad(chunk.problem)
    elif chunk.kind == "text":
        yield from _parsed_text(chunk, layout.separator)
    elif chunk.kind == "jsonl":
        assert isinstance(chunk.payload, bytes)
        for line, content in enumerate(chunk.payload.split(b"\n"), chunk.line):
            if content.strip():
                yield line, _json_text(content, layout.text_field)
    else:
        for line, value in enumerate(chunk.payload, chunk.line):
            yield line, _Bad("the value is null") if value is None else _decoded(value)  # type: ignore[arg-type]


def _decoded(content: bytes) -> str | _Bad:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return _Bad(f"byte {error.start + 1} is not valid UTF-8")


def _json_text(content: bytes, text_field: str) -> str | _Bad:
    decoded = _decoded(content)
    if isinstance(decoded, _Bad):
        return decoded
    if _nesting(decoded) > _NESTING:
        return _Bad(f"nested deeper than {_NESTING} levels")
    try:
        value = json.loads(decoded)
    except ValueError as error:
        return _Bad(f"not valid JSON ({error})")
    if isinstance(value, dict):
        try:
            value = find_field(value, text_field)
        except KeyError:
            return _Bad(f"the object has no field '{text_field}' (--text_field)")
    elif not isinstance(value, str):
        return _Bad(f"the text is {type(value).__name__}, not a string")
    try:
        value = join_texts(value)
    except TypeError as error:
        return _Bad(str(error))
    if "\\u" in decoded:
        try:
            value.encode()
        except UnicodeEncodeError:
            return _Bad("the text has half a surrogate pair, which no UTF-8 can express")
    return value


def _nesting(content: str) -> int:
    """How deep JSON is nested; of shallow JSON only an upper bound, which is cheap."""
    brackets = content.count("[") + content.count("{")
    if brackets <= _NESTING:
        return brackets
    found = _JSON_BRACKET.findall(_JSON_STRING.sub("", _JSON_ESCAPE.sub("", content)))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in found), default=0)


def _parsed_text(chunk: Chunk, separator: str | None) -> Iterator[tuple[int, str | _Bad]]:
    assert isinstance(chunk.payload, bytes)
    decoded = _decoded(chunk.payload)
    if isinstance(decoded, _Bad):
        lines = [_decoded(line) for line in chunk.payload.split(b"\n")]
        yield from ((number, line) for number, line in enumerate(lines, chunk.line) if isinstance(line, _Bad))
        decoded = "\n".join(line for line in lines if isinstance(line, str))
    text = decoded.replace("\r\n", "\n")
    is_piece = not (chunk.opens and chunk.closes)
    if separator in (None, WHOLE_FILE) or is_piece:
        if separator not in (None, WHOLE_FILE):
            text = text.split(separator, 1)[0]
        text = _trimmed(text, chunk.opens, chunk.closes)
        if is_piece:
            yield chunk.line, text
        elif text:
            yield from ((chunk.line, found) for found in (_BLANK_LINES.split(text) if separator is None else [text]))
        return
    found = [_trimmed(document) for document in text.split(separator)]
    yield from ((chunk.line, document) for document in (found if found[-1] else found[:-1]))


def _trimmed(text: str, start: bool = True, end: bool = True) -> str:
    """Without blank lines at its start and its end; the spaces that end the last line stay."""
    if start:
        text = _LEADING_BLANK_LINES.sub("", text)
    if end:
        visible = text.rstrip(BLANK + "\n")
        text = visible + text[len(visible) :].split("\n", 1)[0] if visible or not start else ""
    return text
