"""CUDA kernels of residual stream, gated norm and cross-entropy against their reference implementations in float64."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops import gated_norm, gated_norm_cuda, residual, residual_cuda
from ops.dropout import DropoutKeys, DropoutStates, dropout_states
from ops.residual import ResidualStream
from ops.residual_cuda import FusedResidualStream

gpu = pytest.mark.gpu


def states_for(rows: int, length: int, width: int, device: str) -> DropoutStates:
    keys = DropoutKeys(torch.arange(rows, device=device) * 7919 + 3, torch.tensor(11, device=device))
    return dropout_states(keys, length, width)


def relative_error(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp(min=1e-30))
        for a, b in zip(ours, exact, strict=True)
    ]


class Chain:
    """A stack of small sublayers on a residual stream, and the gradients of everything that goes in."""

    def __init__(self, shape: tuple[int, int, int], sublayers: int, averaged: bool, p: float, device: str) -> None:
        torch.manual_seed(sublayers)
        width = shape[-1]
        self.p, self.sublayers = p, sublayers
        self.embeddings = torch.randn(shape, device=device)
        self.matrices = [torch.randn(width, width, device=device) / width**0.5 for _ in range(sublayers)]
        self.alphas = None
        if averaged:
            self.alphas = [torch.randn(k + 2, device=device) / (k + 2) ** 0.5 for k in range(sublayers)]
        self.target = torch.randn(shape, device=device)
        self.states = states_for(shape[0], shape[1], width, device)

    def run(self, form, dtype: torch.dtype, autocast: bool = False) -> list[Tensor]:
        """Output, and gradients of embeddings, matrices and alphas."""
        leaves = [self.embeddings, *self.matrices, *(self.alphas or [])]
        leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        embeddings, matrices, alphas = leaves[0], leaves[1 : 1 + self.sublayers], leaves[1 + self.sublayers :]
        alphas = alphas if self.alphas is not None else None
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            if form is FusedResidualStream:
                stream = form(embeddings, 1e-5, self.sublayers, alphas)
            else:
                stream = form(embeddings, 1e-5, alphas)
            for site, matrix in enumerate(matrices):
                stream.add(stream.normalised() @ matrix, self.p, self.states, site)
        (stream.x * self.target.to(stream.x.dtype)).sum().backward()
        return [stream.x.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@gpu
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(
    ("shape", "sublayers"),
    [((2, 17, 128), 1), ((3, 5, 384), 7), ((2, 33, 768), 24), ((1, 3, 1024), 48), ((2, 9, 2048), 5), ((1, 1, 256), 4)],
)
def test_residual_kernels_match_reference(shape: tuple[int, int, int], sublayers: int, averaged: bool, p: float):
    """No further from float64 than the reference under autocast."""
    chain = Chain(shape, sublayers, averaged, p, "cuda")
    exact = chain.run(ResidualStream, torch.float64)
    ours = relative_error(chain.run(FusedResidualStream, torch.float32, autocast=True), exact)
    reference = relative_error(chain.run(ResidualStream, torch.float32, autocast=True), exact)
    assert len(ours) == len(reference) == 2 + sublayers * (2 if averaged else 1)
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine < 1.3 * theirs + 2e-3
    assert sum(ours) < 1.2 * sum(reference) + 2e-3


@gpu
def test_residual_kernels_are_deterministic_and_take_a_second_backward():
    chain = Chain((2, 9, 384), 6, True, 0.1, "cuda")
    first, second = (chain.run(FusedResidualStream, torch.float32, autocast=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    x = torch.randn(2, 9, 384, device="cuda", requires_grad=True)
    alphas = [torch.randn(k + 2, device="cuda", requires_grad=True) for k in range(3)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        stream = FusedResidualStream(x, 1e-5, 3, alphas)
        for _ in range(3):
            stream.add(stream.normalised() * 2, 0.0, None, 0)
    once = torch.autograd.grad(stream.x.sum(), [x, *alphas], retain_graph=True)
    again = torch.autograd.grad(stream.x.sum(), [x, *alphas])
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)


@gpu
def test_kernels_refuse_second_derivatives():
    """Of the stream, and of every operator with kernels."""
    x = torch.randn(2, 9, 384, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        stream = FusedResidualStream(x, 1e-5, 1, None)
        stream.add(stream.normalised() * 2, 0.0, None, 0)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(stream.x.sum(), x, create_graph=True)
    half = x.detach().bfloat16().requires_grad_()
    for out in (
        gated_norm_cuda.fused_gated_norm(half, half, 1e-5, "none").square(),
        gated_norm_cuda.fused_gated_pair_norm(torch.cat([half, half], dim=-1), 1e-5, "tanh").square(),
    ):
        (gradient,) = torch.autograd.grad(out.sum(), half, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            gradient.sum().backward()


@gpu
def test_kernels_read_unaligned_tensors():
    def odd(x: Tensor) -> Tensor:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    value, gate, dout = (torch.randn(5, 3, 256, device="cuda").bfloat16() for _ in range(3))
    results = []
    for place in (lambda x: x, odd):
        leaves = [place(x).requires_grad_() for x in (value, gate)]
        out = gated_norm_cuda.fused_gated_norm(*leaves, 1e-5, "none")
        results.append([out, *torch.autograd.grad(out, leaves, place(dout))])
    for plain, moved in zip(*results, strict=True):
        assert torch.equal(plain, moved)


@gpu
def test_residual_kernels_leave_no_memory_behind():
    x = torch.randn(2, 9, 384, device="cuda", requires_grad=True)
    alphas = [torch.randn(k + 2, device="cuda", requires_grad=True) for k in range(3)]
    gc.disable()  # freed by reference counts alone, not by a collection that may come late
    try:
        stream = FusedResidualStream(x, 1e-5, 3, alphas)
        for _ in range(3):
            stream.add((stream.normalised() * 2).bfloat16(), 0.0, None, 0)
        history, out = weakref.ref(stream._history), stream.x
        del stream
        out.sum().backward()
        assert history() is not None, "the graph still holds it"
        assert history().gradients == [None] * 3
        del out
        assert history() is None
    finally:
        gc.enable()


@gpu
def test_residual_kernels_run_without_gradients():
    chain = Chain((2, 9, 384), 6, True, 0.0, "cuda")
    expected = chain.run(ResidualStream, torch.float64)[0]
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        stream = FusedResidualStream(chain.embeddings, 1e-5, 6, chain.alphas)
        for site, matrix in enumerate(chain.matrices):
            stream.add(stream.normalised() @ matrix, 0.1, None, site)
    assert relative_error([stream.x], [expected])[0] < 2e-2


def test_residual_and_norm_kernels_are_not_available_without_cuda():
    x = torch.zeros(1, 2, 128)
    assert not residual.use_kernel(x, 4)
    assert not gated_norm.use_kernel(x.device, 128)
    assert not residual_cuda.available(x.device, 128, 4)
    assert not gated_norm_cuda.available(x.device, 128)


def test_compilers_take_the_result_of_the_warning_as_constant():
    assert vars(residual._traced) == vars(torch.compiler.assume_constant_result(lambda: False))


def test_gated_norm_splits_a_row_evenly_over_threads():
    for width in range(32, 8193, 32):
        warps = gated_norm_cuda._warps(width)
        assert not warps or (width % (32 * warps * 4) == 0 and width // (32 * warps) <= 24)
    assert all(gated_norm_cuda._warps(width) for width in (128, 384, 768, 1024, 1280, 2560, 2752, 4096)[:-2])


@gpu
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 384), (2, 7, 768), (1, 3, 1280), (2, 33, 2560), (4, 4096)])
def test_gated_norm_kernels_match_reference(shape: tuple[int, ...], approximate: str):
    torch.manual_seed(0)
    value, gate, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    gate = gate * 3
    results = []
    for form, dtype in ((gated_norm.gated_norm, torch.float64), (gated_norm.gated_norm, torch.bfloat16), (None, None)):
        if form is None:
            leaves = [x.clone().requires_grad_() for x in (value, gate)]
            out = gated_norm_cuda.fused_gated_norm(*leaves, 1e-5, approximate)
        else:
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (value, gate)]
            out = form(*leaves, 1e-5, approximate)
        out.backward(dout.to(out.dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    exact, reference, ours = results
    for mine, theirs in zip(relative_error(ours, exact), relative_error(reference, exact), strict=True):
        assert mine < 1.1 * theirs + 1e-4
    pair = torch.cat([value, gate], dim=-1).requires_grad_()
    out = gated_norm_cuda.fused_gated_pair_norm(pair, 1e-5, approximate)
    out.backward(dout)
    assert torch.equal(out, ours[0])
    assert pair.grad is not None
    assert torch.equal(pair.grad, torch.cat(ours[1:], dim=-1))


@gpu
@pytest.mark.parametrize("activation", gated_norm.ACTIVATIONS)
def test_kernels_of_glus_without_norm_match_reference(activation: str):
    torch.manual_seed(0)
    pair, dout = torch.randn(5, 7, 2 * 1152, device="cuda") * 3, torch.randn(5, 7, 1152, device="cuda").bfloat16()
    results = []
    for form, dtype in ((gated_norm.REFERENCE, torch.float64), (gated_norm.KERNEL, torch.bfloat16)):
        leaf = pair.bfloat16().to(dtype).requires_grad_()
        out = form.plain(leaf, activation)
        out.backward(dout.to(dtype))
        results.append((out.detach(), leaf.grad))
    for mine in relative_error(results[1], results[0]):
        assert mine < 3e-3


@gpu
def test_gated_norm_kernels_take_slices_and_no_rows():
    wide = torch.randn(3, 5, 3 * 256, device="cuda").bfloat16()
    value, gate = wide[..., 256:512], wide[..., 512:]
    expected = gated_norm_cuda.fused_gated_norm(value.contiguous(), gate.contiguous(), 1e-5, "none")
    assert torch.equal(gated_norm_cuda.fused_gated_norm(value, gate, 1e-5, "none"), expected)
    odd = wide[..., 1:257]  # not at a 16-byte boundary
    assert torch.equal(
        gated_norm_cuda.fused_gated_norm(odd, gate, 1e-5, "none"),
        gated_norm_cuda.fused_gated_norm(odd.contiguous(), gate.contiguous(), 1e-5, "none"),
    )
    assert gated_norm_cuda.fused_gated_norm(value[:0], gate[:0], 1e-5, "none").shape == (0, 5, 256)


@gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_gated_norm_kernels_are_nodes_of_a_compiled_graph():
    value, gate = (torch.randn(4, 6, 256, device="cuda").bfloat16().requires_grad_() for _ in range(2))

    def function(value: Tensor, gate: Tensor) -> Tensor:
        return F.relu(gated_norm_cuda.fused_gated_norm(value * 2, gate, 1e-5, "tanh")).float().square().sum()

    forms = (function, torch.compile(function, fullgraph=True))
    gradients = [torch.autograd.grad(form(value, gate), [value, gate]) for form in forms]
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=2e-2, atol=2e-2)
