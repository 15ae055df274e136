"""LAMB as published with GPT-BERT: the formula; ops/lamb_cuda.py has its kernels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


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

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """What is kept of each parameter of a group once it has taken a step."""
        return _MOMENTS

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
