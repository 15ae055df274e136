"""The bound of masked diffusion on the likelihood of text (ELBO), by Monte Carlo over rates and masks.

Of a row of n tokens, k tokens drawn at random are masked, k being uniform in 1 .. n; the mean of (n / k) * (summed loss
of the masked tokens) is an upper bound of the row's negative log-likelihood given the places of special tokens: the
mean over all orders in which its tokens can be predicted one by one (LLaDA, arXiv 2502.09992; MDLM, arXiv 2406.07524).
Tokens see their document within the row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch

from data.loader import ValidationSet
from data.mask_rates import MaskRates
from data.masking import IGNORE_INDEX
from data.objectives import MASKED
from evaluation.generation import UsageError
from evaluation.scoring import ScoringModel
from evaluation.validation import evaluation_mode
from model_protocol import PretrainingModel
from training.loss import score_targets


class Bound(NamedTuple):
    """An upper bound of the loss in nats a token, its standard error over samples, and the tokens it is of."""

    loss: float
    error: float
    tokens: int


@torch.no_grad()
def measure_bound(model: ScoringModel, held_out: ValidationSet, rows: int, samples: int) -> Bound:
    """The bound on all rows of `held_out`, `rows` at a time, from `samples` (2 or more) masks of each row. Raises
    UsageError where no token may be masked."""
    masks = replace(held_out.options, random_p=0.0, keep_p=0.0, even=False, span_length=1, rate_power=1.0)
    network, device = cast(PretrainingModel, model.loaded.model), model.world.device
    sums, tokens = torch.zeros(samples, dtype=torch.float64, device=device), 0.0
    with evaluation_mode(network), torch.autocast(device.type, dtype=torch.bfloat16, enabled=model.autocast):
        for sample in range(samples):
            drawn = replace(held_out, options=masks, mask_rates=MaskRates("uniform"), seed=sample)
            for batch in drawn.batches(MASKED, 0, 1, rows):
                weights = batch.target_weights
                assert weights is not None
                tokens += float((batch.targets[MASKED] * weights.numpy().astype(np.float64)).sum())
                inputs, weights = batch.to(device).inputs(masks), weights.to(device)
                scores, _ = score_targets(network, inputs, int(batch.targets.sum()), None)
                row = (inputs.labels != IGNORE_INDEX).nonzero()[:, 0]
                sums[sample] += (scores[0].double() * weights[row]).sum()
    tokens = round(tokens / samples)  # of each sample the same
    if not tokens:
        raise UsageError("--data: the text has no token that may be masked; give a longer one.")
    losses = sums.cpu().numpy() / tokens
    return Bound(float(losses.mean()), float(losses.std(ddof=1) / samples**0.5), tokens)
