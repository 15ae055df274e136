"""Agreement of all ranks: on the run at its start, on what each knows and wants before a step, on their state at times.

Ranks that differ in a flag, file, version or switch train something that nobody asked for, or hang in a collective; so
digests of these are compared first, and these in detail only where they differ. Later every rank takes the same
reduced gradients into the same state: only a fault of a device, of memory or of the network makes ranks differ, and
nothing else would show it, since losses are reduced over ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import WEIGHT_UNITS, Loader, StepBatch
from data.objectives import run_objectives
from data.wording import ranks_text
from ops.bit_sums import bit_sums
from ops.reference import VARIABLE, reference_parts
from training.config import FIELDS, ConfigError, TrainingConfig
from training.distributed import World
from training.errors import HardwareError
from training.inputs import Inputs
from training.optimizers import named_state
from training.run_dir import git_commit, versions

if TYPE_CHECKING:
    from training.metric_logger import MetricLogger
    from training.saves import Saver
    from training.state import TrainState
    from training.stopping import StopConditions

_DATA_SECONDS = 1.0  # to wait for rows before looking whether a rank wants to stop
_PARTS = ("weights", "average", "moments")
_COPIES = "copies of the state"
_ROOT = Path(__file__).resolve().parent.parent
# Sources that a training run imports.
_CODE = ("train_*.py", "model*.py", "data/*.py", "ops/*.py", "ops/cuda/*", "training/*.py", "evaluation/*.py")
# Paths may differ from host to host: what is read there is compared instead. Only rank 0 looks for a checkpoint and
# writes the run folder, and all ranks start from its weights.
_PATHS = {name for name, spec in FIELDS.items() if spec.metadata["path"]} | {"HYBRID_KERNEL_CACHE"}


def check_same_run(inputs: Inputs, world: World, evaluate_data: str, plugins: str = "") -> None:
    """Raises ConfigError on all ranks, with the first difference, unless all ranks are about to train the same run.
    evaluate_data, plugins: the content of --evaluate_data and of the files of --plugin, "" without."""
    if world.size == 1:
        return
    flags = {f"--{name}": value for name, value in inputs.config.to_dict().items() if name not in _PATHS}
    settings = {
        **flags,
        "the data of --train_path": inputs.data_identity[:12],
        "the data of --valid_path": inputs.held_out_identity[:12] or None,
        "the data of --evaluate_data": (evaluate_data and _digest(evaluate_data.encode())) or None,
        "the content of --plugin": plugins or None,
        "the file of --tokenizer_path": _digest(inputs.tokenizer_text.encode()),
        **{f"{key} in --config_file": value for key, value in inputs.model_config.to_dict().items()},
        "the code": _code(),
        **{f"the version of {name}": version for name, version in versions().items()},
        **_switches(),
    }
    remedy = "start all ranks with the same flags, files, code, packages and HYBRID_ variables"
    require_same(settings, world, remedy, {"the code": lambda digest: f"{digest} (commit {git_commit() or 'unknown'})"})


def _switches() -> dict[str, str]:
    """HYBRID_ variables that change what runs; the parts of HYBRID_REFERENCE in one order, however they are given."""
    names = {name for name in os.environ if name.startswith("HYBRID_")} - _PATHS - {VARIABLE}
    parts = {VARIABLE: ",".join(reference_parts())} if reference_parts() else {}
    return {**{name: os.environ[name] for name in sorted(names)}, **parts}


def check_same_model(model: nn.Module, world: World) -> None:
    """Raises ConfigError on all ranks unless all have tensors of the same names and shapes."""
    shapes = {f"the shape of {name}": list(tensor.shape) for name, tensor in model.state_dict().items()}
    require_same(shapes, world, "--config_file and the code must be the same on all hosts")


def require_same(
    values: Mapping[str, Any], world: World, remedy: str, explain: Mapping[str, Callable[[Any], str]] | None = None
) -> None:
    """Raises ConfigError on all ranks where one has other `values` (for JSON, by name) than rank 0.

    The message names the ranks and the first difference with both values. explain: functions that describe a value,
    called where ranks differ.
    """
    if world.size == 1:
        return
    digest = torch.tensor(list(hashlib.sha256(json.dumps(values).encode()).digest()))
    largest = torch.stack((digest, -digest))
    if not bool(world.all_reduce(largest, "digests of flags, data and code", dist.ReduceOp.MAX).sum(0).any()):
        return  # the largest is the smallest
    described = {name: (explain or {}).get(name, _describe)(value) for name, value in values.items()}
    everyone = world.all_gather_objects((socket.gethostname(), described), "flags, data and code")
    first_host, first = everyone[0]
    names = list(dict.fromkeys(name for _, found in everyone for name in found))
    different = [name for name in names if any(found.get(name) != first.get(name) for _, found in everyone)]
    name = different[0]
    host, value = next((host, found.get(name)) for host, found in everyone if found.get(name) != first.get(name))
    ranks = [rank for rank, (_, found) in enumerate(everyone) if found.get(name) == value]
    others = f" (different, too: {', '.join(different[1:6])}{', ...' * (len(different) > 6)})" * (len(different) > 1)
    raise ConfigError(
        f"ranks differ: {name} is {first.get(name, 'not set')} on rank 0 ({first_host}) but {value or 'not set'} on "
        f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} ({host}){others}; {remedy}"
    )


def _describe(value: Any) -> str:
    """A value in a sentence."""
    return "none" if value is None else repr(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _code() -> str:
    """A hash of the sources: unlike the commit it needs no git, and tells apart what was edited since."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in _ROOT.glob(pattern)):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


