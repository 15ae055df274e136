"""Tokenised corpora of other projects: each format, long documents in pieces, resuming, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from helpers.tiny_runs import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.shard_paths import resolve_shards
from data.shards import open_shard, read_manifest
from preprocessing import import_tokens, token_readers, tokenize_corpus
from preprocessing.slices import SliceWriter
from preprocessing.tokenizer import load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer

TEXTS = [
    f"{text} number {n}" for n in range(12) for text in ("one two three", "a <mask> in text", "three\nlines", "ünï")
]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(TEXTS), 300, 2).save(str(path))
    return path


@pytest.fixture(scope="module")
def ids(tokenizer_path) -> list[list[int]]:
    return [each.ids for each in load_tokenizer(tokenizer_path).encode_batch(TEXTS, add_special_tokens=False)]


@pytest.fixture(scope="module")
def tokenized(tokenizer_path, tmp_path_factory) -> Path:
    """What tokenize_corpus makes of the texts."""
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    flags = ["--input", folder / "texts.jsonl", "--output", folder / "out", "--tokenizer_path", tokenizer_path]
    assert tokenize_corpus.main([*map(str, flags), "--validation_fraction", "0.3"]) == 0
    return folder / "out"


def run(*arguments: object) -> int:
    return import_tokens.main([str(argument) for argument in arguments])


def stored(folder: Path) -> list[list[int]]:
    shards = [open_shard(path) for path in resolve_shards(folder)]
    return [shard.document(index).tolist() for shard in shards for index in range(shard.num_documents)]


def write_megatron(prefix: Path, documents: list[list[list[int]]], code: int = 8, version: int = 1) -> Path:
    """The pair of files of documents made of sequences; the path of the .bin."""
    dtype = {3: "<i2", 4: "<i4", 8: "<u2"}.get(code, "<f4")
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(sequences), len(firsts))
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + firsts.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    return prefix.with_suffix(".bin")


def write_stream(path: Path, documents: list[list[int]]) -> Path:
    np.array([token for document in documents for token in [*document, 2]], "<u2").tofile(path)
    return path


def write_dataset(path: Path, documents: list[list[int]], form: str, kind: pyarrow.DataType | None = None) -> Path:
    kind = kind or pyarrow.list_(pyarrow.int32())
    table = pyarrow.table({"id": list(range(len(documents))), "input_ids": pyarrow.array(documents, kind)})
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return path
    opened = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


def write_as(form: str, folder: Path, documents: list[list[int]]) -> Path:
    """The documents in a format, with the begin, end and padding tokens that its users put around them."""
    wrapped = [[1, *document, 2] for document in documents]
    if form == "megatron":
        return write_megatron(folder / "corpus_text_document", [[each[:3], each[3:]] for each in wrapped])
    if form == "nanogpt":
        return write_stream(folder / "train.bin", documents)
    if form == "npy":
        write_stream(folder / "stream", documents)
        np.save(folder / "stream.npy", np.fromfile(folder / "stream", "<u2").astype(np.int64))
        return folder / "stream.npy"
    if form == "rows":
        width = max(map(len, wrapped))
        np.save(folder / "rows.npy", np.array([each + [3] * (width - len(each)) for each in wrapped], np.int32))
        return folder / "rows.npy"
    if form == "saved":  # as save_to_disk does
        (folder / "saved").mkdir()
        (folder / "saved" / "dataset_info.json").write_text("{}")
        write_dataset(folder / "saved" / "data-00000-of-00002.arrow", wrapped[:20], "stream")
        write_dataset(folder / "saved" / "data-00001-of-00002.arrow", wrapped[20:], "stream")
        return folder / "saved"
    return write_dataset(folder / f"rows.{'arrow' if form == 'file' else form}", wrapped, form)


@pytest.mark.parametrize("form", ["megatron", "nanogpt", "npy", "rows", "saved", "file", "parquet"])
def test_import_equals_tokenize_corpus(tokenizer_path, ids, tokenized, tmp_path, capsys, form):
    path, out = write_as(form, tmp_path, ids), tmp_path / "out"
    flags = ["--input", path, "--output", out, "--tokenizer_path", tokenizer_path, "--validation_fraction", 0.3]
    flags += ["--document_end", "</s>"] if form in ("nanogpt", "npy") else []
    assert run(*flags) == 0
    assert "dropped: 0 empty documents\n" in capsys.readouterr().out
    for split in ("train", "validation"):
        assert stored(out / split) == stored(tokenized / split)
        ours, theirs = read_manifest(out / split), read_manifest(tokenized / split)
        assert ours["num_words"] == theirs["num_words"] > 0
        assert ours["tokenizer_hash"] == theirs["tokenizer_hash"]
    assert not (out / ".parts").exists()
    assert run(*flags) == 0
    assert "complete already" in capsys.readouterr().out


def test_megatron_prefix_names_the_pair(tokenizer_path, ids, tmp_path):
    write_megatron(tmp_path / "a", [ids[:2], [], ids[2:5]], code=4)  # the second document has no sequence
    out = tmp_path / "out"
    assert run("--input", tmp_path / "a", "--output", out, "--tokenizer_path", tokenizer_path) == 0
    assert stored(out) == [ids[0] + ids[1], ids[2] + ids[3] + ids[4]]
    assert read_manifest(out)["created_by"]["empty_documents"] == 1


DOCUMENTS = st.lists(st.lists(st.sampled_from([1, 2, 3, 20, 21, 30, 40]), max_size=12), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS, st.integers(1, 9), st.sampled_from(["megatron", "nanogpt"]), st.integers(0, 6))
def test_documents_longer_than_a_block_stay_whole(tokenizer_path, tmp_path, drawn, block, form, stop):
    """Any length of block gives the same documents, words and counts, also after an interruption."""
    files = tmp_path / form
    files.mkdir(exist_ok=True)
    if form == "megatron":
        documents = drawn if any(drawn) else [[20], *drawn]
        path = write_megatron(files / "data", [[document] for document in documents])
        expected = [inner for document in documents if (inner := strip(document))]
    else:
        path = write_stream(files / "data.bin", drawn)
        stream, expected = np.fromfile(path, "<u2").tolist(), [[]]
        for token in stream:
            expected[-1].append(token) if token != 2 else expected.append([])
        expected = [inner for document in expected if (inner := strip(document))]
    tokenizer = load_tokenizer(tokenizer_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_readers, "_BLOCK_TOKENS", block)
        found, _ = token_readers.find_token_files([path], "auto", 2)
        encode = import_tokens.DocumentImporter(tokenizer, {1, 2, 3}, 0.0).encode
        chunks = list(encode(found, {}, False))
        position = chunks[stop - 1].position if 0 < stop <= len(chunks) else {}
        rest = list(encode(found, json.loads(json.dumps(position)), False))
    resumed = chunks[: stop if position else 0] + rest
    for run_of_chunks in (chunks, resumed):
        tokens, words = together(run_of_chunks)
        assert tokens == expected
        assert words == [len(tokenizer.decode(document).split()) for document in expected]
    size = path.stat().st_size // 2
    assert sum(chunk.counts["stripped_tokens"] for chunk in resumed) == size - sum(map(len, expected))


def strip(document: list[int]) -> list[int]:
    while document and document[0] in (1, 2, 3):
        document = document[1:]
    while document and document[-1] in (1, 2, 3):
        document = document[:-1]
    return document


def together(chunks) -> tuple[list[list[int]], list[int]]:
    """Documents and their words, pieces put together."""
    documents, words = [], []
    for chunk in chunks:
        pieces = np.split(chunk.tokens, np.cumsum(chunk.lengths)[:-1]) if len(chunk.lengths) else []
        for number, piece in enumerate(pieces):
            if chunk.opens or number:
                documents.append([])
                words.append(0)
            documents[-1] += piece.tolist()
            words[-1] += int(chunk.words[number])
    return documents, words


@pytest.mark.parametrize("form", ["nanogpt", "saved", "parquet", "megatron"])
def test_interrupted_import_continues(tokenizer_path, ids, tmp_path, monkeypatch, form):
    path = write_as(form, tmp_path, ids)
    flags = ["--input", path, "--tokenizer_path", tokenizer_path, "--document_end", 2, "--shard_size", 100, "--output"]
    assert run(*flags, tmp_path / "whole") == 0
    monkeypatch.setattr(token_readers, "_BLOCK_TOKENS", 32)
    monkeypatch.setattr(token_readers, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(import_tokens, "_SAVE_SECONDS", 0.0)
    save, saves = SliceWriter._save, []

    def stop(self: SliceWriter, complete: bool = False) -> None:
        save(self, complete)
        saves.append(self.progress.position)
        if len(saves) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(SliceWriter, "_save", stop)
    assert run(*flags, tmp_path / "cut") == 130
    assert not (tmp_path / "cut" / "manifest.json").exists()
    monkeypatch.setattr(SliceWriter, "_save", save)
    assert run(*flags, tmp_path / "cut") == 0
    whole, cut = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "cut"))
    assert whole == cut
    assert len(whole) > 3


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda f: write_stream(f / "a.bin", [[20]]), [], "--document_end"),
        (lambda f: write_stream(f / "a.bin", [[20]]), ["--document_end", "<nothing>"], "--document_end <nothing>"),
        (lambda f: write_stream(f / "a.bin", [[20]]), ["--document_end", "300"], "--document_end 300"),
        (lambda f: write_stream(f / "a.bin", [[20, 21], [7, 999]]), ["--document_end", "2"], "a.bin, token 4: id 999 "),
        (lambda f: write_stream(f / "a.dat", [[20]]), [], "--format"),
        (lambda f: write_stream(f / "a.bin", [[20]]), ["--format", "megatron"], "a.idx is missing"),
        (lambda f: f / "absent.bin", [], "absent.bin does not exist"),
        (lambda f: f, [], "holds no .bin"),
        (lambda f: write_bytes(f / "a.bin", b""), ["--document_end", "2"], "a.bin has 0 bytes"),
        (lambda f: write_bytes(f / "a.bin", b"abc"), ["--document_end", "2"], "odd number of bytes"),
        (lambda f: write_bytes(f / "a.npy", b"abc"), [], "a.npy is damaged or no .npy file"),
        (lambda f: save(f / "a.npy", np.zeros((2, 2, 2), int)), [], "shape [2, 2, 2]"),
        (lambda f: save(f / "a.npy", np.zeros(3)), ["--document_end", "2"], "holds float64"),
        (lambda f: save(f / "a.npy", np.asfortranarray(np.ones((2, 3), int))), [], "column by column"),
        (lambda f: save(f / "a.npy", np.array([[20, 20], [20, -1]])), [], "a.npy, token 3: id -1 "),
        (lambda f: write_megatron(f / "a", [[[20]]], version=2), [], "a.idx has version 2"),
        (lambda f: write_megatron(f / "a", [[[20]]], code=7), [], "dtype code 7"),
        (lambda f: write_megatron(f / "a", [[[20]], [[999]]]), [], "a.bin, token 1: id 999 "),
        (lambda f: write_bytes(f / "a.idx", b"x" * 99, f / "a.bin"), [], "a.idx is not an index of Megatron"),
        (lambda f: write_dataset(f / "a.parquet", [[20], [20, 5000]], "parquet"), [], "a.parquet, row 1: id 5000 "),
        (lambda f: write_dataset(f / "a.arrow", [[20, None]], "stream"), [], "is null"),
        (
            lambda f: write_dataset(f / "a.arrow", [[0.5]], "file", pyarrow.list_(pyarrow.float32())),
            [],
            "input_ids (list<",
        ),
        (lambda f: write_bytes(f / "a.arrow", b"abc" * 9), [], "a.arrow is damaged"),
        (lambda f: write_bytes(f / "a.parquet", b"abc" * 9), [], "a.parquet is damaged"),
        (lambda f: write_stream(f / "a.bin", [[], [1]]), ["--document_end", "2"], "holds no tokens"),
    ],
)
def test_bad_input_is_refused(tokenizer_path, tmp_path, capsys, make, flags, words):
    files = tmp_path / "files"
    files.mkdir()
    common = ["--input", make(files), "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert words in refusal(capsys, run, *common, *flags)
    assert not list(tmp_path.glob("out/**/*.shard*")) + list(tmp_path.glob("out/**/manifest.json"))


def write_bytes(path: Path, content: bytes, *others: Path) -> Path:
    for each in (path, *others):
        each.write_bytes(content)
    return path


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def test_damaged_megatron_files_are_refused(tokenizer_path, tmp_path, capsys):
    path = write_megatron(tmp_path / "a", [[[20, 21]], [[22]]])
    index, flags = path.with_suffix(".idx"), ["--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    whole, tokens = index.read_bytes(), path.read_bytes()
    for content, words in (
        (whole[:-8], "where its header asks for"),
        (whole[:42] + struct.pack("<q", 2) + whole[50:], "do not lie one after the other"),
        (whole[:-8] + struct.pack("<q", 1), "do not span its 2 sequences"),
    ):
        index.write_bytes(content)
        assert words in refusal(capsys, run, "--input", path, *flags)
    index.write_bytes(whole)
    path.write_bytes(tokens[:-2])
    assert "where its index asks for 6" in refusal(capsys, run, "--input", path, *flags)
    path.write_bytes(tokens)
    assert "twice" in refusal(capsys, run, "--input", path, index, *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [pyarrow.large_list(pyarrow.uint16()), pyarrow.list_(pyarrow.int64(), 3)])
def test_rows_without_ids_are_empty_documents(tokenizer_path, tmp_path, capsys, kind):
    path = write_dataset(tmp_path / "a.parquet", [[20, 21, 22], None, [1, 23, 2]], "parquet", kind)
    assert run("--input", path, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path) == 0
    assert stored(tmp_path / "out") == [[20, 21, 22], [23]]
    assert "dropped: 1 empty document\n" in capsys.readouterr().out


def test_header_of_llm_c_is_no_text(tokenizer_path, tmp_path, capsys):
    """llm.c's files are nanoGPT's behind a header; one that does not fit what follows is refused."""
    tokens = np.array([20, 21, 2, 22, 2], "<u2")
    flags = ["--tokenizer_path", tokenizer_path, "--document_end", "</s>"]
    for name, told in (("good", 5), ("cut", 6)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, told
        (tmp_path / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    run("--input", tmp_path / "good.bin", "--output", tmp_path / "out", *flags)
    assert stored(tmp_path / "out") == [[20, 21], [22]]
    words = refusal(capsys, run, "--input", tmp_path / "cut.bin", "--output", tmp_path / "none", *flags)
    assert "llm.c's header, but not of version 1 with the 5 uint16 tokens" in words


def test_folder_of_splits_is_refused(tokenizer_path, tmp_path, capsys, ids):
    write_as("saved", tmp_path, ids)
    flags = ["--input", tmp_path, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert f"holds the splits saved; name one, as {tmp_path / 'saved'}" in refusal(capsys, run, *flags)


def test_documented_write_shard_makes_a_folder(tokenizer_path, ids, tmp_path, monkeypatch):
    """The lines of preprocessing/README.md, run as they stand there."""
    page = (Path(import_tokens.__file__).parent / "README.md").read_text()
    code = next(block.split("```")[0] for block in page.split("```python\n")[1:] if "write_shard" in block)
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    Path("shards").mkdir()
    exec(compile(code, "README.md", "exec"), {"documents": [np.array(each) for each in ids]})
    assert stored(Path("shards")) == ids
