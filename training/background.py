"""Background thread for a sink of metrics, such as wandb, which is dropped when it fails.

Whatever happens there (an error, a dead process, a server that does not answer) must not end, delay or change a run.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

_LONGEST_QUEUE = 10_000  # calls that may wait: some minutes of steps, some MiB
_LOOK_SECONDS = 0.1
_dropped: list[str] = []  # names of those that were, in this process


class Background:
    """Calls of `start`'s result, one after the other, which nobody waits for until `close`.

    The first one that fails, or a queue that has become too long, is reported by `say` and drops the sink.
    """

    def __init__(self, name: str, start: Callable[[], Any], say: Callable[[str], object]):
        self._name, self._say = name, say
        self._calls: queue.Queue[Callable[[Any], object] | None] = queue.Queue(_LONGEST_QUEUE)
        self._dropped = False
        self._thread = threading.Thread(target=self._work, args=(start,), name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Any], object] | None) -> None:
        """Have `call` made with what `start` returned; returns at once. None: no more will come."""
        if self._dropped:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop("does not keep up")

    def close(self, last: Callable[[Any], object], seconds: float, hurried: Callable[[], bool], brief: float) -> bool:
        """Make the `last` call after all others; False if that is not done within `seconds`, `brief` once `hurried`."""
        self.put(last)
        self.put(None)
        began = time.monotonic()
        while self._thread.is_alive() and not self._dropped:
            self._thread.join(_LOOK_SECONDS)
            if time.monotonic() - began > (min(seconds, brief) if hurried() else seconds):
                return False
        return True

    def _work(self, start: Callable[[], Any]) -> None:
        try:
            sink = start()
            while (call := self._calls.get()) is not None and not self._dropped:
                call(sink)
        except BaseException as error:  # SystemExit included, which wandb has been seen to raise
            self._drop(f"failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")

    def _drop(self, why: str) -> None:
        if not self._dropped:
            self._dropped = True
            _dropped.append(self._name)
            self._say(f"note: {self._name} {why}; the run continues without it, and metrics.jsonl has everything")


def leave(code: int) -> NoReturn:
    """End this process; at once where something was dropped, whose own clean-up at exit might wait for ever."""
    if _dropped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
