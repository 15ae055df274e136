"""Files of checkpoints: laid out in memory, copied from a device while training goes on, written in parts."""

from __future__ import annotations

import hashlib

import pytest
import torch

import training.checkpoint
from training.checkpoint import CheckpointError, open_checkpoint, write_checkpoint
from training.saves import Snapshot


def test_files_are_written_and_summed_up_in_parts(tmp_path, monkeypatch):
    """Tensors of any type, empty ones and single numbers, as the safetensors package reads them."""
    monkeypatch.setattr(training.checkpoint, "_PART_BYTES", 1000)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): (torch.randn(3, 7, 11) * 9).to(kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 4), "number": torch.tensor(2.5, dtype=torch.float64), "t": torch.randn(5, 3).T}
    place = write_checkpoint(tmp_path, 1, {"model": tensors}, {}, {"config.json": b"{}", "empty": b""})
    read = open_checkpoint(place).tensors("model")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
    entry = open_checkpoint(place).record["files"]["model.safetensors"]
    content = bytearray((place / "model.safetensors").read_bytes())
    digests = [hashlib.sha256(content[n : n + 1000]).digest() for n in range(0, len(content), 1000)]
    assert entry["sha256"] == hashlib.sha256(b"".join(digests)).hexdigest()
    content[-1] ^= 1
    (place / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its checksum"):
        open_checkpoint(place)


@pytest.mark.gpu
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
