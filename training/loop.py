"""The training run, from the command line to the last checkpoint; the same on one device and on many ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from data.corpus import CorpusError
from data.hashing import fold
from data.loader import Loader
from data.shards import ShardError
from model_extra import build_model
from slurm.environment import EnvironmentProblem
from slurm.preemption import StopSignals
from training.checkpoint import Checkpoint, CheckpointError, folder_name, list_checkpoints, prune, write_checkpoint
from training.config import ConfigError, TrainingConfig, parse_config
from training.distributed import World
from training.ema import Ema
from training.metrics import Recorder, keep_until, wandb_mode
from training.optimizers import load_named_state, make_optimizer, named_state
from training.parallel import compile_layers, parallelize
from training.setup import (
    Inputs,
    RunFolder,
    check_world,
    describe_launch,
    find_start,
    read_initial_weights,
    read_inputs,
    versions,
)
from training.step import NonFiniteError, StepLog, TrainState, agree, train_step
from training.summary import describe
from training.validation import validate

_PROBLEM = "a problem"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_INITIALISATION = 301  # purpose of the key that seeds the initial weights

_Result = TypeVar("_Result")


class OtherRankFailed(RuntimeError):
    """Rank 0 met an error and has reported it; this rank just stops."""


USER_ERRORS = (ConfigError, CorpusError, ShardError, EnvironmentProblem, CheckpointError, NonFiniteError)


def main(arguments: Sequence[str], description: str, make_world: Callable[[str], World]) -> int:
    """Entry point of both scripts. Returns the exit code; an error of the user's making is one sentence on stderr."""
    world = None
    try:
        config = parse_config(arguments, description)
        wandb_mode(config)  # better to know now that wandb is missing
        inputs = read_inputs(config)
        world = make_world(config.device)
        return train(inputs, world)
    except USER_ERRORS as error:
        prefix = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
        print(f"{prefix}error: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, CheckpointError | NonFiniteError) else 2
    except OtherRankFailed:
        return 1
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        print(f"error: {error.filename or 'a file of the run'}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step; nothing was lost", file=sys.stderr, flush=True)
        return 130
    finally:
        if world is not None:
            world.close()


def on_main(world: World, function: Callable[[], _Result]) -> _Result:
    """Call `function` on rank 0 and give its result to all ranks; where it fails, every rank stops."""
    result, error = None, None
    if world.is_main:
        try:
            result = function()
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = problem
    failed, shared = world.from_main((error is not None, result))
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
    model.to(world.device).train()
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
    return TrainState(step, model, parallelize(model, world), optimizer, ema)


@dataclass
class Records:
    """Where rank 0 writes; other ranks have none."""

    folder: RunFolder
    recorder: Recorder

    def log(self, entries: list[dict[str, Any]], last: bool = False) -> None:
        """Metrics of training steps, to files and console; `last` before something else is printed."""
        for entry in entries:
            self.recorder.log(entry)
            self.recorder.show(entry, last)


def save(state: TrainState, inputs: Inputs, world: World, records: Records | None) -> None:
    """Write a checkpoint on rank 0; all ranks learn whether that worked."""

    def write() -> None:
        assert records is not None
        config, parent = inputs.config, records.folder.checkpoints
        place = write_checkpoint(
            parent,
            state.step,
            tensors={
                "model": state.model.state_dict(),
                "ema": state.ema.state_dict(),
                "optimizer": named_state(state.optimizer, state.model),
            },
            record={
                "tokens": inputs.plan.tokens_before(state.step),
                "flags": config.to_dict(),
                "data": inputs.data_identity,
                "versions": versions(),
            },
            files={
                "config.json": json.dumps(inputs.model_config.to_dict(), indent=1).encode(),
                "tokenizer.json": inputs.tokenizer_text.encode(),
            },
        )
        prune(parent, config.keep_last, config.save_steps)
        records.recorder.say(f"step {state.step:>6}  saved {place}")

    on_main(world, write)


def validation_metrics(state: TrainState, inputs: Inputs, world: World) -> dict[str, Any]:
    """Validation of the weights and of their average."""
    assert inputs.held_out is not None
    arguments = (inputs.held_out, world, inputs.config.local_batch_size, bool(inputs.config.mixed_precision))
    metrics = validate(state.model, *arguments, prefix="valid/")
    with state.ema.swapped_in(state.model):
        metrics |= validate(state.model, *arguments, prefix="valid/ema_")
    return {"step": state.step, "stats/tokens": inputs.plan.tokens_before(state.step), **metrics}


def due(step: int, every: int, max_steps: int) -> bool:
    """Whether something that happens every `every` steps (0: never), and at the end, happens after `step` steps."""
    return step == max_steps or (every > 0 and step % every == 0)


def resume_command() -> str:
    """The command line that goes on with this run."""
    program = Path(sys.argv[0]).name
    launcher = "python" if program == "train_single_gpu.py" else "torchrun/srun ..."
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.split("=")[0] in ("--resume", "--checkpoint_filename"):
            skip = not skip and "=" not in argument
            continue
        kept.append(argument)
    return f"{launcher} {program} {shlex.join(kept)} --resume auto"


def train(inputs: Inputs, world: World) -> int:
    """Run `inputs` to its last step, or until a signal asks to stop. Returns the exit code."""
    split = check_world(inputs, world.size)
    inputs = dataclasses.replace(inputs, config=resolve_device_defaults(inputs.config, world.device))
    config = inputs.config
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        folders: list[RunFolder] = []

        def open_run() -> tuple[Checkpoint | None, list[str]]:
            folders.append(stack.enter_context(closing(RunFolder(config.run_folder))))
            return find_start(folders[0], inputs)

        checkpoint, notes = on_main(world, open_run)
        state = make_state(inputs, world, checkpoint)
        if world.is_main:
            for note in notes:
                print(f"note: {note}", flush=True)
            parameters = sum(p.numel() for p in state.model.parameters())
            print(describe(inputs, world, split, parameters, bool(config.mixed_precision), state.step), flush=True)
        if state.step == config.max_steps:
            if world.is_main:
                print(f"{config.run_folder} is complete: {config.max_steps} steps are done, nothing to do", flush=True)
            return 0

        records = None
        if world.is_main:
            keep_until(folders[0].metrics, state.step)
            wandb_id = folders[0].write_config(inputs, describe_launch(world.size, world.device, state.step))
            facts = {"model": inputs.model_config.to_dict(), "world_size": world.size, "data": inputs.data_identity}
            recorder = Recorder(config, folders[0].path, wandb_id, state.step, facts)
            records = Records(folders[0], stack.enter_context(closing(recorder)))
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
            stopped = _run_steps(state, inputs, world, loader, records, signals)
        except NonFiniteError as error:
            if not world.is_main:
                raise OtherRankFailed from error
            newest = next(iter(list_checkpoints(config.run_folder / "checkpoints")), None)
            good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
            hint = "a lower --learning_rate or --max_gradient, or --no-mixed_precision, usually helps"
            raise NonFiniteError(f"{error}. Nothing was saved since; {good}; {hint}") from error

    if world.is_main and stopped:
        print(f"stopped by {stopped} after step {state.step}\ngo on with: {resume_command()}", flush=True)
    elif world.is_main:
        place = config.run_folder / "checkpoints" / folder_name(state.step)
        print(f"done: {config.max_steps} steps; the model is in {place}", flush=True)
    return 1 if stopped and stopped.startswith(_PROBLEM) else 0


def _run_steps(
    state: TrainState, inputs: Inputs, world: World, loader: Loader, records: Records | None, signals: StopSignals
) -> str | None:
    """All remaining steps; returns what stopped the run early, or None."""
    config, log, waited, saved = inputs.config, StepLog(inputs, world), 0.0, None
    for batch in loader:
        problem = records.recorder.problem if records is not None else None
        targets, stop = agree(world, batch, wants_stop=bool(signals.received or problem))
        if stop:
            finished = log.flush()  # raises before a bad state could be saved
            if records is not None:
                records.log(finished, last=True)
            if saved != state.step:
                save(state, inputs, world, records)
            reasons = world.gather(f"{_PROBLEM}: {problem}" if problem else signals.received)
            return next(reason for reason in reasons if reason)

        done = train_step(state, inputs, world, batch, targets)
        done.facts["stats/loader_wait_seconds"], waited = loader.waited - waited, loader.waited
        finished = log.push(done)
        validates = inputs.held_out is not None and due(state.step, config.validate_every, config.max_steps)
        saves = due(state.step, config.save_every, config.max_steps) or state.step in config.save_steps
        if validates or saves:
            finished += log.flush()  # as above
        if records is not None:
            records.log(finished, last=validates)
        if validates:
            metrics = validation_metrics(state, inputs, world)
            if records is not None:
                records.recorder.log(metrics)
                records.recorder.say(_validation_line(metrics))
        if saves:
            save(state, inputs, world, records)
            saved = state.step
        if validates or saves:
            log.restart_clock()
    return None


def _validation_line(metrics: dict[str, Any]) -> str:
    parts = [
        f"{name} {metrics[f'valid/{name}_loss']:.3f} (EMA {metrics[f'valid/ema_{name}_loss']:.3f})"
        for name in ("masked", "causal")
        if f"valid/{name}_loss" in metrics
    ]
    return f"step {metrics['step']:>6}  validation loss: {', '.join(parts)}"
