"""Attention kernels: when they are chosen (on any machine), and on a GPU themselves against the formula in float64."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops import attention, attention_cuda
from ops.attention import relative_attention
from ops.attention_metadata import fused_metadata, relative_metadata, relative_slots
from ops.dropout import head_keys, keep_mask, keep_scale, mix64


def test_attention_kernel_is_not_available_without_cuda():
    assert not attention_cuda.available(torch.device("cpu"), 64, 63)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        assert not attention_cuda.available(device, 48, 63)
        assert not attention_cuda.available(device, 64, 65)


@pytest.mark.parametrize("problem", [OSError("no NVRTC"), RuntimeError("no registers left")], ids=["absent", "failing"])
def test_attention_kernel_that_does_not_compile_warns(monkeypatch: pytest.MonkeyPatch, problem: Exception):
    def fail(*_: object) -> None:
        raise problem

    hopper = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: hopper)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_cuda, "_kernels", fail)
    with pytest.warns(UserWarning, match=f"without its CUDA kernels.*{problem}"):
        assert not attention_cuda.available.__wrapped__(torch.device("cuda", 0), 64, 63)


def test_attention_kernel_runs_in_bfloat16_unless_reference_is_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_cuda, "available", lambda *_: True)
    monkeypatch.delenv("HYBRID_REFERENCE", raising=False)
    device = torch.device("cuda", 0)
    assert attention.use_kernel(device, torch.bfloat16, 64, 63, True, True)
    assert not attention.use_kernel(device, torch.float32, 64, 63, True, True)
    monkeypatch.setenv("HYBRID_REFERENCE", "attention")
    assert not attention.use_kernel(device, torch.bfloat16, 64, 63, True, True)


def test_fake_attention_operators_have_real_shapes():
    """Forward and backward through FakeTensors: what torch.compile plans with."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ids = torch.zeros(2, 70, dtype=torch.int64)
    metadata = fused_metadata(ids, torch.tensor([True, False]), 32, 512)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query_key, value, positions = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((2, 70, 2, 3, 64), (2, 70, 3, 64), (63, 2, 3, 64))
        )
        metadata = type(metadata)(*(torch.empty(x.shape, dtype=x.dtype) for x in metadata))
        context = attention_cuda.fused_relative_attention(query_key, value, positions, metadata)
        assert context.shape == (2, 70, 3, 64)
        assert context.dtype == torch.bfloat16
        gradients = torch.autograd.grad(context.sum(), (query_key, value, positions))
        assert [x.shape for x in gradients] == [x.shape for x in (query_key, value, positions)]


@pytest.mark.parametrize("by_token", [False, True])
def test_kernel_of_keys_is_given_the_queries_that_see_them(monkeypatch: pytest.MonkeyPatch, by_token: bool):
    """What is launched backwards, with which spans; without ends of tokens all kernels get the same."""
    ids, causal = torch.zeros(2, 70, dtype=torch.int64), torch.tensor([True, False])
    metadata = fused_metadata(ids, torch.full((2, 70), 16) if by_token else causal, 32, 512)
    shapes = ((2, 70, 2, 3, 64), (2, 70, 3, 64), (63, 2, 3, 64))
    query_key, value, positions = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    launched: dict[str, int] = {}
    monkeypatch.setattr(attention_cuda._Arguments, "parts", lambda *_: 1)
    monkeypatch.setattr(
        attention_cuda._Arguments, "launch", lambda self, name: launched.update({name: self.params.spans})
    )
    tensors = (value, value, torch.zeros(2, 3, 70), query_key, value, positions)
    attention_cuda._attention_backward._init_fn(*tensors, *metadata, 0.0, None, None)
    keys = metadata.spans[1] if by_token else metadata.spans
    assert launched["relative_attention_backward_queries"] == metadata.spans.data_ptr()
    assert launched["relative_attention_backward_keys"] == keys.data_ptr()


