"""The model's parts, compiled."""

from __future__ import annotations

import os
import warnings

from model import LTGBert
from ops.nvrtc import cache_folder


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
