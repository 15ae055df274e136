"""Let a trained model continue texts.

    python evaluation/generate.py MODEL --prompt "The function returns" --temperature 0.8 --num_samples 2
    echo "The function returns" | python evaluation/generate.py MODEL

The hybrid model reads causally here. A text begins with `<s>` and ends where the model writes `</s>`; " ..." stands at
the end of one that was still going on after --max_new_tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from evaluation.decoding import (
    Parser,
    Sampling,
    TextStream,
    UsableModel,
    UseError,
    add_model_flags,
    continuation,
    load,
    read_lines,
    run,
)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run(generate, parse_arguments(arguments))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("Let a trained model continue texts.")
    add_model_flags(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help='text to continue; may be given several times; "" lets the model begin a document '
        "(default: the lines of standard input)",
    )  # fmt: skip
    parser.add_argument(
        "--max_new_tokens", type=int, default=64, metavar="N", help="tokens after which to stop (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X",
        help="below 1 keeps to the probable, 0 always takes the most probable token (default: 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--top_k",
        type=int,
        default=0,
        metavar="N",
        help="draw from the N most probable tokens; 0: from all (default: 0)",
    )
    parser.add_argument(
        "--top_p", type=float, default=0.95, metavar="X",
        help="draw from the most probable tokens that make up this share of probability; 1: from all (default: 0.95)",
    )  # fmt: skip
    parser.add_argument(
        "--num_samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="sample i (from 0) is drawn with seed N + i (default: 0)"
    )
    return parser.parse_args(arguments)


def generate(options: argparse.Namespace) -> None:
    """Print every prompt with its continuations, as they are written."""
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    for flag in ("max_new_tokens", "num_samples"):
        if getattr(options, flag) < 1:
            raise UseError(f"--{flag} is {getattr(options, flag)}: give 1 or more.")
    if not 0 <= options.seed < 2**62:
        raise UseError(f"--seed is {options.seed}: give 0 or more.")
    usable = load(options)
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for prompt in read_lines(options.prompt, "--prompt"):
        for sample in range(options.num_samples):
            print(f"{bold}{prompt}{plain}", end="", flush=True)
            write(usable, prompt, options.max_new_tokens, sampling, options.seed + sample)


def write(usable: UsableModel, prompt: str, max_new_tokens: int, sampling: Sampling, seed: int) -> None:
    """Print one continuation piece by piece, " ..." where it was cut off, and a blank line."""
    ids = usable.encode(prompt)
    stream = TextStream(usable, ids)
    generator = torch.Generator().manual_seed(seed)
    for token in continuation(usable, ids, max_new_tokens, sampling, generator):
        print(stream.push(token), end="", flush=True)
    print(stream.rest(), " ...\n" if stream.num_tokens == max_new_tokens else "\n", sep="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
