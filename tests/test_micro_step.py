"""Micro-steps recorded as CUDA graphs are the micro-steps."""

from pathlib import Path

import pytest
import torch

from tests.runs import ROOT, flags, make_inputs, run, training_lines
from training import loop, step
from training.distributed import single_world
from training.micro_step import choose_slots
from training.status import read_status


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


WARMED = """
import sys
sys.path.insert(0, {root!r})
import training.loop
from training.distributed import single_world, start_world
training.loop.compile_layers = lambda model: None  # a compiler takes minutes on a CPU
sys.exit(training.loop.main(sys.argv[1:], "", {world}))
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_warming_up_leaves_no_trace(tmp_path: Path, ranks: int):
    inputs = make_inputs(tmp_path / "inputs")
    run(flags(inputs, tmp_path, "cold", max_steps=12))
    script = tmp_path / "warmed.py"
    script.write_text(WARMED.format(root=str(ROOT), world="start_world" if ranks else "single_world"))
    done = run(flags(inputs, tmp_path, "warm", max_steps=12, compile=True), ranks, script=script)
    assert "compiled for rows of 16, 32, 64 tokens in" in done.stdout
    lines = {name: training_lines(tmp_path / name) for name in ("cold", "warm")}
    for key in ("train/loss", "stats/grad_norm"):
        cold, warm = ([line[key] for line in lines[name]] for name in ("cold", "warm"))
        assert warm == (cold if ranks == 0 else pytest.approx(cold, rel=1e-5))


def test_too_little_memory_is_one_sentence_before_the_first_step(tmp_path: Path, monkeypatch, capsys):
    def warm_up(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")

    monkeypatch.setattr(loop, "compile_layers", lambda model: None)
    monkeypatch.setattr(loop, "warm_up", warm_up)
    assert loop.main(flags(make_inputs(tmp_path / "inputs"), tmp_path, compile=True), "", single_world) == 1
    error = "error: CUDA out of memory; lower --local_batch_size: it changes speed alone\n"
    assert capsys.readouterr().err == error
    assert not training_lines(tmp_path / "run")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "failed"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_no_step_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: str):
    """What has been compiled before the first step suffices for all row lengths, batch sizes and shares of masks."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    compiled: list[int] = []

    def warm_up(*arguments) -> str:
        done = step.warm_up(*arguments)
        compiled.append(counters["stats"]["unique_graphs"])
        return done

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv("HYBRID_CUDA_GRAPHS", graphs)
    monkeypatch.setattr(loop, "warm_up", warm_up)
    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    options = {"device": "cuda", "local_batch_size": 24, "max_steps": 24, "compile": True, "valid_path": ""}
    assert loop.main(flags(inputs, tmp_path, **options), "", single_world) == 0
    assert len(training_lines(tmp_path / "run")) == 24
    assert compiled[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled[0]
