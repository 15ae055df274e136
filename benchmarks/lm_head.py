"""Cross-entropy with the head's last product, forward and backward: our kernels, PyTorch and Liger-Kernel.

    python benchmarks/lm_head.py [--targets 6656 32768] [--vocabulary 16384] [--output lm_head.json]

Hidden states of the targets meet the word embedding and its bias under bfloat16 autocast; the loss is the sum over
targets of weight * (cross-entropy + z * log_z^2), and hidden states, embedding and bias get gradients. 6,656 targets
are those of 32,768 tokens of masked rows, 32,768 those of causal ones. Times are medians by CUDA events of both passes
together (Liger computes gradients in its forward pass), memory is the most that both need beside their inputs, and
errors are relative to float64. Liger-Kernel (if installed) waits for the device in every call, so that a CUDA graph
cannot hold it; it weighs all targets alike, and its fused linear form never holds all logits. "graph" says whether a
CUDA graph of both passes can be captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import has_cuda, time_of, write_results
from data.cli import Parser
from ops.cross_entropy import target_scores
from ops.cross_entropy_cuda import available

_Z_LOSS = 1e-4


class Inputs:
    """Random hidden states, embedding, bias and labels; every target weighs 1 / targets."""

    def __init__(self, targets: int, vocabulary: int, hidden: int, device: torch.device) -> None:
        def leaf(*shape: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()

        self.hidden = leaf(targets, hidden, scale=1.0, dtype=torch.bfloat16)  # as the dropout before it leaves them
        self.embedding = leaf(vocabulary, hidden, scale=0.05)
        self.bias = leaf(vocabulary, scale=0.05)
        self.labels = torch.randint(0, vocabulary, (targets,), device=device)
        self.weight = torch.full((targets,), 1 / targets, device=device)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.embedding, self.bias]

    def logits(self) -> Tensor:
        with torch.autocast(self.hidden.device.type, dtype=torch.bfloat16):
            return F.linear(self.hidden, self.embedding, self.bias)


def kernels(x: Inputs) -> Callable[[], Tensor]:
    """ops.cross_entropy.target_scores, as training calls it."""

    def run() -> Tensor:
        loss, squared_log_z, _ = target_scores(x.logits(), x.labels)
        return (x.weight * (loss + _Z_LOSS * squared_log_z)).sum()

    return run


def plain(x: Inputs) -> Callable[[], Tensor]:
    """PyTorch on float32 logits."""

    def run() -> Tensor:
        logits = x.logits().float()
        log_z = logits.logsumexp(-1)
        loss = F.cross_entropy(logits, x.labels, reduction="none")
        return (x.weight * (loss + _Z_LOSS * log_z.square())).sum()

    return run


def compiled(x: Inputs) -> Callable[[], Tensor]:
    """The same, compiled together with the product."""
    return torch.compile(plain(x), dynamic=False)


def liger(x: Inputs) -> Callable[[], Tensor]:
    """Liger-Kernel's cross-entropy on the logits."""
    from liger_kernel.transformers import LigerCrossEntropyLoss  # pyright: ignore

    loss = LigerCrossEntropyLoss(lse_square_scale=_Z_LOSS, reduction="mean")
    return lambda: loss(x.logits(), x.labels)


def liger_linear(x: Inputs) -> Callable[[], Tensor]:
    """Liger-Kernel's product and cross-entropy in pieces; gradients of the embedding are summed in float32."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

    loss = LigerFusedLinearCrossEntropyLoss(lse_square_scale=_Z_LOSS, reduction="mean", accum_dtype=torch.float32)

    def run() -> Tensor:
        with torch.autocast(x.hidden.device.type, dtype=torch.bfloat16):
            return loss(x.embedding, x.hidden, x.labels, x.bias)

    return run


def exact(x: Inputs, piece: int = 2048) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of the leaves in float64, taken piece by piece to save memory."""
    hidden, embedding, bias = (leaf.detach().double().requires_grad_() for leaf in x.leaves)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    parts = [part.split(piece) for part in (hidden, x.labels, x.weight)]
    for rows, labels, weight in zip(*parts, strict=True):
        logits = F.linear(rows, embedding, bias)
        loss = F.cross_entropy(logits, labels, reduction="none") + _Z_LOSS * logits.logsumexp(-1).square()
        part = (weight * loss).sum()
        part.backward()
        total += part.detach()
    return total, [leaf.grad for leaf in (hidden, embedding, bias) if leaf.grad is not None]


def both(run: Callable[[], Tensor], x: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and the gradients of the leaves."""
    loss = run()
    return loss.detach(), torch.autograd.grad(loss, x.leaves)


def capturable(make: Callable[[Inputs], Callable[[], Tensor]], vocabulary: int, hidden: int) -> bool:
    """Whether a CUDA graph can hold both passes of a method. To be called in a process of its own: a capture that fails
    leaves random numbers and the allocator in disorder."""
    x = Inputs(256, vocabulary, hidden, torch.device("cuda", 0))
    run = make(x)
    both(run, x)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            both(run, x)
    except RuntimeError:
        return False
    return True


def measure(make: Callable[[Inputs], Callable[[], Tensor]], x: Inputs, repetitions: int) -> dict[str, Any]:
    """Milliseconds, memory in MiB and relative errors of a method."""
    run = make(x)
    milliseconds = time_of(lambda: both(run, x), repetitions)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, gradients = both(run, x)
    peak = torch.cuda.max_memory_allocated() - before
    true_loss, true_gradients = exact(x)
    errors = [float((g.double() - t).norm() / t.norm()) for g, t in zip(gradients, true_gradients, strict=True)]
    return {
        "ms": milliseconds,
        "peak_mib": peak / 2**20,
        "loss_error": float(abs(loss.double() / true_loss - 1)),
        **dict(zip(("hidden_error", "embedding_error", "bias_error"), errors, strict=True)),
    }


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[6656, 32768], help="targets in a micro-batch")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--repetitions", type=int, default=30, help="of each measurement")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    if not has_cuda():
        return 2
    device = torch.device("cuda", 0)
    if not available(device, options.vocabulary):
        print("error: the fused kernels cannot run on this device", file=sys.stderr)
        return 2
    methods: list[tuple[str, Callable[[Inputs], Callable[[], Tensor]]]] = [
        ("ours", kernels),
        ("PyTorch", plain),
        ("PyTorch, compiled", compiled),
        ("Liger, cross-entropy", liger),
        ("Liger, fused linear", liger_linear),
    ]
    results = []
    for targets in options.targets:
        x = Inputs(targets, options.vocabulary, options.hidden_size, device)
        for name, make in methods:
            try:
                case = measure(make, x, options.repetitions)
            except ImportError as problem:
                print(f"{name:<22} not installed ({problem})", flush=True)
                continue
            results.append({"method": name, "targets": targets, **case})
            print(
                f"{name:<22} {targets:>6} targets {case['ms']:7.3f} ms  memory {case['peak_mib']:6.0f} MiB  error of "
                f"the loss {case['loss_error']:.1e}, gradients {case['hidden_error']:.1e} (hidden) "
                f"{case['embedding_error']:.1e} (embedding) {case['bias_error']:.1e} (bias)",
                flush=True,
            )
            torch.cuda.empty_cache()
    write_results(options, results=results)
    for name in dict.fromkeys(result["method"] for result in results):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            held = process.submit(capturable, dict(methods)[name], options.vocabulary, options.hidden_size).result()
        print(f"{name:<22} {'can' if held else 'cannot'} be captured as a CUDA graph", flush=True)
        for result in results:
            if result["method"] == name:
                result["graph"] = held
    write_results(options, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
