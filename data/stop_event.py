"""Stop event: how a thread that may have to end is told so while it builds an index or waits for a server; and threads
that work for another one, and end with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from threading import Event, Thread
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# Set by a thread that may have to end: then what takes long in it raises IndexStopped.
stop_event: ContextVar[Event | None] = ContextVar("stop_event", default=None)


class IndexStopped(RuntimeError):
    """The thread that builds an index was told to end."""


def check_stop() -> None:
    """Raises IndexStopped where this thread may have to end, and has to."""
    event = stop_event.get()
    if event is not None and event.is_set():
        raise IndexStopped


def begun(action: Callable[[], _Result]) -> Future[_Result]:
    """What a thread will have come to that does not hold up the end of a run, as those of an executor do."""
    future: Future[_Result] = Future()
    context = copy_context()  # in which it can be told to stop

    def work() -> None:
        try:
            future.set_result(context.run(action))
        except BaseException as error:  # whoever waits for the result raises it
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def in_threads(work: Callable[[Any], None], pieces: Iterable[Any], threads: int) -> None:
    """Do `work` for all pieces, on so many threads; the first error ends it when all of them have stopped."""
    left = deque(pieces)

    def loop() -> None:
        while left:
            try:
                piece = left.popleft()
            except IndexError:  # another thread took the last
                return
            try:
                work(piece)
            except BaseException:
                left.clear()
                raise

    if threads == 1 or len(left) < 2:
        return loop()
    errors = [future.exception() for future in [begun(loop) for _ in range(min(threads, len(left)))]]
    for error in errors:
        if error is not None:
            raise error
