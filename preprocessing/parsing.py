"""Parsing chunks of a corpus into documents.

- text: lines up to a blank line (white space counts as blank), inner line breaks kept, CRLF read as LF. A document
  beyond 2 MiB comes in pieces, so that a whole file may be one document.
- JSONL: a string, or an object's `text_field`, exactly as it stands. Blank lines are skipped.
- Parquet: the column `text_field`, exactly as it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from preprocessing.inputs import CorpusError
from preprocessing.readers import BLANK, Chunk

_BLANK_LINES = re.compile(f"\n(?:[{BLANK}]*\n)+")
_NESTING = 500  # json's own limit depends on the caller's depth in the stack, so on the number of workers
_JSON_ESCAPE = re.compile(r"\\.")
_JSON_STRING = re.compile(r'"[^"]*"')
_JSON_BRACKET = re.compile(r"[\[\]{}]")
_LEADING_BLANK_LINES = re.compile(f"\\A(?:[{BLANK}]*\n)+")


def parse_chunk(chunk: Chunk, text_field: str = "text", skip_bad_lines: bool = False) -> tuple[list[str], int]:
    """The documents of a chunk, empty ones included (of a piece: one string, maybe empty), and how many malformed lines
    were skipped. Raises CorpusError for the first malformed line unless told to skip."""
    documents: list[str] = []
    bad = 0
    for line, found in _parsed(chunk, text_field):
        if isinstance(found, str):
            documents.append(found)
            continue
        if not skip_bad_lines:
            where = "row" if chunk.kind == "parquet" else "line"
            raise CorpusError(f"{chunk.path}, {where} {line}: {found.problem}; correct it or add --skip_bad_lines")
        bad += 1
    return documents, bad


@dataclass(frozen=True)
class _Bad:
    problem: str


def _parsed(chunk: Chunk, text_field: str) -> Iterator[tuple[int, str | _Bad]]:
    if chunk.problem:
        yield chunk.line, _Bad(chunk.problem)
    elif chunk.kind == "text":
        yield from _parsed_text(chunk)
    elif chunk.kind == "jsonl":
        assert isinstance(chunk.payload, bytes)
        for line, content in enumerate(chunk.payload.split(b"\n"), chunk.line):
            if content.strip():
                yield line, _json_text(content, text_field)
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
        if text_field not in value:
            return _Bad(f"the object has no field '{text_field}' (--text_field)")
        value = value[text_field]
    if not isinstance(value, str):
        return _Bad(f"the text is {type(value).__name__}, not a string")
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


def _parsed_text(chunk: Chunk) -> Iterator[tuple[int, str | _Bad]]:
    assert isinstance(chunk.payload, bytes)
    decoded = _decoded(chunk.payload)
    if isinstance(decoded, _Bad):
        lines = [_decoded(line) for line in chunk.payload.split(b"\n")]
        yield from ((number, line) for number, line in enumerate(lines, chunk.line) if isinstance(line, _Bad))
        decoded = "\n".join(line for line in lines if isinstance(line, str))
    text = decoded.replace("\r\n", "\n")
    if chunk.opens:
        text = _LEADING_BLANK_LINES.sub("", text)
    if chunk.closes:  # drop trailing blank lines, keep the spaces that end the last line
        visible = text.rstrip(BLANK + "\n")
        text = visible + text[len(visible) :].split("\n", 1)[0] if visible or not chunk.opens else ""
    if not (chunk.opens and chunk.closes):
        yield chunk.line, text
    elif text:
        for document in _BLANK_LINES.split(text):
            yield chunk.line, document
