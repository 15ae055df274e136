"""Facts exchanged between ranks where some may hang or be gone, for slurm/doctor.py and training/watchdog.py."""

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
_PREFIX = f"meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class RankLost(RuntimeError):
    """Rank 0 has stopped waiting for this rank, or does not answer."""


class RankStore:
    """Small facts exchanged between the ranks through the launcher's key-value store, with a time limit.

    Process groups hang or end where a rank is missing; here the others learn its number and go on without it.
    lost: ranks that did not answer in time, for good. broken: a collective failed on some rank. stuck: a thread of this
    process still waits in one.
    """

    def __init__(self, environment: Environment, patience: float):
        self.rank, self.size, self.patience = environment.rank, environment.world_size, patience
        self.lost: set[int] = set()
        self.broken = self.stuck = False
        self._round, self._store = 0, None
        if self.size > 1:
            # The very store that init_process_group will use: torchrun's, or a new one that rank 0 hosts and shares.
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._store = TCPStore(
                environment.master_addr,
                environment.master_port,
                self.size,
                is_master=self.rank == 0 and not hosted,
                timeout=timedelta(seconds=patience),
                wait_for_workers=False,
                multi_tenant=not hosted,
            )

    def gather(self, value: Any, patience: float | None = None) -> dict[int, Any]:
        """Every answering rank's `value` (that JSON can hold), by rank; the same on all ranks."""
        if self._store is None:
            return {0: value}
        self._round += 1
        patience = patience or self.patience
        everything = self._key("all")
        self._store.set(self._key(self.rank), json.dumps(value))
        if self.rank == 0:
            deadline, answers = time.monotonic() + patience, []
            for rank in sorted(set(range(self.size)) - self.lost):
                try:
                    seconds = max(0.01, deadline - time.monotonic())
                    self._store.wait([self._key(rank)], timedelta(seconds=seconds))
                    answers.append((rank, json.loads(self._store.get(self._key(rank)))))
                except (DistError, RuntimeError):
                    self.lost.add(rank)
            self._store.set(everything, json.dumps([sorted(self.lost), answers]))
        try:
            self._store.wait([everything], timedelta(seconds=2 * patience))
            lost, answers = json.loads(self._store.get(everything))
        except (DistError, RuntimeError) as error:
            raise RankLost("rank 0 does not answer any more") from error
        self.lost = set(lost)
        if self.rank in self.lost:
            raise RankLost("this rank answered too late, and rank 0 went on without it")
        return dict(answers)

    def _key(self, name: object) -> str:
        return f"{_PREFIX}/{self._round}/{name}"

    def post(self, name: str, value: Any) -> None:
        """Leave `value` (that JSON can hold) for whoever looks. Raises RuntimeError where the store does not answer."""
        if self._store is not None:
            self._store.set(f"{_PREFIX}/posted/{name}", json.dumps(value))

    def look(self, name: str) -> Any:
        """What was last posted under `name`, None where nothing was. Raises as `post` does."""
        key = f"{_PREFIX}/posted/{name}"
        return json.loads(self._store.get(key)) if self._store is not None and self._store.check([key]) else None

    def together(self, function: Callable[[], _Result], seconds: float, device: torch.device) -> _Result:
        """function(), in which ranks wait for each other: on a thread, so that a hang or another rank's error ends it.

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
        deadline, broken = time.monotonic() + seconds, self._key("broken")
        while not self.stuck:
            thread.join(0.2)
            if not thread.is_alive():
                break
            failed = self._store is not None and self._store.check([broken])
            self.stuck = failed or time.monotonic() > deadline
            if failed:
                raise OtherRankFailed("another rank failed meanwhile")
        else:
            raise TimeoutError(f"no result within {time_text(seconds)}")
        if "error" in box:
            if self._store is not None:
                self._store.set(broken, "1")
            raise box["error"]
        return box["value"]

    def leave(self) -> None:
        """Go; rank 0, which may host the store, last."""
        if self._store is None:
            return
        self._round += 1
        try:
            self._store.set(self._key(self.rank), "")
            others = set(range(1, self.size)) - self.lost if self.rank == 0 else ()
            for rank in others:
                self._store.wait([self._key(rank)], timedelta(seconds=5))
        except (DistError, RuntimeError):
            pass  # whoever is gone already has nothing more to read
