"""Muon and NorMuon: beside torch.optim.Muon, beside their formulas in float64, and its kernels beside both."""

from __future__ import annotations

import importlib
import math
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_models import make_model
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from ops import muon
from training.ema import Ema
from training.optimizers import MatrixOptions, Muon, OptimizerStep, make_optimizer, named_state

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(24, 16), (16, 24), (12, 12)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def set_gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = random(*parameter.shape, seed=1000 * step + number) * 0.1


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_torchs_for_every_matrix_of_a_stack(shape: tuple[int, int]):
    stack = random(3, *shape).bfloat16()
    for matrix, found in zip(stack, muon.newton_schulz(stack), strict=True):
        expected = _zeropower_via_newtonschulz(matrix.float(), muon.COEFFICIENTS, muon.STEPS, 1e-7)
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_keeps_singular_vectors_and_brings_values_near_1(shape: tuple[int, int]):
    stack = random(2, *shape) * 1e-3
    stack[1] *= 1e6
    found = muon.newton_schulz(stack)
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    inside = left.mT @ found @ right.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
    assert torch.equal(muon.newton_schulz(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch):
    """In bfloat16, as there; the same rates, momentum and decay."""
    monkeypatch.setattr(muon, "working_dtype", lambda device: torch.bfloat16)
    ours, theirs = ([nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(SHAPES * 2)] for _ in range(2))
    optimizer = Muon([{"params": ours, "projections": [1] * len(ours)}], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for k, pair in enumerate(zip(ours, theirs, strict=True)):
            for parameter in pair:
                parameter.grad = random(*parameter.shape, seed=100 * step + k)
        optimizer.step()
        other.step()
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        moved = its.detach() - random(*its.shape, seed=number)
        assert (mine.detach() - its.detach()).norm() < 0.01 * moved.norm()


def by_definition(
    start: Tensor, gradients: list[Tensor], projections: int, by_row: bool, cautious: bool, rate: float
) -> Tensor:
    """Muon's steps in float64, projection by projection and row by row."""
    parts = []
    for k, weight in enumerate(start.double().chunk(projections)):
        momentum, squares = torch.zeros_like(weight), torch.zeros(len(weight), dtype=torch.float64)
        for gradient in gradients:
            gradient = gradient.double().chunk(projections)[k]
            momentum = 0.95 * momentum + 0.05 * gradient
            x = 0.05 * gradient + 0.95 * momentum
            tall = len(x) > len(x.T)
            x = (x.T if tall else x) / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            x = x.T if tall else x
            if by_row:
                squares = 0.95 * squares + 0.05 * (x**2).mean(1)
                x = x / (squares.sqrt() + 1e-8)[:, None]
                x = 0.2 * math.sqrt(x.numel()) * x / x.norm()
            else:
                x = 0.2 * math.sqrt(max(x.shape)) * x
            mask = (x * weight > 0).double() if cautious else torch.ones_like(x)
            weight = weight - rate * (x + 0.1 * mask * weight)
        parts.append(weight)
    return torch.cat(parts)


@pytest.mark.parametrize(("by_row", "cautious"), [(False, False), (False, True), (True, False), (True, True)])
def test_muon_is_its_definition(by_row: bool, cautious: bool):
    """Parameters of one and two projections of equal shape, which share a stack, and one of another shape."""
    sizes = [(12, 20, 1), (24, 20, 2), (16, 6, 1)]
    starts = [random(rows, columns, seed=k) for k, (rows, columns, _) in enumerate(sizes)]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    group = {"params": parameters, "projections": [projections for *_, projections in sizes]}
    optimizer = Muon([group], lr=0.05, weight_decay=0.1, by_row=by_row, cautious=cautious)
    gradients = [[random(*start.shape, seed=10 * step + k) for k, start in enumerate(starts)] for step in range(1, 4)]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for k, parameter in enumerate(parameters):
        history = [step[k] for step in gradients]
        expected = by_definition(starts[k], history, sizes[k][2], by_row, cautious, 0.05)
        torch.testing.assert_close(parameter.detach(), expected.float(), rtol=2e-4, atol=2e-5)


def test_which_parameters_are_matrices_of_hidden_layers():
    model = make_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[parameter]: count for parameter, count in model.hidden_matrices().items()}
    layers = {"in_proj_qk.weight": 2, "in_proj_vg.weight": 2, "out_proj.weight": 1}
    expected = {f"transformer.attention_layers.{k}.{name}": count for k in (0, 1) for name, count in layers.items()}
    blocks = {"mlp.1.weight": 2, "mlp.4.weight": 1}
    expected |= {f"transformer.mlp_layers.{k}.{name}": count for k in (0, 1) for name, count in blocks.items()}
    assert found == expected
    with pytest.raises(ValueError, match="muon and normuon need matrices in lists of layers"):
        make_optimizer(nn.Linear(3, 3), "muon", **SETTINGS)


@pytest.mark.parametrize("rest", ["adamw", "lamb"])
def test_the_rest_takes_adamws_or_lambs_steps_at_its_own_rate(rest: str):
    model, other = make_model(), make_model()
    optimizer = make_optimizer(model, "muon", **SETTINGS, matrices=MatrixOptions(rate=0.5, rest=rest))
    expected = make_optimizer(other, rest, **SETTINGS)
    rates = {group["lr"] for group in optimizer.param_groups if "projections" in group}
    assert rates == {0.01}
    for step in range(3):
        for each, its in ((model, optimizer), (other, expected)):
            set_gradients(each, step)
            its.step()
    matrices = model.hidden_matrices()
    for (name, parameter), same in zip(model.named_parameters(), other.parameters(), strict=True):
        close = torch.allclose(parameter, same, rtol=1e-4, atol=1e-6)
        assert close == (parameter not in matrices), name


def test_muon_leaves_a_matrix_without_gradient_alone():
    model = make_model()
    optimizer = make_optimizer(model, "normuon", **SETTINGS)
    set_gradients(model, 0)
    left = model.transformer.mlp_layers[0].mlp["1"].weight
    left.grad, before = None, left.detach().clone()
    optimizer.step()
    assert torch.equal(left, before)
    assert not torch.equal(model.transformer.mlp_layers[1].mlp["1"].weight, before)


def of_definition(x: Tensor, y: Tensor, tall: bool = False, polynomial: bool = False, scales=None, power: int = 1):
    """What the kernel of ops/muon_cuda.py makes."""
    first, second = x.float(), y.float()
    product = first.mT @ second if tall else first @ second.mT
    if polynomial:
        a, b, c = muon.COEFFICIENTS
        product = a * torch.eye(x.size(1)) + b * first + c * product
    if scales is not None:
        product = product * scales.view(-1, 1, 1) ** power
    return (product.tril() + product.tril(-1).mT).to(x.dtype)


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 64, 200), (3, 200, 64)])
def test_several_steps_together_are_the_steps(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]):
    """Of plain and of nearly singular matrices; rounded to bfloat16 they lose no more than the steps one by one."""
    if find_spec("triton") is None:
        for name in ("triton", "triton.language"):
            monkeypatch.setitem(sys.modules, name, Mock(jit=lambda kernel: kernel))
    monkeypatch.delitem(sys.modules, "ops.muon_cuda", raising=False)
    products = importlib.import_module("ops.muon_cuda")
    monkeypatch.delitem(sys.modules, "ops.muon_cuda")
    monkeypatch.setattr(products, "_product", of_definition)
    few = random(3, shape[1], 8, seed=1) @ random(3, 8, shape[2], seed=2) + 0.01 * random(*shape)
    for updates in (random(*shape) * 7, few):
        scales, exact = 1 / updates.norm(dim=(1, 2)), muon.newton_schulz(updates.double())
        found = products.orthogonalised(updates, scales)
        assert (found - exact).norm() < 1e-4 * exact.norm()
        rounded = products.orthogonalised(updates.bfloat16(), scales), muon.newton_schulz(updates.bfloat16())
        ours, plain = ((each - exact).norm() / exact.norm() for each in rounded)
        assert ours < 1.5 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 128, 128), (5, 384, 1280), (5, 1280, 384), (2, 768, 768)])
