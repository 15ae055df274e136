"""Dropout, relative and rotary attention and averaging over depth, each against a slow form of its definition."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ops import attention, attention_metadata, depth_average, dropout, rope
from ops.dropout import DropoutKeys
from ops.rope_scaling import Rotary

CPU = torch.device("cpu")


def row_keys(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


# Dropout


def mix64(z: int) -> int:
    """The rule of ops/dropout.py in exact integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def is_kept(row: int, step: int, token: int, column: int, site: int, head: int, p: float) -> bool:
    def hashed(key: int, position: int, site: int, head: int) -> int:
        state = mix64(mix64(key % 2**64) ^ position)
        return mix64(state ^ (site * 65536 + head)) >> 32

    x = hashed(row, token, site, head) ^ hashed(step, column, 32767, 0)
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    signed = x - 2**32 if x >= 2**31 else x
    return signed >= round(p * 2**32) - 2**31


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_masks_follow_the_documented_rule(device: str):
    keys = DropoutKeys(row_keys(3).to(device), torch.tensor(-(2**60) - 7, device=device))
    rows, step = keys.rows.tolist(), int(keys.step)
    states = dropout.dropout_states(keys, length=5, columns=9, table_rows=4)
    tokens = dropout.keep_mask(dropout.token_keys(states.tokens, 6), states.columns, 0.3)
    heads = dropout.keep_mask(dropout.head_keys(states.tokens, 7, 2), states.columns[:5], 0.3)
    table = dropout.keep_mask(dropout.token_keys(states.table, 8), states.columns, 0.3)
    for t in range(5):
        for b, row in enumerate(rows):
            assert tokens[b, t].tolist() == [is_kept(row, step, t, j, 6, 0, 0.3) for j in range(9)]
            for h in range(2):
                assert heads[b, h, t].tolist() == [is_kept(row, step, t, j, 7, h, 0.3) for j in range(5)]
    for s in range(4):
        assert table[s].tolist() == [is_kept(step, step, s, j, 8, 0, 0.3) for j in range(9)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_dropout_masks_are_the_same_on_cuda_and_compiled():
    keys = DropoutKeys(row_keys(8), torch.tensor(17))

    def masks(keys: DropoutKeys) -> tuple[torch.Tensor, torch.Tensor]:
        states = dropout.dropout_states(keys, 200, 256)
        of_tokens = dropout.keep_mask(dropout.token_keys(states.tokens, 3), states.columns, 0.1)
        return of_tokens, dropout.keep_mask(dropout.head_keys(states.tokens, 4, 6), states.columns[:200], 0.1)

    expected = masks(keys)
    on_cuda = DropoutKeys(keys.rows.cuda(), keys.step.cuda())
    for function in (masks, torch.compile(masks)):
        for mask, reference in zip(function(on_cuda), expected, strict=True):
            assert torch.equal(mask.cpu(), reference)


def test_int32_products_wrap_around():
    values = row_keys(1000).to(torch.int32)
    product = (values * -2073254261).numpy().astype(np.int64) % 2**32
    exact = [(int(value) * -2073254261) % 2**32 for value in values.tolist()]
    assert product.tolist() == exact


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_fraction(p: float):
    states = dropout.dropout_states(DropoutKeys(row_keys(16), torch.tensor(5)), 256, 256)
    kept = dropout.keep_mask(dropout.token_keys(states.tokens, 1), states.columns, p).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 4 * deviation
    for dim in range(3):  # each row, each token and each column on its own
        others = tuple(other for other in range(3) if other != dim)
        fraction = kept.mean(dim=others)
        limit = 5 * deviation * math.sqrt(len(fraction))
        assert (fraction - (1 - p)).abs().max() < limit


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def test_dropout_masks_are_independent_along_every_axis():
    states = dropout.dropout_states(DropoutKeys(torch.arange(8), torch.tensor(1)), 128, 256)
    later = dropout.dropout_states(DropoutKeys(torch.arange(8), torch.tensor(2)), 128, 256)

    def mask(site: int, of: dropout.DropoutStates = states) -> torch.Tensor:
        return dropout.keep_mask(dropout.token_keys(of.tokens, site), of.columns, 0.2)

    base = mask(1)
    heads = dropout.keep_mask(dropout.head_keys(states.tokens, 1, 3), states.columns, 0.2)
    others = {
        "next site": mask(2),
        "next step": mask(1, later),
        "next row": base.roll(1, 0),
        "next token": base.roll(1, 1),
        "next column": base.roll(1, 2),
        "second head": heads[:, 1],
        "third head": heads[:, 2],
    }
    limit = 4.5 / math.sqrt(base.numel())
    for name, other in others.items():
        assert abs(correlation(base, other)) < limit, name
    # Every pair of columns over many tokens: the columns' keys are fixed for a step, so a weak hash would show here.
    wide = dropout.dropout_states(DropoutKeys(row_keys(64), torch.tensor(3)), 256, 64)
    columns = dropout.keep_mask(dropout.token_keys(wide.tokens, 0), wide.columns, 0.1).flatten(0, 1).double()
    pairs = torch.corrcoef(columns.t()).fill_diagonal_(0).abs()
    assert pairs.max() < 5 / math.sqrt(len(columns))


def test_dropout_masks_do_not_depend_on_the_batch():
    rows = row_keys(6)
    order = torch.tensor([4, 0, 5])

    def mask(rows: torch.Tensor, length: int) -> torch.Tensor:
        states = dropout.dropout_states(DropoutKeys(rows, torch.tensor(9)), length, 64)
        return dropout.keep_mask(dropout.head_keys(states.tokens, 3, 2), states.columns[:16], 0.4)

    assert torch.equal(mask(rows, 16)[order], mask(rows[order], 16))
    assert torch.equal(mask(rows, 16)[:, :, :7], mask(rows, 7)), "nor on the length of the rows"


def test_dropout_scales_what_it_keeps():
    states = dropout.dropout_states(DropoutKeys(row_keys(2), torch.tensor(0)), 8, 32)
    keys = dropout.token_keys(states.tokens, 0)
    x = torch.randn(2, 8, 32, requires_grad=True)
    y = dropout.dropout(x, 0.25, keys, states.columns)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept / 0.75)
    assert dropout.dropout(x, 0.0, keys, states.columns) is x
    nothing = dropout.dropout(torch.ones(2, 8, 32), 1 - 2**-53, keys, states.columns)
    assert not nothing.any()
    for p in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="outside"):
            dropout.dropout(x, p, keys, states.columns)


