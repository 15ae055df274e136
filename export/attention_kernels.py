"""This suite's CUDA kernels under exported models: an attention function for transformers, where the repository is.

    from export.attention_kernels import register                     # with the repository on PYTHONPATH
    register()
    AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16, attn_implementation="hybrid")

Relative positions alone; texts padded on a side, packed, causal or not. Where the kernels cannot run (a CPU, float32),
the reference in ops/attention.py takes their place. Nothing is dropped out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.attention import attend, choose_relative_metadata
from ops.attention_metadata import document_starts

NAME = "hybrid"


def register() -> None:
    """Let transformers know the function as attn_implementation="hybrid"."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = relative_kernels


def relative_kernels(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, dropout: float = 0.0,
    *, layout: Any, positions: tuple[Tensor, Tensor] | None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Context [B, T, H, d] of query, key and value [B, H, T, d]; layout, positions: as export/attention_gpt_bert.py
    gives them. Raises ValueError for what the kernels do not compute."""
    if positions is None or dropout:
        what = "dropped probabilities" if positions is not None else "rotary positions"
        raise ValueError(f"attn_implementation={NAME!r} has no {what}: load the model with 'sdpa'.")

    @torch.compiler.disable  # a traced choice would be the reference (ops.attention.use_kernel)
    def metadata() -> Any:
        config, causal = layout.config, layout.mask.causal
        buckets = (config.position_bucket_size, config.max_position_embeddings)
        ids = document_ids(layout.mask, query.size(0))
        return choose_relative_metadata(ids, causal, buckets, config.head_dim, query.dtype, drops=False)

    heads_last = (x.transpose(1, 2) for x in (query, key))
    context = attend(
        torch.cat([*heads_last], dim=2), value.transpose(1, 2), torch.cat(positions, dim=1),
        layout.shared(NAME, metadata),
    )  # fmt: skip
    return context, None


relative_kernels.takes_layout = True  # pyright: ignore[reportFunctionMemberAccess] - as layers there look for it


def document_ids(mask: Any, rows: int) -> Tensor:
    """Ids of texts as ops/ has them, int64 [B, T] with -1 at padding, of an AttentionMask. Raises ValueError where a
    mask is no such thing."""
    if mask.pairs is not None:
        raise ValueError(f"attn_implementation={NAME!r} takes masks [batch, length] alone: load the model with 'sdpa'.")
    ids = mask.first.expand(rows, -1)
    if mask.real is None:
        return ids
    ids = ids.masked_fill(~mask.real, -1)
    before = torch.nn.functional.pad(ids, (1, -1), value=-1).cummax(dim=1).values
    if bool((document_starts(ids) & mask.real & (ids == before)).any()):
        raise ValueError(f"attn_implementation={NAME!r} knows no padding inside a text: load the model with 'sdpa'.")
    return ids
