"""The line that says which kernels run and why others do not, for devices that are pretended; nothing is compiled."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model import ModelConfig
from ops import attention_cuda, muon, nvrtc, residual, residual_cuda, rope
from slurm import doctor_machine
from slurm.doctor_table import OK, WARN
from training import summary
from training.config import TrainingConfig

CUDA = torch.device("cuda", 0)
FLAGS = TrainingConfig(
    train_path="-", config_file="-", tokenizer_path="-", name="-", mixed_precision=True, compile=True
)
BASE_SIZES = json.loads((Path(__file__).resolve().parent.parent / "configs" / "base.json").read_text())
BASE = ModelConfig.from_dict(BASE_SIZES)
ALL = "attention, residual, gate norm, feed-forward norm, loss, optimizer"
# Compute capability, and KiB of shared memory that a block may have (CUDA's programming guide).
DEVICES = {
    "T4": (7, 5, 64),
    "A100": (8, 0, 163),
    "A10": (8, 6, 99),
    "L40S": (8, 9, 99),
    "H200": (9, 0, 227),
    "B200": (10, 0, 227),
    "RTX 5090": (12, 0, 99),
}


@pytest.fixture(autouse=True)
def nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_REFERENCE", raising=False)
    monkeypatch.delenv("HYBRID_SHARED_MEMORY", raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    major, minor, kib = DEVICES[name]
    properties = SimpleNamespace(name=name, major=major, minor=minor, shared_memory_per_block_optin=kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", None)


def report(config: TrainingConfig = FLAGS, **changes) -> str:
    model = ModelConfig.from_dict(BASE_SIZES | changes)
    return summary.kernels_line(summary.missing_kernels(config, model, CUDA, load=False))


@pytest.mark.parametrize("name", ["A100", "A10", "L40S", "H200", "B200", "RTX 5090"])
def test_base_runs_with_all_kernels_on(monkeypatch: pytest.MonkeyPatch, name: str):
    pretend(monkeypatch, name)
    assert report() == ALL


@pytest.mark.parametrize(
    ("changes", "missing", "reason"),
    [
        ({"num_attention_heads": 8}, "attention", "heads have 96 features and not 32, 64 or 128 (about 100 to 260 %"),
        ({"position_bucket_size": 33}, "attention", "position_bucket_size is 33, above 32"),
        ({"num_hidden_layers": 32}, "residual", "num_hidden_layers is 32, above 31"),
        (
            {"hidden_size": 2304, "num_attention_heads": 36},
            "residual",
            "hidden_size is 2304 and not a multiple of 128 up",
        ),
        ({"intermediate_size": 2624}, "feed-forward norm", "rows of 2624 features cannot be shared out"),
        (
            {"norm_weight": True},
            "gate norm, feed-forward norm",
            "norms are layer_norm with weights, pre, and hidden_act",
        ),
        (
            {"norm": "rms_norm"},
            "residual, gate norm, feed-forward norm",
            "norms are rms_norm, pre, and hidden_act gelu",
        ),
        ({"hidden_act": "silu"}, "feed-forward norm", "norms are layer_norm, pre, and hidden_act silu"),
    ],
)
def test_sizes_without_a_kernel_are_named(monkeypatch: pytest.MonkeyPatch, changes: dict, missing: str, reason: str):
    pretend(monkeypatch, "H200")
    used, _, rest = report(**changes).partition(" | not: ")
    assert rest.startswith(f"{missing} because {reason}")
    assert used == ALL.replace(f"{missing}, ", "")


def test_other_reasons_are_named(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, "H200")
    precise = dataclasses.replace(FLAGS, mixed_precision=False)
    assert report(precise).startswith(
        "loss, optimizer | not: attention, residual, gate norm, feed-forward norm because "
    )
    assert "because they compute in bfloat16 (--mixed_precision) (about 180 to 340 % more" in report(precise)
    assert report(dataclasses.replace(FLAGS, optimizer="adamw")) == ALL.removesuffix(", optimizer")
    normuon = dataclasses.replace(FLAGS, optimizer="normuon")
    for triton, says in (
        ("", " | not: symmetric products because there is no Triton (about"),
        (" ", ", symmetric products"),
    ):
        muon.obstacle.cache_clear()
        monkeypatch.setattr(muon, "find_spec", {"": lambda _: None}.get(triton, str))
        assert report(normuon).startswith(ALL + says)
    assert "a side of a matrix is 2624 and not a multiple of 128" in report(normuon, intermediate_size=2624)
    muon.obstacle.cache_clear()
    assert "not: loss because nothing is compiled (--no-compile)" in report(dataclasses.replace(FLAGS, compile=False))
    assert "gate norm" not in report(model_type="ltg-bert")
    names = {"loss": "loss", "norm": "gate norm, feed-forward norm", "loss,optimizer": "loss, optimizer"}
    for parts, kernels in names.items():
        monkeypatch.setenv("HYBRID_REFERENCE", parts)
        assert f"| not: {kernels} because HYBRID_REFERENCE={parts} (about" in report()
    monkeypatch.delenv("HYBRID_REFERENCE")
    pretend(monkeypatch, "T4")
    assert report().startswith("loss, optimizer | not: attention, residual, gate norm, feed-forward norm because the ")
    assert "has compute capability 7.5 and they need 8.0" in report()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert report().startswith(
        "loss | not: attention, residual, gate norm, feed-forward norm, optimizer because they are "
    )


def test_heads_of_128_need_more_to_train_than_to_read(monkeypatch: pytest.MonkeyPatch):
    for name, trains in (("A100", True), ("RTX 5090", False)):
        pretend(monkeypatch, name)
        found = report(num_attention_heads=6)
        assert found.startswith("attention") == trains
        assert trains or "attention because heads of 128 features need 144 KiB of shared memory a block" in found
        assert not attention_cuda.obstacle(CUDA, 128, 63, trains=False)
    pretend(monkeypatch, "H200")
    monkeypatch.setenv("HYBRID_SHARED_MEMORY", "much")
    with pytest.raises(ValueError, match="HYBRID_SHARED_MEMORY is 'much'; it must be a whole number of KiB"):
        report()


def test_rotary_attention_says_which_kernels_it_lacks(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, "H200")
    monkeypatch.setattr(rope, "varlen_kernel", lambda: print)
    assert report(position_embedding="rope").startswith("rotary attention, residual")
    pretend(monkeypatch, "T4")
    assert rope.obstacle(CUDA, torch.bfloat16) == "the device has compute capability 7.5 and they need 8.0"
    pretend(monkeypatch, "H200")
    assert "queries are float32" in rope.obstacle(CUDA, torch.float32)
    monkeypatch.setattr(rope, "varlen_kernel", lambda: None)
    assert "this PyTorch has no flash attention and flash-attn is not installed" in report(position_embedding="rope")


def test_kernels_that_do_not_load_are_named(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("no NVRTC")

    pretend(monkeypatch, "H200")
    monkeypatch.setattr(residual_cuda, "_module", fail)
    monkeypatch.setattr(residual_cuda, "available", residual_cuda.available.__wrapped__)
    others = [kernel for kernel in summary._kernels(FLAGS, BASE, CUDA) if kernel.name != "residual"]
    residual = [kernel for kernel in summary._kernels(FLAGS, BASE, CUDA) if kernel.name == "residual"]
    monkeypatch.setattr(
        summary, "_kernels", lambda *_: [*(k._replace(available=lambda: True) for k in others), *residual]
    )
    with pytest.warns(UserWarning, match="residual stream runs without.*no NVRTC"):
        found = summary.missing_kernels(FLAGS, BASE, CUDA)
    assert {name for name, reason in found.items() if reason} == {"residual"}
    assert "cannot be compiled or loaded" in found["residual"]


def test_doctor_warns_of_kernels_missing_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch):
    cpu = doctor_machine.measure_kernels(FLAGS, BASE, torch.device("cpu"))
    assert cpu["line"] == "none, since they need a CUDA device"
    assert doctor_machine.assess_kernels({0: cpu, 1: cpu}).result == OK
    pretend(monkeypatch, "H200")
    monkeypatch.setattr(nvrtc, "loads", lambda *_: True)
    for module in (attention_cuda, residual_cuda):
        monkeypatch.setattr(module, "available", module.available.__wrapped__)
    slower = {"line": report(num_attention_heads=8), "slower": ["attention"]}
    row = doctor_machine.assess_kernels({0: {"line": ALL, "slower": []}, 1: slower})
    assert row.result == WARN
    assert "on ranks 0; " in row.detail
    assert "on ranks 1" in row.detail


@pytest.fixture
def bf16_autocast() -> Iterator[None]:
    """As torch.autocast("cuda", torch.bfloat16) has it, which does nothing on a machine without CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def test_model_compiled_as_a_whole_warns_of_missing_kernels(monkeypatch: pytest.MonkeyPatch, bf16_autocast: None):
    embeddings = SimpleNamespace(device=CUDA, size=lambda _: 768)

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if residual.use_kernel(embeddings, 24) else x  # pyright: ignore[reportArgumentType]

    with pytest.warns(UserWarning, match=r"torch.compile over the whole model.*compile_layers"):
        assert not torch.compile(traced, fullgraph=True, backend="eager")(torch.zeros(2)).any()
    monkeypatch.setattr(residual_cuda, "available", lambda *_: True)
    assert traced(torch.zeros(2)).all(), "and it says nothing"


def test_rows_that_look_ahead_keep_the_kernels_of_relative_positions_alone(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, "H200")
    monkeypatch.setattr(rope, "varlen_kernel", lambda: print)
    for causal_rows in ("prefix", "causal=1,blocks:16=1"):
        config = dataclasses.replace(FLAGS, causal_rows=causal_rows)
        assert report(config) == ALL
        reason = (
            f"they know causal rows and whole ones alone, and --causal_rows is {causal_rows} (at a cost that was not"
        )
        assert f"rotary attention because {reason}" in report(config, position_embedding="rope")
    config = dataclasses.replace(FLAGS, causal_rows="meap")
    assert "rotary attention because" not in report(config, position_embedding="rope")
