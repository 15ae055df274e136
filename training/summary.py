"""What a run is about to do, in one readable block, and the arithmetic behind it."""

from __future__ import annotations

import platform
import socket
import sys
from datetime import datetime, timezone
from typing import Any

import torch

from data.loader import micro_batch_rows
from data.objectives import OBJECTIVES
from data.plan import StepPlan
from data.wording import count
from model_config import ModelConfig
from model_extra import model_class
from ops.reference import reference_parts
from training import kernel_report
from training.config import TrainingConfig
from training.distributed import World
from training.forward_backward import graph_obstacle
from training.inputs import Inputs
from training.memory import memory_estimate
from training.run_dir import origin

# Dense bf16 matrix rates in FLOP/s of what a rank has, from the vendors' data sheets, by what the device's name
# contains; the longest name that fits counts. A card of the MI250 kind is two devices, each with half of its rate.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI250": 181e12,
    "MI250X": 191.5e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 rate in FLOP/s; None where it is not known (always on a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [key for key in _PEAK_FLOPS if key in name]
    return _PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def target_fraction(plan: StepPlan) -> float:
    """Expected fraction of positions that have a target in a step."""
    fractions = [objective.target_fraction(plan.mask_p) for objective in OBJECTIVES]
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
    parts = " + ".join(f"{rows:,} {each.name}" for each, rows in zip(OBJECTIVES, plan.objective_rows, strict=True))
    return (
        f"{plan.rows:,} rows x {plan.seq_length} = {plan.tokens:,} tokens a step, {parts}, "
        f"{count(pieces, 'micro-batch')} of {per_micro} a device"
    )


def _validation_line(inputs: Inputs) -> str:
    held_out, longest = inputs.held_out, inputs.held_out_longest
    if held_out is None:
        return "none (--valid_path)"
    line = f"{held_out.used_rows:,} of {held_out.total_rows:,} rows of {held_out.seq_length}"
    return line if longest is None else f"{line}, of {longest.seq_length} too once rows are so long"


def describe(inputs: Inputs, world: World, split: str, parameters: int, start_step: int, pairs: str = "") -> str:
    """The start-up block. pairs: what --evaluate_data holds, in words."""
    config, plan, corpus, model = inputs.config, inputs.plan, inputs.corpus, inputs.model_config
    epoch_tokens = corpus.tokens_before_epoch(1)
    epochs = [plan.objective_tokens(number) / epoch_tokens for number in range(len(OBJECTIVES))]
    reads = [f"{count:.2f}{' epochs' * (not number)} {OBJECTIVES[number].name}" for number, count in enumerate(epochs)]
    last = config.max_steps - 1
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    milestones = [f"warm-up to step {int(config.max_steps * config.warmup_proportion)}"]
    for milestone in config.length_milestones:
        step = next((s for s in range(config.max_steps) if (s + 1) / config.max_steps >= milestone), None)
        if step is not None:
            milestones.append(f"rows of {plan.step(step).seq_length} from step {step}")
    milestones.append(f"cool-down from step {config.max_steps - int(config.max_steps * config.cooldown_proportion)}")
    ratio = f"{config.hybrid_numerator}/{config.hybrid_denominator}"
    if config.numerator_end not in (None, config.hybrid_numerator):
        ratio += f" -> {config.numerator_end}/{config.hybrid_denominator}"
    others = "".join(f"{each.rows} {each.name}, of the others " for each in OBJECTIVES if each.rows)
    missing = kernel_report.missing(config, model, world.device)
    absent = {name for name, reason in missing.items() if reason}
    need = memory_estimate(config, model, plan, parameters, absent, world.size, split)
    hint = ""
    if config.hybrid_split == "auto" and split == "ranks":  # benchmarks/README.md, one GPU against four
        hint = " (by auto, as published; --hybrid_split rows trains the same in about 4 % less time)"
    graphs = graph_obstacle(config, model, world.device)
    lines = {
        "run": f"{config.run_folder}, steps {start_step} -> {config.max_steps}, seed {config.seed}",
        "device": f"{world.size} x {device}, {'bf16 autocast' if config.mixed_precision else 'fp32'}",
        "kernels": kernel_report.line(missing),
        "model": f"{model.model_type}, {parameters:,} parameters ({model.hidden_size} x {model.num_hidden_layers} "
        f"layers, {model.num_attention_heads} heads, vocabulary {model.vocab_size:,}, "
        f"{model.position_embedding} positions)",
        "data": f"{corpus.num_documents:,} documents, {epoch_tokens:,} tokens an epoch; this run reads "
        + " and ".join(reads),
        "validation": _validation_line(inputs),
        "minimal pairs": pairs or "none (--evaluate_data)",
        "objective": f"{others}{ratio} of rows masked, masks {config.mask_p_start:g} -> {config.mask_p_end:g}, "
        f"split {split}{hint}",
        "batch, start": _batch_line(inputs, 0, world),
        "batch, end": _batch_line(inputs, last, world),
        "in all": f"{plan.tokens_before(config.max_steps):,} tokens",
        "schedule": ", ".join(milestones),
        "optimizer": f"{config.optimizer}, peak learning rate {config.learning_rate:g}, EMA {config.ema_decay:g}"
        + " with a warm-up" * bool(config.ema_warmup),
        "memory": f"about {_bytes(need)} of tensors a device (estimate; up to a fifth more is held in reserve)",
    }
    if graphs and world.device.type == "cuda":
        lines["CUDA graphs"] = f"off: {graphs}; base takes about 4 % more time a step, smaller models lose more"
    longest = max(plan.step(last).seq_length, config.seq_length)
    if longest > model.max_position_embeddings and model.position_embedding != "rope":
        lines["positions"] = (
            f"max_position_embeddings is {model.max_position_embeddings} and rows grow to {longest}: distances from "
            f"{model.max_position_embeddings - 1} on all count as one"
        )
    return "\n".join(f"  {key:<13} {value}" for key, value in lines.items())


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
        "kernels": kernel_report.line(kernel_report.missing(config, model, device)),
        "reference": reference_parts(),
        "start_step": start_step,
        "resumed_from": origin(config),
    }
