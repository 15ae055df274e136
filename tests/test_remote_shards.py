"""Shards on a server: fetched ahead into a cache of bounded size, checked, and tried again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.http_files import served

from data import remote_files, remote_shards
from data.blocks import BlockOrder
from data.corpus import Corpus, CorpusError
from data.loader import BatchBuilder
from data.masking import MaskingOptions
from data.plan import DataPlan
from data.remote_shards import ShardCache
from data.shards import ShardError, write_manifest, write_shard
from data.stream import TokenStream

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
HASH = "ab" * 32


@pytest.fixture
def shards(tmp_path, monkeypatch) -> Path:
    """A folder of six shards of some 8 KB."""
    monkeypatch.setattr(remote_files, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(remote_shards, "_PART_BYTES", 1000)
    (tmp_path / "train").mkdir()
    documents = np.split(np.arange(16, 4016), range(400, 4000, 400))
    files = [write_shard(tmp_path / "train" / f"{n}.shard", documents, HASH, 5000 + n) for n in range(6)]
    write_manifest(tmp_path / "train", files, HASH, 5000, {})
    return tmp_path


def opened(path: str | Path, cache: ShardCache | None) -> Corpus:
    return Corpus(path, tokenizer_hash=None, bos_id=1, eos_id=2, order=BlockOrder(10_000, 4000), cache=cache)


def test_a_remote_corpus_is_the_local_one_in_a_small_cache(shards, tmp_path):
    cache = ShardCache(tmp_path / "cache", 6e-5)
    expected = opened(shards / "train", None)
    with served(shards) as server:
        corpus = opened(f"{server.url}/train", cache)
        assert corpus.identity() == expected.identity()
        small = ShardCache(tmp_path / "cache", 2.5e-5)
        for shard in corpus.shards:
            object.__setattr__(shard.remote, "cache", small)
        server.losses = 5
        assert corpus.blocks is not None
        corpus.blocks.read_ahead([0, 1])
        for begin in range(0, 2 * corpus.tokens_before_epoch(1), 4000):
            streams = [TokenStream(each, 3).read(begin, 4000)[0] for each in (corpus, expected)]
            np.testing.assert_array_equal(*streams)
            assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.shard")) <= 25_000
        assert server.losses == 0


def test_a_silent_server_is_not_noticed_while_a_window_lasts(shards, tmp_path):
    """Rows of this window and of the next come from the cache; what failed meanwhile is asked for again."""
    local = Corpus(shards / "train", tokenizer_hash=None, bos_id=1, eos_id=2, order=BlockOrder(5000, 8000))
    plan = DataPlan(12, 16, 125, 1, hybrid_numerator=0, hybrid_denominator=1, milestones=())  # 2,000 tokens a step
    options = MaskingOptions(vocab_size=5000)
    expected = BatchBuilder(local, plan, options)
    with served(shards) as server:
        cache = ShardCache(tmp_path / "cache", 1)
        corpus = Corpus(
            f"{server.url}/train", tokenizer_hash=None, bos_id=1, eos_id=2, order=BlockOrder(5000, 8000), cache=cache
        )
        builder = BatchBuilder(corpus, plan, options)
        for step in range(plan.max_steps):
            if step in (1, 7):
                for thread in builder._ahead._begun.values():
                    thread.join()
            if step == 1:
                asked, server.status = len(server.requests), 503
            if step == 7:  # of the third window, which begins next, nothing could be had
                assert len(server.requests) > asked
                server.status = 0
            batches = [each.step(step, 0, 1, "rows", 4).batch.tokens for each in (builder, expected)]
            assert (batches[0] == batches[1]).all()


def test_what_cannot_be_had_is_one_sentence(shards, tmp_path):
    cache = ShardCache(tmp_path / "cache", 1)
    with served(shards) as server:
        with pytest.raises(ShardError, match="is remote; give --data_cache_dir"):
            opened(f"{server.url}/train", None)
        with pytest.raises(ShardError, match=r"other/manifest\.json could not be read"):
            opened(f"{server.url}/other", cache)
        with pytest.raises(CorpusError, match=r"at once, more than --data_cache_gb 1e-05; lower --shuffle_tokens"):
            opened(f"{server.url}/train", ShardCache(tmp_path / "cache", 1e-5))
        corpus = opened(f"{server.url}/train", cache)
        content = bytearray((shards / "train/0.shard").read_bytes())
        content[300] += 1
        (shards / "train/0.shard").write_bytes(content)
        with pytest.raises(ShardError, match=r"0\.shard has another content than its manifest\.json says \(SHA-256\)"):
            TokenStream(corpus, None).read(0, 9)
