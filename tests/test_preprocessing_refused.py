"""tokenize_corpus: what it refuses, in one sentence each, and what it never touches."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.tiny_corpora import contents, decoded, make_texts, run
from helpers.tiny_runs import refusal
from tokenizers import Tokenizer, models

from data.shards import read_manifest
from preprocessing import tokenize_corpus, tokenize_pool
from preprocessing.train_tokenizer import train_tokenizer


@pytest.fixture
def flags(corpus, tokenizer_path, tmp_path):
    """Flags of a run that was completed."""
    found = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*found) == 0
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    return refusal(capsys, run, *arguments)


def test_complete_folder_is_left_alone(flags, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(*flags, "--workers", 2) == 0
    assert "is complete already, from the same inputs and options" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_overwrite_is_needed_for_other_content(flags, tokenizer_path, tmp_path, capsys):
    other = tmp_path / "other.json"
    train_tokenizer(iter(make_texts(300)), 330, 2).save(str(other))
    changes = (
        (["--shard_size", 1000], "differs in --shard_size"),
        (["--validation_fraction", "0.5"], "differs in --validation_fraction"),
        (["--text_field", "body"], "differs in --text_field"),
        (["--document_separator", "file"], "differs in --document_separator"),
        (["--tokenizer_path", other], "differs in --tokenizer_path"),
        (["--input", flags[1] / "a.txt"], "differs in --input;"),
    )
    before = contents(tmp_path / "out")
    for change, sentence in changes:
        error = refused(capsys, *flags, *change)
        assert sentence in error
        assert "--overwrite" in error
        assert contents(tmp_path / "out") == before
    assert run(*flags, "--validation_fraction", "0.5", "--overwrite") == 0
    assert set(os.listdir(tmp_path / "out")) == {"train", "validation"}
    assert "differs in --validation_fraction" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0
    assert contents(tmp_path / "out") == before


def test_changed_inputs_are_noticed(corpus, tokenizer_path, tmp_path, capsys):
    source = tmp_path / "x.txt"
    source.write_text("first text")
    flags = ["--input", source, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags) == 0
    before = source.stat().st_mtime_ns
    for seconds in (-1000, 5):  # a copy may keep the time of a file that is older than the shards
        source.write_text("other text")  # of the same size
        os.utime(source, ns=(before, before + seconds * 10**9))
        assert "x.txt, which was changed since" in refused(capsys, *flags)
    os.utime(source, ns=(before, before))
    assert run(*flags) == 0
    manifest = tmp_path / "out" / "manifest.json"
    made = json.loads(manifest.read_text())
    del made["created_by"]["inputs"][0]["modified"]  # as in older manifests
    manifest.write_text(json.dumps(made))
    assert run(*flags) == 0
    later = manifest.stat().st_mtime_ns + 10**9
    os.utime(source, ns=(later, later))
    assert "x.txt, which was changed since" in refused(capsys, *flags)
    os.utime(source, ns=(before, before))
    (tmp_path / "out" / "shard_00000.shard").write_bytes(b"")
    assert "shard_00000.shard has 0 bytes" in refused(capsys, *flags)


def test_mistaken_flags_leave_nothing_to_continue(tokenizer_path, tmp_path, capsys):
    """Not even if the next command names other inputs: nothing was done that could be lost."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(20)))
    flags = ["--output", tmp_path / "out", "--tokenizer_path", tokenizer_path, "--input"]
    for workers in (1, 2):
        typo = refused(capsys, *flags, tmp_path / "a.jsonl", "--text_field", "txet", "--workers", workers)
        assert "a.jsonl, line 1: the object has no field 'txet' (--text_field)" in typo
    assert run(*flags, tmp_path / "b.jsonl") == 0
    assert decoded(tmp_path / "out") == make_texts(20)


def test_input_that_changes_meanwhile_is_refused(corpus, tokenizer_path, tmp_path, monkeypatch, capsys):
    source = shutil.copytree(corpus, tmp_path / "in")
    real = tokenize_pool.ChunkEncoder.__call__

    def grow(self, chunk):
        with open(source / "b.jsonl", "a") as file:
            file.write('"more"\n')
        return real(self, chunk)

    flags = ["--input", source, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_pool.ChunkEncoder, "__call__", grow)
        assert "b.jsonl was changed while this was at work" in refused(capsys, *flags)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert "unfinished work that differs in --input;" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0


def test_unfinished_work_continues_with_the_same_options_alone(corpus, tokenizer_path, tmp_path, monkeypatch, capsys):
    real = tokenize_pool.ChunkEncoder.__call__

    def interrupted(self, chunk):
        if "c.txt" in chunk.path:
            raise KeyboardInterrupt
        return real(self, chunk)

    source = shutil.copytree(corpus, tmp_path / "in")
    flags = ["--input", source, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_pool.ChunkEncoder, "__call__", interrupted)
        assert run(*flags) == 130
    assert "unfinished work that differs in --shard_size" in refused(capsys, *flags, "--shard_size", 7)
    with open(source / "a.txt", "a") as file:
        file.write("more")
    assert "unfinished work that differs in --input;" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0
    (tmp_path / "out" / "journal.json").write_text("{")
    assert "journal.json is damaged; add --overwrite" in refused(capsys, *flags)
    (tmp_path / "out" / "journal.json").write_text('{"identity": {}, "position": {"file": 1}}')  # as it once was
    error = refused(capsys, *flags)
    assert "unfinished work that differs in the version of this program; give the same" in error
    assert "add --overwrite to start again" in error
    assert run(*flags, "--overwrite") == 0


