"""Depth-weighted averaging (DenseFormer, Pagliardini et al., 2024): after each sublayer a learned sum of all states.

    h_0 = embeddings,   h_{k+1} = x_k + sublayer_k(x_k),   x_0 = h_0,   x_{k+1} = sum_{m <= k+1} alpha_k[m] h_m

The sums of n sublayers have about n^2 / 2 terms of the size of the residual stream. Written plainly, each term costs
several passes over memory forwards and more backwards, more than all matrix products of a small model.
`BufferedAverages` keeps the states in one buffer and so reads each term once; `PlainAverages` is its reference
implementation, and the form for torch.compile, which fuses the terms by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PlainAverages:
    """The formula as it stands."""

    def __init__(self, alphas: Sequence[Tensor], embeddings: Tensor) -> None:
        """alphas: for each sublayer k a vector [k + 2]; embeddings: h_0, of any shape."""
        self._alphas = alphas
        self._states = [embeddings]

    def first(self) -> Tensor:
        """x_0."""
        return self._states[0]

    def next(self, x: Tensor, update: Tensor) -> Tensor:
        """x_{k+1} from x_k and the output of sublayer k, of one shape; to be called once for each k, in order."""
        self._states.append(x + update)
        weights = self._alphas[len(self._states) - 2].unbind()  # alpha_k, for states h_0 .. h_{k+1}
        total = self._states[0] * weights[0]
        for state, weight in zip(self._states[1:], weights[1:], strict=True):
            total = total + state * weight
        return total


class BufferedAverages:
    """The same sums and gradients as `PlainAverages`, with each sum as one matrix-vector product.

    Backwards, the gradient of h_m is sum_{k >= m-1} alpha_k[m] dx_{k+1}. All these dx are known once the backward pass
    reaches sublayer m - 1, since each later x depends on the ones before; so they are collected in a buffer too, and
    the gradient of each state is one product instead of a sum of parts that arrive one by one. There is no second
    derivative: `create_graph=True` raises RuntimeError.
    """

    def __init__(self, alphas: Sequence[Tensor], embeddings: Tensor) -> None:
        """As in PlainAverages."""
        self._alphas = alphas
        self._embeddings = embeddings
        self._history = _History(alphas, embeddings)
        self._sublayer = 0

    def first(self) -> Tensor:
        """x_0."""
        return _First.apply(self._history, self._embeddings)

    def next(self, x: Tensor, update: Tensor) -> Tensor:
        """As in PlainAverages."""
        k = self._sublayer
        self._sublayer += 1
        return _Next.apply(self._history, k, self._alphas[k], x, update)


class _History:
    """What the steps share: states [n + 1, N], gradients of the sums [n, N] during a backward pass, alphas [n, n + 1].

    Plain tensors without a graph of their own, so that nothing here keeps the graph, which refers to it, alive.
    """

    def __init__(self, alphas: Sequence[Tensor], embeddings: Tensor) -> None:
        self.states = embeddings.new_empty(len(alphas) + 1, embeddings.numel())
        self.gradients: Tensor | None = None
        # Row k is alpha_k and zeros, so column m has what each average gives to h_m.
        padded = torch.nn.utils.rnn.pad_sequence([alpha.detach() for alpha in alphas], batch_first=True)
        self.alphas = padded.to(self.states.dtype)

    def weighted(self, rows: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights[i] * rows[i], [N], in the rows' precision whatever autocast is on around."""
        with torch.autocast(rows.device.type, enabled=False):
            return torch.mv(rows.t(), weights)


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: averages over depth have no second derivative in their fast forms; set "
            "HYBRID_REFERENCE=residual and ops.residual.BufferedAverages = ops.depth_average.PlainAverages"
        )


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: _History, embeddings: Tensor) -> Tensor:
        ctx.history = history
        history.states[0].copy_(embeddings.flatten())
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        history, (gradient,) = ctx.history, gradients
        assert history.gradients is not None
        of_state = history.weighted(history.gradients, history.alphas[:, 0].contiguous())  # of h_0, in every average
        history.gradients = None  # the last use in a backward pass
        return None, gradient + of_state.view_as(gradient)


class _Next(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: _History, k: int, alpha: Tensor, x: Tensor, update: Tensor) -> Tensor:
        ctx.history, ctx.k, ctx.update_dtype = history, k, update.dtype
        torch.add(x, update, out=history.states[k + 1].view_as(x))  # h_{k+1}, straight into the buffer
        return history.weighted(history.states[: k + 2], history.alphas[k, : k + 2]).view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        history, k, (gradient,) = ctx.history, ctx.k, gradients
        if history.gradients is None:
            history.gradients = torch.empty_like(history.states[1:])
        flat = history.gradients[k].copy_(gradient.flatten())  # dx_{k+1}, [N]
        of_alpha = torch.stack([flat.dot(state) for state in history.states[: k + 2]])
        # The gradient of h_{k+1} = x_k + update, and so of both: from the averages that hold it, k and later ones.
        of_state = history.weighted(history.gradients[k:], history.alphas[k:, k + 1].contiguous()).view_as(gradient)
        return None, None, of_alpha, of_state, of_state.to(ctx.update_dtype)
