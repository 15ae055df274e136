"""Guard around a run: what was opened is closed, errors become sentences and exit codes, a stop its last message."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack, closing, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from training.config import TrainingConfig
from training.distributed import World
from training.errors import DONE, NonFiniteError, OtherRankFailed, report_error
from training.metric_logger import MetricLogger
from training.preemption import StopSignals
from training.rank_checks import DivergenceError
from training.sinks import unbreakable
from training.status import FAILED, FINISHED, StatusFile, checkpoint_folders, list_checkpoints, newest_step, read_status
from training.stopping import Stop, conclude, may_requeue, resume_command


class _Closable(Protocol):
    def close(self) -> object: ...


_Thing = TypeVar("_Thing", bound=_Closable)


class RunEnd:
    """Context manager around a run. Its attributes are set as the run learns them.

    code: the exit code, once the context has ended (errors.py has the table). stop: what ended the run early.
    """

    def __init__(self, signals: StopSignals | None = None) -> None:
        """signals: handlers that are in place already; they stay until the process ends, for its last moment, too."""
        self.code = DONE
        self.config: TrainingConfig | None = None
        self.world: World | None = None
        self.log = MetricLogger()
        self.status: StatusFile | None = None  # on rank 0, once the run has begun to write
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
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            return False
        try:
            if error is not None:
                self.code = self._failed(error)  # before anything is closed: a thread or an upload may take long
            elif self._comes_back():
                self.log.preempting()
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
        return True

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
                newest = next(iter(list_checkpoints(*checkpoint_folders(self.config.run_folder))), None)
                good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
                error.args = (f"{error}. Nothing was saved since; {good}; {error.hint}",)
        if self.status is not None and self.config is not None:
            self.log.hurry(failed=True)
            with suppress(OSError):
                reason = " ".join((str(error) or type(error).__name__).split())[:1000]
                self.status.write(FAILED, reason, newest_step(*checkpoint_folders(self.config.run_folder)))
        return report_error(error, self.config, self.world)

    def _stopped(self, stop: Stop) -> None:
        """The last message of a run that has stopped and saved, by rank 0, which alone requeues.

        The files are closed and the lock is free: from here on SLURM may start the job again.
        """
        assert self.config is not None
        assert self.world is not None
        self.signals.stopped_early = True
        if not self.world.is_main:
            return  # whatever rank 0 ends with; a launcher must not end rank 0 before it has
        assert self.status is not None
        self.code, words = conclude(stop, self.step, self.config, self.world.environment)
        with unbreakable(sys.stdout):
            print(f"{words}\nresume with: {resume_command()}", flush=True)
