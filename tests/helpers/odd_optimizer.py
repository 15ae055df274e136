"""An optimizer with state of every kind, for tests of what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OddOptimizer(torch.optim.Optimizer):
    """Divides gradients by what it remembers of each parameter.

    norms: of the last three gradients, float64 [3]. scale: running mean of |gradient|, a scalar tensor. count: of its
    steps, a Python number. d, of a group: grows by what all its parameters have seen, as Prodigy's does.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "eps": eps, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["d"] *= 1.1
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    norms = torch.zeros(3, dtype=torch.float64, device=parameter.device)
                    state.update(norms=norms, scale=torch.ones((), device=parameter.device), count=0)
                state["count"] += 1
                state["norms"][state["count"] % 3] = gradient.norm()
                state["scale"].lerp_(gradient.abs().mean(), 0.1)
                divisor = state["scale"] + state["norms"].mean().float() + 1 / state["count"]
                parameter.sub_(gradient / divisor, alpha=group["lr"] * group["d"])


class Coupled(torch.optim.SGD):
    """SGD whose groups keep the norm of all their gradients together, which no rank with part of them knows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["d"] = float(sum(p.grad.square().sum() for p in group["params"]))
        return super().step(closure)
