"""Attention metadata: position tables, buckets and documents, the same for kernels, reference and rotary attention."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import attention_metadata
from ops.attention_metadata import attention_allowed, bucket, fused_metadata, relative_slots
from ops.rope import varlen_metadata


@pytest.mark.parametrize(
    ("length", "bucket_size", "max_position"),
    [(1, 32, 512), (64, 4, 12), (128, 32, 512), (300, 16, 18), (512, 32, 128)],
)
def test_position_tables_hold_the_buckets(length, bucket_size, max_position):
    """The slot of each distance, and the one-hot matrix put together from its fragments."""
    padded = attention_metadata.padded_length(length)
    slots, fragments, groups = attention_metadata.position_tables(
        padded, bucket_size, max_position, torch.device("cpu")
    )
    assert len(slots) == 2 * padded + 1
    assert padded >= length
    assert padded % 64 == 0
    expected = relative_slots(length, bucket_size, max_position, torch.device("cpu"))
    index = torch.arange(length)
    assert torch.equal(slots[padded + index[:, None] - index].long(), expected)
    one_hot = torch.zeros(2 * padded, 64)  # rows: distances 1 - padded .. padded
    for group, (first, last, base, _) in enumerate(groups.tolist()):
        for step in range(first, last + 1):
            for lane, registers in enumerate(fragments[base + step].tolist()):
                for register, bits in enumerate(registers):
                    for half in range(2):
                        row = 16 * step + padded + lane % 4 * 2 + 8 * register + half
                        one_hot[row, 8 * group + lane // 4] += (bits >> 16 * half & 0xFFFF) / 0x3F80
    assert torch.equal(one_hot, torch.nn.functional.one_hot(slots[1:].long(), 64).float())


@given(st.integers(2, 40), st.integers(0, 500))
def test_buckets_are_antisymmetric_and_monotone(bucket_size, further):
    """What lets one table serve queries and keys as rows, and one pass find all columns of a slot."""
    distance = torch.arange(-700, 701)
    buckets = bucket(distance, bucket_size, bucket_size // 2 + 2 + further)
    assert torch.equal(buckets, -buckets.flip(0))
    assert (buckets.diff() >= 0).all()


def test_position_tables_keep_their_addresses():
    """A captured CUDA graph keeps their addresses alone: other row lengths, however many, must not free them."""
    ids = torch.zeros(1, 100, dtype=torch.int64)
    metadata = fused_metadata(ids, torch.tensor([True]), 32, 512)
    kept = [weakref.ref(table) for table in metadata[2:]]
    del metadata
    for length in range(1, 1500, 17):
        fused_metadata(ids.new_zeros(1, length), torch.tensor([True]), 32, 512)
    assert all(table() is not None for table in kept)


@st.composite
def rows_of_documents(draw: st.DrawFn) -> Tensor:
    """Rows in which ids come back, and padding may stand anywhere."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 24))
    ids = st.lists(st.integers(-2, 2), min_size=length, max_size=length)
    return torch.tensor([draw(ids) for _ in range(batch)])


@given(ids=rows_of_documents())
def test_document_is_a_run_of_one_id_in_every_metadata(ids: Tensor):
    """Spans (kernels), the mask (reference, SDPA) and boundaries (variable-length kernels) against the definition."""
    batch, length = ids.shape
    same = torch.zeros(batch, length, length, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        for i in range(length):
            for j in range(length):
                same[b, i, j] = row[i] >= 0 and len(set(row[min(i, j) : max(i, j) + 1])) == 1
    spans, index = attention_metadata.document_spans(ids), torch.arange(length)
    assert spans.dtype == torch.int32
    assert torch.equal((index >= spans[..., :1]) & (index < spans[..., 1:]), same)
    real = (ids >= 0)[:, :, None]
    allowed = attention_allowed(ids, torch.zeros(batch, dtype=torch.bool))
    assert torch.equal(allowed & real, same)
    assert torch.equal(attention_allowed(ids, torch.ones(batch, dtype=torch.bool)) & real, same.tril())
    assert allowed.diagonal(dim1=1, dim2=2).all(), "no row of scores is empty"
    boundaries = varlen_metadata(ids, False).boundaries[0]
    document = torch.bucketize(torch.arange(batch * length), boundaries, right=True).view(batch, length)
    assert torch.equal((document[:, :, None] == document[:, None]) & real, same)


@given(ids=rows_of_documents(), data=st.data())
def test_ends_of_tokens_mean_the_same_to_kernels_and_reference(ids: Tensor, data: st.DataObject):
    """Keys of queries, queries of keys and the reference's mask against the definition, for any ends that rise."""
    batch, length = ids.shape
    ends = torch.tensor(data.draw(st.lists(st.integers(0, length + 1), min_size=ids.numel(), max_size=ids.numel())))
    ends = ends.view(ids.shape).sort(dim=1).values
    real, same = (ids >= 0)[:, :, None], attention_allowed(ids, torch.zeros(batch, dtype=torch.bool))
    expected = torch.zeros_like(same)
    for b, i, j in (same & real).nonzero().tolist():
        expected[b, i, j] = j <= i or j < ends[b, i]
    assert torch.equal(attention_allowed(ids, ends) & real, expected)
    metadata, index = fused_metadata(ids, ends, 32, 512), torch.arange(length)
    assert not metadata.causal.any()
    assert metadata.spans.is_contiguous()
    assert metadata.spans.dtype == torch.int32
    keys, queries = ((index >= spans[..., :1]) & (index < spans[..., 1:]) for spans in metadata.spans)
    assert torch.equal(keys, expected)
    assert torch.equal(queries, expected.transpose(1, 2))
