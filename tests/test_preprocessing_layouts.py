"""Layouts of the input: separators of text files, nested fields, lists of texts, Arrow."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preprocessing_readers import DOCUMENTS, documents_of, read, write_parquet

from preprocessing import readers
from preprocessing.inputs import CorpusError, find_inputs
from preprocessing.parsing import parse_chunk
from preprocessing.readers import Layout, Position, read_chunks


def test_nested_fields_and_lists_of_texts(tmp_path):
    """The same in JSON, Parquet and both formats of Arrow, from any row on."""
    rows = [
        {"a": {"b": {"c": document}}, "parts": [{"text": document}, {"text": "more"}], "lines": [document, "é"] * n}
        for n, document in enumerate(DOCUMENTS * 30)
    ]
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows[:-1], {"a.b.c": "z"} | rows[-1]])
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=40)
    for name, new in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with new(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    expected = {
        "a.b.c": DOCUMENTS * 30,
        "parts.text": [f"{document}\nmore" for document in DOCUMENTS * 30],
        "lines": ["\n".join(row["lines"]) for row in rows],
    }
    for field, texts in expected.items():
        for name in ("x.parquet", "file.arrow", "stream.arrow"):
            assert read(tmp_path / name, text_field=field) == texts
            files = find_inputs([tmp_path / name])
            assert documents_of(files, Position(0, 71, 72), text_field=field) == texts[71:]
        last = "z" if field == "a.b.c" else texts[-1]  # a field of that very name comes first
        assert read(tmp_path / "x.jsonl", text_field=field) == [*texts[:-1], last]
    pyarrow.parquet.write_table(
        pyarrow.table(
            {"t": pyarrow.array([["a", None], None, [], ["b"]]), "s": [{"u": "x"}, None, {"u": None}, {"u": ""}]}
        ),
        tmp_path / "null.parquet",
    )
    for field, found in (("t", ["", "b"]), ("s.u", ["x", ""])):
        (chunk,) = read_chunks(find_inputs([tmp_path / "null.parquet"]), Layout(field))
        assert parse_chunk(chunk, Layout(field), skip_bad_lines=True) == (found, [], 2)
    with pytest.raises(CorpusError, match=r"the column 'a\.x' is not there; set .* a\.b\.c, parts\.text, lines$"):
        read(tmp_path / "file.arrow", text_field="a.x")


def test_separators_of_text_files(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\n a\n\nb\r\n---\r\nc<|end|><|end|>\nd \n---\n")
    blank, whole = [" a", "b\n---\nc<|end|><|end|>\nd \n---"], " a\n\nb\n---\nc<|end|><|end|>\nd \n---"
    for separator, expected in (
        (None, blank),
        ("file", [whole]),
        ("\n---\n", [" a\n\nb", "c<|end|><|end|>\nd "]),
        ("<|end|>", [" a\n\nb\n---\nc", "", "d \n---"]),
        ("none", [whole]),
    ):
        assert read(tmp_path / "x.txt", separator=separator) == expected
    (tmp_path / "y.txt").write_text("last")
    files = find_inputs([tmp_path / "x.txt", tmp_path / "y.txt"])
    assert documents_of(files, separator="file") == [whole, "last"]


@settings(max_examples=200)
@given(
    content=st.lists(st.sampled_from(["a", "b d", "é", " ", "\n", "\r\n", "--", "\n--\n", "-\n"])).map("".join),
    separator=st.sampled_from(["--", "\n--\n", "file"]),
    chunk_bytes=st.integers(1, 60),
    document_bytes=st.integers(16, 60),
)
def test_separated_documents_do_not_depend_on_chunk_size(content, separator, chunk_bytes, document_bytes):
    plain = content.replace("\r\n", "\n")
    found = [plain] if separator == "file" else plain.split(separator)
    found = [re.sub(r"\A(?:[ ]*\n)+", "", text) for text in found]
    found = [re.sub(r"\n[ \n]*\Z", "", text) if text.strip() else "" for text in found]
    expected = found if found[-1] else found[:-1]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(readers, "DOCUMENT_BYTES", document_bytes)
        Path(folder, "x.txt").write_bytes(content.encode())
        files = find_inputs([folder])
        assert documents_of(files, separator=separator) == expected
        chunks = list(read_chunks(files, Layout(separator=separator)))
        for number, chunk in enumerate(chunks):  # every position is one to go on from
            rest = read_chunks(files, Layout(separator=separator), chunk.end)
            assert [c.payload for c in rest] == [c.payload for c in chunks[number + 1 :]]


def test_parquet_columns(tmp_path):
    write_parquet(tmp_path / "x.parquet", ["a"], column="body")
    with pytest.raises(CorpusError, match=r"the column 'text' is not there; set --text_field to one of body$"):
        read(tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"column 'number' holds int64, not text; set --text_field to one of body$"):
        read(tmp_path / "x.parquet", text_field="number")
    pyarrow.parquet.write_table(pyarrow.table({"c": [{"text": "a"}]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"'c' holds struct<text: string>, not text; .* one of c\.text$"):
        read(tmp_path / "x.parquet", text_field="c")
    write_parquet(tmp_path / "x.parquet", [1])
    with pytest.raises(CorpusError, match=r"'text' holds int64, not text; no other column holds text$"):
        read(tmp_path / "x.parquet")
