"""Masks: exact rates, spans, no special tokens, counts known beforehand, independence of batch composition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.counter_rng import fold_numpy
from data.documents import OCCURRENCE_SHIFT
from data.masking import (
    IGNORE_INDEX,
    PADDING,
    MaskingOptions,
    build_inputs,
    fingerprint,
    masked_counts,
    token_counts,
)
from data.objectives import CAUSAL, MASKED

OPTIONS = MaskingOptions(vocab_size=1000)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_rows(rows: int, length: int, seed: int = 0, document_every: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Random rows [rows, length + 1] with a `</s> <s>` now and then, and their keys."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(16, 1000, (rows, length + 1)).astype(np.int32)
    cuts = generator.random((rows, length)) < 1 / document_every
    tokens[:, :-1][cuts] = 2
    tokens[:, 1:][cuts] = 1
    return tokens, fold_numpy(seed, np.arange(rows)).view(np.int64)


def build(tokens, keys, p, *, causal=False, options=OPTIONS, origins=None, device="cpu"):
    counts = np.zeros(len(tokens), np.int64) if causal else masked_counts(tokens, keys, p, options)
    to = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731 - a local shorthand
    objective = torch.full((len(tokens),), CAUSAL if causal else MASKED, device=device)
    return build_inputs(
        to(tokens), to(keys), objective, to(counts), options, None if origins is None else to(origins)
    ), counts


@pytest.mark.parametrize("p", [0.15, 0.3])
@pytest.mark.parametrize("length", [32, 128])
def test_realised_rate_is_p(p, length):
    tokens, keys = make_rows(6000, length)
    inputs, counts = build(tokens, keys, p)
    selected = inputs.labels != IGNORE_INDEX
    maskable = (tokens[:, 1:] >= 16).sum()
    assert (selected.sum(1).numpy() == counts).all()
    # floor(p n + u) has a variance of at most 1/4 a row
    assert abs(selected.sum().item() - p * maskable) < 4 * 0.5 * len(tokens) ** 0.5


def test_targets_are_the_original_next_tokens_and_never_special():
    tokens, keys = make_rows(200, 64, document_every=8)
    inputs, _ = build(tokens, keys, 0.3)
    labels = inputs.labels.numpy()
    chosen = labels != IGNORE_INDEX
    np.testing.assert_array_equal(labels[chosen], tokens[:, 1:][chosen])
    assert (labels[chosen] >= 16).all()
    # Only chosen tokens are changed, and the first input never is.
    shown = inputs.input_ids.numpy()
    np.testing.assert_array_equal(shown[:, 0], tokens[:, 0])
    changed = shown[:, 1:] != tokens[:, 1:-1]
    assert not (changed & ~chosen[:, :-1]).any()


def test_replacements_have_their_fractions_and_agree_within_a_span():
    tokens, keys = make_rows(4000, 128, document_every=10**9)
    inputs, _ = build(tokens, keys, 0.3)
    chosen = (inputs.labels != IGNORE_INDEX).numpy()[:, :-1]
    shown, original = inputs.input_ids.numpy()[:, 1:], tokens[:, 1:-1]
    is_mask, is_kept = (shown == 4)[chosen], (shown == original)[chosen]
    is_random = ~is_mask & ~is_kept
    for share, expected in ((is_mask, 0.8), (is_kept, 0.1), (is_random, 0.1)):
        assert abs(share.mean() - expected) < 0.01
    random_ids = shown[chosen][is_random]
    assert random_ids.min() >= 16
    assert random_ids.max() < 1000
    assert len(np.unique(random_ids)) > 950


def test_spans_have_lengths_one_to_three_equally_often():
    """Mask few tokens of long rows, so that spans seldom touch: runs of masked tokens are spans then."""
    tokens, keys = make_rows(3000, 512, document_every=10**9)
    inputs, _ = build(tokens, keys, 0.02)
    chosen = np.pad((inputs.labels != IGNORE_INDEX).numpy(), ((0, 0), (1, 1))).astype(int)
    flat = np.diff(chosen, axis=1)
    lengths = np.nonzero(flat == -1)[1] - np.nonzero(flat == 1)[1]
    shares = np.bincount(lengths, minlength=8)[1:4] / len(lengths)
    assert (abs(shares - 1 / 3) < 0.06).all(), shares


def test_causal_rows_predict_everything_but_the_document_start():
    tokens, keys = make_rows(100, 64, document_every=8)
    inputs, _ = build(tokens, keys, 0.3, causal=True)
    labels = inputs.labels.numpy()
    np.testing.assert_array_equal(labels == IGNORE_INDEX, tokens[:, 1:] == 1)
    np.testing.assert_array_equal((labels != IGNORE_INDEX).sum(1), token_counts(tokens, OPTIONS))
    np.testing.assert_array_equal(inputs.input_ids.numpy(), tokens[:, :-1])
    assert (labels == 2).any()  # </s> is learned


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(2, 70), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_a_row_does_not_depend_on_its_batch(rows, length, p, seed, even):
    tokens, keys = make_rows(rows, length, seed, document_every=10)
    options = MaskingOptions(vocab_size=1000, even=even)
    origins = (np.arange(tokens.size).reshape(tokens.shape) + (3 << OCCURRENCE_SHIFT)) if even else None
    whole, counts = build(tokens, keys, p, options=options, origins=origins)
    assert ((whole.labels != IGNORE_INDEX).sum(1).numpy() == counts).all()
    order = np.random.default_rng(seed).permutation(rows)[: max(1, rows // 2)]
    part, _ = build(tokens[order], keys[order], p, options=options, origins=None if origins is None else origins[order])
    for name in ("input_ids", "labels", "document_ids"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[torch.from_numpy(order)])


def test_document_ids_count_up_at_every_start():
    tokens = np.array([[20, 21, 2, 1, 22, 2, 1, 23]], np.int32)
    inputs, _ = build(tokens, np.array([5]), 0.0)
    assert inputs.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2]]


def test_padding_is_neither_input_nor_target():
    tokens = np.array([[1, 20, 21, 22, PADDING, PADDING]], np.int32)
    for causal in (True, False):
        inputs, _ = build(tokens, np.array([5]), 1.0, causal=causal)
        assert inputs.document_ids.tolist() == [[1, 1, 1, 1, -1]]
        assert inputs.labels.tolist() == [[20, 21, 22, IGNORE_INDEX, IGNORE_INDEX]]
        assert inputs.input_ids[0, -1] == 3
        counts = token_counts(tokens, OPTIONS) if causal else masked_counts(tokens, np.array([5]), 1.0, OPTIONS)
        assert counts.tolist() == [3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("even", [False, True])
def test_special_tokens_may_have_any_ids(even, device):
    """Words and special tokens under other numbers, words in the same order: the same masks and the same draws."""
    generator, ours = np.random.default_rng(3), MaskingOptions(vocab_size=1000, random_p=0.5, even=even)
    special = np.sort(generator.choice(1000, 16, replace=False))
    names = np.concatenate([generator.permutation(special), np.setdiff1d(np.arange(1000), special)])  # by our id
    bos, pad, mask = names[[ours.bos_id, ours.pad_id, ours.mask_id]].tolist()
    theirs = replace(ours, bos_id=bos, pad_id=pad, mask_id=mask, special_ids=tuple(special.tolist()))
    tokens, keys = make_rows(200, 64)
    tokens[-1, 40:] = PADDING
    origins = np.arange(tokens.size).reshape(tokens.shape) if even else None
    expected, counts = build(tokens, keys, 0.4, options=ours, origins=origins)
    renamed = np.where(tokens == PADDING, PADDING, names[tokens]).astype(np.int32)
    found, found_counts = build(renamed, keys, 0.4, options=theirs, origins=origins, device=device)
    assert (found_counts == counts).all()
    assert (found.input_ids.cpu().numpy() == names[expected.input_ids]).all()
    labels = np.where(expected.labels == IGNORE_INDEX, IGNORE_INDEX, names[expected.labels])
    assert (found.labels.cpu().numpy() == labels).all()
    assert torch.equal(found.document_ids.cpu(), expected.document_ids)
    shown = found.input_ids[:, 1:].cpu().numpy()
    hidden = (found.labels[:, :-1].cpu().numpy() != IGNORE_INDEX) & (shown != renamed[:, 1:-1])
    drawn = np.unique(shown[hidden & (shown != mask)])
    assert not np.isin(drawn, special).any()
    assert drawn[0] < 50  # where ours are special
    assert drawn[-1] > 950


def test_the_token_that_begins_a_document_may_end_the_one_before():
    """GPT-2's: the end of a document is a target, predicted from that document, and never masked."""
    options, tokens = replace(OPTIONS, bos_ends=True), np.array([[1, 20, 21, 1, 22, 23, 1, PADDING]], np.int32)
    inputs, _ = build(tokens, np.array([5]), 0.0, causal=True, options=options)
    assert inputs.labels.tolist() == [[20, 21, 1, 22, 23, 1, IGNORE_INDEX]]
    assert inputs.document_ids.tolist() == [[1, 1, 1, 2, 2, 2, 3]]
    assert token_counts(tokens, options).tolist() == [6]
    inputs, counts = build(tokens, np.array([5]), 1.0, options=options)
    assert inputs.labels.tolist() == [[20, 21, IGNORE_INDEX, 22, 23, IGNORE_INDEX, IGNORE_INDEX]]
    assert counts.tolist() == [4]


