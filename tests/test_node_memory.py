"""Arrays that the processes of a node share: made once, removed by the last that lets go, or in one's own memory."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data import node_memory
from data.blocks import BlockOrder
from data.corpus import Corpus
from data.node_memory import SHARED_FROM, shared_array
from data.shards import ShardError, write_manifest, write_shard
from data.stream import TokenStream


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


def test_a_trusted_manifest_is_all_that_is_read_at_the_start(tmp_path, monkeypatch):
    documents = [np.arange(16, 16 + length) for length in (5, 900, 1, 40)]
    written = [write_shard(tmp_path / f"{n}.shard", documents, "ab" * 32, 1 << 20, words=7) for n in range(3)]
    write_manifest(tmp_path, written, "ab" * 32, 1 << 20, {})
    flags = {"tokenizer_hash": None, "bos_id": 1, "eos_id": 2, "order": BlockOrder(100, 500)}
    every = [Corpus(tmp_path, **flags)]
    with monkeypatch.context() as patch:
        for name in ("pread", "readlink", "lstat"):
            patch.setattr(os, name, None)
        patch.setattr("data.corpus.open_shard", None)
        every.append(
            Corpus(tmp_path, tokenizer_hash=None, bos_id=1, eos_id=2, order=BlockOrder(100, 500), trusted=True)
        )
    assert every[0].identity() == every[1].identity()
    rows = [TokenStream(corpus, 3).read(0, corpus.tokens_before_epoch(2))[0] for corpus in every]
    np.testing.assert_array_equal(*rows)
    os.truncate(tmp_path / "1.shard", 400)
    lost = Corpus(tmp_path, tokenizer_hash=None, bos_id=1, eos_id=2, trusted=True)
    with pytest.raises(ShardError, match=r"1\.shard ends before its document offsets"):
        TokenStream(lost, 3).read(0, 9)
