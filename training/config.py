"""Configuration of a run: flags in one frozen dataclass, read from the command line, recipe files and config.json.

What holds for a single flag is written in training/flags.py; here is what holds between flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.cli import Parser, closest, shown
from data.flag_rules import GROUPS, amount, as_tuple, decays, float_list, int_list, length, rows, text_list
from data.mask_rates import MaskRateError, MaskRates
from data.objectives import run_objectives
from data.positions import Position, parse_amount
from data.ratio_schedule import parse_schedule
from ops import reference
from training.flags import ConfigError, Flags
from training.schedules import SCHEDULES, parse_courses, parse_points


@dataclass(frozen=True)
class TrainingConfig(Flags):
    """Flags of train_single_gpu.py and train_multi_gpu.py. Raises ConfigError for values that cannot work."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fractions(self)
        _check_schedule(self)
        _check_mask_rate(self)
        _check_batches(self)
        _check_choices(self)

    def to_dict(self) -> dict[str, Any]:
        """All flags as JSON-ready values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @property
    def run_folder(self) -> Path:
        """OUTPUT_DIR/NAME."""
        return Path(self.output_dir) / self.name

    @property
    def budget(self) -> tuple[str, Position] | None:
        """The flag that gives the run's length in another unit than steps, and how much; None: in steps."""
        given = next((name for name in _BUDGETS[1:] if getattr(self, name)), None)
        return None if given is None else (given, parse_amount(getattr(self, given), given.removeprefix("max_")))

    @property
    def planned_length(self) -> int:
        """The steps of the run for which rows and schedules are planned."""
        return self.planned_steps or self.max_steps

    @property
    def ema_decays(self) -> tuple[float, ...]:
        """The decays of --ema_decay, one or more."""
        return as_tuple(self.ema_decay)

    @property
    def further_averages(self) -> tuple[str, ...]:
        """Names of the averages of weights beside the first, such as 0.9999 and tail."""
        return tuple(map(str, self.ema_decays[1:])) + ("tail",) * (self.tail_average not in (0.0, "0"))

    @property
    def numerator_end(self) -> int | None:
        """hybrid_numerator_end as DataPlan wants it."""
        return None if self.hybrid_numerator_end < 0 else self.hybrid_numerator_end


FIELDS = {f.name: f for f in dataclasses.fields(TrainingConfig)}
LATER_FLAGS = {name: spec.metadata["later"] for name, spec in FIELDS.items() if spec.metadata["later"]}
_BUDGETS = ("max_steps", "max_tokens", "max_words", "max_epochs")  # a run has one of them
# Flags that mean something with some choices of another alone.
_ONLY_WITH = (
    ("optimizer", ("muon", "normuon"),
     ("matrix_learning_rate", "matrix_momentum", "cautious_weight_decay", "rest_optimizer")),
    ("spike_policy", ("skip", "rollback"), ("spike_threshold",)),
    ("sharding", ("none", "zero1"), ("allreduce_dtype",)),
    ("sharding", ("zero1", "full"), ("sharding_ranks",)),
    ("schedule", ("cosine",), ("cooldown_proportion",)),
    ("schedule", ("wsd",), ("decay_proportion", "decay_shape")),
)  # fmt: skip
# What other programs call flags of ours that no likeness of letters would find.
_OTHER_NAMES = {
    "num_epochs": "--max_epochs", "num_train_epochs": "--max_epochs", "epochs": "--max_epochs",
    "input_path": "--train_path (and --valid_path)", "warmup_steps": "--warmup_proportion", "lr": "--learning_rate",
    "max_tokens_per_gpu": "--local_batch_size (in rows, or auto)", "batch_size": "--global_batch_size",
    "dtype": "--mixed_precision or --no-mixed_precision",
    "bf16": "--mixed_precision", "fp16": "--mixed_precision", "max_length": "--seq_length",
    "clip_grad": "--max_gradient", "max_grad_norm": "--max_gradient",
}  # fmt: skip


