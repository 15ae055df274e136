"""Snapshots of the state on a CUDA device: what is written is of one step, while the next one changes the weights."""

from __future__ import annotations

import pytest
import torch

from training.saves import Snapshot

pytestmark = pytest.mark.gpu


def test_snapshot_is_of_its_moment_and_does_not_hold_up_the_host():
    device = torch.device("cuda", torch.cuda.current_device())
    weights = torch.arange(64_000_000, device=device, dtype=torch.float32)
    tensors = {"model": {"weights": weights, "number": torch.tensor(3)}}
    snapshot = Snapshot(device, 300_000_000)
    snapshot.take(tensors)
    snapshot.wait()
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(200):
        busy = torch.tanh(busy @ busy)
    end.record()
    images = snapshot.take(tensors)
    assert images is not None
    assert not end.query()  # the host is back before the device has even begun to copy
    snapshot.hold_updates()
    weights.add_(1)
    snapshot.wait()
    content = images["model"]._content
    assert content is not None
    assert content.is_pinned()
    found = content[-weights.numel() * 4 :].view(torch.float32)
    assert torch.equal(found, torch.arange(64_000_000, dtype=torch.float32))
    assert weights[1].item() == 2
    snapshot.close()
    assert not content.is_pinned()
