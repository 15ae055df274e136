"""Checksums of tensors' bits: one flipped bit is always found, on any device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.bit_sums import bit_sums

SIZES = (1, 3, 255, 256, 257, 4095, 4096, 4097, 70001)


def defined(tensor: torch.Tensor) -> int:
    """The sum by its definition, as an int64."""
    total = sum((2 * (i % 256) + 1) * bits for i, bits in enumerate(tensor.view(torch.int32).tolist()))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("size", [0, *SIZES])
def test_bit_sums_follow_their_definition(size: int):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert int(bit_sums([tensor])) == defined(tensor)


@given(st.sampled_from(SIZES), st.integers(0, 2**31), st.integers(0, 31))
def test_bit_sum_changes_with_any_flipped_bit(size: int, index: int, bit: int):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
    before = bit_sums([tensor])
    tensor.view(torch.int32)[index % size] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert bit_sums([tensor]) != before


def test_bit_sum_changes_when_elements_swap():
    tensor = torch.arange(300.0)
    before = bit_sums([tensor])
    tensor[[7, 8]] = tensor[[8, 7]]
    assert bit_sums([tensor]) != before
    assert bit_sums([tensor, torch.zeros(2)]).tolist() == [int(bit_sums([tensor])), 0]
    assert len(bit_sums([])) == 0


@pytest.mark.gpu
def test_bit_sums_on_a_gpu_are_those_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size + 1, generator=generator)[1:] for size in SIZES]
    assert bit_sums([tensor.cuda() for tensor in tensors]).tolist() == bit_sums(tensors).tolist()
