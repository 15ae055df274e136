"""tokenize_corpus: what comes out, the same bytes for any number of workers, the split, the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_corpora import ROOT, command, contents, decoded, make_texts, run, stored, tokenize
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data.shards import open_shard, read_manifest, sha256_file, tokenizer_hash
from preprocessing import readers
from preprocessing.inputs import CorpusError, InputFile, find_inputs
from preprocessing.tokenize_corpus import tokenize_files
from preprocessing.tokenize_pool import ChunkEncoder, EncoderSettings, is_validation
from preprocessing.tokenizer import SPECIAL_TOKENS, load_tokenizer
from preprocessing.train_tokenizer import read_documents

# What comes out


@pytest.mark.slow
@settings(max_examples=40)
@given(
    texts=st.lists(st.text(max_size=50) | st.sampled_from(["<mask>", "a </s> b<s>", "\ud83d\ude42", " "]), min_size=1)
)
def test_round_trip_of_any_text(tokenizer_path, texts):
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
        assert summary.totals.counts["empty_documents"] == len(texts) - len(kept)
        assert sum(shard.words for shard in summary.totals.shards[""]) == sum(len(text.split()) for text in kept)
        assert summary.totals.counts["special_tokens"] == 0
        assert min(min(ids) for ids in stored(folder / "out")) >= len(SPECIAL_TOKENS)


def test_ids_match_the_tokenizers_library_and_manifest_matches_shards(corpus, tokenizer_path, tmp_path):
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
    assert len(summary.totals.shards[""]) == len(manifest["shards"]) > 10
    leftover = set(os.listdir(tmp_path / "out")) - {entry["file"] for entry in manifest["shards"]}
    assert leftover == {"manifest.json", "tokenizer.json"}


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_output_does_not_depend_on_workers_or_chunk_size(corpus, tokenizer_path, tmp_path, monkeypatch, fraction):
    tokenize(corpus, tmp_path / "1", tokenizer_path, fraction, shard_size=5000)
    expected = contents(tmp_path / "1")
    monkeypatch.setattr(readers, "CHUNK_BYTES", 1500)
    for workers in (1, 2, 3):
        tokenize(corpus, tmp_path / "n", tokenizer_path, fraction, shard_size=5000, workers=workers, overwrite=True)
        assert contents(tmp_path / "n") == expected


@pytest.mark.slow
def test_documents_longer_than_a_chunk(tokenizer_path, tmp_path, small_chunks):
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


@pytest.mark.slow
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
    assert summary.totals.counts["special_tokens"] == 1


# The validation split


@pytest.mark.slow
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


def test_empty_validation_split_is_warned_about(tokenizer_path, tmp_path, capsys):
    text = next(text for text in make_texts(20) if not is_validation(text, 0.01))
    (tmp_path / "x.txt").write_text(text)
    flags = ("--input", tmp_path / "x.txt", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path)
    assert run(*flags, "--validation_fraction", "0.01") == 0
    assert "no document fell into validation" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out" / "validation")["shards"] == []


# Many files


def test_work_per_file_does_not_grow_with_their_number(tokenizer_path, tmp_path, cheap_tokenizing):
    """Counted, not timed: how often the files' sizes are looked at."""
    looks: list[str] = []

    class Watched(InputFile):
        def __getattribute__(self, name: str):
            if name == "size":
                looks.append(name)
            return super().__getattribute__(name)

    for number in range(200):
        (tmp_path / f"{number}.txt").write_text("some text")
    files = [Watched(**vars(file)) for file in find_inputs([f"{tmp_path}/*.txt"])]
    assert tokenize_files(files, tmp_path / "out", EncoderSettings(tokenizer_path)) is not None
    assert len(list(read_documents(files))) == len(files)
    assert 0 < len(looks) < 20 * len(files)


def test_journal_and_slices_are_short_for_many_files(tokenizer_path, tmp_path, monkeypatch, cheap_tokenizing):
    """Neither lists the files: there may be a million."""
    (tmp_path / "in").mkdir()
    for number in range(200):
        (tmp_path / "in" / f"{number:03d}.txt").write_text("some text")
    real, encoded = ChunkEncoder.__call__, []

    def interrupted(self, chunk):
        encoded.append(chunk.path)
        if len(encoded) == 51:
            raise KeyboardInterrupt
        return real(self, chunk)

    monkeypatch.setattr(ChunkEncoder, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "in", tmp_path / "out", tokenizer_path)
    assert (tmp_path / "out" / "journal.json").stat().st_size < 1000
    (slice_path,) = (tmp_path / "out").rglob("slice_*")
    assert slice_path.stat().st_size < 5000
    assert tokenize(tmp_path / "in", tmp_path / "out", tokenizer_path) is not None
    assert len(encoded) == 51 + 150
    assert read_manifest(tmp_path / "out")["num_documents"] == 200


# Memory


PEAK = """import sys
sys.path[0] = sys.argv[1]
from preprocessing.tokenize_corpus import main
assert main(sys.argv[2:]) == 0
print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")])"""


@pytest.mark.slow
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


def test_document_separator(tokenizer_path, tmp_path):
    """A file that is one document comes in pieces where it is long; the manifest says what ends a document."""
    texts = make_texts(60)
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text("\n\n".join(texts[20 * number : 20 * number + 20]))
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags, "--document_separator", "file") == 0
    assert decoded(tmp_path / "out") == ["\n\n".join(texts[20 * number : 20 * number + 20]) for number in range(3)]
    assert read_manifest(tmp_path / "out")["created_by"]["document_separator"] == "file"
    (tmp_path / "in" / "0.txt").write_text("\n---\n".join(texts))
    flags[1] = tmp_path / "in" / "0.txt"
    assert run(*flags, "--document_separator", r"\n---\n", "--overwrite") == 0
    assert decoded(tmp_path / "out") == texts
    assert read_manifest(tmp_path / "out")["created_by"]["document_separator"] == "\n---\n"
