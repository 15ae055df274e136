"""Hybrid masked/causal pretraining on one device: a CUDA GPU or the CPU.

train_multi_gpu.py is the same run on the ranks of SLURM or torchrun.
"""

import sys

from training.preemption import StopSignals, early_signals

# Before torch is imported: that takes seconds, and SLURM may not wait so long with a signal.
signals = early_signals() if __name__ == "__main__" else None

from collections.abc import Callable, Sequence

from data.loader import Loader
from evaluation.in_training import Evaluations
from evaluation.suites import ZeroShot
from report.html_report import publish_report
from training.config import TrainingConfig, is_first, parse_on_rank
from training.distributed import World, single_world
from training.inputs import Inputs, choose_split, read_inputs
from training.metric_logger import MetricLogger, Profiler, open_logger
from training.plugins import Plugins
from training.rank_checks import Agreements, check_same_run
from training.resume import open_run
from training.saves import Parts, Saver, save, save_and_stop
from training.sinks import check_sinks, leave
from training.state import TrainState
from training.status import StatusFile
from training.step import AsyncStepMetrics, answer_spike, fit_micro_batch, train_step, warm_up
from training.stopping import RunEnd, Stop, StopConditions
from training.summary import describe
from training.watchdog import Watchdog


def main(
    arguments: Sequence[str],
    connect: Callable[[TrainingConfig], World] = single_world,
    signals: StopSignals | None = None,
    description: str = (__doc__ or "").splitlines()[0],
) -> int:
    """One rank's part of a run, from the command line to the last checkpoint; returns the exit code (see errors.py).

    connect: makes the world, of one process or of the ranks of SLURM or torchrun. signals: handlers already in place.
    """
    with RunEnd(signals) as end:  # closes what was opened; errors become sentences and exit codes
        # ---------------------------------------- What to train: refused here in one sentence, or not at all
        config = end.config = parse_on_rank(arguments, description, alone=connect is single_world)
        check_sinks(config)  # better to know now that wandb is missing
        plugins = Plugins(config.plugin)
        inputs = read_inputs(config, not is_first(connect is single_world))  # tokenizer, model sizes, shards, data plan
        zero_shot = ZeroShot.read(inputs)
        world = end.connects(connect(config))
        inputs = inputs.on_device(world.device)
        config = end.config = inputs.config
        # Ranks that differ could hang in a collective.
        check_same_run(inputs, world, zero_shot.content if zero_shot else "", plugins.content)
        split = choose_split(config, inputs.plan, world.size)

        # ---------------------------------------- Where it starts: step 0, or a checkpoint of any number of ranks
        start = open_run(inputs, world, end.stack)  # rank 0 alone has the run folder, and holds its lock
        if world.size > 1:
            end.closes(Watchdog(config, world))
        state = TrainState.create(config, inputs.model_config, inputs.builder.options, world, start.checkpoint)
        inputs = fit_micro_batch(state, inputs, split)
        config = end.config = inputs.config
        if world.is_main:
            offered, part = zero_shot.summary if zero_shot else "", state.gradients.largest_part
            print(describe(inputs, world, split, state.parameters, state.step, offered, part), flush=True)
        status = StatusFile(config.run_folder, world.environment, config.max_steps)
        size, hours = state.checkpoint_bytes, start.hours
        conditions = StopConditions(config, end.signals, world.environment, start.attempt, size, hours)
        evaluations = Evaluations(inputs, zero_shot, plugins, conditions.wanted)
        owed = evaluations.owed(state.step, start.metrics)
        if state.step == config.max_steps and not owed:
            return end.already_complete(status)
        log, saver = end.log, None
        parts = end.closes(Parts(state)) if state.gradients.sharded else None
        if start.folder is not None:
            log = open_logger(start.folder, inputs, world, state.step, status, conditions.signalled, plugins)
            end.opens(log, status)
            saver = end.saver = end.closes(Saver(start.folder, inputs, log, conditions, status, state, parts))
        if config.compile and state.step < config.max_steps:
            log.say(warm_up(state, inputs.builder, split, config.local_batch_size))
        loader = end.closes(inputs.loader(world, split, state.step))

        # ---------------------------------------- The loop, and how it ends: finished, stopped, or requeued by SLURM
        end.stop = run_steps(state, inputs, evaluations, owed, loader, log, saver, conditions)
        end.step = state.step
        if end.stop is None and saver is not None:
            end.finish()
            publish_report(config.run_folder, log, state.step)
            log.say(f"done: {config.max_steps} steps; the model is in {saver.newest}")
    return end.code


def run_steps(
    state: TrainState,
    inputs: Inputs,
    evaluations: Evaluations,
    owed: tuple[str, ...],
    loader: Loader,
    log: MetricLogger,
    saver: Saver | None,
    conditions: StopConditions,
) -> Stop | None:
    """All remaining steps; returns what stopped the run before its end, or None. log, saver: write on rank 0. owed:
    evaluations of the step that it resumes from."""
    config, plan, world = inputs.config, inputs.plan, state.world
    if not evaluations.measure(owed, state, log):  # which a stop has ended in the run's last start
        return save_and_stop(state, saver, conditions)
    metrics = AsyncStepMetrics(world, inputs.model_config, config.log_stats_every)
    profiler = Profiler(config.profile, config.run_folder, world, log.say)
    agreements, saved = Agreements(config, world, loader, conditions, log, saver), state.step
    while state.step < config.max_steps:
        agreed, batch = agreements.before(state.step), loader.peek(0.0)  # this rank's rows of global batch `state.step`
        if agreed.stops:
            log.log_steps(metrics.flush(), last=True)  # raises before a bad state could be saved
            return save_and_stop(state, saver, conditions)
        if agreed.saves and state.step != saved:  # --save_minutes are over
            log.log_steps(metrics.flush(), last=True)
            save(state, saver)
            saved = state.step
            metrics.restart_clock()
        if batch is None or not agreed.ready:  # an epoch's index takes its time: all ranks hear of a stop nevertheless
            continue

        waited = loader.advance()
        agreements.begin(state.step + 1)  # on its way while this step computes
        profiler.begin(state.step + 1)
        step = train_step(state, batch, agreed.targets, config, plan)  # micro-batches, all_reduce, clipping, LAMB, EMA
        step.metrics.update(inputs.exposure_after(state.step))
        answer_spike(state, step, config.spike_policy == "rollback", saver, log)
        log.log_steps(metrics.push(step, loader_wait_seconds=waited))
        profiler.end(state.step)

        evaluates = evaluations.due(state.step)  # validation and samples, plugins, zero-shot suites
        saves = inputs.saves_after(state.step) or state.step in inputs.named_checkpoints
        if not (evaluates or saves):
            continue
        log.log_steps(metrics.flush(), last=bool(evaluates))
        world.progress.in_step = False  # until the next agreement, before which rank 0 may have more to do
        if not evaluations.measure(evaluates, state, log):  # ended by a stop request; the resume measures them first
            agreements.drop()
            return save_and_stop(state, saver, conditions)
        if saves:
            save(state, saver, last=state.step == config.max_steps)
            saved = state.step
        metrics.restart_clock()
    return None


if __name__ == "__main__":
    leave(main(sys.argv[1:], single_world, signals))
