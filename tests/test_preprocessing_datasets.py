"""Hugging Face datasets by name or folder, streamed. Without a network a name is a folder below the current one."""

from __future__ import annotations

import json
import sys

import datasets
import pytest
from helpers.tiny_corpora import contents, decoded, make_texts, run
from test_preprocessing_readers import documents_of
from test_preprocessing_refused import refused

from data.shards import read_manifest
from preprocessing import hub_datasets, readers
from preprocessing.cli import CorpusError
from preprocessing.inputs import find_inputs


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Of the dataset lab/corpus: 210 in three files of its split train, one in test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    hub_datasets._dataset.cache_clear()
    found = make_texts(210)
    folder = tmp_path / "lab" / "corpus"
    folder.mkdir(parents=True)
    records = [{"id": number, "doc": {"text": text}} for number, text in enumerate(found)]
    for number in range(3):
        lines = [json.dumps(record) + "\n" for record in records[70 * number : 70 * number + 70]]
        (folder / f"train-{number}.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text(json.dumps({"id": 0, "doc": {"text": "held out"}}) + "\n")
    return found


def test_a_dataset_becomes_shards(texts, tokenizer_path, tmp_path, capsys):
    """With kept fields; the same in parts and in workers; the manifest does not say where it lies."""
    flags = ["--input", "dataset://lab/corpus", "--text_field", "doc.text", "--tokenizer_path", tokenizer_path]
    flags += ["--keep_fields", "id", "--output"]
    assert run(*flags, tmp_path / "out") == 0
    assert decoded(tmp_path / "out") == texts
    lines = (tmp_path / "out" / "shard_00000.fields.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"id": number} for number in range(210)]
    made = read_manifest(tmp_path / "out")["created_by"]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "lab" / "corpus").glob("train*"))]
    found = [(each["name"], each["bytes"]) for each in made["inputs"]]
    assert found == [(f"corpus/train/0000{n}-of-00003", size) for n, size in enumerate(sizes)]
    for part in (1, 0):
        assert run(*flags, tmp_path / "parts", "--part", part, "--parts", 2) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "out")
    capsys.readouterr()
    assert run(*flags, tmp_path / "out") == 0
    assert "is complete already" in capsys.readouterr().out


def test_splits_saved_folders_and_places(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 1000)
    field = {"text_field": "doc.text"}
    assert documents_of(find_inputs(["dataset://lab/corpus?split=test"]), **field) == ["held out"]
    files = find_inputs([f"dataset://{tmp_path}/lab/corpus"])
    chunks = list(readers.read_chunks(files, readers.Layout("doc.text")))
    assert len(chunks) > 5
    for number in range(len(chunks)):
        rest = readers.read_chunks(files, readers.Layout("doc.text"), chunks[number].end)
        assert [chunk.payload for chunk in rest] == [chunk.payload for chunk in chunks[number + 1 :]]
    loaded = datasets.load_dataset("lab/corpus")
    loaded.save_to_disk("all", num_shards={"train": 2, "test": 1})
    for path in ("all", "all/train"):
        saved = find_inputs([f"dataset://{path}"])
        assert len(saved) == 2
        assert documents_of(saved, **field) == texts
    assert documents_of(find_inputs(["all/train"]), **field) == texts  # its files alone
    with pytest.raises(CorpusError, match=r"names dataset:///.*#part=0 twice"):
        find_inputs(["dataset://all/train", "dataset://all/train"])


def test_what_cannot_be_read_is_one_sentence(texts, tokenizer_path, tmp_path, capsys, monkeypatch):
    flags = ["--tokenizer_path", tokenizer_path, "--output", tmp_path / "out", "--input"]
    for name, sentence in (
        ("none/such", "dataset://none/such could not be read (Couldn't reach 'none/such' on the Hub"),
        ("lab/corpus?split=dev", "could not be read (Bad split: dev. Available splits: ['train', 'test'])"),
        ("lab/corpus?config=sw", "could not be read (BuilderConfig 'sw' not found. Available: ['default'])"),
        ("lab/corpus?language=sw", "has no option 'language'; give dataset://NAME?config=...&split=...&revision=..."),
        ("", "--input dataset:// names nothing"),
        ("lab/corpus", "the column 'text' is not there; set --text_field to one of doc.text"),
    ):
        assert sentence in refused(capsys, *flags, f"dataset://{name}")
    files = find_inputs(["dataset://lab/corpus"])
    chunks = readers.read_chunks(files, readers.Layout("doc.text"))
    next(chunks)
    with open("lab/corpus/train-0.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(CorpusError, match="was changed while this was at work"):
        list(chunks)
    hub_datasets._dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "lab/corpus needs a package that is not installed: pip install datasets" in refused(
        capsys, *flags, "dataset://lab/corpus"
    )
