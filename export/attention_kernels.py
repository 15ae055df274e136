"""This suite's CUDA kernels under exported models, where the repository is: an attention function, or all layers.

    from export.attention_kernels import accelerate, register     # with the repository on PYTHONPATH
    register()
    kernels = {"dtype": torch.bfloat16, "attn_implementation": "hybrid"}
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, **kernels).cuda().eval()
    accelerate(model)                               # all layers by our kernels; or, without: model.compile()

Relative positions alone; texts padded on a side, packed, causal or not. Where the kernels cannot run (a CPU, float32),
the reference in ops/attention.py takes their place. Nothing is dropped out.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from export.hf_format import model_config
from model import LTGBert
from model_extra import model_class
from ops import attention_cuda
from ops.attention import AttentionMetadata, attend, choose_relative_metadata
from ops.attention_metadata import FusedAttentionMetadata, document_starts, fused_metadata

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

    heads_last = (x.transpose(1, 2) for x in (query, key))
    context = attend(
        torch.cat([*heads_last], dim=2), value.transpose(1, 2), torch.cat(positions, dim=1),
        layout.shared(NAME, lambda: metadata(layout, query.size(0), query.dtype)),
    )  # fmt: skip
    return context, None


relative_kernels.takes_layout = True  # pyright: ignore[reportFunctionMemberAccess] - as layers there look for it


def metadata(layout: Any, rows: int, dtype: torch.dtype) -> AttentionMetadata:
    """Who attends whom in a batch of so many rows, for queries of `dtype`; once for all layers."""
    config, causal = layout.config, layout.mask.causal
    buckets = (config.position_bucket_size, config.max_position_embeddings)
    ids = document_ids(layout.mask, rows)
    if torch.compiler.is_compiling() and _traced_kernels(
        ids.device, dtype, config.head_dim, 2 * buckets[0] - 1, torch.is_grad_enabled()
    ):
        return FusedAttentionMetadata(*_traced_metadata(ids, causal, *buckets))
    return choose_relative_metadata(ids, causal, buckets, config.head_dim, dtype, drops=False)


def accelerate(model: Any) -> Any:
    """Let the encoder of an exported model, loaded with attn_implementation="hybrid" and where it is to stay, run by
    this suite's own layers, with their kernels for norms, gates and averages; returns the model.

    The weights are shared. What is asked for with gradients, a cache or the states of all layers, and by torch.compile,
    runs as before. Raises ValueError for rotary positions.
    """
    encoder, config = model.transformer, model_config(model.config.to_dict())
    if config.position_embedding == "rope" or model.config._attn_implementation != NAME:
        raise ValueError(f"accelerate() takes relative positions and models with attn_implementation={NAME!r}.")
    with torch.device("meta"):
        native = cast(type[LTGBert], model_class(config.model_type)).encoder_class(config).eval()
    native.load_state_dict(encoder.state_dict(), assign=True)
    theirs = encoder.forward

    def forward(x: Tensor, table: Tensor, layout: Any) -> Any:
        other = torch.is_grad_enabled() or layout.cache is not None or layout.all_states
        if other or layout.function is not relative_kernels or torch.compiler.is_compiling():
            return theirs(x, table, layout)
        device = x.device
        if next(native.parameters()).device != device:
            raise ValueError("The model was moved to another device after accelerate(): call it again, on a new one.")
        kernels = device.type == "cuda"  # whose stream is float32, whatever the weights
        of_batch = metadata(layout, x.size(0), torch.bfloat16 if kernels else x.dtype)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=kernels):
            hidden = native(x.float() if kernels else x, table, [of_batch] * config.num_hidden_layers, None)
        return [hidden.to(x.dtype)], [None]

    encoder.forward = forward
    return model


def _traced_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, slots: int, trains: bool) -> bool:
    """Whether a graph that torch.compile makes is to hold the kernels: called while it traces, and a constant there."""
    return dtype == torch.bfloat16 and attention_cuda.available(device, head_dim, slots, False, trains)


_traced_kernels._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] - as in ops/residual.py


@torch.library.custom_op("hybrid::exported_metadata", mutates_args=())
def _traced_metadata(ids: Tensor, causal: bool, bucket_size: int, max_position: int) -> list[Tensor]:
    """FusedAttentionMetadata as one operator of a graph, since its tables are made on the host. ids: int64 [B, T]."""
    rows = torch.full(ids.shape[:1], causal, device=ids.device)
    spans, rows, *tables = fused_metadata(ids, rows, bucket_size, max_position)
    return [spans, rows, *(table.clone() for table in tables)]  # what a graph gets it may write to


@_traced_metadata.register_fake
def _(ids: Tensor, causal: bool, bucket_size: int, max_position: int) -> list[Tensor]:
    rows, length = (int(size) for size in ids.shape)
    with _disable_current_modes():  # tables are made, and kept, as they are
        one = torch.zeros(1, length, dtype=torch.int64)
        like = fused_metadata(one, torch.zeros(1, dtype=torch.bool), bucket_size, max_position)
    shapes = [(rows, *x.shape[1:]) if x is like.spans or x is like.causal else x.shape for x in like]
    return [ids.new_empty(shape, dtype=x.dtype) for shape, x in zip(shapes, like, strict=True)]


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
    if not torch.compiler.is_compiling() and bool((document_starts(ids) & mask.real & (ids == before)).any()):
        raise ValueError(f"attn_implementation={NAME!r} knows no padding inside a text: load the model with 'sdpa'.")
    return ids
