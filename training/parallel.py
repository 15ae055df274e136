"""Data parallelism, wrapped around the model from outside."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own classes.

import contextlib
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model import LTGBert
from ops.nvrtc import cache_folder
from training.distributed import World


def _sum_gradients(_state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: gradients are sums over ranks, since every loss is already divided by global counts."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _sum_gradients_in_bfloat16(_state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`_sum_gradients` with half the traffic: what is sent, and every partial sum, is rounded to bfloat16."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.bfloat16(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))


def compile_layers(model: LTGBert) -> None:
    """Let every sublayer of `model`, and its head, run compiled, in place.

    Sublayers of a kind share their code, so the compiler works once per kind and shape instead of once per layer; row
    lengths and numbers of rows that turn up later are compiled as variables.
    """
    # Compiled code outlives the run beside our own kernels, unless the user has chosen another place.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    import torch._dynamo  # half of all import time, and of use here alone

    # A layer's number reaches its dropout as a plain integer; unspecialised, all layers share one compilation.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Inductor's advice to its own developers, of no use to ours.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    encoder = model.transformer
    for part in (*encoder.attention_layers, *encoder.mlp_layers, model.classifier):
        part.compile()


def parallelize(model: nn.Module, world: World, allreduce_dtype: str = "float32") -> nn.Module:
    """`model` as it is called for training: itself on one rank, inside DistributedDataParallel on several.

    allreduce_dtype: "float32" or "bfloat16", in which gradients are added up over ranks.
    """
    if world.size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, _sum_gradients_in_bfloat16 if allreduce_dtype == "bfloat16" else _sum_gradients)
    return wrapped


def synchronise_only(model: nn.Module, last: bool):
    """Context of one micro-step: gradients are exchanged in the `last` one of a step alone."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()
