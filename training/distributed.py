"""Process group and rendezvous store: collectives with a name and a timeout. One process is the degenerate case."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import DistError

from data.atomic_io import allow_open_files
from training.config import ConfigError, TrainingConfig
from training.environment import Environment, EnvironmentProblem, local_device_index, read_environment
from training.errors import HardwareError, OtherRankFailed

_Result = TypeVar("_Result")

# Beyond --collective_timeout, until the process group gives up by itself: the watchdog, which says more, comes first.
_BACKSTOP_SECONDS = 60.0
# Errors of gloo and NCCL where another process is gone, or does not answer in time
_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|socket|peer|remote process|aborted", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_DEVICE = re.compile(r"(CUDA|HIP) error")  # of this rank's own device, whatever the words that follow
# Above so many ranks gloo connects two when they first talk, which most never do: no full mesh of sockets.
_MESH_RANKS = 32
_AXIS_RANKS = 8  # along an axis of theirs, where the number of ranks has such factors


class CollectiveError(HardwareError):
    """Ranks could not talk to each other. late: some did not answer in time (otherwise: one is gone)."""

    def __init__(self, message: str, late: bool):
        super().__init__(message, secondary=not late)
        self.late = late


@dataclass
class RankProgress:
    """How far this rank has come, for training/watchdog.py, whose thread reads it.

    collectives: how many this rank has entered; whoever has fewest is the one that the others wait for. operation: the
    collective, or other wait, that it is in or was in last. waiting_since: time.monotonic() at which a wait for others
    began, None outside of one. in_step: between two agreements nothing but a step, which --step_timeout limits;
    elsewhere --collective_timeout does.
    """

    step: int = 0
    in_step: bool = False
    collectives: int = 0
    operation: str = "start-up"
    waiting_since: float | None = None

    def seconds_waited(self) -> float:
        """Seconds that it has waited for others by now; 0 where it computes."""
        since = self.waiting_since
        return 0.0 if since is None else time.monotonic() - since


class Grid:
    """Sums of small CPU tensors over many ranks, which stand in a grid: along one axis after the other.

    gloo sums around a ring, 2 (N - 1) messages one after the other; along axes of 8 ranks it takes 14 for each, so
    that 1,024 ranks wait for 44 instead of 2,046, and talk to a few neighbours.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        """To be called by all ranks, which have a process group already."""
        self._axes = [
            dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
            for ranks in axes_through(rank, size)
        ]
        self._last = torch.futures.Future()
        self._last.set_result(None)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.futures.Future:
        """Begins to reduce `tensor` in place, once what was begun before has ended: an axis must not mix up two."""
        done = torch.futures.Future()

        def along(axes: list[Any], before: torch.futures.Future) -> None:
            try:
                before.value()  # raises what went wrong
                if not axes:
                    return done.set_result(None)
                work = dist.all_reduce(tensor, op, axes[0], async_op=True)
                assert work is not None
                work.get_future().then(partial(along, axes[1:]))
            except Exception as error:  # on a thread of gloo's; whoever waits raises it
                done.set_exception(error)

        before, self._last = self._last, done
        before.then(partial(along, self._axes))
        return done


def axes_through(rank: int, size: int) -> list[list[int]]:
    """The ranks on each axis through `rank` in a grid of `size` ranks, whose sides multiply to `size`."""
    sides, left, factor = [1], size, 2
    while left > 1:
        if left % factor:
            factor += 1
            continue
        left //= factor
        if sides[-1] * factor > _AXIS_RANKS:
            sides.append(1)
        sides[-1] *= factor
    axes, stride = [], 1
    for side in sides:
        first = rank - rank // stride % side * stride
        axes.append([first + number * stride for number in range(side)])
        stride *= side
    return axes


@dataclass(frozen=True)
class Mesh:
    """Who shares state (--sharding): groups of `size` neighbouring ranks, each of which holds all of it once.

    position: of this rank in its group. copies: how many groups there are. group, replicas: the process groups of this
    rank's group, and of the ranks at its position in all groups; None: of all ranks, and of this one alone.
    """

    size: int
    position: int
    copies: int = 1
    group: Any = None
    replicas: Any = None

    def share_out(self, sizes: Sequence[int]) -> tuple[list[int], float]:
        """A position for each of `sizes`, so that all have about as much, the largest first, to whom has least; and the
        fraction that a position has at most."""
        loads, owners = [0] * self.size, [0] * len(sizes)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            owners[number] = loads.index(min(loads))
            loads[owners[number]] += sizes[number]
        return owners, max(loads) / sum(sizes)


