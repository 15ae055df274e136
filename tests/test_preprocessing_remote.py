"""Remote inputs: files, globs and folders over HTTP (a server on this machine) and fsspec's memory:// and file://."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from helpers.http_files import served
from helpers.tiny_corpora import contents, make_texts, run, tokenize
from test_preprocessing_readers import documents_of
from test_preprocessing_refused import refused

from data import remote_files
from data.shards import read_manifest
from preprocessing import readers, remote
from preprocessing.cli import CommandError
from preprocessing.inputs import find_inputs


@pytest.fixture
def server(corpus, tmp_path, monkeypatch):
    """Serves the corpus of four formats, and Parquet and Arrow beside it."""
    folder = shutil.copytree(corpus, tmp_path / "served")
    (folder / "below").mkdir()
    table = pyarrow.table({"text": make_texts(300, seed=9)})
    pyarrow.parquet.write_table(table, folder / "below" / "rows 1.parquet", row_group_size=40)
    with pyarrow.ipc.new_stream(str(folder / "below" / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    monkeypatch.setattr(remote_files, "FIRST_WAIT", 0.0)
    with served(folder) as found:
        yield found


def test_folders_globs_and_files_over_http(server, tokenizer_path, tmp_path, capsys):
    """The shards of the local folder, byte for byte; what is not read is named."""
    (server.folder / "README.md").write_text("x")
    (server.folder / ".hidden").mkdir()
    (server.folder / ".hidden" / "a.txt").write_text("x")
    local, found = find_inputs([server.folder]), find_inputs([f"{server.url}/"])
    assert [(file.name, file.size, file.kind) for file in found] == [(f.name, f.size, f.kind) for f in local]
    note = capsys.readouterr().out.splitlines()[-1]
    assert f"--other_files text (or jsonl) reads 1 .md (such as {server.url}/README.md)" in note
    assert f"rename 1 hidden (such as {server.url}/.hidden/a.txt)" in note
    tokenize(server.folder, tmp_path / "local", tokenizer_path)
    flags = ["--input", f"{server.url}/", "--tokenizer_path", tokenizer_path, "--output"]
    assert run(*flags, tmp_path / "one") == run(*flags, tmp_path / "two", "--workers", 2) == 0
    shards = [{name: c for name, c in contents(tmp_path / f).items() if ".shard" in name} for f in ("local", "one")]
    assert shards[0] == shards[1]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    made = read_manifest(tmp_path / "one")["created_by"]
    assert [entry["name"] for entry in made["inputs"]] == [file.name for file in local]
    assert server.url not in str(made)
    assert [file.name for file in find_inputs([f"{server.url}/*.gz", f"{server.url}/a.txt?download=true"])] == [
        *("c.txt.gz", "a.txt")
    ]
    assert run(*flags, tmp_path / "one") == 0
    assert "is complete already" in capsys.readouterr().out


def test_lost_connections_are_survived(server, monkeypatch):
    monkeypatch.setattr(remote, "_BUFFER_BYTES", 5000)
    expected = documents_of(find_inputs([server.folder]))
    files = find_inputs([f"{server.url}/"])
    server.losses = 4
    assert documents_of(files) == expected
    assert server.losses == 0


def test_servers_without_ranges(server, monkeypatch):
    """A file is read in one go, and from its beginning again where that breaks off."""
    path = server.folder / "large.txt"
    path.write_text("\n\n".join(make_texts(30_000)))  # more than fsspec asks for at once
    server.ranges = False
    files = find_inputs([f"{server.url}/large.txt"])
    server.losses = 1
    assert documents_of(files) == documents_of(find_inputs([path]))
    chunks = list(readers.read_chunks(files))
    assert [c.payload for c in readers.read_chunks(files, start=chunks[1].end)] == [c.payload for c in chunks[2:]]


def test_reading_resumes_from_any_position(server, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 3000)
    files = find_inputs([f"{server.url}/b.jsonl", f"{server.url}/d.jsonl.zst", f"{server.url}/below/"])
    chunks = list(readers.read_chunks(files))
    for number in range(0, len(chunks), 9):
        rest = readers.read_chunks(files, start=chunks[number].end)
        assert [chunk.payload for chunk in rest] == [chunk.payload for chunk in chunks[number + 1 :]]


def test_what_cannot_be_read_is_one_sentence(server, tokenizer_path, tmp_path, capsys, monkeypatch):
    flags = ["--tokenizer_path", tokenizer_path, "--output", tmp_path / "out", "--input"]
    assert f"{server.url}/none.txt could not be read (404, message='Not Found'" in refused(
        capsys, *flags, f"{server.url}/none.txt"
    )
    assert "matches no file" in refused(capsys, *flags, f"{server.url}/*.none")
    assert "has no known format" in refused(capsys, *flags, f"{server.url}/a.tgz")
    assert not any("tgz" in request for request in server.requests)
    assert "nope://x cannot be read: Protocol not known: nope" in refused(capsys, *flags, "nope://x")
    (server.folder / "empty.txt.gz").write_bytes(b"")
    assert "empty.txt.gz has 0 bytes" in refused(capsys, *flags, f"{server.url}/empty.txt.gz")
    server.requests.clear()
    server.status = 503
    error = refused(capsys, *flags, f"{server.url}/a.txt")
    assert "a.txt could not be read in 5 tries (503, message='Service Unavailable'" in error
    assert len(server.requests) == 10  # fsspec asks twice each time


def test_what_is_final_is_tried_once():
    """As huggingface_hub says that there is no repository, and s3fs that there is no object."""
    no_repository, no_object = OSError("gone"), FileNotFoundError("gone")
    no_repository.response = SimpleNamespace(status_code=404)  # type: ignore[attr-defined]
    no_object.__cause__ = RuntimeError("gone")
    for error in (no_repository, no_object):
        tries = []

        def fails(error=error, tries=tries):
            tries.append(1)
            raise error

        with pytest.raises(CommandError, match=r"x could not be read \(gone\); check the path and your rights"):
            remote_files.retried(fails, "x", CommandError)
        assert len(tries) == 1


def test_a_file_that_is_cut_off_or_changed_is_refused(server):
    """Also where the format would not notice: fsspec's own reader of .zst gives what there is."""
    for name in ("a.txt", "d.jsonl.zst"):
        (file,) = find_inputs([f"{server.url}/{name}"])
        whole = (server.folder / name).read_bytes()
        (server.folder / name).write_bytes(whole[:-100])
        with pytest.raises(CommandError, match=rf"{name} was changed while this was at work"):
            documents_of([file])
        problem = rf"{name}, byte [\d,]+ could not be read in 5 tries \(it ends before"
        with remote.open_remote(str(file.path), file.size) as stream, pytest.raises(CommandError, match=problem):
            stream.read()
        (server.folder / name).write_bytes(whole)
    chunks = readers.read_chunks(find_inputs([f"{server.url}/a.txt"]))
    next(chunks)
    (server.folder / "a.txt").write_bytes(whole[::-1])
    with pytest.raises(CommandError, match="was changed while this was at work"):
        list(chunks)


def test_other_protocols(corpus):
    expected = documents_of(find_inputs([corpus]))
    memory = fsspec.filesystem("memory")
    for file in corpus.iterdir():
        memory.pipe(f"/bucket/texts/{file.name}", file.read_bytes())
    try:
        for path in ("memory://bucket/texts", f"file://{corpus}", f"file://{corpus}/*.*"):
            files = find_inputs([path])
            assert [file.name for file in files] == ["a.txt", "b.jsonl", "c.txt.gz", "d.jsonl.zst"]
            assert documents_of(files) == expected
        with pytest.raises(CommandError, match=r"memory://bucket/none.txt could not be read"):
            find_inputs(["memory://bucket/none.txt"])
    finally:
        memory.rm("/bucket", recursive=True)


def test_missing_packages(monkeypatch, corpus):
    """fsspec is asked for by a path with a protocol alone, and names the package that the protocol needs."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CommandError, match=r"reading s3://x/y\.txt needs a package .* not installed: Install s3fs"):
        find_inputs(["s3://x/y.txt"])
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(documents_of(find_inputs([corpus]))) == 1200
    with pytest.raises(CommandError, match=r"needs a package that is not installed: pip install fsspec"):
        find_inputs(["https://x/y.txt"])
