"""The training run, from the command line to the last checkpoint; the same on one device and on many ranks."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from data.counter_rng import fold
from data.loader import Loader
from evaluation.pair_accuracy import pairs_line
from model_extra import build_model
from training.checkpoint import Checkpoint
from training.compiling import compile_layers
from training.config import ConfigError, TrainingConfig, parse_config
from training.distributed import World, single_world
from training.ema import Ema
from training.errors import DONE, HardwareError, NonFiniteError, OtherRankFailed, report_error
from training.forward_backward import ForwardBackward, graph_obstacle
from training.gradients import GradientBuckets, broadcast_parameters
from training.metric_logger import MetricLogger, keep_until, missing_steps, unbreakable, wandb_mode
from training.optimizers import load_named_state, make_optimizer
from training.preemption import StopSignals
from training.rank_checks import DivergenceError, check_ranks, check_same_run
from training.resume import find_resume_point, read_initial_weights, was_restarted
from training.saving import Saver, check_finite
from training.setup import Inputs, RunFolder, check_world, describe_launch, read_inputs
from training.status import (
    FAILED,
    FINISHED,
    RUNNING,
    Attempt,
    checkpoint_folders,
    list_checkpoints,
    newest_step,
    read_status,
    write_status,
)
from training.step import AsyncStepMetrics, TrainState, agree, train_step, warm_up
from training.stopping import (
    Stop,
    StopConditions,
    conclude,
    may_requeue,
    most_urgent,
    register_attempt,
    resume_command,
)
from training.summary import describe
from training.update import OptimizerStep
from training.validation import pair_metrics, sample_texts, validation_line, validation_metrics
from training.watchdog import Watchdog

_INITIALISATION = 301  # purpose of the key that seeds the initial weights
_DATA_SECONDS = 1.0  # to wait for rows before looking whether a rank wants to stop
_LOCK_SECONDS = 180.0  # for the processes of a job's last start to notice that there is a newer one

_Result = TypeVar("_Result")


def main(
    arguments: Sequence[str],
    description: str,
    make_world: Callable[[TrainingConfig], World],
    signals: StopSignals | None = None,
) -> int:
    """Entry point of both scripts and of slurm/launch.py's jobs. Returns the exit code (see errors.py).

    signals: handlers that are in place already; they stay until the process ends.
    """
    world = config = None
    try:
        config = _parse(arguments, description, alone=make_world is single_world)
        wandb_mode(config)  # better to know now that wandb is missing
        inputs = read_inputs(config)
        world = make_world(config)
        if signals is None:
            with StopSignals() as own, ExitStack() as stack:
                return train(inputs, world, own, stack)
        signals.__enter__()  # and never left: a signal that comes while this process ends must not kill it
        with ExitStack() as stack:
            return train(inputs, world, signals, stack)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, config, world)
    finally:
        if world is not None:
            world.close()


def _parse(arguments: Sequence[str], description: str, alone: bool) -> TrainingConfig:
    """The configuration. What is wrong with the command line is wrong on every rank, and rank 0 says so.

    alone: this process is all of its run, whichever of a launcher's it is.
    """
    rank = "0" if alone else os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    with redirect_stderr(io.StringIO() if rank != "0" else sys.stderr):
        return parse_config(arguments, description)


def on_main(world: World, function: Callable[[], _Result]) -> _Result:
    """Call `function` on rank 0 and give its result to all ranks; where it fails, every rank stops."""
    result, error = None, None
    if world.is_main:
        try:
            result = function()
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = problem
    failed, shared = world.broadcast_object((error is not None, result), "a result of rank 0")
    if error is not None:
        raise error
    if failed:
        raise OtherRankFailed
    return cast(_Result, shared)


def resolve_device_defaults(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """Fill in the flags whose default depends on the device."""
    on_cuda = device.type == "cuda"
    return dataclasses.replace(
        config,
        mixed_precision=on_cuda if config.mixed_precision is None else config.mixed_precision,
        compile=on_cuda if config.compile is None else config.compile,
    )


def make_state(inputs: Inputs, world: World, checkpoint: Checkpoint | None) -> TrainState:
    """Fresh state from the seed, or the state of a checkpoint."""
    config = inputs.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(config.seed, _INITIALISATION) >> 1)
        model = build_model(inputs.model_config)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.tensors("model"))
    elif config.initial_weights:
        try:
            model.load_state_dict(read_initial_weights(inputs))
        except RuntimeError as error:
            shown = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"--initial_weights {config.initial_weights!r} does not fit the model: {shown}"
            ) from error
    broadcast_parameters(model.to(world.device).train(), world)
    optimizer = make_optimizer(
        model,
        config.optimizer,
        lr=config.learning_rate,
        betas=(config.optimizer_beta1, config.optimizer_beta2),
        eps=config.optimizer_eps,
        weight_decay=config.weight_decay,
    )
    ema = Ema(model, config.ema_decay)
    step = 0
    if checkpoint is not None:
        step = checkpoint.step
        load_named_state(optimizer, model, checkpoint.tensors("optimizer", world.device), step)
        ema.load_state_dict(checkpoint.tensors("ema", world.device))
    if config.compile:
        compile_layers(model)
    update = OptimizerStep(model, optimizer, ema, config.max_gradient or math.inf)
    options, precise = inputs.builder.options, bool(config.mixed_precision)
    record = not graph_obstacle(config, inputs.model_config, world.device)
    gradients = GradientBuckets(model, world, config.allreduce_dtype, stay=record)
    forward_backward = ForwardBackward(model, gradients, options, config.z_loss_weight, world.device, precise, record)
    return TrainState(step, model, gradients, optimizer, ema, update, forward_backward)


@dataclass
class Records:
    """Where rank 0 writes; other ranks have none."""

    folder: RunFolder
    recorder: MetricLogger
    saver: Saver
    conditions: StopConditions
    status: Callable[[str, str, int], None]

    def log(self, entries: list[dict[str, Any]], last: bool = False) -> None:
        """Metrics of training steps, to files and console; `last` before something else is printed."""
        for entry in entries:
            self.recorder.log(entry)
            self.recorder.show(entry, last)

    def save(self, state: TrainState, last: bool) -> bool:
        """Write a checkpoint and note it; False where a later one may work. Raises SaveError."""
        began = time.monotonic()
        self.recorder.sync()
        place = self.saver.save(state, last)
        if place is None:
            return False
        seconds = time.monotonic() - began
        self.conditions.saved(seconds)
        self.recorder.say(f"step {state.step:>6}  saved {place} in {seconds:.1f} s")
        self.note(RUNNING, state.step)
        return True

    def note(self, state: str, step: int) -> None:
        """Write status.json; where that fails the run is none the worse."""
        try:
            self.status(state, "", step)
        except OSError as error:
            self.recorder.say(f"note: {self.folder.path}/status.json cannot be written: {error.strerror}")

    def failed(self, error: BaseException) -> None:
        """Make the run's status `failed`, and leave no more than a moment for what is still to be uploaded."""
        self.recorder.hurry(failed=True)
        with suppress(OSError):
            reason = str(error) or type(error).__name__
            self.status(FAILED, " ".join(reason.split())[:1000], newest_step(*self.folder.checkpoint_folders))


