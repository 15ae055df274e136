"""Text generation: a trained model continues prompts.

    python evaluation/generate.py MODEL --prompt "The function returns" --temperature 0.8 --num_samples 2
    echo "The function returns" | python evaluation/generate.py MODEL
    python evaluation/generate.py MODEL          (in a terminal: asks for prompts)

The hybrid model reads causally here, each token once. A text begins with `<s>` and ends where the model writes `</s>`;
" ..." stands at the end of one that was still going on. With --mode prefix it reads the prompt in both directions
(train with --causal_rows prefix). With --mode unmask --max_new_tokens masks follow the prompt and are filled in random
order, in --steps steps, as masked diffusion does (train with --mask_rate uniform --mask_rate_loss_power 1).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from data.cli import Parser
from evaluation.generation import (
    LoadedModel,
    Sampling,
    TextStream,
    add_model_flags,
    check,
    for_each_line,
    generate,
    load,
    run,
    unmask,
)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Let a trained model continue texts.")
    add_model_flags(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help='text to continue; may be given several times; "" lets the model begin a document '
        "(default: the lines of standard input)",
    )  # fmt: skip
    parser.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="tokens after which to stop")
    parser.add_argument(
        "--mode", choices=("causal", "prefix", "unmask"), default="causal",
        help="causal: token after token; prefix: the same behind a prompt that is read in both directions; unmask: all "
        "masked at first, then filled in random order (default: causal)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N",
        help="of unmask: tokens are filled in so many steps, those of a step at once (default: 0: one at a time)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X",
        help="below 1 keeps to the probable, 0 always takes the most probable token (default: 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--top_k", type=int, default=0, metavar="N",
        help="draw from the N most probable tokens; 0: from all (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--top_p", type=float, default=0.95, metavar="X",
        help="draw from the most probable tokens that together reach this probability; 1: from all (default: 0.95)",
    )  # fmt: skip
    parser.add_argument("--num_samples", type=int, default=1, metavar="N", help="continuations of each prompt")
    parser.add_argument(
        "--batch_size", type=int, default=16, metavar="N",
        help="continuations that are computed together; the first of them is shown as it grows (default: 16)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="sample i (from 0) is drawn with seed N + i")
    return run(answer_prompts, parser.parse_args(arguments))


def answer_prompts(options: argparse.Namespace) -> None:
    """Print every prompt with its continuations, as they are written."""
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    check(options, "max_new_tokens num_samples batch_size", lambda n: n >= 1, "give 1 or more")
    most = options.max_new_tokens
    check(options, "steps", lambda n: 0 <= n <= most, f"give 0 to {most} (--max_new_tokens)")
    check(options, "seed", lambda n: 0 <= n < 2**62, "give 0 or more")
    model = load(options.model, options.ema, options.device)
    seeds = range(options.seed, options.seed + options.num_samples)

    def answer(*prompts: str) -> None:
        tasks = [(prompt, seed) for prompt in prompts for seed in seeds]
        if options.mode == "unmask":
            for prompt, seed in tasks:
                write_unmasked(model, prompt, seed, options.max_new_tokens, options.steps, sampling)
            return
        for start in range(0, len(tasks), options.batch_size):
            batch = tasks[start : start + options.batch_size]
            write(model, batch, options.max_new_tokens, sampling, options.mode == "prefix")

    if options.prompt:
        answer(*options.prompt)
    else:
        for_each_line("--prompt", answer)


def write_unmasked(model: LoadedModel, prompt: str, seed: int, length: int, steps: int, sampling: Sampling) -> None:
    """Print a prompt with the tokens that `unmask` writes behind it, and a blank line."""
    ids, generator = model.encode(prompt), torch.Generator().manual_seed(seed)
    written = unmask(model, ids, length, steps or length, sampling, generator)
    print(prompt + model.decode([*ids, *written])[len(model.decode(ids)) :] + "\n", flush=True)


def write(
    model: LoadedModel, tasks: list[tuple[str, int]], max_new_tokens: int, sampling: Sampling, prefix: bool = False
) -> None:
    """Print the continuations of prompts by their seeds, " ..." where one was cut off, and a blank line after each. All
    are computed together. The first that is not finished is printed as it grows; the others wait for their turn."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    prompts = [model.encode(prompt) for prompt, _ in tasks]
    streams = [TextStream(model, prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for _, seed in tasks]
    held_back = [f"{bold}{prompt}{plain}" for prompt, _ in tasks]
    ended = [False] * len(tasks)
    shown = 0  # the row that is printed
    print(held_back[0], end="", flush=True)
    for row, token in generate(model, prompts, max_new_tokens, sampling, generators, prefix):
        if token is not None:
            text = streams[row].push(token)
        else:
            text = streams[row].rest() + (" ...\n\n" if streams[row].num_tokens == max_new_tokens else "\n\n")
            ended[row] = True
        if row == shown:
            print(text, end="", flush=True)
        else:
            held_back[row] += text
        while shown < len(tasks) and ended[shown]:
            shown += 1
            if shown < len(tasks):
                print(held_back[shown], end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
