"""Fields of records (JSON objects, rows of tables) by dotted names: the text in them, and those that are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

ASSISTANT = "assistant"


def find_field(value: Any, name: str) -> Any:
    """What a record has under a name: a field of that very name, else `a.b` of the record `a`. Of a list of records it
    is the list of what they have; what lies below null is null. Raises KeyError where there is no such field."""
    if not name or value is None:
        return value
    if isinstance(value, list):
        return [find_field(item, name) for item in value]
    if not isinstance(value, dict):
        raise KeyError(name)
    if name in value:
        return value[name]
    head, _, rest = name.partition(".")
    if not rest or head not in value:
        raise KeyError(name)
    return find_field(value[head], rest)


class Conversation(str):
    """The text of a conversation, and the segments that it consists of, each with whether the assistant says it."""

    segments: tuple[tuple[str, bool], ...]


def conversation(messages: Sequence[dict[str, Any]]) -> Conversation:
    """Messages with `role` and `content` as a document. Each is its role as a line, <|user|>, and its content on the
    lines after it. What the assistant says is a segment with the line break that ends it. Raises TypeError."""
    segments: list[tuple[str, bool]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if isinstance(content, list):  # of parts, such as texts and images
            content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise TypeError("a message has a role or content that is not a string")
        segments += [(f"<|{role}|>\n", False), (f"{content or ''}\n", role == ASSISTANT)]
    found = Conversation("".join(text for text, _ in segments))
    found.segments = tuple(segments)
    return found


def join_texts(value: Any) -> str:
    """A string as it is; of a list of strings, nested or not, a line each; a list of messages as a Conversation. Raises
    TypeError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"the text is {type(value).__name__}, not a string")
    if value and all(isinstance(item, dict) and "role" in item and "content" in item for item in value):
        return conversation(value)
    if not all(isinstance(item, str | list) for item in value):
        wrong = next(item for item in value if not isinstance(item, str | list))
        raise TypeError(f"an item of the text is {type(wrong).__name__}, not a string")
    return "\n".join(map(join_texts, value))


def kept_fields(record: Any, names: Sequence[str]) -> bytes:
    """The fields of a record that are kept, null where it has none, as a line of JSON without its end."""
    found = {}
    for name in names:
        try:
            found[name] = find_field(record, name)
        except KeyError:
            found[name] = None
    try:
        line = json.dumps(found, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # NaN and infinity, which JSON lacks
        found = json.loads(json.dumps(found, default=_plain), parse_constant=lambda _: None)
        line = json.dumps(found, ensure_ascii=False)
    return line.encode(errors="backslashreplace")  # half a surrogate pair becomes JSON's escape again


def _plain(value: Any) -> str:
    """Of tables: dates, decimals, bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