def test_dropout_keys_are_checked():
    with pytest.raises(ValueError, match="must be int64"):
        dropout.dropout_states(DropoutKeys(row_keys(2).int(), torch.tensor(0)), 8, 32)
    with pytest.raises(ValueError, match="step"):
        dropout.dropout_states(DropoutKeys(row_keys(2), torch.tensor([0])), 8, 32)


# Buckets


def bucket_by_definition(distance: int, bucket_size: int, max_position: int) -> int:
    """The published formula; the ceiling is the least k with (a / mid)^(mid-1) <= ((max - 1) / mid)^k, in integers."""
    mid = bucket_size // 2
    a = min(abs(distance), max_position - 1)
    if a <= mid:
        return distance
    k = next(k for k in range(mid) if a ** (mid - 1) * mid**k <= (max_position - 1) ** k * mid ** (mid - 1))
    return (k + mid) * (1 if distance > 0 else -1)


@pytest.mark.parametrize(
    ("bucket_size", "max_position"), [(8, 64), (32, 512), (9, 65), (2, 3), (3, 20), (8, 6), (10, 81)]
)
def test_buckets_match_the_published_formula(bucket_size: int, max_position: int):
    reach = max_position + 50
    distances = torch.arange(-reach, reach + 1)
    buckets = attention_metadata.bucket(distances, bucket_size, max_position)
    expected = [bucket_by_definition(d, bucket_size, max_position) for d in distances.tolist()]
    assert buckets.tolist() == expected
    assert buckets.abs().max() <= bucket_size - 1, "every bucket has a slot"
    slots = attention_metadata.relative_slots(reach, bucket_size, max_position, CPU)
    for i, j in ((0, 0), (5, 2), (2, 5), (reach - 1, 0), (0, reach - 1)):
        assert slots[i, j] == bucket_size - 1 + bucket_by_definition(i - j, bucket_size, max_position)


# Relative attention


def relative_inputs(batch: int = 3, length: int = 21, heads: int = 2, head_dim: int = 8, bucket_size: int = 4):
    torch.manual_seed(1)
    content = [torch.randn(batch, length, heads, head_dim, requires_grad=True) for _ in range(3)]
    positions = [torch.randn(2 * bucket_size - 1, heads, head_dim, requires_grad=True) for _ in range(2)]
    ids = torch.arange(length).expand(batch, length) // 8
    ids = ids.clone()
    ids[0, -4:] = -1
    causal = torch.tensor([True, False, True])[:batch]
    return content, positions, ids, causal


