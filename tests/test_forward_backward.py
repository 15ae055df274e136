"""Micro-steps recorded as CUDA graphs are the micro-steps."""

import json
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_models import each_document_alone, make_model
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines

import train_single_gpu
import training.state
from data.loader import RowBatch
from ops import rope
from training import forward_backward, step
from training.distributed import single_world
from training.errors import USER
from training.forward_backward import (
    ForwardBackward,
    choose_rows,
    padded_targets,
    recompute_activations,
    room_for_documents,
)
from training.gradients import GradientBuckets
from training.status import read_status


@pytest.mark.parametrize("positions", [1, 7, 32, 1000, 32768])
def test_slots_suffice_and_hardly_exceed(positions: int):
    for count in [*range(1, min(positions, 200) + 1), positions // 3 + 1, positions]:
        slots = padded_targets(count, positions)
        assert count <= slots <= positions
        assert slots <= count + 2 * -(-positions // 64)


def test_a_growing_batch_meets_few_sizes_and_little_padding():
    known, padding = [1024], []
    for rows in range(256, 1025):
        size = choose_rows(rows, known)
        known.append(size)
        assert size >= rows
        padding.append(size / rows - 1)
    assert len(set(known)) <= 65
    assert max(padding) < 1 / 32
    assert sum(padding) / len(padding) < 0.011
    assert choose_rows(1023, [1024]) == 1024
    assert [choose_rows(rows, ()) for rows in range(65)] == list(range(65))


@pytest.mark.parametrize("expected", [0, 1, 9, 100, 600])
def test_documents_in_about_the_same_number_have_room_in_few_graphs(expected: int):
    rooms = [room_for_documents(count) for count in range(expected - expected // 8, expected + expected // 8 + 1)]
    assert len(set(rooms)) <= 5
    for count, room in enumerate(rooms, expected - expected // 8):
        assert count <= room <= count * 1.5 + 2 * (count > 0)


class EagerGraph:
    """Stands where there is no GPU for a captured graph: a replay computes what it would."""

    def __init__(self, steps: ForwardBackward, batch, key):
        self._loss = lambda: steps._forward(batch, key)[0]

    def replay(self) -> None:
        self._loss().backward()


@pytest.mark.slow
@pytest.mark.parametrize(("masking", "positions"), [("even", "relative"), ("random", "rope")])
def test_rows_filled_up_with_padding_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masking: str, positions: str
):
    """In a run whose batch and rows grow, and whose last micro-batch is any size; and room for documents that are not
    there, with a stand-in for kernels that are launched by document."""
    inputs = make_inputs(tmp_path / "inputs", position_embedding=positions)
    sources = [{"path": f"train/part_{number}.shard", "repeat": 1} for number in (0, 1)]
    (inputs / "mix.json").write_text(json.dumps({"sources": sources}))
    options = {"masking": masking, "max_steps": 20, "local_batch_size": 45, "global_batch_size": 128, "valid_path": ""}
    options["train_path"] = inputs / "mix.json"
    assert train_single_gpu.main(flags(inputs, tmp_path, "plain", **options), single_world) == 0
    filled: list[tuple[int, int]] = []
    failed: list[int] = []
    held: list[weakref.ref] = []

    def capture(self: ForwardBackward, own: RowBatch, key):
        assert not held or held[-1]() is None, "a failed capture's memory lives on"
        if len(own) not in failed:
            failed.append(len(own))
            part = own.tokens.clone()
            held.append(weakref.ref(part))
            raise RuntimeError("something would have to be compiled")
        stand_in: Any = EagerGraph(self, own, key)
        return forward_backward._Graph(stand_in, own, key.rows[0], [])

    def replay(self: forward_backward._Graph, batch: RowBatch, first: int) -> None:
        filled.append((self.first - first, len(self.batch) - self.first - len(batch) + first))
        plain_replay(self, batch, first)

    plain_replay = forward_backward._Graph.replay
    monkeypatch.setattr(forward_backward._Graph, "replay", replay)
    monkeypatch.setattr(forward_backward, "_ROW_SIZES", 4)
    monkeypatch.setattr(training.state, "graph_obstacle", lambda *_: "")
    monkeypatch.setattr(training.state, "compile_layers", lambda *_: None)
    monkeypatch.setattr(ForwardBackward, "_capture", capture)
    monkeypatch.setattr(GradientBuckets, "sum_replayed", lambda *_: None)
    monkeypatch.setattr(rope, "obstacle", lambda *_: "")
    monkeypatch.setattr(rope, "varlen_kernel", lambda: each_document_alone)
    assert train_single_gpu.main(flags(inputs, tmp_path, "padded", **options, compile=True), single_world) == 0
    plain, padded = training_lines(tmp_path / "plain"), training_lines(tmp_path / "padded")
    for key in ("train/loss", "train/accuracy", "stats/grad_norm", "train/part_1/masked_loss"):
        assert [line[key] for line in padded] == pytest.approx([line[key] for line in plain], rel=2e-4), key
    assert max(others for others, _ in filled) > 2
    assert (max(causal for _, causal in filled) > 0) == (positions == "rope")
    assert len(failed) > 2


@pytest.mark.parametrize("kind", [("gpt-bert", "relative"), ("ltg-bert", "relative"), ("gpt-bert", "rope")])
def test_activations_computed_anew_give_the_same_gradients(kind: tuple[str, str]):
    """Bit for bit, with dropout and in bfloat16; what is kept for the backward pass shrinks from choice to choice."""
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients, kept = [], []
    for which, calls in (("none", [1, 1]), ("mlp", [1, 2]), ("layer", [2, 2])):
        model = make_model(kind, dropout=0.1).train()
        layers = [model.transformer.attention_layers[1], model.transformer.mlp_layers[1]]
        counted = [Mock(side_effect=layer.forward) for layer in layers]
        for layer, forward in zip(layers, counted, strict=True):
            layer.forward = forward
        recompute_activations(() if which == "none" else model.recomputed_parts(which))
        sizes: list[int] = []
        torch.manual_seed(1)  # of the keys of dropout
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: (sizes.append(t.nbytes), t)[1], lambda t: t
            ),
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss = model(ids, torch.zeros_like(ids), torch.tensor([True, False]), torch.arange(24)).square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        kept.append(sum(sizes))
        assert [mock.call_count for mock in counted] == calls
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], found, strict=True))
    assert kept[0] > kept[1] > kept[2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [{}, {"model_type": "modernbert", "sliding_window": 5, "global_attn_every_n_layers": 2}]
)
def test_graphs_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict):
    """Row lengths, the share of masks, the batch's size and the last micro-batch's change on the way."""
    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4, **shape)
    losses, norms = [], []
    variants = [
        ("plain", "graphs", False, "none"),
        ("recorded", "", True, "none"),
        ("compiled", "graphs", True, "none"),
        ("anew_mlp", "", True, "mlp"),
        ("anew_layer", "", True, "layer"),
    ]
    for name, reference, compiled, anew in variants[: 3 if shape else 5]:
        monkeypatch.setenv("HYBRID_REFERENCE", reference)
        options = {
            "device": "cuda",
            "learning_rate": 1e-3,
            "local_batch_size": 24,
            "max_steps": 24,
            "compile": compiled,
            "activation_checkpointing": anew,
        }
        done = run(flags(inputs, tmp_path, name, **options))
        assert "without CUDA graphs" not in done.stderr
        lines = training_lines(tmp_path / name)
        losses.append([line["train/loss"] for line in lines])
        norms.append([line["stats/grad_norm"] for line in lines])
        counts = [line.get("train/accuracy") for line in lines]
        assert all(count is not None for count in counts)
    for other in range(1, len(losses)):
        assert losses[other] == pytest.approx(losses[0], rel=4e-3)
        assert norms[other] == pytest.approx(norms[0], rel=6e-2)
    assert losses[1][:3] == pytest.approx(losses[2][:3], rel=5e-4)


