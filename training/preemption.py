"""Preemption: the signals and the time limit upon which a run saves and stops.

Signals set a flag, and the training loop acts on it at the next step boundary.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

from training.environment import Environment
from training.slurm_queue import query_job

_QUERY_SECONDS = 15.0  # between queries once the limit is near: it may have been extended

_REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Context manager that turns stop signals into `received`; of further ones only the third Ctrl-C changes anything.

    SIGUSR1, SIGUSR2, SIGTERM and SIGHUP (a closed terminal) ask to save and, in a SLURM job, to be started again;
    SIGINT asks to save and end. Rank 0 says so at once, whatever its main thread waits for.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received: str | None = None
        self.stopped_early = False  # set by whoever acts on a stop, for the caller to know
        self._numbers = numbers or (signal.SIGINT, *_REQUEUE_SIGNALS)
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._presses, self._reported = 0, False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name

    def install(self, *numbers: signal.Signals) -> None:
        """Handle these signals too, until the context ends."""
        for number in numbers:
            ignored = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN  # nohup
            if number not in self._previous and not ignored:
                self._previous[number] = signal.signal(number, self._handle)

    def __enter__(self) -> StopSignals:
        self.install(*self._numbers)
        if self._pipe is None:
            # Python's handlers wait for the main thread, which may be inside a collective; this byte does not.
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._report_all, args=(self._pipe[0],), daemon=True).start()
        return self

    def _report_all(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            self._report(number[0])
        os.close(pipe)

    def _report(self, number: int) -> None:
        """Print what a signal does; the third Ctrl-C does it."""
        if number not in self._previous:
            return
        self._presses += number == signal.SIGINT
        if number != signal.SIGINT or self._presses == 1:
            more = "; Ctrl-C twice more ends it now, without saving" if number == signal.SIGINT else ""
            words = f"{signal.Signals(number).name}: the run finishes this step or batch, saves and stops{more}"
            if self._reported:
                return
            self._reported = True
        elif self._presses == 2:
            words = "the run is about to save; Ctrl-C once more ends it now, and what is not saved is lost"
        else:
            words = "ended by the third Ctrl-C: the same command resumes from the last checkpoint"
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            with contextlib.suppress(OSError):  # the console may be what is gone
                os.write(2, f"\n{words}\n".encode())
        if self._presses > 2:
            os._exit(128 + signal.SIGINT)

    def __exit__(self, *_exception: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])
            self._pipe = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        self._previous.clear()


def early_signals() -> StopSignals:
    """Handlers for the time before training begins: importing torch takes seconds in which SLURM may send a signal.

    Only inside a SLURM job. Elsewhere SIGTERM and Ctrl-C end a program that has not begun, as everyone expects.
    """
    signals = StopSignals(*_REQUEUE_SIGNALS)
    return signals.__enter__() if "SLURM_JOB_ID" in os.environ else signals


class TimeLimit:
    """The job's time limit: a clock at every step, and a query of SLURM only near the end."""

    def __init__(self, environment: Environment):
        self._job_id = environment.job_id
        self._end: float | None = None  # on time.monotonic()
        self._next_query = 0.0
        if self._job_id is None:
            return
        if not self._update() and environment.end_time is not None:
            self._end = time.monotonic() + environment.end_time - time.time()

    def _update(self) -> bool:
        job = query_job(self._job_id) if self._job_id is not None else None
        if job is None:
            return False
        self._end = None if job.seconds_left is None else time.monotonic() + job.seconds_left
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the limit; None where there is none."""
        return None if self._end is None else self._end - time.monotonic()

    def reached(self, lead: float) -> bool:
        """Whether fewer than `lead` seconds are left; a query confirms it, since the limit may have been moved."""
        left = self.seconds_left
        if left is None or left > lead:
            return False
        if time.monotonic() >= self._next_query:
            self._next_query = time.monotonic() + _QUERY_SECONDS
            self._update()
            left = self.seconds_left
        return left is not None and left <= lead
