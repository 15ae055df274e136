"""The state of training: all that a step changes, made from the seed or from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from data.counter_rng import fold
from data.flag_rules import factors
from data.masking import MaskingOptions
from model import LTGBert, ModelConfig
from model_extra import build_model
from model_protocol import PretrainingModel
from training.checkpoint import Checkpoint, checkpoint_bytes, read_initial_weights
from training.config import ConfigError, TrainingConfig
from training.distributed import World, on_main
from training.ema import Ema, weights_file
from training.errors import NonFiniteError
from training.forward_backward import ForwardBackward, compile_layers, graph_obstacle, recompute_activations
from training.gradients import BUCKET_BYTES, GradientBuckets
from training.loss import SpikeGuard
from training.optimizers import (
    ByRole,
    MatrixOptions,
    OptimizerStep,
    load_named_state,
    make_optimizer,
    named_state,
    takes_over,
)
from training.rank_checks import check_same_model
from training.schedules import parse_courses, steps_of
from training.status import checkpoint_folders

Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # of each file of a checkpoint, by name
_INITIALISATION = 301  # purpose of the key that seeds the initial weights


@dataclass
class TrainState:
    """All that training changes. `step` counts optimizer steps done.

    spikes: what --spike_policy knows, None for "none". before_update: called before weights change, which a save may
    still be copying. averages: beside `ema`, by name (config.further_averages).
    write_part: takes this rank's part of a checkpoint where rank 0 does not write all of it.
    """

    step: int
    world: World
    model: PretrainingModel
    gradients: GradientBuckets
    optimizer: torch.optim.Optimizer
    ema: Ema
    optimizer_step: OptimizerStep
    forward_backward: ForwardBackward
    starts: dict[str, int]  # steps at which the optimizer's state, the schedule and the average of the tail begin
    averages: dict[str, Ema] = field(default_factory=dict)
    spikes: SpikeGuard | None = None
    before_update: Callable[[], None] = lambda: None
    write_part: Callable[[Tensors], None] = lambda tensors: None

    @property
    def parameters(self) -> int:
        """The model's number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is."""
        return checkpoint_bytes(self.parameters, len(self.averages))

    @property
    def begun_averages(self) -> dict[str, Ema]:
        """Those further averages that have taken in weights."""
        return _begun(self.averages, self.step, self.starts)

    def count_step(self, updated: bool) -> None:
        """Count a step that is done, and take the weights into the further averages unless they were left as they were:
        updates are counted from `starts`, one less then."""
        self.step += 1
        if not updated:
            self.starts["optimizer"] += 1
            self.starts["tail"] += self.starts["tail"] < self.step
        for average in self.begun_averages.values() if updated else ():
            average.update(self.model)

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
        model = _initial_model(config, model_config, checkpoint, world)
        captures = not graph_obstacle(config, world.device)
        layers, in_bfloat16 = _layers(model, "layer", config, "sharding", "full"), bool(config.mixed_precision)
        mesh = None if config.sharding == "none" else world.mesh(config.sharding_ranks)
        in_bfloat16 &= isinstance(model, LTGBert)  # what others do with their matrices is not known
        gradients = GradientBuckets(
            model, world, config.allreduce_dtype, captures, bucket_bytes, mesh, layers, in_bfloat16
        )
        optimizer = _optimizer(config, model, gradients.owned)
        ema = Ema(model, config.ema_decays[0], gradients.owned, gradients.share_weights)
        averages = {name: Ema(model, 0.0, gradients.owned, gradients.share_weights) for name in config.further_averages}
        step, starts = _begin(config, checkpoint)
        if checkpoint is not None:
            of_it = {True: ema, **_begun(averages, step, starts)}
            _load(checkpoint, model, optimizer if starts["optimizer"] != step else None, of_it, step, starts, world)
        recomputed = _layers(model, config.activation_checkpointing, config, "activation_checkpointing", "mlp", "layer")
        if config.compile:
            compile_layers(model, {*recomputed, *gradients.layers.modules})
        recompute_activations(recomputed)
        gradients.layers.attach()
        # Copies of all weights would take more than layers do whose matrices and activations come and go.
        kept = not (gradients.layers.modules and config.activation_checkpointing == "layer")
        mixed = bool(config.mixed_precision)
        forward_backward = ForwardBackward(
            model, gradients, options, config.z_loss_weight, world.device, mixed, captures, kept
        )
        update = OptimizerStep(model, optimizer, ema, config.max_gradient or math.inf, gradients)
        spikes = None
        if config.spike_policy != "none":
            spikes = SpikeGuard(config.spike_threshold, checkpoint and checkpoint.record.get("spikes"))
        parts = (model, gradients, optimizer, ema, update, forward_backward, starts, averages)
        return cls(step, world, *parts, spikes=spikes)

    def return_to(self, checkpoint: Checkpoint) -> None:
        """Take weights, averages and moments of an earlier step of this run, and continue at the present one."""
        self.before_update()
        starts = {"optimizer": 0, "tail": checkpoint.step, **checkpoint.record.get("starts", {})}
        if (owned := self.gradients.owned) is None:
            self.model.load_state_dict(checkpoint.tensors("model"))
        else:
            own = {name: parameter for name, parameter in self.model.named_parameters() if parameter in owned}
            for name, tensor in checkpoint.tensors("model", self.world.device, own.__contains__).items():
                own[name].data.copy_(tensor)
            self.gradients.share_weights()
        averages = {True: self.ema, **_begun(self.averages, checkpoint.step, starts)}
        _load(checkpoint, self.model, self.optimizer, averages, checkpoint.step, starts, self.world)
        self.starts["optimizer"] = self.step - (checkpoint.step - starts["optimizer"])
        self.starts["tail"] = max(starts["tail"], self.step - max(0, checkpoint.step - starts["tail"]))
        if self.spikes is not None:
            self.spikes.restore(checkpoint.record.get("spikes", {}))


