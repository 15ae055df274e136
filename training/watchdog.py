"""Watchdog of collectives and heartbeats: a rank that hangs is named, with every other's position, and the run ends.

A thread of each rank stores its progress every few seconds. Where one has waited for the others longer than
--step_timeout or --collective_timeout allows, or waits while a process (stopped, or its host gone) gives no sign for
--heartbeat_timeout, all ranks that still live write their stack traces and their position; rank 0 names those that do
not answer or are behind, and all end. What waits is inside a collective that nothing interrupts, so the process ends
from here.

The positions go through the launcher's key-value store. A file in the run folder, one for each host, shows them to
people.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed import DistError, TCPStore

from data.wording import time_text
from training.config import TrainingConfig
from training.distributed import World
from training.environment import Environment
from training.errors import HARDWARE, HardwareError, OtherRankFailed, report_error
from training.status import FAILED, StatusFile, newest_step, record_failure

_Result = TypeVar("_Result")

_BEAT_SECONDS = 5.0  # between heartbeats in the store; less where a rank may wait for less than some
_FILE_SECONDS = 30.0  # between heartbeats in a host's file
_GRACE_SECONDS = 5.0  # for a busy host, beyond two heartbeats, until a rank counts as silent
_NAMED = 4  # ranks in a sentence
_LAST_SECONDS = 5.0  # for rank 0 to speak, before the end of another has the launcher end it
# torchrun's store outlives the ranks that it starts again
_PREFIX = f"rank_store/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class HangError(HardwareError):
    """Ranks timed out waiting for others; the message names these."""


class Watchdog:
    """Watches how long this rank waits, from its making until `close`; for several ranks."""

    def __init__(self, config: TrainingConfig, world: World) -> None:
        self._config, self._world = config, world
        shortest = min(60 * config.step_timeout, 60 * config.collective_timeout, config.heartbeat_timeout)
        self._pause = min(_BEAT_SECONDS, shortest / 3)
        self._grace = 2 * self._pause + _GRACE_SECONDS
        self._stop = threading.Event()
        self._signs: dict[int, tuple[Any, float]] = {}  # the last heartbeat of each rank, and when it came
        self._store = RankStore(world.environment, self._grace)
        self._file = None
        if world.environment.local_rank == 0:
            path = config.run_folder / "heartbeats" / f"{socket.gethostname()}.json"
            self._file = HeartbeatFile(path, lambda: position(world), _FILE_SECONDS)
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()
        if self._file is not None:
            self._file.close()
        self._thread.join(1.0)

    def _work(self) -> None:
        answered = time.monotonic()
        while True:
            waited, limit, silent = self._world.progress.seconds_waited(), "", set[int]()
            # A store that does not answer: the rank that hosts it hangs, or has ended as this one is about to.
            with suppress(RuntimeError):
                self._store.set(f"heartbeat/{self._world.rank}", position(self._world))
                limit = (self._store.get("hang") or {"timeout": ""})["timeout"]
                if self._world.is_main and waited > self._pause:
                    silent = silent_ranks(self._signs, self._heartbeats(), self._config.heartbeat_timeout, waited)
                answered = time.monotonic()
            name, minutes = self._timeout()
            if not limit and waited > 60 * minutes:
                limit = f"{name} {minutes:g} min"
            if silent or (waited and time.monotonic() - answered > self._config.heartbeat_timeout):
                limit = limit or f"--heartbeat_timeout {self._config.heartbeat_timeout:g} s"
            if limit:
                self._end(limit, silent)
            if self._stop.wait(self._pause):
                return

    def _timeout(self) -> tuple[str, float]:
        """The flag that limits the present wait, and its minutes."""
        flags = ["collective_timeout"] + ["step_timeout"] * self._world.progress.in_step
        return min(((f"--{flag}", getattr(self._config, flag)) for flag in flags), key=lambda limit: limit[1])

    def _end(self, limit: str, silent: set[int]) -> NoReturn:
        """Report what is known, and end this process. limit: what is over. silent: ranks that cannot answer."""
        rank, environment, folder = self._world.rank, self._world.environment, self._config.run_folder
        own = position(self._world) | {"timeout": limit}
        self._store.missing |= silent
        _dump_stacks(self._config, self._world, own)
        try:
            with suppress(RuntimeError):
                self._store.set("hang", own)
            answers = self._store.all_gather(own)
            error = explain_hang(answers, self._heartbeats(), sorted(set(range(self._world.size)) - answers.keys()))
            is_reporter = rank == 0
        except RuntimeError:  # RankMissing among them: there is nobody else to report it
            error, is_reporter = explain_hang({rank: own}, self._heartbeats(only=0), [0]), True
        error.args = (f"{error}. Stack traces of the ranks that live are in {folder / 'failures'}",)
        if rank == 0:
            with suppress(OSError):
                done = newest_step(folder / "checkpoints")
                StatusFile(folder, environment, self._config.max_steps).write(FAILED, str(error), done)
        if is_reporter:
            report_error(error, self._config, self._world)
        elif environment.job_id is not None:
            record_failure(folder, environment, str(error), secondary=True, kind=HARDWARE.name)
        if not is_reporter:
            time.sleep(_LAST_SECONDS)
        sys.stdout.flush()
        os._exit(HARDWARE.code)

    def _heartbeats(self, only: int | None = None) -> dict[int, dict[str, Any]]:
        """The last position that ranks have stored."""
        found = {}
        for rank in range(self._world.size) if only is None else [only]:
            with suppress(RuntimeError):
                found[rank] = self._store.get(f"heartbeat/{rank}")
        return {rank: last for rank, last in found.items() if last is not None}


def silent_ranks(
    signs: dict[int, tuple[Any, float]], heartbeats: dict[int, dict[str, Any]], seconds: float, waited: float
) -> set[int]:
    """The ranks whose heartbeat is so many seconds old. signs: each when it last changed, and when; updated."""
    now = time.monotonic()
    for rank, last in heartbeats.items():
        if rank not in signs or signs[rank][0] != last["time"]:
            signs[rank] = (last["time"], now - min(waited, max(0.0, time.time() - last["time"])))  # clocks differ
    return {rank for rank, (_, when) in signs.items() if now - when > seconds}


def position(world: World) -> dict[str, Any]:
    """How far a rank has come, as JSON."""
    progress = world.progress
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "step": progress.step,
        "operation": progress.operation,
        "collectives": progress.collectives,
        "seconds_waited": round(progress.seconds_waited(), 1),
        "time": time.time(),
    }


def explain_hang(
    answers: dict[int, dict[str, Any]], heartbeats: dict[int, dict[str, Any]], silent: Sequence[int]
) -> HangError:
    """Which ranks the others wait for, in a sentence, and the host at fault where it is one.

    answers: positions by rank, with the "timeout" that limits each. heartbeats: earlier positions, where known.
    silent: ranks that did not answer.
    """
    furthest = max(answers.values(), key=lambda own: own["collectives"])
    longest = max(answers.values(), key=lambda own: own["seconds_waited"])
    limit = f"after {longest['seconds_waited']:.0f} s ({longest['timeout']})"
    timed_out = f"timed out in {furthest['operation']}, step {furthest['step']}, {limit}"
    behind = [rank for rank, own in answers.items() if own["collectives"] < furthest["collectives"]]
    if not silent and not behind:
        return HangError(f"all ranks {timed_out} and none is behind: a device or the network between them hangs")
    named = [_describe_silent(rank, heartbeats.get(rank)) for rank in silent]
    named = named or [_describe_behind(answers[rank]) for rank in behind]
    hosts = {({**heartbeats, **answers}.get(rank) or {"host": ""})["host"] for rank in silent or behind}
    more = f"; and {len(named) - _NAMED} more ranks" if len(named) > _NAMED else ""
    text = f"{'; '.join(named[:_NAMED])}{more}; the others {timed_out}"
    return HangError(text, host=hosts.pop() if len(hosts) == 1 else "")


def _describe_behind(own: dict[str, Any]) -> str:
    where = f"{'in' if own['seconds_waited'] else 'after'} {own['operation']}"
    return f"rank {own['rank']} on {own['host']} has not arrived: it is in step {own['step']} ({where})"


def _describe_silent(rank: int, last: dict[str, Any] | None) -> str:
    if last is None:
        return f"rank {rank} has sent no heartbeat"
    age = time.time() - last["time"]
    return (
        f"rank {rank} on {last['host']} has sent no heartbeat for {age:.0f} s: the last one was in step {last['step']} "
        f"({last['operation']})"
    )


def _dump_stacks(config: TrainingConfig, world: World, own: dict[str, Any]) -> None:
    """Write the stack traces of this process's threads to the run folder."""
    environment = world.environment
    name = f"stacks_{environment.job_id or 'none'}_{environment.restart_count}_{world.rank}.txt"
    with suppress(OSError):
        path = config.run_folder / "failures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(json.dumps(own) + "\n")
            file.flush()
            faulthandler.dump_traceback(file)


# Values for ranks of which some may hang or be gone


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
        """function(), which calls collectives: on a thread, so that a hang or another rank's error ends it. Raises what
        it raised, TimeoutError, or OtherRankFailed."""
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


# Heartbeats in files


class HeartbeatFile:
    """Writes `content()` (JSON) to a file now and every `seconds`, until `close` removes it; what fails is no error.
    The file's folder is made once, in one that exists: a mount that vanishes must not come back as an empty folder."""

    def __init__(self, path: Path, content: Callable[[], dict[str, Any]], seconds: float) -> None:
        self._path, self._content, self._seconds = path, content, seconds
        self._stop = threading.Event()
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop writing, and remove the file: what stays behind is of a process that was killed."""
        self._stop.set()
        self._thread.join(1.0)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        while not self._stop.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            temporary.write_text(json.dumps(self._content()))  # not flushed to disk: it is worthless after a crash
            os.replace(temporary, self._path)
