"""Parsing chunks of a corpus into documents.

- text: what stands between separators: blank lines (white space counts as blank), another string, or the ends of files.
  Blank lines around a document are dropped, other line breaks kept, CRLF read as LF. A document beyond 2 MiB comes in
  pieces, so that a whole file may be one document.
- JSONL: a string, or an object's `text_field`, exactly as it stands. Blank lines are skipped.
- Parquet, Arrow: the column `text_field`, exactly as it stands.
In these `a.b` reaches into nested fields, of a list of texts each is a line, and a list of messages is a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from preprocessing.fields import find_field, join_texts, kept_fields
from preprocessing.inputs import CorpusError
from preprocessing.readers import BLANK, WHOLE_FILE, Chunk, Layout

_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+")
_NESTING = 500  # json's own limit depends on the caller's depth in the stack, so on the number of workers
_JSON_ESCAPE = re.compile(r"\\.")
_JSON_STRING = re.compile(r'"[^"]*"')
_JSON_BRACKET = re.compile(r"[\[\]{}]")
_LEADING_BLANK_LINES = re.compile(f"\\A(?:[{BLANK}]*\n)+")


class Documents(NamedTuple):
    """What a chunk holds."""

    texts: list[str]  # of documents, empty ones included; of a piece: one, maybe empty
    fields: list[bytes]  # of each text the line of its sidecar; [] where none are kept
    bad: int  # malformed lines that were skipped


def parse_chunk(chunk: Chunk, layout: Layout | None = None, skip_bad_lines: bool = False) -> Documents:
    """The documents of a chunk. Raises CorpusError for the first malformed line unless told to skip."""
    layout = layout or Layout()
    texts: list[str] = []
    fields: list[bytes] = []
    bad = 0
    for line, found, kept in _parsed(chunk, layout):
        if isinstance(found, str):
            texts.append(found)
            if layout.keep_fields:
                fields.append(kept)
            continue
        if not skip_bad_lines:
            where = "line" if chunk.kind in ("text", "jsonl") else "row"
            raise CorpusError(f"{chunk.path}, {where} {line}: {found.problem}; correct it or add --skip_bad_lines")
        bad += 1
    return Documents(texts, fields, bad)


@dataclass(frozen=True)
class _Bad:
    problem: str


def _parsed(chunk: Chunk, layout: Layout) -> Iterator[tuple[int, str | _Bad, bytes]]:
    """The number of each line, its text, and its kept fields."""
    nothing = kept_fields(None, layout.keep_fields) if layout.keep_fields else b""
    if chunk.problem:
        yield chunk.line, _Bad(chunk.problem), nothing
    elif chunk.kind == "text":
        yield from ((line, found, nothing) for line, found in _parsed_text(chunk, layout.separator))
    elif chunk.kind == "jsonl":
        assert isinstance(chunk.payload, bytes)
        for line, content in enumerate(chunk.payload.split(b"\n"), chunk.line):
            if content.strip():
                yield line, *_json_text(content, layout, nothing)
    else:
        assert isinstance(chunk.payload, list)
        for line, value in enumerate(chunk.payload, chunk.line):
            yield line, _row_text(value), chunk.fields[line - chunk.line] if chunk.fields else nothing


def _row_text(value: bytes | list[Any] | None) -> str | _Bad:
    if isinstance(value, bytes):
        return _decoded(value)
    if value is None:
        return _Bad("the value is null")
    return _joined(value)


def _joined(value: Any) -> str | _Bad:
    try:
        return join_texts(value)
    except TypeError as error:
        return _Bad(str(error))


def _decoded(content: bytes) -> str | _Bad:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return _Bad(f"byte {error.start + 1} is not valid UTF-8")


def _json_text(content: bytes, layout: Layout, nothing: bytes) -> tuple[str | _Bad, bytes]:
    """The text of a line, and its kept fields (`nothing` where it has none)."""
    decoded = _decoded(content)
    if isinstance(decoded, _Bad):
        return decoded, nothing
    if _nesting(decoded) > _NESTING:
        return _Bad(f"nested deeper than {_NESTING} levels"), nothing
    try:
        value = record = json.loads(decoded)
    except ValueError as error:
        return _Bad(f"not valid JSON ({error})"), nothing
    if isinstance(record, dict):
        try:
            value = find_field(record, layout.text_field)
        except KeyError:
            return _Bad(f"the object has no field '{layout.text_field}' (--text_field)"), nothing
    elif not isinstance(value, str):
        return _Bad(f"the text is {type(value).__name__}, not a string"), nothing
    value = _joined(value)
    if isinstance(value, _Bad):
        return value, nothing
    if "\\u" in decoded:
        try:
            value.encode()
        except UnicodeEncodeError:
            return _Bad("the text has half a surrogate pair, which no UTF-8 can express"), nothing
    has_fields = layout.keep_fields and isinstance(record, dict)
    return value, kept_fields(record, layout.keep_fields) if has_fields else nothing


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
