"""Finding input files, cutting them into chunks, parsing chunks into documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from preprocessing import readers
from preprocessing.inputs import CorpusError, InputFile, find_inputs
from preprocessing.parsing import parse_chunk
from preprocessing.readers import Layout, Position, read_chunks

COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the command-line tool does
}
DOCUMENTS = ["One line.", "Two\nlines — é 🙂", "  indented\n\ttab ", "x" * 300, "</s><mask>"]


def documents_of(
    files: Sequence[InputFile], start: Position | None = None, skip_bad_lines: bool = False, **layout
) -> list[str]:
    """All documents, parts joined."""
    found: list[str] = []
    for chunk in read_chunks(files, Layout(**layout), start):
        texts = parse_chunk(chunk, Layout(**layout), skip_bad_lines).texts
        if chunk.opens:
            found += texts
        else:
            assert len(texts) == 1
            found[-1] += texts[0]
    return found


def read(path: Path, **options) -> list[str]:
    return documents_of(find_inputs([path]), **options)


def write_parquet(path: Path, values: list, column: str = "text", kind=None, **options) -> None:
    table = pyarrow.table({"number": list(range(len(values))), column: pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, path, **options)


# Finding files


def test_folders_globs_and_order(tmp_path):
    names = ["b.txt", "a/z.jsonl.gz", "a/y.txt.zst", "a/note.md", "c.parquet", ".hidden/d.txt", "d.train", "D.TXT"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_inputs([tmp_path])
    assert [file.name for file in found] == ["D.TXT", "a/y.txt.zst", "a/z.jsonl.gz", "b.txt", "c.parquet"]
    assert [(file.kind, file.compression) for file in found] == [
        *(("text", ""), ("text", ".zst"), ("jsonl", ".gz"), ("text", ""), ("parquet", "")),
    ]
    assert [file.name for file in find_inputs([tmp_path / "b.txt", tmp_path / "a"])] == [
        "b.txt",
        "y.txt.zst",
        "z.jsonl.gz",
    ]
    assert [file.name for file in find_inputs([f"{tmp_path}/*.t*"])] == ["b.txt", "d.train"]
    assert [file.name for file in find_inputs([f"{tmp_path}/**/*.gz"])] == ["z.jsonl.gz"]


def test_unread_files_of_a_folder_are_counted_and_named(tmp_path, capsys):
    files = ["a.txt", "AA/wiki_00", "AA/wiki_01", "b.tsv", "c.json", "e.7z", "f.train", ".g.txt", "old.tar.gz"]
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert [file.name for file in find_inputs([tmp_path])] == ["a.txt"]
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("note: of --input, 9 files are not read: ")
    for part in (
        f"--other_files text (or jsonl) reads 2 without suffix (such as {tmp_path}/AA/wiki_00), 1 .tsv (such as",
        f"a glob in quotes reads 1 .json (such as {tmp_path}/c.json), 1 .train (such as",
        f"unpack 1 .7z (such as {tmp_path}/e.7z), 1 .tar.gz (such as",
        f"rename 1 hidden (such as {tmp_path}/.g.txt)",
        f"restore 1 broken link (such as {tmp_path}/gone.txt)",
    ):
        assert part in note
    read = {file.name: file.kind for file in find_inputs([tmp_path], "jsonl")}
    assert read == {"AA/wiki_00": "jsonl", "AA/wiki_01": "jsonl", "a.txt": "text", "b.tsv": "jsonl"}
    assert [file.kind for file in find_inputs([f"{tmp_path}/*.json"])] == ["jsonl"]
    capsys.readouterr()
    find_inputs([tmp_path / "a.txt"])
    assert capsys.readouterr().out == ""


def test_links_to_folders_are_followed(tmp_path, capsys):
    (tmp_path / "far").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "far" / "b.txt").write_text("b")
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "wiki").symlink_to(tmp_path / "far")
    assert [file.name for file in find_inputs([tmp_path / "texts"])] == ["a.txt", "wiki/b.txt"]
    assert capsys.readouterr().out == ""
    (tmp_path / "far" / "up").symlink_to(tmp_path / "texts")
    assert [file.name for file in find_inputs([tmp_path / "texts"])] == ["a.txt", "wiki/b.txt"]
    assert f"nothing reads 1 link to a folder above it (such as {tmp_path}/texts/wiki/up)" in capsys.readouterr().out
    (tmp_path / "texts" / "again").symlink_to(tmp_path / "far")
    with pytest.raises(CorpusError, match=r"wiki/b\.txt twice, also as .*again/b\.txt"):
        find_inputs([tmp_path / "texts"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "--input none does not exist"),
        (["*.txt"], "matches no file"),
        (["folder"], "1 file is not read: --other_files text (or jsonl) reads 1 .md (such as folder/x.md)"),
        (["folder/x.md"], ".parquet and .arrow); --other_files text (or jsonl) reads it"),
        (["x.parquet.gz"], ".arrow); unpack it"),
        (["x.zip"], ".arrow); unpack it"),
        (["empty.txt.gz"], "--input empty.txt.gz has 0 bytes, as after a download that failed; get it again"),
        (["empty.parquet"], "--input empty.parquet has 0 bytes"),
        (["one.jsonl", "*.jsonl"], "names one.jsonl twice"),
    ],
)
def test_inputs_that_are_refused(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("folder/x.md", "x.parquet.gz", "x.zip", "one.jsonl", "empty.txt.gz", "empty.parquet"):
        Path(name).write_text("" if "empty" in name else "x")
    with pytest.raises(CorpusError, match=re.escape(sentence)):
        find_inputs(arguments)


# What a document is


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n\nc\n", ["a\nb", "c"]),
        ("\n\n \n a \n\n\n\nb", [" a ", "b"]),
        ("a\r\nb\r\n\r\nc\r\n", ["a\nb", "c"]),
        ("a\n \t\x0b\x0c\r\nb\n   ", ["a", "b"]),
        ("a\rb\n\u2028\nc", ["a\rb\n\u2028\nc"]),  # only ASCII white space makes a line blank
        ("", []),
        ("\n \n\t", []),
        ("\ufeffa", ["a"]),
        ("a  ", ["a  "]),
    ],
)
def test_text_files_are_split_at_blank_lines(tmp_path, content, expected):
    (tmp_path / "x.txt").write_bytes(content.encode())
    assert read(tmp_path / "x.txt") == expected


def test_jsonl_keeps_text_exactly(tmp_path):
    texts = ["a", "", " b \n\n", "\u00e9\U0001f642\0", "\\u0041"]
    lines = [json.dumps(texts[0]), "", json.dumps({"text": texts[1]}), " \t"]
    lines += [json.dumps({"id": [1], "text": text}, ensure_ascii=False) for text in texts[2:]]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join(lines))
    assert read(tmp_path / "x.jsonl") == texts
    (tmp_path / "y.jsonl").write_text('{"content": "c", "text": 3}\n')
    assert read(tmp_path / "y.jsonl", text_field="content") == ["c"]


def test_all_formats_give_the_same_documents(tmp_path):
    text = "\n\n".join(DOCUMENTS).encode() + b"\n"
    jsonl = "".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS).encode()
    for name, content in (("x.txt", text), ("x.jsonl", jsonl)):
        (tmp_path / name).write_bytes(content)
        half = len(content) // 2  # two gzip members, two zstd frames: what `cat a.gz b.gz` gives
        parts = content[:half], content[half:]
        for suffix, compress in COMPRESSORS.items():
            (tmp_path / f"{name}{suffix}").write_bytes(b"".join(map(compress, parts)))
        for suffix in ("", *COMPRESSORS):
            assert read(tmp_path / f"{name}{suffix}") == DOCUMENTS
    for name in ("x.ndjson", "x.json", "c4-train.00000-of-00512.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(jsonl) if name.endswith(".gz") else jsonl)
        assert read(tmp_path / name) == DOCUMENTS
    strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    for number, kind in enumerate((*strings, pyarrow.binary(), pyarrow.large_binary())):
        write_parquet(tmp_path / f"{number}.parquet", DOCUMENTS, kind=kind, row_group_size=2)
        assert read(tmp_path / f"{number}.parquet") == DOCUMENTS
    write_parquet(tmp_path / "d.parquet", DOCUMENTS * 2, column="body", use_dictionary=["body"])
    assert read(tmp_path / "d.parquet", text_field="body") == DOCUMENTS * 2
    dictionary = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    write_parquet(tmp_path / "e.parquet", DOCUMENTS, kind=dictionary)
    assert read(tmp_path / "e.parquet") == DOCUMENTS


# Malformed lines


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.jsonl", b'"a"\n\n{"text": "b"\n"c"', r"line 3: not valid JSON \("),
        ("x.jsonl", b'"a"\n{"body": "b"}\n"c"', r"line 2: the object has no field 'text' \(--text_field\)"),
        ("x.jsonl", b'"a"\n["b"]\n"c"', "line 2: the text is list, not a string"),
        ("x.jsonl", b'"a"\n{"text": ["b", 1]}\n"c"', "line 2: an item of the text is int, not a string"),
        ("x.jsonl", b'"a"\n{"text": null}\n"c"', "line 2: the text is NoneType, not a string"),
        ("x.jsonl", b'"a"\n7\n"c"', "line 2: the text is int, not a string"),
        ("x.jsonl", b'"a"\n"\xff"\n"c"', "line 2: byte 2 is not valid UTF-8"),
        ("x.jsonl", b'"a"\n"\\ud800"\n"c"', "line 2: the text has half a surrogate pair"),
        ("x.jsonl", b'"a"\n' + b"[" * 100_000 + b'\n"c"', "line 2: nested deeper than 500 levels"),
        ("x.txt", b"a\n\nb\xff\n\nc", "line 3: byte 2 is not valid UTF-8"),
        ("x.txt", b"a\n\xe9\n\nc", "line 2: byte 1 is not valid UTF-8"),
    ],
)
def test_malformed_lines(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=rf"{name}, {problem}.*; correct it or add --skip_bad_lines$"):
        read(tmp_path / name)
    parsed = [parse_chunk(chunk, skip_bad_lines=True) for chunk in read_chunks(find_inputs([tmp_path / name]))]
    assert [text for found in parsed for text in found.texts] == ["a", "c"]
    assert sum(found.bad for found in parsed) == 1


def test_json_nesting_limit_is_the_same_in_workers(tmp_path):
    """Not how much of the stack the caller has used: with --workers 1 that is more than in a worker."""
    fits = '{"text": "fits", "meta": ' + "[" * 499 + "]" * 499 + "}"
    deeper = fits.replace("[]", "[{}]")
    other = '{"text": "' + "{[" * 2000 + '\\"["}'
    (tmp_path / "x.jsonl").write_text("\n".join((fits, deeper, other)))
    with pytest.raises(CorpusError, match=r"x\.jsonl, line 2: nested deeper than 500 levels"):
        read(tmp_path / "x.jsonl")

    def from_below(frames: int) -> list[str]:
        return from_below(frames - 1) if frames else read(tmp_path / "x.jsonl", skip_bad_lines=True)

    assert from_below(0) == from_below(300) == ["fits", "{[" * 2000 + '"[']


def test_malformed_rows(tmp_path):
    binary = pyarrow.array([b"a", b"\xff\xfe", None, b"c"], pyarrow.binary())
    invalid = pyarrow.Array.from_buffers(pyarrow.string(), 4, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), tmp_path / "x.parquet")
    (chunk,) = read_chunks(find_inputs([tmp_path / "x.parquet"]))
    with pytest.raises(CorpusError, match=r"x\.parquet, row 2: byte 1 is not valid UTF-8"):
        parse_chunk(chunk)
    assert parse_chunk(chunk, skip_bad_lines=True) == (["a", "c"], [], 2)


def test_line_numbers_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 64)
    (tmp_path / "x.jsonl").write_text('"some text"\n' * 99 + "bad\n" + '"more"\n' * 50)
    (tmp_path / "x.txt").write_bytes(b"some text\n\n" * 99 + b"\xff\n" + b"more\n\n" * 50)
    for name, number in (("x.jsonl", 100), ("x.txt", 199)):
        with pytest.raises(CorpusError, match=f"line {number}: "):
            read(tmp_path / name)


def test_very_long_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 64)
    monkeypatch.setattr(readers, "LINE_BYTES", 1 << 20)
    for rest in ('\n"c"\n', "\n", ""):
        (tmp_path / "x.jsonl").write_text('"a"\n"' + "b" * 3_000_000 + '"' + rest)
        with pytest.raises(CorpusError, match="line 2: is longer than 1 MiB"):
            read(tmp_path / "x.jsonl")
        assert read(tmp_path / "x.jsonl", skip_bad_lines=True) == (["a", "c"] if "c" in rest else ["a"])
    (tmp_path / "x.jsonl").write_text('"' + "b" * 1_000_000 + '"')
    assert len(read(tmp_path / "x.jsonl")[0]) == 1_000_000


# Files that cannot be read


def test_damaged_files(tmp_path):
    content = "\n\n".join(str(number) for number in range(100_000)).encode()
    for suffix, compress in COMPRESSORS.items():
        name, whole = f"x.txt{suffix}", compress(content)
        for damaged in (whole[: len(whole) // 2], whole[:1000] + b"damage" + whole[1006:], b"no compression at all"):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(CorpusError, match=rf"{name} is damaged or truncated"):
                read(tmp_path / name)
        (tmp_path / name).write_bytes(whole + b"something else")
        with pytest.raises(CorpusError, match=rf"{name} is damaged or truncated"):
            read(tmp_path / name)
        (tmp_path / name).write_bytes(whole + compress(b""))  # an empty frame at the end is no damage
        assert read(tmp_path / name) == content.decode().split("\n\n")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(CorpusError, match=r"x\.parquet is damaged or not Parquet"):
        read(tmp_path / "x.parquet")


def test_zstd_windows_beyond_the_librarys_own_limit(tmp_path):
    """zstd --long=28 to 31, as in Pushshift's files; with a header that asks for more, the sentence is the true one."""
    for log in (28, 31):
        parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=log)
        frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        (tmp_path / "x.jsonl.zst").write_bytes(frame.compress(b'"a"\n"b"\n') + frame.flush())
        assert read(tmp_path / "x.jsonl.zst") == ["a", "b"]
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([22 << 3]) + bytes(8))  # a window of 4 GiB
    with pytest.raises(CorpusError, match=r"x\.jsonl\.zst takes too much memory to unpack .*; compress it anew"):
        read(tmp_path / "x.jsonl.zst")


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl.gz", "x.parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, name):
    """Before anything that was read after the change is used. The second file was listed before, and changed."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 100)
    texts = [f"document {number} " * 3 for number in range(300)]

    def write(path: Path) -> None:
        lines = "".join(json.dumps(text) + "\n" for text in texts).encode()
        if name == "x.parquet":
            write_parquet(path, texts, row_group_size=70)
        else:
            path.write_bytes("\n\n".join(texts).encode() if name == "x.txt" else gzip.compress(lines))

    for number in (1, 2):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        write(tmp_path / str(number) / name)
    for changed, growth in ((1, True), (2, True), (1, False), (2, False)):
        files = find_inputs([tmp_path / "1", tmp_path / "2"])
        chunks = read_chunks(files)
        next(chunks)
        path = files[changed - 1].path
        if growth:
            with open(path, "ab") as file:
                file.write(b"more")
        else:  # other text of the same size
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 4_000_000))
        read_on: list[readers.Chunk] = []
        with pytest.raises(CorpusError, match=rf"/{changed}/{name} was changed while this was at work"):
            read_on.extend(chunks)
        assert not any(chunk.path == str(path) for chunk in read_on)
        write(path)


@pytest.mark.parametrize(("name", "package"), [("x.txt.zst", "zstandard"), ("x.parquet", "pyarrow")])
def test_missing_packages(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CorpusError, match=rf"{name} needs a package .*pip install {package}"):
        read(tmp_path / name)


# Chunks


def reference(content: bytes) -> list[str]:
    """Documents of a text file, the slow and plain way."""
    documents: list[list[str]] = [[]]
    for line in content.decode().replace("\r\n", "\n").split("\n"):
        if line.strip(" \t\r\x0b\x0c"):
            documents[-1].append(line)
        else:
            documents.append([])
    return ["\n".join(lines) for lines in documents if lines]


@settings(max_examples=200)
@given(
    content=st.lists(st.sampled_from(["a", "b d", "é", "🙂x ", " ", "\t", "\n", "\n\n", "\r\n", "\n \n"])).map("".join),
    chunk_bytes=st.integers(1, 60),
    document_bytes=st.integers(8, 40),
)
@example(content="🙂x \n \na\n\n\n\n", chunk_bytes=1, document_bytes=8)
def test_documents_do_not_depend_on_chunk_size(content, chunk_bytes, document_bytes):
    assume(not re.search(r"\s{7}", content))  # white space as long as a part (2 MiB) hides a blank line
    data = content.encode()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(readers, "DOCUMENT_BYTES", document_bytes)
        paths = [Path(folder, "x.txt"), Path(folder, "y.txt.gz")]
        paths[0].write_bytes(data)
        paths[1].write_bytes(gzip.compress(data))
        files = find_inputs(paths)
        chunks = list(read_chunks(files))
        assert b"".join(chunk.payload for chunk in chunks) == data * 2
        assert documents_of(files) == reference(data) * 2
        for number, chunk in enumerate(chunks):  # every position is one to go on from
            assert [c.payload for c in read_chunks(files, start=chunk.end)] == [c.payload for c in chunks[number + 1 :]]


def test_long_documents_are_cut_by_their_own_text_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 50)
    monkeypatch.setattr(readers, "DOCUMENT_BYTES", 200)
    long = "\n".join(f"line {number} of a long document" for number in range(60))
    cuts = set()
    for before in range(0, 120, 7):
        (tmp_path / "x.txt").write_text("y" * before + "\n\n" * (before > 0) + long + "\n\nend")
        parts = [
            chunk.payload
            for chunk in read_chunks(find_inputs([tmp_path / "x.txt"]))
            if not (chunk.opens and chunk.closes)
        ]
        assert b"".join(parts).decode().rstrip("\n") == long
        cuts.add(tuple(part.rstrip(b"\n") for part in parts))
    assert len(cuts) == 1
    assert len(cuts.pop()) > 5


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.zst", "x.parquet"])
def test_reading_resumes_from_any_position(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 100)
    texts = [f"document {number} " * (number % 7) for number in range(300)]
    if name == "x.parquet":
        write_parquet(tmp_path / name, texts, row_group_size=70)
    else:
        content = "".join(json.dumps(text) + "\n" for text in texts).encode()
        (tmp_path / name).write_bytes(zstandard.ZstdCompressor().compress(content) if "zst" in name else content)
    (tmp_path / "z.txt").write_text("last")
    files = find_inputs([tmp_path / name, tmp_path / "z.txt"])
    chunks = list(read_chunks(files))
    assert len(chunks) > 4
    assert documents_of(files) == [*texts, "last"]
    seen = 0
    for chunk in chunks:
        seen += len(parse_chunk(chunk).texts)
        assert documents_of(files, start=chunk.end) == [*texts, "last"][seen:]
    assert chunks[-2].progress == files[0].size


def test_reading_takes_little_memory(tmp_path):
    """Also where a whole file is one document, or one row group."""
    line = "All happy families are alike; every unhappy family is unhappy in its own way.\n"
    (tmp_path / "x.txt").write_text(line * 400_000)
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress((line * 400_000).encode(), 1))
    (tmp_path / "y.txt.zst").write_bytes(zstandard.compress((line * 400_000).encode(), 1))
    for name in ("x.txt", "y.txt.gz", "y.txt.zst"):
        tracemalloc.start()
        total = sum(chunk.num_bytes for chunk in read_chunks(find_inputs([tmp_path / name])))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == len(line) * 400_000
        assert peak < 20e6