# The kernels


class Case:
    """Random inputs of one shape and metadata, on the GPU."""

    def __init__(
        self,
        batch: int,
        length: int,
        heads: int,
        head_dim: int,
        ids: Tensor | None = None,
        bucket_size: int = 32,
        max_position: int = 512,
        p: float = 0.1,
        seed: int = 0,
        ends: Tensor | None = None,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        self.query_key = normal(batch, length, 2, heads, head_dim)
        self.value = normal(batch, length, heads, head_dim)
        self.positions = normal(2 * bucket_size - 1, 2, heads, head_dim)
        self.gradient = normal(batch, length, heads, head_dim)
        self.ids = (torch.zeros(batch, length, dtype=torch.int64) if ids is None else ids).cuda()
        # Numbers of runs of one id, -1 for padding: what a document is.
        runs = [torch.unique_consecutive(row, return_inverse=True)[1] for row in self.ids]
        self.documents = torch.stack(runs).masked_fill(self.ids < 0, -1)
        self.causal = torch.arange(batch, device="cuda") % 2 == 1 if ends is None else ends.cuda()
        self.buckets, self.p = (bucket_size, max_position), p
        index = torch.arange(batch * length, device="cuda").view(batch, length) + seed * 1000
        self.keys = head_keys(mix64(index), 3, heads) if p else None
        self.columns = (mix64(torch.arange(length + 3, device="cuda")) >> 32).int() if p else None

    def fused(self) -> list[Tensor]:
        """Context and gradients of query_key, value and positions."""
        leaves = [x.clone().requires_grad_() for x in (self.query_key, self.value, self.positions)]
        metadata = fused_metadata(self.ids, self.causal, *self.buckets)
        poison()
        context = attention_cuda.fused_relative_attention(*leaves, metadata, self.p, self.keys, self.columns)
        return [context.detach(), *torch.autograd.grad(context, leaves, self.gradient)]

    def reference(self) -> list[Tensor]:
        """The same by the reference in ops.attention, in bfloat16."""
        leaves = [x.clone().requires_grad_() for x in (self.query_key, self.value, self.positions)]
        metadata = relative_metadata(self.ids, self.causal, *self.buckets, torch.bfloat16)
        parts = (*leaves[0].unbind(2), leaves[1], *leaves[2].unbind(1))
        context = relative_attention(*parts, metadata, self.p, self.keys, self.columns)
        return [context.detach(), *torch.autograd.grad(context, leaves, self.gradient)]

    def exact(self) -> list[Tensor]:
        """The same by the formula, in float64."""
        leaves = [x.double().requires_grad_() for x in (self.query_key, self.value, self.positions)]
        (query, key), (query_pos, key_pos) = leaves[0].unbind(2), leaves[2].unbind(1)
        batch, length, heads, head_dim = query.shape
        slots = relative_slots(length, *self.buckets, torch.device("cuda")).expand(batch, heads, length, length)
        scores = torch.einsum("bihd,bjhd->bhij", query, key)
        scores = scores + torch.einsum("bihd,shd->bhis", query, key_pos).gather(-1, slots)
        from_position = torch.einsum("bjhd,shd->bhjs", key, query_pos).gather(-1, slots.transpose(-1, -2))
        scores = (scores + from_position.transpose(-1, -2)) / math.sqrt(3 * head_dim)
        index = torch.arange(length, device="cuda")
        allowed = torch.stack([(row[:, None] == row) & (row >= 0) for row in self.documents])
        ahead = ~self.causal[:, None, None] if self.causal.ndim == 1 else index < self.causal[..., None]
        allowed = (allowed & ((index[:, None] >= index) | ahead)).unsqueeze(1)
        weights = torch.where(allowed, scores.masked_fill(~allowed, -math.inf).softmax(-1), 0.0)
        if self.keys is not None and self.columns is not None:
            weights = weights * keep_mask(self.keys, self.columns[:length], self.p) * keep_scale(self.p)
        context = torch.einsum("bhij,bjhd->bihd", weights, leaves[1])
        return [context.detach(), *torch.autograd.grad(context, leaves, self.gradient.double())]


def poison() -> None:
    """Fill memory that the next allocations may get with NaN: whatever is not written will show."""
    blocks = [torch.full((size,), math.nan, device="cuda") for size in (10**4, 10**5, 10**6, 10**7)]
    del blocks


def errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative errors by norms.

    Where attention has nothing to choose from (documents of one token), gradients of queries, keys and positions are 0
    and the kernels' are what is left of rounding the context to bfloat16, as in all flash attention; so an error is
    never taken relative to less than a fifth of the inputs' size.
    """
    return [
        (result.double() - true).norm().item() / max(true.norm().item(), 0.2 * true.numel() ** 0.5)
        for result, true in zip(results, exact, strict=True)
    ]


def check(case: Case) -> None:
    """The kernels' errors are those of bfloat16."""
    results, exact = case.fused(), case.exact()
    assert not results[0][case.ids < 0].any()
    for result in results:
        assert result.isfinite().all()
    assert max(errors(results, exact)) < 1.2e-2


def check_against_reference(case: Case) -> None:
    """On more than a few tokens the kernels' errors are no larger than the reference's."""
    check(case)
    exact = case.exact()
    for ours, reference, true in zip(case.fused(), case.reference(), exact, strict=True):
        assert (ours.double() - true).norm() <= 1.1 * (reference.double() - true).norm()
        assert (ours.double() - true).norm() <= 8e-3 * true.norm()


@st.composite
def document_ids(draw: st.DrawFn) -> Tensor:
    """Rows of documents of random lengths, some of them one token long or padding; ids may come back."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 330))
    rows = []
    for _ in range(batch):
        cuts = draw(st.lists(st.integers(0, length - 1), max_size=6))
        starts = torch.zeros(length, dtype=torch.int64)
        starts[cuts] = 1
        row = starts.cumsum(0)
        padding = draw(st.integers(0, 6))  # this document of the row, if it has so many
        row = row.masked_fill(row == padding, -1) if padding else row
        rows.append(torch.where(row > 2, row - 3, row) if draw(st.booleans()) else row)
    return torch.stack(rows)


@pytest.mark.gpu
@settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    ids=document_ids(),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([32, 64, 128]),
    buckets=st.sampled_from([(32, 512), (32, 40), (16, 64), (4, 12), (2, 3)]),
    p=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_attention_kernels_match_formula(ids, heads, head_dim, buckets, p, seed):
    check(Case(*ids.shape, heads, head_dim, ids, *buckets, p, seed))


@pytest.mark.gpu
@settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
@given(ids=document_ids(), head_dim=st.sampled_from([32, 64, 128]), block=st.integers(1, 90), data=st.data())
def test_attention_kernels_match_formula_where_tokens_have_ends(ids, head_dim, block, data):
    """Rows that are causal, whole, in blocks, and with a prefix that is read in both directions, in one batch."""
    length = ids.size(1)
    index, prefix = torch.arange(length), data.draw(st.integers(0, length))
    kinds = torch.stack([index * 0, index * 0 + length, (index // block + 1) * block, index * 0 + prefix])
    ends = kinds[torch.tensor([data.draw(st.integers(0, 3)) for _ in ids])]
    check(Case(*ids.shape, 3, head_dim, ids, p=data.draw(st.sampled_from([0.0, 0.1])), ends=ends))


@pytest.mark.gpu
def test_ends_that_say_causal_or_whole_give_the_same_bits_as_flags():
    case, ends = Case(9, 200, 3, 64), torch.where(torch.arange(9) % 2 == 1, 0, 200)[:, None].expand(9, 200)
    for ours, plain in zip(Case(9, 200, 3, 64, ends=ends).fused(), case.fused(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_metadata_of_ends_is_captured_without_a_wait():
    ids, ends = torch.zeros(2, 130, dtype=torch.int64, device="cuda"), torch.full((2, 130), 64, device="cuda")
    fused_metadata(ids, ends, 32, 512)  # its tables are made once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = fused_metadata(ids, ends, 32, 512)
    ends.fill_(100)
    graph.replay()
    expected = fused_metadata(ids, ends, 32, 512)
    assert torch.equal(metadata.spans, expected.spans)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Compile for another architecture ("": the device's own) and for so many KiB of shared memory a block (0: all)."""

    def forget() -> None:
        for cached in (attention_cuda.available, attention_cuda._kernels):
            cached.cache_clear()

    def choose(architecture: str, kib: int) -> None:
        monkeypatch.setenv("HYBRID_ARCHITECTURE", architecture)
        monkeypatch.setenv("HYBRID_SHARED_MEMORY", str(kib or ""))
        forget()

    yield choose
    monkeypatch.undo()
    forget()


# Of shared memory a block, in KiB: too little for two stages of columns in the backward pass, and enough for one.
ONE_STAGE = {32: 75, 64: 99, 128: 163}


def check_documents(head_dim: int) -> None:
    ids = torch.tensor([[0] * 70 + [1] * 5 + [-1] * 9 + [0] * 246, [0] * 330, [2] * 3 + [1] * 200 + [-1] * 127])
    check(Case(3, 330, 3, head_dim, ids))


def check_single_tokens(head_dim: int) -> None:
    check(Case(40, 1, 3, head_dim))


def check_few_slots(head_dim: int) -> None:
    check(Case(3, 77, 2, head_dim, None, 4, 12))


def check_more_work_than_runs_at_once(head_dim: int) -> None:
    check_against_reference(Case(40, 256, 12, head_dim))


def check_same_bits(head_dim: int) -> None:
    case = Case(9, 200, 3, head_dim)
    for first, second in zip(case.fused(), case.fused(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("architecture", ["", "sm_90"])
@pytest.mark.parametrize(
    "check_case",
    [check_documents, check_single_tokens, check_few_slots, check_more_work_than_runs_at_once, check_same_bits],
)
def test_attention_kernels_for_other_devices_match_formula(
    pretend: Callable[[str, int], None],
    check_case: Callable[[int], None],
    architecture: str,
    stages: int,
    head_dim: int,
):
    """What all but Hopper run (mma.sync: plain sm_90 has no wgmma), and one stage of columns."""
    pretend(architecture, ONE_STAGE[head_dim] if stages == 1 else 0)
    assert attention_cuda.available(torch.device("cuda", 0), head_dim, 63, True)
    kernels = attention_cuda._kernels(torch.cuda.current_device(), head_dim, True)
    assert kernels.shared["relative_attention_backward_keys"] == attention_cuda._shared_bytes(head_dim, True, stages)
    check_case(head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["", "sm_90"])
def test_attention_kernel_runs_forwards_alone_in_little_shared_memory(
    pretend: Callable[[str, int], None], architecture: str
):
    pretend(architecture, 99)
    device = torch.device("cuda", 0)
    assert not attention_cuda.available(device, 128, 63, False, True)
    assert attention_cuda.available(device, 128, 63, False, False)
    case = Case(3, 200, 4, 128, p=0.0)
    metadata = fused_metadata(case.ids, case.causal, *case.buckets)
    context = attention_cuda.fused_relative_attention(case.query_key, case.value, case.positions, metadata)
    assert errors([context], case.exact()[:1])[0] < 1.2e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(40, 128), (6, 512), (2, 1100)])
def test_attention_kernels_match_reference_on_more_work_than_runs_at_once(batch, length):
    check_against_reference(Case(batch, length, 12, 64))


@pytest.mark.gpu
def test_attention_kernels_return_zeros_for_padding_alone():
    case = Case(2, 100, 2, 64, torch.full((2, 100), -1))
    for tensor in case.fused():
        assert not tensor.any()


@pytest.mark.gpu
def test_attention_kernels_are_deterministic():
    case = Case(20, 200, 12, 64, (torch.arange(200) // 70).expand(20, 200).clone())
    for first, second in zip(case.fused(), case.fused(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
def test_attention_kernels_drop_by_the_rule_forwards_and_backwards():
    """With one-hot values the context is the dropped probabilities, and the gradient of values is its transpose."""
    length, p = 64, 0.3
    case = Case(3, length, 2, 64, p=p)
    value = torch.eye(length, device="cuda", dtype=torch.bfloat16).view(1, length, 1, length).repeat(3, 1, 2, 1)
    value.requires_grad_()
    metadata = fused_metadata(case.ids, torch.zeros(3, dtype=torch.bool, device="cuda"), *case.buckets)
    context = attention_cuda.fused_relative_attention(
        case.query_key, value, case.positions, metadata, p, case.keys, case.columns
    )
    (gradient,) = torch.autograd.grad(context, value, value.detach())
    mask = keep_mask(case.keys, case.columns[:length], p).transpose(1, 2)  # [B, T, H, T]
    assert torch.equal(context != 0, mask & (context != 0))
    assert (context != 0).sum() > 0.9 * mask.sum(), "few probabilities are too small for bfloat16"
    assert abs(mask.float().mean() - (1 - p)) < 0.02
    # dV[j] = sum over i of P[i, j] * dcontext[i], and dcontext is the identity: dV[j, i] = P[i, j].
    torch.testing.assert_close(gradient.transpose(1, 3), context, rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
def test_attention_kernels_take_views():
    """Values that are a part of one projection's output, and a gradient that is not contiguous."""
    case = Case(3, 90, 4, 64)
    metadata = fused_metadata(case.ids, case.causal, *case.buckets)
    both = torch.stack((case.value, torch.full_like(case.value, math.nan)), dim=2)
    arguments = (case.positions, metadata, case.p, case.keys, case.columns)
    expected = attention_cuda.fused_relative_attention(case.query_key, case.value, *arguments)
    context = attention_cuda.fused_relative_attention(case.query_key, both[:, :, 0], *arguments)
    assert torch.equal(context, expected)
    leaves = [x.clone().requires_grad_() for x in (case.query_key, case.value)]
    context = attention_cuda.fused_relative_attention(*leaves, *arguments)
    backwards = case.gradient.transpose(1, 2).contiguous().transpose(1, 2)
    for first, second in zip(
        torch.autograd.grad(context, leaves, case.gradient, retain_graph=True),
        torch.autograd.grad(context, leaves, backwards),
        strict=True,
    ):
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_attention_kernels_are_one_node_of_a_compiled_graph():
    case = Case(2, 128, 3, 64)
    metadata = fused_metadata(case.ids, case.causal, *case.buckets)

    def run(query_key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        return attention_cuda.fused_relative_attention(
            query_key * 2, value, positions, metadata, case.p, case.keys, case.columns
        ).square()

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (case.query_key, case.value, case.positions)]
        context = function(*leaves)
        results.append([context, *torch.autograd.grad(context, leaves, case.gradient)])
    for plain, compiled in zip(*results, strict=True):  # apart by what the compiler does not round to bfloat16
        assert (plain - compiled).float().norm() < 1e-2 * plain.float().norm()


@pytest.mark.gpu
def test_attention_kernels_refuse_wrong_shapes():
    case = Case(2, 64, 2, 64)
    metadata = fused_metadata(case.ids[:, :-1], case.causal, *case.buckets)
    with pytest.raises(ValueError, match=r"63\] tokens"):
        attention_cuda.fused_relative_attention(case.query_key, case.value, case.positions, metadata)
