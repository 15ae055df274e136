"""LAMB, parameter groups, clipping, optimizer state by name, EMA and the learning rate."""

import math
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.odd_optimizer import OddOptimizer
from helpers.tiny_runs import ROOT, flags, make_inputs, run
from torch import nn

from model import ModelConfig
from model_extra import GPTBert
from training.checkpoint import open_checkpoint
from training.config import FIELDS
from training.ema import Ema
from training.optimizers import (
    OPTIMIZERS,
    ByRole,
    Lamb,
    MatrixOptions,
    OptimizerKind,
    clip_gradients,
    load_named_state,
    make_optimizer,
    named_state,
    optimizer_kind,
    parameter_groups,
    set_rates,
    takes_over,
)

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def make_model(seed: int = 0) -> GPTBert:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = ModelConfig(**sizes, vocab_size=40, position_bucket_size=4, max_position_embeddings=16)
    return GPTBert(config, torch.Generator().manual_seed(seed))


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()


def lamb_by_definition(start: torch.Tensor, gradients: list[torch.Tensor], rates: list[float], decay: float):
    weight, first, second = start.double(), 0.0, 0.0
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        gradient = gradient.double()
        first, second = 0.9 * first + 0.1 * gradient, 0.98 * second + 0.02 * gradient**2
        update = (first / (1 - 0.9**t)) / ((second / (1 - 0.98**t)).sqrt() + 1e-8) + decay * weight
        trust = 1.0
        if decay > 0 and weight.norm() > 0 and update.norm() > 0:
            trust = float(weight.norm() / update.norm())
        weight = weight - rate * trust * update
    return weight.float()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_its_definition(decay: float):
    torch.manual_seed(0)
    starts = [torch.randn(5, 7), torch.zeros(4), torch.randn(3) * 20]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = Lamb(parameters, **(SETTINGS | {"weight_decay": decay}))
    rates = [0.02, 0.03, 0.01, 0.04]
    gradients = [[torch.randn_like(start) for start in starts] for _ in rates]
    for rate, step_gradients in zip(rates, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for index, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        expected = lamb_by_definition(start, [step[index] for step in gradients], rates, decay)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_lamb_leaves_parameters_without_gradient_alone():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lamb([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3))
    assert not torch.equal(used, torch.ones(3))
    used.grad = torch.zeros(3)  # nothing moves by a zero gradient but the decay and the momentum
    optimizer.step()
    assert used.isfinite().all()


def test_lamb_with_zero_gradient_and_zero_weight_stays_finite():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Lamb([parameter])
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(parameter, torch.zeros(3))


def test_lamb_calls_its_closure():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Lamb([parameter])

    def closure() -> torch.Tensor:
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": 0.0}, "eps"), ({"weight_decay": -0.1}, "weight")],
)
def test_lamb_refuses_impossible_settings(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Lamb([nn.Parameter(torch.ones(1))], **(SETTINGS | changes))


def test_parameter_groups():
    model = make_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    others_by_name = {names[id(parameter)] for parameter in others["params"]}
    assert others_by_name == {name for name in names.values() if "bias" in name or "layer_norm" in name}
    assert "embedding.relative_layer_norm.weight" in others_by_name
    decayed_by_name = {names[id(parameter)] for parameter in decayed["params"]}
    assert decayed_by_name | others_by_name == set(names.values())
    assert "transformer.dwa_modules.alphas.0" in decayed_by_name
    assert len(decayed["params"]) + len(others["params"]) == len(names)


@pytest.mark.parametrize("name", ["lamb", "adamw", "muon", "normuon"])
def test_resumed_optimizer_goes_on_exactly(name: str):
    model = make_model()
    optimizer = make_optimizer(model, name, **SETTINGS)
    assert named_state(optimizer, model) == {}
    train(model, optimizer, range(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    saved = {key: value.clone() for key, value in named_state(optimizer, model).items()}
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    matrices = {names[id(parameter)] for parameter in model.hidden_matrices()} if "muon" in name else set()
    of_matrices = ("momentum", "row_square") if name == "normuon" else ("momentum",)
    moments = {key: of_matrices if key in matrices else ("exp_avg", "exp_avg_sq") for key in weights}
    assert saved.keys() == {f"{moment}/{key}" for key, each in moments.items() for moment in each}
    train(model, optimizer, range(3, 6))

    other = make_model(seed=1)
    other.load_state_dict(weights)
    resumed = make_optimizer(other, name, **SETTINGS)
    load_named_state(resumed, other, dict(sorted(saved.items(), reverse=True)), 3)
    train(other, resumed, range(3, 6))
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    for key, tensor in named_state(resumed, other).items():
        assert torch.equal(tensor, named_state(optimizer, model)[key])


def test_state_of_another_model_is_refused():
    model = make_model()
    optimizer = make_optimizer(model, "lamb", **SETTINGS)
    load_named_state(optimizer, model, {}, 0)
    train(model, optimizer, range(1))
    state = named_state(optimizer, model)
    key = "exp_avg/classifier.nonlinearity.1.bias"
    with pytest.raises(ValueError, match=key):
        load_named_state(optimizer, model, {k: v for k, v in state.items() if k != key}, 1)
    with pytest.raises(ValueError, match="has shape"):
        load_named_state(optimizer, model, state | {key: torch.zeros(3)}, 1)
    with pytest.raises(ValueError, match="differ in"):
        load_named_state(optimizer, model, {}, 1)


def test_names_of_optimizers_are_those_that_the_flag_takes():
    [rule] = FIELDS["optimizer"].metadata["rules"]
    assert all(rule.holds(name) and f"{name}, " in rule.text.replace(" or", ",") for name in OPTIMIZERS)
    assert rule.holds("torch.optim.NAdam")
    assert not rule.holds("sgd")


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "SGD", "Adafactor", "ASGD"])
def test_any_optimizer_by_its_dotted_name_goes_on_exactly(name: str):
    model = make_model()
    optimizer = make_optimizer(model, f"torch.optim.{name}", **SETTINGS)
    assert type(optimizer) is getattr(torch.optim, name)
    untaken = {"SGD": ("betas", "eps"), "Adafactor": ("betas", "eps"), "ASGD": ("betas", "eps")}
    assert optimizer_kind(f"torch.optim.{name}").untaken == untaken.get(name, ())
    expected = {"NAdam": {"betas": (0.9, 0.98)}, "SGD": {"momentum": 0.9}, "Adafactor": {"eps": (None, 1e-3)}}
    assert expected.get(name, {}).items() <= optimizer.param_groups[0].items()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    train(model, optimizer, range(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    saved = {key: value.clone() for key, value in named_state(optimizer, model).items()}
    train(model, optimizer, range(3, 6))
    other = make_model(seed=1)
    other.load_state_dict(weights)
    resumed = make_optimizer(other, f"torch.optim.{name}", **SETTINGS)
    load_named_state(resumed, other, saved, 3)
    train(other, resumed, range(3, 6))
    for parameter, same in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, same)


def test_settings_by_role():
    model = make_model()
    rates, decays, beta1, beta2 = {"embedding": 0.5, "head": 2.0}, {"mlp": 3.0}, {"head": 0.8}, {"embedding": 0.95}
    optimizer = make_optimizer(model, "adamw", **SETTINGS, by_role=ByRole(rates, decays, beta1, beta2))
    set_rates(optimizer, 0.1, decay_factor=0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[p]: (group["lr"], group["weight_decay"], *group["betas"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found.keys() == set(names.values())
    for name, values in found.items():
        role = model.role_of(name)
        decay = 0.0 if "bias" in name or "layer_norm" in name else 0.05 * decays.get(role, 1)
        betas = (beta1.get(role, 0.9), beta2.get(role, 0.98))
        assert values == pytest.approx((0.1 * rates.get(role, 1), decay, *betas)), name
    with pytest.raises(ValueError, match="there is no role 'embeddings'; the model has attention, dwa, "):
        make_optimizer(model, "lamb", **SETTINGS, by_role=ByRole({"embeddings": 0.5}))
    with pytest.raises(ValueError, match="it takes no betas; leave --beta1_by_role"):
        make_optimizer(model, "torch.optim.SGD", **SETTINGS, by_role=ByRole(beta1=beta1))
    muon = make_optimizer(model, "muon", **SETTINGS, matrices=MatrixOptions(rate=0.1), by_role=ByRole({"mlp": 0.5}))
    factors = {group["rate_factor"] for group in muon.param_groups if "projections" in group}
    assert factors == {0.1, 0.05}


def test_any_state_is_restored_as_it_was(monkeypatch):
    """A tensor of another shape and type, a scalar tensor and a Python number for each parameter, in any order."""
    monkeypatch.setitem(OPTIMIZERS, "odd", OptimizerKind(OddOptimizer))
    model = make_model()
    optimizer = make_optimizer(model, "odd", **SETTINGS)
    assert named_state(optimizer, model) == {}
    train(model, optimizer, range(4))
    saved = {key: value.clone() for key, value in named_state(optimizer, model).items()}
    names = [name for name, _ in model.named_parameters()]
    of_parameters = {f"{entry}/{name}" for entry in ("norms", "scale", "int:count") for name in names}
    assert saved.keys() == of_parameters | {"float:d/group:0", "float:d/group:1"}
    assert float(saved["float:d/group:1"]) == pytest.approx(1.1**4)

    other = make_model(seed=1)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, "odd", **SETTINGS)
    load_named_state(resumed, other, dict(sorted(saved.items(), reverse=True)), 4)
    state = resumed.state[next(iter(other.parameters()))]
    assert {entry: type(value) for entry, value in state.items()} == {
        "norms": torch.Tensor,
        "scale": torch.Tensor,
        "count": int,
    }
    assert (state["count"], state["norms"].dtype, state["norms"].shape) == (4, torch.float64, (3,))
    for each, its in ((model, optimizer), (other, resumed)):
        train(each, its, range(4, 7))
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert resumed.param_groups[0]["d"] == optimizer.param_groups[0]["d"]
    with pytest.raises(ValueError, match="differ in norms/nowhere"):
        load_named_state(resumed, other, saved | {"norms/nowhere": torch.zeros(3)}, 4)


def test_state_that_cannot_be_saved_is_named():
    model = make_model()
    optimizer = make_optimizer(model, "lamb", **SETTINGS)
    train(model, optimizer, range(1))
    parameter = next(iter(model.parameters()))
    optimizer.state[parameter]["absent"] = None
    assert "absent" not in str(named_state(optimizer, model).keys())
    optimizer.state[parameter]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"keeps 'history' of .* as list: cannot be saved"):
        named_state(optimizer, model)


def test_only_optimizers_of_adams_moments_take_over_from_each_other(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "odd", OptimizerKind(OddOptimizer))
    pairs = [(new, old) for new in ("lamb", "adamw", "odd") for old in ("lamb", "adamw", "odd", "gone")]
    taken = {pair for pair in pairs if takes_over(*pair)}
    assert taken == {("lamb", "lamb"), ("lamb", "adamw"), ("adamw", "lamb"), ("adamw", "adamw"), ("odd", "odd")}


@pytest.mark.slow
def test_run_with_any_state_resumes_on_one_rank_and_on_two(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    inputs = make_inputs(tmp_path / "inputs")

    def train_in(folder: str, ranks: int = 0) -> dict[str, torch.Tensor]:
        options = {"optimizer": "helpers.odd_optimizer.OddOptimizer", "learning_rate_by_role": "embedding=0.5"}
        run(flags(inputs, tmp_path / folder, **options, max_steps=8, save_every=4, validate_every=0), ranks)
        checkpoint = open_checkpoint(tmp_path / folder / "run" / "checkpoints" / "step_00000008")
        return checkpoint.tensors("model") | checkpoint.tensors("optimizer")

    whole = train_in("whole")
    for folder in ("one", "two"):
        shutil.copytree(tmp_path / "whole", tmp_path / folder)
        shutil.rmtree(tmp_path / folder / "run" / "checkpoints" / "step_00000008")
    one, two = train_in("one"), train_in("two", 2)
    assert any(key.startswith("int:count/") for key in whole)
    assert "float:d/group:2" in whole
    assert whole.keys() == one.keys() == two.keys()
    for key, value in whole.items():
        assert torch.equal(one[key], value), key
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-6)


def test_unknown_optimizer():
    for name, message in (
        ("sgd", "--optimizer is 'sgd': .*; choose lamb, adamw, muon, normuon or one such as torch.optim.NAdam"),
        ("torch.optim.Nadam", "has no attribute 'Nadam'"),
        ("no_such_package.Prodigy", "No module named 'no_such_package'"),
        ("torch.nn.Linear", "'torch.nn.Linear', which is no subclass of torch.optim.Optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            make_optimizer(make_model(), name, **SETTINGS)


def test_clipping_is_by_the_norm_of_all_gradients():
    model = make_model()
    set_gradients(model, 0)
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert norm > 1
    assert float(clip_gradients(model.parameters(), math.inf)) == pytest.approx(norm, rel=1e-6)
    assert float(clip_gradients(model.parameters(), norm * 2)) == pytest.approx(norm, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient), "a norm below the limit is left alone"  # type: ignore[arg-type]
    assert float(clip_gradients(model.parameters(), norm / 4)) == pytest.approx(norm, rel=1e-6), "before clipping"
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 4, rtol=1e-5, atol=1e-8)


def test_clipping_shows_a_gradient_that_is_not_finite():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(float(clip_gradients([parameter], 1.0)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_on_cuda_never_wait():
    model, on_cpu = make_model().cuda(), make_model()
    pairs = [(m, make_optimizer(m, "lamb", **SETTINGS), Ema(m, 0.9)) for m in (model, on_cpu)]
    for step in range(3):
        for m, optimizer, ema in pairs:
            set_gradients(on_cpu, step)
            for parameter, other in zip(m.parameters(), on_cpu.parameters(), strict=True):
                parameter.grad = other.grad.to(parameter.device)  # type: ignore[union-attr]
            torch.cuda.synchronize()
            try:
                torch.cuda.set_sync_debug_mode("error" if step and m is model else "default")
                clip_gradients(m.parameters(), 0.5)
                optimizer.step()
                ema.update(m)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for parameter, other in zip(model.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), other, rtol=1e-5, atol=1e-6)


# Averages


def test_ema_is_its_definition():
    model = make_model()
    ema = Ema(model, 0.9)
    expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for step in range(4):
        set_gradients(model, step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter += parameter.grad
                expected[name] = 0.9 * expected[name] + 0.1 * parameter.double()
        ema.update(model)
    assert ema.state_dict().keys() == expected.keys()
    for name, average in ema.state_dict().items():
        torch.testing.assert_close(average, expected[name].float(), rtol=1e-5, atol=1e-6)


def test_ema_swaps_in_and_out():
    model = make_model()
    ema = Ema(model, 0.5)
    optimizer = make_optimizer(model, "adamw", **SETTINGS)
    train(model, optimizer, range(2))
    ema.update(model)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    averages = {name: average.clone() for name, average in ema.state_dict().items()}

    def fail_inside() -> None:
        with ema.swapped_in(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, averages[name])
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, own[name])
        assert torch.equal(ema.state_dict()[name], averages[name])
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert any(not torch.equal(own[name], averages[name]) for name in own)


def test_ema_state_goes_on_exactly():
    model = make_model()
    ema = Ema(model, 0.7)
    optimizer = make_optimizer(model, "lamb", **SETTINGS)
    train(model, optimizer, range(2))
    ema.update(model)
    other = Ema(make_model(seed=3), 0.7)
    other.load_state_dict({name: average.clone() for name, average in reversed(ema.state_dict().items())})
    ema.update(model)
    other.update(model)
    for name, average in ema.state_dict().items():
        assert torch.equal(other.state_dict()[name], average)
    state = ema.state_dict()
    name = next(iter(state))
    with pytest.raises(ValueError, match=name):
        other.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match="has shape"):
        other.load_state_dict(state | {name: torch.zeros(1)})
    with pytest.raises(ValueError, match="outside"):
        Ema(model, 1.5)


@pytest.mark.slow
def test_lamb_alone_imports_no_compiler():
    """Which takes as long to import as the rest of torch: every rank would wait for it, and CPU runs never use it."""
    code = (
        "import sys, torch; from training.optimizers import Lamb; w = torch.nn.Parameter(torch.ones(2)); "
        "o = Lamb([w]); w.grad = torch.ones(2); o.step(); o.zero_grad(); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0
