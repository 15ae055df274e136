"""Every setting of a run: one frozen dataclass, from which command line, recipe files and config.json are made."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data.cli import Parser, closest, shown
from ops import reference
from training.errors import UserError


class ConfigError(UserError):
    """A setting cannot be used; the message names the flag, its value and what would be right."""


def _flag(default, text: str, group: str, *, choices=None, fixed: bool = True, kind=None):
    """A field that becomes a flag. `fixed`: the run's result depends on it, so a resumed run must not change it."""
    return field(
        default=default, metadata={"help": text, "group": group, "choices": choices, "fixed": fixed, "kind": kind}
    )


def _float_list(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part.strip())


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_float_list.__name__, _int_list.__name__ = (
    "comma-separated numbers",
    "comma-separated whole numbers",
)  # argparse's errors


@dataclass(frozen=True)
class TrainingConfig:
    """Flags of train_single_gpu.py and train_multi_gpu.py. Defaults are those of the GPT-BERT paper's base model."""

    # files
    train_path: str = _flag(
        "", "training shards: a folder, a file, a glob, or a mix file (.json)", "files", fixed=False
    )
    valid_path: str = _flag(
        "", "held-out shards, in the same forms; no validation where left out", "files", fixed=False
    )
    config_file: str = _flag("", "model configuration (JSON), e.g. configs/base.json", "files", fixed=False)
    tokenizer_path: str = _flag("", "tokenizer.json that the shards were made with", "files", fixed=False)
    output_dir: str = _flag("runs", "folder of run folders", "files", fixed=False)
    name: str = _flag("", "name of the run: its folder is OUTPUT_DIR/NAME", "files", fixed=False)
    resume: str = _flag(
        "auto",
        "auto: go on from the newest valid checkpoint of the run folder, or start; never: start in an unused folder; "
        "PATH: a checkpoint or run folder to go on from; newer checkpoints of the run itself are set aside",
        "files",
        fixed=False,
    )
    checkpoint_filename: str = _flag(
        "", "same as --resume PATH (the published script's name for it)", "files", fixed=False
    )

    initial_weights: str = _flag(
        "",
        "start from these weights: a run folder, a checkpoint or an imported model (.safetensors)",
        "files",
        fixed=False,
    )

    # objective
    hybrid_numerator: int = _flag(15, "masked rows out of hybrid_denominator rows; the others are causal", "objective")
    hybrid_denominator: int = _flag(16, "see hybrid_numerator", "objective")
    hybrid_numerator_end: int = _flag(
        -1, "where given, the numerator moves linearly to this value over the run (-1: constant)", "objective"
    )
    hybrid_split: str = _flag(
        "auto",
        "ranks: one objective per rank, as published; rows: both on every rank; auto: ranks where the world size "
        "allows. Same results either way, but with ranks a step takes about 4 % longer: causal ranks have more to do",
        "objective",
        choices=("auto", "ranks", "rows"),
        fixed=False,
    )
    mask_p_start: float = _flag(0.3, "share of tokens masked at the start", "objective")
    mask_p_end: float = _flag(0.15, "share of tokens masked at the end (linear in between)", "objective")
    mask_random_p: float = _flag(0.1, "share of masked spans shown as random tokens", "objective")
    mask_keep_p: float = _flag(0.1, "share of masked spans shown unchanged", "objective")
    masking: str = _flag(
        "random",
        "random: fresh spans for every row; even: spans fixed in the corpus, each masked about once per 1/p epochs",
        "objective",
        choices=("random", "even"),
    )
    n_special_tokens: int = _flag(16, "ids below this are never masked", "objective")
    document_end: bool = _flag(True, "close each document with </s> (off: the published behaviour)", "objective")
    row_start: bool | None = _flag(
        None,
        "begin each row with <s>, also one that goes on in a document (default: as the run that is resumed, else yes)",
        "objective",
        kind=bool,
    )
    token_weighted_loss: bool = _flag(
        False, "weigh every target equally instead of every objective by its share of rows", "objective"
    )
    z_loss_weight: float = _flag(1e-4, "weight of the mean squared log-partition function", "objective")

    # batches
    seq_length: int = _flag(128, "tokens per row at the start", "batches")
    length_milestones: tuple[float, ...] = _flag(
        (0.7, 0.9), "shares of the run at which rows double in length; '' keeps them", "batches", kind=_float_list
    )
    global_batch_size: int = _flag(32768, "rows of seq_length tokens per optimizer step at the end", "batches")
    batch_reduction: float = _flag(4.0, "the batch starts this much smaller and grows linearly", "batches")
    local_batch_size: int = _flag(
        128,
        "rows of seq_length tokens per micro-batch and device; any value gives the same run",
        "batches",
        fixed=False,
    )

    # optimization
    max_steps: int = _flag(15625, "optimizer steps of the whole run", "optimization")
    learning_rate: float = _flag(1e-2, "peak learning rate", "optimization")
    warmup_proportion: float = _flag(0.016, "share of steps with linear warm-up", "optimization")
    cooldown_proportion: float = _flag(0.016, "share of steps with linear decay to 0 at the end", "optimization")
    optimizer: str = _flag("lamb", "update rule", "optimization", choices=("lamb", "adamw"))
    weight_decay: float = _flag(0.1, "decoupled weight decay of matrices and tables", "optimization")
    optimizer_beta1: float = _flag(0.9, "decay of the first moment", "optimization")
    optimizer_beta2: float = _flag(0.98, "decay of the second moment", "optimization")
    optimizer_eps: float = _flag(1e-8, "added to the denominator of the update", "optimization")
    max_gradient: float = _flag(2.0, "gradients are clipped to this global norm (0: not clipped)", "optimization")
    ema_decay: float = _flag(0.999, "decay per step of the exponential moving average of the weights", "optimization")
    ema_warmup: bool | None = _flag(
        None,
        "let that decay rise from 2/11 as (1 + step) / (10 + step), so that the initial weights are soon forgotten "
        "(default: as the run that is resumed, else yes)",
        "optimization",
        kind=bool,
    )
    allreduce_dtype: str = _flag(
        "float32",
        "precision in which ranks add up their gradients; bfloat16 halves the traffic and rounds each sum to 8 bits",
        "optimization",
        choices=("float32", "bfloat16"),
    )
    mixed_precision: bool | None = _flag(
        None, "bf16 autocast with fp32 weights (default: on CUDA yes, on the CPU no)", "optimization", kind=bool
    )
    seed: int = _flag(42, "seed of initialisation, data order, masks and dropout", "optimization")

    # validation, checkpoints, logs
    validate_every: int = _flag(1000, "steps between validations (0: only at the end)", "records", fixed=False)
    validation_steps: int = _flag(
        0,
        "validation batches of local_batch_size rows per objective (0: the whole held-out set)",
        "records",
        fixed=False,
    )
    validation_samples: int = _flag(
        3,
        "held-out documents that the averaged weights continue, and as many whose gaps they fill, at each validation "
        "(0: none); see samples.jsonl and report.html in the run folder",
        "records",
        fixed=False,
    )
    evaluate_data: str = _flag(
        "",
        "minimal pairs to evaluate the averaged weights on: a folder of .jsonl files with sentence_good and "
        "sentence_bad, of such folders, or one file",
        "records",
        fixed=False,
    )
    evaluate_every: int = _flag(
        0, "steps between evaluations on --evaluate_data (0: only at the end)", "records", fixed=False
    )
    evaluate_mode: str = _flag(
        "all",
        "how minimal pairs are scored: masked (each token masked in turn), causal, fused (the mean of both) or all",
        "records",
        choices=("all", "masked", "causal", "fused"),
        fixed=False,
    )
    save_every: int = _flag(1000, "steps between checkpoints (0: only at the end)", "records", fixed=False)
    save_steps: tuple[int, ...] = _flag(
        (),
        "further steps at which to save and keep a checkpoint, e.g. 100,1000",
        "records",
        kind=_int_list,
        fixed=False,
    )
    keep_last: int = _flag(
        0, "regular checkpoints to keep (0: all); those of --save_steps always stay", "records", fixed=False
    )
    spare_checkpoint_dir: str = _flag(
        "",
        "folder on another disk of all hosts for checkpoints that the run folder cannot take; a resume finds them",
        "records",
        fixed=False,
    )
    max_failed_saves: int = _flag(
        3, "failed saves in a row after which the run gives up; before, it goes on without", "records", fixed=False
    )
    log_stats_every: int = _flag(
        100, "steps between norms of parameters and gradients by role (0: never)", "records", fixed=False
    )
    data_fingerprint: bool = _flag(
        False,
        "log a hash of every global batch as data/fingerprint (without CUDA graphs: steps take some percent longer)",
        "records",
        fixed=False,
    )
    wandb_project: str = _flag("", "wandb project (default: hybrid-pretraining)", "records", fixed=False)
    wandb_entity: str = _flag("", "wandb user or team", "records", fixed=False)
    wandb_mode: str = _flag(
        "auto",
        "auto: online with a login, offline without, disabled where wandb is not installed",
        "records",
        choices=("auto", "online", "offline", "disabled"),
        fixed=False,
    )

    # jobs
    requeue: str = _flag(
        "auto",
        "auto: a run that has to stop early (signal, preemption, time limit) saves and has SLURM start its job again; "
        "never: it saves and ends",
        "jobs",
        choices=("auto", "never"),
        fixed=False,
    )
    max_restarts: int = _flag(
        200, "restarts of one job after which it fails instead of starting again", "jobs", fixed=False
    )
    max_fruitless_starts: int = _flag(
        2,
        "starts of one job in a row that leave no new checkpoint behind, after which it fails instead of starting "
        "again; those that a signal ended do not count",
        "jobs",
        fixed=False,
    )
    time_limit_margin: float = _flag(
        60.0,
        "seconds that stay free before the job's time limit, besides the measured time of a save, when the run saves "
        "and requeues on its own",
        "jobs",
        fixed=False,
    )
    collective_timeout: float = _flag(
        20.0,
        "minutes that a rank waits for the others before the run ends; longer than the slowest save or validation",
        "jobs",
        fixed=False,
    )
    step_timeout: float = _flag(
        5.0,
        "the same within training steps; the rank that the others wait for is named, and stack traces are left in "
        "failures/ of the run folder",
        "jobs",
        fixed=False,
    )
    check_ranks_every: int = _flag(
        1000,
        "steps between comparisons of weights, average and moments between ranks, bit for bit; ranks that differ end "
        "the run, and nothing is saved (0: only before each save)",
        "jobs",
        fixed=False,
    )

    # hardware
    device: str = _flag(
        "auto", "auto: CUDA where there is a GPU", "hardware", choices=("auto", "cuda", "cpu"), fixed=False
    )
    compile: bool | None = _flag(
        None, "torch.compile the model (default: on CUDA yes, on the CPU no)", "hardware", kind=bool, fixed=False
    )

    def __post_init__(self) -> None:
        check(self)

    def to_dict(self) -> dict[str, Any]:
        """All flags as JSON-ready values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @property
    def run_folder(self) -> Path:
        """OUTPUT_DIR/NAME."""
        return Path(self.output_dir) / self.name

    @property
    def numerator_end(self) -> int | None:
        """hybrid_numerator_end as DataPlan wants it."""
        return None if self.hybrid_numerator_end < 0 else self.hybrid_numerator_end


FIELDS = {f.name: f for f in dataclasses.fields(TrainingConfig)}
_GROUPS = {
    "files": "files and folders",
    "objective": "objectives and masking",
    "batches": "batches and rows",
    "optimization": "optimization",
    "records": "validation, checkpoints, logs",
    "jobs": "SLURM jobs and ranks",
    "hardware": "hardware",
}


class _Later(NamedTuple):
    before: Any  # what runs did that began before there was such a flag
    now: Any  # what new runs do where it is not given
    note: str  # for those who go on with a run from before


LATER_FLAGS = {
    "row_start": _Later(False, True, "rows do not begin with <s>, as this run began (a new run's do; --no-row_start)"),
    "ema_warmup": _Later(
        False, True, "the average of the weights has no warm-up, as this run began (a new run's has; --no-ema_warmup)"
    ),
}
# What other programs call flags of ours that no likeness of letters would find.
_OTHER_NAMES = {
    "input_path": "--train_path (and --valid_path)", "warmup_steps": "--warmup_proportion", "lr": "--learning_rate",
    "batch_size": "--global_batch_size", "dtype": "--mixed_precision or --no-mixed_precision",
    "bf16": "--mixed_precision", "fp16": "--mixed_precision", "max_length": "--seq_length",
    "clip_grad": "--max_gradient", "max_grad_norm": "--max_gradient",
}  # fmt: skip


def _require(holds: bool, flag: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"--{flag} is {value!r}; {rule}")


def check(config: TrainingConfig) -> None:
    """Refuse values that cannot work, before any file or device is touched. Raises ConfigError."""
    for name in ("train_path", "config_file", "tokenizer_path", "name"):
        _require(bool(getattr(config, name)), name, "", "it is required")
    _require(
        "/" not in config.name and config.name not in (".", ".."), "name", config.name, "it names a folder: no slashes"
    )
    for name in (
        "hybrid_denominator",
        "seq_length",
        "global_batch_size",
        "local_batch_size",
        "max_steps",
        "max_failed_saves",
    ):
        _require(getattr(config, name) >= 1, name, getattr(config, name), "it must be at least 1")
    _require(config.seq_length >= 2, "seq_length", config.seq_length, "a row needs at least 2 tokens")
    for name in (
        "validate_every",
        "validation_steps",
        "validation_samples",
        "evaluate_every",
        "save_every",
        "keep_last",
        "log_stats_every",
        "check_ranks_every",
        "n_special_tokens",
        "max_restarts",
        "time_limit_margin",
    ):
        _require(getattr(config, name) >= 0, name, getattr(config, name), "it must be 0 or more")
    _require(config.seed >= 0, "seed", config.seed, "it must be 0 or more")
    _require(config.n_special_tokens >= 5, "n_special_tokens", config.n_special_tokens, "ids 0-4 are always special")
    for name in ("hybrid_numerator", "hybrid_numerator_end"):
        value = getattr(config, name)
        if name == "hybrid_numerator_end" and value == -1:
            continue
        rule = (
            f"it must be between 0 and --hybrid_denominator ({config.hybrid_denominator}): the ratio is a share of rows"
        )
        _require(0 <= value <= config.hybrid_denominator, name, value, rule)
    for name in (
        "mask_p_start",
        "mask_p_end",
        "mask_random_p",
        "mask_keep_p",
        "warmup_proportion",
        "cooldown_proportion",
    ):
        value = getattr(config, name)
        _require(0 <= value <= 1, name, value, "it is a share and must be between 0 and 1")
    total = config.mask_random_p + config.mask_keep_p
    _require(total <= 1, "mask_random_p", config.mask_random_p, f"with --mask_keep_p it adds up to {total:g}, above 1")
    total = config.warmup_proportion + config.cooldown_proportion
    _require(
        total <= 1, "warmup_proportion", config.warmup_proportion, f"with --cooldown_proportion: {total:g}, above 1"
    )
    for name in (
        "max_fruitless_starts",
        "learning_rate",
        "optimizer_eps",
        "batch_reduction",
        "collective_timeout",
        "step_timeout",
    ):
        value = getattr(config, name)
        _require(math.isfinite(value) and value > 0, name, value, "it must be above 0")
    for name in ("weight_decay", "z_loss_weight", "max_gradient"):
        value = getattr(config, name)
        _require(math.isfinite(value) and value >= 0, name, value, "it must be 0 or more")
    for name in ("optimizer_beta1", "optimizer_beta2", "ema_decay"):
        value = getattr(config, name)
        _require(0 <= value < 1, name, value, "it must be at least 0 and below 1")
    _require(config.batch_reduction >= 1, "batch_reduction", config.batch_reduction, "it must be at least 1")
    steps = config.length_milestones
    _require(
        list(steps) == sorted(set(steps)) and all(0 < s <= 1 for s in steps),
        "length_milestones",
        ",".join(map(str, steps)),
        "it must be rising numbers above 0 and at most 1, such as 0.7,0.9",
    )
    _require(all(s >= 1 for s in config.save_steps), "save_steps", config.save_steps, "steps count from 1")
    smallest = int(config.global_batch_size / config.batch_reduction + 0.5)
    _require(
        smallest >= 1,
        "global_batch_size",
        config.global_batch_size,
        f"divided by --batch_reduction ({config.batch_reduction:g}) no row is left: raise it, or --batch_reduction 1",
    )
    if config.evaluate_every and not config.evaluate_data:
        raise ConfigError(
            f"--evaluate_every is {config.evaluate_every} but there is no --evaluate_data; name its minimal pairs"
        )
    if config.checkpoint_filename and config.resume != "auto":
        raise ConfigError(
            f"--checkpoint_filename {config.checkpoint_filename!r} and --resume {config.resume!r} both say where to go "
            "on from; give one of them"
        )


def _help(spec: dataclasses.Field) -> str:
    """A flag's help with its default, for argparse."""
    says = spec.default not in ("", None, -1, ())
    return (spec.metadata["help"] + f" (default: {shown(spec.default)})" * says).replace("%", "%%")


