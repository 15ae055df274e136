"""Clipping, optimizer and average as one operation: the fused kernels beside the reference and the definition."""

import math
from pathlib import Path

import pytest
import torch
from helpers.no_host_sync import train_without_waiting
from helpers.tiny_runs import flags, make_inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ops import lamb_cuda
from ops.lamb_cuda import FusedLamb, Settings, Tensors, chunk_table
from training.config import parse_config
from training.distributed import single_world
from training.ema import Ema
from training.optimizers import OptimizerStep, load_named_state, make_optimizer, named_state

BETAS, EPS, DECAY, EMA_DECAY = (0.9, 0.98), 1e-8, 0.1, 0.9
SIZES = (1, 3, 4, 255, 1024, 4095, 4096, 4097, 70001, 8192, 6)  # chunks have 4096


class Plain(nn.Module):
    """Parameters of given sizes, every third of them one that does not decay; the second all zeros."""

    def __init__(self, sizes=SIZES, device="cpu", shift: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, size in enumerate(sizes):
            values = torch.randn(size, generator=generator) * (0 if number == 1 else 1 + number)
            # shift: so many elements from where an allocation begins
            place = torch.empty(size + shift, device=device)[shift:].copy_(values)
            self.register_parameter(f"{'bias' if number % 3 == 2 else 'weight'}{number}", nn.Parameter(place))


def gradients(sizes, step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(size, generator=generator) * scale * (0 if number == 3 else 1) for number, size in enumerate(sizes)
    ]


def give(model: nn.Module, values: list[torch.Tensor], bucket: bool) -> None:
    """Set gradients; in a bucket they are views of one allocation, one element apart."""
    parameters = list(model.parameters())
    if not bucket:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value.to(parameter.device)
        return
    flat = torch.empty(sum(map(len, values)) + len(values), device=parameters[0].device)
    place = 0
    for parameter, value in zip(parameters, values, strict=True):
        place += 1
        parameter.grad = flat[place : place + len(value)].copy_(value)
        place += len(value)


def make_update(model: nn.Module, max_norm: float, name: str = "lamb") -> OptimizerStep:
    optimizer = make_optimizer(model, name, lr=0.02, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return OptimizerStep(model, optimizer, Ema(model, EMA_DECAY), max_norm)


def state_of(update: OptimizerStep) -> dict[str, torch.Tensor]:
    """Weights, moments and averages by name, copies on the CPU."""
    parts = {f"weight/{name}": parameter.detach() for name, parameter in update.model.named_parameters()}
    parts |= {f"average/{name}": average for name, average in update.ema.state_dict().items()}
    parts |= named_state(update.optimizer, update.model)
    return {name: tensor.cpu().clone() for name, tensor in parts.items()}


def by_definition(steps: int, max_norm: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same state and the norms after `steps`, in float64 from the formulas."""
    model = Plain()
    names = [name for name, _ in model.named_parameters()]
    weights = [parameter.detach().double() for parameter in model.parameters()]
    averages = [weight.clone() for weight in weights]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    norms = []
    for step in range(1, steps + 1):
        values = [value.double() for value in gradients(SIZES, step)]
        norms.append(math.sqrt(sum(float(value.square().sum()) for value in values)))
        clip = min(1.0, max_norm / (norms[-1] + 1e-6))
        for k, (name, value) in enumerate(zip(names, values, strict=True)):
            first[k] = BETAS[0] * first[k] + (1 - BETAS[0]) * clip * value
            second[k] = BETAS[1] * second[k] + (1 - BETAS[1]) * (clip * value) ** 2
            u = (first[k] / (1 - BETAS[0] ** step)) / ((second[k] / (1 - BETAS[1] ** step)).sqrt() + EPS)
            trust = 1.0
            if "bias" not in name:
                u += DECAY * weights[k]
                if u.norm() > 0 and weights[k].norm() > 0:
                    trust = float(weights[k].norm() / u.norm())
            weights[k] = weights[k] - 0.02 * trust * u
            averages[k] = EMA_DECAY * averages[k] + (1 - EMA_DECAY) * weights[k]
    state = {}
    for part, tensors in {"weight": weights, "average": averages, "exp_avg": first, "exp_avg_sq": second}.items():
        state |= {f"{part}/{name}": tensor for name, tensor in zip(names, tensors, strict=True)}
    return state, norms


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def run(update: OptimizerStep, steps: range, bucket: bool = False) -> list[float]:
    """Steps with the same gradients wherever they are made; returns the norms."""
    norms = []
    for step in steps:
        give(update.model, gradients(SIZES, step), bucket)
        norms.append(float(update()))
    return norms


@given(st.lists(st.integers(0, 60000), min_size=1, max_size=12))
def test_chunk_table_covers_every_element_once(sizes: list[int]):
    chunks, spans = chunk_table(sizes)
    assert chunks.dtype == spans.dtype == torch.int32
    done = [[0] * -(-size // 4096) for size in sizes]
    for owner, number in chunks.tolist():
        done[owner][number] += 1
    assert all(count == 1 for counts in done for count in counts)
    for tensor, (first, count) in enumerate(spans.tolist()):
        assert chunks[first : first + count, 0].tolist() == [tensor] * count
        assert chunks[first : first + count, 1].tolist() == list(range(count))


def test_lamb_constants_match_the_source():
    source = (Path(lamb_cuda.__file__).parent / "cuda" / "lamb.cu").read_text()
    assert f"constexpr int THREADS = {lamb_cuda._THREADS};" in source
    assert f"constexpr int CHUNK = {lamb_cuda._CHUNK};" in source


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_reference_update_matches_definition(max_norm: float):
    update = make_update(Plain(), max_norm)
    norms = run(update, range(1, 5))
    expected, expected_norms = by_definition(4, max_norm)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, tensor in state_of(update).items():
        assert error(tensor, expected[name]) < 3e-6, name


def leave_one_out(update: OptimizerStep) -> None:
    """Steps in which one parameter gets no gradient: it stays, and its average comes closer to it."""
    left, average = update.model.get_parameter("weight4"), update.ema.state_dict()["weight4"]
    run(update, range(1, 2))
    with torch.no_grad():
        average.zero_()
    before = left.detach().clone()
    for step in (2, 3):
        give(update.model, gradients(SIZES, step), bucket=False)
        left.grad = None
        update()
    assert torch.equal(left, before)
    torch.testing.assert_close(average, before * (1 - EMA_DECAY**2))


def test_reference_update_leaves_a_parameter_without_gradient_alone():
    leave_one_out(make_update(Plain(), 1.0))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@pytest.mark.parametrize(("bucket", "shift"), [(False, 0), (True, 0), (True, 1)])
def test_lamb_kernels_match_reference_and_definition(max_norm: float, bucket: bool, shift: int):
    """Also with gradients, and with weights, that begin at no multiple of 16 bytes."""
    update, reference = make_update(Plain(device="cuda", shift=shift), max_norm), make_update(Plain(), max_norm)
    assert update._fused is not None
    assert reference._fused is None
    norms = run(update, range(1, 5), bucket)
    run(reference, range(1, 5))
    expected, expected_norms = by_definition(4, max_norm)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    of_reference = state_of(reference)
    for name, tensor in state_of(update).items():
        assert error(tensor, expected[name]) < 3e-6, name
        assert error(tensor, expected[name]) < 2 * error(of_reference[name], expected[name]) + 2e-7, name


@pytest.mark.gpu
def test_lamb_kernels_are_deterministic_and_read_no_leftovers():
    states = []
    for _ in range(2):
        update = make_update(Plain(device="cuda"), 0.5)
        run(update, range(1, 3))
        assert update._fused is not None
        for scratch in (update._fused._squares, update._fused._sums, update._fused._trust):
            scratch.fill_(math.nan)
        run(update, range(3, 5))
        states.append(state_of(update))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.gpu
def test_lamb_kernels_and_reference_may_alternate(monkeypatch: pytest.MonkeyPatch):
    """A run resumed from saved state, then on the other path: what follows differs by rounding alone."""
    fused = make_update(Plain(device="cuda"), 0.5)
    run(fused, range(1, 3))
    saved = state_of(fused)
    run(fused, range(3, 6))
    expected = state_of(fused)
    for reference in ("", "optimizer"):
        monkeypatch.setenv("HYBRID_REFERENCE", reference)
        other = make_update(Plain(device="cuda"), 0.5)
        assert (other._fused is None) == bool(reference)
        other.model.load_state_dict({k.split("/", 1)[1]: t for k, t in saved.items() if k.startswith("weight/")})
        other.ema.load_state_dict({k.split("/", 1)[1]: t.cuda() for k, t in saved.items() if k.startswith("average/")})
        moments = {k: t for k, t in saved.items() if k.startswith("exp_avg")}
        load_named_state(other.optimizer, other.model, moments, 2)
        run(other, range(3, 6))
        for name, tensor in state_of(other).items():
            if reference:
                assert error(tensor, expected[name].double()) < 1e-6, name
            else:
                assert torch.equal(tensor, expected[name]), name


@pytest.mark.gpu
def test_lamb_kernels_leave_a_parameter_without_gradient_alone():
    leave_one_out(make_update(Plain(device="cuda"), 1.0))


@pytest.mark.gpu
def test_lamb_kernels_return_a_norm_that_is_not_finite():
    update = make_update(Plain(device="cuda"), 1.0)
    give(update.model, gradients(SIZES, 1), bucket=False)
    gradient = update.model.get_parameter("weight7").grad
    assert gradient is not None
    gradient[-1] = math.nan
    assert math.isnan(float(update()))


@pytest.mark.gpu
def test_lamb_kernels_refuse_wrong_tensors():
    weight = torch.ones(4, device="cuda")

    def call(gradient: torch.Tensor) -> None:
        tensors = Tensors([weight], [gradient], [weight.clone()], [weight.clone()], [None])
        FusedLamb()([(Settings(0.1, BETAS, EPS, DECAY, 1), tensors)], 1.0, 0.9)

    call(weight.clone())
    for wrong in (weight.double(), torch.ones(5, device="cuda"), torch.ones(8, device="cuda")[::2], torch.ones(4)):
        with pytest.raises(ValueError, match="fused LAMB was given"):
            call(wrong)


@pytest.mark.gpu
def test_gradients_that_do_not_fit_take_the_reference():
    update = make_update(Plain((6,), device="cuda"), 1.0)
    assert update._fused is not None
    weight = update.model.get_parameter("weight0")
    weight.grad = torch.ones(12, device="cuda")[::2]
    before = weight.detach().clone()
    assert float(update()) == pytest.approx(math.sqrt(6))
    assert not torch.equal(weight, before)


@pytest.mark.gpu
def test_adamw_keeps_its_own_step():
    update = make_update(Plain(device="cuda"), 0.5, "adamw")
    assert update._fused is None
    assert all(group["fused"] for group in update.optimizer.param_groups)  # torch's own kernel
    reference = make_update(Plain(), 0.5, "adamw")
    run(update, range(1, 4))
    run(reference, range(1, 4))
    expected = state_of(reference)
    for name, tensor in state_of(update).items():
        assert error(tensor, expected[name].double()) < 3e-6, name


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # importing torch's compiler, and running it, warns
@pytest.mark.parametrize(
    "options",
    [
        {"compile": False},
        {"compile": False, "optimizer": "adamw", "mixed_precision": False},
        {"length_milestones": "", "batch_reduction": 1},  # as by default on CUDA: compiled, in bfloat16
        {"length_milestones": "", "batch_reduction": 1, "mask_p_start": 0.15, "data_fingerprint": False},  # as graphs
        {"compile": False, "position_embedding": "rope"},
        {
            "length_milestones": "",
            "batch_reduction": 1,
            "data_fingerprint": False,
            "hybrid_denominator": 2,
            "hybrid_numerator": 1,
            "causal_rows": "causal=1,prefix=1,blocks:16=1",
        },
        {
            "length_milestones": "",
            "batch_reduction": 1,
            "data_fingerprint": False,
            "ema_decay": "0.99,0.999",
            "value_schedules": "beta1=0:0.8 linear, 50%:0.9; weight_decay=cosine:0..0.1",
        },
    ],
    ids=["eager", "adamw", "compiled", "recorded", "rope", "rows", "values"],
)
def test_a_normal_step_never_waits_for_the_device(tmp_path, options: dict):
    options = dict(options)
    form = {"position_embedding": options.pop("position_embedding", "relative")}
    inputs = make_inputs(tmp_path / "inputs", hidden_size=64, **form)  # heads of 32 features, as kernels want
    chosen = {"data_fingerprint": True, "log_stats_every": 2, "device": "cuda", **options}
    config = parse_config(flags(inputs, tmp_path / "runs", "sync", **chosen), "")
    records = train_without_waiting(config, single_world(config), uses_cuda_graphs=not config.data_fingerprint)
    assert len(records) == (1 if "length_milestones" in options else 3)
    losses = [record["train/loss"] for lines in records.values() for record in lines]
    assert losses[-1] < losses[0] - 1
