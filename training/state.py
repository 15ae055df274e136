"""The state of training: all that a step changes, made from the seed or from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from data.counter_rng import fold
from data.flag_rules import factors
from data.masking import MaskingOptions
from model import ModelConfig
from model_extra import build_model
from model_protocol import PretrainingModel
from ops.bit_sums import BitSums
from training.checkpoint import Checkpoint, checkpoint_bytes, read_initial_weights
from training.config import ConfigError, TrainingConfig
from training.distributed import World
from training.ema import Ema
from training.forward_backward import ForwardBackward, compile_layers, graph_obstacle, recompute_activations
from training.gradients import BUCKET_BYTES, GradientBuckets, broadcast_parameters
from training.optimizers import MatrixOptions, OptimizerStep, load_named_state, make_optimizer, takes_over
from training.status import checkpoint_folders

_INITIALISATION = 301  # purpose of the key that seeds the initial weights


@dataclass
class TrainState:
    """All that training changes. `step` counts optimizer steps done.

    before_update: called before weights change, which a save may still be copying.
    """

    step: int
    world: World
    model: PretrainingModel
    gradients: GradientBuckets
    optimizer: torch.optim.Optimizer
    ema: Ema
    optimizer_step: OptimizerStep
    forward_backward: ForwardBackward
    starts: Mapping[str, int]  # steps at which the optimizer's state and the schedule began: 0, where nothing was reset
    bit_sums: BitSums = field(default_factory=BitSums)
    before_update: Callable[[], None] = lambda: None

    @property
    def parameters(self) -> int:
        """The model's number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is."""
        return checkpoint_bytes(self.parameters)

    @classmethod
    def create(
        cls,
        config: TrainingConfig,
        model_config: ModelConfig,
        options: MaskingOptions,
        world: World,
        checkpoint: Checkpoint | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> TrainState:
        """The state of a checkpoint, or a fresh one from the seed and --initial_weights, on the device of `world`.

        config: device defaults resolved. All ranks get rank 0's weights. Raises ConfigError where weights do not fit.
        """
        model = _initial_model(config, model_config, checkpoint)
        broadcast_parameters(model.to(world.device).train(), world)
        optimizer = _optimizer(config, model)
        ema = Ema(model, config.ema_decay)
        step, starts = _begin(config, checkpoint)
        if checkpoint is not None:
            if starts["optimizer"] != step:
                tensors = checkpoint.tensors("optimizer", world.device)
                load_named_state(optimizer, model, tensors, step - starts["optimizer"])
            ema.load_state_dict(checkpoint.tensors("ema", world.device))
        recomputed = _recomputed(config, model)
        if config.compile:
            compile_layers(model, recomputed)
        recompute_activations(recomputed)
        captures = not graph_obstacle(config, model_config, world.device)
        gradients = GradientBuckets(model, world, config.allreduce_dtype, stay=captures, bucket_bytes=bucket_bytes)
        forward_backward = ForwardBackward(
            model, gradients, options, config.z_loss_weight, world.device, bool(config.mixed_precision), captures
        )
        update = OptimizerStep(model, optimizer, ema, config.max_gradient or math.inf)
        return cls(step, world, model, gradients, optimizer, ema, update, forward_backward, starts)


def _begin(config: TrainingConfig, checkpoint: Checkpoint | None) -> tuple[int, dict[str, int]]:
    """The first step, and `TrainState.starts`: a checkpoint's, but for what a branch resets or cannot take over."""
    starts = {"optimizer": 0, "schedule": 0}
    if checkpoint is None:
        return 0, starts
    starts |= checkpoint.record.get("starts", {})
    homes = [home.resolve() for home in checkpoint_folders(config.run_folder)]
    if checkpoint.path.resolve().parent in homes:
        return checkpoint.step, starts
    step = checkpoint.step
    if "step" in config.reset:
        step, starts = 0, {"optimizer": starts["optimizer"] - step, "schedule": 0}
    if "schedule" in config.reset:
        starts["schedule"] = step
    taken = takes_over(config.optimizer, checkpoint.record["flags"].get("optimizer", config.optimizer))
    if "optimizer" in config.reset or not taken:
        starts["optimizer"] = step
    return step, starts


def _optimizer(config: TrainingConfig, model: PretrainingModel) -> torch.optim.Optimizer:
    """The optimizer that the flags ask for. Raises ConfigError."""
    peak = config.learning_rate
    of_matrices = (config.matrix_learning_rate or peak) / peak
    matrices = MatrixOptions(of_matrices, config.matrix_momentum, config.cautious_weight_decay, config.rest_optimizer)
    betas = (config.optimizer_beta1, config.optimizer_beta2)
    by_role = factors(config.learning_rate_by_role), factors(config.weight_decay_by_role)
    try:
        return make_optimizer(
            model, config.optimizer, peak, betas, config.optimizer_eps, config.weight_decay, matrices, *by_role
        )
    except (TypeError, ValueError) as error:  # of another package, perhaps
        raise ConfigError(f"--optimizer {config.optimizer} cannot be made: {error}") from error


def _recomputed(config: TrainingConfig, model: PretrainingModel) -> list[nn.Module]:
    """The modules that --activation_checkpointing asks for. Raises ConfigError where the model has none."""
    which = config.activation_checkpointing
    parts = [] if which == "none" else model.recomputed_parts(which)
    if which != "none" and not parts:
        raise ConfigError(
            f"--activation_checkpointing is {which!r} but {type(model).__name__} has no such modules in lists of "
            "layers; leave it out"
        )
    return parts


def _initial_model(
    config: TrainingConfig, model_config: ModelConfig, checkpoint: Checkpoint | None
) -> PretrainingModel:
    """The model with the weights that training starts from, on the CPU."""
    with torch.random.fork_rng(devices=[]):  # the seed decides, and nobody else's random numbers move
        torch.manual_seed(fold(config.seed, _INITIALISATION) >> 1)
        model = build_model(model_config)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.tensors("model"))
    elif config.initial_weights:
        try:
            model.load_state_dict(read_initial_weights(config.initial_weights))
        except RuntimeError as error:
            shown = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"--initial_weights {config.initial_weights!r} does not fit the model: {shown}"
            ) from error
    return model
