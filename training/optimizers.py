"""LAMB as published with GPT-BERT, AdamW, Muon, NorMuon, gradient clipping, and optimizer state by parameter name."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model_protocol import PretrainingModel
from ops import muon
from ops.lamb_cuda import FusedLamb, Settings, Tensors, available, fits
from ops.reference import reference_chosen
from training.ema import Ema

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ROW_BETA = 0.95  # of NorMuon's mean squares: the beta2 of its paper
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}  # in this order: a bool is an int, too


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020) in the variant of the published GPT-BERT runs; golden/ pins its numbers.

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * trust * u,   trust = |w| / |u| for each tensor, 1 where either norm is 0

    Moments are bias-corrected, norms are not clamped, and a group without weight decay (biases, layer norms) has
    trust 1, which makes its update Adam's. The step t is counted per group, in group["step"].
    """

    # Without the decorator by which Optimizer keeps torch.compile out of them: it imports the compiler to do so, which
    # takes nearly as long as importing torch, in processes that compile nothing as well.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        """params: parameters, or groups of them as dicts. Raises ValueError on settings out of range."""
        if not lr >= 0:
            raise ValueError(f"LAMB's lr is {lr}; it must be at least 0.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB's betas are {betas}; each must be at least 0 and below 1.")
        if not eps > 0:
            raise ValueError(f"LAMB's eps is {eps}; it must be above 0.")
        if not weight_decay >= 0:
            raise ValueError(f"LAMB's weight_decay is {weight_decay}; it must be at least 0.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, without waiting for the device.

        On CUDA training takes these steps by ops/lamb_cuda.py instead (see training/optimizers.py).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, group)
        return loss

    def moments(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """First and second moments of `parameters`; those of a parameter that never took a step are zeros."""
        first, second = (self._kept(name, parameters) for name in _MOMENTS)
        return first, second

    def _kept(self, entry: str, parameters: list[Tensor], by_row: bool = False) -> list[Tensor]:
        """What is kept of each of `parameters` as `entry`, zeros at first: of its shape, or one number a row."""
        for parameter in parameters:
            if entry not in self.state[parameter]:
                like = parameter[:, 0] if by_row else parameter
                self.state[parameter][entry] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return [self.state[parameter][entry] for parameter in parameters]

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take a step with parameters of a group, which have gradients."""
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        first, second = self.moments(parameters)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)

        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2 ** group["step"]))
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(first, denominators)
        del denominators
        torch._foreach_div_(updates, 1 - beta1 ** group["step"])
        if group["weight_decay"] > 0:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["weight_decay"] > 0 and group.get("trust", True):
            weight_norms = torch.stack(torch._foreach_norm(parameters))
            update_norms = torch.stack(torch._foreach_norm(updates))
            defined = (weight_norms > 0) & (update_norms > 0)
            trust = torch.where(defined, weight_norms / update_norms, torch.ones_like(weight_norms))
            torch._foreach_mul_(updates, list(trust.unbind()))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


class Muon(Lamb):
    """Muon (Jordan et al., 2024) or NorMuon (Li et al., arXiv 2510.05491) for groups of matrices; others as they say.

        M = momentum M + (1 - momentum) G,   D = newton_schulz((1 - momentum) G + momentum M)
        W = W - lr (scale D + weight_decay W),   scale so that the entries of scale D have the root mean square 0.2

    NorMuon divides each row of D (an output neuron) by the root of a running mean of its squares first. With that scale
    rates and weight decay are about AdamW's (arXiv 2502.16982). ops/muon.py has the formulas.

    A group is one of matrices if it has "projections": how many projections lie one above the other in each of its
    parameters, which are orthogonalised one by one. Other groups take LAMB's step, or with "trust" False AdamW's.
    """

    def __init__(
        self, params: Iterable[Any], momentum: float = 0.95, by_row: bool = False, cautious: bool = False, **rest: Any
    ) -> None:
        """by_row: NorMuon. cautious: weight decay of matrices only where the update agrees. rest: as for Lamb."""
        super().__init__(params, **rest)
        self.momentum, self.by_row, self.cautious = momentum, by_row, cautious

    @torch.no_grad()
    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take a step with parameters of a group, which have gradients: matrices of one shape all at once."""
        if "projections" not in group:
            return super().update(parameters, group)
        counts = dict(zip(group["params"], group["projections"], strict=True))
        momenta = self._kept("momentum", parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        updates = torch._foreach_lerp(gradients, momenta, self.momentum)
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for parameter, update in zip(parameters, updates, strict=True):
            shape = (parameter.size(0) // counts[parameter], parameter.size(1))
            stacks.setdefault(shape, []).append((parameter, update))
        for shape, pairs in stacks.items():
            same, directions = (list(tensors) for tensors in zip(*pairs, strict=True))
            self._descend(same, directions, shape, group)
        return None

    def _descend(
        self, parameters: list[Tensor], updates: list[Tensor], shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """One step of parameters whose projections all have `shape`, along their updates made orthogonal."""
        places = [parameter.size(0) // shape[0] for parameter in parameters]
        dtype = muon.working_dtype(parameters[0].device)
        stack = torch.empty(sum(places), *shape, dtype=dtype, device=parameters[0].device)
        torch._foreach_copy_(_by_parameter(stack, places), updates)
        directions, scales = muon.newton_schulz(stack), muon.matched_scale(stack)
        if self.by_row:
            kept = self._kept("row_square", parameters, by_row=True)
            second = torch.cat(kept).view(-1, shape[0])
            scales = muon.row_scales(directions, second, _ROW_BETA, group["eps"])
            torch._foreach_copy_(kept, _by_parameter(second, places))
        weights = torch.cat(parameters).view(-1, *shape)
        muon.descend(weights, directions, scales, group["lr"], group["weight_decay"], self.cautious)
        torch._foreach_copy_(parameters, _by_parameter(weights, places))


def _by_parameter(stack: Tensor, places: list[int]) -> list[Tensor]:
    """The parts of a stack [S, m, ...] that belong to parameters with so many projections each, [places * m, ...]."""
    return [part.flatten(0, 1) for part in stack.split(places)]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: parameters that decay, and biases and layer norms, which do not.

    The rule is the published one, by name: no decay for names that hold "bias" or "layer_norm". GPT-BERT's averaging
    weights (alphas) therefore do decay.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "bias" in name or "layer_norm" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


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


def _with_matrices(
    groups: list[dict[str, Any]], model: nn.Module, lr: float, options: MatrixOptions
) -> list[dict[str, Any]]:
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
            rate = {"rate_factor": options.rate, "lr": lr * options.rate}
            split.append(group | rate | {"params": hidden, "projections": projections})
    return [group for group in split if group["params"]]


class OptimizerKind(NamedTuple):
    """make: of parameter groups, lr, betas, eps and weight_decay. defaults: further arguments of it.

    moments: whether its state is Adam's, so that others of this kind can take it over when a run branches off.
    matrices: whether it is told which parameters are matrices of hidden layers (`_with_matrices`).
    """

    make: Callable[..., torch.optim.Optimizer]
    defaults: Mapping[str, Any] = MappingProxyType({})
    moments: bool = False
    matrices: bool = False


# What --optimizer may name; training/flags.py reads the names from here.
OPTIMIZERS = {
    "lamb": OptimizerKind(Lamb, moments=True),
    "adamw": OptimizerKind(_adamw, moments=True),
    "muon": OptimizerKind(Muon, matrices=True),
    "normuon": OptimizerKind(Muon, MappingProxyType({"by_row": True}), matrices=True),
}


def make_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    matrices: MatrixOptions | None = None,
) -> torch.optim.Optimizer:
    """The optimizer `name` of OPTIMIZERS over the model's parameter groups, where the model's weights are.

    A group's rate is lr times its "rate_factor", where it has one. matrices: for Muon.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f'--optimizer is "{name}"; choose {" or ".join(map(json.dumps, OPTIMIZERS))}.')
    kind, groups = OPTIMIZERS[name], parameter_groups(model, weight_decay)
    further = dict(kind.defaults)
    if kind.matrices:
        matrices = matrices or MatrixOptions()
        groups = _with_matrices(groups, model, lr, matrices)
        further |= {"momentum": matrices.momentum, "cautious": matrices.cautious}
    return kind.make(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **further)


def set_rates(optimizer: torch.optim.Optimizer, rate: float, decay_factor: float = 1.0) -> None:
    """Give all groups a step's learning rate, times their "rate_factor", and so many times their first weight decay."""
    for group in optimizer.param_groups:
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

    Python's numbers become tensors "int:ENTRY/NAME". With the number of steps done this is the whole state, and it does
    not depend on the order of parameters. Raises TypeError for what is neither tensor nor number.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if entry == "step" and isinstance(optimizer, torch.optim.AdamW):
                continue  # the number of steps done
            kind = next((kind for kind in _NUMBERS if isinstance(value, kind)), None)
            if isinstance(value, Tensor):
                tensors[f"{entry}/{name}"] = value
            elif kind is not None:
                tensors[f"{kind.__name__}:{entry}/{name}"] = torch.tensor(value, dtype=_NUMBERS[kind])
            elif value is not None:
                raise TypeError(f"the optimizer keeps {entry!r} of {name} as {type(value).__name__}: cannot be saved")
    return tensors


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
    for group in optimizer.param_groups:
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
    odd = {key for key in tensors if key.rpartition("/")[2] not in parameters}
    if isinstance(optimizer, Lamb | torch.optim.AdamW):
        matrices = {p for group in optimizer.param_groups if "projections" in group for p in group["params"]}
        of_matrices = ("momentum", "row_square")[: 1 + getattr(optimizer, "by_row", False)]
        entries = {name: of_matrices if p in matrices else _MOMENTS for name, p in parameters.items()}
        odd = tensors.keys() ^ {f"{entry}/{name}" for name, its in entries.items() for entry in its}
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
    """Clips the gradients of `model`, lets `optimizer` step and updates `ema`: for LAMB on CUDA by three fused passes.

    HYBRID_REFERENCE=optimizer in the environment keeps the separate calls, the reference (ops/reference.py).
    Both leave the same state behind, to float rounding, and may alternate.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema, max_norm: float) -> None:
        """max_norm: of all gradients taken as one vector; infinity only measures it."""
        self.model, self.optimizer, self.ema, self.max_norm = model, optimizer, ema, max_norm
        parameters = list(model.parameters())
        wanted = not reference_chosen("optimizer") and type(optimizer) is Lamb
        self._fused = None
        if wanted and all(fits(parameter) for parameter in parameters) and available(parameters[0].device):
            self._fused = FusedLamb()

    def __call__(self) -> Tensor:
        """Update weights, optimizer state and averages; returns the norm of the gradients before clipping.

        The norm is a tensor on their device, and nothing waits for it: one that is not finite is the caller's to
        notice. Parameters without gradient stay as they are. What becomes of the gradients is not defined.
        """
        with_gradient = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self._fused is None or not all(fits(p.grad) for p in with_gradient if p.grad is not None):
            norm = clip_gradients(with_gradient, self.max_norm)
            self.optimizer.step()
            self.ema.update(self.model)
            return norm
        assert isinstance(self.optimizer, Lamb)
        averages = self.ema.by_parameter(self.model)
        groups = []
        for group in self.optimizer.param_groups:
            group["step"] += 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            settings = Settings(group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"])
            tensors = (parameters, gradients, *self.optimizer.moments(parameters))
            groups.append((settings, Tensors(*tensors, [averages.pop(parameter) for parameter in parameters])))
        norm = self._fused(groups, self.max_norm, self.ema.decay)
        self.ema.take_in(averages)  # of parameters without gradient, if there are any
        return norm