@dataclass(frozen=True)
class World:
    """The processes of a run. `size` 1 needs no process group.

    progress: changes as this rank goes along. collective_timeout: minutes, of the process group. grid: of many ranks.
    """

    rank: int
    size: int
    device: torch.device
    environment: Environment
    progress: RankProgress = field(default_factory=RankProgress, compare=False)
    collective_timeout: float = math.inf
    grid: Grid | None = field(default=None, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def mesh(self, ranks: int) -> Mesh:
        """Groups of so many ranks, 0: one of all; to be called by all ranks. Raises ConfigError."""
        if ranks in (0, self.size) or self.size == 1:
            return Mesh(self.size, self.rank)
        if self.size % ranks:
            raise ConfigError(
                f"--sharding_ranks is {ranks}, by which {self.size} ranks cannot be divided; give the ranks of a node, "
                "or 0 for one group of all"
            )
        position, timeout = self.rank % ranks, _backstop(self.collective_timeout)
        group, replicas = (
            dist.new_group(list(members), timeout, use_local_synchronization=True)
            for members in (
                range(self.rank - position, self.rank - position + ranks),
                range(position, self.size, ranks),
            )
        )
        return Mesh(ranks, position, self.size // ranks, group, replicas)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Names the operation inside, in which this rank waits for others."""
        self.progress.operation, self.progress.waiting_since = operation, time.monotonic()
        try:
            yield
        finally:
            self.progress.waiting_since = None

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Names a collective, such as "all_reduce of losses"; a timeout or lost connection becomes a CollectiveError.

        Inside is a call of torch.distributed and nothing else: compilers and kernels time out with the same words.
        """
        self.progress.collectives += 1
        try:
            with self.waiting(name):
                yield
        except RuntimeError as error:
            text = str(error)
            if self.size == 1 or _DEVICE.match(text) or not (_LOST.search(text) or _LATE.search(text)):
                raise
            late = _LATE.search(text) is not None
            limit = f" (--collective_timeout {self.collective_timeout:g} min)" if late else ""
            what = "timed out" if late else "lost contact with another rank"
            reason = text.splitlines()[0][:300]
            raise CollectiveError(f"rank {self.rank} {what} in {name}{limit}: {reason}", late) from error

    def all_reduce(self, tensor: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place; CPU tensors go through gloo, CUDA tensors through NCCL.

        what: is summed, for messages: "losses" gives "timed out in all_reduce of losses".
        """
        if self.size > 1:
            with self.collective(f"all_reduce of {what}"):
                if self.grid is not None and tensor.device.type == "cpu":
                    self.grid.all_reduce(tensor, op).wait()
                else:
                    dist.all_reduce(tensor, op)
        return tensor

    def begin_all_reduce(self, tensor: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
        """`all_reduce` of a CPU tensor, under way beside what follows; the function waits for the sums."""
        if self.size == 1:
            return lambda: tensor
        with self.collective(f"all_reduce of {what}"):
            if self.grid is not None:
                work = self.grid.all_reduce(tensor, dist.ReduceOp.SUM)
            else:
                work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def finish() -> torch.Tensor:
            with self.collective(f"all_reduce of {what}"):
                work.wait()
            return tensor

        return finish

    def to_host(self, reduced: torch.Tensor) -> torch.Tensor:
        """A result of `all_reduce` on the host; on CUDA this is where the host waits for the other ranks."""
        with self.waiting(self.progress.operation):
            return reduced.cpu()

    def all_gather(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """Every rank's `row`, whole numbers of the same shape: [size, ...], on all ranks."""
        rows = row.new_zeros((self.size, *row.shape))
        rows[self.rank] = row  # the others add zeros to it
        return self.all_reduce(rows, what)

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value` (any small picklable object of our own making), on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective(f"all_gather of {what}"):
            dist.all_gather_object(values, value)
        return values

    def begin_all_gather(self, row: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
        """`all_gather` of a CPU tensor of any type, under way beside what follows; the function waits for the rows."""
        rows = row.new_zeros((self.size, *row.shape))
        rows[self.rank] = row
        return self.begin_all_reduce(rows, what)

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Rank 0's `value` on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        with self.collective(f"broadcast of {what}"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def on_main(world: World, function: Callable[[], _Result]) -> _Result:
    """Call `function` on rank 0 and give its result to all ranks; where it fails, every rank stops."""
    result, error = None, None
    if world.is_main:
        try:
            result = function()
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = problem
    failed, shared = world.broadcast_object((error is not None, result), "a result of rank 0")
    if error is not None:
        raise error
    if failed:
        raise OtherRankFailed
    return cast(_Result, shared)


def now(device: torch.device) -> torch.cuda.Event | float:
    """The present moment in the device's own order of events."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Seconds from one moment of `now` to a later one, for which this waits."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - begin


def choose_device(choice: str, local_rank: int = 0) -> torch.device:
    """The device for `--device auto|cuda|cpu`. Raises ConfigError where CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError("--device is 'cuda' but PyTorch sees no CUDA device; use --device cpu, or check nvidia-smi")
    if choice == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_device_index(local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def single_world(config: TrainingConfig) -> World:
    """The world of train_single_gpu.py: one process, whatever a launcher says about ranks.

    Raises ConfigError where torchrun has started several: each would train the same run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes of a program for one device: use "
            "train_multi_gpu.py, or 'python train_single_gpu.py ...' without torchrun"
        )
    return World(0, 1, choose_device(config.device), read_environment(os.environ, alone=True))


def start_world(config: TrainingConfig) -> World:
    """The world of train_multi_gpu.py, from SLURM's or torchrun's environment.

    Gradients go through NCCL (RCCL in ROCm builds of PyTorch, under the same name) where there are GPUs, and through
    gloo where there are none. Raises EnvironmentProblem, HardwareError or ConfigError, each a sentence with the remedy.
    """
    environment = read_environment(os.environ)
    if environment.launcher == "none":
        raise ConfigError(
            "train_multi_gpu.py found neither SLURM's nor torchrun's variables: start it with "
            "'srun python train_multi_gpu.py ...' in a job, with 'torchrun --nproc_per_node N train_multi_gpu.py ...' "
            "on one machine, or use train_single_gpu.py for one device"
        )
    device = choose_device(config.device, environment.local_rank)
    timeout = config.collective_timeout
    world = World(environment.rank, environment.world_size, device, environment, collective_timeout=timeout)
    if world.size > 1:
        _rendezvous(world, timeout)
        if world.size > _MESH_RANKS:
            world = replace(world, grid=Grid(world.rank, world.size, _backstop(timeout)))
        _check_devices(world)
    return world


def _backstop(timeout: float) -> timedelta:
    """The process groups' own timeout, for one of so many minutes."""
    return timedelta(minutes=timeout, seconds=_BACKSTOP_SECONDS)


def _rendezvous(world: World, timeout: float) -> None:
    """Make the process group, within `timeout` minutes. Raises HardwareError where the ranks do not find each other."""
    environment = world.environment
    if world.size > _MESH_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    allow_open_files(2 * world.size)  # as far as the hard limit goes; gloo says what it lacks
    address = f"{environment.master_addr}:{environment.master_port}"
    # Both backends in one group: gradients go through NCCL, what decides on control flow stays on the hosts.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}" if environment.launcher == "slurm" else None,
            rank=world.rank,
            world_size=world.size,
            timeout=_backstop(timeout),
        )
    except DistError as error:
        reason = str(error).splitlines()[0][:200]
        raise HardwareError(
            f"rank {world.rank} on {socket.gethostname()}: rendezvous of {world.size} ranks at {address} "
            f"(MASTER_ADDR:MASTER_PORT) failed (--collective_timeout {timeout:g} min): {reason}. If the port is taken, "
            "set MASTER_PORT to another; if hosts have several networks, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        ) from error


def _check_devices(world: World) -> None:
    """Refuse two ranks on one GPU, which they would share in silence, and a GPU beside a CPU, which wait for ever.

    Raises EnvironmentProblem on all ranks.
    """
    on_cuda = world.device.type == "cuda"
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(world.device).uuid) if on_cuda else None)
    devices = world.all_gather_objects(own, "devices")
    without = [rank for rank, (_, gpu) in enumerate(devices) if gpu is None]
    if len(without) == world.size:
        return
    if without:
        raise EnvironmentProblem(
            f"ranks {', '.join(map(str, without))} would train on the CPU ({devices[without[0]][0]}) and the others on "
            "GPUs: give each task a GPU and the same --device, or all --device cpu"
        )
    tasks = Counter(devices)
    shared = [rank for rank, device in enumerate(devices) if tasks[device] > 1]
    if shared:
        raise EnvironmentProblem(
            f"ranks {', '.join(map(str, shared))} share a GPU with another rank: give each task its own, with "
            "--gpus-per-task=1 or as many tasks a node (--ntasks-per-node) as it has GPUs"
        )
