"""The loader: the same global batch for any number of ranks, every token once per epoch, clean threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data.documents
from data.corpus import Corpus
from data.loader import BatchBuilder, Loader, StepBatch, ValidationSet, micro_batch_rows
from data.masking import IGNORE_INDEX, MaskingOptions, fingerprint
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan, RowRange, resolve_split
from data.shards import write_shard
from data.stream import TokenStream
from training.loss import varlen_sizes

HASH = "ab" * 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    value = 16
    for shard in range(3):
        documents = []
        for length in generator.integers(1, 90, 60):
            documents.append(np.arange(value, value + length))
            value += length
        write_shard(folder / f"{shard}.shard", documents, HASH, 1 << 20)
    return Corpus(str(folder / "*.shard"), tokenizer_hash=HASH, bos_id=1, eos_id=2)


def make_builder(corpus, *, numerator=3, denominator=4, even=False, row_start=True, **options) -> BatchBuilder:
    settings_ = {"max_steps": 12, "seq_length": 16, "global_batch_size": 96, "batch_reduction": 3.0, **options}
    plan = DataPlan(hybrid_numerator=numerator, hybrid_denominator=denominator, **settings_)
    return BatchBuilder(corpus, plan, MaskingOptions(vocab_size=1 << 14, even=even, row_start=row_start))


def global_fingerprint(builder, step, world_size, split, local_batch_size) -> tuple[int, np.ndarray]:
    total, targets = 0, np.zeros(2, np.int64)
    for rank in range(world_size):
        batch = builder.step(step, rank, world_size, split, local_batch_size)
        targets += batch.targets
        for micro_batch in batch.micro_batches(CPU):
            total += int(fingerprint(micro_batch.inputs(builder.options), micro_batch.row_keys))
    return total % 2**64, targets


@settings(max_examples=25)
@given(st.integers(0, 11), st.integers(1, 6), st.integers(1, 40), st.sampled_from(["auto", "rows"]), st.booleans())
def test_global_batch_is_the_same_on_any_hardware(corpus, step, world_size, local_batch_size, choice, even):
    builder = make_builder(corpus, even=even)
    expected, targets = global_fingerprint(builder, step, 1, "rows", 1000)
    found, found_targets = global_fingerprint(
        builder, step, world_size, resolve_split(choice, world_size, [Fraction(3, 4)]), local_batch_size
    )
    assert found == expected
    np.testing.assert_array_equal(found_targets, targets)


def test_host_target_counts_equal_the_labels(corpus):
    builder = make_builder(corpus)
    for step in (0, 8, 11):
        batch = builder.step(step, 0, 1, "rows", 7)
        for micro_batch in batch.micro_batches(CPU):
            inputs = micro_batch.inputs(builder.options)
            counts = (inputs.labels != IGNORE_INDEX).sum(1)
            assert counts.tolist() == micro_batch.targets.sum(0).tolist()
            assert (micro_batch.targets[CAUSAL] > 0).tolist() == inputs.causal.tolist()


@settings(max_examples=25)
@given(st.integers(0, 11), st.integers(1, 40))
def test_host_document_counts_are_upper_bounds(corpus, step, local_batch_size):
    builder = make_builder(corpus)
    for batch in builder.step(step, 0, 1, "rows", local_batch_size).micro_batches(CPU):
        ids, sizes = batch.inputs(builder.options).document_ids, varlen_sizes(batch)
        runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(1)
        assert batch.objective.tolist() == [MASKED] * sizes.rows[0] + [CAUSAL] * sizes.rows[1]
        for objective, places in zip((MASKED, CAUSAL), sizes.documents, strict=True):
            rows = batch.objective == objective
            assert (places > 0) == bool(rows.any())
            assert runs[rows].sum() <= places


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_token_once_per_epoch_and_objective_across_row_lengths(corpus, world_size):
    """Rows of both objectives, from first to last step, own all tokens of their streams, each once and shuffled."""
    builder = make_builder(corpus, max_steps=20, milestones=(0.3, 0.6), global_batch_size=160)
    split = resolve_split("auto", world_size, [Fraction(3, 4)])
    lengths = set()
    for objective in (MASKED, CAUSAL):
        targets = []
        for step in range(20):
            plan = builder.plan.step(step)
            lengths.add(plan.seq_length)
            for rank in range(world_size):
                batch = builder.step(step, rank, world_size, split, 8).batch
                rows = batch.tokens[batch.objective == objective].numpy()
                targets.append(rows[:, 1:].ravel())
        seen = np.concatenate(targets)
        epoch = corpus.tokens_before_epoch(1)
        stream = TokenStream(corpus, builder.plan.stream_key(objective))
        in_order = stream.read(1, len(seen))[0]
        assert not np.array_equal(seen, in_order)
        np.testing.assert_array_equal(np.sort(seen), np.sort(in_order))
        for end in range(epoch, len(seen) + 1, epoch):  # but for the row that reaches into the next epoch
            counts = Counter(seen[:end][seen[:end] >= 16].tolist())
            assert sum(abs(counts[token] - end // epoch) for token in range(16, 16 + corpus.num_tokens)) <= 2 * 64
        if objective == MASKED:
            assert len(seen) > epoch  # the test saw a whole epoch
    assert len(lengths) == 3


@pytest.mark.parametrize("objective", [MASKED, CAUSAL])
def test_rows_begin_with_bos_and_own_what_they_owned(corpus, objective):
    """`<s>` stands in the place of the token before the row, which another row owns; targets are those without it."""
    builders = [make_builder(corpus, row_start=row_start) for row_start in (True, False)]
    batches = [builder.rows(builder.plan.step(0), RowRange(objective, 0, 8)) for builder in builders]
    held_out = [ValidationSet(corpus, builder.options, seq_length=16) for builder in builders]
    for begun, plain in (batches, [next(one.batches(objective, 0, 1, 50)) for one in held_out]):
        first = plain.tokens[:, 0].clone()
        assert (first != 1).any()  # goes on in a document
        assert (begun.tokens[:, 0] == 1).all()
        assert torch.equal(begun.tokens[:, 1:], plain.tokens[:, 1:])
        assert (begun.targets == plain.targets).all()
        shown, before = begun.inputs(builders[0].options), plain.inputs(builders[1].options)
        assert torch.equal(shown.labels, before.labels)
        assert torch.equal(shown.input_ids[:, 1:], before.input_ids[:, 1:])
        runs = [inputs.document_ids[:, 1:] != inputs.document_ids[:, :-1] for inputs in (shown, before)]
        assert torch.equal(*runs)


@settings(max_examples=20)
@given(st.integers(1, 400))
def test_micro_batches_keep_their_tokens_when_rows_grow(local_batch_size):
    assert micro_batch_rows(local_batch_size, 128, 128) == local_batch_size
    assert micro_batch_rows(local_batch_size, 128, 512) == max(1, local_batch_size // 4)


@settings(max_examples=60)
@given(st.integers(1, 90), st.integers(1, 40))
def test_micro_batches_are_full_and_hold_every_row_once(corpus, rows, size):
    """But for the last ones: a single row is left over only where it cannot be helped."""
    builder = make_builder(corpus)
    batch = builder.rows(builder.plan.step(0), RowRange(MASKED, 0, rows))
    parts = list(StepBatch(builder.plan.step(0), batch, size).micro_batches(CPU))
    assert torch.equal(torch.cat([part.row_keys for part in parts]), batch.row_keys)
    lengths = [len(part) for part in parts]
    assert all(length == size for length in lengths[:-2])
    assert max(lengths) <= size
    assert len(lengths) == -(-rows // size)
    assert min(lengths) > 1 or rows == 1 or size < 3


def test_loader_yields_the_steps_in_order_from_anywhere(corpus):
    builder = make_builder(corpus)
    loader = Loader(builder, rank=1, world_size=2, split="rows", local_batch_size=8, start_step=5)
    batches = list(loader)
    loader.close()
    assert [batch.plan.step for batch in batches] == list(range(5, 12))
    for batch in batches:
        assert torch.equal(batch.batch.tokens, builder.step(batch.plan.step, 1, 2, "rows", 8).batch.tokens)


def loader_threads() -> set[threading.Thread]:
    """Threads of loaders; a run that ended with an error in this process may have left one."""
    return {thread for thread in threading.enumerate() if thread.name == "loader"}


def test_loader_raises_the_threads_errors_and_stops_it(corpus, monkeypatch):
    others = loader_threads()
    builder = make_builder(corpus)
    monkeypatch.setattr(builder, "step", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
    loader = Loader(builder, rank=0, world_size=1, split="rows", local_batch_size=8)
    with pytest.raises(OSError, match="disk gone"):
        list(loader)
    loader.close()
    builder = make_builder(corpus)
    loader = Loader(builder, rank=0, world_size=1, split="rows", local_batch_size=8)
    next(iter(loader))
    loader.close()
    assert loader_threads() <= others


def test_loader_can_be_peeked_and_closed_while_it_builds_an_index(corpus, monkeypatch):
    building, spans, others = threading.Event(), Corpus.spans, loader_threads()

    def slow(self, documents):
        building.set()
        time.sleep(0.01)
        return spans(self, documents)

    monkeypatch.setattr(data.documents, "_CHUNK", 1)  # 180 chunks: 1.8 s, had nobody asked
    monkeypatch.setattr(Corpus, "spans", slow)
    fresh = Corpus(str(corpus.shards[0].path.parent / "*.shard"), tokenizer_hash=HASH, bos_id=1, eos_id=2)
    loader = Loader(make_builder(fresh), rank=0, world_size=1, split="rows", local_batch_size=8)
    assert building.wait(30)
    assert loader.peek(0.01) is None
    loader.close()
    assert loader_threads() <= others
    assert not fresh.epochs.indices


def test_peek_gives_a_step_until_advance(corpus):
    loader = Loader(make_builder(corpus), rank=0, world_size=1, split="rows", local_batch_size=8, start_step=10)
    seen = [loader.peek(), loader.peek()]
    assert seen[0] is seen[1] is not None
    loader.advance()
    assert [batch.plan.step for batch in (seen[0], *loader)] == [10, 11]
    assert loader.peek() is None
    loader.close()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("objective", [MASKED, CAUSAL])
def test_validation_set_is_all_of_the_data_with_fixed_masks(corpus, world_size, objective):
    held_out = ValidationSet(corpus, MaskingOptions(vocab_size=1 << 14), seq_length=64)
    rows, labels = [], []
    for rank in range(world_size):
        for batch in held_out.batches(objective, rank, world_size, batch_rows=5):
            rows.append(batch.tokens[:, 1:])
            labels.append(batch.inputs(held_out.options).labels)
    tokens, targets = torch.cat(rows).numpy().ravel(), torch.cat(labels)
    stored = TokenStream(corpus, None).read(1, corpus.tokens_before_epoch(1) - 1)[0]
    np.testing.assert_array_equal(tokens[: len(stored)], stored)
    assert (tokens[len(stored) :] == -1).all()
    again = torch.cat([b.inputs(held_out.options).labels for b in held_out.batches(objective, 0, 1, 50)])
    assert torch.equal(targets, again)
    count = (targets != IGNORE_INDEX).sum().item()
    expected = corpus.num_tokens * 0.15 if objective == MASKED else corpus.num_tokens + corpus.num_documents
    assert count == pytest.approx(expected, rel=0.02)


def test_validation_on_a_part_spreads_over_the_set(corpus):
    held_out = ValidationSet(corpus, MaskingOptions(vocab_size=1 << 14), seq_length=64, rows=10)
    firsts = torch.cat([b.tokens[:, 1] for b in held_out.batches(CAUSAL, 0, 1, 4)])
    stored = TokenStream(corpus, None).read(0, corpus.tokens_before_epoch(1))[0]
    rows = np.arange(10) * held_out.total_rows // 10
    assert firsts.tolist() == stored[rows * 64 + 1].tolist()


def test_validation_indexes_its_documents_once(corpus, monkeypatch):
    built = []
    build = TokenStream._build_index
    monkeypatch.setattr(TokenStream, "_build_index", lambda stream, epoch: built.append(epoch) or build(stream, epoch))
    held_out = ValidationSet(corpus, MaskingOptions(vocab_size=1 << 14), seq_length=64)
    for objective in (MASKED, CAUSAL, MASKED, CAUSAL):
        assert sum(map(len, held_out.batches(objective, 0, 1, 7))) == held_out.total_rows
    assert built in ([], [0])  # unless a test before had it built


def test_validation_in_longer_rows_has_the_same_targets(corpus):
    short = ValidationSet(corpus, MaskingOptions(vocab_size=1 << 14), seq_length=16)
    assert short.in_rows_of(64).seq_length == 64
    owned = [
        torch.cat([batch.tokens[:, 1:].flatten() for batch in held_out.batches(CAUSAL, 0, 1, 9)])
        for held_out in (short, short.in_rows_of(64))
    ]
    assert torch.equal(*(tokens[tokens >= 0] for tokens in owned))
    part = ValidationSet(corpus, short.options, seq_length=16, rows=40)
    assert part.in_rows_of(64).used_rows == 10