def make_parser(description: str) -> Parser:
    """The parser of both training scripts."""
    parser = Parser(description)
    groups = {key: parser.add_argument_group(title) for key, title in _GROUPS.items()}
    groups["files"].add_argument(
        "--recipe", default="", help="JSON file with flags as keys; flags on the command line win over it"
    )
    for name, spec in FIELDS.items():
        options: dict[str, Any] = {"help": _help(spec), "default": argparse.SUPPRESS}
        group = groups[spec.metadata["group"]]
        if spec.metadata["kind"] is bool or isinstance(spec.default, bool):
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **options)
            continue
        options["type"] = spec.metadata["kind"] or type(spec.default)
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
    kind = spec.metadata["kind"] or type(spec.default)
    if kind is bool:
        fits = isinstance(value, bool) or (value is None and spec.default is None)
    elif kind in (_float_list, _int_list):
        fits = isinstance(value, list) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
        value = tuple(value) if fits else value
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
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
    return TrainingConfig(**{**(read_recipe(recipe) if recipe else {}), **given})


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
        before = later_flag(old, name) if name in LATER_FLAGS else old.get(name, value)
        if FIELDS[name].metadata["fixed"] and before != value:
            found.append(f"--{name} was {before!r} and is now {value!r}")
    return found


def parse_on_rank(arguments: Sequence[str], description: str, alone: bool) -> TrainingConfig:
    """`parse_config` on one of several ranks. What is wrong is wrong on every rank, and rank 0 alone says so.

    alone: this process is all of its run, whichever of a launcher's it is.
    """
    rank = "0" if alone else os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    with redirect_stderr(io.StringIO() if rank != "0" else sys.stderr):
        return parse_config(arguments, description)
