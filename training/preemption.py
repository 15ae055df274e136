"""When a run has to stop, and how its job starts again: signals, the job's time limit, and the requeue.

Signals set a flag, and the training loop acts on it at the next step boundary. What SLURM knows about the job is asked
of its commands, once at the start and when something depends on it; where they are missing (in a container), the job
script has put the time limit into the environment and does the requeue itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType

from training.environment import Environment, expand_node_list

_COMMAND_SECONDS = 30  # a busy controller may take long to answer
_ASK_AGAIN_SECONDS = 15.0  # between questions once the limit is near: it may have been extended
_COMES_BACK = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")

_START_AGAIN = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

REQUEUED, CANCELLED, NO_COMMAND, REFUSED = "requeued", "cancelled", "no scontrol", "refused"


class StopSignals:
    """Context manager that turns stop signals into `received`; of further ones only the third Ctrl-C changes anything.

    SIGUSR1, SIGUSR2, SIGTERM and SIGHUP (a closed terminal) ask to save and, in a SLURM job, to be started again;
    SIGINT asks to save and end. Rank 0 answers at once, whatever its main thread waits for.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received: str | None = None
        self.stopped_early = False  # set by whoever acts on a stop, for the caller to know
        self._numbers = numbers or (signal.SIGINT, *_START_AGAIN)
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._presses, self._answered = 0, False

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
            threading.Thread(target=self._answer_all, args=(self._pipe[0],), daemon=True).start()
        return self

    def _answer_all(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            self._answer(number[0])
        os.close(pipe)

    def _answer(self, number: int) -> None:
        """Say what a signal does; the third Ctrl-C does it."""
        if number not in self._previous:
            return
        self._presses += number == signal.SIGINT
        if number != signal.SIGINT or self._presses == 1:
            more = "; Ctrl-C twice more ends it now, without saving" if number == signal.SIGINT else ""
            words = f"{signal.Signals(number).name}: the run finishes this step or batch, saves and stops{more}"
            if self._answered:
                return
            self._answered = True
        elif self._presses == 2:
            words = "still on its way to save; Ctrl-C once more ends it now, and what is not saved is lost"
        else:
            words = "ended by the third Ctrl-C: the same command goes on from the last checkpoint"
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
    signals = StopSignals(*_START_AGAIN)
    return signals.__enter__() if "SLURM_JOB_ID" in os.environ else signals


# Asking SLURM


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a SLURM command; None where there is none or it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


@dataclass(frozen=True)
class JobFacts:
    """What SLURM says about a job now.

    seconds_left: until its time limit; None where it has none, or where it is over. restarts: requeues so far.
    """

    state: str
    seconds_left: float | None
    restarts: int


def parse_duration(text: str) -> float | None:
    """Seconds of SLURM's [[D-]H:]M:S; None for UNLIMITED, INVALID and the like."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def job_facts(job_id: str) -> JobFacts | None:
    """The facts of a job; None where SLURM cannot be asked or does not know the job."""
    fields = "--Format=State:.30,TimeLeft:.30,RestartCnt:.12"
    answer = _ask("squeue", "--noheader", "--states=all", "--jobs", job_id, fields)
    words = answer.stdout.split() if answer is not None and answer.returncode == 0 else []
    if len(words) != 3 or not words[2].isdigit():
        return None
    return JobFacts(words[0], parse_duration(words[1]), int(words[2]))


def _is_cancelled(facts: JobFacts) -> bool:
    """Whether somebody has ended the job. `scontrol requeue` would bring even such a job back.

    While its processes end, a job is COMPLETING whatever the reason; only one that ran out of time has none left.
    """
    return facts.state == "CANCELLED" or (facts.state == "COMPLETING" and (facts.seconds_left or 0) > 0)


def requeue(job_id: str, restart_count: int) -> tuple[str, str]:
    """Have SLURM start this job again; to be called by one process only.

    restart_count: what this start of the job was told. Returns an outcome and, where it was refused, SLURM's words:
    REQUEUED (also where SLURM does so already), CANCELLED (somebody ended the job: leave it), NO_COMMAND (no scontrol
    here) or REFUSED (such as a job of --no-requeue).
    """
    facts = job_facts(job_id)
    if facts is not None:
        if facts.restarts > restart_count or facts.state in _COMES_BACK:
            return REQUEUED, ""
        if _is_cancelled(facts):
            return CANCELLED, ""
    answer = _ask("scontrol", "requeue", job_id)
    if answer is None:
        return NO_COMMAND, ""
    if answer.returncode == 0 or "pending" in answer.stderr.lower():  # pending: a requeue came before ours
        return REQUEUED, ""
    return REFUSED, " ".join(answer.stderr.split())


# Nodes that the next start does without

_USABLE = ("idle", "mixed", "allocated", "completing", "planned")  # as in sinfo; * is silent, $ in maintenance


def plan_exclusion(job_id: str, host: str, blamed: Collection[str]) -> tuple[list[str], str]:
    """All nodes that the next start of a job is to avoid so that it avoids `host`, and what to say about it.

    No nodes where the job cannot do without `host`: as many as it has now must be left of the same kind. blamed: hosts
    at fault at earlier starts; where nodes run out, these may be used again, never those that the user has excluded.
    """
    try:
        fields = _lines("squeue", "--noconvert", "--states=all", "--jobs", job_id, "--format=%P|%D|%n|%x|%v|%f")[0]
        partition, count, required, excluded, reservation, features = fields.split("|", 5)
        # With the features only where the job asks for some: they may name the rack
        sort = "%G" if features in ("", "(null)") else "%G|%f"
        listed = _lines("sinfo", "--Node", f"--partition={partition}", f"--format=%N|%T|{sort}")
        nodes = {name: (state, kind) for name, state, kind in (line.split("|", 2) for line in listed)}
        before = [] if excluded in ("", "(null)") else expand_node_list(excluded)
        fixed = [] if required in ("", "(null)") else expand_node_list(required)
        node = next((name for name in nodes if _short(name) == _short(host)), "")
        needed = int(count)
    except (ValueError, IndexError):
        return [], f"{host} is not excluded: SLURM does not say what else the job could use"
    if not node or node in fixed or reservation not in ("", "(null)"):
        why = f"partition {partition} has no such node" if not node else "the job asks for that node or a reservation"
        return [], f"{host} is not excluded: {why}"
    usable = {name for name, (state, _) in nodes.items() if state.startswith(_USABLE) and state[-1] not in "*$"}
    alike = {name for name in usable if nodes[name][1] == nodes[node][1]}
    again = [name for name in before if _short(name) in map(_short, blamed)]
    for dropped in ([], again):
        avoided = [name for name in before if name not in dropped] + [node]
        if len(alike.difference(avoided)) >= needed:
            return avoided, f"without {node}" + (f", but with {', '.join(dropped)}: nodes run out" if dropped else "")
    return [], f"{node} is not excluded: too few nodes like it would be left for a job of {needed}"


def exclude(job_id: str, nodes: Collection[str]) -> str:
    """Have a job that waits to start again avoid exactly these nodes; "" or why SLURM refuses (a running job)."""
    answer = _ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}")
    if answer is None:
        return "scontrol does not answer"
    return "" if answer.returncode == 0 else " ".join(answer.stderr.split())


def _lines(command: str, *arguments: str) -> list[str]:
    answer = _ask(command, "--noheader", *arguments)
    return answer.stdout.splitlines() if answer is not None and answer.returncode == 0 else []


def _short(host: str) -> str:
    return host.partition(".")[0]


class TimeLimit:
    """Knows when the job's time is up. Asked at every step, it looks at a clock; it asks SLURM only near the end."""

    def __init__(self, environment: Environment):
        self._job_id = environment.job_id
        self._end: float | None = None  # on time.monotonic()
        self._next_question = 0.0
        if self._job_id is None:
            return
        if not self._update() and environment.end_time is not None:
            self._end = time.monotonic() + environment.end_time - time.time()

    def _update(self) -> bool:
        facts = job_facts(self._job_id) if self._job_id is not None else None
        if facts is None:
            return False
        self._end = None if facts.seconds_left is None else time.monotonic() + facts.seconds_left
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the limit; None where there is none."""
        return None if self._end is None else self._end - time.monotonic()

    def reached(self, lead: float) -> bool:
        """Whether fewer than `lead` seconds are left. Before it says so, it asks whether the limit has been moved."""
        left = self.seconds_left
        if left is None or left > lead:
            return False
        if time.monotonic() >= self._next_question:
            self._next_question = time.monotonic() + _ASK_AGAIN_SECONDS
            self._update()
            left = self.seconds_left
        return left is not None and left <= lead
