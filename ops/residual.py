"""The residual stream: what sublayers read, normalised, and add to, with or without averaging over depth.

    x' = x + dropout(update)                                      LTG-BERT
    x' = the depth-weighted average that ops/depth_average.py defines     GPT-BERT

This is the plain form; ops/residual_cuda.py is its fast twin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.depth_average import BufferedAverages, PlainAverages
from ops.dropout import DropoutStates, drop_tokens


class ResidualStream:
    """The stream of one forward pass. `x`: its present value [B, T, D]."""

    def __init__(self, embeddings: Tensor, eps: float, alphas: Sequence[Tensor] | None = None) -> None:
        """embeddings [B, T, D]; eps of layer norms; alphas: for sublayer k a vector [k + 2], or None for plain sums."""
        self._eps, self._averages = eps, None
        if alphas is not None:
            form = PlainAverages if torch.compiler.is_compiling() else BufferedAverages
            self._averages = form(alphas, embeddings)
        self.x = embeddings if self._averages is None else self._averages.first()

    def normalised(self) -> Tensor:
        """Layer norm of x without weights, [B, T, D]: what the next sublayer reads."""
        return F.layer_norm(self.x, self.x.shape[-1:], eps=self._eps)

    def add(self, update: Tensor, p: float, states: DropoutStates | None, site: int) -> None:
        """Go past a sublayer with output `update` [B, T, D], of which a share p is dropped (at site, by states)."""
        update = drop_tokens(update, p, states, site)
        self.x = self.x + update if self._averages is None else self._averages.next(self.x, update)
