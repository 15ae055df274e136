"""Summary of a run before it starts: batches, schedule, kernels, memory, and the arithmetic behind them."""

from __future__ import annotations

import itertools
import platform
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import torch

from data.documents import BLOCK
from data.loader import micro_batch_rows, micro_batches
from data.mask_rates import MaskRates
from data.objectives import causal_parts, run_objectives
from data.plan import DataPlan, StepPlan, rows_of_rank
from data.special_tokens import OURS
from data.wording import count
from model_config import ModelConfig
from model_extra import model_class
from ops import attention_cuda, gated_norm_cuda, lamb_cuda, muon, nvrtc, residual_cuda, rope
from ops.reference import reference_chosen, reference_parts
from training.config import TrainingConfig
from training.distributed import World
from training.forward_backward import activation_bytes, graph_obstacle
from training.inputs import Inputs
from training.optimizers import optimizer_kind
from training.run_dir import origin
from training.schedules import in_words, steps_of

# Dense bf16 matrix rates in FLOP/s of what a rank has, from the vendors' data sheets, by what the device's name
# contains; the longest name that fits counts. A card of the MI250 kind is two devices, each with half of its rate.
_PEAK_FLOPS = {
    "H200": 989e12, "H200 NVL": 835e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "GH200": 989e12,
    "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12, "MI250": 181e12, "MI250X": 191.5e12,
}  # fmt: skip