def _begin(config: TrainingConfig, checkpoint: Checkpoint | None) -> tuple[int, dict[str, int]]:
    """The first step, and `TrainState.starts`: a checkpoint's, but for what a branch resets or cannot take over."""
    tail = config.max_steps - steps_of(config.tail_average, config.max_steps)
    starts = {"optimizer": 0, "schedule": 0, "tail": tail}
    if checkpoint is None:
        return 0, starts
    begun = checkpoint.record.get("starts", {})
    starts |= begun
    homes = [home.resolve() for home in checkpoint_folders(config.run_folder)]
    if checkpoint.path.resolve().parent in homes:
        return checkpoint.step, starts
    step = checkpoint.step
    if "step" in config.reset:
        step, starts = 0, {"optimizer": starts["optimizer"] - step, "schedule": 0}
    same_tail = begun.get("tail") == tail and step == checkpoint.step
    starts["tail"] = tail if same_tail else max(tail, step)  # an average of another tail begins anew
    if "schedule" in config.reset:
        starts["schedule"] = step
    taken = takes_over(config.optimizer, checkpoint.record["flags"].get("optimizer", config.optimizer))
    if "optimizer" in config.reset or not taken:
        starts["optimizer"] = step
    return step, starts


def _optimizer(
    config: TrainingConfig, model: PretrainingModel, owned: Collection[nn.Parameter] | None
) -> torch.optim.Optimizer:
    """The optimizer that the flags ask for, of the parameters that this rank owns. Raises ConfigError."""
    peak = config.learning_rate
    of_matrices = (config.matrix_learning_rate or peak) / peak
    matrices = MatrixOptions(of_matrices, config.matrix_momentum, config.cautious_weight_decay, config.rest_optimizer)
    betas = (config.optimizer_beta1, config.optimizer_beta2)
    texts = (config.learning_rate_by_role, config.weight_decay_by_role, config.beta1_by_role, config.beta2_by_role)
    try:
        settings = (peak, betas, config.optimizer_eps, config.weight_decay, matrices, ByRole(*map(factors, texts)))
        optimizer = make_optimizer(model, config.optimizer, *settings, owned)
    except (TypeError, ValueError) as error:  # of another package, perhaps
        raise ConfigError(f"--optimizer {config.optimizer} cannot be made: {error}") from error
    moved = parse_courses(config.value_schedules).keys()
    needed = {"momentum": "momentum", "beta1": "betas", "beta2": "betas"}
    if absent := [name for name in moved & needed.keys() if all(needed[name] not in g for g in optimizer.param_groups)]:
        raise ConfigError(f"--value_schedules moves {min(absent)}, and --optimizer {config.optimizer} has none")
    return optimizer


def _layers(model: PretrainingModel, which: str, config: TrainingConfig, flag: str, *choices: str) -> list[nn.Module]:
    """The model's `recomputed_parts`, which a flag with one of these values wants. Raises ConfigError where it has
    none."""
    if (value := getattr(config, flag)) not in choices:
        return []
    if not (parts := model.recomputed_parts(which)):
        raise ConfigError(
            f"--{flag} is {value!r} but {type(model).__name__} has no such modules in lists of layers; leave it out"
        )
    return parts


