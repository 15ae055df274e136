"""Stop event: how a thread that may have to end is told so while it builds an index or waits for a server."""

from __future__ import annotations

from contextvars import ContextVar
from threading import Event

# Set by a thread that may have to end: then what takes long in it raises IndexStopped.
stop_event: ContextVar[Event | None] = ContextVar("stop_event", default=None)


class IndexStopped(RuntimeError):
    """The thread that builds an index was told to end."""


def check_stop() -> None:
    """Raises IndexStopped where this thread may have to end, and has to."""
    event = stop_event.get()
    if event is not None and event.is_set():
        raise IndexStopped
