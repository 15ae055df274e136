"""The order of rows: each once, shuffled within an epoch, and batches are samples of the whole corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import Corpus
from data.loader import BatchBuilder
from data.masking import MaskingOptions
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan
from data.row_shuffle import RowShuffle
from data.shards import write_shard


def make_corpus(folder: Path, lengths: list[int]) -> Corpus:
    """A document of each length; all tokens of document n are 16 + n."""
    write_shard(folder / "x.shard", [np.full(length, 16 + n) for n, length in enumerate(lengths)], "ab" * 32, 1 << 16)
    return Corpus(folder / "x.shard", tokenizer_hash=None, bos_id=1, eos_id=2)


@settings(max_examples=60)
@given(data=st.data())
def test_every_row_once_and_in_its_epoch(tmp_path_factory, data):
    corpus = make_corpus(
        tmp_path_factory.mktemp("shards"), data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=9))
    )
    spans, end = [], 0
    for length in data.draw(st.lists(st.sampled_from([4, 8, 64]), min_size=1, max_size=3)):
        rows = data.draw(st.integers(0, 90))
        spans.append((end, end + rows * length, length))
        end += rows * length
    order = RowShuffle(corpus, data.draw(st.integers(0, 99)), spans)
    for begin, end, length in spans:
        rows = (end - begin) // length
        found = order.positions(begin, rows)
        assert sorted(found) == list(range(begin, end, length))
        epochs = [corpus.epoch_of(int(position)) for position in found]
        assert epochs == sorted(epochs)
        if rows:  # any part of it, asked for alone
            first = data.draw(st.integers(0, rows - 1))
            count = data.draw(st.integers(1, rows - first))
            np.testing.assert_array_equal(order.positions(begin + first * length, count), found[first : first + count])


@pytest.mark.parametrize("objective", [MASKED, CAUSAL])
def test_batch_is_a_sample_of_the_corpus(tmp_path, objective):
    """Four books and many short texts: each batch holds about their shares, in every epoch."""
    corpus = make_corpus(tmp_path, [20_000] * 4 + [100] * 200)
    plan = DataPlan(40, 32, 128, batch_reduction=1, hybrid_numerator=1, hybrid_denominator=2, milestones=(0.5,))
    assert plan.objective_tokens(objective) > 0.7 * corpus.tokens_before_epoch(1)
    builder = BatchBuilder(corpus, plan, MaskingOptions(vocab_size=1 << 14))
    shares = []
    for step in range(40):
        batch = builder.step(step, 0, 1, "rows", 64).batch
        tokens = batch.tokens[batch.objective == objective].numpy()
        shares.append([np.mean(tokens == 16 + book) for book in range(4)])
    for phase in (shares[:20], shares[20:]):  # rows are drawn from what the phase reads, which documents decide
        spread = np.std(phase, axis=0)
        assert (spread < 2.5 * np.sqrt(0.2 * 0.8 / 32)).all()  # of 64 or 32 rows of a batch; whole texts: up to 0.4


def test_orders_differ_between_epochs_and_seeds(tmp_path):
    corpus = make_corpus(tmp_path, [62] * 10)  # 640 tokens an epoch, 40 rows
    order = RowShuffle(corpus, 1, [(0, 1280, 16)])
    first, second = order.positions(0, 40), order.positions(640, 40) - 640
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()
    assert RowShuffle(corpus, 2, [(0, 1280, 16)]).positions(0, 40).tolist() != first.tolist()
