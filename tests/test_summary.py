"""The arithmetic behind what a run says of itself."""

import pytest
import torch

from training.summary import peak_flops


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
