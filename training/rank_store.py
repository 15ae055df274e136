"""Rendezvous store: small values exchanged between ranks over a TCPStore with timeouts, where some may hang or be gone.

For training/watchdog.py and slurm/doctor.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import DistError, TCPStore

from training.environment import Environment
from training.errors import OtherRankFailed
from training.wording import time_text

_Result = TypeVar("_Result")
# torchrun's store outlives the ranks that it starts again
_PREFIX = f"rank_store/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class RankMissing(RuntimeError):
    """Rank 0 has stopped waiting for this rank, or does not answer."""


class RankStore:
    """Gathers values over the launcher's key-value store, with a timeout (seconds).

    Process groups hang or end where a rank is missing; here the others learn its number and continue without it.
    missing: ranks that did not answer in time, for good. failed: a collective failed on some rank. hung: a thread of
    this process still waits in one.
    """

    def __init__(self, environment: Environment, timeout: float):
        self.rank, self.size, self.timeout = environment.rank, environment.world_size, timeout
        self.missing: set[int] = set()
        self.failed = self.hung = False
        self._round, self._store = 0, None
        if self.size > 1:
            # The very store that init_process_group will use: torchrun's, or a new one that rank 0 hosts and shares.
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._store = TCPStore(
                environment.master_addr,
                environment.master_port,
                self.size,
                is_master=self.rank == 0 and not hosted,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=not hosted,
            )

    def all_gather(self, value: Any, timeout: float | None = None) -> dict[int, Any]:
        """Every answering rank's `value` (that JSON can hold), by rank; the same on all ranks."""
        if self._store is None:
            return {0: value}
        self._round += 1
        timeout = timeout or self.timeout
        everything = self._key("all")
        self._store.set(self._key(self.rank), json.dumps(value))
        if self.rank == 0:
            deadline, answers = time.monotonic() + timeout, []
            for rank in sorted(set(range(self.size)) - self.missing):
                try:
                    seconds = max(0.01, deadline - time.monotonic())
                    self._store.wait([self._key(rank)], timedelta(seconds=seconds))
                    answers.append((rank, json.loads(self._store.get(self._key(rank)))))
                except (DistError, RuntimeError):
                    self.missing.add(rank)
            self._store.set(everything, json.dumps([sorted(self.missing), answers]))
        try:
            self._store.wait([everything], timedelta(seconds=2 * timeout))
            missing, answers = json.loads(self._store.get(everything))
        except (DistError, RuntimeError) as error:
            raise RankMissing("rank 0 does not answer any more") from error
        self.missing = set(missing)
        if self.rank in self.missing:
            raise RankMissing("this rank answered too late, and rank 0 continued without it")
        return dict(answers)

    def _key(self, name: object) -> str:
        return f"{_PREFIX}/{self._round}/{name}"

    def set(self, name: str, value: Any) -> None:
        """Store `value` (that JSON can hold) under `name`. Raises RuntimeError where the store does not answer."""
        if self._store is not None:
            self._store.set(f"{_PREFIX}/value/{name}", json.dumps(value))

    def get(self, name: str) -> Any:
        """The value last set under `name`, None where there is none; does not wait. Raises as `set` does."""
        key = f"{_PREFIX}/value/{name}"
        return json.loads(self._store.get(key)) if self._store is not None and self._store.check([key]) else None

    def run_with_timeout(self, function: Callable[[], _Result], seconds: float, device: torch.device) -> _Result:
        """function(), which calls collectives: on a thread, so that a hang or another rank's error ends it.

        Raises what it raised, TimeoutError, or OtherRankFailed.
        """
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                box["value"] = function()
            except BaseException as error:
                box["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        deadline, failed = time.monotonic() + seconds, self._key("failed")
        while not self.hung:
            thread.join(0.2)
            if not thread.is_alive():
                break
            elsewhere = self._store is not None and self._store.check([failed])
            self.hung = elsewhere or time.monotonic() > deadline
            if elsewhere:
                raise OtherRankFailed("another rank failed meanwhile")
        else:
            raise TimeoutError(f"no result within {time_text(seconds)}")
        if "error" in box:
            if self._store is not None:
                self._store.set(failed, "1")
            raise box["error"]
        return box["value"]

    def close(self) -> None:
        """Leave the store; rank 0, which may host it, last."""
        if self._store is None:
            return
        self._round += 1
        try:
            self._store.set(self._key(self.rank), "")
            others = set(range(1, self.size)) - self.missing if self.rank == 0 else ()
            for rank in others:
                self._store.wait([self._key(rank)], timedelta(seconds=5))
        except (DistError, RuntimeError):
            pass  # whoever is gone already has nothing more to read
