"""Data parallelism: gradients in a few flat buffers, summed over ranks while the backward pass fills the next.

With --sharding zero1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) each buffer has an owner, which alone gets its sum,
keeps moments and average of its parameters, updates them, and gives the weights to all. Buffers hold whole tensors and
are never cut into slices: so an update is computed as without sharding, by the same kernels, whatever it needs of a
tensor: LAMB its norms, Muon the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

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
    ) -> None:
        """allreduce_dtype: in which sums are taken: "float32", or "bfloat16" for half the traffic and rounded sums.
        stay: gradients keep their addresses between steps on one rank, too, by which CUDA graphs know them.
        sharded: buckets have owners (zero1), where there are several ranks; the model's weights move into them.
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
        if world.size == 1 and not stay:
            return
        parameters = model.backward_order()
        if self.sharded:
            bucket_bytes = min(bucket_bytes, 4 * sum(map(_places, parameters)) // (_OWNED * world.size))
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in parameters:
            if 4 * sum(map(_places, groups[-1])) >= bucket_bytes:
                groups.append([])
            groups[-1].append(parameter)
        sizes = [sum(map(_places, group)) for group in groups]
        owners = balanced(sizes, world.size) if self.sharded else [None] * len(groups)
        for group, owner in zip(groups, owners, strict=True):
            self._add_bucket(group, allreduce_dtype == "bfloat16", owner)
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

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Inside is the last backward pass of a step; afterwards gradients are those of all ranks."""
        with self._follow(self._send):
            yield
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
        """With owners, give all ranks the weights that they have now; without, nothing."""
        sent = []
        for bucket in self._buckets if self.sharded else ():
            assert bucket.weights is not None
            assert bucket.owner is not None
            with self.world.collective(_WEIGHTS):
                sent.append(dist.broadcast(bucket.weights, src=bucket.owner, async_op=True))
        for work in sent:
            with self.world.collective(_WEIGHTS):
                work.wait()

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
