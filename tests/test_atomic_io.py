"""JSON objects read from files that may be absent, damaged or too large."""

from pathlib import Path

import pytest

from data.atomic_io import json_object


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b'{"a": 1', b'{"a": "\xff"}', b"[" * 100_000])
def test_json_object_is_empty_for_what_is_none(tmp_path: Path, content: bytes):
    path = tmp_path / "file.json"
    assert json_object(path) == json_object(tmp_path) == {}
    path.write_bytes(content)
    assert json_object(path) == {}


def test_json_object_leaves_out_large_files(tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_text('{"a": "\u2028"}', encoding="utf-8")
    size = path.stat().st_size
    assert json_object(path) == json_object(path, size) == {"a": "\u2028"}
    assert json_object(path, size - 1) == {}
