"""The shard format: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tempfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.shards
from data.shard_paths import resolve_shards
from data.shards import (
    ShardError,
    ShardWriter,
    describe_shard,
    open_shard,
    read_manifest,
    sha256_file,
    token_dtype,
    tokenizer_hash,
    write_atomically,
    write_manifest,
    write_shard,
)

HASH = "0123456789abcdef" * 4
DOCUMENTS = [np.array([20, 21, 22]), np.array([], int), np.array([5, 999])]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "one.shard"
    write_shard(path, DOCUMENTS, HASH, 1000)
    return path


def manifest_folder(folder: Path, counts: tuple[int, ...] = (2, 1)) -> Path:
    """A complete folder with one shard for each count of documents."""
    folder.mkdir(parents=True)
    files = []
    for number, count in enumerate(counts):
        documents = [np.arange(20, 25 + index) for index in range(count)]
        files.append(write_shard(folder / f"shard_{number:05d}.shard", documents, HASH, 1000, words=7))
    write_manifest(folder, files, HASH, 1000, {"script": "test"})
    return folder


def test_file_format_byte_by_byte(shard):
    fields = struct.pack("<8sI8sQQQ32s", b"TOKSHARD", 1, b"uint16", 3, 5, 1000, bytes.fromhex(HASH))
    header = (fields + struct.pack("<I", zlib.crc32(fields))).ljust(256, b"\0")
    tokens = struct.pack("<5H", 20, 21, 22, 5, 999) + bytes(6)  # up to a multiple of 8
    assert shard.read_bytes() == header + tokens + struct.pack("<4Q", 0, 3, 3, 5)


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), max_size=20), max_size=12),
    vocab_size=st.sampled_from([300, 65_536, 65_537, 70_000]),
)
def test_round_trip(documents, vocab_size):
    expected = [[token % vocab_size for token in document] for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.shard")
        written = write_shard(path, (np.array(document, np.int64) for document in expected), HASH, vocab_size)
        opened = open_shard(path, HASH)
        assert [opened.document(index).tolist() for index in range(opened.num_documents)] == expected
        assert opened.dtype == np.dtype("<u2" if vocab_size <= 65_536 else "<u4")
        assert opened.tokens.tolist() == [token for document in expected for token in document]
        assert opened.offsets.dtype == np.uint64
        assert opened.offsets[0] == 0
        assert opened.offsets[-1] == opened.num_tokens == len(opened.tokens)
        assert (opened.vocab_size, opened.tokenizer_hash) == (vocab_size, HASH)
        assert written == describe_shard(path)
        assert (written.bytes, written.sha256) == (path.stat().st_size, sha256_file(path))
        assert os.listdir(folder) == ["x.shard"]


def test_every_id_of_the_vocabulary_fits(tmp_path):
    for vocab_size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        write_shard(tmp_path / "x.shard", [np.arange(vocab_size)], HASH, vocab_size)
        tokens = open_shard(tmp_path / "x.shard").tokens
        assert tokens.dtype == dtype
        assert np.array_equal(tokens, np.arange(vocab_size))
    for impossible in (0, -1, 2**32 + 1):
        with pytest.raises(ShardError, match="vocabulary"):
            token_dtype(impossible)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (np.array([1000]), "token id 1000 lies outside the vocabulary of 1000"),
        (np.array([3, -1]), "token id -1 lies outside"),
        (np.array([0.5]), "1-D array of integers, not float64"),
        (np.array([[1]]), "1-D array of integers"),
    ],
)
def test_impossible_tokens_leave_nothing_behind(tmp_path, document, sentence):
    with pytest.raises(ShardError, match=sentence):
        write_shard(tmp_path / "x.shard", [np.array([1]), document], HASH, 1000)
    assert not list(tmp_path.iterdir())


def test_document_ends_lie_within_the_tokens(tmp_path):
    writer = ShardWriter(tmp_path / "x.shard", HASH, 1000)
    with pytest.raises(ShardError, match="a document ends behind the 2 tokens given"):
        writer.append(np.array([1, 2]), [1, 3])
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_failure_keeps_the_older_file(shard):
    before = shard.read_bytes()

    def documents():
        yield np.array([1])
        raise RuntimeError("source failed")

    with pytest.raises(RuntimeError, match="source failed"):
        write_shard(shard, documents(), HASH, 1000)
    assert shard.read_bytes() == before
    assert os.listdir(shard.parent) == ["one.shard"]


def test_shard_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(f"-> {target}")
        replace(source, target)

    monkeypatch.setattr(data.shards.os, "fsync", recorded_fsync)
    monkeypatch.setattr(data.shards.os, "replace", recorded_replace)
    write_shard(tmp_path / "x.shard", DOCUMENTS, HASH, 1000)
    write_atomically(tmp_path / "y", b"content")
    temporary = f"{tmp_path}/x.shard.partial", f"{tmp_path}/y.partial"
    expected = [temporary[0], f"-> {tmp_path}/x.shard", str(tmp_path), temporary[1], f"-> {tmp_path}/y", str(tmp_path)]
    assert calls == expected


def test_bad_hash_is_refused(tmp_path):
    with pytest.raises(ShardError, match="not a tokenizer hash"):
        ShardWriter(tmp_path / "x.shard", "abcd", 1000)


def test_writing_takes_little_memory(tmp_path):
    block = np.full(250_000, 7, np.uint16)
    tracemalloc.start()
    write_shard(tmp_path / "x.shard", (block for _ in range(60)), HASH, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "x.shard").stat().st_size > 30e6
    assert peak < 6e6


def test_documents_may_be_written_in_pieces(tmp_path):
    documents = [np.arange(16, 16 + length) for length in (5, 1, 70, 3)]
    expected = write_shard(tmp_path / "whole.shard", documents, HASH, 1000)
    writer, tokens = ShardWriter(tmp_path / "x.shard", HASH, 1000), np.concatenate(documents)
    for start, stop, ends in ((0, 30, [5, 6]), (30, 40, []), (40, 79, [36, 39])):
        writer.append(tokens[start:stop], ends)
    assert writer.finish().sha256 == expected.sha256
    assert sorted(os.listdir(tmp_path)) == ["whole.shard", "x.shard"]


# Opening


def test_truncation_at_any_offset_is_noticed(shard, tmp_path):
    content = shard.read_bytes()
    broken = tmp_path / "broken.shard"
    for size in [*range(0, 300), len(content) - 8, len(content) - 1]:
        broken.write_bytes(content[:size])
        with pytest.raises(ShardError, match=r"broken\.shard is (not a token shard|truncated)"):
            open_shard(broken)
    broken.write_bytes(content + b"\0")
    with pytest.raises(ShardError, match="too long: it has 305 bytes where its header asks for 304"):
        open_shard(broken)


def test_any_flipped_bit_of_the_header_is_noticed(shard, tmp_path):
    content = bytearray(shard.read_bytes())
    broken = tmp_path / "broken.shard"
    for place in range(struct.calcsize("<8sI8sQQQ32sI")):
        for bit in range(8):
            content[place] ^= 1 << bit
            broken.write_bytes(content)
            with pytest.raises(ShardError, match="broken"):
                open_shard(broken)
            content[place] ^= 1 << bit


def test_offsets_must_span_the_tokens(shard):
    content = bytearray(shard.read_bytes())
    for place in (len(content) - 32, len(content) - 8):
        broken = bytearray(content)
        broken[place] += 1
        shard.write_bytes(broken)
        with pytest.raises(ShardError, match="offsets do not span"):
            open_shard(shard)


def test_foreign_files(tmp_path, shard):
    (tmp_path / "text.shard").write_text("once upon a time " * 100)
    with pytest.raises(ShardError, match=r"text\.shard is not a token shard; make"):
        open_shard(tmp_path / "text.shard")
    with pytest.raises(ShardError, match=r"none\.shard \(No such file"):
        open_shard(tmp_path / "none.shard")
    with pytest.raises(ShardError, match="Is a directory"):
        open_shard(tmp_path)
    content = bytearray(shard.read_bytes())
    content[8] = 3
    shard.write_bytes(content)
    with pytest.raises(ShardError, match="format version 3, this program reads 1 and 2"):
        open_shard(shard)


def test_other_tokenizers_are_refused(shard):
    assert open_shard(shard, HASH).num_documents == 3
    with pytest.raises(ShardError, match=r"one\.shard was made with another tokenizer .*0123456789ab.*ffffffffffff"):
        open_shard(shard, "f" * 64)


def test_views_are_read_only_and_lazy(shard):
    opened = open_shard(shard)
    assert "_map" not in vars(opened)
    opened.drop_cache()  # nothing to drop
    assert not opened.tokens.flags.writeable
    assert not opened.offsets.flags.writeable
    opened.drop_cache()
    assert opened.document(0).tolist() == [20, 21, 22]


def test_a_pickled_shard_opens_its_own_map(shard):
    opened = open_shard(shard)
    assert opened.tokens[0] == 20
    content = pickle.dumps(opened)
    assert len(content) < 2000
    assert pickle.loads(content) == opened
    assert pickle.loads(content).document(2).tolist() == [5, 999]


def test_drop_cache_gives_memory_back(tmp_path):
    write_shard(tmp_path / "x.shard", [np.full(20_000_000, 9, np.uint16)], HASH, 1000)
    process = psutil.Process()
    opened = open_shard(tmp_path / "x.shard")
    before = process.memory_info().rss
    assert int(opened.tokens[::512].sum()) == 9 * -(-20_000_000 // 512)
    read = process.memory_info().rss
    opened.drop_cache()
    after = process.memory_info().rss
    assert read - before > 30e6
    assert after - before < 10e6


# Tokenizer hash


def test_tokenizer_hash_ignores_json_formatting(tmp_path):
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"], ["ab", "c"]]}, "padding": 1}
    path = tmp_path / "tokenizer.json"

    def hashed(content: dict, **layout) -> str:
        path.write_text(json.dumps(content, **layout))
        return tokenizer_hash(path)

    first = hashed(tokenizer)
    assert len(bytes.fromhex(first)) == 32
    assert hashed(tokenizer, indent=3) == first
    assert hashed({"padding": None, "model": dict(reversed(tokenizer["model"].items()))}) == first
    assert hashed({"model": {**tokenizer["model"], "merges": ["a b", "ab c"]}}) == first
    assert hashed({"model": {**tokenizer["model"], "merges": ["ab c", "a b"]}}) != first
    assert hashed({"model": {**tokenizer["model"], "vocab": {"a": 1, "b": 0}}}) != first
    assert hashed({**tokenizer, "normalizer": {"type": "NFC"}}) != first


@pytest.mark.parametrize(
    ("content", "word"), [("{", "not valid JSON"), ("[]", "no 'model'"), ('{"a": 1}', "no 'model'")]
)
def test_unreadable_tokenizers(tmp_path, content, word):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ShardError, match=rf"t\.json.*{word}"):
        tokenizer_hash(tmp_path / "t.json")
    with pytest.raises(ShardError, match=r"cannot read the tokenizer .*No such file"):
        tokenizer_hash(tmp_path / "missing.json")


# Folders


def test_manifest(tmp_path):
    folder = manifest_folder(tmp_path / "corpus")
    manifest = read_manifest(folder)
    assert manifest["num_documents"] == 3
    assert manifest["num_tokens"] == 5 + 6 + 5
    assert manifest["num_words"] == 14
    assert manifest["shards"][1] == {
        "file": "shard_00001.shard",
        "bytes": (folder / "shard_00001.shard").stat().st_size,
        "sha256": sha256_file(folder / "shard_00001.shard"),
        "documents": 1,
        "tokens": 5,
        "words": 7,
    }


def test_resolving_folders_files_and_globs(tmp_path):
    one, two = manifest_folder(tmp_path / "one"), manifest_folder(tmp_path / "two [old]", (1,))
    shards = [one / "shard_00000.shard", one / "shard_00001.shard"]
    assert resolve_shards(one) == shards
    assert resolve_shards(str(one / "shard_00001.shard")) == shards[1:]
    assert resolve_shards(str(one / "*.shard")) == shards
    assert resolve_shards(two) == [two / "shard_00000.shard"]
    assert resolve_shards(str(tmp_path / "*")) == [*shards, two / "shard_00000.shard"]


def test_shard_order_is_the_manifests(tmp_path):
    folder = manifest_folder(tmp_path / "corpus")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"].reverse()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert resolve_shards(folder) == [folder / "shard_00001.shard", folder / "shard_00000.shard"]


def test_incomplete_folders(tmp_path):
    with pytest.raises(ShardError, match="does not exist; give a shard folder"):
        resolve_shards(tmp_path / "none")
    with pytest.raises(ShardError, match="matches no shard"):
        resolve_shards(str(tmp_path / "*.shard"))
    manifest_folder(tmp_path / "corpus" / "train")
    with pytest.raises(ShardError, match=r"not a complete shard folder, .*did you mean .*corpus/train\?"):
        resolve_shards(tmp_path / "corpus")
    folder = manifest_folder(tmp_path / "other")
    os.truncate(folder / "shard_00001.shard", 300)
    with pytest.raises(ShardError, match=r"shard_00001\.shard has 300 bytes, but manifest\.json lists it with"):
        resolve_shards(folder)
    (folder / "shard_00001.shard").unlink()
    with pytest.raises(ShardError, match=r"shard_00001\.shard is missing"):
        resolve_shards(folder)
    write_manifest(folder, [], HASH, 1000, {})
    with pytest.raises(ShardError, match="holds no document"):
        resolve_shards(folder)


@pytest.mark.parametrize("name", ["corpus/train", "corpus"])  # with and without a part that is held out
def test_unfinished_work_is_refused_in_every_form(tmp_path, name):
    folder = manifest_folder(tmp_path / name)
    (folder / "manifest.json").unlink()
    assert len(resolve_shards(str(folder / "*.shard"))) == 2  # loose shards
    (tmp_path / "corpus" / "journal.json").write_text("{}")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.shard").symlink_to(folder / "shard_00000.shard")
    for path in (folder / "*.shard", folder / "shard_00000.shard", tmp_path / "links" / "*", tmp_path / "**/*.shard"):
        with pytest.raises(ShardError, match=r"unfinished work, see .*journal\.json"):
            resolve_shards(str(path))
    with pytest.raises(ShardError, match="not a complete shard folder"):
        resolve_shards(folder)


def test_unlisted_shard_is_refused_in_every_form(tmp_path):
    folder = manifest_folder(tmp_path / "corpus")
    write_shard(folder / "other.shard", [np.array([20])], HASH, 1000)
    for path in (folder / "*.shard", folder / "other.shard", folder / "**", tmp_path / "**" / "o*.shard"):
        with pytest.raises(ShardError, match=r"other\.shard is not listed in the manifest\.json beside it"):
            resolve_shards(str(path))
    assert len(resolve_shards(str(folder / "shard_*.shard"))) == 2


def test_missing_listed_shard_of_a_glob_is_named(tmp_path):
    folder = manifest_folder(tmp_path / "corpus", (1, 2, 3))
    (folder / "shard_00001.shard").unlink()
    assert len(resolve_shards(str(folder / "shard_0000[02].shard"))) == 2
    for path in (folder / "*.shard", tmp_path / "*" / "shard_0000[12].shard"):
        with pytest.raises(ShardError, match=r"shard_00001\.shard is missing"):
            resolve_shards(str(path))


def test_glob_never_takes_the_validation_split(tmp_path):
    for name in ("train", "validation"):
        manifest_folder(tmp_path / "shards" / name)
    for path in ("shards/*", "shards/*/*.shard", "**/*.shard"):
        with pytest.raises(ShardError, match=r"takes .*train and .*validation, which was held out of it; give .*train"):
            resolve_shards(str(tmp_path / path))
    assert len(resolve_shards(str(tmp_path / "shards" / "val*"))) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("num_tokens"),
        lambda manifest: manifest.update(version=2),
        lambda manifest: manifest.update(format="something"),
        lambda manifest: manifest.update(shards=3),
        lambda manifest: manifest["shards"][0].update(file="../../secret.shard"),
        lambda manifest: manifest["shards"][0].pop("sha256"),
    ],
)
def test_damaged_manifests(tmp_path, change):
    folder = manifest_folder(tmp_path / "corpus")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"manifest\.json is damaged or of another"):
        read_manifest(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ShardError, match=r"manifest\.json is damaged or of another"):
        read_manifest(folder)