WARMED = """
import sys
sys.path.insert(0, {root!r})
import train_single_gpu
import training.state
from training.distributed import single_world, start_world
training.state.compile_layers = lambda *_: None  # a compiler takes minutes on a CPU
sys.exit(train_single_gpu.main(sys.argv[1:], {world}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_warming_up_leaves_no_trace(tmp_path: Path, ranks: int):
    inputs = make_inputs(tmp_path / "inputs")
    # The same ranks for both, so that sums are taken in the same order and nothing but warming up differs.
    run(flags(inputs, tmp_path, "cold", max_steps=12), ranks)
    script = tmp_path / "warmed.py"
    script.write_text(WARMED.format(root=str(ROOT), world="start_world" if ranks else "single_world"))
    done = run(flags(inputs, tmp_path, "warm", max_steps=12, compile=True), ranks, script=script)
    assert "compiled for rows of 16, 32, 64 tokens in" in done.stdout
    lines = {name: training_lines(tmp_path / name) for name in ("cold", "warm")}
    for key in ("train/loss", "stats/grad_norm"):
        cold, warm = ([line[key] for line in lines[name]] for name in ("cold", "warm"))
        assert warm == cold


def test_too_little_memory_is_one_sentence_before_the_first_step(tmp_path: Path, monkeypatch, capsys):
    def warm_up(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")

    monkeypatch.setattr(training.state, "compile_layers", lambda *_: None)
    monkeypatch.setattr(train_single_gpu, "warm_up", warm_up)
    assert (
        train_single_gpu.main(flags(make_inputs(tmp_path / "inputs"), tmp_path, compile=True), single_world)
        == USER.code
    )
    error = "error: CUDA out of memory; lower --local_batch_size: it changes speed alone\n"
    assert capsys.readouterr().err == error
    assert not training_lines(tmp_path / "run")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "failed"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("reference", ["graphs", ""])
def test_no_step_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str):
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
    monkeypatch.setenv("HYBRID_REFERENCE", reference)
    monkeypatch.setattr(train_single_gpu, "warm_up", warm_up)
    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    options = {"device": "cuda", "local_batch_size": 24, "max_steps": 24, "compile": True, "valid_path": ""}
    assert train_single_gpu.main(flags(inputs, tmp_path, **options), single_world) == 0
    assert len(training_lines(tmp_path / "run")) == 24
    assert compiled[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mixed_precision", [True, False])
def test_capture_that_meets_a_recompilation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed_precision: bool
):
    """All that is compiled is thrown away before the third capture."""
    import torch._dynamo

    captures: list[bool] = []
    capture = ForwardBackward._capture

    def forgetful(self: ForwardBackward, *arguments) -> object:
        if len(captures) == 2:
            torch._dynamo.reset()
        captures.append(False)
        graph = capture(self, *arguments)
        captures[-1] = True
        return graph

    inputs = make_inputs(tmp_path / "inputs", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    options = {
        "device": "cuda",
        "learning_rate": 1e-3,
        "local_batch_size": 24,
        "max_steps": 24,
        "valid_path": "",
        "compile": True,
        "mixed_precision": mixed_precision,
    }
    losses = []
    for name, reference, method in (("eager", "graphs", capture), ("forgetful", "", forgetful)):
        torch._dynamo.reset()
        monkeypatch.setenv("HYBRID_REFERENCE", reference)
        monkeypatch.setattr(ForwardBackward, "_capture", method)
        assert train_single_gpu.main(flags(inputs, tmp_path, name, **options), single_world) == 0
        losses.append([line["train/loss"] for line in training_lines(tmp_path / name)])
    assert captures[:4] == [True, True, False, True]
    assert all(again for done, again in pairwise(captures) if not done), "the second attempt failed, too"
    assert losses[1] == pytest.approx(losses[0], rel=4e-3 if mixed_precision else 1e-4)
