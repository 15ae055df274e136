"""Fields of records (JSON objects, rows of tables) by dotted names: the text in them, and those that are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


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


def join_texts(value: Any) -> str:
    """A string as it is; of a list of strings, nested or not, a line each. Raises TypeError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"the text is {type(value).__name__}, not a string")
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
