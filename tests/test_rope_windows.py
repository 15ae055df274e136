"""Windows, scaled rotary positions, and attention of long rows in blocks."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ops import attention, attention_metadata, blocks, dropout, rope
from ops.dropout import DropoutKeys
from ops.rope_scaling import Rotary, attention_factor, frequencies, ntk_theta
from tests.helpers.tiny_models import each_document_alone, make_model

CPU = torch.device("cpu")
LENGTH = 23
LOCAL = Rotary(8, 50.0, window=3)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 tokens count as long, and are read in blocks of 5."""
    monkeypatch.setattr(blocks, "BLOCK", 5)
    for module in (rope, attention):
        monkeypatch.setattr(module, "LONGEST_WHOLE", 8)


def rows() -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values [4, 23, 2, 8] with gradients; documents that end anywhere, padding; causal or not."""
    torch.manual_seed(4)
    content = [torch.randn(4, LENGTH, 2, 8, requires_grad=True) for _ in range(3)]
    ids = (torch.arange(LENGTH).expand(4, LENGTH) // torch.tensor([7, 9, 23, 4])[:, None]).clone()
    ids[2, -5:] = -1
    return content, ids, torch.tensor([False, True, False, True])


def ends() -> Tensor:
    """Up to where tokens of the same rows see ahead: all, none, to the end of a block of four, in a prefix of six."""
    index = torch.arange(LENGTH)
    return torch.stack([index * 0 + LENGTH, index * 0, (index // 4 + 1) * 4, index * 0 + 6])


def with_gradients(context: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    return [context.detach(), *torch.autograd.grad((context * torch.randn_like(context)).sum(), leaves)]


def by_definition(content: list[Tensor], ids: Tensor, causal: Tensor, rotary: Rotary) -> Tensor:
    """Each token by itself, in float64."""
    query, key, value = (x.double() for x in content)
    turns = torch.arange(LENGTH)[:, None] * rotary.theta ** (-torch.arange(4).double() / 4)
    turns = torch.polar(torch.ones_like(turns), turns)[:, None]
    query, key = (
        torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) * turns).transpose(-1, -2).flatten(-2)
        for x in (query, key)
    )
    window = LENGTH if rotary.window is None else rotary.window
    out = []
    for b in range(len(ids)):
        for i in range(LENGTH):
            near = range(max(0, i - window), min(LENGTH, i + window + 1))
            end = causal[b, i] if causal.ndim == 2 else 0 if causal[b] else LENGTH
            seen = [j for j in near if ids[b, i] == ids[b, j] >= 0 and (j <= i or j < end)]
            weights = torch.einsum("hd,jhd->jh", query[b, i], key[b, seen]) / math.sqrt(8)
            out.append(torch.einsum("jh,jhd->hd", weights.softmax(0), value[b, seen]))
    return torch.stack(out).view(query.shape).float()


@pytest.mark.parametrize("rotary", [LOCAL, Rotary(8, 50.0)])
@pytest.mark.parametrize("by_token", [False, True])
def test_windows_in_all_forms_match_the_definition(rotary: Rotary, by_token: bool, monkeypatch: pytest.MonkeyPatch):
    """At once, in blocks and by a variable-length kernel; documents, padding, all ways to read a row, gradients."""
    content, ids, causal = rows()
    causal = ends() if by_token else causal
    # No such kernel knows ends of tokens, so that one that is there is not taken.
    monkeypatch.setattr(rope, "obstacle", lambda *_: "" if by_token else "none here")
    expected = with_gradients(by_definition(content, ids, causal, rotary), content)
    whole = rope.rope_metadata(ids, causal, rotary, torch.float32)
    made = rope.windowed_metadata(rope.rope_metadata(ids, causal, Rotary(8, 9.0), torch.float32), rotary)
    kernel = whole
    if not by_token:
        kernel = whole._replace(varlen=rope.varlen_metadata(ids, causal), kernel=each_document_alone, allowed=None)
    monkeypatch.setattr(rope, "LONGEST_WHOLE", 8)
    monkeypatch.setattr(blocks, "BLOCK", 5)
    long = rope.rope_metadata(ids, causal, rotary, torch.float32)
    assert whole.allowed is not None
    assert long.allowed is None
    for form in (whole, made, kernel, long):
        context = rope.rope_attention(*content, form)
        if form is kernel:  # it leaves padding to itself
            context = context.masked_fill(ids[:, :, None, None] < 0, 0.0)
        for ours, right in zip(with_gradients(context, content), expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("by_token", [False, True])
def test_relative_attention_in_blocks_equals_that_of_whole_rows(small_blocks: None, by_token: bool, p: float):
    content, ids, causal = rows()
    causal = ends() if by_token else causal
    leaves = [*content, *(torch.randn(7, 2, 8, requires_grad=True) for _ in range(2))]
    states = dropout.dropout_states(DropoutKeys(torch.arange(4) * 10**15, torch.tensor(2)), LENGTH, LENGTH)
    dropped = (p, dropout.head_keys(states.tokens, 5, 2), states.columns)
    whole = attention_metadata.relative_metadata(ids, causal, 4, 12)
    long = attention.choose_relative_metadata(ids, causal, (4, 12), 8, torch.float32, p > 0)
    assert isinstance(long, attention_metadata.LongRelativeMetadata)
    results = [
        with_gradients(attention.relative_attention(*leaves, metadata, *dropped), leaves) for metadata in (whole, long)
    ]
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["rope", "relative"])
def test_memory_of_long_rows_grows_with_their_length(positions: str):
    """What a training step keeps for its backward pass, in numbers, of one row and of one twice as long."""

    def numbers(length: int) -> int:
        windows = {"sliding_window": 64, "global_attn_every_n_layers": 2} if positions == "rope" else {}
        model = make_model(
            ("ltg-bert", positions), dropout=0.1, hidden_size=8, num_attention_heads=1, **windows
        ).train()
        kept = []
        ids = torch.zeros(1, length, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            model(ids, ids, False, torch.arange(4)).sum().backward()
        assert max(kept) < length**2 / 4
        return sum(kept)

    assert numbers(2200) < 2.1 * numbers(1100)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), [(64, None), (64, 9), (2048, 64)])
def test_varlen_kernel_matches_masked_attention(length: int, window: int | None):
    """With gradients, and keys that serve two queries each; long rows against the reference in blocks."""
    assert rope.varlen_kernel() is not None, "torch >= 2.11 has one"
    torch.manual_seed(3)
    content = [torch.randn(4, length, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    ids = (torch.arange(length, device="cuda").expand(4, length) // (length // 3 + 2)).clone()
    causal = torch.tensor([False, True, False, True], device="cuda")
    weights = torch.randn(4, length, 4, 64, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        metadata = rope.rope_metadata(ids, causal, Rotary(64, 10000.0, window=window), dtype)
        assert (metadata.varlen is None) == (dtype == torch.float32)
        leaves = [x.detach().to(dtype).requires_grad_() for x in content]
        context = rope.rope_attention(*leaves, metadata)
        results.append((context, *torch.autograd.grad((context * weights).sum(), leaves)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast.float(), slow.float(), rtol=2e-2, atol=4e-2)


def test_windows_lower_what_a_token_costs():
    model = make_model(("ltg-bert", "rope"))
    config = make_model(("ltg-bert", "rope"), sliding_window=8, global_attn_every_n_layers=2).config
    saved = model.flops_per_token(model.config, 100, 0.5) - model.flops_per_token(config, 100, 0.5)
    assert saved == pytest.approx(12 * 32 * (100 - 17)), "one of two layers sees 8 tokens on either side and its own"
    assert model.flops_per_token(config, 16, 0.5) == model.flops_per_token(model.config, 16, 0.5)


# Scaled positions

SCALINGS = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, all keys": {
        "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.4, "truncate": False,
    },
    "yarn, given temperature": {
        "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.5,
    },
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 1024, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(transformers, name: str):
    kind = name.split(",")[0]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 160000.0, **SCALINGS[name]}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    scaling = {"rope_type": kind, **SCALINGS[name]}
    ours = frequencies(64, 160000.0, scaling, CPU)
    torch.testing.assert_close(ours, expected.double(), rtol=1e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-6)
    cos, sin = rope.rotary_tables(Rotary(64, 160000.0, scaling), torch.arange(9))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, factor**2))


def test_ntk_scaling_is_that_of_transformers_for_a_text_so_long(transformers):
    """Its dynamic form with factor 1, at four times max_position_embeddings."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=512, rope_parameters=parameters
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=2048)
    ours = frequencies(64, 10000.0, {"type": "ntk", "factor": 4}, CPU)
    torch.testing.assert_close(ours, expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, frequencies(64, ntk_theta(64, 10000.0, 4.0), None, CPU))
