"""The arithmetic behind what a run says of itself."""

import pytest
import torch
from helpers.tiny_runs import flags, make_inputs

from training.config import TrainingConfig, parse_config
from training.distributed import World
from training.environment import read_environment
from training.forward_backward import graph_obstacle
from training.inputs import read_inputs
from training.summary import describe, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("AMD Instinct MI250", 181),
        ("NVIDIA T4", None),
    ],
)
def test_the_rate_is_that_of_what_a_rank_has(monkeypatch, name: str, teraflops: float | None):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(torch.device("cuda")) == expected
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, ""), ({"data_fingerprint": True}, "--data_fingerprint"), ({"compile": False}, "--no-compile")],
)
def test_what_switches_cuda_graphs_off_is_named(changes: dict, reason: str):
    config = TrainingConfig("-", "", "-", "-", name="-", **{"compile": True, **changes})
    found = graph_obstacle(config, torch.device("cuda"))
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_start_says_what_is_slower_than_it_might_be(tmp_path, monkeypatch):
    """Ranks of one objective each, which are auto's choice, and steps without CUDA graphs."""
    folder = make_inputs(tmp_path / "inputs", documents=60)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("training.summary.missing_kernels", lambda *_: {})

    def told(**options) -> str:
        inputs = read_inputs(parse_config(flags(folder, tmp_path / "runs", compile=True, **options), ""))
        world = World(0, 4, torch.device("cuda"), read_environment({}))
        return describe(inputs, world, options.pop("hybrid_split", "ranks"), 1000, 0)

    assert "split ranks (by auto, as published; --hybrid_split rows: both on every rank)" in told()
    assert "CUDA graphs" not in told()
    assert "by auto" not in told(hybrid_split="ranks") + told(hybrid_split="rows")
    assert "CUDA graphs   off: --data_fingerprint reads each batch's inputs" in told(data_fingerprint=True)
    assert "an index of all documents" not in told()
    monkeypatch.setattr("training.summary._MANY_DOCUMENTS", 50)
    assert "an index of all documents: 0.0 GB of memory a node and some 0 s before the first step" in told()
    assert "an index of all documents" not in told(order="blocks", block_tokens=500)