def save(state: TrainState, inputs: Inputs, world: World, records: Records | None, last: bool) -> bool:
    """Write a checkpoint on rank 0, the `last` of this start or not; all ranks learn whether that worked.

    Raises DivergenceError or NonFiniteError for a bad state, SaveError where a later save may not help either.
    """
    check_ranks(state, world)  # what differs must not take the place of a good checkpoint
    check_finite(state)

    def write() -> bool:
        assert records is not None
        return records.save(state, last)

    return on_main(world, write)


def checkpoint_bytes(state: TrainState) -> int:
    """About how large a checkpoint is: weights, their average and two moments, in float32."""
    return 16 * sum(parameter.numel() for parameter in state.model.parameters())


def due(step: int, every: int, max_steps: int) -> bool:
    """Whether something that happens every `every` steps (0: never), and at the end, happens after `step` steps."""
    return step == max_steps or (every > 0 and step % every == 0)


def train(inputs: Inputs, world: World, signals: StopSignals, stack: ExitStack) -> int:
    """Run `inputs` to its last step, or until something asks to stop. Returns the exit code.

    stack: takes what has to be closed, and is closed after an error has been told: a thread or an upload may take long.
    """
    inputs = dataclasses.replace(inputs, config=resolve_device_defaults(inputs.config, world.device))
    check_same_run(inputs, world)  # before anything in which ranks that differ could wait for each other
    split = check_world(inputs, world.size)
    config, environment = inputs.config, world.environment
    records = None
    try:
        signals.install(signal.SIGINT)
        folders: list[RunFolder] = []
        attempts: list[Attempt] = []

        def open_run() -> tuple[Checkpoint | None, list[str]]:
            restarted, home = was_restarted(environment), config.run_folder
            if environment.restart_count > 0 and not home.exists():
                print(f"note: this job has run before, but there is no {home}: is its disk mounted here?", flush=True)
            if environment.job_id is not None:
                step = newest_step(*checkpoint_folders(config.run_folder))
                attempts.append(register_attempt(config, environment, step))
            patience = _LOCK_SECONDS if restarted else 0.0
            folders.append(stack.enter_context(closing(RunFolder(config.run_folder, patience))))
            return find_resume_point(folders[0], inputs, restarted, environment.job_id)

        checkpoint, notes = on_main(world, open_run)
        if world.size > 1:
            stack.enter_context(closing(Watchdog(config, world)))
        state = make_state(inputs, world, checkpoint)
        if world.is_main:
            for note in notes:
                print(f"note: {note}", flush=True)
            parameters = sum(p.numel() for p in state.model.parameters())
            print(describe(inputs, world, split, parameters, bool(config.mixed_precision), state.step), flush=True)
        if state.step == config.max_steps:
            if world.is_main:
                status = read_status(config.run_folder)
                if status is None or status.state != FINISHED:  # a signal came after the last save
                    write_status(config.run_folder, environment, FINISHED, "", state.step, config.max_steps)
                print(f"{config.run_folder} is complete: {config.max_steps} steps are done, nothing to do", flush=True)
            return DONE

        conditions = StopConditions(
            config, signals, environment, attempts[0] if attempts else None, checkpoint_bytes(state)
        )
        if world.is_main:
            records = stack.enter_context(open_records(folders[0], inputs, world, state.step, conditions))
        if config.compile:
            compiled = warm_up(state, inputs, world, split)
            if records is not None:
                records.recorder.say(compiled)
        loader = Loader(
            inputs.builder,
            rank=world.rank,
            world_size=world.size,
            split=split,
            local_batch_size=config.local_batch_size,
            start_step=state.step,
            pin_memory=world.device.type == "cuda",
        )
        stack.enter_context(closing(loader))
        try:
            stop = _run_steps(state, inputs, world, loader, records, conditions)
        except (NonFiniteError, DivergenceError) as error:
            if not world.is_main:
                raise OtherRankFailed from error
            newest = next(iter(list_checkpoints(*checkpoint_folders(config.run_folder))), None)
            good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
            error.args = (f"{error}. Nothing was saved since; {good}; {error.hint}",)
            raise
        if records is not None and stop is None:
            records.note(FINISHED, state.step)
            records.recorder.publish(state.step)
            records.recorder.say(f"done: {config.max_steps} steps; the model is in {records.saver.newest}")
        elif records is not None and stop is not None and may_requeue(stop, config, environment):
            records.recorder.preempting()
    except (Exception, KeyboardInterrupt) as error:
        if records is not None:
            records.failed(error)
        return report_error(error, config, world)

    stack.close()
    signals.stopped_early = stop is not None
    if stop is None or not world.is_main:
        return DONE  # whatever rank 0 ends with; a launcher must not end rank 0 before it has
    # The files are closed and the lock is free: from here on SLURM may start the job again.
    code, words = conclude(stop, state.step, config, environment)
    with unbreakable(sys.stdout):
        print(f"{words}\nresume with: {resume_command()}", flush=True)
    return code


