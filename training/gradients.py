"""Data parallelism: gradients in a few flat buffers, summed over ranks while the backward pass fills the next.

With --sharding zero1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) each buffer has an owner, which alone gets its sum,
keeps moments and average of its parameters, updates them, and gives the weights to all. Buffers hold whole tensors and
are never cut into slices: so an update is computed as without sharding, by the same kernels, whatever it needs of a
tensor: LAMB its norms, Muon the matrix.

With --sharding full (ZeRO's third stage, section 5.3 there; Zhao et al. 2023, "PyTorch FSDP") matrices of layers have
owners, too, and memory for weights and gradients on these alone: all get a layer's matrices before it computes, and
what a micro-batch's backward pass gives is added to the owner's gradients at once. PyTorch's fully_shard is not used:
it cuts every tensor into slices, of which LAMB, Muon, the kernels and checkpoints would each need the whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from model_protocol import PretrainingModel
from training.distributed import World, now

BUCKET_BYTES = 32 * 2**20  # about a layer of base; each is a message of its own
_SUM = "all_reduce of gradients"
_WEIGHTS = "broadcast of weights"
_OWNED = 4  # buckets a rank has with zero1, if tensors are small enough: so that all have about as much
_ALIGNMENT = 64  # elements between beginnings of gradients: 256 bytes, so that kernels read whole vectors


@dataclass(frozen=True)
class _Bucket:
    gradients: torch.Tensor  # flat: the gradients of some parameters, one after the other
    sent: torch.Tensor  # what is summed: the gradients themselves, or room for their bfloat16 copy
    parameters: int
    owner: int | None = None  # the rank that gets the sum, with zero1; None: all
    weights: torch.Tensor | None = None  # with zero1, as flat as the gradients


class GradientBuckets:
    """Gradient buckets of a model, their sums over ranks, and with zero1 their owners.

    Gradients are sums, not means: every loss is divided by global counts already. On several ranks they lie in flat
    buckets in the order of the backward pass, and a bucket is summed as soon as it is full (Li et al. 2020, "PyTorch
    Distributed", section 3.2). DistributedDataParallel does this by hooks, which a CUDA graph's replay does not call;
    a recorded backward pass has events instead that mark each bucket as full, for which the sums wait.
    """

    def __init__(
        self,
        model: PretrainingModel,
        world: World,
        allreduce_dtype: str = "float32",
        stay: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        sharded: bool = False,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        """allreduce_dtype: in which sums are taken: "float32", or "bfloat16" for half the traffic and rounded sums.
        stay: gradients keep their addresses between steps on one rank, too, by which CUDA graphs know them.
        sharded: buckets have owners (zero1), where there are several ranks; the model's weights move into them.
        layers: with `sharded`, modules whose matrices are not in buckets and have memory on their owners alone (full).
        """
        self.sharded = sharded and world.size > 1
        self._owned: set[nn.Parameter] = set()
        self._model, self.world = model, world
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._full: Callable[[_Bucket], None] | None = None  # what to do with the next full bucket
        self._next, self._missing = 0, list[int]()
        self._sums: list[dist.Work] = []
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self.filled: torch.cuda.Event | float | None = None  # when this rank's backward passes of a step ended
        self.largest_part = 1.0  # of moments and average, on the rank that has most of them
        self.layers = DividedLayers(layers if self.sharded else (), world, model)
        if world.size == 1 and not stay:
            return
        parameters = [parameter for parameter in model.backward_order() if parameter not in self.layers.matrices]
        if self.sharded:
            bucket_bytes = min(bucket_bytes, 4 * sum(map(_places, parameters)) // (_OWNED * world.size))
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in parameters:
            if 4 * sum(map(_places, groups[-1])) >= bucket_bytes:
                groups.append([])
            groups[-1].append(parameter)
        sizes = [*(sum(map(_places, group)) for group in groups), *map(_places, self.layers.matrices)]
        owners = balanced(sizes, world.size) if self.sharded else [None] * len(groups)
        for group, owner in zip(groups, owners, strict=False):
            self._add_bucket(group, allreduce_dtype == "bfloat16", owner)
        self._owned.update(self.layers.divide(owners[len(groups) :]))
        loads = [sum(size for size, of in zip(sizes, owners, strict=True) if of == rank) for rank in range(world.size)]
        self.largest_part = max(loads) / sum(sizes) if self.sharded else 1.0
        if world.size > 1:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._completed)

    def zero(self) -> None:
        """Begin a new sum over micro-steps."""
        if not self._buckets:
            self._model.zero_grad(set_to_none=True)
        for bucket in self._buckets:
            bucket.gradients.zero_()
        self.layers.zero()

    @contextmanager
    def sync(self, last: bool = True) -> Iterator[None]:
        """Inside is a backward pass; after the last of a step gradients are those of all ranks."""
        if not last or self.layers.matrices:  # next to layers' messages, buckets' have no place that ranks agree on
            self._next = 0
            yield
        else:
            with self._follow(self._send):
                yield
        self.layers.finish()
        if last:
            self._finish()

    @contextmanager
    def marked(self) -> Iterator[list[torch.cuda.Event]]:
        """Inside a backward pass is recorded; the list gets the events that say which buckets are full."""
        marks: list[torch.cuda.Event] = []

        def mark(_: _Bucket) -> None:
            marks.append(torch.cuda.Event(external=True))
            marks[-1].record()

        with self._follow(mark):
            yield marks

    def sum_replayed(self, marks: Sequence[torch.cuda.Event]) -> None:
        """After the replay of a backward pass with these `marks`, the last of a step: what `summed` does."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            for bucket, mark in zip(self._buckets, marks, strict=False):
                self._stream.wait_event(mark)
                self._send(bucket)
        self._next = len(marks)
        self._finish()

    @property
    def owned(self) -> set[nn.Parameter] | None:
        """The parameters that this rank updates and keeps moments and averages of; None: all."""
        return self._owned if self.sharded else None

    def norms(self, groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """With owners, the norm of each group's tensors on all ranks together, of which this rank gives its own."""
        zero = torch.zeros((), device=self.world.device)
        norms = torch.stack([torch.nn.utils.get_total_norm(group) if group else zero for group in groups])
        return self.world.all_reduce(norms.square(), "gradient norms").sqrt()

    def share_weights(self) -> None:
        """With owners, give all ranks the weights that they have now, where they keep them; without, nothing."""
        sent = []
        for bucket in self._buckets if self.sharded else ():
            assert bucket.weights is not None
            assert bucket.owner is not None
            with self.world.collective(_WEIGHTS):
                sent.append(dist.broadcast(bucket.weights, src=bucket.owner, async_op=True))
        for work in sent:
            with self.world.collective(_WEIGHTS):
                work.wait()
        self.layers.share()

    def _add_bucket(self, parameters: Sequence[nn.Parameter], in_bfloat16: bool, owner: int | None) -> None:
        flat = torch.zeros(sum(map(_places, parameters)), device=parameters[0].device)
        places = [_places(parameter) for parameter in parameters]
        for parameter, place in zip(parameters, flat.split(places), strict=True):
            parameter.grad = place[: parameter.numel()].view_as(parameter)
            self._bucket_of[parameter] = len(self._buckets)
        sent = torch.empty_like(flat, dtype=torch.bfloat16) if in_bfloat16 and self.world.size > 1 else flat
        weights = None
        if owner is not None:
            weights = torch.zeros_like(flat)
            for parameter, place in zip(parameters, weights.split(places), strict=True):
                parameter.data = place[: parameter.numel()].view_as(parameter).copy_(parameter.data)
        if owner == self.world.rank:
            self._owned.update(parameters)
        self._buckets.append(_Bucket(flat, sent, len(parameters), owner, weights))

    @contextmanager
    def _follow(self, full: Callable[[_Bucket], None]) -> Iterator[None]:
        self._full, self._next = full, 0
        self._missing = [bucket.parameters for bucket in self._buckets]
        try:
            yield
        finally:
            self._full = None

    def _completed(self, parameter: torch.Tensor) -> None:
        """Called by the backward pass. Buckets go off in their order alone, which is the same on all ranks."""
        if self._full is None:
            return
        assert isinstance(parameter, nn.Parameter)
        self._missing[self._bucket_of[parameter]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._full(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        if bucket.sent is not bucket.gradients:
            bucket.sent.copy_(bucket.gradients)
        with self.world.collective(_SUM):
            if bucket.owner is None:
                work = dist.all_reduce(bucket.sent, async_op=True)
            else:
                work = dist.reduce(bucket.sent, dst=bucket.owner, async_op=True)
        assert work is not None
        self._sums.append(work)

    def _finish(self) -> None:
        if self.world.size == 1:
            return
        self.filled = now(self.world.device)
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            with self.world.collective(_SUM):
                work.wait()
            if bucket.sent is not bucket.gradients and bucket.owner in (None, self.world.rank):
                bucket.gradients.copy_(bucket.sent)
        self._sums.clear()


@dataclass(eq=False)
class _Layer:
    """matrices: with their owners. before, after: in a forward pass, once there was one. arriving: matrices of other
    owners; None where this rank has but its own. missing: gradients that its backward pass still has to complete."""

    module: nn.Module
    matrices: dict[nn.Parameter, int]
    before: _Layer | None = None
    after: _Layer | None = None
    arriving: list[dist.Work] | None = None
    missing: int = 0


class DividedLayers:
    """Modules whose matrices have memory on their owners alone, but while the module computes (--sharding full).

    The first pass shows which module comes before and after each; the matrices of those then come while it computes.
    All ranks run the same modules, and as many micro-batches. What autograd and compiled code keep of a matrix shares
    its storage, which is emptied and filled again behind them. Vectors, and what several modules hold, stay in buckets.
    """

    def __init__(self, modules: Sequence[nn.Module], world: World, model: nn.Module) -> None:
        self.world, self.modules = world, list(modules)
        holders = Counter(each for module in model.modules() for each in module.parameters(recurse=False))
        own = [[p for p in module.parameters() if p.ndim > 1 and holders[p] == 1] for module in self.modules]
        self._layers = [_Layer(module, dict.fromkeys(of, 0)) for module, of in zip(self.modules, own, strict=True)]
        self.matrices = {parameter: layer for layer in self._layers for parameter in layer.matrices}
        self._last: _Layer | None = None  # that a forward pass has run
        self._first: _Layer | None = None
        self._sent: deque[tuple[_Layer, list[dist.Work]]] = deque()
        self._whole, self._alone = False, False

    def divide(self, owners: Sequence[int | None]) -> set[nn.Parameter]:
        """Leave this rank the memory of its own matrices, which are returned. owners: of all `matrices`."""
        for (parameter, layer), owner in zip(self.matrices.items(), owners, strict=True):
            assert owner is not None
            layer.matrices[parameter] = owner
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)  # a storage of its own
            parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self._completed)
        for layer in self._layers:
            self._make_room(self._of_others(layer), False)
            self._make_room(self._of_others(layer, gradients=True), False)
        return {parameter for parameter, layer in self.matrices.items() if layer.matrices[parameter] == self.world.rank}

    def attach(self) -> None:
        """Have the modules' forward passes ask for their matrices; after all else has taken hold of `forward`."""
        for layer in self._layers:
            layer.module.forward = partial(self._run, layer, layer.module.forward)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All ranks have all matrices inside, where they may run the model as each likes."""
        for layer in self._layers:
            self._fetch(layer)
        for layer in self._layers:
            self._await(layer)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for layer in self._layers:
                self._release(layer)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Ranks exchange nothing inside: matrices of others are zeros, and gradients are lost."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def share(self) -> None:
        """Inside of `whole`, give all ranks the weights that their owners have now."""
        for layer in self._layers if self._whole else ():
            layer.arriving = None
            self._fetch(layer)
            self._await(layer)

    def finish(self) -> None:
        """After a backward pass: owners have the sums of all gradients, and the others none."""
        for layer in self._layers:
            if layer.missing:  # some of its matrices were not used
                self._send(layer)
        while self._sent:
            self._receive()

    def zero(self) -> None:
        """Begin a new sum, after whatever has happened."""
        self._sent.clear()
        for layer in self._layers:
            layer.missing = 0
            self._release(layer)
            self._make_room(self._of_others(layer, gradients=True), False)
            for parameter, owner in layer.matrices.items():
                if owner == self.world.rank and parameter.grad is not None:
                    parameter.grad.zero_()

    def _run(self, layer: _Layer, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The forward pass of a module."""
        if self._whole:
            return forward(*arguments, **named)
        self._first = self._first or layer
        if self._last is not None and layer is not self._first:
            self._last.after, layer.before = layer, self._last
        self._last = layer
        self._fetch(layer)
        if layer.after is not None:
            self._fetch(layer.after)
        self._await(layer)
        result = forward(*arguments, **named)
        outputs = [each for each in (result if isinstance(result, tuple) else (result,)) if each.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, partial(self._begin_backward, layer), mode="any")
        self._release(layer)
        return result

    def _begin_backward(self, layer: _Layer, _: torch.Tensor) -> None:
        """Called by the backward pass once it comes to a module. Gradients of different modules never interleave:
        autograd takes operations strictly from the last to the first."""
        self._fetch(layer)
        if layer.before is not None:
            self._fetch(layer.before)
        self._await(layer)
        if not layer.missing:
            layer.missing = len(layer.matrices)
            self._make_room(self._of_others(layer, gradients=True), True)

    def _completed(self, parameter: torch.Tensor) -> None:
        """Called by the backward pass."""
        assert isinstance(parameter, nn.Parameter)
        layer = self.matrices[parameter]
        layer.missing -= 1
        if not layer.missing:
            self._send(layer)

    def _send(self, layer: _Layer) -> None:
        """Begin to add its gradients to those of the owners, who have earlier micro-batches' in the same place."""
        layer.missing = 0
        self._release(layer)
        works = []
        for parameter, owner in layer.matrices.items() if not self._alone else ():
            assert parameter.grad is not None
            with self.world.collective(_SUM):
                works.append(dist.reduce(parameter.grad, dst=owner, async_op=True))
        self._sent.append((layer, works))
        if len(self._sent) > 1:  # no more than two modules' gradients take memory
            self._receive()

    def _receive(self) -> None:
        layer, works = self._sent.popleft()
        for work in works:
            with self.world.collective(_SUM):
                work.wait()
        self._make_room(self._of_others(layer, gradients=True), False)

    def _fetch(self, layer: _Layer) -> None:
        """Begin to give all ranks a module's matrices."""
        if layer.arriving is not None:
            return
        self._make_room(self._of_others(layer), True)
        layer.arriving = []
        for parameter, owner in layer.matrices.items() if not self._alone else ():
            with self.world.collective(_WEIGHTS):
                work = dist.broadcast(parameter.data, src=owner, async_op=True)
            assert work is not None
            layer.arriving.append(work)

    def _await(self, layer: _Layer) -> None:
        assert layer.arriving is not None
        for work in layer.arriving:
            with self.world.collective(_WEIGHTS):
                work.wait()
        layer.arriving.clear()

    def _release(self, layer: _Layer) -> None:
        if layer.arriving is not None:
            self._await(layer)
            layer.arriving = None
            self._make_room(self._of_others(layer), False)

    def _of_others(self, layer: _Layer, gradients: bool = False) -> list[torch.Tensor]:
        others = [parameter for parameter, owner in layer.matrices.items() if owner != self.world.rank]
        return (
            [parameter.grad for parameter in others if parameter.grad is not None]
            if gradients
            else [parameter.data for parameter in others]
        )

    def _make_room(self, tensors: list[torch.Tensor], there: bool) -> None:
        """Give tensors memory, of zeros, or take it."""
        for tensor in tensors:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if there else 0)
            if there:
                tensor.zero_()


def balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """An owner for each of `sizes`, so that ranks have about as much: the largest first, to whom has least."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def _places(parameter: nn.Parameter) -> int:
    """Elements that a gradient takes in a bucket."""
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
