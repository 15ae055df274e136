"""Data parallelism: gradients in a few flat buffers, summed over ranks while the backward pass fills the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from model_protocol import PretrainingModel
from training.distributed import World
from training.rank_checks import check_same_model

BUCKET_BYTES = 32 * 2**20  # about a layer of base; each is a message of its own
_SUM = "all_reduce of gradients"
_ALIGNMENT = 64  # elements between beginnings of gradients: 256 bytes, so that kernels read whole vectors


def broadcast_parameters(model: nn.Module, world: World) -> None:
    """Give rank 0's weights to all ranks: the seed's random numbers may differ in the last bit from host to host.

    Raises ConfigError on all ranks where a rank has another model.
    """
    if world.size == 1:
        return
    check_same_model(model, world)
    with world.collective("broadcast of parameters"):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


@dataclass(frozen=True)
class _Bucket:
    gradients: torch.Tensor  # flat: the gradients of some parameters, one after the other
    sent: torch.Tensor  # what is summed: the gradients themselves, or room for their bfloat16 copy
    parameters: int


class GradientBuckets:
    """Gradient buckets of a model, and their sums over ranks.

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
    ) -> None:
        """allreduce_dtype: in which sums are taken: "float32", or "bfloat16" for half the traffic and rounded sums.
        stay: gradients keep their addresses between steps on one rank, too, by which CUDA graphs know them.
        """
        self._model, self._world = model, world
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._full: Callable[[_Bucket], None] | None = None  # what to do with the next full bucket
        self._next, self._missing = 0, list[int]()
        self._sums: list[dist.Work] = []
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        if world.size == 1 and not stay:
            return
        group: list[nn.Parameter] = []
        parameters = model.backward_order()
        for number, parameter in enumerate(parameters):
            group.append(parameter)
            if number + 1 == len(parameters) or 4 * sum(map(_places, group)) >= bucket_bytes:
                self._add_bucket(group, allreduce_dtype == "bfloat16")
                group = []
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

    def _add_bucket(self, parameters: Sequence[nn.Parameter], in_bfloat16: bool) -> None:
        flat = torch.zeros(sum(map(_places, parameters)), device=parameters[0].device)
        for parameter, place in zip(parameters, flat.split([_places(p) for p in parameters]), strict=True):
            parameter.grad = place[: parameter.numel()].view_as(parameter)
            self._bucket_of[parameter] = len(self._buckets)
        sent = torch.empty_like(flat, dtype=torch.bfloat16) if in_bfloat16 and self._world.size > 1 else flat
        self._buckets.append(_Bucket(flat, sent, len(parameters)))

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
        with self._world.collective(_SUM):
            work = dist.all_reduce(bucket.sent, async_op=True)
        assert work is not None
        self._sums.append(work)

    def _finish(self) -> None:
        if self._world.size == 1:
            return
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            with self._world.collective(_SUM):
                work.wait()
            if bucket.sent is not bucket.gradients:
                bucket.gradients.copy_(bucket.sent)
        self._sums.clear()


def _places(parameter: nn.Parameter) -> int:
    """Elements that a gradient takes in a bucket."""
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