def _load(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    averages: Mapping[bool | str, Ema],
    step: int,
    starts: Mapping[str, int],
    world: World,
) -> None:
    """Restore this rank's part of optimizer (None: it begins anew) and averages, of which nothing else is read. An
    average that the run before a branch did not keep begins with the weights."""
    owned = averages[True].state_dict().keys()
    if optimizer is not None:

        def wanted(key: str) -> bool:
            return (name := key.rpartition("/")[2]) in owned or name not in names

        names = dict(model.named_parameters())
        tensors = checkpoint.tensors("optimizer", world.device, wanted)
        load_named_state(optimizer, model, tensors, step - starts["optimizer"])
    for name, average in averages.items():
        if checkpoint.holds(weights_file(name)):
            average.load_state_dict(checkpoint.tensors(weights_file(name), world.device, owned.__contains__))


def _begun(averages: Mapping[str, Ema], step: int, starts: Mapping[str, int]) -> dict[str, Ema]:
    """Those that have taken in weights after `step` steps: that of the tail has not before it begins."""
    return {name: average for name, average in averages.items() if name != "tail" or step > starts["tail"]}


# What is saved of it


def check_finite(state: TrainState, tensors: Tensors) -> None:
    """Refuse to save weights, averages or moments that are not finite: one norm for each, one look at the device.

    Raises NonFiniteError, on all ranks alike: where each has its part of the state they tell each other, else all hold
    the same bits (see rank_checks.py).
    """
    named = {f"{file}/{name}": value for file, part in tensors.items() for name, value in part.items()}
    named = {name: value.to(state.world.device) for name, value in named.items() if value.is_floating_point()}
    finite = torch.isfinite(torch.stack(torch._foreach_norm(list(named.values())))).tolist() if named else []
    bad = [name for name, good in zip(named, finite, strict=True) if not good][:1]
    if state.gradients.sharded:
        bad = [name for names in state.world.all_gather_objects(bad, "names of bad state") for name in names]
    if bad:
        raise NonFiniteError(f"step {state.step}, before its checkpoint: {bad[0]} is not finite")


def state_tensors(state: TrainState) -> Tensors:
    """All that a checkpoint holds of the state, by file, not copies; of a divided state this rank's part."""
    others = set[str]()
    if (owned := state.gradients.owned) is not None:
        everything = state.model.named_parameters(remove_duplicate=False)
        others = {name for name, parameter in everything if parameter not in owned}
    return {
        "model": {name: tensor for name, tensor in state.model.state_dict().items() if name not in others},
        "ema": state.ema.state_dict(),
        **{weights_file(name): average.state_dict() for name, average in state.begun_averages.items()},
        "optimizer": named_state(state.optimizer, state.model),
    }


# Initial weights


def broadcast_parameters(model: nn.Module, world: World) -> None:
    """Give rank 0's weights to all ranks: the seed's random numbers may differ in the last bit from host to host.
    Raises ConfigError on all ranks where a rank has another model."""
    if world.size == 1:
        return
    check_same_model(model, world)
    with world.collective("broadcast of parameters"):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def _initial_model(
    config: TrainingConfig, model_config: ModelConfig, checkpoint: Checkpoint | None, world: World
) -> PretrainingModel:
    """The model with the weights that training starts from, on the device: rank 0 reads or draws them."""
    given = checkpoint is not None or bool(config.initial_weights)
    model = _empty_model(model_config, world.device) if given or not world.is_main else None
    if model is None:
        with torch.random.fork_rng(devices=[]):  # the seed decides, and nobody else's random numbers move
            torch.manual_seed(fold(config.seed, _INITIALISATION) >> 1)
            model = build_model(model_config).to(world.device)
    if given:
        on_main(world, partial(_read_weights, model, config, checkpoint))
    broadcast_parameters(model.train(), world)
    return model


def _empty_model(model_config: ModelConfig, device: torch.device) -> PretrainingModel | None:
    """The model with memory for weights, none of which are drawn: that takes a minute for a billion of them. None where
    a state_dict does not fill it: modules that share a parameter, or keep other tensors."""
    try:
        with torch.device("meta"):
            model = build_model(model_config)
    except RuntimeError:  # it computes with its weights
        return None
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    others = any(isinstance(value, torch.Tensor) for module in model.modules() for value in vars(module).values())
    if others or len(set(model.parameters())) < len(dict(model.named_parameters(remove_duplicate=False))):
        return None
    return model.to_empty(device=device) if model.state_dict().keys() == set(names) else None


def _read_weights(model: nn.Module, config: TrainingConfig, checkpoint: Checkpoint | None) -> None:
    """Load the weights of a checkpoint or of --initial_weights. Raises ConfigError."""
    if checkpoint is not None:
        model.load_state_dict(checkpoint.tensors("model"))
        return
    try:
        model.load_state_dict(read_initial_weights(config.initial_weights))
    except RuntimeError as error:
        shown = " ".join(str(error).split())[:300]
        raise ConfigError(f"--initial_weights {config.initial_weights!r} does not fit the model: {shown}") from error