# Rules between flags


def _check_fractions(config: TrainingConfig) -> None:
    """Fractions of rows, of masked spans and of steps add up to at most 1."""
    for name in ("hybrid_numerator", "hybrid_numerator_end"):
        value = getattr(config, name)
        if name == "hybrid_numerator_end" and value == -1:
            continue
        if not 0 <= value <= config.hybrid_denominator:
            raise ConfigError(
                f"--{name} is {value}; it must be between 0 and --hybrid_denominator ({config.hybrid_denominator}): "
                "the ratio is a fraction of rows"
            )
    end = "decay_proportion" if config.schedule == "wsd" else "cooldown_proportion"
    for first, second in (("mask_random_p", "mask_keep_p"), ("warmup_proportion", end)):
        value, other = getattr(config, first), getattr(config, second)
        if isinstance(value, float) and isinstance(other, float) and (total := value + other) > 1:
            raise ConfigError(f"--{first} is {value!r}; with --{second} it adds up to {total:g}, above 1")


def _check_schedule(config: TrainingConfig) -> None:
    """The schedule of the ratio can be read, and is the only one."""
    if config.hybrid_schedule and config.numerator_end is not None:
        raise ConfigError(
            f"--hybrid_schedule is {config.hybrid_schedule!r} and --hybrid_numerator_end {config.numerator_end}; "
            "both say how the ratio moves: give one of them"
        )
    if config.hybrid_schedule not in ("", "auto"):
        try:
            parse_schedule(config.hybrid_schedule)
        except ValueError as error:
            raise ConfigError(f"--hybrid_schedule is {config.hybrid_schedule!r}; {error}") from None


def _check_mask_rate(config: TrainingConfig) -> None:
    try:
        run_objectives(config.causal_rows)
    except ValueError as error:
        raise ConfigError(f"--causal_rows is {config.causal_rows!r}; {error}") from None
    try:
        MaskRates.parse(config.mask_rate)
    except MaskRateError as error:
        raise ConfigError(f"--mask_rate is {config.mask_rate!r}; {error}") from None
    if config.masking == "words" and config.mask_span_length != FIELDS["mask_span_length"].default:
        raise ConfigError(
            f"--mask_span_length is {config.mask_span_length} but --masking words masks whole words; leave it out"
        )


def _check_batches(config: TrainingConfig) -> None:
    """The first, smallest batch has a row."""
    if int(config.global_batch_size / config.batch_reduction + 0.5) < 1:
        raise ConfigError(
            f"--global_batch_size is {config.global_batch_size}; divided by --batch_reduction "
            f"({config.batch_reduction:g}) no row is left: raise it, or --batch_reduction 1"
        )


def _check_choices(config: TrainingConfig) -> None:
    """What one flag asks for, another does not take back."""
    if config.validation_steps and not config.local_batch_size:
        raise ConfigError(
            f"--validation_steps is {config.validation_steps} and --local_batch_size auto: batches of a size that the "
            "device decides would not compare; give a number of rows, or --validation_steps 0 for the whole set"
        )
    if config.evaluate_every and not config.evaluate_data:
        raise ConfigError(
            f"--evaluate_every is {config.evaluate_every} but there is no --evaluate_data; name its zero-shot suites"
        )
    if config.reset and not config.checkpoint_filename and config.resume in ("auto", "never"):
        raise ConfigError(f"--reset is {','.join(config.reset)} but no checkpoint is named; give --resume PATH, too")
    if "position" in config.reset and "step" not in config.reset:
        raise ConfigError("--reset position needs step: where a run is in its data follows from its step")
    if config.weight_decay_end >= 0 and not config.weight_decay:
        raise ConfigError(f"--weight_decay_end is {config.weight_decay_end:g} but --weight_decay is 0; begin above 0")
    _check_courses(config)
    for flag, choices, names in _ONLY_WITH:
        for name in names:
            value, annealed = getattr(config, name), name == "decay_shape" and config.anneal_from
            if value != FIELDS[name].default and getattr(config, flag) not in choices and not annealed:
                chosen = f"--{flag} is {getattr(config, flag)!r}"
                raise ConfigError(f"--{name} is {value!r} but {chosen}; it is for {' and '.join(choices)} alone")
    if config.checkpoint_filename and config.resume != "auto":
        raise ConfigError(
            f"--checkpoint_filename {config.checkpoint_filename!r} and --resume {config.resume!r} both say where to "
            "resume from; give one of them"
        )


