"""Cross-entropy and log-partition of targets over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.reference import reference_chosen

Scores = tuple[Tensor, Tensor, Tensor]


def target_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Cross-entropy, squared log-partition and correctness of each target; logits [N, V], labels [N] -> float32 [N].

    Logits are turned into float32, of which the backward pass keeps several tensors, unless this is compiled.
    """
    logits = logits.float()
    log_z = logits.logsumexp(dim=-1)
    if torch.compiler.is_compiling():  # the gradient of a gather would be a float32 tensor of the logits' size
        loss = F.cross_entropy(logits, labels, reduction="none")
    else:
        loss = log_z - logits.gather(1, labels[:, None])[:, 0]
    return loss, log_z.square(), (logits.argmax(dim=-1) == labels).float()


def compiled_scores(device: torch.device) -> Callable[[Tensor, Tensor], Scores]:
    """`target_scores` as a device that compiles should compute it: on CUDA in kernels that read the logits where they
    are and keep no other tensor of their size, for any number of targets.

    HYBRID_REFERENCE=loss in the environment keeps the plain form (ops/reference.py).
    """
    if device.type != "cuda" or reference_chosen("loss"):
        return target_scores
    import torch._dynamo  # half of all import time, and of use here alone

    compiled = torch.compile(target_scores)

    def score(logits: Tensor, labels: Tensor) -> Scores:
        for tensor in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, labels)

    return score
