"""Doctor: checks machines, network, run folder, shards and real steps before GPU hours are spent.

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
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a timeout of the store is a row of the table

import torch
import torch.distributed as dist

from data.cli import Parser
from data.wording import time_text
from slurm import doctor_machine, doctor_run
from slurm.doctor_ranks import COLUMNS, Doctor, Report, sentence
from slurm.doctor_steps import (
    LONG_STEP,
    StepTrial,
    assess_batch,
    assess_memory,
    assess_steps,
    expected_seconds,
    measure_steps,
)
from slurm.doctor_table import FAIL, OK, SKIP, WARN, Measurements, Row
from training.config import ConfigError, TrainingConfig, make_parser, parse_config
from training.distributed import World, choose_device, start_world
from training.environment import Environment, EnvironmentProblem, read_environment
from training.inputs import Inputs, choose_split, read_inputs, resolve_device_defaults
from training.plugins import Plugins
from training.sinks import check_sinks
from training.watchdog import RankMissing, RankStore

_DESCRIPTION = "Check machines, network, run folder, shards and one real step before training; takes training's flags."
_CHECKSUM_SECONDS = 4 * 3600.0  # terabytes of shards
_STEP_SECONDS = 900.0  # several compilations and steps
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


# The examination


@dataclass(frozen=True)
class Request:
    """The run to examine. config: None where `problem` says what is wrong with training's flags. environment_problem:
    why this process is examined alone."""

    assume_world_size: int
    checksums: str
    config: TrainingConfig | None
    problem: str
    environment: Environment
    environment_problem: str


def examine(doctor: Doctor, request: Request) -> None:
    """All checks. Every rank takes the same path through them, since it depends on gathered values alone."""
    environment, config = request.environment, request.config
    device, ranks = _examine_machines(doctor, request)
    world = _examine_network(doctor, environment, device, ranks, config)
    inputs = _open_inputs(doctor, request, device)
    if inputs is None:
        doctor.skip("the inputs cannot be used", "run", "shared folder", "shards", "kernels", "batch", "training step")
        return
    run = _examine_folder(doctor, inputs, environment)
    _examine_shards(doctor, inputs, request.checksums)
    if ranks:
        kernels = partial(doctor_machine.measure_kernels, inputs.config, inputs.model_config, device)
        doctor.check("kernels", kernels, doctor_machine.assess_kernels, _STEP_SECONDS)
    world_size = request.assume_world_size or environment.world_size
    split = _examine_batches(doctor, inputs, world_size, device, ranks)
    start = run["step"] if run else 0
    if world is None or doctor.store.missing:
        doctor.skip("the ranks have no process group", "training step")
    elif split is None:
        doctor.skip("the rows cannot be divided among ranks", "training step")
    elif start == inputs.config.max_steps:
        doctor.skip("no step is left", "training step")
    else:
        _examine_steps(doctor, StepTrial(inputs, world_size, split, start), world, environment)


def _examine_machines(doctor: Doctor, request: Request) -> tuple[torch.device, Measurements | None]:
    """Environment, devices and versions. Returns this rank's device and what each rank says of its own; None where
    ranks are missing or have no device."""
    environment, config = request.environment, request.config
    if request.environment_problem:
        doctor.report.add(Row("environment", FAIL, request.environment_problem))
    else:
        doctor.report.add(doctor_machine.assess_environment(environment))
    choice, mixed = (config.device, config.mixed_precision) if config else ("auto", None)
    made = doctor.create(
        "ranks",
        lambda: choose_device(choice, environment.local_rank),
        partial(doctor_machine.measure_rank, environment),
        partial(doctor_machine.assess_ranks, environment=environment),
    )
    device, ranks = made or (torch.device("cpu"), None)
    if ranks:
        doctor.assess("devices", lambda: doctor_machine.assess_devices(ranks, choice, mixed))
        doctor.assess("processors", lambda: doctor_machine.assess_processors(ranks))
    doctor.check("versions", doctor_machine.measure_versions, doctor_machine.assess_versions)
    return device, ranks


def _examine_network(
    doctor: Doctor,
    environment: Environment,
    device: torch.device,
    ranks: Measurements | None,
    config: TrainingConfig | None,
) -> World | None:
    """The process group and its all_reduce; None where one of them fails."""
    names = "process group", doctor_machine.HOST_ALL_REDUCE, doctor_machine.DEVICE_ALL_REDUCE
    if ranks is None or environment.world_size == 1:
        reason = "one process" if ranks else "ranks are missing" if doctor.store.missing else "a rank has no device"
        doctor.skip(reason, *names)
        return World(0, 1, device, environment) if ranks else None
    # Where the flags are unusable the network can still be examined. Ranks may compile for minutes beside each other.
    basis = config or TrainingConfig(train_path="-", config_file="-", tokenizer_path="-", name="-")
    basis = dataclasses.replace(basis, collective_timeout=_STEP_SECONDS / 60)
    start = time.monotonic()

    def assess_group(_: Measurements) -> Row:
        backends = "gloo and NCCL" if device.type == "cuda" else "gloo"
        return Row("process group", OK, f"{backends}, joined after {time_text(time.monotonic() - start)}")

    networks = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network between hosts"
    remedy = f"MASTER_ADDR must lead to rank 0; {networks}"
    made = doctor.create(
        names[0], lambda: start_world(basis), lambda _: None, assess_group, collective_on=device, remedy=remedy
    )
    if made is None:
        doctor.skip("no process group", *names[1:])
        return None
    world, _ = made
    measure, assess = partial(doctor_machine.measure_host_reduce, world), doctor_machine.assess_host_reduce
    if doctor.check(names[1], measure, assess, collective_on=device, remedy=networks) is None:
        doctor.skip(f"no {names[1]}", names[2])
        return None
    measure, assess = (
        partial(doctor_machine.measure_device_reduce, world),
        partial(doctor_machine.assess_device_reduce, ranks=ranks),
    )
    remedy = f"NCCL_DEBUG=INFO shows the transport (NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 avoid one); {networks}"
    return None if doctor.check(names[2], measure, assess, collective_on=device, remedy=remedy) is None else world


def _open_inputs(doctor: Doctor, request: Request, device: torch.device) -> Inputs | None:
    """Everything that training reads; None where a rank cannot."""

    def open_inputs() -> Inputs:
        if request.config is None:
            raise ConfigError(request.problem)
        if not request.config.local_batch_size:
            raise ConfigError("--local_batch_size is auto, which a run finds at its start: give the doctor a number")
        check_sinks(request.config)
        Plugins(request.config.plugin)
        return read_inputs(resolve_device_defaults(request.config, device))

    def assess(identities: Measurements) -> Row:
        if (different := len(set(identities.values()))) > 1:
            remedy = "every node must read the same shards and tokenizer"
            return Row("inputs", FAIL, f"ranks read {different} different corpora", remedy)
        detail = f"flags, tokenizer, model configuration and shards fit together (data {identities[0][:12]})"
        return Row("inputs", OK, detail)

    made = doctor.create("inputs", open_inputs, lambda inputs: inputs.data_identity, assess)
    return None if made is None else made[0]


def _examine_folder(doctor: Doctor, inputs: Inputs, environment: Environment) -> dict[str, Any] | None:
    """The run folder; returns the run that it holds, None where that could not be found out."""
    rank, folder = doctor.store.rank, inputs.config.run_folder
    runs = doctor.check(
        "run",
        lambda: doctor_run.measure_run(inputs, environment) if rank == 0 else None,
        lambda measured: doctor_run.assess_run(measured[0], inputs),
    )
    run = runs[0] if runs else None
    with ExitStack() as stack:

        def probe() -> dict[str, Any] | None:
            try:
                return stack.enter_context(doctor_run.FolderProbe(folder)).measure() if rank == 0 else None
            except OSError as error:
                raise ConfigError(f"--output_dir: {folder} cannot be written: {error.strerror}") from error

        probes = doctor.check("run folder", probe)
        if probes is None:
            doctor.skip("the run folder cannot be written", "shared folder", "file locks", "clocks", "disk space")
            return run
        found = probes[0]
        clocks = doctor.check("clocks", lambda: {"time": time.time()}) or {}
        look = partial(doctor_run.measure_shared, found, rank)
        doctor.check("shared folder", look, lambda measured: doctor_run.assess_shared(measured, found, clocks))
        known = run or {"step": 0, "saved": 0}
        doctor.assess("disk space", lambda: doctor_run.assess_space(found, known, inputs))
    return run


def _examine_shards(doctor: Doctor, inputs: Inputs, checksums: str) -> None:
    """Sizes and checksums of the shards, and how often they are read."""
    sets = {f"valid shards{name and f' of {name}'}": each.corpus for name, each in inputs.held_out_sets.items()}
    if not sets:
        doctor.skip("no --valid_path", "valid shards")
    for name, corpus in {"train shards": inputs.corpus, **sets}.items():
        measure = partial(doctor_run.measure_shards, corpus, checksums, doctor.store.rank, doctor.store.size)
        doctor.check(name, measure, partial(doctor_run.assess_shards, name=name, corpus=corpus), _CHECKSUM_SECONDS)
    doctor.assess("epochs", lambda: doctor_run.assess_epochs(inputs))


def _examine_batches(
    doctor: Doctor, inputs: Inputs, world_size: int, device: torch.device, ranks: Measurements | None
) -> str | None:
    """Batches and memory for so many ranks; returns how they split rows, None where they cannot."""
    splits = doctor.check(
        "batch",
        lambda: choose_split(inputs.config, inputs.plan, world_size),
        lambda _: assess_batch(inputs, world_size),
    )
    if splits is None:
        doctor.skip("the rows cannot be divided among ranks", "memory")
    elif ranks:
        doctor.assess("memory", lambda: assess_memory(inputs, ranks, device, world_size))
    return None if splits is None else splits[0]


def _examine_steps(doctor: Doctor, trial: StepTrial, world: World, environment: Environment) -> None:
    """Real steps; a CPU that is too slow for a whole micro-batch makes one of one row."""
    estimates = doctor.check("training step", lambda: expected_seconds(trial, world.device))
    if estimates is None:
        return
    trial = dataclasses.replace(trial, one_row=max(estimates.values()) > LONG_STEP)
    measure, assess = partial(measure_steps, trial, world), partial(assess_steps, trial=trial, environment=environment)
    remedy = "--no-compile or a smaller --local_batch_size tell more; --verbose shows where this came from"
    doctor.check("training step", measure, assess, _STEP_SECONDS, world.device, remedy)


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
        help="SHA-256 of the first and the last shard (quick), of all, divided among the ranks (full), of none (off)",
    )
    group.add_argument("--json", default="", metavar="FILE", help="also write the rows, with their numbers, as JSON")
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: 120)",
    )
    group.add_argument("--verbose", action="store_true", help="print the traceback of every error")


def _read_request(arguments: Sequence[str]) -> tuple[argparse.Namespace, Request]:
    """Flags of doctor and training, and the environment. Exits with 2 for unusable flags; only rank 0 prints why."""
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
        return _leave(store, 0)  # rank 0 reports for all
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