def _check_courses(config: TrainingConfig) -> None:
    """Courses by points, and of other values than the learning rate, can be read and are the only ones."""
    try:
        courses = parse_courses(config.value_schedules)
    except ValueError as error:
        raise ConfigError(f"--value_schedules is {config.value_schedules!r}; {error}") from None
    if "weight_decay" in courses and (config.weight_decay_end >= 0 or not config.weight_decay):
        raise ConfigError("--value_schedules has weight_decay; leave --weight_decay_end out and --weight_decay above 0")
    for name in ("beta1", "beta2"):
        if name in courses and getattr(config, f"{name}_by_role"):
            raise ConfigError(f"--value_schedules moves {name} of all parameters; leave --{name}_by_role out")
    if config.schedule not in SCHEDULES:
        try:
            parse_points(config.schedule)
        except ValueError as error:
            raise ConfigError(f"--schedule is {config.schedule!r}; {error}") from None
        if config.warmup_proportion != FIELDS["warmup_proportion"].default:
            raise ConfigError(f"--warmup_proportion is {config.warmup_proportion} but --schedule has points; add one")
    if config.anneal_from and (
        config.checkpoint_filename or config.resume not in ("auto", config.anneal_from) or config.reset
    ):
        raise ConfigError("--anneal_from names where to start and keeps all else; leave --resume and --reset out")
    if config.planned_steps and config.planned_steps < config.max_steps:
        raise ConfigError(f"--planned_steps is {config.planned_steps}, less than --max_steps ({config.max_steps})")


# Command line and recipes


def _help(spec: dataclasses.Field) -> str:
    """A flag's help with its default, for argparse."""
    says = spec.default not in ("", None, -1, ())
    return (spec.metadata["help"] + f" (default: {shown(spec.default)})" * says).replace("%", "%%")


def make_parser(description: str) -> Parser:
    """The parser of both training scripts."""
    parser = Parser(description)
    groups = {key: parser.add_argument_group(group.title) for key, group in GROUPS.items()}
    groups["files"].add_argument(
        "--recipe", default="", help="JSON file with flags as keys; flags on the command line win over it"
    )
    for name, spec in FIELDS.items():
        options: dict[str, Any] = {"help": _help(spec), "default": argparse.SUPPRESS}
        group = groups[spec.metadata["group"]]
        if spec.metadata["kind"] is bool:
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **options)
            continue
        options["type"] = spec.metadata["kind"]
        options["metavar"] = None if spec.metadata["choices"] else name.rsplit("_", 1)[-1].upper()
        group.add_argument(f"--{name}", choices=spec.metadata["choices"], **options)
    return parser


