"""Protocol of a model: what training, evaluation and the estimates of speed ask of one, whatever its shape.

A model is a subclass that defines `__init__(config, generator)`, `encode`, `predict` and `flops_per_token`, and a line
in model_config.MODEL_CLASSES. The other methods have answers that are right for any model, and hints that make a run
faster: which gradients are complete first, and what is worth compiling.

Of parameters, training asks for names: those with "bias" or "layer_norm" in them get no weight decay, and all are
saved under their names. A module that drops something in training does it by the keys it is given (ops/dropout.py), so
that a row is the same on any number of ranks. A module in an nn.ModuleList uses its matrices in its own `forward`
alone: with --sharding full they are there for that long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from model_config import ModelConfig
from ops.cross_entropy import Scores, target_scores
from ops.dropout import DropoutKeys
from ops.rope import VarlenSizes


class PretrainingModel(nn.Module, ABC):
    """A model for masked and causal language modelling. Position i predicts the token at i + 1 under every objective.
    config: sizes, as saved with every checkpoint."""

    config: ModelConfig
    takes_ends: ClassVar[bool] = False  # whether `causal` of `encode` may be an end for each token
    roles: ClassVar[Mapping[str, str]] = {}  # part of a parameter's name -> its group in stats/grad_norm/GROUP
    # Part of a matrix's name -> how many projections stand one above the other in it.
    projections: Mapping[str, int] = MappingProxyType({})

    score: Callable[[Tensor, Tensor], Scores] = staticmethod(target_scores)  # of logits and labels, perhaps compiled

    @abstractmethod
    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        """Random weights from `generator`, or from PyTorch's global one."""
        super().__init__()
        self.config = config

    @abstractmethod
    def encode(
        self, input_ids: Tensor, document_ids: Tensor, causal: bool | Tensor, dropout: DropoutKeys | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] of input_ids int64 [B, T].

        document_ids: int64 [B, T]; tokens attend only inside their document (a run of one id), and -1 is padding,
        which attends nothing. causal: a bool, bool [B] with one flag for each row, or, where the class `takes_ends`,
        int64 [B, T], the column up to which each token also attends to what is ahead of it (data/reading.py,
        `ops.attention_metadata.allowed_between`). dropout: keys of the rows' dropout, used in training mode alone.
        """

    @abstractmethod
    def predict(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the *next* token from hidden [..., D]."""

    @classmethod
    @abstractmethod
    def flops_per_token(cls, config: ModelConfig, row_length: int, target_fraction: float) -> float:
        """Floating-point operations of one token's forward and backward pass in matrix products, for stats/mfu.
        target_fraction: of positions that have a target, and so need the head."""

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        causal: bool | Tensor,
        target_positions: Tensor | None = None,
        dropout: DropoutKeys | None = None,
        sizes: VarlenSizes | None = None,
    ) -> Tensor:
        """Logits [N, V] at target_positions, int64 [N] flat indices into B * T; [B, T, V] at all positions if None.

        sizes: of the batch, known on the host, for kernels that would have to ask the device. The other arguments are
        those of `encode`. With no target at all (N = 0) the result must still depend on every parameter.
        """
        hidden = self.encode(input_ids, document_ids, causal, dropout)
        if target_positions is not None:
            hidden = hidden.flatten(0, 1).index_select(0, target_positions)
        return self.predict(hidden)

    def num_parameters(self) -> int:
        """Number of trainable scalars; a table that embedding and head share counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def role_of(self, name: str) -> str:
        """The role of a parameter by its name; "other" where `roles` has none for it."""
        return next((role for part, role in self.roles.items() if part in name), "other")

    def hidden_matrices(self) -> dict[nn.Parameter, int]:
        """The matrices of hidden layers, which Muon updates, with how many projections each holds: those of modules in
        an nn.ModuleList, as layers are."""
        found: dict[nn.Parameter, int] = {}
        for layers in self.modules():
            if isinstance(layers, nn.ModuleList):
                matrices = {name: parameter for name, parameter in layers.named_parameters() if parameter.ndim == 2}
                for name, parameter in matrices.items():
                    counts = [count for part, count in self.projections.items() if part in name]
                    found[parameter] = counts[0] if counts else 1
        return found

    def backward_order(self) -> list[nn.Parameter]:
        """All parameters in about the order in which a backward pass completes their gradients: gradient buckets are
        filled, and summed over ranks, in it. A wrong guess costs time alone."""
        return list(self.parameters())[::-1]

    def recomputed_parts(self, which: str) -> list[nn.Module]:
        """The modules whose activations --activation_checkpointing computes anew: members of nn.ModuleLists that are
        not in one another; "layer": all, "mlp": those of that role."""
        found: dict[str, nn.Module] = {}
        for name, layers in self.named_modules():  # parents before children
            if isinstance(layers, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
                parts = {f"{name}.{key}": part for key, part in layers.named_children()}
                found |= {key: part for key, part in parts.items() if which in ("layer", self.role_of(key))}
        return list(found.values())

    def compiled_parts(self) -> Iterable[nn.Module]:
        """The modules that run compiled with --compile. Modules of one class share their code: one compilation."""
        return ()
