"""The end of a run: why it stops before its last step, and what follows: a requeue, a clean end, or a failure."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from training import preemption
from training.config import TrainingConfig
from training.distributed import World
from training.environment import Environment
from training.errors import (
    BUG,
    DONE,
    GAVE_UP,
    HARDWARE,
    NonFiniteError,
    OtherRankFailed,
    report_error,
    signal_code,
)
from training.metric_logger import MetricLogger
from training.preemption import StopSignals, TimeLimit, excuse_attempt
from training.rank_checks import DivergenceError
from training.sinks import unbreakable
from training.status import (
    FAILED,
    FINISHED,
    REQUEUE_WANTED,
    REQUEUED,
    STOPPED,
    Attempt,
    StatusFile,
    checkpoint_folders,
    list_checkpoints,
    newest_step,
    read_status,
)

if TYPE_CHECKING:
    pass

_LOOK_SECONDS = 5.0  # between readings of the run folder's attempts
_ASSUMED_BYTES_PER_SECOND = 2e8  # of a save, until one has been measured

PROBLEM, INTERRUPT, SUPERSEDED, PREEMPTION = "problem", "interrupt", "superseded", "preemption"
SPENT = "spent"  # the hours that a run may take
_PRIORITY = (PROBLEM, INTERRUPT, SUPERSEDED, SPENT, PREEMPTION)

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Stop:
    """One rank's request to stop: a kind of the names above and its description, such as "SIGTERM"."""

    kind: str
    text: str


def most_urgent(stops: list[Stop | None]) -> Stop:
    """The stop that all ranks follow, from one entry for each rank; at least one is no None."""
    return min((stop for stop in stops if stop is not None), key=lambda stop: _PRIORITY.index(stop.kind))


class Abandoned(Exception):
    """A stop request has ended an evaluation; what it had measured is dropped."""


def until_stop(batches: Iterable[_Batch], world: World, wanted: Callable[[], bool]) -> Iterator[_Batch]:
    """This rank's `batches`; raises Abandoned on all ranks, before the same round, once `wanted` holds on any.

    One all_reduce between the hosts a round. Ranks may have different numbers of batches: one that has no more takes
    part until none has.
    """
    remaining = iter(batches)
    while True:
        batch = next(remaining, None)
        counts = torch.tensor([int(wanted()), int(batch is not None)])
        stops, unfinished = world.all_reduce(counts, "stop requests").tolist()
        if stops:
            raise Abandoned
        if not unfinished:
            return
        if batch is not None:
            yield batch


class StopConditions:
    """Everything that may end a run early, looked at without waiting for anything: once a step, and during evaluations.

    Signals count on every rank. Rank 0 (the one with `hours`: those that the run has taken before) also watches the
    clock, and in a job (with an `attempt`) its time limit and the run folder. request: what was found; it stays.
    """

    def __init__(
        self,
        config: TrainingConfig,
        signals: StopSignals,
        environment: Environment,
        attempt: Attempt | None,
        checkpoint_bytes: int,
        hours: float | None = None,
    ):
        self._margin = config.time_limit_margin
        self._signals, self._attempt = signals, attempt
        self._limit = TimeLimit(environment) if attempt is not None else None
        self._began, self._hours_before = time.monotonic(), hours or 0.0
        self._max_hours = config.max_hours if hours is not None else 0.0
        self._save_seconds = checkpoint_bytes / _ASSUMED_BYTES_PER_SECOND
        self._round_seconds, self._round_began, self._rounds, self._measured = 0.0, time.monotonic(), 0, False
        self._rounds_left = 1 if environment.world_size == 1 else 2  # ranks agree one step ahead
        self._next_look = 0.0
        self.request: Stop | None = None

    def signalled(self) -> bool:
        """Whether this rank was sent a stop signal."""
        return self._signals.received is not None

    def saved(self, seconds: float) -> None:
        """A save has taken `seconds`: the slowest counts, and until the first an estimate."""
        self._save_seconds = max(self._save_seconds, seconds) if self._measured else seconds
        self._measured = True

    @property
    def hours(self) -> float:
        """Hours that the run has taken in all of its starts; what a start did after its last checkpoint is left out."""
        return self._hours_before + (time.monotonic() - self._began) / 3600

    @property
    def lead(self) -> float:
        """Seconds before the time limit at which the run stops: what it does first, a save, and what stays free."""
        return self._rounds_left * self._round_seconds + 2 * self._save_seconds + self._margin

    def requested(self, problem: str | None) -> Stop | None:
        """Whether this rank wants to stop now; asked once a round. problem: why this rank cannot continue, if so."""
        now = time.monotonic()
        seconds, self._round_began, self._rounds = now - self._round_began, now, self._rounds + 1
        if self._rounds <= 3:  # the start is no round, and the first one, in which much happens once, no measure
            self._round_seconds = seconds if self._rounds > 1 else 0.0
        else:
            self._round_seconds = max(self._round_seconds, seconds)
        self.request = self._look(problem, self.lead) or self.request
        return self.request

    def wanted(self) -> bool:
        """Whether this rank wants to stop now, asked as often as one likes within a round; it then need not end."""
        self.request = self._look(None, self.lead - self._rounds_left * self._round_seconds) or self.request
        return self.request is not None

    def _look(self, problem: str | None, lead: float) -> Stop | None:
        now = time.monotonic()
        if problem:
            return Stop(PROBLEM, problem)
        received = self._signals.received
        if received is not None:
            return Stop(INTERRUPT if received == "SIGINT" else PREEMPTION, received)
        if self._attempt is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            if self._attempt.superseded():
                return Stop(SUPERSEDED, "a newer start of the same job")
        if self._max_hours and self.hours + (lead - self._margin) / 3600 >= self._max_hours:
            return Stop(SPENT, f"--max_hours {self._max_hours:g}")
        if self._limit is not None and self._limit.reached(lead):
            return Stop(PREEMPTION, f"the job's time limit in {self._limit.seconds_left or 0:.0f} seconds")
        return None


