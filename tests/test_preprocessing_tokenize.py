"""tokenize_corpus: the same bytes for any number of workers and after any interruption, and clear refusals."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import data.shards
from data.shards import ShardWriter, open_shard, read_manifest, resolve_shards, sha256_file, tokenizer_hash
from preprocessing import corpora, encoding, tokenize_corpus
from preprocessing.corpora import CorpusError, find_inputs
from preprocessing.encoding import EncoderSettings, is_validation
from preprocessing.tokenize_corpus import tokenize_files
from preprocessing.tokenizer import SPECIAL_TOKENS, load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "preprocessing" / "tokenize_corpus.py"
WORDS = "the of and to in a is that it was for on are as with his they at be this have from or one had by"


def make_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    texts = []
    for number in range(count):
        words = generator.choices(
            [*WORDS.split(), "naïve", "été.", "<mask>", "</s>", "'s"], k=generator.randrange(1, 60)
        )
        texts.append(f"{number} " + " ".join(words).replace("was for", "was\nfor"))
    return texts


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(make_texts(300)), 340, 2).save(str(path))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four formats; 1,200 documents."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = make_texts(1200)
    (folder / "a.txt").write_text("\n\n".join(texts[:300]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[300:600]))
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(texts[600:900]).encode()))
    lines = "".join(json.dumps(text) + "\n" for text in texts[900:])
    (folder / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    return folder


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few documents, parts of documents of a few lines."""
    monkeypatch.setattr(corpora, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(corpora, "DOCUMENT_BYTES", 4000)


def tokenize(corpus: Path, output: Path, tokenizer_path: Path, fraction: float = 0.0, skip: bool = False, **options):
    settings = EncoderSettings(tokenizer_path, skip_bad_lines=skip, validation_fraction=fraction)
    return tokenize_files(find_inputs([corpus]), output, settings, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(folder: Path) -> list[list[int]]:
    """Token ids of every document of a shard folder."""
    shards = [open_shard(path) for path in resolve_shards(folder)]
    return [shard.document(index).tolist() for shard in shards for index in range(shard.num_documents)]


def decoded(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in stored(folder)]


def run(*arguments: object) -> int:
    return tokenize_corpus.main([str(argument) for argument in arguments])


# What comes out


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(max_size=50) | st.sampled_from(["<mask>", "a </s> b<s>", "\ud83d\ude42", " "]), min_size=1)
)
def test_any_text_survives(tokenizer_path, texts):
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        kept = [text for text in texts if text.strip()]
        if not kept:
            with pytest.raises(CorpusError, match="holds no text"):
                tokenize(folder / "x.jsonl", folder / "out", tokenizer_path)
            return
        summary = tokenize(folder / "x.jsonl", folder / "out", tokenizer_path)
        assert decoded(folder / "out") == kept
        assert summary is not None
        assert summary.counts["empty_documents"] == len(texts) - len(kept)
        assert summary.splits[0].words == sum(len(text.split()) for text in kept)
        assert summary.counts["special_tokens"] == 0
        assert min(min(ids) for ids in stored(folder / "out")) >= len(SPECIAL_TOKENS)