@contextmanager
def open_records(
    folder: RunFolder, inputs: Inputs, world: World, step: int, conditions: StopConditions
) -> Iterator[Records]:
    """Everything that rank 0 writes from `step` on."""
    config = inputs.config

    def status(state: str, reason: str, done: int) -> None:
        write_status(folder.path, world.environment, state, reason, done, config.max_steps)

    for path in filter(Path.exists, (folder.metrics, folder.samples)):
        if damaged := keep_until(path, step):
            print(f"note: {path} had {damaged} damaged line{'s' * (damaged > 1)}, left out now", flush=True)
    first = ((folder.read_config() or {}).get("launches") or [{}])[0].get("start_step", 0) if step else 0
    if missing := missing_steps(folder.metrics, first + 1, step):
        print(f"note: {folder.metrics} lacks {len(missing)} steps, the first of them {missing[0]}", flush=True)
    wandb_id = folder.write_config(inputs, describe_launch(inputs, world, step))
    facts = {"model": inputs.model_config.to_dict(), "world_size": world.size, "data": inputs.data_identity}
    status(RUNNING, "", step)
    with closing(MetricLogger(config, folder.path, wandb_id, step, facts, conditions.signalled)) as recorder:
        yield Records(folder, recorder, Saver(folder, inputs, recorder.say), conditions, status)


