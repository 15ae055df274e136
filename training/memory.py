"""How much memory a run's tensors will take on a device, before anything is there.

What the model keeps of a micro-batch for its backward pass is counted; the rest is fitted to runs on an H200
(tests/test_memory.py has them). The allocator holds up to a fifth more than tensors take, and CUDA itself about half a
GiB a process.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from data.loader import micro_batch_rows
from data.objectives import OBJECTIVES
from data.plan import DataPlan, rows_of_rank
from model import ModelConfig
from training.config import TrainingConfig


def memory_estimate(
    config: TrainingConfig,
    model: ModelConfig,
    plan: DataPlan,
    parameters: int,
    missing: Collection[str],
    world_size: int,
    split: str,
) -> float:
    """Peak of the tensors on one device in bytes: states, and activations of the largest micro-batch.

    config: device defaults resolved. missing: names of kernels that do not run (training/kernel_report.py).
    """
    size = 2 if config.mixed_precision else 4
    # Weights, gradients, two moments and the average in float32; autocast's copy of the weights.
    states = parameters * (20 + (size if config.mixed_precision else 0))
    per_step = (_largest_micro_batch(config, plan, step, world_size, split) for step in _ends_of_lengths(plan))
    return states + max(_activations(config, model, size, missing, *batch) for batch in per_step)


def _ends_of_lengths(plan: DataPlan) -> set[int]:
    """First and last step of each row length: the most targets and the largest batch are at one of them."""
    return {step for begin, end in pairwise(plan.length_changes()) if begin < end for step in (begin, end - 1)}


def _largest_micro_batch(
    config: TrainingConfig, plan: DataPlan, step: int, world_size: int, split: str
) -> tuple[int, int, float]:
    """Tokens, row length and targets of the micro-batch of a step with the most targets.

    That is one of the last rank, which is causal where ranks have one objective each, with the rows of which the most
    tokens are targets.
    """
    at = plan.step(step)
    parts = [(OBJECTIVES[part.objective], len(part)) for part in rows_of_rank(at, world_size - 1, world_size, split)]
    room = micro_batch_rows(config.local_batch_size, config.seq_length, at.seq_length)
    taken, targets = 0, 0.0
    for fraction, rows in sorted(((each.target_fraction(at.mask_p), rows) for each, rows in parts), reverse=True):
        rows = min(rows, room - taken)
        taken, targets = taken + rows, targets + rows * fraction
    return taken * at.seq_length, at.seq_length, targets * at.seq_length


def _activations(
    config: TrainingConfig,
    model: ModelConfig,
    size: int,
    missing: Collection[str],
    tokens: int,
    row_length: int,
    targets: float,
) -> float:
    """Bytes that forward and backward pass of a micro-batch take at most, with `size` bytes a number."""
    width, inner, averages = model.hidden_size, model.intermediate_size, model.model_type == "gpt-bert"
    wide = 4 // size  # the residual stream is float32
    # Of a layer, in numbers a token: what attention reads, queries, keys, values, context and its norm; what the
    # feed-forward reads; its two halves and their norm. With averages also a gate and a state for each sublayer.
    kept = (7 + 3 * averages) * width + 3 * inner
    scores = 0.0
    if model.position_embedding == "rope":
        kept += 2 * width  # copies in the order of causal and other rows
    elif "attention" in missing:
        # Probabilities and what they are made of; scores of queries and of keys with each position bucket, and copies.
        scores = model.num_attention_heads * (row_length * (2.5 * size + 1) + 4 * size * model.position_bucket_size)
        kept += 2 * width
    if "residual" in missing or "residual without averages" in missing:
        kept += 2 * (wide + averages * (wide - 1)) * width  # its value before each sublayer; states as wide as it
    if "feed-forward norm" in missing and not config.compile:
        kept += 3 * width + 3 * inner  # each operation keeps what it was given
    logits = 2 * size if "loss" not in missing else 20 if size == 2 else 16
    outside = 6 * 4 * width  # embeddings and their norm, the stream, its gradient and sums over depth
    return tokens * (model.num_hidden_layers * (kept * size + scores) + outside) + targets * model.vocab_size * logits