# What follows


def may_requeue(stop: Stop, config: TrainingConfig, environment: Environment) -> bool:
    """Whether this stop is one after which the job is to start again."""
    return stop.kind == PREEMPTION and environment.job_id is not None and config.requeue == "auto"


def conclude(stop: Stop, step: int, config: TrainingConfig, environment: Environment) -> tuple[int, str]:
    """Exit code and last message of a run that has stopped and saved; called by rank 0, which alone requeues."""
    state, reason, code = STOPPED, stop.text, DONE
    words = f"stopped by {stop.text} after step {step}"
    if stop.kind == SUPERSEDED:
        return DONE, words  # the run's status belongs to the newer start
    if stop.kind == PROBLEM:
        state, code = FAILED, HARDWARE.code
    elif may_requeue(stop, config, environment):
        excuse_attempt(config, environment)
        state, reason, code = _requeue(environment, config.max_restarts, stop.text)
        words += f"; {reason}"
    elif stop.kind == PREEMPTION and environment.job_id is None:
        code = signal_code(stop.text)
    with suppress(OSError):  # a full disk; what there was to save is saved, and a requeue has been asked for
        StatusFile(config.run_folder, environment, config.max_steps).write(state, reason, step)
    return code, words


def _requeue(environment: Environment, max_restarts: int, cause: str) -> tuple[str, str, int]:
    """Have SLURM start the job again. Returns the run's state, the reason and the exit code."""
    job_id, restarts = environment.job_id, environment.restart_count
    assert job_id is not None
    if restarts >= max_restarts:
        reason = f"job {job_id} has been restarted {restarts} times (--max_restarts): it is not started again"
        return FAILED, reason, GAVE_UP.code
    outcome, answer = preemption.requeue(job_id, environment.requeues)
    if outcome == preemption.REQUEUED:
        return REQUEUED, f"SLURM starts job {job_id} again (restart {restarts + 1})", DONE
    if outcome == preemption.CANCELLED:
        return STOPPED, f"job {job_id} was cancelled ({cause}): it is not started again", DONE
    if outcome == preemption.NO_COMMAND:
        return REQUEUE_WANTED, f"the job script has to requeue job {job_id}: this host has no scontrol", DONE
    return FAILED, f"SLURM did not start job {job_id} again: {answer}", BUG.code


def resume_command() -> str:
    """The command line that resumes this run, by the Python that this one has."""
    program = sys.argv[0]
    single = Path(program).name == "train_single_gpu.py"
    launcher = shlex.quote(sys.executable or "python") if single else "torchrun/srun ..."
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.split("=")[0] in ("--resume", "--checkpoint_filename"):
            skip = not skip and "=" not in argument
            continue
        kept.append(argument)
    return f"{launcher} {shlex.quote(program)} {shlex.join(kept)} --resume auto"


# The guard around a run


class _Closable(Protocol):
    def close(self) -> object: ...


_Thing = TypeVar("_Thing", bound=_Closable)


