"""Micro-steps recorded as CUDA graphs are the micro-steps."""

from pathlib import Path

import pytest

from tests.runs import flags, make_inputs, run, training_lines
from training.micro_step import choose_slots


@pytest.mark.parametrize("positions", [1, 7, 32, 1000, 32768])
def test_slots_suffice_and_hardly_exceed(positions: int):
    known: list[int] = []
    for count in [*range(1, min(positions, 200) + 1), positions // 3 + 1, positions]:
        slots = choose_slots(count, positions, known)
        assert count <= slots <= positions
        assert slots <= count + 2 * -(-positions // 32)
        known.append(slots)
    assert len(set(known)) <= 34


@pytest.mark.gpu
def test_graphs_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Row lengths, the share of masks, the batch's size and the last micro-batch's change on the way."""
    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    losses, norms = [], []
    for name, graphs, compiled in (("plain", "0", False), ("recorded", "1", True), ("compiled", "0", True)):
        monkeypatch.setenv("HYBRID_CUDA_GRAPHS", graphs)
        options = {
            "device": "cuda",
            "learning_rate": 1e-3,
            "local_batch_size": 24,
            "max_steps": 24,
            "compile": compiled,
        }
        done = run(flags(inputs, tmp_path, name, **options))
        assert "without CUDA graphs" not in done.stderr
        lines = training_lines(tmp_path / name)
        losses.append([line["train/loss"] for line in lines])
        norms.append([line["stats/grad_norm"] for line in lines])
        counts = [line.get("train/accuracy") for line in lines]
        assert all(count is not None for count in counts)
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=4e-3)
        assert norms[other] == pytest.approx(norms[0], rel=6e-2)
    assert losses[1][:3] == pytest.approx(losses[2][:3], rel=5e-4)