def read_recipe(path: str) -> dict[str, Any]:
    """Flags from a recipe file. Values are checked like those of the command line. Raises ConfigError."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--recipe {path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--recipe {path!r} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--recipe {path!r} must hold one JSON object with flags as keys")
    return {name: _typed(name, value, path) for name, value in values.items() if not name.startswith("_")}


def _typed(name: str, value: Any, path: str) -> Any:
    """A recipe's value as the flag's type."""
    if name not in FIELDS:
        close = closest(name, FIELDS)
        raise ConfigError(f"{path}: unknown key {name!r}" + f"; did you mean {close!r}?" * bool(close))
    spec = FIELDS[name]
    kind = spec.metadata["kind"]
    if kind is bool:
        fits = isinstance(value, bool) or (value is None and spec.default is None)
    elif kind in (float_list, int_list, text_list):
        one = {float_list: int | float, int_list: int, text_list: str}[kind]
        fits = isinstance(value, list) and all(isinstance(v, one) and not isinstance(v, bool) for v in value)
        value = tuple(value) if fits else value
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif kind in (length, rows, decays):
        try:
            fits = not isinstance(value, bool)
            value = kind(",".join(map(str, value)) if isinstance(value, list) else str(value))
        except ValueError:
            fits = False
    elif kind is amount:
        fits = isinstance(value, str | int | float) and not isinstance(value, bool)
        value = str(value) if fits else value
    else:
        fits = isinstance(value, kind) and not isinstance(value, bool)
    choices = spec.metadata["choices"]
    if not fits or (choices and value not in choices):
        wanted = " or ".join(map(repr, choices)) if choices else getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{path}: {name!r} is {value!r}; it must be {wanted}")
    return value


def parse_config(arguments: Sequence[str], description: str) -> TrainingConfig:
    """The configuration that a command line asks for. Exits with one sentence for an unknown flag or a bad type."""
    check_environment()
    parser = make_parser(description)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=")[0].lstrip("-")
        if flag in _OTHER_NAMES:
            parser.error(f"unknown flag --{flag}: use {_OTHER_NAMES[flag]}")
        parser.refuse(unknown[0])
    given = vars(known)
    recipe = given.pop("recipe", "")
    return TrainingConfig(**_with_one_budget(read_recipe(recipe) if recipe else {}, given))


def _with_one_budget(recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Flags of a recipe and the command line, which wins; one says how long the run is. Raises ConfigError."""
    for values, place in ((recipe, " in the recipe"), (given, "")):
        several = [f"--{name}" for name in _BUDGETS if name in values]
        if len(several) > 1:
            raise ConfigError(f"{several[0]} and {several[1]}{place} both say how long the run is; give one of them")
    if any(name in given for name in _BUDGETS):
        recipe = {name: value for name, value in recipe.items() if name not in _BUDGETS}
    values = {**recipe, **given}
    if values.get("max_hours") and not any(name in values for name in _BUDGETS):
        raise ConfigError(
            f"--max_hours is {values['max_hours']:g}, which ends a run early but gives the schedules no length; give "
            "--max_steps, --max_tokens, --max_words or --max_epochs, too"
        )
    return values


def check_environment() -> None:
    """Refuse a choice of reference implementations that there is not. Raises ConfigError."""
    try:
        reference.check_environment()
    except reference.SwitchError as error:
        raise ConfigError(str(error)) from None


def later_flag(flags: Mapping[str, Any], name: str) -> Any:
    """One of LATER_FLAGS, of the run whose flags these are; of a new run if there are none."""
    later = LATER_FLAGS[name]
    return flags.get(name, later.before if flags else later.now)


def differences(old: dict[str, Any], new: TrainingConfig) -> list[str]:
    """Flags on which the run's result depends and that differ from `old` (a to_dict), as sentences."""
    found = []
    for name, value in new.to_dict().items():
        default = FIELDS[name].default  # of flags that `old` lacks: what runs did before there were such
        default = list(default) if isinstance(default, tuple) else default
        before = later_flag(old, name) if name in LATER_FLAGS else old.get(name, default)
        if FIELDS[name].metadata["fixed"] and before != value:
            found.append(f"--{name} was {before!r} and is now {value!r}")
    return found


def is_first(alone: bool) -> bool:
    """Whether this process is rank 0, before there are ranks; alone: as in `parse_on_rank`."""
    return alone or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def parse_on_rank(arguments: Sequence[str], description: str, alone: bool) -> TrainingConfig:
    """`parse_config` on one of several ranks. What is wrong is wrong on every rank, and rank 0 alone says so. alone:
    this process is all of its run, whichever of a launcher's it is."""
    with redirect_stderr(sys.stderr if is_first(alone) else io.StringIO()):
        return parse_config(arguments, description)
