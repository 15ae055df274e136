"""Attention alone, forward and backward: our kernels, their reference, SDPA, FlexAttention and flashdeberta.

    python benchmarks/attention.py [--seq_length 128 256 512] [--tokens 32768] [--output attention.json]

Every method gets bfloat16 queries, keys and values of the same sizes in the same process; times are medians of CUDA
events around a forward and around its backward, after a warm-up, each from a device queue that is not empty (so that no
launch is timed). Kernels and reference run with dropout 0.1 and bidirectional rows; "documents" adds boundaries of
documents (about 200 tokens apart), "causal" causal rows and "blocks" rows that are causal between blocks of 16. SDPA
has no positions: what attention costs without them. FlexAttention gathers its scores from tables of q @ K_pos and
k @ Q_pos, and cannot drop out. flashdeberta (if installed) computes the same scores and has no dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import has_cuda, time_of, write_results
from data.cli import Parser
from ops.attention import relative_attention
from ops.attention_cuda import available, fused_relative_attention
from ops.attention_metadata import fused_metadata, relative_metadata
from ops.dropout import DropoutKeys, dropout_states, head_keys

_ROOT = Path(__file__).resolve().parent.parent
_BUCKETS = (32, 512)
# FlexAttention's own choice for torch 2.11 and head size 64 asks for more shared memory than an H200 has.
_FLEX_TILES: Any = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}


class Inputs:
    """Random inputs of one shape, and the metadata of rows that are one document each, or several."""

    def __init__(self, batch: int, length: int, heads: int, head_dim: int, p: float, variant: str) -> None:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

        self.query_key = leaf(batch, length, 2, heads, head_dim)
        self.value = leaf(batch, length, heads, head_dim)
        self.positions = leaf(2 * _BUCKETS[0] - 1, 2, heads, head_dim)
        self.leaves = [self.query_key, self.value, self.positions]
        self.gradient = torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        boundaries = torch.rand(batch, length, device="cuda") < 1 / 200
        self.ids = boundaries.cumsum(1) if variant == "documents" else torch.zeros_like(boundaries, dtype=torch.int64)
        self.causal = torch.full((batch,), variant == "causal", device="cuda")
        if variant == "blocks":  # an end for each token
            self.causal = (torch.arange(length, device="cuda") // 16 * 16 + 16).repeat(batch, 1)
        keys = DropoutKeys(torch.arange(batch, device="cuda"), torch.tensor(1, device="cuda"))
        states = dropout_states(keys, length, length)
        self.dropout = (p, head_keys(states.tokens, 3, heads), states.columns) if p else (0.0, None, None)


def kernels(x: Inputs) -> Callable[[], Tensor]:
    """ops.attention_cuda.fused_relative_attention."""
    metadata = fused_metadata(x.ids, x.causal, *_BUCKETS)
    return lambda: fused_relative_attention(x.query_key, x.value, x.positions, metadata, *x.dropout)


def reference(x: Inputs) -> Callable[[], Tensor]:
    """ops.attention.relative_attention."""
    metadata = relative_metadata(x.ids, x.causal, *_BUCKETS, torch.bfloat16)

    def run() -> Tensor:
        (query, key), (query_pos, key_pos) = x.query_key.unbind(2), x.positions.unbind(1)
        return relative_attention(query, key, x.value, query_pos, key_pos, metadata, *x.dropout)

    return run


def sdpa(x: Inputs) -> Callable[[], Tensor]:
    """PyTorch's fused attention, without positions; its own dropout."""
    p, causal = x.dropout[0], bool(x.causal[0])

    def run() -> Tensor:
        query, key = (part.transpose(1, 2) for part in x.query_key.unbind(2))
        context = F.scaled_dot_product_attention(query, key, x.value.transpose(1, 2), dropout_p=p, is_causal=causal)
        return context.transpose(1, 2)

    return run


