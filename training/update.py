"""What a step does once the gradients are there: clipping, the optimizer's step, the average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.lamb_cuda import FusedLamb, Settings, Tensors, available, fits
from ops.reference import reference_chosen
from training.ema import Ema
from training.optimizers import Lamb, clip_gradients


class OptimizerStep:
    """Clips the gradients of `model`, lets `optimizer` step and updates `ema`: for LAMB on CUDA by three fused passes.

    HYBRID_REFERENCE=optimizer in the environment keeps the separate calls, the reference (ops/reference.py).
    Both leave the same state behind, to float rounding, and may alternate.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema, max_norm: float) -> None:
        """max_norm: of all gradients taken as one vector; infinity only measures it."""
        self.model, self.optimizer, self.ema, self.max_norm = model, optimizer, ema, max_norm
        parameters = list(model.parameters())
        wanted = not reference_chosen("optimizer") and isinstance(optimizer, Lamb)
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