def test_foreign_files_are_left_alone(corpus, tokenizer_path, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    flags = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    for more in ([], ["--overwrite"]):
        assert "holds other files, such as thesis.txt" in refused(capsys, *flags, *more)
    assert contents(tmp_path / "out") == {"thesis.txt": b"years of work"}
    assert "is a file; give a folder" in refused(capsys, *flags, "--output", tmp_path / "out" / "thesis.txt")


def test_tokenizer_may_lie_in_the_output_folder(corpus, tokenizer_path, tmp_path):
    (tmp_path / "out").mkdir()
    inside = shutil.copy(tokenizer_path, tmp_path / "out" / "tokenizer.json")
    flags = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", inside]
    assert run(*flags) == 0
    assert run(*flags, "--shard_size", 5000, "--overwrite") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()


def test_folder_in_use_is_refused(flags, tmp_path, capsys):
    before = contents(tmp_path / "out")
    (tmp_path / "out" / ".parts").mkdir()
    descriptor = os.open(tmp_path / "out" / ".parts" / "part_00000.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "is in use by another process" in refused(capsys, *flags, "--overwrite")
    assert before.items() <= contents(tmp_path / "out").items()
    os.close(descriptor)
    assert run(*flags, "--overwrite") == 0
    assert contents(tmp_path / "out") == before


def test_malformed_lines_stop_or_are_counted(tokenizer_path, tmp_path, capsys):
    good = [json.dumps({"text": text}) for text in make_texts(30)]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    lines = [*good[:10], '{"text": 1}', *good[10:20], "nonsense", '{"text": "  "}', *good[20:]]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    flags = ["--input", tmp_path / "bad.jsonl", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    for workers in (1, 2):
        error = refused(capsys, *flags, "--workers", workers)
        assert f"{tmp_path}/bad.jsonl, line 11: the text is int, not a string; correct it" in error
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert run(*flags, "--skip_bad_lines") == 0  # goes on where the other stopped
    assert "dropped: 1 empty document, 2 malformed lines" in capsys.readouterr().out
    assert decoded(tmp_path / "out") == make_texts(30)
    assert read_manifest(tmp_path / "out")["created_by"]["bad_lines"] == 2
    assert "differs in --skip_bad_lines" in refused(capsys, *flags)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--input", "none"], "--input none does not exist"),
        (["--input", "empty.txt"], "--input holds no text in 1 file;"),
        (["--input", "bad.txt.gz"], "bad.txt.gz is damaged or truncated"),
        (["--tokenizer_path", "none.json"], "cannot read the tokenizer none.json"),
        (["--tokenizer_path", "x.txt"], "cannot read the tokenizer x.txt (not valid JSON)"),
    ],
)
def test_bad_inputs(tokenizer_path, tmp_path, monkeypatch, capsys, change, sentence):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("some text")
    Path("empty.txt").write_text("\n\n")
    Path("bad.txt.gz").write_bytes(gzip.compress(b"text")[:-4])
    flags = ["--input", "x.txt", "--output", "out", "--tokenizer_path", tokenizer_path, *change]
    assert sentence in refused(capsys, *flags)
    assert not list(Path("out").glob("*.shard"))


def test_summary_uses_the_singular_for_one(tokenizer_path, tmp_path, capsys):
    (tmp_path / "x.txt").write_text("word")
    flags = ["--input", tmp_path / "x.txt", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags) == 0
    assert "total: 1 document, 1 word, 3 tokens (3.000 tokens per word) in 1 shard\n" in capsys.readouterr().out


def test_tokenizers_without_a_role(tmp_path, monkeypatch, capsys):
    """GPT-2's has neither mask nor padding: the sentence says what to give."""
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("some text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("foreign.json")
    flags = ["--input", "x.txt", "--output", "out", "--tokenizer_path", "foreign.json"]
    error = refused(capsys, *flags)
    assert "--tokenizer_path foreign.json has no token for pad (pads), mask (hides a word); name tokens" in error
    assert "--special_tokens pad=TOKEN,mask=TOKEN" in error
    assert "special_tokens.py TOKENIZER --output FOLDER --add pad mask" in error
    for given, says in (
        ("mask=[MASK]", "mask=[MASK]: the tokenizer foreign.json has no such token"),
        ("mask", "'mask' is not of the form ROLE=TOKEN"),
        ("mask=<|endoftext|>", "<|endoftext|> is both mask and bos"),
    ):
        assert says in refused(capsys, *flags, "--special_tokens", given)


def test_bad_flags(capsys):
    needed = ["--input", "a", "--output", "b", "--tokenizer_path", "c"]
    for change, sentence in (
        (["--validation_fraction", "1"], "--validation_fraction: must be at least 0 and below 1, not 1.0"),
        (["--validation_fraction", "half"], "--validation_fraction: 'half' is not a number"),
        (["--workers", "0"], "--workers: must be at least 1, not 0"),
        (["--shard_size", "many"], "--shard_size: 'many' is not a whole number"),
        (["--document_separator", ""], "--document_separator: is empty; give blank_line, file or a text"),
    ):
        with pytest.raises(SystemExit) as stop:
            tokenize_corpus.main([*needed, *change])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