def attention_by_definition(content, positions, ids, causal, bucket_size: int, max_position: int) -> torch.Tensor:
    (query, key, value), (query_pos, key_pos) = content, positions
    batch, length, heads, head_dim = query.shape
    out = torch.zeros(batch, length, heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                allowed = [
                    j for j in range(length) if ids[b, i] >= 0 and ids[b, i] == ids[b, j] and (j <= i or not causal[b])
                ]
                if not allowed:
                    continue
                scores = []
                for j in allowed:
                    slot = bucket_size - 1 + bucket_by_definition(i - j, bucket_size, max_position)
                    q, k = query[b, i, h].double(), key[b, j, h].double()
                    scores.append(q @ k + q @ key_pos[slot, h].double() + k @ query_pos[slot, h].double())
                weights = torch.softmax(torch.stack(scores) / math.sqrt(3 * head_dim), 0)
                out[b, i, h] = sum(w * value[b, j, h].double() for w, j in zip(weights, allowed, strict=True))
    return out


def test_relative_attention_matches_definition():
    content, positions, ids, causal = relative_inputs()
    metadata = attention_metadata.relative_metadata(ids, causal, 4, 12)
    context = attention.relative_attention(*content, *positions, metadata)
    with torch.no_grad():
        expected = attention_by_definition(content, positions, ids, causal, 4, 12)
    torch.testing.assert_close(context, expected.float(), rtol=1e-5, atol=1e-6)


def test_products_with_one_hot_matrices_match_gathering():
    """The form for GPUs against the reference, with gradients."""
    content, positions, ids, causal = relative_inputs()
    metadata = attention_metadata.relative_metadata(ids, causal, 4, 12)
    assert metadata.one_hot is None, "a CPU gathers"
    by_product = metadata._replace(one_hot=attention_metadata.one_hot_slots(metadata.slots, 8, torch.float32))
    leaves = [*content, *positions]
    weights = torch.randn(3, 21, 2, 8)
    results = []
    for form in (metadata, by_product):
        context = attention.relative_attention(*content, *positions, form)
        results.append((context, *torch.autograd.grad((context * weights).sum(), leaves)))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_attention_dropout_drops_probabilities():
    content, positions, ids, causal = relative_inputs()
    metadata = attention_metadata.relative_metadata(ids, causal, 4, 12)
    states = dropout.dropout_states(DropoutKeys(row_keys(3), torch.tensor(2)), 21, 21)
    keys = dropout.head_keys(states.tokens, 5, 2)
    identity = torch.eye(21).view(1, 21, 1, 21).expand(3, 21, 2, 21)  # as values: the context is the probabilities
    plain, dropped = (
        attention.relative_attention(content[0], content[1], identity, *positions, metadata, p, keys, states.columns)
        for p in (0.0, 0.3)
    )
    mask = dropout.keep_mask(keys, states.columns, 0.3).transpose(1, 2)
    torch.testing.assert_close(dropped, plain * mask / 0.7)


def test_relative_attention_of_a_padded_row_is_zero_and_has_no_nan_gradient():
    content, positions, ids, causal = relative_inputs()
    ids[1] = -1
    context = attention.relative_attention(
        *content, *positions, attention_metadata.relative_metadata(ids, causal, 4, 12)
    )
    assert not context[ids < 0].any()
    context.square().sum().backward()
    for tensor in (*content, *positions):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert content[0].grad is not None
    assert not content[0].grad[1].any()


# Rotary attention


def rope_inputs(batch: int = 4, length: int = 19, heads: int = 2, head_dim: int = 8):
    torch.manual_seed(2)
    content = [torch.randn(batch, length, heads, head_dim, requires_grad=True) for _ in range(3)]
    ids = (torch.arange(length).expand(batch, length) // 7).clone()
    ids[2, -5:] = -1
    return content, ids, torch.tensor([False, True, False, True])


def test_rope_attention_matches_definition():
    (query, key, value), ids, causal = rope_inputs()
    context = rope.rope_attention(query, key, value, rope.rope_metadata(ids, causal, Rotary(8, 100.0), torch.float32))
    turn = torch.arange(19).double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4)
    turn = torch.polar(torch.ones_like(turn), turn)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(x[..., :4].double(), x[..., 4:].double()) * turn).flatten(-2)

    scores = torch.einsum("bihd,bjhd->bhij", rotated(query), rotated(key)) / math.sqrt(8)
    index = torch.arange(19)
    allowed = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    allowed &= (index[:, None] >= index) | ~causal[:, None, None]
    weights = scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("bhij,bjhd->bihd", weights, value.double())
    torch.testing.assert_close(context, expected.float(), rtol=1e-5, atol=1e-6)
    context.square().sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_rope_scores_depend_on_distance_alone():
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    metadata = rope.rope_metadata(torch.zeros(1, 40, dtype=torch.int64), False, Rotary(16, 10000.0), torch.float32)
    rotated_query = rope.rotate(query.expand(1, 40, 1, 16), metadata.cos, metadata.sin)[0, :, 0]
    rotated_key = rope.rotate(key.expand(1, 40, 1, 16), metadata.cos, metadata.sin)[0, :, 0]
    scores = rotated_query @ rotated_key.t()
    for offset in (0, 1, 7, -13):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-4, "and it does depend on it"