def test_symmetric_products_are_those_of_torch(shape: tuple[int, int, int]):
    pytest.importorskip("triton", reason="there is no Triton")
    from ops import muon_cuda

    updates = random(*shape).cuda().bfloat16() * 7
    scales = 1 / updates.float().norm(dim=(1, 2))
    tall = shape[1] > shape[2]
    given: dict = {"tall": tall, "scales": scales, "power": 2}
    gram = muon_cuda._product(updates, updates, **given)
    polynomial = muon_cuda._product(gram, gram, polynomial=True, scales=scales)
    other = muon_cuda._product(gram, polynomial)
    steps = ((gram, updates, updates, given), (polynomial, gram, gram, {"polynomial": True, "scales": scales}))
    for found, x, y, options in (*steps, (other, gram, polynomial, {})):
        options = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
        expected = of_definition(x.cpu(), y.cpu(), **options).float()
        assert (found.cpu().float() - expected).abs().max() <= 0.01 * expected.abs().max()
        assert x is not y or torch.equal(found, found.mT)
    found = muon_cuda.orthogonalised(updates, scales)
    exact, plain = muon.newton_schulz(updates.double()), muon.newton_schulz(updates)
    assert (found - exact).norm() < 1.5 * (plain - exact).norm()
    assert torch.equal(found, muon_cuda.orthogonalised(updates, scales))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("name", "rest", "cautious", "sizes"),
    [
        ("normuon", "adamw", True, {"hidden_size": 256, "intermediate_size": 384}),
        ("normuon", "lamb", False, {}),
        ("muon", "adamw", True, {"hidden_size": 36, "intermediate_size": 50}),
    ],
    ids=["tiles", "plain", "odd"],
)
def test_muon_on_cuda_is_that_of_the_cpu_and_never_waits(name: str, rest: str, cautious: bool, sizes: dict):
    """Clipped, and with the average, by the kernels; also where a matrix has no gradient."""
    updates = []
    for device in ("cuda", "cpu"):
        model = make_model(**sizes).to(device)
        optimizer = make_optimizer(model, name, **SETTINGS, matrices=MatrixOptions(cautious=cautious, rest=rest))
        updates.append(OptimizerStep(model, optimizer, Ema(model, 0.9), 0.5))
    ours, reference = updates
    assert ours._fused is not None
    for step in range(3):
        set_gradients(reference.model, step)
        reference.model.transformer.mlp_layers[0].mlp["1"].weight.grad = None
        for parameter, other in zip(ours.model.parameters(), reference.model.parameters(), strict=True):
            parameter.grad = None if other.grad is None else other.grad.to(parameter.device)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            norm = ours()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert float(norm) == pytest.approx(float(reference()), rel=1e-5)
    ends = [
        dict(each.model.named_parameters())
        | {f"average/{key}": value for key, value in each.ema.state_dict().items()}
        | named_state(each.optimizer, each.model)
        for each in updates
    ]
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[1].items():
        found = ends[0][key].detach().cpu()
        assert (found - value).norm() < (0.03 if "row" in key else 0.02) * value.norm().clamp(min=1e-3), key
