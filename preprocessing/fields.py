"""Fields of records (JSON objects, rows of tables) by dotted names, and the text in them."""

from __future__ import annotations

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