@pytest.mark.parametrize(
    "causal", [True, False, torch.tensor([False, True, False, True]), torch.ones(4, dtype=torch.bool)]
)
@pytest.mark.parametrize("expected", [None, 40])
def test_varlen_attention_matches_masked_attention(causal, expected: int | None):
    """Document boundaries and the order of rows, with a kernel that runs each document by itself."""

    def kernel(query, key, value, boundaries, longest, causal, window):
        parts = []
        for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
            assert end - start <= longest
            assert end > start or expected is not None
            document = (x[start:end].transpose(0, 1) for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(*document, is_causal=causal).transpose(0, 1))
        return torch.cat(parts)

    (query, key, value), ids, _ = rope_inputs()
    sizes, rows = None, torch.as_tensor(causal).expand(4)
    if expected is not None:  # more documents than there are, and causal rows last
        causal = rows = rows.sort().values
        groups = int((~rows).sum()), int(rows.sum())
        sizes = rope.VarlenSizes(groups, (expected * bool(groups[0]), expected * bool(groups[1])))
    metadata = rope.rope_metadata(ids, causal, Rotary(8, 10000.0), torch.float32)
    varlen = metadata._replace(varlen=rope.varlen_metadata(ids, causal, sizes), kernel=kernel)
    weights = torch.randn(4, 19, 2, 8)
    results = []
    for form in (metadata, varlen):
        context = rope.rope_attention(query, key, value, form).masked_fill(ids[:, :, None, None] < 0, 0.0)
        results.append((context, *torch.autograd.grad((context * weights).sum(), (query, key, value))))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


# Averages over depth


def run_averages(form, alphas, embeddings, sublayers, autocast: bool = False) -> torch.Tensor:
    averages = form(alphas, embeddings)
    x = averages.first()
    for number, sublayer in enumerate(sublayers):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            update = torch.tanh(x @ sublayer)
            x = averages.next(x, update.bfloat16() if number % 2 else update.float())
    return x


@pytest.mark.parametrize("autocast", [False, True])
def test_buffered_averages_match_plain_averages(autocast: bool):
    """With gradients of everything, updates of two dtypes, and twice through one graph."""
    torch.manual_seed(4)
    embeddings = torch.randn(2, 5, 8, requires_grad=True)
    alphas = [torch.randn(k + 2, requires_grad=True) for k in range(5)]
    sublayers = [(torch.randn(8, 8) / 3).requires_grad_() for _ in range(5)]
    leaves = [embeddings, *alphas, *sublayers]
    results = []
    for form in (depth_average.PlainAverages, depth_average.BufferedAverages):
        x = run_averages(form, alphas, embeddings, sublayers, autocast)
        assert x.dtype == torch.float32
        first = torch.autograd.grad(x.square().sum(), leaves, retain_graph=True)
        some = torch.autograd.grad(x.sum(), [alphas[2]], retain_graph=True)
        again = torch.autograd.grad(x.square().sum(), leaves)
        results.append((x, *first, *some, *again))
    tolerance = 3e-2 if autocast else 1e-5  # under autocast the forms round at other places
    for plain, buffered in zip(*results, strict=True):
        assert (buffered - plain).norm() <= tolerance * plain.norm()


@pytest.mark.parametrize("sublayers", [1, 3])
def test_buffered_averages_refuse_a_second_derivative(sublayers: int):
    """Also where the loss's own gradient is constant; with the plain form it is there."""
    for form in (depth_average.PlainAverages, depth_average.BufferedAverages):
        embeddings = torch.randn(2, 3, 4, requires_grad=True)
        alphas = [torch.randn(k + 2, requires_grad=True) for k in range(sublayers)]
        averages = form(alphas, embeddings)
        x = averages.first()
        for _ in alphas:
            x = averages.next(x, x.square())
        if form is depth_average.PlainAverages:
            (gradient,) = torch.autograd.grad(x.sum(), embeddings, create_graph=True)
            assert gradient.requires_grad
        else:
            with pytest.raises(RuntimeError, match=r"second derivative.*PlainAverages"):
                torch.autograd.grad(x.sum(), embeddings, create_graph=True)


def test_buffered_averages_leave_no_memory_behind():
    embeddings = torch.randn(2, 3, 4, requires_grad=True)
    alphas = [torch.randn(k + 2, requires_grad=True) for k in range(3)]
    gc.disable()  # freed by reference counts alone, not by a collection that may come late
    try:
        averages = depth_average.BufferedAverages(alphas, embeddings)
        x = averages.first()
        for _ in alphas:
            x = averages.next(x, x * 2)
        history = weakref.ref(averages._history)
        del averages
        x.sum().backward()
        assert history() is not None, "the graph still holds it"
        del x
        assert history() is None
    finally:
        gc.enable()