def test_a_row_without_maskable_tokens_has_no_target():
    tokens = np.array([[1, 2, 1, 2]], np.int32)
    inputs, counts = build(tokens, np.array([5]), 0.9)
    assert counts.tolist() == [0]
    assert (inputs.labels == IGNORE_INDEX).all()


def test_even_masking_spreads_over_epochs():
    """Every token is masked about p * epochs times: far more evenly than by chance."""
    p, epochs, rows, length = 0.15, 40, 64, 128
    generator = np.random.default_rng(1)
    corpus = generator.integers(16, 1000, rows * length).astype(np.int32)
    variances = {}
    for even in (True, False):
        options = MaskingOptions(vocab_size=1000, even=even)
        counts = np.zeros(rows * length)
        for epoch in range(epochs):
            shift = int(generator.integers(length))  # rows are cut elsewhere in every epoch
            place = (np.arange(rows * length) + shift) % (rows * length)
            windows = np.concatenate([place, place[:1]])
            index = np.arange(rows)[:, None] * length + np.arange(length + 1)
            origins = windows[index] + (epoch << OCCURRENCE_SHIFT)
            keys = fold_numpy(epoch, np.arange(rows)).view(np.int64)
            inputs, _ = build(corpus[windows[index]], keys, p, options=options, origins=origins)
            counts[windows[index][:, 1:][(inputs.labels != IGNORE_INDEX).numpy()]] += 1
        assert counts.mean() == pytest.approx(p * epochs, rel=0.01)
        variances[even] = counts.var()
    assert variances[False] == pytest.approx(epochs * p * (1 - p), rel=0.1)
    assert variances[True] < variances[False] / 3