# The agreement before each step


class Agreed(NamedTuple):
    """What all ranks know before a step: what the targets of the global batch weigh together, by objective; whether any
    rank wants to stop, or a checkpoint; and whether all have their rows."""

    targets: list[float]
    stops: bool
    saves: bool
    ready: bool


def begin_agreement(
    world: World, batch: StepBatch | None, wants_stop: bool, step: int, objectives: int, wants_save: bool = False
) -> Callable[[], Agreed]:
    """Tell the others what this rank knows and wants before `step`, beside what follows; the function waits for them.

    batch: this rank's rows of global batch `step`, None where they are not ready. Summed by the hosts, in whole units.
    A target weighs 1, so that these are numbers of targets, unless RowBatch.target_weights say otherwise.
    """
    targets = [0] * objectives if batch is None else batch.target_weights.tolist()
    counts = torch.tensor([*targets, int(wants_stop), int(wants_save), int(batch is None)])
    sums = world.begin_all_reduce(counts, "target counts")

    def finish() -> Agreed:
        world.progress.step = step + 1
        *targets, stops, saves, missing = sums().tolist()
        world.progress.in_step = stops == saves == 0  # a save may take longer than a step
        return Agreed([target / WEIGHT_UNITS for target in targets], stops > 0, saves > 0, missing == 0)

    return finish


class Agreements:
    """The agreement before each step, of several ranks begun before the step before it, so that it costs no time. A
    stop, or a save, is then one step late, on all ranks."""

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        loader: Loader,
        conditions: StopConditions,
        log: MetricLogger,
        saver: Saver | None,
    ):
        self._config, self._world, self._loader = config, world, loader
        self._conditions, self._log, self._saver = conditions, log, saver
        self._ahead: Callable[[], Agreed] | None = None

    def before(self, step: int) -> Agreed:
        """That of the step to come. Raises HardwareError where its rows do not come."""
        finish, self._ahead = self._ahead or self._begin(step, _DATA_SECONDS), None
        return finish()

    def begin(self, step: int) -> None:
        """Begin that of the step after the one to come; `before` waits for it."""
        if self._world.size > 1 and step < self._config.max_steps:
            self._ahead = self._begin(step, 0.0)

    def drop(self) -> None:
        """Wait for what has begun: ranks that part leave nothing under way."""
        if self._ahead is not None:
            self._ahead()

    def _begin(self, step: int, seconds: float) -> Callable[[], Agreed]:
        batch = self._loader.peek(seconds)
        if self._loader.late > 60 * self._config.collective_timeout:
            path, late = self._config.train_path, self._loader.late
            raise HardwareError(f"no rows came from {path} for {late:.0f} s; do its disks answer?")
        problem = self._log.problem or (self._saver and self._saver.problem)
        wants_stop = self._conditions.requested(problem) is not None
        wanted = (wants_stop, step, len(run_objectives(self._config.causal_rows)))
        return begin_agreement(self._world, batch, *wanted, self._saver is not None and self._saver.due(step))


# State of all ranks


class DivergenceError(HardwareError):
    """Ranks no longer hold the same state; the message names them and what differs."""

    hint = "resume from it without that host or GPU (sbatch --exclude=HOST)"


