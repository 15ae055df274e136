"""Ranks on this machine, each with its own arguments, variables and faults: a helper and the ranks' program.

Runs follow one another in the same processes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path[0] = str(ROOT)

import torch  # noqa: E402 - after the path

FAULTS: dict[str, Callable[[int], contextlib.AbstractContextManager]] = {}


@dataclass(frozen=True)
class Run:
    """Arguments of all ranks, further ones of rank 1, its variables, and the name of a fault below."""

    arguments: Sequence[str]
    rank_1: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    port: int = 0


@dataclass(frozen=True)
class Outcome:
    """Of one run on one rank."""

    code: int
    text: str


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _ranks(runs: Sequence[Run], world_size: int) -> tuple[list[str], list[dict[str, str]]]:
    """The command of ranks that take one run after the other, and the variables of each."""
    encoded = json.dumps([{**asdict(run), "port": free_port()} for run in runs])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    common = {**kept, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return [__file__, encoded], [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def start_ranks(runs: Sequence[Run], world_size: int = 2) -> list[subprocess.Popen[str]]:
    """The processes of all ranks."""
    command, environments = _ranks(runs, world_size)
    words = [sys.executable, *command]
    return [subprocess.Popen(words, env=each, stdout=subprocess.PIPE, text=True) for each in environments]


def run_ranks(runs: Sequence[Run], world_size: int = 2) -> list[list[Outcome]]:
    """Outcomes of every run, by rank."""
    from helpers.forked import Forked  # which the ranks themselves cannot import

    ended = Forked(*_ranks(runs, world_size)).finish()
    by_rank = [[Outcome(**json.loads(line)) for line in rank.stdout.splitlines()] for rank in ended]
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def fault(function: Callable[[int], Iterator[None]]) -> None:
    """Registers a fault: a context manager around a run on a rank."""
    FAULTS[function.__name__] = contextlib.contextmanager(function)


@fault
def stale_once(rank: int) -> Iterator[None]:
    """Rank 1 cannot write the first file of its part of a checkpoint."""
    from training import checkpoint

    flush, failures = checkpoint._flush, [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * (rank == 1)

    def stale(path: Path) -> None:
        if failures:
            raise failures.pop()
        flush(path)

    with mock.patch.object(checkpoint, "_flush", stale), mock.patch("training.saves._PAUSE_SECONDS", 0.0):
        yield


@fault
def bad_norm(rank: int) -> Iterator[None]:
    """Rank 1 alone finds an infinite gradient at step 6, after the all_reduce."""
    import train_single_gpu

    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        if state.step == 5 and rank == 1:
            update = state.optimizer_step

            def faulty():
                next(iter(state.model.parameters())).grad.view(-1)[0] = float("inf")
                return update()

            with mock.patch.object(state, "optimizer_step", faulty):
                return train_step(state, *arguments)
        return train_step(state, *arguments)

    with mock.patch.object(train_single_gpu, "train_step", step):
        yield


@fault
def lost_disk(rank: int) -> Iterator[None]:
    """No checkpoint can be written, which rank 0 finds out in the background."""

    def flush(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with mock.patch("training.checkpoint._flush", flush), mock.patch("training.saves._PAUSE_SECONDS", 0.0):
        yield


@fault
def spikes(rank: int) -> Iterator[None]:
    """Gradients of the steps in SPIKES ("14,22") are a million times as large, on all ranks; eight updates suffice.
    The first steps of rank 1 are slow."""
    import train_single_gpu

    train_step, at = train_single_gpu.train_step, [int(step) for step in os.environ["SPIKES"].split(",")]

    def step(state, *arguments):
        passes = state.forward_backward
        begin = passes.begin

        def large(key, weights):
            begin(key, [1e6 * weight for weight in weights])

        time.sleep(0.3 if rank == 1 and state.step < 5 else 0)
        with mock.patch.object(passes, "begin", large) if state.step + 1 in at else contextlib.nullcontext():
            return train_step(state, *arguments)

    connects_late = mock.patch("training.distributed._MESH_RANKS", 1)  # as many ranks do
    with mock.patch.object(train_single_gpu, "train_step", step), mock.patch("training.loss._FEWEST", 8), connects_late:
        yield


def _flips(rank: int, choose: Callable) -> Iterator[None]:
    """A bit of a tensor that `choose` finds in the state flips on rank 1 after step 5."""
    import train_single_gpu

    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        done = train_step(state, *arguments)
        if state.step == 5 and rank == 1:
            choose(state).data.view(torch.int32).view(-1)[3] ^= 1 << 29
        return done

    with mock.patch.object(train_single_gpu, "train_step", step):
        yield


@fault
def flipped_weight(rank: int) -> Iterator[None]:
    yield from _flips(rank, lambda state: dict(state.model.named_parameters())["transformer.mlp_layers.0.mlp.1.weight"])


@fault
def flipped_average(rank: int) -> Iterator[None]:
    yield from _flips(rank, lambda state: state.ema.state_dict()["embedding.word_embedding.weight"])


@fault
def flipped_part(rank: int) -> Iterator[None]:
    """In the average of what rank 1 owns, with a divided state."""
    yield from _flips(rank, lambda state: next(iter(state.ema.state_dict().values())))


@fault
def infinite_average(rank: int) -> Iterator[None]:
    """An average that only rank 1 has, with zero1, becomes infinite before the first save."""
    from training import saves

    check = saves.check_finite

    def faulty(state, tensors):
        if rank == 1:
            next(iter(tensors["ema"].values())).view(-1)[0] = float("inf")
        check(state, tensors)

    with mock.patch.object(saves, "check_finite", faulty):
        yield


@fault
def gives_back(rank: int) -> Iterator[None]:
    """With full, a rank has memory for its own matrices alone after every step. What is compiled is traced and split
    into passes, but no code is made of it."""
    import train_single_gpu

    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        done = train_step(state, *arguments)
        matrices, owned = state.gradients.layers.matrices, state.gradients.owned
        assert {parameter in owned for parameter in matrices} == {True, False}
        for parameter in matrices:
            sizes = [tensor.untyped_storage().nbytes() for tensor in (parameter, parameter.grad)]
            assert sizes == [4 * parameter.numel() * (parameter in owned)] * 2
        return done

    traced = mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager"))
    with mock.patch.object(train_single_gpu, "train_step", step), traced:
        yield


@fault
def stopped(rank: int) -> Iterator[None]:
    yield from _signalled_after_step_5(rank, signal.SIGSTOP)


@fault
def killed(rank: int) -> Iterator[None]:
    yield from _signalled_after_step_5(rank, signal.SIGKILL)


def _signalled_after_step_5(rank: int, number: int) -> Iterator[None]:
    """Rank 1 is stopped or killed, as from outside."""
    import train_single_gpu

    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        done = train_step(state, *arguments)
        if state.step == 5 and rank == 1:
            os.kill(os.getpid(), number)
        return done

    with mock.patch.object(train_single_gpu, "train_step", step):
        yield


@fault
def grid(rank: int) -> Iterator[None]:
    """Few ranks sum as many do: along axes, here of two."""
    with mock.patch("training.distributed._MESH_RANKS", 1), mock.patch("training.distributed._AXIS_RANKS", 2):
        yield


@fault
def signal_in_step(rank: int) -> Iterator[None]:
    """The same, and SIGTERM comes to rank 1 inside its fifth step."""
    import train_single_gpu

    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        if state.step == 4 and rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return train_step(state, *arguments)

    with FAULTS["grid"](rank), mock.patch.object(train_single_gpu, "train_step", step):
        yield


def _signals(rank: int, module: str, function: str, call: int) -> Iterator[None]:
    """SIGTERM comes inside a function's call of this number, which is to be the last one.

    To rank 0 in what it computes alone, else to the last rank; all ranks are to make no more calls than that.
    """
    target = importlib.import_module(module)
    original, calls = getattr(target, function), 0
    receiver = 0 if function == "_fill" else int(os.environ.get("WORLD_SIZE", "1")) - 1

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        assert calls <= call, f"{function} goes on after the signal"
        if calls == call and rank == receiver:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **options)

    with mock.patch.object(target, function, counted):
        yield


@fault
def signal_in_validation(rank: int) -> Iterator[None]:
    yield from _signals(rank, "evaluation.validation", "score_targets", 2)


@fault
def signal_in_validation_of_average(rank: int) -> Iterator[None]:
    yield from _signals(rank, "evaluation.validation", "score_targets", 20)


@fault
def signal_in_pairs(rank: int) -> Iterator[None]:
    yield from _signals(rank, "evaluation.token_log_probs", "log_probabilities", 2)


@fault
def signal_in_samples(rank: int) -> Iterator[None]:
    yield from _signals(rank, "evaluation.samples", "_fill", 1)


def main() -> None:
    from train_single_gpu import main as train
    from training import errors
    from training.distributed import start_world

    rank, errors._LAUNCHER_SECONDS = int(os.environ["RANK"]), 0.0  # there is no launcher
    for fields in json.loads(sys.argv[1]):
        run, text = Run(**fields), io.StringIO()
        arguments = [*run.arguments, *(run.rank_1 if rank == 1 else ())]
        variables = {"MASTER_PORT": str(run.port), **(run.variables if rank == 1 or "SPIKES" in run.variables else {})}
        printed = contextlib.redirect_stdout(text), contextlib.redirect_stderr(text)
        with mock.patch.dict(os.environ, variables), printed[0], printed[1], contextlib.ExitStack() as stack:
            if run.fault:
                stack.enter_context(FAULTS[run.fault](rank))
            code = train(arguments, start_world)
        print(json.dumps(asdict(Outcome(code, text.getvalue()))), flush=True)


if __name__ == "__main__":
    main()
