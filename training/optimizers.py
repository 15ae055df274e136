"""Which optimizer updates which parameters, at which rates; gradient clipping; optimizer state by parameter name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib import import_module
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model_protocol import PretrainingModel
from ops.lamb import Lamb
from ops.lamb_cuda import FusedLamb, available, begin_groups, fits
from ops.muon import Muon
from ops.reference import reference_chosen
from training.distributed import World
from training.ema import Ema
from training.flags import ConfigError
from training.gradients import GradientBuckets

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GROUP = "group:"  # and its number: stands where else a parameter's name does
# Of a group what flags and schedules give: not state.
_GIVEN = {"params", "lr", "betas", "eps", "weight_decay", "momentum", "rate_factor", "first_decay"}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}  # in this order: a bool is an int, too


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: parameters that decay, and biases and layer norms, which do not.

    The rule is the published one, by name: no decay for names that hold "bias" or "layer_norm". GPT-BERT's averaging
    weights (alphas) therefore do decay.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "bias" in name or "layer_norm" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class ByRole(NamedTuple):
    """By role of a parameter: factors of its rate and of its weight decay; betas in place of those of all."""

    rates: Mapping[str, float] = MappingProxyType({})
    decays: Mapping[str, float] = MappingProxyType({})
    beta1: Mapping[str, float] = MappingProxyType({})
    beta2: Mapping[str, float] = MappingProxyType({})


def split_by_role(
    groups: list[dict[str, Any]], model: nn.Module, by_role: ByRole, betas: tuple[float, float]
) -> list[dict[str, Any]]:
    """Groups by role of their parameters in the model, where one has settings of its own.

    betas: of all others. Raises ValueError for a role that the model has not.
    """
    if not any(by_role):
        return groups
    assert isinstance(model, PretrainingModel)
    roles = {parameter: model.role_of(name) for name, parameter in model.named_parameters()}
    if unknown := set().union(*by_role) - set(roles.values()):
        raise ValueError(f"there is no role {min(unknown)!r}; the model has {', '.join(sorted(set(roles.values())))}.")
    usual = (1.0, 1.0, *betas)
    split: dict[tuple[int, tuple[float, ...]], dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            own = tuple(each.get(roles[parameter], value) for each, value in zip(by_role, usual, strict=True))
            new = {"params": [], "rate_factor": own[0], "weight_decay": group["weight_decay"] * own[1]}
            if by_role.beta1 or by_role.beta2:
                new["betas"] = own[2:]
            split.setdefault((number, own), group | new)["params"].append(parameter)
    return list(split.values())


def _adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """AdamW in the form that is fastest where the parameters are."""
    on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    fastest: dict[str, Any] = {"fused": True} if on_cuda else {"foreach": True}
    return torch.optim.AdamW(groups, **settings, **fastest)


class MatrixOptions(NamedTuple):
    """What Muon does beyond its groups. rate: peak rate of matrices by that of the rest. rest: "adamw" or "lamb"."""

    rate: float = 1.0
    momentum: float = 0.95
    cautious: bool = False
    rest: str = "adamw"


def _with_matrices(groups: list[dict[str, Any]], model: nn.Module, options: MatrixOptions) -> list[dict[str, Any]]:
    """The groups, with one more for the matrices of hidden layers that they hold, for Muon."""
    matrices = model.hidden_matrices() if isinstance(model, PretrainingModel) else {}
    if not matrices:
        raise ValueError("--optimizer muon and normuon need matrices in lists of layers, and the model has none.")
    split = []
    for group in groups:
        hidden = [parameter for parameter in group["params"] if parameter in matrices]
        rest = [parameter for parameter in group["params"] if parameter not in matrices]
        split.append(group | {"params": rest, "trust": options.rest == "lamb"})
        if hidden:
            projections = [matrices[parameter] for parameter in hidden]
            rate = {"rate_factor": group.get("rate_factor", 1.0) * options.rate}
            own = {"params": hidden, "projections": projections, "momentum": options.momentum}
            split.append(group | rate | own)
    return [group for group in split if group["params"]]


def _part(group: dict[str, Any], owned: Collection[nn.Parameter]) -> dict[str, Any]:
    """A group with those of its parameters that are `owned`."""
    kept = [parameter in owned for parameter in group["params"]]
    of_each = {name: list(compress(group[name], kept)) for name in ("params", "projections") if name in group}
    return group | of_each


class OptimizerKind(NamedTuple):
    """make: of parameter groups, lr, betas, eps and weight_decay. defaults: further arguments of it.

    moments: whether its state is Adam's, so that others of this kind can take it over when a run branches off.
    matrices: whether it is told which parameters are matrices of hidden layers (`_with_matrices`).
    untaken: which of those settings it has no use for.
    """

    make: Callable[..., torch.optim.Optimizer]
    defaults: Mapping[str, Any] = MappingProxyType({})
    moments: bool = False
    matrices: bool = False
    untaken: tuple[str, ...] = ()


# What --optimizer may name; training/flags.py reads the names from here.
OPTIMIZERS = {
    "lamb": OptimizerKind(Lamb, moments=True),
    "adamw": OptimizerKind(_adamw, moments=True),
    "muon": OptimizerKind(Muon, matrices=True),
    "normuon": OptimizerKind(Muon, MappingProxyType({"by_row": True}), matrices=True),
}


def optimizer_kind(name: str) -> OptimizerKind:
    """An optimizer by its name in OPTIMIZERS, or any by its dotted name. Raises ValueError where there is none."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"--optimizer is {name!r}: {error}; choose {known} or one such as torch.optim.NAdam") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"--optimizer is {name!r}, which is no subclass of torch.optim.Optimizer")
    settings = {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    untaken = tuple(sorted(settings.keys() - taken_settings(found, settings).keys()))
    return OptimizerKind(partial(_any_optimizer, found), untaken=untaken)


def taken_settings(made: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings lr, betas, eps and weight_decay that an optimizer's __init__ takes, as it takes them.

    One without betas may have a momentum, which is then the first of them; eps other than one number is its own affair.
    """
    takes = inspect.signature(made).parameters
    if "momentum" in takes and "betas" not in takes:
        settings = {**settings, "momentum": settings["betas"][0]}
    if "eps" in takes and isinstance(takes["eps"].default, tuple):
        settings = {key: value for key, value in settings.items() if key != "eps"}
    return {key: value for key, value in settings.items() if key in takes}


def _any_optimizer(made: Callable[..., Any], groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of another package, in torch's fused form where it has one for the device."""
    fused = "fused" in inspect.signature(made).parameters
    on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return made(groups, **taken_settings(made, settings), **({"fused": True} if fused and on_cuda else {}))


def make_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    matrices: MatrixOptions | None = None,
    by_role: ByRole | None = None,
    owned: Collection[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer `name` (`optimizer_kind`) over the model's parameter groups, where the model's weights are.

    A group's rate is lr times its "rate_factor", where it has one. matrices: for Muon. by_role: settings by role.
    owned: the parameters that this rank updates (None: all); ranks have the same groups, some of them empty.
    """
    kind, by_role = optimizer_kind(name), by_role or ByRole()
    if (by_role.beta1 or by_role.beta2) and "betas" in kind.untaken:
        raise ValueError("it takes no betas; leave --beta1_by_role and --beta2_by_role out")
    groups = split_by_role(parameter_groups(model, weight_decay), model, by_role, betas)
    further = dict(kind.defaults)
    if kind.matrices:
        matrices = matrices or MatrixOptions()
        groups = _with_matrices(groups, model, matrices)
        further |= {"momentum": matrices.momentum, "cautious": matrices.cautious}
    groups = [group | {"lr": lr * group.get("rate_factor", 1.0)} for group in groups]
    if owned is not None:
        groups = [_part(group, owned) for group in groups]
    return kind.make(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **further)


def set_rates(
    optimizer: torch.optim.Optimizer,
    rate: float,
    decay_factor: float = 1.0,
    values: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Give all groups a step's learning rate, times their "rate_factor", and so many times their first weight decay.

    values: momentum, beta1 and beta2, where they move; groups without them stay as they are.
    """
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = values.get("momentum", group["momentum"])
        if "betas" in group and {"beta1", "beta2"} & values.keys():
            first, second, *more = group["betas"]
            group["betas"] = (values.get("beta1", first), values.get("beta2", second), *more)
        group["lr"] = rate * group.get("rate_factor", 1.0)
        group["weight_decay"] = group.setdefault("first_decay", group["weight_decay"]) * decay_factor


def takes_over(new: str, old: str) -> bool:
    """Whether the optimizer `new` can start from the state of `old`."""
    kinds = [OPTIMIZERS.get(name) for name in (new, old)]
    return new == old or all(kind is not None and kind.moments for kind in kinds)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients down to a total norm of `max_norm`; returns the norm before, a tensor on their device.

    The norm is that of all gradients taken as one vector; infinity as `max_norm` only measures. Never waits for the
    device; a norm that is not finite is the caller's to notice.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the optimizer keeps of each parameter, as tensors "ENTRY/NAME" (not copies); empty before the first step.

    Python's numbers become tensors "int:ENTRY/NAME". What an optimizer by its dotted name keeps of a group, such as
    Prodigy its d, is "float:d/group:0". With the number of steps done this is the whole state, and it does
    not depend on the order of parameters. Raises TypeError for what is neither tensor nor number.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if entry == "step" and isinstance(optimizer, torch.optim.AdamW):
                continue  # the number of steps done
            if not _add(tensors, entry, name, value):
                raise TypeError(f"the optimizer keeps {entry!r} of {name} as {type(value).__name__}: cannot be saved")
    return tensors | _of_groups(optimizer) if tensors else tensors


def _of_groups(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer by its dotted name keeps of its groups, as `named_state` names it."""
    tensors: dict[str, Tensor] = {}
    if not isinstance(optimizer, Lamb | torch.optim.AdamW):
        for number, group in enumerate(optimizer.param_groups):
            for entry in sorted(group.keys() - _GIVEN):
                if not isinstance(group[entry], bool):  # a setting
                    _add(tensors, entry, f"{_GROUP}{number}", group[entry])
    return tensors


def _add(tensors: dict[str, Tensor], entry: str, name: str, value: Any) -> bool:
    """Add a value as a tensor; whether it is one that can be."""
    kind = next((kind for kind in _NUMBERS if isinstance(value, kind)), None)
    if isinstance(value, Tensor):
        tensors[f"{entry}/{name}"] = value
    elif kind is not None:
        tensors[f"{kind.__name__}:{entry}/{name}"] = torch.tensor(value, dtype=_NUMBERS[kind])
    return isinstance(value, Tensor) or kind is not None or value is None


def load_named_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], step: int
) -> None:
    """Restore what `named_state` gave after `step` steps; `tensors` may be on any device and are copied.

    Raises ValueError where names or shapes are not those of the model.
    """
    if not tensors and step == 0:
        return
    _check_names(optimizer, dict(model.named_parameters()), tensors)
    states: dict[str, dict[str, Any]] = {}
    for key, saved in tensors.items():
        entry, _, name = key.rpartition("/")
        kind, colon, rest = entry.partition(":")
        if colon and kind in [number.__name__ for number in _NUMBERS]:
            states.setdefault(name, {})[rest] = saved.item()
        else:
            states.setdefault(name, {})[entry] = saved
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        group.update(states.get(f"{_GROUP}{number}", {}))
        if "step" in group:
            group["step"] = step
        on_device = group.get("fused") or group.get("capturable")  # where torch's optimizers count their steps
        for parameter in group["params"]:
            state = states.get(names[parameter], {})
            if isinstance(optimizer, torch.optim.AdamW):
                state = {"step": torch.tensor(float(step), dtype=torch.float32), **state}
            for entry, saved in state.items():
                if isinstance(saved, Tensor):
                    device = "cpu" if entry == "step" and not on_device else parameter.device
                    state[entry] = saved.detach().to(device, copy=True)
            if state:
                optimizer.state[parameter] = state


def _check_names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ValueError where saved state is not of these parameters; of Adam's moments none may be missing."""
    known = {*parameters, *(f"{_GROUP}{number}" for number in range(len(optimizer.param_groups)))}
    odd = {key for key in tensors if key.rpartition("/")[2] not in known}
    if isinstance(optimizer, Lamb | torch.optim.AdamW):
        names = {parameter: name for name, parameter in parameters.items()}
        kept = optimizer.entries if isinstance(optimizer, Lamb) else lambda group: _MOMENTS
        groups = optimizer.param_groups
        odd = tensors.keys() ^ {f"{e}/{names[p]}" for group in groups for p in group["params"] for e in kept(group)}
    if odd:
        raise ValueError(f"the saved optimizer state and the model differ in {min(odd)}; they are of different models.")
    for key, saved in tensors.items():
        entry, _, name = key.rpartition("/")
        if entry in (*_MOMENTS, "momentum") and saved.shape != parameters[name].shape:
            raise ValueError(
                f"the saved {entry} of {name} has shape {tuple(saved.shape)}, the parameter has "
                f"{tuple(parameters[name].shape)}; they are of different models."
            )


class OptimizerStep:
    """Clips the gradients of `model`, lets `optimizer` step and updates `ema`: for LAMB and Muon on CUDA by three fused
    passes.

    HYBRID_REFERENCE=optimizer in the environment keeps the separate calls, the reference (ops/reference.py).
    Both leave the same state behind, to float rounding, and may alternate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: Ema,
        max_norm: float,
        buckets: GradientBuckets | None = None,
    ) -> None:
        """max_norm: of all gradients taken as one vector; infinity only measures it. buckets: say who updates what."""
        self.model, self.optimizer, self.ema, self.max_norm = model, optimizer, ema, max_norm
        self._buckets = buckets if buckets is not None and buckets.sharded else None
        # What an optimizer of another package keeps of all parameters together is not known before its first step.
        self._compares = self._buckets is not None and not isinstance(optimizer, Lamb | torch.optim.AdamW)
        parameters = list(model.parameters())
        wanted, matrices = not reference_chosen("optimizer"), type(optimizer) is Muon
        self._fused = None
        if wanted and (matrices or type(optimizer) is Lamb) and all(map(fits, parameters)):
            self._fused = FusedLamb() if available(parameters[0].device, matrices) else None

    def __call__(self) -> Tensor:
        """Update weights, optimizer state and averages; returns the norm of the gradients before clipping.

        The norm is a tensor on their device, and nothing waits for it: one that is not finite is the caller's to
        notice. Parameters without gradient stay as they are. What becomes of the gradients is not defined.
        Raises ConfigError for an optimizer that cannot be sharded.
        """
        parameters = self._updated()
        if self._buckets is None:
            return self._update(parameters, self.max_norm)
        norm = self.gradient_norm()
        if self.max_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm, foreach=True)
        self._update(parameters, math.inf)
        if self._compares:
            self._check_groups(self._buckets.world)
            self._compares = False
        self._buckets.share_weights()
        return norm

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients taken as one vector, before clipping; nothing waits for it."""
        gradients = [parameter.grad for parameter in self._updated() if parameter.grad is not None]
        if self._buckets is None:
            return torch.nn.utils.get_total_norm(gradients, foreach=True)
        return self._buckets.norms([gradients])[0]

    def _updated(self) -> list[nn.Parameter]:
        """The parameters with a gradient that this rank updates."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        owned = None if self._buckets is None else self._buckets.owned
        return parameters if owned is None else [parameter for parameter in parameters if parameter in owned]

    def _check_groups(self, world: World) -> None:
        """Refuse an optimizer whose groups keep what depends on all parameters, of which each rank has a part."""
        own = {key: tensor.tolist() for key, tensor in _of_groups(self.optimizer).items()}
        everyone = world.all_gather_objects(own, "what the optimizer keeps of groups")
        if odd := [key for key in everyone[0] if any(other.get(key) != everyone[0][key] for other in everyone)]:
            raise ConfigError(
                f"--sharding zero1: {type(self.optimizer).__name__} computes {odd[0].partition('/')[0]} from all "
                "parameters together, of which each rank has a part; take --sharding none"
            )

    def _update(self, with_gradient: list[nn.Parameter], max_norm: float) -> Tensor:
        """`__call__` for the parameters that this rank updates."""
        if self._fused is None or not all(fits(p.grad) for p in with_gradient if p.grad is not None):
            norm = clip_gradients(with_gradient, max_norm)
            self.optimizer.step()
            self.ema.update(self.model)
            return norm
        assert isinstance(self.optimizer, Lamb)
        averages = self.ema.by_parameter(self.model)
        groups = list(begin_groups(self.optimizer, averages))
        norm = self._fused(groups, max_norm, self.ema.decay)
        self.ema.take_in(averages)  # of parameters without gradient, if there are any
        return norm