def _run_steps(
    state: TrainState,
    inputs: Inputs,
    world: World,
    loader: Loader,
    records: Records | None,
    conditions: StopConditions,
) -> Stop | None:
    """All remaining steps; returns what stopped the run early, or None."""
    # What it began with is in a checkpoint already, or follows from the seed.
    config, log, waited, saved = inputs.config, AsyncStepMetrics(inputs, world), 0.0, state.step
    while state.step < config.max_steps:
        batch = loader.peek(_DATA_SECONDS)
        if loader.late > 60 * config.collective_timeout:
            raise HardwareError(f"no rows came from {config.train_path} for {loader.late:.0f} s; do its disks answer?")
        wish = conditions.wish(records.recorder.problem if records is not None else None)
        world.progress.step = state.step + 1
        targets, stops, ready = agree(world, batch, wants_stop=wish is not None)
        world.progress.in_step = not stops
        if stops:
            finished = log.flush()  # raises before a bad state could be saved
            if records is not None:
                records.log(finished, last=True)
            if saved != state.step:
                save(state, inputs, world, records, last=True)
            return most_urgent(world.all_gather_objects(wish, "stop requests"))
        if batch is None or not ready:  # an epoch's index takes its time: a stop is heard nevertheless, by all ranks
            continue

        loader.advance()
        done = train_step(state, inputs, world, batch, targets)
        done.facts["stats/loader_wait_seconds"], waited = loader.waited - waited, loader.waited
        finished = log.push(done)
        validates = inputs.held_out is not None and due(state.step, config.validate_every, config.max_steps)
        evaluates = inputs.pairs is not None and due(state.step, config.evaluate_every, config.max_steps)
        saves = due(state.step, config.save_every, config.max_steps) or state.step in config.save_steps
        if validates or evaluates or saves:
            finished += log.flush()  # as above
            world.progress.in_step = False  # until the next agreement, before which rank 0 may have more to do
        if records is not None:
            records.log(finished, last=validates or evaluates)
        if validates:
            metrics = validation_metrics(state, inputs, world)
            if records is not None:
                records.recorder.log(metrics)
                records.recorder.say(validation_line(metrics))
                records.recorder.log_samples(lambda: sample_texts(state, inputs))
        if evaluates and inputs.pairs is not None:
            metrics = pair_metrics(state, inputs, inputs.pairs, world)
            if records is not None:
                records.recorder.log(metrics)
                records.recorder.say(pairs_line(metrics, inputs.pairs))
        if saves and save(state, inputs, world, records, last=state.step == config.max_steps):
            saved = state.step
        if validates or evaluates or saves:
            log.restart_clock()
    return None