_MANY_DOCUMENTS = 50_000_000  # whose index takes long enough to be told


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 rate in FLOP/s; None where it is not known (always on a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [key for key in _PEAK_FLOPS if key in name]
    return _PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def target_fraction(plan: StepPlan) -> float:
    """Expected fraction of positions that have a target in a step."""
    fractions = [objective.target_fraction(plan.mask_p) for objective in plan.objectives]
    return sum(rows * fraction for rows, fraction in zip(plan.objective_rows, fractions, strict=True)) / plan.rows


def flops_per_token(config: ModelConfig, plan: StepPlan) -> float:
    """Floating-point operations of a token of a step, forward and backward, in matrix products."""
    return model_class(config.model_type).flops_per_token(config, plan.seq_length, target_fraction(plan))


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _batch_line(inputs: Inputs, step: int, world: World) -> str:
    plan = inputs.plan.step(step)
    per_micro = micro_batch_rows(inputs.config.local_batch_size, inputs.config.seq_length, plan.seq_length)
    largest = -(-plan.rows // world.size)
    pieces = -(-largest // per_micro)
    parts = " + ".join(f"{rows:,} {each.name}" for each, rows in zip(plan.objectives, plan.objective_rows, strict=True))
    return (
        f"{plan.rows:,} rows x {plan.seq_length} = {plan.tokens:,} tokens a step, {parts}, "
        f"{count(pieces, 'micro-batch')} of {per_micro} a device"
    )


def _amounts_line(inputs: Inputs) -> str:
    """Tokens and words of the run, and the budget that they spend."""
    config, words = inputs.config, inputs.exposure_after(inputs.config.max_steps)
    tokens = inputs.plan.tokens_before(config.max_steps)
    line = f"{tokens:,} tokens" + (f", {words['stats/words']:,} words" if "stats/words" in words else "")
    if config.budget is not None:
        flag, _ = config.budget
        line += f" in {count(config.max_steps, 'step')}, the fewest that use up --{flag} {getattr(config, flag)}"
    return line + f"; ends early after {config.max_hours:g} hours" * bool(config.max_hours)


def _named_line(named: Mapping[int, list[str]], weights_only: bool) -> str:
    """Which checkpoints get a name, and which never will."""
    reached = [f"{name} after step {step}" for step in sorted(named) if step >= 0 for name in named[step]]
    shown = reached if len(reached) < 3 else [reached[0], "...", reached[-1]]
    line = f"{count(len(reached), 'named checkpoint')}{', weights alone' * weights_only}" + ": " * bool(reached)
    line += ", ".join(shown)
    return line + f"; behind the end of the run: {', '.join(named.get(-1, []))}" * (-1 in named)


def _validation_line(inputs: Inputs) -> str:
    if not inputs.held_out_sets:
        return "none (--valid_path)"
    line = ", ".join(
        f"{name}: " * bool(name) + f"{each.used_rows:,} of {each.total_rows:,} rows of {each.seq_length}"
        for name, each in inputs.held_out_sets.items()
    )
    return line if inputs.grown_rows is None else f"{line}, of {inputs.grown_rows} too once rows are so long"


def _ratio(inputs: Inputs) -> str:
    """The masked fraction of rows in words."""
    config, plan = inputs.config, inputs.plan
    if config.hybrid_schedule == "auto":
        times = plan.tokens_before(config.max_steps) / inputs.corpus.tokens_before_epoch(1)
        return (
            f"{plan.ratios} (by auto: the run reads the corpus {times:.1f} times, and causal rows gain from about 16 "
            "of them, arXiv 2512.14549)"
        )
    if config.hybrid_schedule:
        return str(plan.ratios)
    end = config.numerator_end not in (None, config.hybrid_numerator)
    last = f" -> {config.numerator_end}/{config.hybrid_denominator}" * end
    return f"{config.hybrid_numerator}/{config.hybrid_denominator}{last}"


def _ways(inputs: Inputs) -> str:
    """What the other rows are, where they are not just causal, and how much is masked."""
    config = inputs.config
    rates = MaskRates.parse(config.mask_rate)
    scheduled = f"{config.mask_p_start:g} -> {config.mask_p_end:g}"
    by_row = f" by row, {rates.mean(config.mask_p_start):.2f} on average" * (rates.kind != "fixed")
    power = f", targets weighed by rate^-{config.mask_rate_loss_power:g}" * bool(config.mask_rate_loss_power)
    shown = {"fixed": scheduled, "bimodal": f"{rates} and {scheduled}"}.get(rates.kind, str(rates))
    return f"{causal_parts(inputs.plan.objectives)}, masks {shown}{by_row}{power}"


def _data_lines(inputs: Inputs) -> str:
    """Size of the corpus, how much of it is read, and what of a mix is real."""
    plan, corpus = inputs.plan, inputs.corpus
    epoch_tokens = corpus.tokens_before_epoch(1)
    epochs = [(each.name, plan.objective_tokens(number) / epoch_tokens) for number, each in enumerate(plan.objectives)]
    reads = [f"{count:.2f}{' epochs' * (not number)} {name}" for number, (name, count) in enumerate(epochs)]
    size = f"{corpus.num_documents:,} documents, {epoch_tokens:,} tokens an epoch"
    lines = [f"{size}; this run reads {' and '.join(reads)}", *inputs.builder.mix.lines()]
    if (roles := inputs.config.special_tokens) != OURS:
        lines.append(f"special tokens {roles}; {len(inputs.builder.options.special_ids):,} ids are no words")
    if corpus.blocks is None and corpus.num_documents >= _MANY_DOCUMENTS:
        size = corpus.num_documents * (8 + sum(count > 0 for _, count in epochs) * 8 / BLOCK) / 1e9
        lines.append(
            f"an index of all documents: {size:.1f} GB of memory a node and some {corpus.num_documents * 15e-8:.0f} s "
            "before the first step; begun with --order blocks, a run needs neither"
        )
    return ("\n" + " " * 16).join(lines)


def describe(
    inputs: Inputs, world: World, split: str, parameters: int, start_step: int, zero_shot: str = "", part: float = 1.0
) -> str:
    """The start-up block. zero_shot: what --evaluate_data holds, in words. part: the largest, with zero1."""
    config, plan, model = inputs.config, inputs.plan, inputs.model_config
    last = config.max_steps - 1
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    grown = [f"rows of {plan.step(step).seq_length} from step {step}" for step in plan.length_changes()[1:-1]]
    others = "".join(f"{each.rows} {each.name}, of the others " for each in plan.objectives if each.rows)
    missing = missing_kernels(config, model, world.device)
    absent = {name for name, reason in missing.items() if reason}
    need = memory_estimate(config, model, plan, parameters, absent, world.size, split)
    hint = ""
    # benchmarks/README.md, one GPU against four
    if config.hybrid_split == "auto" and split == "ranks" and world.size > 1:
        hint = " (by auto, as published; --hybrid_split rows: both on every rank)"
    graphs = graph_obstacle(config, world.device)
    lines = {
        "run": f"{config.run_folder}, steps {start_step} -> {config.max_steps}, seed {config.seed}",
        "device": f"{world.size} x {device}, {'bf16 autocast' if config.mixed_precision else 'fp32'}",
        "kernels": kernels_line(missing),
        "model": f"{model.model_type}, {parameters:,} parameters ({model.hidden_size} x {model.num_hidden_layers} "
        f"layers, {model.num_attention_heads} heads, vocabulary {model.vocab_size:,}, "
        f"{model.position_embedding} positions)",
        "data": _data_lines(inputs),
        "validation": _validation_line(inputs),
        "zero-shot": zero_shot or "none (--evaluate_data)",
        "objective": f"{others}{_ratio(inputs)} of rows masked{_ways(inputs)}, split {split}{hint}",
        "batch, start": _batch_line(inputs, 0, world),
        "batch, end": _batch_line(inputs, last, world),
        "in all": _amounts_line(inputs),
        "schedule": ", ".join([*in_words(config), *grown]),
        "optimizer": _optimizer_line(config),
        "memory": _memory_line(config, need, parameters),
    }
    if config.sharding != "none":
        lines["sharding"] = _sharding_line(config, world, parameters, part)
    if named := inputs.named_checkpoints:
        lines["kept"] = _named_line(named, config.save_weights_only)
    if graphs and world.device.type == "cuda":
        lines["CUDA graphs"] = f"off: {graphs}; base takes about 4 % more time a step, smaller models lose more"
    longest = max(plan.step(last).seq_length, config.seq_length)
    if longest > model.max_position_embeddings and model.position_embedding != "rope":
        lines["positions"] = (
            f"max_position_embeddings is {model.max_position_embeddings} and rows grow to {longest}: distances from "
            f"{model.max_position_embeddings - 1} on all count as one"
        )
    return "\n".join(f"  {key:<13} {value}" for key, value in lines.items())


def _sharding_line(config: TrainingConfig, world: World, parameters: int, part: float) -> str:
    """What is divided among the ranks, of which one has at most `part`."""
    if world.size == 1:
        return "none: there is one rank"
    full, parts = config.sharding == "full", config.sharding_ranks or world.size
    saved = (20 if full else 12) * parameters * (1 - part)
    what = "moments and average" + ", weights and gradients of layers" * full
    copies = f", {world.size // parts} copies" * (parts < world.size)
    at_most = f"at most {part:.0%} on a rank; saves about {_bytes(saved)} a device"
    return f"{config.sharding}, {what} in {parts} parts{copies}, {at_most}"


def describe_launch(config: TrainingConfig, model: ModelConfig, world: World, start_step: int) -> dict[str, Any]:
    """What config.json records about one start of the run."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "world_size": world.size,
        "nodes": world.environment.nodes,
        "job_id": world.environment.job_id,
        "restart_count": world.environment.restart_count,
        "device": name,
        "kernels": kernels_line(missing_kernels(config, model, device)),
        "reference": reference_parts(),
        "start_step": start_step,
        "resumed_from": origin(config),
    }


# Kernels. Costs are those of base on an H200, rows of 128 to 512 tokens (benchmarks/README.md).

# Time that the reference implementation adds to a step, in percent, from and to; None where nobody has measured it.
_COSTS = {
    "attention": (100, 260),
    "rotary attention": None,
    "residual": (60, 60),
    "residual without averages": None,
    "gate norm": (5, 5),
    "feed-forward norm": (15, 15),
    "loss": (5, 10),
    "optimizer": (1, 6),
    "symmetric products": (1, 7),
}


class _Kernel(NamedTuple):
    name: str
    part: str  # its name in HYBRID_REFERENCE
    precise: bool  # runs in float32, too
    obstacle: str  # of device and sizes
    available: Callable[[], bool]


def missing_kernels(
    config: TrainingConfig, model: ModelConfig, device: torch.device, load: bool = True
) -> dict[str, str]:
    """For each kernel that there is for such a run, why it is not used; "" where it is. config: device defaults
    resolved. load: compile or load kernels without an obstacle; without, nothing touches the device."""
    found = {}
    for kernel in _kernels(config, model, device):
        reason = kernel.obstacle if device.type != "cuda" else reference_chosen(kernel.part)
        if not reason and not kernel.precise and not config.mixed_precision:
            reason = "they compute in bfloat16 (--mixed_precision)"
        reason = reason or kernel.obstacle
        if not reason and load and not kernel.available():
            reason = "they cannot be compiled or loaded (a warning says why)"
        found[kernel.name] = reason
    return found


def _kernels(config: TrainingConfig, model: ModelConfig, device: torch.device) -> list[_Kernel]:
    width, averages = model.hidden_size, model.depth_weighted_averaging
    heads = (model.head_dim, 2 * model.position_bucket_size - 1)
    drops, sublayers = model.attention_probs_dropout_prob > 0, 2 * model.num_hidden_layers
    attention = _Kernel(
        "attention", "attention", False, attention_cuda.obstacle(device, *heads, trains=True),
        lambda: attention_cuda.available(device, *heads, drops, trains=True),
    )  # fmt: skip
    if model.position_embedding == "rope":
        dtype = torch.bfloat16 if config.mixed_precision else torch.float32
        problem = rope.obstacle(device, dtype)
        if not problem and any(each.looks_ahead for each in run_objectives(config.causal_rows)):
            problem = f"they know causal rows and whole ones alone, and --causal_rows is {config.causal_rows}"
        attention = _Kernel("rotary attention", "attention", True, problem, lambda: True)
    residual = _Kernel(
        "residual" if averages else "residual without averages", "residual", False,
        residual_cuda.obstacle(device, width, sublayers) or (not model.stream_normalises) * model.other_norms,
        lambda: residual_cuda.available(device, width, sublayers),
    )  # fmt: skip
    gate = [("gate norm", model.num_attention_heads * model.head_dim, model.bare_norm)] * model.attention_gate
    inner = [("feed-forward norm", model.intermediate_size, model.has_gated_norm)] * model.mlp_norm
    norms = []
    for name, features, fits in gate * model.context_norm + inner:
        problem = gated_norm_cuda.obstacle(device, features) or (not fits) * model.other_norms
        norms.append(_Kernel(name, "norm", False, problem, partial(gated_norm_cuda.available, device, features)))
    uncompiled = "" if config.compile else "nothing is compiled (--no-compile)"
    loss = _Kernel("loss", "loss", True, uncompiled if device.type == "cuda" else nvrtc.obstacle(device), lambda: True)
    kernels = [attention, residual, *norms, loss]
    matrices = optimizer_kind(config.optimizer).matrices
    if matrices or config.optimizer == "lamb":
        update = partial(lamb_cuda.available, device, matrices)
        kernels.append(_Kernel("optimizer", "optimizer", True, lamb_cuda.obstacle(device, matrices), update))
    if matrices:
        sides = (width, model.num_attention_heads * model.head_dim, model.intermediate_size)
        problem = lamb_cuda.obstacle(device, True) or muon.obstacle(device, *sides)
        kernels.append(_Kernel("symmetric products", "optimizer", True, problem, lambda: True))
    return kernels


def _memory_line(config: TrainingConfig, need: float, parameters: int) -> str:
    """What is needed on a device, and what of it is not there by default."""
    anew, further = config.activation_checkpointing, len(config.further_averages)
    line = f"about {_bytes(need)} of tensors a device (estimate; up to a fifth more is held in reserve)"
    line += f", activations of --activation_checkpointing {anew} computed anew" * (anew != "none")
    return line + f", {_bytes(4 * parameters * further)} of it for further averages" * (further > 0)


def _optimizer_line(config: TrainingConfig) -> str:
    """The update rules with their peak learning rates, and the average."""
    rules = f"{config.optimizer}, peak learning rate {config.learning_rate:g}"
    if config.optimizer in ("muon", "normuon"):
        of_matrices = config.matrix_learning_rate or config.learning_rate
        rules = (
            f"{config.optimizer} for matrices of hidden layers, peak learning rate {of_matrices:g}"
            f" (others: {config.rest_optimizer}, {config.learning_rate:g})"
        )
    if untaken := optimizer_kind(config.optimizer).untaken:
        rules += f" (takes no {' and no '.join(untaken)})"
    decays = ", ".join(f"{decay:g}" for decay in config.ema_decays)
    rules += f", EMA {decays}" + " with a warm-up" * bool(config.ema_warmup)
    tail = steps_of(config.tail_average, config.max_steps)
    return rules + f", mean of the last {tail:,} steps" * (tail > 0)


def kernels_line(found: dict[str, str]) -> str:
    """What `missing_kernels` found, in words: the kernels that run, those that do not, why, and about what it costs.

    residual, loss, optimizer | not: attention because heads have 96 features and not 32, 64 or 128 (100 to 260 %
    more time a step)
    """
    used = [name for name, reason in found.items() if not reason]
    if not used and len(set(found.values())) == 1:
        return f"none, since {next(iter(found.values()))}"
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        if reason:
            by_reason.setdefault(reason, []).append(name)
    absent = [f"{', '.join(names)} because {reason} ({_cost(names)})" for reason, names in by_reason.items()]
    return ", ".join(used or ["none"]) + (f" | not: {'; '.join(absent)}" if absent else "")


def _cost(names: list[str]) -> str:
    known = [cost for cost in map(_COSTS.__getitem__, names) if cost is not None]
    if not known:
        return "at a cost that was not measured"
    low, high = (sum(side) for side in zip(*known, strict=True))
    return f"about {low if low == high else f'{low} to {high}'} % more time a step"


# Memory. What the model keeps of a micro-batch for its backward pass is counted; the rest is fitted to runs on an H200
# (tests/test_memory.py has them). The allocator holds up to a fifth more than tensors take, and CUDA itself about half
# a GiB a process.


def memory_estimate(
    config: TrainingConfig,
    model: ModelConfig,
    plan: DataPlan,
    parameters: int,
    missing: Collection[str],
    world_size: int,
    split: str,
) -> float:
    """Peak of the tensors on one device in bytes: states, and activations of the largest micro-batch. config: device
    defaults resolved. missing: names of kernels that do not run (`missing_kernels`)."""
    size = 2 if config.mixed_precision else 4
    attention, feed_forward = model.matrices_of_a_layer
    divided = config.sharding == "full" and world_size > 1
    inside = min(parameters, (attention + feed_forward) * model.num_hidden_layers) if divided else 0
    # Weights, gradients, two moments and the averages in float32.
    parts = config.sharding_ranks or world_size if config.sharding != "none" else 1
    averaged = 8 + 4 * (1 + len(config.further_averages))  # and moments
    states = (parameters - inside) * (8 + averaged / parts) + inside * (8 + averaged) / parts
    states += 8 * (attention + feed_forward) * divided  # weights and gradients of two sublayers, which others own
    # Autocast's copy of the weights; of layers that are computed anew it goes with them.
    anew = {"none": 0, "mlp": feed_forward, "layer": attention + feed_forward}[config.activation_checkpointing]
    copied = parameters - (anew * model.num_hidden_layers if inside else 0)
    states += copied * (size if config.mixed_precision else 0)
    # Of a rank with most rows and of one with most targets: the first and the last, where ranks have objectives.
    ends = itertools.product(_ends_of_lengths(plan), {0, world_size - 1})
    per_step = (_largest_micro_batch(config, plan, step, rank, world_size, split) for step, rank in ends)
    # While it is evaluated a rank has all weights, beside a copy of its own.
    validation = parameters * (4 + (8 + averaged) / parts) if inside else 0.0
    return max(validation, states + max(activation_bytes(config, model, size, missing, *batch) for batch in per_step))


def _ends_of_lengths(plan: DataPlan) -> set[int]:
    """First and last step of each row length and ratio: the most targets and the largest batch are at one of them."""
    return {step for begin, end in plan.shape_spans() for step in (begin, end - 1)}


def _largest_micro_batch(
    config: TrainingConfig, plan: DataPlan, step: int, rank: int, world_size: int, split: str
) -> tuple[int, int, float]:
    """Tokens, row length and targets of a rank's micro-batch with the rows of which the most tokens are targets."""
    at = plan.step(step)
    ranges = rows_of_rank(at, rank, world_size, split)
    parts = [(plan.objectives[part.objective], len(part)) for part in ranges]
    _, room = micro_batches(at, sum(map(len, ranges)), world_size, config.local_batch_size, config.seq_length)
    taken, targets = 0, 0.0
    for fraction, rows in sorted(((each.target_fraction(at.mask_p), rows) for each, rows in parts), reverse=True):
        rows = min(rows, room - taken)
        taken, targets = taken + rows, targets + rows * fraction
    return taken * at.seq_length, at.seq_length, targets * at.seq_length
