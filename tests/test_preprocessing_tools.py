"""inspect_shards, make_demo_corpus, and the scripts in a row as a user types them."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data.offsets_table import TABLE_NAME
from data.shards import open_shard, read_manifest, tokenizer_hash, write_manifest, write_shard
from preprocessing import inspect_shards, make_demo_corpus, resumable_output, tokenize_corpus
from preprocessing.make_demo_corpus import clean, collect, docstrings, is_prose
from preprocessing.tokenizer import load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def texts():
    generator = random.Random(0)
    return [
        " ".join(generator.choices(["red", "green\n", "blue"], k=2**exponent)) for exponent in range(8) for _ in "abc"
    ]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(texts), 300, 2).save(str(path))
    return path


@pytest.fixture
def folder(tmp_path, tokenizer_path, texts, monkeypatch):
    """A corpus in two splits and several shards, in one of which a table of offsets is left."""
    monkeypatch.setattr(resumable_output, "TABLE_FROM", 3)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    flags = ["--input", tmp_path / "x.jsonl", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    flags += ["--validation_fraction", 0.4, "--shard_size", 200]
    assert tokenize_corpus.main([str(flag) for flag in flags]) == 0
    return tmp_path / "out"


def inspect(*arguments: object) -> int:
    return inspect_shards.main([str(argument) for argument in arguments])


# Inspection


def test_totals_histogram_and_samples(folder, texts, tokenizer_path, capsys):
    capsys.readouterr()
    assert inspect(folder, "--samples", 100, "--sample_tokens", 10**6) == 0
    output = capsys.readouterr().out
    for split in ("train", "validation"):
        manifest = read_manifest(folder / split)
        assert f"{manifest['num_documents']} documents, {manifest['num_words']} words" in output
        assert str(folder / split) in output
    for text in texts:  # every document is among the samples
        assert "    " + text.replace("\n", "\n    ") in output
    assert "made by preprocessing/tokenize_corpus.py" in output
    assert inspect(folder, "--json") == 0
    parsed = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(tokenizer_path)
    lengths = [len(tokenizer.encode(text).ids) for text in texts]
    bins: dict[str, int] = {}
    for length in lengths:
        key = str(2 ** (length.bit_length() - 1))
        bins[key] = bins.get(key, 0) + 1
    found: dict[str, int] = {}
    for part in parsed["folders"]:
        for key, count in part["lengths"].items():
            found[key] = found.get(key, 0) + count
    assert found == bins
    assert min(part["shortest"] for part in parsed["folders"]) == min(lengths)
    assert max(part["longest"] for part in parsed["folders"]) == max(lengths)
    assert sum(part["tokens"] for part in parsed["folders"]) == sum(lengths)
    assert parsed["damage"] == []


def test_samples_are_spread_and_cut(folder, capsys):
    capsys.readouterr()
    assert inspect(folder / "train", "--samples", 2, "--sample_tokens", 3) == 0
    output = capsys.readouterr().out
    count = read_manifest(folder / "train")["num_documents"]
    assert f"document {count // 4:,} (" in output
    assert f"document {3 * count // 4:,} (" in output
    assert inspect(folder / "train", "--samples", 0) == 0
    assert "document 0" not in capsys.readouterr().out


def test_table_of_offsets_is_written_and_verified(folder, capsys):
    assert inspect(folder, "--write_offsets", "--verify") == 0
    table = folder / "train" / TABLE_NAME
    content = table.read_bytes()
    table.write_bytes(content[:-1] + b"\x07")
    assert inspect(folder, "--verify") == 1
    assert f"{table} is not of these shards" in capsys.readouterr().err


def test_verify_accepts_what_is_intact(folder, capsys):
    assert inspect(folder, "--verify") == 0
    assert "verified: every file is as the manifest says" in capsys.readouterr().out


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: flip(path, 300), "its SHA-256 is"),
        (lambda path: flip(path, 100), "its SHA-256 is"),  # padding that opening does not look at
        (lambda path: flip(path, 20), "header does not match its checksum"),
        (lambda path: os.truncate(path, 400), "is truncated"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_text("x" * 1000), "is not a token shard"),
    ],
)
def test_verify_names_damaged_files(folder, capsys, damage, sentence):
    path = folder / "train" / "shard_00001.shard"
    damage(path)
    for more in ([], ["--json"]):
        capsys.readouterr()
        assert inspect(folder, "--verify", *more) == 1
        printed = capsys.readouterr()
        (error,) = printed.err.splitlines()
        assert error.startswith("error: ")
        assert str(path) in error
        assert sentence in error
    assert sentence in json.loads(printed.out)["damage"][0]


def test_verify_looks_inside(tmp_path, tokenizer_path, capsys):
    """Checksums that fit do not make offsets or ids right."""
    digest = tokenizer_hash(tokenizer_path)
    path = tmp_path / "shard_00000.shard"

    def verified(change) -> str:
        entry = write_shard(path, [np.array([1, 2, 3]), np.array([4, 5])], digest, 300)
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)
        content_hash = {**vars(entry), "sha256": inspect_shards.sha256_file(path)}
        write_manifest(tmp_path, [type(entry)(**content_hash)], digest, 300, {})
        assert inspect(tmp_path, "--verify") == 1
        return capsys.readouterr().err

    assert f"{path} is damaged: it holds id 65284" in verified(lambda content: content.__setitem__(256 + 7, 255))
    assert f"{path} is damaged: its document offsets do not ascend" in verified(
        lambda content: content.__setitem__(-16, 9)
    )


def test_verify_compares_manifest_and_tokenizer(folder, tokenizer_path, texts, capsys):
    train_tokenizer(iter(texts), 275, 2).save(str(folder / "train" / "tokenizer.json"))
    assert inspect(folder / "train", "--verify") == 1
    assert "tokenizer.json is not the tokenizer that the shards were made with" in capsys.readouterr().err
    manifest = read_manifest(folder / "validation")
    manifest["num_tokens"] += 1
    (folder / "validation" / "manifest.json").write_text(json.dumps(manifest))
    assert inspect(folder / "validation", "--verify") == 1
    assert "num_tokens is not the sum over its shards" in capsys.readouterr().err


def test_inspection_refuses_unusable_folders(tmp_path, folder, capsys):
    for path, sentence in ((tmp_path / "none", "is not a folder"), (tmp_path, "is not a complete shard folder")):
        assert inspect(path) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert sentence in error


# Demo corpus


def test_docstrings_come_without_running_anything(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        '"""Module."""\nraise SystemExit\n'
        'class A:\n    """Class.\n\n      Two:\n        2\n    """\n    async def f(self):\n        """Method."""\n'
        'if 1:\n    try:\n        pass\n    except E:\n        def g():\n            """Nested."""\n'
        'x = "not a docstring"\n"nor this"\n'
    )
    assert list(docstrings(source)) == ["Module.", "Class.\n\nTwo:\n  2", "Method.", "Nested."]
    found = list(docstrings(Path(ast.__file__)))
    assert found[0].startswith("ast\n~~~")
    assert len(found) > 30


def test_docstrings_become_prose():
    assert clean("One.\n\n    >>> f(1)\n    2\n\nTwo.   \n  three") == "One.\n\nTwo.\n  three"
    prose = "This sentence has some words that people could really have written."
    assert is_prose(prose, 5)
    assert not is_prose(prose, 50)
    assert not is_prose("| 1 | 2 | == 3 + 4 -- 5 6 7 8 9", 5)
    assert not is_prose("это предложение написано не по английски", 5)


def test_demo_corpus_is_real_and_deterministic():
    first, second = collect(20, 20_000), collect(20, 20_000)
    assert first == second
    assert 20_000 <= first.words < 21_000
    assert first.words == sum(len(text.split()) for text in first.documents)
    assert len(set(first.documents)) == len(first.documents)
    assert all(len(text.split()) >= 20 for text in first.documents)
    source = (Path(sysconfig.get_paths()["stdlib"]) / "abc.py").read_text()
    assert any(text.splitlines()[0] in source for text in first.documents)


def demo(*arguments: object) -> int:
    return make_demo_corpus.main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_demo_corpus_script_writes_both_formats(tmp_path, capsys):
    for name in ("x.jsonl", "x.txt"):
        assert demo("--output", tmp_path / name, "--max_words", 5000) == 0
    documents = collect(20, 5000).documents
    parsed = [json.loads(line)["text"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert parsed == documents
    assert len((tmp_path / "x.txt").read_text().split("\n\n")) == len(documents)
    assert f"{len(documents):,} documents" in capsys.readouterr().out
    before = (tmp_path / "x.txt").stat().st_mtime_ns
    assert demo("--output", tmp_path / "x.txt", "--max_words", 5000) == 0
    assert "is unchanged" in capsys.readouterr().out
    assert (tmp_path / "x.txt").stat().st_mtime_ns == before
    (tmp_path / "x.txt").write_text("mine")
    assert demo("--output", tmp_path / "x.txt", "--max_words", 5000) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "x.txt").read_text() == "mine"
    assert demo("--output", tmp_path / "x.txt", "--max_words", 5000, "--overwrite") == 0
    for output, sentence in (("x.csv", "must end in .jsonl or .txt"), ("no/x.txt", "cannot be written")):
        assert demo("--output", tmp_path / output) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_scripts_from_text_to_inspection(tmp_path):
    """As files from another folder, and as modules from the repository root; without PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(style: str, name: str, *arguments: object) -> str:
        script = [str(ROOT / "preprocessing" / f"{name}.py")] if style == "file" else ["-m", f"preprocessing.{name}"]
        done = subprocess.run(
            [sys.executable, *script, *map(str, arguments)],
            cwd=tmp_path if style == "file" else ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    for style in ("file", "module"):
        here = Path() if style == "file" else tmp_path
        corpus, tokenizer, shards = here / f"{style}.jsonl", here / f"{style}.json", here / style
        run(style, "make_demo_corpus", "--output", corpus, "--max_words", 20_000)
        flags = ("--vocab_size", 1000, "--min_frequency", 3)
        assert "1,000 entries" in run(style, "train_tokenizer", "--input", corpus, "--output", tokenizer, *flags)
        flags = ("--tokenizer_path", tokenizer, "--validation_fraction", 0.1, "--workers", 2)
        run(style, "tokenize_corpus", "--input", corpus, "--output", shards, *flags)
        assert "verified" in run(style, "inspect_shards", shards, "--verify")
    for split in ("train", "validation"):
        paths = [tmp_path / style / split / "shard_00000.shard" for style in ("file", "module")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert open_shard(paths[0]).num_documents > 5
