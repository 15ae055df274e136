"""Properties of the models: who sees whom, dropout by rows, shapes at the edges, precision, kernels, state."""

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import SIZES, make_model
from torch import Tensor

import model_layers
import ops.dropout as dropout_module
from model import ModelConfig
from model_extra import GPTBert
from ops import attention
from ops.attention import relative_attention
from ops.attention_metadata import FusedAttentionMetadata, RelativeAttentionMetadata, relative_metadata
from ops.dropout import DropoutKeys
from training.forward_backward import compile_layers

KINDS = [("ltg-bert", "relative"), ("gpt-bert", "relative"), ("gpt-bert", "rope")]


def make_inputs(batch: int = 4, length: int = 18, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, 60, (batch, length), generator=generator)
    document_ids = (torch.arange(length).expand(batch, length) // 7).clone()
    return input_ids, document_ids


def keys_for(batch: int) -> DropoutKeys:
    return DropoutKeys(torch.arange(batch) * 7919 + 3, torch.tensor(11))


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request) -> tuple[str, str]:
    return request.param


# Who sees whom


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_each_other(kind, causal: bool):
    model = make_model(kind).eval()
    input_ids, document_ids = make_inputs()
    changed = input_ids.clone()
    changed[:, 7:14] = (changed[:, 7:14] + 11) % 60
    before, after = (model.encode(ids, document_ids, causal) for ids in (input_ids, changed))
    outside = torch.ones(18, dtype=torch.bool)
    outside[7:14] = False
    torch.testing.assert_close(before[:, outside], after[:, outside])
    assert (before[:, 7:14] - after[:, 7:14]).abs().max() > 1e-2


def test_causal_rows_alone_do_not_see_the_future(kind):
    model = make_model(kind).eval()
    input_ids, _ = make_inputs()
    document_ids = torch.zeros_like(input_ids)
    changed = input_ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 11) % 60
    causal = torch.tensor([True, False, True, False])
    difference = (
        (model.encode(input_ids, document_ids, causal) - model.encode(changed, document_ids, causal)).abs().amax(-1)
    )
    assert difference[causal, :10].max() < 1e-6
    assert difference[~causal, :10].min() > 1e-4
    assert difference[:, 10:].min() > 1e-4


def test_causal_flags_by_row_match_separate_calls(kind):
    model = make_model(kind).eval()
    input_ids, document_ids = make_inputs()
    causal = torch.tensor([False, True, True, False])
    mixed = model.encode(input_ids, document_ids, causal)
    for flag in (True, False):
        alone = model.encode(input_ids[causal == flag], document_ids[causal == flag], flag)
        torch.testing.assert_close(mixed[causal == flag], alone, rtol=1e-5, atol=1e-5)


def test_hidden_tokens_may_be_predicted_from_their_own_states():
    """As BERT does: in rows without causal attention, for what is an input; with and without target positions."""
    model = make_model(("gpt-bert", "rope")).eval()
    own = make_model(("gpt-bert", "rope"), predict_masked_from="own").eval()
    input_ids, document_ids = make_inputs()
    causal = torch.tensor([False, True, True, False])
    plain, ours = (m(input_ids, document_ids, causal) for m in (model, own))
    assert torch.equal(ours[causal], plain[causal])
    assert torch.equal(ours[~causal, :-1], plain[~causal, 1:])
    assert torch.equal(ours[~causal, -1], plain[~causal, -1])
    assert torch.equal(own(input_ids, document_ids, False), own(input_ids, document_ids, torch.zeros_like(causal)))
    positions = torch.tensor([3, 17, 20, 71])
    assert torch.equal(own(input_ids, document_ids, causal, positions), ours.flatten(0, 1)[positions])
    assert torch.equal(model.encode(input_ids, document_ids, causal), own.encode(input_ids, document_ids, causal))
    ends = torch.arange(18).expand(4, 18) // 6 * 6 + 6  # blocks of six: the last of each does not see the next token
    plain, ours = (m(input_ids, document_ids, ends) for m in (model, own))
    last = ends == torch.arange(1, 19)
    assert torch.equal(ours[last], plain[last])
    assert torch.equal(ours[~last], plain.roll(-1, 1)[~last])


def test_padding_changes_nothing(kind):
    model = make_model(kind).eval()
    input_ids, document_ids = make_inputs()
    padded_ids, padded_documents = F.pad(input_ids, (0, 5), value=3), F.pad(document_ids, (0, 5), value=-1)
    for causal in (True, False):
        padded = model.encode(padded_ids, padded_documents, causal)[:, :18]
        torch.testing.assert_close(padded, model.encode(input_ids, document_ids, causal), rtol=1e-5, atol=1e-5)