def test_ids_are_the_librarys_and_the_manifest_tells_the_truth(corpus, tokenizer_path, tmp_path):
    summary = tokenize(corpus, tmp_path / "out", tokenizer_path, shard_size=2000)
    texts = make_texts(1200)
    encodings = load_tokenizer(tokenizer_path).encode_batch(texts, add_special_tokens=False)
    expected = [encoding.ids for encoding in encodings]
    assert stored(tmp_path / "out") == expected
    manifest = read_manifest(tmp_path / "out")
    assert manifest["tokenizer_hash"] == tokenizer_hash(tokenizer_path)
    assert manifest["vocab_size"] == load_tokenizer(tokenizer_path).get_vocab_size()
    assert manifest["num_documents"] == 1200
    assert manifest["num_words"] == sum(len(text.split()) for text in texts)
    assert manifest["num_tokens"] == sum(map(len, expected))
    assert [file["name"] for file in manifest["created_by"]["inputs"]] == [
        path.name for path in sorted(corpus.iterdir())
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()
    for number, entry in enumerate(manifest["shards"]):
        path = tmp_path / "out" / entry["file"]
        assert entry["file"] == f"shard_{number:05d}.shard"
        assert (path.stat().st_size, sha256_file(path)) == (entry["bytes"], entry["sha256"])
        shard = open_shard(path, manifest["tokenizer_hash"])
        assert (shard.num_documents, shard.num_tokens) == (entry["documents"], entry["tokens"])
        if number < len(manifest["shards"]) - 1:  # a shard ends with the document that fills it
            assert shard.num_tokens >= 2000 > shard.num_tokens - len(shard.document(shard.num_documents - 1))
    assert summary is not None
    assert summary.splits[0].shards == len(manifest["shards"]) > 10
    leftover = set(os.listdir(tmp_path / "out")) - {entry["file"] for entry in manifest["shards"]}
    assert leftover == {"manifest.json", "tokenizer.json"}


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_same_bytes_for_any_number_of_workers_and_any_chunks(corpus, tokenizer_path, tmp_path, monkeypatch, fraction):
    tokenize(corpus, tmp_path / "1", tokenizer_path, fraction, shard_size=5000)
    expected = contents(tmp_path / "1")
    monkeypatch.setattr(corpora, "CHUNK_BYTES", 1500)
    for workers in (1, 2, 3):
        tokenize(corpus, tmp_path / "n", tokenizer_path, fraction, shard_size=5000, workers=workers, overwrite=True)
        assert contents(tmp_path / "n") == expected


def test_a_document_longer_than_a_chunk(tokenizer_path, tmp_path, small_chunks):
    texts = make_texts(40, seed=1)
    long = "\n".join(make_texts(400, seed=2))
    (tmp_path / "x.txt").write_text("\n\n".join([*texts[:20], long, *texts[20:], long]))
    for workers in (1, 2):
        tokenize(tmp_path / "x.txt", tmp_path / str(workers), tokenizer_path, 0.3, workers=workers, shard_size=3000)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    documents = [*texts[:20], long, *texts[20:], long]
    assert sorted(decoded(tmp_path / "1" / "train") + decoded(tmp_path / "1" / "validation")) == sorted(documents)
    tokenizer = load_tokenizer(tokenizer_path)
    expected = tokenizer.encode(long, add_special_tokens=False).ids
    assert expected in stored(tmp_path / "1" / "train") + stored(tmp_path / "1" / "validation")
    (tmp_path / "y.jsonl").write_text("".join(json.dumps(text) + "\n" for text in documents))
    tokenize(tmp_path / "y.jsonl", tmp_path / "y", tokenizer_path, 0.3, shard_size=3000)
    for split in ("train", "validation"):  # a part's hash is that of the whole
        assert stored(tmp_path / "y" / split) == stored(tmp_path / "1" / split)


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *(f"w{n}" for n in range(66_000))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_text("w0 w65519 w65520\nw65999 unknown\n\nw1")
    summary = tokenize(tmp_path / "x.txt", tmp_path / "out", tmp_path / "t.json")
    assert stored(tmp_path / "out") == [[16, 65535, 65536, 66015, 0], [17]]
    assert open_shard(tmp_path / "out" / "shard_00000.shard").dtype == np.uint32
    assert summary is not None
    assert summary.counts["special_tokens"] == 1


# The validation split


def test_validation_split_is_stable_and_disjoint(tokenizer_path, tmp_path):
    texts = make_texts(2000)
    splits = {}
    for name, part in (("all", texts), ("half", texts[::2]), ("twice", texts + texts[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in part))
        tokenize(tmp_path / f"{name}.jsonl", tmp_path / name, tokenizer_path, 0.1)
        train, validation = (set(decoded(tmp_path / name / split)) for split in ("train", "validation"))
        assert not train & validation
        assert train | validation == set(part)
        splits[name] = validation
    assert splits["half"] == splits["all"] & set(texts[::2])
    assert splits["twice"] == splits["all"]
    assert 140 < len(splits["all"]) < 260
    larger = {text for text in texts if is_validation(text, 0.3)}
    assert splits["all"] < larger  # raising the fraction only moves documents one way


def test_a_split_without_documents_is_pointed_out(tokenizer_path, tmp_path, capsys):
    text = next(text for text in make_texts(20) if not is_validation(text, 0.01))
    (tmp_path / "x.txt").write_text(text)
    flags = ("--input", tmp_path / "x.txt", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path)
    assert run(*flags, "--validation_fraction", "0.01") == 0
    assert "no document fell into validation" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out" / "validation")["shards"] == []


# Interruptions


class Crash(BaseException):
    """Nothing may catch it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the process "die" at the number-th operation that changes the disk for good, before or after it."""
    calls: list[str] = []

    def wrapped(function: Callable) -> Callable:
        def call(*arguments, **options):
            calls.append(str(function))
            if len(calls) == number // 2 + 1 and number % 2 == 0:
                raise Crash
            result = function(*arguments, **options)
            if len(calls) == number // 2 + 1:
                raise Crash
            return result

        return call

    monkeypatch.setattr(data.shards.os, "fsync", wrapped(os.fsync))
    monkeypatch.setattr(data.shards.os, "replace", wrapped(os.replace))
    monkeypatch.setattr(Path, "unlink", wrapped(Path.unlink))


def test_a_crash_at_any_moment_changes_nothing(tokenizer_path, tmp_path, monkeypatch, small_chunks):
    """Continued after a death at each single fsync, rename and deletion; also with a death while continuing."""
    tokenizer, digest = load_tokenizer(tokenizer_path), tokenizer_hash(tokenizer_path)
    for module in (tokenize_corpus, encoding):  # once is enough for some hundred runs
        monkeypatch.setattr(module, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(tokenize_corpus, "tokenizer_hash", lambda path: digest)
    monkeypatch.setattr(data.shards.os, "fsync", lambda descriptor: None)  # slow, and nothing here loses its power
    source = tmp_path / "x.txt"
    source.write_text("\n\n".join([*make_texts(12), "\n".join(make_texts(30)), *make_texts(6)]))

    def attempt(output: Path) -> object:
        return tokenize(source, output, tokenizer_path, 0.4, shard_size=900, journal_seconds=0)

    attempt(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    number, output = 0, tmp_path / "out"
    while True:
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                attempt(output)
                break  # the number is beyond the last operation
            except Crash:
                pass
        manifests = [name for name in contents(output) if name.endswith("manifest.json")]
        assert all(contents(output)[name] == expected[name] for name in manifests)  # complete or not there
        with monkeypatch.context() as patch, suppress(Crash):
            crash_at(patch, 10 if number % 3 else 25)
            attempt(output)
        attempt(output)
        assert contents(output) == expected
        shutil.rmtree(output)
        number += 1
    assert number > 80


def test_finished_work_is_not_repeated(corpus, tokenizer_path, tmp_path, monkeypatch, small_chunks):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=2000)
    real, encoded = encoding.ChunkEncoder.__call__, []

    def counted(self, chunk):
        encoded.append(chunk.num_bytes)
        if len(encoded) == 40:
            raise Crash
        return real(self, chunk)

    monkeypatch.setattr(encoding.ChunkEncoder, "__call__", counted)
    with pytest.raises(Crash):
        tokenize(corpus, tmp_path / "out", tokenizer_path, shard_size=2000)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.shard")}
    assert len(finished) > 5
    monkeypatch.setattr(encoding.ChunkEncoder, "__call__", real)
    chunks = []
    monkeypatch.setattr(
        encoding.ChunkEncoder, "__call__", lambda self, chunk: (chunks.append(chunk.num_bytes), real(self, chunk))[1]
    )
    summary = tokenize(corpus, tmp_path / "out", tokenizer_path, shard_size=2000)
    total = sum(chunk.num_bytes for chunk in corpora.read_chunks(find_inputs([corpus])))
    assert total - sum(encoded[:39]) <= sum(chunks) < total - sum(encoded[:30])
    assert all(path.stat().st_mtime_ns == modified for path, modified in finished.items())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert summary is not None
    assert summary.counts["text_bytes"] == total  # totals are of the folder, not of the last run


def test_an_interruption_in_the_middle_of_a_chunk(corpus, tokenizer_path, tmp_path, monkeypatch, small_chunks):
    """Ctrl-C may come when some of a chunk is written and some is not: that chunk is made again."""
    tokenize(corpus, tmp_path / "whole", tokenizer_path, 0.4, shard_size=2000)
    real, calls = ShardWriter.append, []

    def interrupted(self, tokens, lengths=None):
        calls.append(len(tokens))
        if len(calls) == 30:
            raise KeyboardInterrupt
        real(self, tokens, lengths)
        if len(calls) == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "append", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tokenize(corpus, tmp_path / "out", tokenizer_path, 0.4, shard_size=2000)
    tokenize(corpus, tmp_path / "out", tokenizer_path, 0.4, shard_size=2000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def large(tmp_path_factory, tokenizer_path):
    """9 MB in three files (enough to be caught in the middle) and what becomes of them."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "in").mkdir()
    text = "\n\n".join(make_texts(7000, seed=3))
    for number in range(3):
        (folder / "in" / f"{number}.txt").write_text((text + f"\n\n{number}\n\n") * 3)
    tokenize(folder / "in", folder / "whole", tokenizer_path, 0.1, shard_size=200_000)
    return folder


def command(source: Path, output: Path, tokenizer_path: Path, *flags: object) -> list[str]:
    fixed = ["--input", source, "--output", output, "--tokenizer_path", tokenizer_path]
    fixed += ["--validation_fraction", 0.1, "--shard_size", 200_000, "--journal_seconds", 0]
    return [sys.executable, str(SCRIPT), *map(str, [*fixed, *flags])]


def started(arguments: list[str], output: Path) -> subprocess.Popen[str]:
    """A running process that has made some progress."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        journal = output / "journal.json"
        if journal.exists() and json.loads(journal.read_text())["position"].get("offset", 0) > 0:
            return process
        time.sleep(0.005)
    raise AssertionError(f"ended before it could be stopped: {process.communicate()}")


def test_kill_9_with_workers(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert workers
    assert not psutil.wait_procs(workers, timeout=20)[1]  # nobody stays behind
    assert not list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm(large, tokenizer_path, tmp_path, number, code):
    """The whole group gets the signal, as from a terminal or a SLURM job that ends."""
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    os.killpg(process.pid, number)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error.strip() == f"stopped: {output} is unfinished; the same command continues where it stopped"
    assert printed == ""
    assert not list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


def test_a_worker_that_dies(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    psutil.Process(process.pid).children()[-1].kill()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert error.startswith("error: a worker process ended with exit code -9")
    assert error.count("\n") == 1
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


def test_a_full_disk(large, tokenizer_path, tmp_path):
    """A limit on the size of a file stands in for the disk; what fits is kept and continued."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    output = tmp_path / "out"
    arguments = command(large / "in", output, tokenizer_path)
    done = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limit, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {output}")
    assert "File too large; no unfinished file has a final name" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(output.rglob("*.shard")) + list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


# Refusals


@pytest.fixture
def flags(corpus, tokenizer_path, tmp_path):
    """Flags of a run that was completed."""
    found = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*found) == 0
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence with which the script ends."""
    capsys.readouterr()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_a_complete_folder_is_left_alone(flags, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(*flags, "--workers", 2) == 0
    assert "is complete already, from the same inputs and options" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_different_folder_is_refused_without_overwrite(flags, tokenizer_path, tmp_path, capsys):
    other = tmp_path / "other.json"
    train_tokenizer(iter(make_texts(300)), 330, 2).save(str(other))
    changes = (
        (["--shard_size", 1000], "differs in shard_size"),
        (["--validation_fraction", "0.5"], "differs in validation_fraction"),
        (["--text_field", "body"], "differs in text_field"),
        (["--tokenizer_path", other], "differs in tokenizer"),
        (["--input", flags[1] / "a.txt"], "differs in inputs"),
    )
    before = contents(tmp_path / "out")
    for change, sentence in changes:
        error = refused(capsys, *flags, *change)
        assert sentence in error
        assert "--overwrite" in error
        assert contents(tmp_path / "out") == before
    assert run(*flags, "--validation_fraction", "0.5", "--overwrite") == 0
    assert set(os.listdir(tmp_path / "out")) == {"train", "validation"}
    assert "differs in validation_fraction" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0
    assert contents(tmp_path / "out") == before


def test_changed_inputs_are_noticed(corpus, tokenizer_path, tmp_path, capsys):
    source = tmp_path / "x.txt"
    source.write_text("first text")
    flags = ["--input", source, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags) == 0
    later = (tmp_path / "out" / "manifest.json").stat().st_mtime + 5
    source.write_text("other text")  # of the same size
    os.utime(source, (later, later))
    assert "x.txt, which was changed later" in refused(capsys, *flags)
    (tmp_path / "out" / "shard_00000.shard").write_bytes(b"")
    os.utime(source, (later - 9, later - 9))
    assert "shard_00000.shard has 0 bytes" in refused(capsys, *flags)


def test_unfinished_work_is_only_continued_as_it_was_begun(corpus, tokenizer_path, tmp_path, monkeypatch, capsys):
    source = shutil.copytree(corpus, tmp_path / "in")
    flags = ["--input", source, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    with monkeypatch.context() as patch:
        patch.setattr(encoding.ChunkEncoder, "__call__", lambda self, chunk: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            run(*flags)
    assert "unfinished work that differs in shard_size" in refused(capsys, *flags, "--shard_size", 7)
    with open(source / "a.txt", "a") as file:
        file.write("more")
    assert "unfinished work that differs in inputs" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0
    (tmp_path / "out" / "journal.json").write_text("{")
    assert "journal.json is damaged; add --overwrite" in refused(capsys, *flags)


def test_other_peoples_files_are_safe(corpus, tokenizer_path, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    flags = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    for more in ([], ["--overwrite"]):
        assert "holds other files, such as thesis.txt" in refused(capsys, *flags, *more)
    assert contents(tmp_path / "out") == {"thesis.txt": b"years of work"}
    assert "is a file; give a folder" in refused(capsys, *flags, "--output", tmp_path / "out" / "thesis.txt")


def test_the_tokenizer_may_lie_in_the_output_folder(corpus, tokenizer_path, tmp_path):
    (tmp_path / "out").mkdir()
    inside = shutil.copy(tokenizer_path, tmp_path / "out" / "tokenizer.json")
    flags = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", inside]
    assert run(*flags) == 0
    assert run(*flags, "--shard_size", 5000, "--overwrite") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()


def test_two_runs_at_once(flags, tmp_path, capsys):
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "is in use by another process" in refused(capsys, *flags)
    os.close(descriptor)
    assert run(*flags) == 0


def test_malformed_lines_stop_or_are_counted(tokenizer_path, tmp_path, capsys):
    good = [json.dumps({"text": text}) for text in make_texts(30)]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    lines = [*good[:10], '{"text": 1}', *good[10:20], "nonsense", '{"text": "  "}', *good[20:]]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    flags = ["--input", tmp_path / "bad.jsonl", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    for workers in (1, 2):
        error = refused(capsys, *flags, "--workers", workers)
        assert f"{tmp_path}/bad.jsonl, line 11: the text is int, not a string; mend it" in error
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert run(*flags, "--skip_bad_lines") == 0  # goes on where the other stopped
    assert "dropped: 1 empty documents, 2 malformed lines" in capsys.readouterr().out
    assert decoded(tmp_path / "out") == make_texts(30)
    assert read_manifest(tmp_path / "out")["created_by"]["bad_lines"] == 2
    assert "differs in --skip_bad_lines" in refused(capsys, *flags)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--input", "none"], "--input none does not exist"),
        (["--input", "empty.txt"], "--input holds no text in 1 files"),
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


def test_bad_flags(capsys):
    needed = ["--input", "a", "--output", "b", "--tokenizer_path", "c"]
    for change, sentence in (
        (["--validation_fraction", "1"], "--validation_fraction: must be at least 0 and below 1, not 1.0"),
        (["--validation_fraction", "half"], "--validation_fraction: 'half' is not a number"),
        (["--workers", "0"], "--workers: must be at least 1, not 0"),
        (["--shard_size", "many"], "--shard_size: 'many' is not a whole number"),
    ):
        with pytest.raises(SystemExit) as stop:
            tokenize_corpus.main([*needed, *change])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


# Memory


PEAK = """import sys
sys.path[0] = sys.argv[1]
from preprocessing.tokenize_corpus import main
assert main(sys.argv[2:]) == 0
print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")])"""


def test_memory_does_not_grow_with_the_input(tokenizer_path, tmp_path):
    """Peak resident memory of the whole process for 4 MB and for 15 MB: many documents, and a single one."""
    block = "\n\n".join(make_texts(3000, seed=4)) + "\n\n"
    peaks: dict[str, list[int]] = {}
    for kind, text in (("documents", block), ("one document", block.replace("\n\n", "\n"))):
        for repeat in (10, 40):
            (tmp_path / "x.txt").write_text(text * repeat)
            assert (tmp_path / "x.txt").stat().st_size > 0.37e6 * repeat
            arguments = command(tmp_path / "x.txt", tmp_path / f"{kind}{repeat}", tokenizer_path)
            arguments = [sys.executable, "-c", PEAK, str(ROOT), *arguments[2:]]
            done = subprocess.run(arguments, capture_output=True, text=True, check=True)
            peaks.setdefault(kind, []).append(int(done.stdout.split()[-2]))
    for small, large in peaks.values():
        assert large < small + 9_000  # KiB
        assert large < 300_000
