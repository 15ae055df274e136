"""Averages of the weights: exponential moving ones, and with a decay that moves, the mean of a run's last part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn


def weights_file(average: bool | str) -> str:
    """The file of a checkpoint, but for its ending, that holds the weights (False), their first average (True), or the
    further average of this name."""
    return f"ema_{average}" if isinstance(average, str) else "ema" if average else "model"


class Ema:
    """Average of a model's parameters over its past: average = decay * average + (1 - decay) * parameter each step.
    Starts as a copy of the parameters. Buffers are not averaged: the models here have none."""

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        owned: Collection[nn.Parameter] | None = None,
        share: Callable[[], None] = lambda: None,
    ) -> None:
        """decay in [0, 1] per step, which may be set anew before each; raises ValueError outside. owned: the parameters
        that this rank averages (None: all); share gives all ranks the weights of their owners."""
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA decay {decay} is outside [0, 1].")
        self.decay = decay
        self._share = share
        self._average = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if owned is None or parameter in owned
        }

    def update(self, model: nn.Module) -> None:
        """Take the model's present weights into the average; call once after each optimizer step."""
        self.take_in(self.by_parameter(model))

    @torch.no_grad()
    def take_in(self, averages: Mapping[nn.Parameter, Tensor]) -> None:
        """`update`, for some parameters and their averages alone."""
        if averages:
            torch._foreach_lerp_(list(averages.values()), list(averages), 1 - self.decay)

    def by_parameter(self, model: nn.Module) -> dict[nn.Parameter, Tensor]:
        """The average of each of the model's parameters that this rank averages; not copies."""
        parameters = dict(model.named_parameters())
        return {parameters[name]: average for name, average in self._average.items()}

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Give `model` the averaged weights inside the `with` block, and its own back, bit for bit, afterwards. For all
        ranks together."""
        with torch.no_grad():
            parameters = list(self._parameters(model).values())
            own = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, list(self._average.values()))
        self._share()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)
            self._share()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name, as `model.load_state_dict` takes them; not copies."""
        return dict(self._average)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved averages; raises ValueError where names or shapes are not those of the model."""
        if tensors.keys() != self._average.keys():
            odd = sorted(tensors.keys() ^ self._average.keys())[0]
            raise ValueError(f"the saved average and the model differ in {odd}; they are of different models.")
        for name, average in self._average.items():
            if tensors[name].shape != average.shape:
                raise ValueError(
                    f"the saved average of {name} has shape {tuple(tensors[name].shape)}, the model's is "
                    f"{tuple(average.shape)}; they are of different models."
                )
            average.copy_(tensors[name])

    def _parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's parameters in the order of the averages."""
        parameters = dict(model.named_parameters())
        return {name: parameters[name].detach() for name in self._average}