@dataclass(frozen=True)
class RankCheck:
    """A comparison of checksums that is under way on the device. names: of all tensors, by part. own: int64 [tensors],
    this rank's checksums. digests: int64 [ranks, parts] on the host, in memory that the device fills."""

    step: int
    names: dict[str, list[str]]
    own: Tensor
    digests: Tensor

    def verify(self, world: World) -> None:
        """Raises DivergenceError on all ranks where they differ; to be called once `digests` have arrived."""
        if bool((self.digests == self.digests[0]).all()):
            return
        parts = [part for part, column in zip(self.names, self.digests.t(), strict=True) if len(column.unique()) > 1]
        odd = _minority([tuple(row) for row in self.digests.tolist()])
        everyone = world.all_gather_objects((socket.gethostname(), self.own.tolist()), "state checksums")
        names = [name for part in self.names.values() for name in part]
        differ = (
            name for name, *sums in zip(names, *(sums for _, sums in everyone), strict=True) if len(set(sums)) > 1
        )
        first = next(differ, "what each group of --sharding_ranks has of its own")
        odd_hosts = list(dict.fromkeys(everyone[rank][0] for rank in odd or range(world.size)))
        hosts = ", ".join(odd_hosts)
        what = f"{' and '.join(parts)}, first in {first}"
        if odd:
            who = f"rank{'s' * (len(odd) > 1)} {ranks_text(odd)} ({hosts}) and most others differ in {what}"
        else:
            who = f"ranks {ranks_text(range(world.size))} ({hosts}) differ in {what}, and there is no majority"
        raise DivergenceError(
            f"step {self.step}: {who}. All should hold the same bits: a device, its memory or the network is faulty",
            host=odd_hosts[0] if odd and len(odd_hosts) == 1 else "",
        )


def begin_check(state: TrainState, world: World) -> RankCheck | None:
    """Queue a comparison of what all ranks hold, with zero1 weights alone, with full those of no layer's matrices, and
    of the copies of a divided state; None for one rank. Nothing waits for the device."""
    if world.size == 1:
        return None
    mesh, divided = state.gradients.mesh, list[Tensor]()
    tensors = {
        "weights": {n: p for n, p in state.model.named_parameters() if p not in state.gradients.layers.matrices},
        "average": state.ema.state_dict()
        | {f"{n} ({name})": a for name, each in state.averages.items() for n, a in each.state_dict().items()},
        "moments": named_state(state.optimizer, state.model),
    }
    if state.gradients.sharded:
        if mesh.copies > 1:
            matrices = (p for p in state.gradients.layers.matrices if p in (state.gradients.owned or ()))
            divided = [*tensors["average"].values(), *tensors["moments"].values(), *matrices]
        tensors |= {"average": {}, "moments": {}}
    shared = [tensor for part in _PARTS for tensor in tensors[part].values()]
    # An optimizer may keep numbers on the host.
    sums = bit_sums([tensor.to(world.device) for tensor in (*shared, *divided)])
    own, of_copy = sums[: len(shared)], sums[len(shared) :].sum(0, keepdim=True)
    order = torch.arange(1, 2 * len(own), 2, device=own.device)  # odd: no flipped bit is lost, nor tensors that swap
    counts = [len(tensors[part]) for part in _PARTS]
    digests = torch.stack([part.sum() for part in (own * order).split(counts)])
    names = {part: list(tensors[part]) for part in _PARTS}
    if mesh.copies > 1:
        with world.collective("all_reduce of state checksums"):
            dist.all_reduce(of_copy, group=mesh.group)
        digests, names[_COPIES] = torch.cat((digests, of_copy)), []
    digests = world.all_gather(digests, "state checksums").to("cpu", non_blocking=True)
    return RankCheck(state.step, names, own, digests)


def check_ranks(state: TrainState, world: World) -> None:
    """The same at once. Raises DivergenceError on all ranks where they differ."""
    if (check := begin_check(state, world)) is not None:
        if world.device.type == "cuda":
            with world.waiting("all_gather of state checksums"):
                torch.cuda.current_stream(world.device).synchronize()
        check.verify(world)


def _minority(values: list[tuple[int, ...]]) -> list[int]:
    """The ranks whose value is not that of more than half of them; none where no value is."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, other in enumerate(values) if other != value] if 2 * count > len(values) else []
