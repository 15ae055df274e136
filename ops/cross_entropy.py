"""Cross-entropy and log-partition of targets over a vocabulary: the reference and the choice of kernels.

The reference turns logits into float32 and keeps several tensors of that size for its backward pass. The CUDA kernels
are in ops/cross_entropy_cuda.py.
"""

import torch
from torch import Tensor

from ops import cross_entropy_cuda
from ops.cross_entropy_cuda import fused_target_scores
from ops.reference import reference_chosen


def target_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, squared log-partition and correctness of each target; logits [N, V], labels [N] -> float32 [N].

    By the kernels for bfloat16 logits on CUDA. HYBRID_REFERENCE=loss in the environment keeps the reference. A label
    outside of the vocabulary is an error of the reference and a loss of NaN by the kernels.
    """
    if use_kernel(logits):
        return fused_target_scores(logits, labels)
    logits = logits.float()
    log_z = logits.logsumexp(dim=-1)
    loss = log_z - logits.gather(1, labels[:, None])[:, 0]
    return loss, log_z.square(), (logits.argmax(dim=-1) == labels).float()


def use_kernel(logits: Tensor) -> bool:
    """Whether logits [N, V] go through the CUDA kernels; not while torch.compile traces."""
    if logits.device.type != "cuda" or logits.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    return not reference_chosen("loss") and cross_entropy_cuda.available(logits.device, logits.size(1))
