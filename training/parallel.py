"""Data parallelism, wrapped around the model from outside."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own classes.

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model import LTGBert
from training.distributed import World


def _sum_gradients(_state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: gradients are sums over ranks, since every loss is already divided by global counts."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def compile_layers(model: LTGBert) -> None:
    """Let every sublayer of `model` run compiled, in place.

    Sublayers of a kind share their code, so the compiler works once per kind and shape instead of once per layer; row
    lengths and numbers of rows that turn up later are compiled as variables.
    """
    import torch._dynamo  # half of all import time, and of use here alone

    # A layer's number reaches its dropout as a plain integer; unspecialised, all layers share one compilation.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Inductor's advice to its own developers, of no use to ours.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    encoder = model.transformer
    for sublayer in (*encoder.attention_layers, *encoder.mlp_layers):
        sublayer.compile()


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """`model` as it is called for training: itself on one rank, inside DistributedDataParallel on several."""
    if world.size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, _sum_gradients)
    return wrapped


def synchronise_only(model: nn.Module, last: bool):
    """Context of one micro-step: gradients are exchanged in the `last` one of a step alone."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()
