"""Text generation: loaded models, top-k and top-p sampling, batches of continuations, and the flags of the commands.

The model predicts the *next* token under both objectives: output i scores token i + 1, whether attention is causal
(generation) or bidirectional (a mask at position i is scored by output i - 1).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from data.cli import Parser, run_command
from data.shards import ShardError
from data.special_tokens import SpecialTokens, plain, special_tokens
from evaluation.kv_cache import CachedDecoder, LanguageModel, UncachedDecoder
from export.load_model import load_model, load_special_tokens
from model import LTGBert, ModelConfigError
from model_protocol import PretrainingModel
from training.checkpoint import CheckpointError
from training.config import ConfigError, check_environment
from training.distributed import choose_device


class UsageError(ValueError):
    """The user asked for something a model cannot do; the message is one sentence with the flag and the remedy."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: logits are divided by it; 0 takes the most probable token.
    top_k: only so many of the most probable tokens; 0 means all.
    top_p: only the most probable tokens that together reach this probability; 1 means all.
    Raises UsageError for values outside these ranges."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature is {self.temperature:g}: give 0 (always the most probable token) or more.")
        if self.top_k < 0:
            raise UsageError(f"--top_k is {self.top_k}: give 0 (no limit) or a number of tokens.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top_p is {self.top_p:g}: give a number above 0 and up to 1 (no limit).")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready for use. `device` is where its inputs go. roles: the tokenizer's special tokens
    where the model's record tells them, else None."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: torch.device
    roles: SpecialTokens | None = None

    @classmethod
    def of(cls, model: PretrainingModel, tokenizer: Tokenizer, roles: SpecialTokens | None = None) -> LoadedModel:
        """A model where it is, and its tokenizer, which from now on reads special tokens in a text as text."""
        return cls(model, plain(tokenizer), next(model.parameters()).device, roles)

    @cached_property
    def special(self) -> SpecialTokens:
        """The tokenizer's special tokens."""
        return self.roles or special_tokens(self.tokenizer.to_str())

    def special_id(self, role: str) -> int:
        """Return the id of the token that has a role such as "bos"; raises UsageError where there is none."""
        if role not in self.special.ids:
            raise UsageError(
                f"the model's tokenizer has no token for {role}, which the models of this project are trained with."
            )
        return self.special.ids[role]

    @property
    def closing(self) -> list[int]:
        """What ends a document's row: `</s>`, or nothing where that begins the next document."""
        return [] if self.special.one_boundary or "eos" not in self.special.ids else [self.special.ids["eos"]]

    def document(self, ids: list[int]) -> list[int]:
        """Return the row of a whole document."""
        return [self.special_id("bos"), *ids, *self.closing]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; what looks like a special token in it is plain text. Raises UsageError where the
        text came from bytes that are not UTF-8."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # Python keeps foreign bytes of the command line as lone surrogates
            raise UsageError(f"the text {text!r} is not UTF-8: convert it, for example with iconv.") from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are no complete UTF-8 character show as U+FFFD."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @torch.no_grad()  # not inference mode: training goes on with what the model caches here
    def logits(self, ids: list[int], positions: list[int], causal: bool) -> Tensor:
        """Return the logits, float64 [len(positions), V] on the CPU, at positions of one document's row of ids [T]. The
        logits at position i are those of the token at i + 1."""
        row = torch.tensor([ids], dtype=torch.int64, device=self.device)
        wanted = torch.tensor(positions, dtype=torch.int64, device=self.device)
        return self.model(row, torch.zeros_like(row), causal, wanted).to("cpu", torch.float64)

    @torch.no_grad()  # not inference mode: training goes on with what the model caches here
    def decoder(self, padding: list[int], prefix: bool = False) -> CachedDecoder | UncachedDecoder:
        """Return a decoder of rows that begin with so many tokens of padding each. prefix: which reads what comes first
        in both directions, without a cache. Raises UsageError where the model cannot."""
        gaps = torch.tensor(padding, dtype=torch.int64, device=self.device)
        if prefix and not getattr(self.model, "takes_ends", False):
            raise UsageError("--mode prefix: this model reads rows causally or whole; take --mode causal.")
        if isinstance(self.model, LTGBert) and not prefix:
            return CachedDecoder(self.model, gaps)
        return UncachedDecoder(self.model, gaps, prefix)

    @torch.no_grad()  # not inference mode: training goes on with what the model caches here
    def next_logits(self, decoder: CachedDecoder | UncachedDecoder, new: list[list[int]]) -> Tensor:
        """Append the new tokens [B][n]; return the logits of those to come, float64 [B, V] on the CPU."""
        hidden = decoder.append(torch.tensor(new, dtype=torch.int64, device=self.device))
        return self.model.predict(hidden).to("cpu", torch.float64)


