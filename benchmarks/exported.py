"""The exported model beside ours at inference: reading rows of several lengths, and writing 64 samples at once.

    python benchmarks/exported.py [--config configs/base.json] [--seq_length 128 512 2048] [--output exported.json]

A model with random weights is exported, and both are asked for the hidden states of `--rows` rows of each length in
bf16: ours by its kernels, the exported one with each implementation of attention that --attention names ("hybrid" are
our kernels under it, export/attention_kernels.py; "hybrid:layers" all of our layers), and compiled, those of --compile.
Every fourth row is half padding with --padded. Then both write `--new_tokens` tokens behind `--prompt` tokens for
`--samples` samples, by evaluation's decoder and by generate(), sampled at temperature 1. Times are medians in
milliseconds, by CUDA events or, on a CPU, by the wall clock; memory is the most that a call needs beside weights and
inputs; `difference` is how far the states of first tokens are from ours, of their norm. What does not fit is named.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor

from benchmarks.synthetic import write_inputs
from benchmarks.timing import host_times_of, peak_mib, time_of, write_results
from data.cli import Parser
from evaluation.generation import LoadedModel, Sampling, generate
from export.attention_kernels import accelerate, register
from export.load_model import load_model, load_special_tokens
from export.to_huggingface import export
from model import ModelConfig
from model_extra import build_model
from training.checkpoint import write_checkpoint

_LAYERS = ":layers"  # behind the name of our kernels
_ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse_arguments(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    register()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, exported = write_models(Path(folder), options.config)
        reading: list[dict[str, Any]] = []
        for length in options.seq_length:
            found: dict[str, Any] = {"seq_length": length}
            reading.append(found)
            first: Tensor | None = None
            for name, call in readers(checkpoint, exported, length, options):
                found[name] = beside(measured(call, options), found.get("ours"))
                first, found[name]["difference"] = compared(call, first)
                print(f"T={length:<5} {name:<24} {found[name]}", flush=True)
                write_results(options, reading=reading)
        writing = write_samples(checkpoint, exported, options) if options.samples else {}
    write_results(options, reading=reading, writing=writing)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config", default=str(_ROOT / "configs" / "base.json"), help="sizes of the model")
    parser.add_argument("--seq_length", type=int, nargs="*", default=[128, 512, 2048], help="tokens a row")
    parser.add_argument("--rows", type=int, default=256, help="rows that are read at once")
    parser.add_argument("--padded", action="store_true", help="every fourth row is half padding")
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["sdpa", "flex_attention", "hybrid", f"hybrid{_LAYERS}"],
        help="implementations to time",
    )
    parser.add_argument("--compile", nargs="*", default=["hybrid"], help="implementations to time compiled, too")
    parser.add_argument("--samples", type=int, default=64, help="samples that are written at once; 0: none")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens to write behind each")
    parser.add_argument("--repetitions", type=int, default=20, help="timed calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="", metavar="FILE.json", help="where results go")
    return parser.parse_args(arguments)


def write_models(folder: Path, config: str) -> tuple[Path, Path]:
    """A checkpoint with random weights and its exported folder."""
    sizes = ModelConfig.from_json(config)
    inputs = write_inputs(folder / "inputs", sizes.vocab_size, 4000)
    files = {"config.json": Path(config).read_bytes(), "tokenizer.json": (inputs / "tokenizer.json").read_bytes()}
    model = build_model(sizes, torch.Generator().manual_seed(0))
    record = {"tokens": 0, "flags": {}}
    checkpoint = write_checkpoint(folder / "checkpoints", 0, {"model": model.state_dict()}, record, files)
    export(checkpoint, folder / "exported")
    return checkpoint, folder / "exported"


def readers(
    checkpoint: Path, exported: Path, length: int, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[bool], Tensor]]]:
    """Each way to read rows of one length, with its name: a function of whether they are causal."""
    shape = (options.rows, length)
    ids = torch.randint(16, 1000, shape, generator=torch.Generator().manual_seed(0)).to(options.device)
    mask = torch.ones_like(ids)
    if options.padded:
        mask[::4, length // 2 :] = 0
    model = load_model(checkpoint, device=options.device)[0]
    document_ids = torch.where(mask.bool(), 0, -1)

    def ours(causal: bool) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            return model.encode(ids, document_ids, causal)

    yield "ours", ours
    for name in dict.fromkeys((*options.attention, *options.compile)):
        theirs = load_exported("AutoModel", exported, options, name.removesuffix(_LAYERS))
        theirs = accelerate(theirs) if name.endswith(_LAYERS) else theirs

        def hidden(causal: bool, theirs: Any = theirs) -> Tensor:
            return theirs(ids, attention_mask=mask if options.padded else None, is_causal=causal).last_hidden_state

        if name in options.attention:
            yield name, hidden
        if name in options.compile:
            theirs.compile(dynamic=False)
            yield f"{name}, compiled", hidden
            torch.compiler.reset()


@torch.no_grad()
def compared(call: Callable[[bool], Tensor], first: Tensor | None) -> tuple[Tensor | None, float | None]:
    """The states that came first, and how far these are from them, of their norm; None where a call fails."""
    try:
        states = call(False)[:, 0].float()
    except Exception:  # `measured` has named it
        return first, None
    first = states if first is None else first
    return first, round(float((states - first).norm() / first.norm()), 5)


def beside(found: dict[str, Any], ours: dict[str, Any] | None) -> dict[str, Any]:
    """What was measured, with `times_ours`: how many times as long as ours each takes."""
    ratios = {}
    for name in ("bidirectional_ms", "causal_ms"):
        value, of = found[name], (ours or {}).get(name)
        if isinstance(value, float) and isinstance(of, float):
            ratios[name.removesuffix("_ms")] = round(value / of, 3)
    return {**found, "times_ours": ratios} if ratios else found


def load_exported(auto: str, folder: Path, options: argparse.Namespace, attention: str) -> Any:
    """The exported model in bf16."""
    import transformers

    model = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16, attn_implementation=attention
    )
    return model.to(options.device).eval()


@torch.no_grad()
def measured(call: Callable[[bool], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of bidirectional and of causal calls and their memory in MiB, or why there are none."""
    found: dict[str, Any] = {}
    for name, causal in (("bidirectional_ms", False), ("causal_ms", True)):
        try:
            found[name] = milliseconds(lambda causal=causal: call(causal), options)
        except Exception as error:  # out of memory, or a compiler's own: the next case goes on
            found[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    if options.device != "cpu":
        found["mib"] = memory(lambda: call(False))
    return found


def milliseconds(call: Callable[[], Any], options: argparse.Namespace) -> float:
    """Median time of a call after a warm-up."""
    if options.device != "cpu":
        return time_of(call, options.repetitions)
    return statistics.median(host_times_of(call, options.repetitions))


def memory(call: Callable[[], Any]) -> float | None:
    """MiB that a call needs at most beside what is there; None where it fails."""
    try:
        return peak_mib(call)
    except Exception:  # of memory that lacks, or of a library: `measured`, called before, has named it
        return None


@torch.no_grad()
def write_samples(checkpoint: Path, exported: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of samples written at once, by ours and by generate()."""
    model, tokenizer, _ = load_model(checkpoint, device=options.device)
    loaded = LoadedModel.of(model.bfloat16(), tokenizer, load_special_tokens(checkpoint, tokenizer))
    shape = (options.samples, options.prompt)
    prompts = torch.randint(16, 1000, shape, generator=torch.Generator().manual_seed(0))
    rows = [[loaded.special_id("bos"), *row] for row in prompts.tolist()]
    theirs = load_exported("AutoModelForCausalLM", exported, options, "sdpa")
    inputs = torch.tensor(rows, device=options.device)

    def ours() -> int:
        generators = [torch.Generator().manual_seed(row) for row in range(options.samples)]
        steps = generate(loaded, prompts.tolist(), options.new_tokens, Sampling(), generators)
        return sum(token is not None for _, token in steps)

    def generated() -> int:
        out = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, max_new_tokens=options.new_tokens
        )
        return int((out[:, inputs.size(1) :] != theirs.config.pad_token_id).sum())

    found = {name: written_per_second(write, options) for name, write in (("ours", ours), ("generate()", generated))}
    print(f"{options.samples} samples, tokens per second: {found}", flush=True)
    return found


def written_per_second(write: Callable[[], int], options: argparse.Namespace) -> float:
    """Tokens per second by the wall clock; the tokens that reach the host are all that is waited for."""
    write()
    start = time.perf_counter()
    tokens = write()
    if options.device != "cpu":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
