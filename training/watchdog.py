"""Ranks that wait in vain: which rank the others wait for, and where every one of them stands.

A thread of each rank posts every few seconds where the rank is. Where one has waited for the others longer than it may,
all ranks that still live write their stack traces and say where they are; rank 0 names those that do not answer or have
not arrived, and all end. What waits is inside a collective that nothing interrupts, so the process ends from here.

The posts go through the launcher's key-value store. A file in the run folder, one for each host, tells people.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from training.checkpoint_names import newest_step
from training.config import TrainingConfig
from training.distributed import Place, World
from training.errors import HARDWARE, HardwareError
from training.heartbeat import Heartbeat
from training.rank_store import RankStore
from training.reporting import tell
from training.status import FAILED, record_failure, write_status

_BEAT_SECONDS = 5.0  # between posts; less where a rank may wait for less than some
_FILE_SECONDS = 30.0  # between lines of a host's file
_GRACE_SECONDS = 5.0  # for a busy host, beyond two posts, until a rank counts as silent
_NAMED = 4  # ranks in a sentence
_LAST_SECONDS = 5.0  # for rank 0 to speak, before the end of another has the launcher end it


class HangError(HardwareError):
    """Ranks have waited in vain; the message says for which."""


class Watchdog:
    """Watches how long this rank waits, from its making until `close`; for several ranks."""

    def __init__(self, config: TrainingConfig, world: World) -> None:
        self._config, self._world = config, world
        self._long = 60 * config.collective_timeout
        self._short = min(60 * config.step_timeout, self._long)
        self._pause = min(_BEAT_SECONDS, self._short / 3)
        self._grace = 2 * self._pause + _GRACE_SECONDS
        self._stop = threading.Event()
        self._meeting = RankStore(world.environment, self._grace)
        self._file = None
        if world.environment.local_rank == 0:
            path = config.run_folder / "heartbeats" / f"{socket.gethostname()}.json"
            self._file = Heartbeat(path, lambda: where(world), _FILE_SECONDS)
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()
        if self._file is not None:
            self._file.close()
        self._thread.join(1.0)

    def _work(self) -> None:
        while True:
            waits, asked = self._world.place.waits(), False
            # A store that does not answer: its keeper hangs, or has ended as this rank is about to.
            with suppress(RuntimeError):
                self._meeting.post(f"beat/{self._world.rank}", where(self._world))
                asked = self._meeting.look("hang") is not None
            if asked or waits > (self._long if self._world.place.patient else self._short):
                self._end()
            if self._stop.wait(self._pause):
                return

    def _end(self) -> NoReturn:
        """Say what is known, and end this process."""
        rank, environment, folder = self._world.rank, self._world.environment, self._config.run_folder
        own = where(self._world)
        _dump_stacks(self._config, self._world, own)
        try:
            with suppress(RuntimeError):
                self._meeting.post("hang", own)
            answers = self._meeting.gather(own)
            error = verdict(answers, self._beats(), sorted(set(range(self._world.size)) - answers.keys()))
            speaks = rank == 0
        except RuntimeError:  # RankLost among them: there is nobody else who could say it
            error, speaks = verdict({rank: own}, self._beats(only=0), [0]), True
        error.args = (f"{error}. Stack traces of the ranks that live are in {folder / 'failures'}",)
        if rank == 0:
            with suppress(OSError):
                done = newest_step(folder / "checkpoints")
                write_status(folder, environment, FAILED, str(error), done, self._config.max_steps)
        if speaks:
            tell(error, self._config, self._world)
        elif environment.job_id is not None:
            record_failure(folder, environment, str(error), secondary=True, kind=HARDWARE)
        if not speaks:
            time.sleep(_LAST_SECONDS)
        sys.stdout.flush()
        os._exit(HARDWARE.code)

    def _beats(self, only: int | None = None) -> dict[int, dict[str, Any]]:
        """What ranks have posted last."""
        found = {}
        for rank in range(self._world.size) if only is None else [only]:
            with suppress(RuntimeError):
                found[rank] = self._meeting.look(f"beat/{rank}")
        return {rank: beat for rank, beat in found.items() if beat is not None}


def where(world: World) -> dict[str, Any]:
    """Where a rank stands, as JSON."""
    place: Place = world.place
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "step": place.step,
        "doing": place.doing,
        "arrivals": place.arrivals,
        "waits": round(place.waits(), 1),
        "time": time.time(),
    }


def verdict(answers: dict[int, dict[str, Any]], beats: dict[int, dict[str, Any]], silent: Sequence[int]) -> HangError:
    """Which ranks the others wait for, in a sentence, and the host to blame where it is one.

    answers: of `where`, by rank. beats: the same as posted earlier, where known. silent: ranks that did not answer.
    """
    furthest = max(answers.values(), key=lambda place: place["arrivals"])
    seconds = max(place["waits"] for place in answers.values())
    stands = f"have waited in step {furthest['step']} ({furthest['doing']}) for {seconds:.0f} s"
    late = [rank for rank, place in answers.items() if place["arrivals"] < furthest["arrivals"]]
    if not silent and not late:
        return HangError(f"all ranks {stands} and none is behind: a device or the network between them hangs")
    named = [_silence(rank, beats.get(rank)) for rank in silent] or [_lateness(answers[rank]) for rank in late]
    hosts = {({**beats, **answers}.get(rank) or {"host": ""})["host"] for rank in silent or late}
    more = f"; and {len(named) - _NAMED} more ranks" if len(named) > _NAMED else ""
    text = f"{'; '.join(named[:_NAMED])}{more}; the others {stands}"
    return HangError(text, host=hosts.pop() if len(hosts) == 1 else "")


def _lateness(place: dict[str, Any]) -> str:
    where = f"{'in' if place['waits'] else 'after'} {place['doing']}"
    return f"rank {place['rank']} on {place['host']} has not arrived: it is in step {place['step']} ({where})"


def _silence(rank: int, beat: dict[str, Any] | None) -> str:
    if beat is None:
        return f"rank {rank} does not answer"
    age = time.time() - beat["time"]
    return (
        f"rank {rank} on {beat['host']} has not been heard of for {age:.0f} s: it was last in step {beat['step']} "
        f"({beat['doing']})"
    )


def _dump_stacks(config: TrainingConfig, world: World, own: dict[str, Any]) -> None:
    """Leave the stack traces of this process's threads in the run folder."""
    environment = world.environment
    name = f"stacks_{environment.job_id or 'none'}_{environment.restart_count}_{world.rank}.txt"
    with suppress(OSError):
        path = config.run_folder / "failures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(json.dumps(own) + "\n")
            file.flush()
            faulthandler.dump_traceback(file)