def test_padding_rows_give_no_nan(kind):
    model = make_model(kind, dropout=0.1).train()
    input_ids, document_ids = make_inputs()
    document_ids[1] = -1
    document_ids[2, 5:] = -1
    logits = model(input_ids, document_ids, torch.tensor([True, True, False, False]), None, keys_for(4))
    assert logits.isfinite().all()
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("length", [1, 2, 19, 20, 21, 90])
def test_encode_takes_any_row_length(kind, length: int):
    """Also beyond max_position_embeddings (20 here); a row's beginning is the same in a longer row."""
    model = make_model(kind).eval()
    input_ids = make_inputs(2, 90)[0]
    documents = torch.zeros_like(input_ids)
    longest = model.encode(input_ids, documents, True)
    hidden = model.encode(input_ids[:, :length], documents[:, :length], True)
    assert hidden.shape == (2, length, 32)
    torch.testing.assert_close(hidden, longest[:, :length], rtol=1e-4, atol=1e-5)


def test_encode_refuses_inputs_of_different_shapes():
    model = make_model()
    with pytest.raises(ValueError, match=r"input_ids of shape \(2, 5\) and document_ids of shape \(2, 4\)"):
        model.encode(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), True)


# Dropout


def test_dropout_of_a_row_is_the_same_in_any_batch(kind):
    model = make_model(kind, dropout=0.2).train()
    input_ids, document_ids = make_inputs(6)
    causal = torch.tensor([True, False, True, False, False, True])
    keys = keys_for(6)
    positions = torch.tensor([3, 20, 40, 41, 90, 107])  # rows 0, 1, 2, 2, 5, 5
    whole = model(input_ids, document_ids, causal, positions, keys)
    everything = model(input_ids, document_ids, causal, None, keys)
    torch.testing.assert_close(everything.flatten(0, 1)[positions], whole, rtol=1e-5, atol=1e-6)
    rows = torch.tensor([5, 2])
    subset = DropoutKeys(keys.rows[rows], keys.step)
    hidden = model.encode(input_ids, document_ids, causal, keys)[rows]
    part = model.encode(input_ids[rows], document_ids[rows], causal[rows], subset)
    assert (part - hidden).abs().max() < 1e-6 * hidden.abs().max()
    # the same targets, at their places in the smaller batch
    logits = model(input_ids[rows], document_ids[rows], causal[rows], torch.tensor([0, 17, 18 + 4, 18 + 5]), subset)
    torch.testing.assert_close(logits[[0, 1]], whole[[4, 5]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits[[2, 3]], whole[[2, 3]], rtol=1e-5, atol=1e-6)


def test_dropout_is_on_in_training_alone(kind):
    model = make_model(kind, dropout=0.2)
    input_ids, document_ids = make_inputs()
    arguments = (input_ids, document_ids, False, None)
    model.eval()
    assert torch.equal(model(*arguments, keys_for(4)), model(*arguments))
    hidden = model.encode(input_ids, document_ids, False)
    assert torch.equal(model.predict(hidden), model.predict(hidden))
    still = model(*arguments)
    model.train()
    assert torch.equal(model(*arguments, keys_for(4)), model(*arguments, keys_for(4)))
    assert (model(*arguments, keys_for(4)) - still).abs().max() > 1e-2
    assert not torch.equal(model(*arguments), model(*arguments)), "without keys, fresh ones are drawn"
    assert not torch.equal(model.predict(hidden), model.predict(hidden))
    torch.manual_seed(5)
    first = model(*arguments)
    torch.manual_seed(5)
    assert torch.equal(first, model(*arguments)), "from PyTorch's generator"
    other_step = DropoutKeys(keys_for(4).rows, torch.tensor(12))
    assert not torch.equal(model(*arguments, keys_for(4)), model(*arguments, other_step))


def test_dropout_sites_are_distinct(kind, monkeypatch):
    sites = []

    def record(module, name: str) -> None:
        original = getattr(module, name)

        def recorded(states, site, *rest):
            sites.append(site)
            return original(states, site, *rest)

        monkeypatch.setattr(module, name, recorded)

    for module, name in ((model_layers, "token_keys"), (model_layers, "head_keys"), (dropout_module, "token_keys")):
        record(module, name)
    make_model(kind, dropout=0.1).train()(*make_inputs(), True)
    # The keys of columns; embedding and head; in each of two layers attention's and the feed-forward's output, and with
    # relative positions also the position table and the probabilities.
    assert len(sites) == len(set(sites)) == 1 + 2 + 2 * (4 if kind[1] == "relative" else 2)


# Head


def test_forward_is_encode_and_predict(kind):
    model = make_model(kind).eval()
    input_ids, document_ids = make_inputs()
    positions = torch.tensor([70, 3, 3, 18])
    hidden = model.encode(input_ids, document_ids, True)
    everything = model.predict(hidden)
    assert everything.shape == (4, 18, 60)
    torch.testing.assert_close(model(input_ids, document_ids, True), everything)
    torch.testing.assert_close(model(input_ids, document_ids, True, positions), everything.flatten(0, 1)[positions])


def test_forward_without_targets_reaches_every_parameter(kind):
    model = make_model(kind, dropout=0.1).train()
    logits = model(*make_inputs(), True, torch.empty(0, dtype=torch.int64), keys_for(4))
    assert logits.shape == (0, 60)
    F.cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


# Precision and compilation


def test_bf16_autocast_is_close_to_float32(kind):
    model = make_model(kind).train()
    input_ids, document_ids = make_inputs()
    causal = torch.tensor([True, False, True, False])
    results = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits = model(input_ids, document_ids, causal)
        assert logits.dtype == (torch.bfloat16 if enabled else torch.float32)
        F.cross_entropy(logits.float().flatten(0, 1), input_ids.flatten()).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradients.dtype == torch.float32
        results.append((logits.detach().float(), gradients))
    for exact, rounded in zip(*results, strict=True):
        assert 0 < (exact - rounded).norm() / exact.norm() < 0.05


@pytest.mark.slow
def test_compiled_model_matches_eager(kind):
    """One graph without breaks, for forward and backward, with dropout and flags by row."""
    model = make_model(kind, dropout=0.1).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    causal = torch.tensor([True, False, True, False])
    positions = torch.tensor([1, 5, 30, 71])
    results = []
    for forward in (model, compiled):
        model.zero_grad()
        logits = forward(*make_inputs(), causal, positions, keys_for(4))
        logits.square().mean().backward()
        results.append([logits.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for eager, graph in zip(*results, strict=True):
        assert (graph - eager).norm() <= 1e-5 * eager.norm()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_model_matches_cpu_without_host_sync(kind):
    model = make_model(kind, dropout=0.1).train()
    input_ids, document_ids = make_inputs()
    causal = torch.tensor([True, False, True, False])
    positions = torch.tensor([1, 5, 30, 71])
    expected = model(input_ids, document_ids, causal, positions, keys_for(4))
    model.cuda()
    arguments = [x.cuda() for x in (input_ids, document_ids, causal, positions)]
    keys = DropoutKeys(*(key.cuda() for key in keys_for(4)))
    model(*arguments, keys).square().sum().backward()  # libraries are set up on first use
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        logits = model(*arguments, keys)
        logits.square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-4)


def by_the_reference(
    query_key: Tensor,
    value: Tensor,
    positions: Tensor,
    metadata: FusedAttentionMetadata,
    p=0.0,
    keys=None,
    columns=None,
) -> Tensor:
    """`fused_relative_attention` on any device: the reference, from what the kernels are given."""
    by_token = metadata.spans.ndim == 4  # an end for each token
    first, end = (metadata.spans[0] if by_token else metadata.spans).unbind(-1)
    causal = end if by_token else metadata.causal
    plain = relative_metadata(torch.where(end > 0, first, -1).long(), causal, 6, 20, value.dtype)
    parts = (*query_key.unbind(2), value, *positions.unbind(1))
    return relative_attention(*parts, plain, p, keys, columns)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model_type", ["ltg-bert", "gpt-bert"])
def test_kernels_are_given_what_reference_is(monkeypatch, model_type: str, dropout: float, by_token: bool):
    model = make_model((model_type, "relative"), dropout=dropout).train()
    input_ids, document_ids = make_inputs()
    document_ids[1, 9:] = -1
    causal = torch.tensor([True, False, True, False])
    if by_token:  # causal, whole, in blocks of four, with a prefix
        index = torch.arange(input_ids.size(1))
        causal = torch.stack([index * 0, index * 0 + 99, (index // 4 + 1) * 4, index * 0 + 7])
    results = []
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(attention, "use_kernel", lambda *_: True)
            monkeypatch.setattr(attention, "fused_relative_attention", by_the_reference)
        model.zero_grad()
        logits = model(input_ids, document_ids, causal, None, keys_for(4))
        logits.square().mean().backward()
        results.append([logits.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, fused in zip(*results, strict=True):
        assert torch.equal(plain, fused)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("model_type", ["ltg-bert", "gpt-bert"])
def test_kernels_in_model_match_reference_without_host_sync(monkeypatch: pytest.MonkeyPatch, model_type: str):
    model = make_model((model_type, "relative"), dropout=0.1, hidden_size=64).train().cuda()
    input_ids, document_ids = (x.cuda() for x in make_inputs())
    document_ids[1, 9:] = -1
    causal = torch.tensor([True, False, True, False], device="cuda")
    keys = DropoutKeys(*(key.cuda() for key in keys_for(4)))

    def step(bf16: bool) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids, document_ids, causal, None, keys)
        logits.float().square().mean().backward()
        return [logits.detach().float()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    monkeypatch.delenv("HYBRID_REFERENCE", raising=False)
    assert isinstance(model._attention_metadata(document_ids, causal), RelativeAttentionMetadata), (
        "float32 runs by the reference"
    )
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert isinstance(model._attention_metadata(document_ids, causal), FusedAttentionMetadata)
    exact = torch.cat([x.flatten() for x in step(False)])
    step(True)  # libraries are set up on first use
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        ours = step(True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setenv("HYBRID_REFERENCE", "attention")
    ours, reference = (torch.cat([x.flatten() for x in results]) for results in (ours, step(True)))
    assert 0 < (ours - reference).norm() < 0.05 * exact.norm()
    assert (ours - exact).norm() < 1.2 * (reference - exact).norm()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_kernels_in_compiled_sublayers_match_eager(monkeypatch: pytest.MonkeyPatch):
    """No graph breaks; as many graphs for four layers as for two, and none for row lengths after the second one."""
    from torch._dynamo.utils import counters

    monkeypatch.delenv("HYBRID_REFERENCE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    model = make_model(dropout=0.1, hidden_size=64, num_hidden_layers=4).train().cuda()
    results, graphs = [], []
    for compiled in (False, True):
        if compiled:
            compile_layers(model)
        for length in (18, 70, 130, 200):
            model.zero_grad()
            input_ids, document_ids = (x.cuda() for x in make_inputs(length=length))
            keys = DropoutKeys(*(key.cuda() for key in keys_for(4)))
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(input_ids, document_ids, torch.tensor([True, False] * 2, device="cuda"), None, keys)
            logits.float().square().mean().backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            results.append(torch.cat([logits.detach().float().flatten(), *gradients]))
            graphs.append(counters["stats"]["unique_graphs"])
    for plain, compiled in zip(results[:4], results[4:], strict=True):
        assert (plain - compiled).norm() < 0.03 * plain.norm()
    assert not counters["graph_break"]
    assert graphs[4] <= 5, "the first sublayer of a kind, and all others; the dropout of embedded words"
    assert graphs[5] == graphs[6] == graphs[7] <= 10


# Weights and state


def test_state_dict_holds_parameters_alone(kind):
    model = make_model(kind)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not list(model.buffers())
    names = " ".join(model.state_dict())
    assert ("relative" in names) == (kind[1] == "relative")
    assert ("alphas" in names) == ("in_proj_vg" in names) == (kind[0] == "gpt-bert")


def test_initialisation():
    model = make_model(hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    std = (2 / (5 * 64)) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            layer = int(name.split(".")[2]) if "mlp_layers" in name else None
            scale = 1.0 if layer is None else (1 / (2 * (1 + layer))) ** 0.5
            assert parameter.abs().max() <= 2 * std * scale * (1 + 1e-6), name
            # a normal cut at two standard deviations keeps 0.8796 of its standard deviation
            assert float(parameter.detach().std() / (0.8796 * std * scale)) == pytest.approx(1, abs=0.1), name
            assert abs(parameter.mean()) < 0.1 * std, name
        elif "layer_norm.weight" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif "alphas" not in name:
            assert not parameter.any(), name
    untouched = GPTBert(model.config)
    for index, alpha in enumerate(untouched.transformer.dwa_modules.alphas):  # type: ignore[union-attr]
        assert alpha.tolist() == [0.0] * (index + 1) + [1.0]


def test_initialisation_depends_on_generator_alone():
    config = ModelConfig.from_dict(SIZES)
    first, again = (GPTBert(config, torch.Generator().manual_seed(1)) for _ in range(2))
    other = GPTBert(config, torch.Generator().manual_seed(2))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
