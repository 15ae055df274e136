"""What a careful person checks before spending GPU hours: machines, network, run folder, shards, one real step.

    srun python slurm/doctor.py <the flags of train_multi_gpu.py>       # in a job, started as training will be
    torchrun --nproc_per_node 8 slurm/doctor.py <flags>                 # on one machine without SLURM
    python slurm/doctor.py <flags> --assume_world_size 64               # in a login shell: one process for 64 ranks

Prints one row per check and changes nothing: what it writes to the run folder to test it is removed again. Exit code: 0
without a FAIL, 1 with one, 2 for flags that cannot be parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store's time-out is a row of the table

import torch
import torch.distributed as dist

from data.cli import Parser
from slurm import doctor_machine, doctor_run
from slurm.doctor_ranks import COLUMNS, Doctor, Report, sentence
from slurm.doctor_steps import (
    PATIENT_STEP,
    StepTrial,
    expected_seconds,
    judge_batch,
    judge_memory,
    judge_steps,
    measure_steps,
)
from slurm.doctor_table import FAIL, OK, SKIP, WARN, Row
from training.config import ConfigError, TrainingConfig, make_parser, parse_config
from training.distributed import World, choose_device, start_world
from training.environment import Environment, EnvironmentProblem, read_environment
from training.loop import resolve_device_defaults
from training.metric_logger import wandb_mode
from training.rank_store import RankMissing, RankStore
from training.setup import Inputs, check_world, read_inputs
from training.wording import time_text

_DESCRIPTION = "Check machines, network, run folder, shards and one real step before training; takes training's flags."
_CHECKSUM_SECONDS = 4 * 3600.0  # terabytes of shards
_STEP_SECONDS = 900.0  # several compilations and steps
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


# The examination


@dataclass(frozen=True)
class Request:
    """What to examine. config is None where `problem` says what is wrong with training's flags; with an
    `environment_problem`, this process stands alone."""

    assume_world_size: int
    checksums: str
    config: TrainingConfig | None
    problem: str
    environment: Environment
    environment_problem: str


def examine(doctor: Doctor, request: Request) -> None:
    """All checks. Every rank takes the same way through this, since it depends on gathered facts alone."""
    environment, store, report, config = request.environment, doctor.store, doctor.report, request.config
    planned = request.assume_world_size or environment.world_size
    device = torch.device("cpu")

    def place() -> dict[str, Any]:
        nonlocal device
        device = choose_device(config.device if config else "auto", environment.local_rank)
        return doctor_machine.measure_place(environment, device)

    if request.environment_problem:
        report.add(Row("environment", FAIL, request.environment_problem))
    else:
        report.add(doctor_machine.judge_environment(environment))
    places = doctor.check("ranks", place, partial(doctor_machine.judge_ranks, environment=environment))
    if places:
        wish, mixed = (config.device, config.mixed_precision) if config else ("auto", None)
        doctor.check("devices", dict, lambda _: doctor_machine.judge_devices(places, wish, mixed))
        doctor.check("processors", dict, lambda _: doctor_machine.judge_processors(places))
    doctor.check("versions", doctor_machine.measure_versions, doctor_machine.judge_versions)
    world = _examine_network(doctor, environment, device, places, config)

    def open_inputs() -> str:
        nonlocal inputs
        if config is None:
            raise ConfigError(request.problem)
        wandb_mode(config)
        inputs = read_inputs(resolve_device_defaults(config, device))
        return inputs.data_identity

    inputs: Inputs | None = None
    opened = doctor.check("inputs", open_inputs, _judge_inputs)
    if opened is None or inputs is None or config is None:
        doctor.skip("the inputs cannot be used", "run", "shared folder", "shards", "kernels", "batch", "training step")
    else:
        run = _examine_folder(doctor, inputs, environment)
        for name, corpus in (
            ("train shards", inputs.corpus),
            ("valid shards", inputs.held_out and inputs.held_out.corpus),
        ):
            if corpus is None:
                doctor.skip("no --valid_path", name)
                continue
            measure = partial(doctor_run.measure_shards, corpus, request.checksums, store.rank, store.size)
            doctor.check(name, measure, partial(doctor_run.judge_shards, name=name, corpus=corpus), _CHECKSUM_SECONDS)
        plan = inputs  # for the closures below: never None from here on
        if places:
            kernels = partial(doctor_machine.measure_kernels, plan.config, plan.model_config, device)
            doctor.check("kernels", kernels, doctor_machine.judge_kernels, _STEP_SECONDS)
        doctor.check("epochs", dict, lambda _: doctor_run.judge_epochs(plan))
        splits = doctor.check("batch", lambda: check_world(plan, planned), lambda _: judge_batch(plan, planned))
        if splits is None:
            doctor.skip("rows cannot be shared out", "memory")
        elif places:
            doctor.check("memory", dict, lambda _: judge_memory(plan, places, device, planned))
        start = run["step"] if run else 0
        if world is None or store.missing or splits is None:
            why = "rows cannot be shared out" if world and not store.missing else "the ranks cannot sum"
            doctor.skip(why, "training step")
        elif start == inputs.config.max_steps:
            doctor.skip("no step is left", "training step")
        else:
            _examine_step(doctor, StepTrial(inputs, planned, splits[0], start), world, environment)


def _judge_inputs(facts: dict[int, Any]) -> Row:
    identities = set(facts.values())
    if len(identities) > 1:
        remedy = "every node must read the same shards and tokenizer"
        return Row("inputs", FAIL, f"ranks read {len(identities)} different corpora", remedy)
    return Row("inputs", OK, f"flags, tokenizer, model configuration and shards fit together (data {facts[0][:12]})")


def _examine_network(
    doctor: Doctor, environment: Environment, device: torch.device, places: Any, config: TrainingConfig | None
) -> World | None:
    """The process group and its sums; None where the ranks cannot sum."""
    if places is None or environment.world_size == 1:
        reason = "one process" if places else "ranks are missing" if doctor.store.missing else "a rank has no device"
        doctor.skip(reason, "process group", "host sums", "all-reduce")
        return World(0, 1, device, environment) if places else None
    # Where the flags are unusable the network can still be looked at. Ranks may compile for minutes beside each other.
    basis = config or TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="-")
    basis = dataclasses.replace(basis, collective_timeout=_STEP_SECONDS / 60)
    worlds: list[World] = []
    start, seconds = time.monotonic(), doctor.store.timeout

    def join() -> None:
        worlds.append(start_world(basis))

    def joined(_facts: dict[int, Any]) -> Row:
        kinds = "gloo and NCCL" if device.type == "cuda" else "gloo"
        return Row("process group", OK, f"{kinds}, joined after {time_text(time.monotonic() - start)}")

    networks = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network between hosts"
    checked: list[tuple[str, Callable[[], Any], Callable[[dict[int, Any]], Row], str]] = [
        ("process group", join, joined, f"MASTER_ADDR must lead to rank 0; {networks}"),
        (
            "host sums",
            lambda: doctor_machine.measure_host_reduce(worlds[0]),
            doctor_machine.judge_host_reduce,
            networks,
        ),
        (
            "all-reduce",
            lambda: doctor_machine.measure_device_reduce(worlds[0]),
            lambda facts: doctor_machine.judge_device_reduce(facts, places),
            f"NCCL_DEBUG=INFO tells which way hangs (NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 avoid one); {networks}",
        ),
    ]
    for number, (name, measure, judge, remedy) in enumerate(checked):
        if doctor.together(name, measure, judge, seconds, device, remedy) is None:
            doctor.skip(f"no {name}", *(later[0] for later in checked[number + 1 :]))
            return None
    return worlds[0]


def _examine_folder(doctor: Doctor, inputs: Inputs, environment: Environment) -> dict[str, Any] | None:
    """The run folder; returns what run it holds, None where that could not be found out."""
    store, probes = doctor.store, []
    runs = doctor.check(
        "run",
        lambda: doctor_run.measure_run(inputs, environment) if store.rank == 0 else None,
        lambda facts: doctor_run.judge_run(facts[0], inputs),
    )
    run = runs[0] if runs else None

    def probe() -> dict[str, Any] | None:
        if store.rank != 0:
            return None
        folder = inputs.config.run_folder
        try:
            probes.append(doctor_run.FolderProbe(folder))
            return probes[0].measure()
        except OSError as error:
            raise ConfigError(f"--output_dir: {folder} cannot be written: {error.strerror}") from error

    try:
        made = doctor.check("run folder", probe)
        if made is None:
            doctor.skip("the run folder cannot be written", "shared folder", "file locks", "clocks", "disk space")
            return run
        clocks = doctor.check("clocks", lambda: {"time": time.time()}) or {}
        look = partial(doctor_run.measure_shared, made[0], store.rank)
        doctor.check("shared folder", look, lambda facts: doctor_run.judge_shared(facts, made[0], clocks))
        doctor.check(
            "disk space", dict, lambda _: doctor_run.judge_space(made[0], run or {"step": 0, "saved": 0}, inputs)
        )
    finally:
        for left in probes:
            left.remove()
    return run


def _examine_step(doctor: Doctor, trial: StepTrial, world: World, environment: Environment) -> None:
    """Real steps; a CPU that is too slow for a whole micro-batch makes one of one row."""
    estimates = doctor.check("training step", lambda: expected_seconds(trial, world.device))
    if estimates is None:
        return
    trial = dataclasses.replace(trial, one_row=max(estimates.values()) > PATIENT_STEP)
    measure, judge = partial(measure_steps, trial, world), partial(judge_steps, trial=trial, environment=environment)
    remedy = "--no-compile or a smaller --local_batch_size tell more; --verbose shows where this came from"
    doctor.together("training step", measure, judge, _STEP_SECONDS, world.device, remedy)


# The command


def _add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("doctor")
    group.add_argument(
        "--assume_world_size", type=int, default=0, metavar="N", help="in one process: ranks of the planned run"
    )
    group.add_argument(
        "--checksums",
        choices=("quick", "full", "off"),
        default="quick",
        help="SHA-256 of the first and the last shard (quick), of all, shared out over the ranks (full), of none (off)",
    )
    group.add_argument("--json", default="", metavar="FILE", help="also write the rows, with their numbers, as JSON")
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: 120)",
    )
    group.add_argument("--verbose", action="store_true", help="print the traceback of whatever a check met")


def _read_request(arguments: Sequence[str]) -> tuple[argparse.Namespace, Request]:
    """Flags of doctor and training, and the environment. Exits with 2 for unusable flags; only rank 0 says why."""
    environment, unusable = Environment("none"), ""
    try:
        environment = read_environment(os.environ)
    except EnvironmentProblem as error:
        unusable = str(error)
    own = Parser(add_help=False)
    everything = make_parser(_DESCRIPTION)
    for parser in (own, everything):
        _add_flags(parser)
    with ExitStack() as quiet:
        if environment.rank:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stderr(nowhere))
            quiet.enter_context(redirect_stdout(nowhere))
        everything.parse_known_args(arguments)  # checks the types of all flags, and answers --help
        options, rest = own.parse_known_args(arguments)
        if options.assume_world_size < 0 or (options.assume_world_size and environment.world_size > 1):
            everything.error("--assume_world_size N is for one process, in place of N ranks")
        if not options.timeout > 0:
            everything.error(f"--timeout is {options.timeout:g}; it must be above 0")
        config, problem = None, ""
        try:
            config = parse_config(rest, _DESCRIPTION)
        except ConfigError as error:
            problem = str(error)
    return options, Request(options.assume_world_size, options.checksums, config, problem, environment, unusable)


def _write_json(path: str, report: Report, arguments: Sequence[str], code: int) -> None:
    rows = [dataclasses.asdict(row) for row in report.rows]
    counts = {result: report.counts[result] for result in (OK, WARN, FAIL, SKIP)}
    content = {"time": time.time(), "arguments": [*arguments], "exit_code": code, "counts": counts, "rows": rows}
    Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # unlike death by the signal, this removes what the doctor wrote to the run folder


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    options, request = _read_request(arguments)
    rank = request.environment.rank
    report, store = Report(shown=rank == 0), None
    previous = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        store = RankStore(request.environment, options.timeout)
        examine(Doctor(store, report, options.verbose), request)
    except (RankMissing, RuntimeError) as error:  # torch's errors of the store are RuntimeErrors
        if rank:
            print(f"[rank {rank}] error: {sentence(error)}", file=sys.stderr, flush=True)
            return _leave(store, 1)
        remedy = "MASTER_ADDR and MASTER_PORT must lead to rank 0, and the port must be free"
        report.add(Row("rendezvous", FAIL, sentence(error), remedy))
    except KeyboardInterrupt:
        print("interrupted: what was written to the run folder is removed", file=sys.stderr, flush=True)
        return 130
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if rank:
        return _leave(store, 0)  # rank 0 speaks for all
    code = 1 if report.counts[FAIL] else 0
    print(f"{'-' * COLUMNS}\n{report.summary()}", flush=True)
    if options.json:
        try:
            _write_json(options.json, report, arguments, code)
        except OSError as error:
            print(f"error: --json {options.json}: {error.strerror}", file=sys.stderr, flush=True)
            code = 1
    return _leave(store, code)


def _leave(store: RankStore | None, code: int) -> int:
    """End all communication; where a thread may still wait for another rank, end the process at once."""
    if store is not None:
        store.close()
        if store.hung or store.missing or (store.failed and store.size > 1):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