def flex(x: Inputs) -> Callable[[], Tensor]:
    """FlexAttention with captured tables, compiled; without dropout, documents and causality."""
    from torch.nn.attention.flex_attention import flex_attention

    slots = relative_metadata(x.ids[:1], x.causal[:1], *_BUCKETS).slots
    head_dim = x.value.size(-1)
    attend = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        query, key = (part.transpose(1, 2) for part in x.query_key.unbind(2))
        query_pos, key_pos = x.positions.unbind(1)
        to_position = torch.einsum("bhid,shd->bhis", query, key_pos) * (3 * head_dim) ** -0.5
        from_position = torch.einsum("bhjd,shd->bhjs", key, query_pos) * (3 * head_dim) ** -0.5

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + to_position[b, h, i, slots[i, j]] + from_position[b, h, j, slots[i, j]]

        scale, value = (3 * head_dim) ** -0.5, x.value.transpose(1, 2)
        context = attend(query, key, value, score_mod=add, scale=scale, kernel_options=_FLEX_TILES)
        assert isinstance(context, Tensor)
        return context.transpose(1, 2)

    return run


def flashdeberta(x: Inputs) -> Callable[[], Tensor]:
    """The flashdeberta package's Triton kernels (0.0.8): the same scores; its tables have one more row in front."""
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled  # pyright: ignore

    head_dim = x.value.size(-1)

    def run() -> Tensor:
        query, key = (part.transpose(1, 2).contiguous() for part in x.query_key.unbind(2))
        tables = F.pad(x.positions, (0, 0, 0, 0, 0, 0, 1, 0)).transpose(0, 2)  # [heads, 2, 2 * buckets, head_dim]
        query_pos, key_pos = (table[None].contiguous() for table in tables.unbind(1))
        value = x.value.transpose(1, 2).contiguous()
        context = flash_attention_with_disentangled(
            query, key, value, None, key_pos, query_pos, False, (3 * head_dim) ** -0.5, *_BUCKETS
        )
        return context.transpose(1, 2)

    return run


def measure(make: Callable[[Inputs], Callable[[], Tensor]], x: Inputs, repetitions: int) -> dict[str, float]:
    """Milliseconds of a forward and its backward, and the memory that the forward leaves and the pair needs, in MiB."""
    run = make(x)
    needed = [leaf for leaf in x.leaves if make is not sdpa or leaf is not x.positions]
    forward = time_of(run, repetitions)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    context = run()
    kept = torch.cuda.memory_allocated() - before
    backward = time_of(lambda: torch.autograd.grad(context, needed, x.gradient, retain_graph=True), repetitions)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "total_ms": forward + backward,
        "kept_mib": kept / 2**20,
        "peak_mib": peak / 2**20,
    }


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--seq_length", type=int, nargs="+", default=[128, 256, 512], help="row lengths in tokens")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens in all")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repetitions", type=int, default=30, help="of each measurement")
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    if not has_cuda():
        return 2
    if not available(torch.device("cuda", 0), options.head_dim, 2 * _BUCKETS[0] - 1):
        print("error: the fused kernels cannot run on this device", file=sys.stderr)
        return 2
    methods: list[tuple[str, Callable[[Inputs], Callable[[], Tensor]], str, bool]] = [
        ("ours", kernels, "", True),
        ("ours, documents", kernels, "documents", True),
        ("ours, causal", kernels, "causal", True),
        ("ours, blocks", kernels, "blocks", True),
        ("ours, no dropout", kernels, "", False),
        ("reference", reference, "", True),
        ("SDPA, no positions", sdpa, "", True),
        ("SDPA, no positions, no dropout", sdpa, "", False),
        ("FlexAttention, no dropout", flex, "", False),
        ("flashdeberta, no dropout", flashdeberta, "", False),
    ]
    results = []
    for name, make, variant, drops in methods:
        if name in options.skip:
            continue
        for length in options.seq_length:
            x = Inputs(
                options.tokens // length, length, options.heads, options.head_dim, options.dropout * drops, variant
            )
            try:
                case = measure(make, x, options.repetitions)
            except ImportError as problem:
                print(f"{name:<32} not installed ({problem})", flush=True)
                break
            except Exception as problem:  # another package's failure is a result too, and not the end of the others
                if make is kernels:
                    raise
                case = {"error": f"{type(problem).__name__}: {str(problem)[:300]}"}
            results.append({"method": name, "seq_length": length, **case})
            print(
                f"{name:<32} T={length:<5}"
                + (
                    f"forward {case['forward_ms']:7.3f} ms  backward {case['backward_ms']:7.3f} ms  "
                    f"both {case['total_ms']:7.3f} ms  memory {case['peak_mib']:7.0f} MiB"
                    if "total_ms" in case
                    else f"failed: {case['error']}"
                ),
                flush=True,
            )
            torch.cuda.empty_cache()
    write_results(options, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
