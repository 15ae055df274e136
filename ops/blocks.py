"""Reference attention of long rows, a block of queries at a time.

Scores and masks of a block are computed again in the backward pass (torch.utils.checkpoint), so that memory grows with
the length of a row and not with its square. Plain PyTorch, which torch.compile traces.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops.attention_metadata import BLOCK

Span = tuple[int, int]  # a first token, and the one after the last


def in_blocks(attend: Callable[[Span, Span], Tensor], length: int, window: int | None = None) -> Tensor:
    """Context [B, T, H, d] of rows of `length` tokens, from attend(queries, keys) -> [B, queries, H, d]. window: how
    far apart a query and a key may be at most; keys further away are left out."""
    parts = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        keys = (0, length) if window is None else (max(0, first - window), min(length, last + window))
        part = checkpoint(attend, (first, last), keys, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts, dim=1)