class RunEnd:
    """Context manager around a run. Its attributes are set as the run learns them. code: the exit code, once the
    context has ended (errors.py has the table). stop: what ended the run early."""

    def __init__(self, signals: StopSignals | None = None) -> None:
        """signals: handlers that are in place already; they stay until the process ends, for its last moment, too."""
        self.code = DONE
        self.config: TrainingConfig | None = None
        self.world: World | None = None
        self.log = MetricLogger()
        self.status: StatusFile | None = None  # on rank 0, once the run has begun to write
        self.saver: _Closable | None = None  # on rank 0, too
        self.stop: Stop | None = None
        self.step = 0  # done when it ended
        self.stack = ExitStack()
        self.signals, self._own_signals = signals or StopSignals(), signals is None

    def closes(self, thing: _Thing) -> _Thing:
        """`thing`, which the end of the run closes: the last one first."""
        return self.stack.enter_context(closing(thing))

    def opens(self, log: MetricLogger, status: StatusFile) -> MetricLogger:
        """Rank 0 writes from here on."""
        self.log, self.status = self.closes(log), status
        return log

    def connects(self, world: World) -> World:
        """The processes of the run; signals count from here on, Ctrl-C too."""
        self.world = world
        self.signals.__enter__()
        self.signals.install(signal.SIGINT)  # those of a job's first moment do not handle it
        return world

    def finish(self) -> None:
        """Note that the run has done all its steps; a file that cannot be written is only reported."""
        if self.status is None:
            return
        try:
            self.status.write(FINISHED, "", self.step)
        except OSError as error:
            self.log.say(f"note: {self.status.folder}/status.json cannot be written: {error.strerror}")

    def already_complete(self, status: StatusFile) -> int:
        """Say that no step is left; note that a run is finished whose last start was stopped after its last save."""
        if self.world is not None and self.world.is_main:
            known = read_status(status.folder)
            if known is None or known.state != FINISHED:
                status.write(FINISHED, "", status.max_steps)
            print(f"{status.folder} is complete: {status.max_steps} steps are done, nothing to do", flush=True)
        return DONE

    def __enter__(self) -> RunEnd:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        ours = isinstance(error, Exception | KeyboardInterrupt)  # SystemExit, of a parser, has said what it had to
        try:
            if error is not None and ours:
                self.code = self._failed(error)  # before anything is closed: a thread or an upload may take long
            elif self._comes_back():
                self.log.preempting()
            if error is None and self.stop is not None:
                self._note_stop(self.stop)
            self.stack.close()
            if error is None and self.stop is not None:
                self._stopped(self.stop)
        except (Exception, KeyboardInterrupt) as problem:
            self.code = report_error(problem, self.config, self.world)
        finally:
            if self.world is not None:
                if self._own_signals:
                    self.signals.__exit__(None, None, None)
                self.world.close()
        return ours

    def _comes_back(self) -> bool:
        """Whether SLURM is to start the stopped run again."""
        if self.stop is None or self.config is None or self.world is None:
            return False
        return may_requeue(self.stop, self.config, self.world.environment)

    def _failed(self, error: BaseException) -> int:
        """Report the error, in the run's status too, and leave no more than a moment for what is to be uploaded."""
        if isinstance(error, NonFiniteError | DivergenceError) and self.config is not None and self.world is not None:
            if not self.world.is_main:
                error = OtherRankFailed()
            else:
                if self.saver is not None:
                    self.saver.close()  # a checkpoint of before that is still being written is good
                newest = next(iter(list_checkpoints(*checkpoint_folders(self.config.run_folder))), None)
                good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
                error.args = (f"{error}. Nothing was saved since; {good}; {error.hint}",)
        if self.status is not None and self.config is not None:
            self.log.hurry(failed=True)
            with suppress(OSError):
                reason = " ".join((str(error) or type(error).__name__).split())[:1000]
                self.status.write(FAILED, reason, newest_step(*checkpoint_folders(self.config.run_folder)))
        return report_error(error, self.config, self.world)

    def _note_stop(self, stop: Stop) -> None:
        """Write the status before an upload is waited for, in which SLURM may kill the job; `_stopped` replaces it."""
        if self.status is not None and stop.kind not in (SUPERSEDED, PROBLEM):
            with suppress(OSError):
                self.status.write(STOPPED, stop.text, self.step)

    def _stopped(self, stop: Stop) -> None:
        """The last message of a run that has stopped and saved, by rank 0, which alone requeues. The files are closed
        and the lock is free: from here on SLURM may start the job again."""
        assert self.config is not None
        assert self.world is not None
        self.signals.stopped_early = True
        if not self.world.is_main:
            return  # whatever rank 0 ends with; a launcher must not end rank 0 before it has
        assert self.status is not None
        self.code, words = conclude(stop, self.step, self.config, self.world.environment)
        with unbreakable(sys.stdout):
            print(f"{words}\nresume with: {resume_command()}", flush=True)
