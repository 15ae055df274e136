"""Loss, perplexity and accuracy of both objectives on a held-out set, the same on any number of ranks."""

from __future__ import annotations

import math

import torch
from torch import nn

from data.loader import ValidationSet, micro_batch_rows
from data.plan import OBJECTIVES
from training.distributed import World
from training.objective import evaluate, sums_by_objective


@torch.no_grad()
def validate(
    model: nn.Module, held_out: ValidationSet, world: World, local_batch_size: int, autocast: bool, prefix: str
) -> dict[str, float]:
    """Metrics `PREFIXmasked_loss`, `PREFIXmasked_perplexity`, `PREFIXmasked_accuracy` and the same for causal.

    Masked: next-token prediction of 15 % masked tokens with masks that never change. The model's mode is restored.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, 4, dtype=torch.float64, device=world.device)
    rows = micro_batch_rows(local_batch_size, held_out.seq_length, held_out.seq_length)
    for objective in range(len(OBJECTIVES)):
        for batch in held_out.batches(objective, world.rank, world.size, rows):
            inputs = batch.to(world.device).inputs(held_out.options)
            with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=autocast):
                scores, which = evaluate(model, inputs, int(batch.targets.sum()), None)
            sums += sums_by_objective(scores, which)
    model.train(was_training)
    metrics = {}
    for name, (loss, _, correct, count) in zip(OBJECTIVES, world.sum(sums).tolist(), strict=True):
        if count:
            metrics[f"{prefix}{name}_loss"] = loss / count
            metrics[f"{prefix}{name}_perplexity"] = math.exp(min(loss / count, 700.0))
            metrics[f"{prefix}{name}_accuracy"] = correct / count
    return metrics