@pytest.mark.parametrize("device", DEVICES)
def test_fingerprint_ignores_order_and_sees_every_change(device):
    tokens, keys = make_rows(8, 32)
    inputs, _ = build(tokens, keys, 0.3, device=device)
    reference, _ = build(tokens, keys, 0.3)
    key = torch.from_numpy(keys)
    whole = fingerprint(reference, key)
    assert fingerprint(inputs, key.to(device)).item() == whole.item()
    parts = [build(tokens[half], keys[half], 0.3)[0] for half in (slice(3, 8), slice(0, 3))]
    assert fingerprint(parts[0], key[3:]) + fingerprint(parts[1], key[:3]) == whole
    for name, place in (("input_ids", (2, 5)), ("labels", (2, 5)), ("document_ids", (2, 5)), ("objective", (2,))):
        changed = getattr(reference, name).clone()
        changed[place] += 1
        assert fingerprint(replace(reference, **{name: changed}), key) != whole


@pytest.mark.gpu
def test_masks_are_the_same_on_cpu_and_gpu():
    tokens, keys = make_rows(300, 128)
    for p in (0.15, 0.3):
        here, there = build(tokens, keys, p)[0], build(tokens, keys, p, device="cuda")[0]
        for name in ("input_ids", "labels", "document_ids"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu())