def top_k_top_p(logits: Tensor, forbidden: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the tokens that may come next and their probabilities, the most probable first.

    logits: [V]. forbidden: int64 ids that never come. The result is int64 [K] and float64 [K], which sums to 1; equally
    probable tokens come in the order of their ids, so that every device and version of torch agrees."""
    scores = logits.to(torch.float64).index_fill(0, forbidden, -torch.inf)
    if sampling.temperature == 0:
        return scores.argmax().view(1), torch.ones(1, dtype=torch.float64)
    probabilities, ids = torch.sort(torch.softmax(scores / sampling.temperature, dim=0), descending=True, stable=True)
    kept = probabilities > 0
    if sampling.top_k:
        kept[sampling.top_k :] = False
    if sampling.top_p < 1:  # a token stays while those before it have not reached top_p, so the first always does
        kept &= probabilities.cumsum(0) - probabilities < sampling.top_p
    ids, probabilities = ids[kept], probabilities[kept]
    return ids, probabilities / probabilities.sum()


def sample(ids: Tensor, probabilities: Tensor, generator: torch.Generator) -> int:
    """Return one of ids [K], each with its probability [K], from one uniform number of the (CPU) generator."""
    uniform = torch.rand((), dtype=torch.float64, generator=generator)
    index = torch.searchsorted(probabilities.cumsum(0), uniform, right=True)
    return int(ids[min(int(index), len(ids) - 1)])  # the cumulative sum may end a rounding error below 1


def generate(
    model: LoadedModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    prefix: bool = False,
) -> Iterator[tuple[int, int | None]]:
    """Continue several prompts at once: yield (row, the next token of that row), in the order of rows, step by step.

    Each row is `<s>`, its prompt and what it samples from its own generator, until `</s>` or max_new_tokens; (row,
    None) says that it is finished. What a row samples does not depend on the others. A prompt is read once, and then
    each token costs the model one token; rows may grow to any length. prefix: prompts are read in both directions, and
    all of the row again for each token."""
    start, end = model.special_id("bos"), model.special.ids.get("eos")
    forbidden = torch.tensor(sorted(set(model.special.special_ids) - {end}), dtype=torch.int64)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    new = [[start] * (1 + gap) + prompt for gap, prompt in zip(padding, prompts, strict=True)]  # padding is never read
    decoder = model.decoder(padding, prefix)
    rows = list(range(len(prompts)))  # unfinished, in the order of the decoder's batch
    for number in range(1, max_new_tokens + 1):
        logits, new, unfinished = model.next_logits(decoder, new), [], []
        for index, row in enumerate(rows):
            token = sample(*top_k_top_p(logits[index], forbidden, sampling), generators[row])
            if token != end:
                yield row, token
            if token == end or number == max_new_tokens:
                yield row, None
            else:
                new.append([token])
                unfinished.append(index)
        if not unfinished:
            return
        if len(unfinished) < len(rows):
            decoder.select_rows(torch.tensor(unfinished, device=model.device))
            rows = [rows[index] for index in unfinished]


def unmask(
    model: LoadedModel, prompt: list[int], length: int, steps: int, sampling: Sampling, generator: torch.Generator
) -> list[int]:
    """Write `length` tokens behind a prompt by unmasking, as masked diffusion does (LLaDA, arXiv 2502.09992, section
    2.4, with tokens that stay once written); returns them.

    All are masked at first. Each of `steps` (1 .. length) steps fills an equal part of them, at places drawn at random:
    each token is sampled by itself from what the model, reading in both directions, predicts there. With as many steps
    as tokens, that is sampling from the model in a random order."""
    mask, first = model.special_id("mask"), 1 + len(prompt)
    forbidden = torch.tensor(model.special.special_ids, dtype=torch.int64)
    row = model.document([*prompt, *[mask] * length])
    order = torch.randperm(length, generator=generator).tolist()
    for step in range(steps):
        places = sorted(first + place for place in order[length * step // steps : length * (step + 1) // steps])
        for place, logits in zip(places, model.logits(row, [place - 1 for place in places], causal=False), strict=True):
            row[place] = sample(*top_k_top_p(logits, forbidden, sampling), generator)
    return row[first : first + length]


class TextStream:
    """Turns tokens that follow a prompt into text, as soon as it is certain. A character may be spread over several
    tokens: text waits while it ends within one. `num_tokens` counts them."""

    def __init__(self, model: LoadedModel, prompt: list[int]) -> None:
        self.num_tokens = 0
        self._model, self._ids = model, list(prompt)
        self._shown = len(model.decode(prompt))

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now, which may be none."""
        self.num_tokens += 1
        self._ids.append(token)
        return "" if self._model.decode(self._ids).endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """Return the text that `push` has not returned yet, complete or not."""
        text = self._model.decode(self._ids)
        new, self._shown = text[self._shown :], len(text)
        return new


def add_model_flags(parser: Parser, several: bool = False) -> None:
    """The flags that choose a model, or several: MODEL, --ema and --device."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="+" if several else None,
        help="run folder (its newest checkpoint), checkpoint, or exported folder",
    )  # fmt: skip
    add_weights_flags(parser)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA where there is a GPU"
    )


def add_weights_flags(parser: Parser) -> None:
    """The flags that choose among the weights of a checkpoint, both as `ema`: what `weights_file` takes."""
    parser.add_argument("--ema", action="store_true", help="the averaged weights (default: the trained weights)")
    text = "a further average of the weights: 0.9999 of --ema_decay 0.999,0.9999, or tail (--tail_average)"
    parser.add_argument("--average", dest="ema", default=argparse.SUPPRESS, metavar="NAME", help=text)


def load(path: str | Path, ema: bool | str, device: str) -> LoadedModel:
    """The model at MODEL, with --ema or --average and --device as given. Raises CheckpointError, ConfigError or
    ModelConfigError, each with one sentence."""
    check_environment()
    model, tokenizer, _ = load_model(path, ema=ema, device=choose_device(device))
    return LoadedModel.of(model, tokenizer, load_special_tokens(path, tokenizer))


def for_each_line(flag: str, use: Callable[[str], None]) -> None:
    """Call `use` with each line of standard input that is not blank.

    In a terminal, lines are asked for and can be edited; a line that cannot be used is answered with one sentence, and
    Ctrl-C stops an answer, not the program. Elsewhere raises UsageError where there is no text, or what `use` raises.
    """
    interactive, found = sys.stdin.isatty(), False
    if interactive:
        print(f"One text a line. Ctrl-C stops an answer, Ctrl-D ends ({flag} TEXT for scripts).", file=sys.stderr)
    try:
        for line in _typed_lines() if interactive else sys.stdin:
            if not line.strip():
                continue
            found = True
            try:
                use(line.rstrip("\r\n"))
            except (UsageError, KeyboardInterrupt) as problem:
                if not interactive:
                    raise
                print(f"\n{str(problem) or '(stopped)'}\n", file=sys.stderr)
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text: convert it, for example with iconv.") from None
    if not found and not interactive:
        raise UsageError(f"there is no text: give {flag} TEXT, or one text a line on standard input.")


def _typed_lines() -> Iterator[str]:
    """Lines typed in a terminal, until Ctrl-D."""
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401 - importing it is what lets input() edit lines
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:  # standard output is a file: it shall hold answers alone
                print("> ", end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if not line:
                    raise EOFError
                yield line
        except EOFError:
            print(file=sys.stderr)
            return


def check(options: argparse.Namespace, flags: str, holds: Callable[[Any], bool], remedy: str) -> None:
    """Refuse a value of one of `flags` (names with spaces between) for which `holds` is false. Raises UsageError."""
    for flag in flags.split():
        value = getattr(options, flag)
        if not holds(value):
            raise UsageError(f"--{flag} is {f'{value:g}' if isinstance(value, float) else value}: {remedy}.")


def run(command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Run a script's command; return the exit code, 2 after one sentence on what the user can change."""
    errors = (UsageError, CheckpointError, ConfigError, ModelConfigError, ShardError)
    return run_command(lambda: command(options), *errors)
