"""Kept fields of documents: a line each beside the shards, in the same order, and what inspect_shards says of them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers.tiny_corpora import contents, decoded, make_texts, run
from test_preprocessing_refused import refused

from data.shards import read_manifest
from preprocessing import inspect_shards, slices, tokenize_pool
from preprocessing.fields import kept_fields

FIELDS = "id,meta.language,date"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """600 documents of JSON, Parquet and text, some of them empty, and long ones in pieces."""
    folder = tmp_path_factory.mktemp("source")
    texts, languages = make_texts(600), ("en", "de", "sw")
    records = [
        {"text": text if number % 50 else " ", "id": f"é{number}", "meta": {"language": languages[number % 3]}}
        for number, text in enumerate(texts)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:200]) + '"bare"\n')
    rows = [{**record, "date": datetime.date(2020, 1, 1 + n % 28)} for n, record in enumerate(records[200:400])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "b.parquet", row_group_size=30)
    lines = "".join(json.dumps(record) + "\n" for record in records[400:])
    (folder / "c.jsonl").write_text(lines)
    (folder / "d.txt").write_text("\n".join(texts[:100]) + "\n\nshort")
    return folder


@pytest.fixture
def flags(source, tokenizer_path, tmp_path):
    found = ["--input", source, "--tokenizer_path", tokenizer_path, "--keep_fields", FIELDS, "--shard_size", 4000]
    return [*found, "--validation_fraction", 0.2, "--output"]


def sidecars(folder: Path) -> list[dict]:
    lines = [path.read_text().splitlines() for path in sorted(folder.glob("*.fields.jsonl"))]
    return [json.loads(line) for file in lines for line in file]


def test_each_document_has_its_line(source, flags, tmp_path, capsys):
    assert run(*flags, tmp_path / "out") == 0
    out = capsys.readouterr().out
    expected = {}
    for line in [*(source / "a.jsonl").read_text().splitlines(), *(source / "c.jsonl").read_text().splitlines()]:
        record = json.loads(line)
        if isinstance(record, dict):
            expected[record["text"]] = {"id": record["id"], "meta.language": record["meta"]["language"], "date": None}
    for row in pyarrow.parquet.read_table(source / "b.parquet").to_pylist():
        expected[row["text"]] = {"id": row["id"], "meta.language": row["meta"]["language"], "date": str(row["date"])}
    nothing = dict.fromkeys(FIELDS.split(","))
    number = 0
    for split in ("train", "validation"):
        texts, found = decoded(tmp_path / "out" / split), sidecars(tmp_path / "out" / split)
        assert found == [expected.get(text, nothing) for text in texts]
        assert len(list((tmp_path / "out" / split).glob("*.fields.jsonl"))) == len(
            list((tmp_path / "out" / split).glob("*.shard"))
        )
        number += len(found)
    assert number == 588 + 3  # 12 are empty; "bare" and the two of d.txt have no field
    assert "note: 3 documents without id (--keep_fields)" in out
    assert "note: 395 documents without date (--keep_fields)" in out
    made = read_manifest(tmp_path / "out" / "train")["created_by"]
    assert made["keep_fields"] == FIELDS.split(",")
    assert "sidecars" not in read_manifest(tmp_path / "out" / "train")["shards"][0]


@pytest.mark.slow
def test_any_workers_parts_and_interruptions_give_the_same_bytes(flags, tmp_path, small_chunks, monkeypatch, capsys):
    assert run(*flags, tmp_path / "whole") == 0
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".fields.jsonl") for name in expected) > 6
    assert run(*flags, tmp_path / "pool", "--workers", 2) == 0
    assert contents(tmp_path / "pool") == expected
    for part in (2, 0, 1):
        assert run(*flags, tmp_path / "parts", "--part", part, "--parts", 3) == 0
    assert contents(tmp_path / "parts") == expected
    encode, finish = tokenize_pool.ChunkEncoder.__call__, slices.ShardWriter.finish
    calls = {"encode": 0, "finish": 0}

    def sometimes(name, real):
        def call(*arguments):
            calls[name] += 1
            if calls[name] % 7 == 0:
                raise KeyboardInterrupt
            return real(*arguments)

        return call

    monkeypatch.setattr(tokenize_pool.ChunkEncoder, "__call__", sometimes("encode", encode))
    monkeypatch.setattr(slices.ShardWriter, "finish", sometimes("finish", finish))
    codes = [run(*flags, tmp_path / "out", "--journal_seconds", 0)]
    while codes[-1] != 0:
        codes.append(run(*flags, tmp_path / "out", "--journal_seconds", 0))
    assert len(codes) > 3
    assert contents(tmp_path / "out") == expected
    assert "differs in --keep_fields" in refused(capsys, *flags, tmp_path / "out", "--keep_fields", "id")


def test_inspection_shows_and_verifies_them(flags, tmp_path, capsys):
    run(*flags, tmp_path / "out")
    capsys.readouterr()
    assert inspect_shards.main([str(tmp_path / "out"), "--verify"]) == 0
    out = capsys.readouterr().out
    train = sidecars(tmp_path / "out" / "train")
    languages = {name: sum(line["meta.language"] == name for line in train) for name in ("en", "de", "sw")}
    most = max(languages, key=lambda name: languages[name])
    assert f'  meta.language: "{most}" {languages[most]}, ' in out
    assert f"  id: {len({line['id'] for line in train})} values, such as " in out
    assert f'    {{"id": "{train[len(train) // 6]["id"]}", "meta.language": ' in out
    assert inspect_shards.main([str(tmp_path / "out" / "train"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["folders"]
    assert sum(found["fields"]["meta.language"].values()) == len(train)
    path = next((tmp_path / "out" / "train").glob("*.fields.jsonl"))
    content = path.read_bytes()
    for damaged in (content.replace(b"en", b"ne"), None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert inspect_shards.main([str(tmp_path / "out"), "--verify"]) == 1
        assert f"{path} is {'missing' if damaged is None else 'damaged'}" in capsys.readouterr().err


def test_values_that_json_lacks():
    record = {"a": float("nan"), "b": b"\xff", "c": datetime.datetime(2020, 1, 2), "d": "\ud800", "e": [1, {"f": 2}]}
    line = kept_fields(record, ("a", "b", "c", "d", "e.f", "g"))
    found = {"a": None, "b": "\ufffd", "c": "2020-01-02T00:00:00", "d": "\ud800", "e.f": None, "g": None}
    assert json.loads(line) == found


def test_bad_names(flags, tmp_path, capsys):
    for names in ("id,,url", "id,id", ""):
        with pytest.raises(SystemExit):
            run(*flags, tmp_path / "out", "--keep_fields", names)
        assert f"--keep_fields: '{names}' is not a list of different names" in capsys.readouterr().err
