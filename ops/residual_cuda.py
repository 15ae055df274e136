"""CUDA kernels of the residual stream, forward and backward; the reference is in ops/residual.py.

One kernel between two sublayers does dropout, residual sum, weighted sum over depth and layer norm, reading each state
once (ops/cuda/residual_stream.cu, compiled at run time by NVRTC, see ops/nvrtc.py). The stream is float32, as under
autocast without these kernels; states, updates and what sublayers read are bfloat16. Deterministic, and nothing waits
for the device, except the first call for a width and depth, which compiles or loads.

Backwards, with the names of ops/depth_average.py, h_m has the gradient sum_{k >= m-1} alpha_k[m] dx_{k+1}. All these dx
are known once the backward pass reaches sublayer m - 1, since each later x depends on the ones before. So the kernel of
sublayer k keeps dx_{k+1}, and sums those from k on once, in registers, rather than add each dx to the gradients of all
states before it. What alphas need, the products of all dx with all h, is one small matrix product at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.depth_average import refuse_second_derivative
from ops.dropout import DropoutStates, keep_scale, kept_from
from ops.nvrtc import FLOAT, INT32, INT64, POINTER, Module, Params, aligned, fields

_SOURCE = Path(__file__).parent / "cuda" / "residual_stream.cu"
_MAX_STATES = 64
_THREADS = 64  # of a block; a warp does a token
_PRODUCT_THREADS, _PRODUCT_WARPS = 256, 8
_MAX_WIDTH = 2048
_MAX_GROUP = 4  # sums over depth that a kernel can compute together


class FusedResidualStream:
    """As ops.residual.ResidualStream, for embeddings where `available` says so."""

    def __init__(self, embeddings: Tensor, eps: float, sublayers: int, alphas: Sequence[Tensor] | None = None) -> None:
        """sublayers: how many will follow. The rest as in ResidualStream."""
        self._history = _History(embeddings, eps, sublayers, alphas)
        self._sublayer = 0
        self.x, self._normalised = _Begin.apply(self._history, embeddings, *(alphas or ()))

    def normalised(self) -> Tensor:
        """Layer norm of x without weights, bfloat16 [B, T, D]; not defined after the last sublayer."""
        return self._normalised

    def add(self, update: Tensor, p: float, states: DropoutStates | None, site: int) -> None:
        """As in ResidualStream."""
        drops = None if states is None or p == 0 else (states.tokens, states.columns, p, site)
        self.x, self._normalised = _Next.apply(self._history, self._sublayer, drops, self.x, update)
        self._sublayer += 1


def obstacle(device: torch.device, width: int, sublayers: int) -> str:
    """Why a device cannot run the kernels for these sizes; "" where it can. Compiles nothing."""
    if problem := nvrtc.obstacle(device):
        return problem
    if width % 128 or width > _MAX_WIDTH:
        return f"hidden_size is {width} and not a multiple of 128 up to {_MAX_WIDTH}"
    if sublayers >= _MAX_STATES:
        return f"num_hidden_layers is {sublayers // 2}, above {(_MAX_STATES - 1) // 2}"
    return ""


@cache
def available(device: torch.device, width: int, sublayers: int) -> bool:
    """Whether the kernels run there: no obstacle, compiled and loaded.

    Warns where they should run but cannot be compiled or loaded.
    """
    consequence = "the residual stream runs without its CUDA kernels, slower"
    return not obstacle(device, width, sublayers) and nvrtc.loads(
        lambda: _module(nvrtc.number_of(device), width, sublayers), consequence
    )


@cache
def _module(device: int, width: int, sublayers: int) -> Module:
    defined = {"WIDTH": width, "SUBLAYERS": sublayers, "GROUP": _group(width), "THREADS": _THREADS}
    return Module(_SOURCE, [f"-D{name}={value}" for name, value in defined.items()], device)


def _group(width: int) -> int:
    """How many sums over depth are computed together at times: what was fastest, where registers suffice."""
    return 3 if width <= 1024 else 1


class _History:
    """What the steps of one forward pass share. Plain tensors, so that nothing here keeps alive the graph that refers
    to it: states h_m, and during a backward pass the gradients dx_{k+1}; bfloat16 [B, T, D] each."""

    def __init__(self, embeddings: Tensor, eps: float, sublayers: int, alphas: Sequence[Tensor] | None) -> None:
        self.shape, self.eps, self.sublayers, self.group = embeddings.shape, eps, sublayers, _group(embeddings.size(-1))
        self.alphas = None if alphas is None else torch.cat([alpha.detach().float() for alpha in alphas])
        self.states: list[Tensor] = []
        self.gradients: list[Tensor | None] = [None] * sublayers
        # Sums over depth for the next sublayers, float32 [B, T, D] each, as far as their terms are known: forwards over
        # states[:partial_upto], backwards over gradients[partial_upto:].
        self.partial_sums: list[Tensor] = []
        self.partial_upto = 0

    def params(self, sublayer: int, drops: _Drops | None) -> _Params:
        """What the kernels of a sublayer are given in both directions."""
        params = _Params(alphas=self.alphas, n_tokens=self.shape[:-1].numel(), sublayer=sublayer, eps=self.eps)
        if drops is not None:
            tokens, columns, p, site = drops
            params.set(tokens=tokens, columns=columns, threshold=kept_from(p), keep_scale=keep_scale(p), site=site)
        return params

    def launch(self, device: torch.device, name: str, params: _Params) -> None:
        """Queue a kernel in which a warp does a token."""
        blocks = -(-params.n_tokens // (_THREADS // 32))
        _module(device.index, self.shape[-1], self.sublayers).launch(name, blocks, _THREADS, params)

    def forward_kernel(
        self, sublayer: int, drops: _Drops | None, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """New stream, its layer norm, and 1 / its standard deviation [B, T] (both None after the last sublayer)."""
        params, name = self.params(sublayer, drops), "residual_forward"
        params.set(x=x, update=update)
        if self.alphas is not None:
            first = self.partial_upto if self.partial_sums else 0  # the states before it are in the partial sum
            begun = self.partial_sums.pop(0) if self.partial_sums else None
            params.set(states=self.states[first:], begun=begun, first=first, count=len(self.states) - first)
            self.states.append(x.new_empty(self.shape, dtype=torch.bfloat16))
            params.set(state=self.states[-1])  # written by this kernel, which has its value in registers
            if sublayer > 0 and sublayer % self.group == 0 and self.group > 1:
                steps = min(self.group, self.sublayers - sublayer) - 1
                name = self.start_partial_sums(params, name, x, steps, len(self.states))
        out = x if update is None else torch.empty_like(x)
        normalised = deviation = None
        if sublayer < self.sublayers - 1:
            normalised = x.new_empty(self.shape, dtype=torch.bfloat16)
            deviation = x.new_empty(self.shape[:-1])
        params.set(out=None if update is None else out, normalised=normalised, deviation=deviation)
        self.launch(x.device, name, params)
        return out, normalised, deviation

    def start_partial_sums(self, params: _Params, name: str, like: Tensor, steps: int, upto: int) -> str:
        """Let a kernel add up what it reads for the next `steps` sublayers, too; returns the kernel's name that can."""
        if steps > 0:
            self.partial_sums, self.partial_upto = [torch.empty_like(like) for _ in range(steps)], upto
            params.set(ahead=self.partial_sums, n_ahead=steps)
        return f"{name}_ahead" if steps > 0 else name

    def backward_kernel(
        self,
        sublayer: int,
        drops: _Drops | None,
        gradients: tuple[Tensor | None, Tensor | None],
        saved: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of x and of the update from those of the new stream and its layer norm, and what was saved."""
        like = next(gradient for gradient in gradients if gradient is not None)
        dx = torch.empty(self.shape, dtype=torch.float32, device=like.device)
        params, name = self.params(sublayer, drops), "residual_backward"
        if gradients[0] is not None:
            params.set(x=aligned(gradients[0].float()))
        if gradients[1] is not None:
            dnormalised = aligned(gradients[1].to(torch.bfloat16))
            params.set(dnormalised=dnormalised, normalised=saved[0], deviation=saved[1])
        dupdate = None
        if self.alphas is not None:
            passed = self.sublayers - 1 - sublayer  # sublayers whose backward pass is done
            if passed == 0:
                self.partial_sums = []  # of a backward pass that ended early
            later = self.gradients[sublayer + 1 : self.partial_upto if self.partial_sums else None]
            begun = self.partial_sums.pop(0) if self.partial_sums else None
            params.set(gradients=_all(later), begun=begun, first=sublayer + 1, count=len(later))
            if passed > 0 and passed % self.group == 0 and self.group > 1:
                name = self.start_partial_sums(params, name, dx, min(self.group - 1, sublayer + 1), sublayer)
        if sublayer >= 0:  # -1: the embeddings, which no sublayer has updated
            dupdate = torch.empty(self.shape, dtype=torch.bfloat16, device=like.device)
            if self.alphas is not None:
                self.gradients[sublayer] = torch.empty_like(dupdate)
                params.set(state=self.gradients[sublayer])
        params.set(out=dx, dupdate=dupdate)
        self.launch(like.device, name, params)
        return dx, dupdate

    def products(self, device: torch.device) -> list[Tensor]:
        """Gradients of all alphas: <dx_{k+1}, h_m> for m <= k + 1, float32 [k + 2] for each sublayer k."""
        blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        # [n, n + 1] in whole tiles of mma.m16n8k16; each warp adds up its tokens in a matrix of its own.
        rows, columns = -(-self.sublayers // 16) * 16, -(-(self.sublayers + 1) // 8) * 8
        parts = torch.empty(blocks * _PRODUCT_WARPS, rows, columns, device=device)
        params = self.params(-1, None)
        params.set(states=self.states, gradients=_all(self.gradients), products=parts)
        module = _module(device.index, self.shape[-1], self.sublayers)
        module.launch("residual_products", blocks * bool(self.shape.numel()), _PRODUCT_THREADS, params)
        return [row[: k + 2] for k, row in enumerate(parts.sum(0)[: self.sublayers].unbind())]


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that a backward pass has got to, which are all of them."""
    return [tensor for tensor in tensors if tensor is not None]


_Drops = tuple[Tensor, Tensor, float, int]  # states of tokens, keys of columns, probability, site


class _Begin(torch.autograd.Function):
    """Embeddings -> the stream's first value and its layer norm. The last of a backward pass."""

    @staticmethod
    def forward(ctx: Any, history: _History, embeddings: Tensor, *alphas: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x, normalised, deviation = history.forward_kernel(-1, None, aligned(embeddings.float()), None)
        ctx.history, ctx.dtype = history, embeddings.dtype
        ctx.save_for_backward(normalised, deviation)
        return x.view_as(x), normalised

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        history = ctx.history
        gradient, _ = history.backward_kernel(-1, None, gradients, ctx.saved_tensors)
        of_alphas: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if any(ctx.needs_input_grad[2:]):
            of_alphas = [*history.products(gradient.device)]
        history.gradients = [None] * history.sublayers
        return None, gradient.to(ctx.dtype), *of_alphas


class _Next(torch.autograd.Function):
    """The stream and a sublayer's output -> the stream's next value and its layer norm."""

    @staticmethod
    def forward(
        ctx: Any, history: _History, sublayer: int, drops: _Drops | None, x: Tensor, update: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        out, normalised, deviation = history.forward_kernel(sublayer, drops, x, aligned(update.to(torch.bfloat16)))
        ctx.history, ctx.sublayer, ctx.drops, ctx.dtype = history, sublayer, drops, update.dtype
        ctx.save_for_backward(normalised, deviation)
        return out, normalised

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        dx, dupdate = ctx.history.backward_kernel(ctx.sublayer, ctx.drops, gradients, ctx.saved_tensors)
        assert dupdate is not None
        return None, None, None, dx, dupdate.to(ctx.dtype)


class _Params(Params):
    """Field by field what `struct Params` in the source is."""

    _fields_ = (
        fields(POINTER, "x update tokens columns alphas state out normalised deviation dnormalised dupdate products")
        + fields(POINTER * _MAX_STATES, "states gradients")
        + fields(POINTER, "begun")
        + fields(POINTER * (_MAX_GROUP - 1), "ahead")
        + fields(INT64, "n_tokens")
        + fields(INT32, "sublayer first count n_ahead site threshold")
        + fields(FLOAT, "keep_scale eps")
    )
