"""Requeue of a job whose ranks have ended: reports which failed first and why, and requeues where they could not.

    python slurm/requeue.py --exit_code CODE_OF_SRUN [--can_start] -- FLAGS OF THE RUN
    python slurm/requeue.py --count -- FLAGS OF THE RUN

The ranks requeue their job themselves. Left for this script are the cases where they cannot: a container without
scontrol, a signal that came before Python could handle it, and, with REQUEUE_ON_CRASH=1, a failure of hardware or
network (training/errors.py has the kinds), after which the next start avoids the host at fault, where there is a single
one. The ranks have recorded the kind in the run folder; srun knows only how the worst of them ended, perhaps by its
own signal. This script's exit code is the job's, or START_AGAIN: a job script that can start the ranks again
(--can_start) is to do so in the allocation that it has, which takes seconds where a requeue takes minutes, with the
options for srun in the file --place: without nodes that died, as long as LEAST_NODES are left. --attend ends a srun
that waits for such a node. --count prints how many starts of the job there were before this one.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.cli import Parser
from training import preemption
from training.config import ConfigError, TrainingConfig, parse_config
from training.environment import Environment, expand_node_list, read_environment, tasks_per_node
from training.errors import BUG, DONE, HARDWARE, KINDS, kind_of_code
from training.preemption import RestartRefused, excuse_attempt, register_attempt, takes_steps
from training.status import (
    FAILED,
    FINISHED,
    REQUEUE_WANTED,
    REQUEUED,
    RUNNING,
    Status,
    StatusFile,
    checkpoint_folders,
    first_failure,
    hosts_at_fault,
    newest_step,
    read_status,
    starts_so_far,
)

START_AGAIN = 76  # no exit code of a rank (training/errors.py)
_PROBE_SECONDS = 4.0  # within which a node that lives starts a process
_LAST_SECONDS = 2.0  # for ranks to say and record what ended them
_EARLY = {128 + signal.SIGHUP, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2, 128 + signal.SIGTERM}


def finish(
    config: TrainingConfig,
    environment: Environment,
    exit_code: int,
    requeue_on_crash: bool,
    can_start: bool = False,
    place: Path | None = None,
) -> tuple[int, str]:
    """Exit code of the job, or START_AGAIN if it `can_start` the ranks itself, and a last message ("" for none).

    place: the file of srun's options for the next start, which may go without nodes that died.
    """
    status = read_status(config.run_folder)
    if status is not None and status.job_id != environment.job_id:
        status = None  # another job's
    elif status is not None and status.restart_count != environment.restart_count:
        status = replace(status, state=RUNNING)  # of an earlier start; this one has written none
    if exit_code == 0 and (status is None or status.state != REQUEUE_WANTED):
        return DONE, ""
    if status is not None and status.state in (FINISHED, REQUEUED):
        return DONE, ""  # what came afterwards, such as a late signal, changes nothing
    failure = first_failure(config.run_folder, environment.job_id, environment.restart_count)
    if status is not None and status.state == REQUEUE_WANTED:
        cause = ""
    elif failure is not None:
        cause = f"rank {failure.rank} on {failure.host} failed first: {failure.error}"
    elif exit_code > 128:
        cause = f"a rank was killed by {_signal_name(exit_code - 128)}; srun's lines above say which"
    else:
        cause = f"a rank ended with exit code {exit_code}; its error is above"
    wanted = status is not None and status.state == REQUEUE_WANTED
    early = exit_code in _EARLY and (failure is None or failure.secondary)
    if early:
        excuse_attempt(config, environment)
    kind = kind_of_code(exit_code) if failure is None else KINDS.get(failure.kind, BUG)
    code = exit_code if failure is None else kind.code
    if config.requeue == "never" or not (wanted or early or (kind.retried and requeue_on_crash)):
        return _fail(config, environment, status, code, cause)
    host = failure.host_at_fault if failure is not None and kind is HARDWARE else ""
    can_start = can_start and not (wanted or early)
    return _requeue(config, environment, status, code, cause, host, can_start, place)


def _requeue(
    config: TrainingConfig,
    environment: Environment,
    status: Status | None,
    exit_code: int,
    cause: str,
    host: str,
    can_start: bool,
    place: Path | None,
) -> tuple[int, str]:
    """host: the one at fault, which the next start avoids if it can; "" if that is not known."""
    assert environment.job_id is not None
    step = newest_step(*checkpoint_folders(config.run_folder))
    try:
        register_attempt(config, environment, step)
    except RestartRefused as error:
        return _fail(config, environment, status, exit_code, f"{cause}. {error}")
    nodes, note = [], ""
    died, goes_on = _leave_out(place) if can_start and place is not None else ([], False)
    if died and not goes_on:
        host, can_start = died[0], False
    found = partial(hosts_at_fault, config.run_folder, environment.job_id)
    if host and not goes_on and found(environment.restart_count) <= {host}:
        again = any(host in found(start) for start in range(environment.restart_count))
        if again or not can_start or not takes_steps(host):  # once may be chance
            nodes, note = preemption.plan_exclusion(environment.job_id, host, found() - {host})
    if can_start and not nodes and _is_ours(environment):
        StatusFile(config.run_folder, environment, _last_step(config, status)).write(REQUEUED, cause, step)
        note = f" without {', '.join(died)}" if died else f"; {note}" if note else ""
        return START_AGAIN, f"{cause}; job {environment.job_id} starts again in its allocation{note}"
    outcome, answer = preemption.requeue(environment.job_id, environment.requeues)
    if outcome == preemption.REQUEUED:
        StatusFile(config.run_folder, environment, _last_step(config, status)).write(REQUEUED, cause, step)
        # Only now, since a running job cannot be changed
        if nodes and (refusal := preemption.exclude_nodes(environment.job_id, nodes)):
            nodes, note = [], f"{host} is not excluded: {refusal}"
        note = f"{' ' if nodes else '; '}{note}" if note else ""
        return DONE, f"{cause}{'; ' if cause else ''}SLURM starts job {environment.job_id} again{note}"
    reason = "it was cancelled" if outcome == preemption.CANCELLED else answer or outcome
    return _fail(config, environment, status, exit_code, f"{cause}; job {environment.job_id} is not requeued: {reason}")


def _leave_out(place: Path) -> tuple[list[str], bool]:
    """The nodes of the allocation that have died since its last start, and whether the next one goes on without: as
    LEAST_NODES are left. Its options for srun are in the file `place` then, as for the last one."""
    least = os.environ.get("LEAST_NODES", "")
    if not least.isdigit() or not int(least):
        return [], False
    nodes, probe = expand_node_list(os.environ["SLURM_JOB_NODELIST"]), partial(takes_steps, seconds=_PROBE_SECONDS)
    known = place.read_text().partition("--exclude=")[2].split("\n")[0]
    gone = known.split(",") if known else []
    present = [node for node in nodes if node not in gone]
    with ThreadPoolExecutor(16) as pool:
        died = [node for node, lives in zip(present, pool.map(probe, present), strict=True) if not lives]
    left = [node for node in present if node not in died]
    if not died or len(left) < int(least):
        return died, False
    tasks = dict(zip(nodes, tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"]), strict=True))
    ranks, avoided = sum(tasks[node] for node in left), ",".join([*gone, *died])
    # --overlap: SLURM may not have given back yet what the last start had
    place.write_text(f"--nodes={len(left)}\n--ntasks={ranks}\n--exclude={avoided}\n--overlap\n")
    return died, True


def attend(config: TrainingConfig, environment: Environment, srun: int) -> None:
    """End this srun, once a rank has recorded an error: it waits for its other nodes, of which one may be gone."""
    assert environment.job_id is not None
    while Path(f"/proc/{srun}").exists():
        failure = first_failure(config.run_folder, environment.job_id, environment.restart_count)
        if failure is not None and time.time() - failure.time > _LAST_SECONDS:
            preemption.end_steps(environment.job_id)
            time.sleep(1.0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(srun, signal.SIGKILL)
            return
        time.sleep(0.5)


def _is_ours(environment: Environment) -> bool:
    """Whether the allocation goes on, as far as SLURM tells: nobody has cancelled or requeued the job."""
    assert environment.job_id is not None
    job = preemption.query_job(environment.job_id)
    return job is not None and job.state == "RUNNING" and job.restarts == environment.requeues


def _last_step(config: TrainingConfig, status: Status | None) -> int:
    """Steps of the whole run: as it has counted them, where a budget in other units gives its length."""
    return config.max_steps if status is None else status.max_steps


def _fail(
    config: TrainingConfig, environment: Environment, status: Status | None, exit_code: int, cause: str
) -> tuple[int, str]:
    if status is not None and status.state in (RUNNING, FAILED):  # rank 0 may have died before it wrote so
        step = newest_step(*checkpoint_folders(config.run_folder))
        with contextlib.suppress(OSError):  # a full disk
            StatusFile(config.run_folder, environment, status.max_steps).write(FAILED, cause, step)
    return exit_code or BUG.code, f"job {environment.job_id} failed: {cause}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--exit_code", type=int, default=0, metavar="N", help="what srun returned")
    parser.add_argument("--can_start", action="store_true", help="the job script can start the ranks again")
    parser.add_argument("--place", type=Path, metavar="FILE", help="gets srun's options for the next start")
    parser.add_argument("--attend", type=int, metavar="PID", help="end this srun soon after a rank has failed")
    parser.add_argument("--count", action="store_true", help="print the number of the job's starts so far")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="the training flags, after --")
    arguments = parser.parse_args(argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the ranks have printed it
            config = parse_config(arguments.flags, "")
    except (ConfigError, SystemExit):
        return arguments.exit_code
    environment = read_environment(os.environ, alone=True)
    if arguments.count:
        print(max(environment.requeues, starts_so_far(config.run_folder, environment.job_id)))
        return DONE
    if arguments.attend:
        attend(config, environment, arguments.attend)
        return DONE
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # as the job script did; a requeue sends TERM, with work left to do here
    crash = os.environ.get("REQUEUE_ON_CRASH", "0") not in ("", "0")
    try:
        code, message = finish(config, environment, arguments.exit_code, crash, arguments.can_start, arguments.place)
    except OSError as error:
        code, message = arguments.exit_code or BUG.code, f"{error.filename or config.run_folder}: {error.strerror}"
    if message:
        print(message, file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
