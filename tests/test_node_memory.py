"""Arrays that the processes of a node share: made once, removed by the last that lets go, or in one's own memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.documents
from data import node_memory
from data.blocks import BlockOrder
from data.corpus import Corpus
from data.node_memory import SHARED_FROM, shared_array
from data.offsets_table import TABLE_NAME, write_table
from data.shards import Shard, ShardError, ShardFile, describe_shard, write_manifest, write_shard
from data.stop_event import IndexStopped, stop_event
from data.stream import TokenStream

HASH = "ab" * 32


def test_array_is_made_once_and_removed_by_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(node_memory, "_folder", lambda _: tmp_path)
    (tmp_path / "killed").touch()
    (tmp_path / "killed.lock").touch()
    made: list[int] = []

    def fill(array: np.ndarray) -> None:
        made.append(os.getpid())
        time.sleep(0.1)
        array[:] = np.arange(len(array))

    with ThreadPoolExecutor(4) as pool:  # a lock is that of an opened file, so threads are as good as processes
        arrays = list(pool.map(lambda _: shared_array("name", SHARED_FROM, fill), range(4)))
    assert len(made) == 1
    assert all(not array.flags.writeable and (array == np.arange(SHARED_FROM)).all() for array in arrays)
    assert {path.name for path in tmp_path.iterdir()} == {"name", "name.lock"}
    del arrays[1:]
    gc.collect()
    assert (tmp_path / "name").exists()
    arrays.clear()
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_wait_may_raise_and_a_failure_leaves_room_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(node_memory, "_folder", lambda _: tmp_path)

    def fails(_array: np.ndarray) -> None:
        with pytest.raises(KeyError):  # while this one makes it
            shared_array("name", SHARED_FROM, fails, wait=lambda: {}["stop"])
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        shared_array("name", SHARED_FROM, fails)
    assert shared_array("name", SHARED_FROM, lambda array: array.fill(7))[-1] == 7


def test_without_room_it_lies_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(node_memory, "_folder", lambda _: tmp_path / "absent")
    assert shared_array("name", SHARED_FROM, lambda array: array.fill(7))[-1] == 7
    assert not list(Path(tmp_path).iterdir())


def sharded(folder: Path, number: int = 3) -> list[ShardFile]:
    """A folder of shards of the same four documents, in one order and another."""
    documents = [np.arange(16, 16 + length) for length in (5, 900, 1, 40)]
    files = [
        write_shard(folder / f"{n}.shard", documents[n % 4 :] + documents[: n % 4], HASH, 1 << 20)
        for n in range(number)
    ]
    write_manifest(folder, files, HASH, 1 << 20, {})
    return files


def stream_of(path: Path | str, **flags: Any) -> TokenStream:
    return TokenStream(Corpus(path, tokenizer_hash=None, bos_id=1, eos_id=2, **flags), 3)


def test_index_is_the_same_from_threads_and_from_a_table(tmp_path, monkeypatch):
    files = sharded(tmp_path, 40)
    expected = stream_of(tmp_path)
    tokens = expected.read(0, expected.corpus.tokens_before_epoch(1))[0]
    write_table(tmp_path, files)
    monkeypatch.setattr(data.documents, "_CHUNK", 32)
    monkeypatch.setattr(Shard, "read_offsets", None)  # no shard is opened for it
    for threads in (2, 4):  # which add and gather
        stream = stream_of(tmp_path)
        stream.corpus._threads = threads
        np.testing.assert_array_equal(stream._index(0).block_ends, expected._index(0).block_ends)
        np.testing.assert_array_equal(stream.read(0, len(tokens))[0], tokens)


def test_table_of_other_shards_is_not_used_and_a_damaged_one_refused(tmp_path):
    write_table(tmp_path, sharded(tmp_path))
    (tmp_path / "0.shard").unlink()
    write_shard(tmp_path / "0.shard", [np.arange(16, 20)] * 7, HASH, 1 << 20)
    write_manifest(tmp_path, [describe_shard(tmp_path / f"{n}.shard") for n in range(3)], HASH, 1 << 20, {})
    assert np.diff(stream_of(tmp_path).corpus.starts)[:9].tolist() == [4] * 7 + [900, 1]
    os.truncate(tmp_path / TABLE_NAME, 99)
    with pytest.raises(ShardError, match=rf"{TABLE_NAME} is damaged; remove it or make it again"):
        stream_of(tmp_path).read(0, 9)


@pytest.mark.parametrize("error", [KeyError("wrong"), None])
def test_error_or_stop_in_a_thread_of_an_index_ends_all(tmp_path, monkeypatch, error):
    sharded(tmp_path, 40)
    stream, stop, asked = stream_of(tmp_path), threading.Event(), []
    stream.corpus._threads = 4
    monkeypatch.setattr(data.documents, "_CHUNK", 1)

    def spans(_self, documents: np.ndarray) -> Any:
        asked.append(documents)
        if error is not None:
            raise error
        stop.set()
        return documents, documents

    monkeypatch.setattr(Corpus, "spans", spans)
    token = stop_event.set(stop)
    with pytest.raises(KeyError if error is not None else IndexStopped):
        stream._index(0)
    stop_event.reset(token)
    assert len(asked) <= 4  # one a thread
    assert not stream.corpus.epochs.indices


@pytest.mark.parametrize("path", ["", "*.shard", "*/"])
def test_a_trusted_manifest_is_all_that_is_read_at_the_start(tmp_path, monkeypatch, path):
    folder = tmp_path / "folder"
    folder.mkdir()
    sharded(folder)
    path = tmp_path / "*/" if path == "*/" else folder / path
    flags = {"order": BlockOrder(100, 500)}
    every = [stream_of(path, **flags)]
    with monkeypatch.context() as patch:
        for name in ("pread", "readlink"):
            patch.setattr(os, name, None)
        patch.setattr("data.corpus.open_shard", None)
        every.append(stream_of(path, **flags, trusted=True))
    assert every[0].corpus.identity() == every[1].corpus.identity()
    rows = [stream.read(0, stream.corpus.tokens_before_epoch(2))[0] for stream in every]
    np.testing.assert_array_equal(*rows)
    os.truncate(folder / "1.shard", 400)
    with pytest.raises(ShardError, match=r"1\.shard ends before its document offsets"):
        stream_of(folder, trusted=True).read(0, 9)
