"""Data parallelism: gradients in a few flat buffers, summed over ranks while the backward pass fills the next.

With --sharding zero1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) each buffer has an owner, which alone gets its sum,
keeps moments and average of its parameters, updates them, and gives the weights to all. Buffers hold whole tensors: so
an update is computed as without sharding, whatever it needs of a tensor: LAMB its norms, Muon the matrix.

With --sharding full (ZeRO's third stage, section 5.3 there; Zhao et al. 2023, "PyTorch FSDP") matrices of layers have
owners, too, and memory on these alone: all get a layer's matrices before it computes, and what a micro-batch's backward
pass gives is added to the owner's gradients at once. PyTorch's fully_shard cuts tensors into slices, of which LAMB,
Muon, the kernels and checkpoints would each need the whole. Groups of ranks may have a copy of the state each ("PyTorch
FSDP", section 3.2.2), whose owners add up what they have once a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from model_protocol import PretrainingModel
from training.distributed import Mesh, World, now

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

    Gradients are sums, not means: every loss is divided by global counts already. On several ranks they lie in buckets
    in the order of the backward pass, each summed as soon as it is full (Li et al. 2020, "PyTorch Distributed", section
    3.2). DistributedDataParallel's hooks are not called by a CUDA graph's replay: a recorded backward pass has events.
    """

    def __init__(
        self,
        model: PretrainingModel,
        world: World,
        allreduce_dtype: str = "float32",
        stay: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        mesh: Mesh | None = None,
        layers: Sequence[nn.Module] = (),
        in_bfloat16: bool = False,
    ) -> None:
        """allreduce_dtype: in which sums are taken: "float32", or "bfloat16" for half the traffic and rounded sums.
        stay: gradients keep their addresses between steps on one rank, too, by which CUDA graphs know them.
        mesh: buckets have owners (zero1), where there are several ranks; the model's weights move into them.
        layers: with a mesh, modules whose matrices are not in buckets and have memory on their owners alone (full).
        in_bfloat16: these compute with `nn.Linear` under autocast alone, so that its weights may travel rounded.
        """
        self.sharded = mesh is not None and world.size > 1
        self.mesh = mesh = mesh or Mesh(world.size, world.rank)
        self._model, self.world, self._owned = model, world, set[nn.Parameter]()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._full: Callable[[_Bucket], None] | None = None  # what to do with the next full bucket
        self._next, self._missing = 0, list[int]()
        self._sums: list[dist.Work] = []
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self.filled: torch.cuda.Event | float | None = None  # when this rank's backward passes of a step ended
        self.largest_part = 1.0  # of moments and average, on the rank that has most of them
        self.layers = DividedLayers(layers if self.sharded else (), world, mesh, model, in_bfloat16)
        if world.size == 1 and not stay:
            return
        parameters = [parameter for parameter in model.backward_order() if parameter not in self.layers.matrices]
        if self.sharded:
            bucket_bytes = min(bucket_bytes, 4 * sum(map(_places, parameters)) // (_OWNED * mesh.size))
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in parameters:
            if 4 * sum(map(_places, groups[-1])) >= bucket_bytes:
                groups.append([])
            groups[-1].append(parameter)
        sizes = [*(sum(map(_places, group)) for group in groups), *map(_places, self.layers.matrices)]
        owners, self.largest_part = mesh.share_out(sizes) if self.sharded else ([None] * len(groups), 1.0)
        for group, owner in zip(groups, owners, strict=False):
            self._add_bucket(group, allreduce_dtype == "bfloat16", owner)
        self._owned.update(self.layers.divide(owners[len(groups) :]))
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
        self.layers.last = last
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
        counts = self.world.rank < self.mesh.size  # a copy adds zeros, and what is not finite
        return self.world.all_reduce(norms.square() * counts, "gradient norms").sqrt()

    def share_weights(self) -> None:
        """With owners, give all ranks the weights that they have now, where they keep them; without, nothing."""
        sent = []
        for bucket in self._buckets:
            if bucket.weights is not None:
                with self.world.collective(_WEIGHTS):
                    sent.append(dist.broadcast(bucket.weights, None, self.mesh.group, True, group_src=bucket.owner))
        _wait(self.world, sent, _WEIGHTS)
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
        if owner == self.mesh.position:
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
                work = dist.reduce(bucket.sent, None, group=self.mesh.group, async_op=True, group_dst=bucket.owner)
        assert work is not None
        self._sums.append(work)

    def _finish(self) -> None:
        if self.world.size == 1:
            return
        self.filled = now(self.world.device)
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            _wait(self.world, [work], _SUM)
            if bucket.owner == self.mesh.position and self.mesh.copies > 1:
                with self.world.collective(_SUM):
                    dist.all_reduce(bucket.sent, group=self.mesh.replicas)
            if bucket.sent is not bucket.gradients and bucket.owner in (None, self.mesh.position):
                bucket.gradients.copy_(bucket.sent)
        self._sums.clear()


@dataclass(eq=False)
class _Layer:
    """matrices: with owners. before, after: in a forward pass, once there was one. arriving: matrices and what is sent
    of them; None where this rank has but its own. missing: gradients that its backward pass has to complete."""

    module: nn.Module
    matrices: dict[nn.Parameter, int]
    own: list[nn.Parameter] = field(default_factory=list)
    others: list[nn.Parameter] = field(default_factory=list)
    before: _Layer | None = None
    after: _Layer | None = None
    arriving: list[tuple[nn.Parameter, torch.Tensor, dist.Work | None]] | None = None
    missing: int = 0


class DividedLayers:
    """Modules whose matrices have memory on their owners alone, but while the module computes (--sharding full).

    The first pass shows which module comes before and after each; the matrices of those then come while it computes.
    All ranks run the same modules, and as many micro-batches. What autograd and compiled code keep of a matrix shares
    its storage, which is emptied and filled again behind them. Vectors, and what several modules hold, stay in buckets.
    """

    def __init__(self, modules: Sequence[nn.Module], world: World, mesh: Mesh, model: nn.Module, rounds: bool) -> None:
        self.world, self._mesh, self.modules = world, mesh, list(modules)
        holders = Counter(each for module in model.modules() for each in module.parameters(recurse=False))
        own = [[p for p in module.parameters() if p.ndim > 1 and holders[p] == 1] for module in self.modules]
        self._layers = [_Layer(module, dict.fromkeys(of, 0)) for module, of in zip(self.modules, own, strict=True)]
        self.matrices = {parameter: layer for layer in self._layers for parameter in layer.matrices}
        linear = (each for module in self.modules for each in module.modules() if isinstance(each, nn.Linear))
        self._rounded = {each.weight for each in linear} if rounds else set[nn.Parameter]()
        self._last: _Layer | None = None  # that a forward pass has run
        self._first: _Layer | None = None
        self._sent: deque[tuple[_Layer, list[dist.Work]]] = deque()
        self._sums: dict[_Layer, list[dist.Work]] = {}  # of owners' gradients over the copies of the state
        self._whole, self._alone, self.last = False, False, False  # last: the backward pass is that of a step

    def divide(self, owners: Sequence[int | None]) -> set[nn.Parameter]:
        """Leave this rank the memory of its own matrices, which are returned. owners: of all `matrices`."""
        for (parameter, layer), owner in zip(self.matrices.items(), owners, strict=True):
            assert owner is not None
            layer.matrices[parameter] = owner
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)  # a storage of its own
            parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self._completed)
            (layer.own if owner == self._mesh.position else layer.others).append(parameter)
            if owner != self._mesh.position:
                _resize([parameter.data, parameter.grad], False)
        return {parameter for layer in self._layers for parameter in layer.own}

    def attach(self) -> None:
        """Have the modules' forward passes ask for their matrices; after all else has taken hold of `forward`."""
        for layer in self._layers:
            layer.module.forward = partial(self._run, layer, layer.module.forward)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All ranks have all matrices inside, where they may run the model as each likes."""
        self._whole = True
        try:
            self.share()
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
        for layer in (each for each in self._layers if each.missing):  # some of its matrices were not used
            self._send(layer)
        while self._sent:
            self._receive()
        for layer in self._layers if self.last else ():
            self._sum_copies(layer)
        _wait(self.world, [work for works in self._sums.values() for work in works], _SUM)
        self._sums.clear()

    def zero(self) -> None:
        """Begin a new sum, after whatever has happened."""
        self._sent.clear()
        for layer in self._layers:
            layer.missing = 0
            self._release(layer)
            _resize(_gradients(layer.others), False)
            if layer.own:
                torch._foreach_zero_(_gradients(layer.own))

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
            _resize(_gradients(layer.others), True, zeros=True)

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
        gradients = zip(_gradients([*layer.matrices]), layer.matrices.values(), strict=True)
        for gradient, owner in gradients if not self._alone else ():
            with self.world.collective(_SUM):
                works.append(dist.reduce(gradient, None, group=self._mesh.group, async_op=True, group_dst=owner))
        self._sent.append((layer, works))
        if len(self._sent) > 1:  # no more than two modules' gradients take memory
            self._receive()

    def _receive(self) -> None:
        layer, works = self._sent.popleft()
        _wait(self.world, works, _SUM)
        _resize(_gradients(layer.others), False)
        if self.last:
            self._sum_copies(layer)

    def _sum_copies(self, layer: _Layer) -> None:
        """Begin to add up owners' gradients, complete in each copy of the state, over the copies."""
        if self._mesh.copies > 1 and layer not in self._sums:
            self._sums[layer] = sums = []
            for gradient in _gradients(layer.own):
                with self.world.collective(_SUM):
                    sums.append(dist.all_reduce(gradient, group=self._mesh.replicas, async_op=True))

    def _fetch(self, layer: _Layer) -> None:
        """Begin to give all ranks a module's matrices."""
        if layer.arriving is not None:
            return
        _resize([parameter.data for parameter in layer.others], True, zeros=self._alone)
        layer.arriving = []
        for parameter, owner in layer.matrices.items() if not self._alone else ():
            message = parameter.data
            if parameter in self._rounded and not self._whole:  # as autocast rounds it anyway
                own = owner == self._mesh.position
                message = message.bfloat16() if own else torch.empty_like(message, dtype=torch.bfloat16)
            with self.world.collective(_WEIGHTS):
                work = dist.broadcast(message, None, self._mesh.group, True, group_src=owner)
            layer.arriving.append((parameter, message, work))

    def _await(self, layer: _Layer) -> None:
        assert layer.arriving is not None
        for parameter, message, work in layer.arriving:
            _wait(self.world, [work], _WEIGHTS)
            if message.dtype != parameter.dtype and layer.matrices[parameter] != self._mesh.position:
                parameter.data.copy_(message)
        layer.arriving.clear()

    def _release(self, layer: _Layer) -> None:
        if layer.arriving is not None:
            self._await(layer)
            layer.arriving = None
            _resize([parameter.data for parameter in layer.others], False)


def _wait(world: World, works: Sequence[dist.Work | None], name: str) -> None:
    for work in works:
        assert work is not None
        with world.collective(name):
            work.wait()


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _resize(tensors: Sequence[torch.Tensor], there: bool, zeros: bool = False) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if there else 0)
        if zeros:
            tensor.zero_()


def _places(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT  # elements that a gradient takes in a bucket
