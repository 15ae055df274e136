"""Scoring models for the commands that score texts: a loaded model as the scoring functions take it, flags, output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from data.atomic_io import write_atomically
from data.cli import Parser
from data.wording import count
from evaluation.generation import LoadedModel, UsageError, add_model_flags, load
from evaluation.pair_accuracy import MODES
from evaluation.token_log_probs import BatchShape, Scorer, SpecialIds, TokenizedSentences, count_tokens, token_scores
from training.checkpoint import training_flags
from training.distributed import World
from training.ema import weights_file
from training.environment import Environment

_ROW_LENGTH = 128
_LOGITS = 1 << 28  # of a causal batch: 1 GiB in float32


@dataclass(frozen=True)
class ScoringModel(Scorer):
    """A loaded model, alone on its device. document_end: whether texts are closed, as documents are."""

    loaded: LoadedModel = field(kw_only=True)
    document_end: bool = field(kw_only=True)

    def score(
        self,
        texts: Mapping[str, TokenizedSentences],
        *,
        word_l2r: bool = False,
        temperatures: tuple[float, ...] = (1.0,),
        best: bool = False,
    ) -> dict[str, np.ndarray]:
        """For each objective `token_scores` of its texts. Raises UsageError where the device has too little memory."""
        total = sum(count_tokens(sentences, objective == "causal") for objective, sentences in texts.items())
        with enough_memory(), tqdm(total=total, unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
            return {
                objective: token_scores(
                    self, sentences, causal=objective == "causal", word_l2r=word_l2r, temperatures=temperatures,
                    best=best, progress=bar.update,
                )
                for objective, sentences in texts.items()
            }  # fmt: skip

    def say_of_positions(self, *parts: TokenizedSentences) -> None:
        """Say once how many texts are longer than any that the model has learned positions for."""
        positions = getattr(getattr(self.model, "config", None), "max_position_embeddings", math.inf)
        lengths = [int(length) for part in parts for length in np.diff(part.starts)]
        if longer := sum(length > positions for length in lengths):
            print(
                f"note: {count(longer, 'text')} of up to {max(lengths):,} tokens, beyond the model's {positions} "
                "positions (max_position_embeddings): read whole, at distances that are no more told apart or were "
                "never learned",
                file=sys.stderr,
            )


def add_scoring_flags(
    parser: Parser, document_end: bool | None, modes: Sequence[str] = MODES, several: bool = False
) -> None:
    """The flags that choose a model, or several, and say how it is run. document_end: the default of that flag, None as
    trained. modes: that --mode offers beside all; () for no such flag."""
    add_model_flags(parser, several)
    parser.add_argument(
        "--document_end", action=argparse.BooleanOptionalAction, default=document_end,
        help="close texts with </s> (default: "
        + ("as the model was trained)" if document_end is None else "no: a sentence is no whole document)"),
    )  # fmt: skip
    parser.add_argument(
        "--mixed_precision", action=argparse.BooleanOptionalAction, default=None,
        help="bf16 autocast (default: on CUDA yes, on the CPU no)",
    )  # fmt: skip
    parser.add_argument(
        "--batch_tokens", type=int, default=0, metavar="N",
        help="tokens that the model reads at once; changes speed and memory alone (default: 0, by the device)",
    )  # fmt: skip
    meanings = {"masked": "each token masked in turn", "causal": "left to right", "fused": "the mean of both"}
    text = "; ".join(f"{mode}: {meanings[mode]}" for mode in modes)
    if modes:
        parser.add_argument("--mode", choices=("all", *modes), default="all", help=text)


def check_scoring_flags(options: argparse.Namespace, files: Iterable[str] = ("output",)) -> None:
    """Refuse values that cannot work, those of the flags `files` too, which name files to write. Raises UsageError."""
    if options.batch_tokens < 0 or 0 < options.batch_tokens < _ROW_LENGTH:
        raise UsageError(
            f"--batch_tokens is {options.batch_tokens}: give {_ROW_LENGTH} or more, or 0 to leave it open."
        )
    for flag in files:
        check_output(getattr(options, flag), f"--{flag}")


def load_for_scoring(options: argparse.Namespace) -> ScoringModel:
    """Load the model that the flags name. Raises UsageError, CheckpointError, ConfigError or ModelConfigError."""
    loaded = load(options.model, options.ema, options.device)
    flags = training_flags(Path(options.model))
    ends = bool(flags.get("document_end", True)) if options.document_end is None else options.document_end
    special = SpecialIds(
        bos=loaded.special_id("bos"),
        eos=loaded.special_id("eos") if ends and not loaded.special.one_boundary else None,
        pad=loaded.special_id("pad"),
        mask=loaded.special_id("mask"),
    )
    on_cuda = loaded.device.type == "cuda"
    autocast = on_cuda if options.mixed_precision is None else options.mixed_precision
    tokens = options.batch_tokens
    if not tokens:
        words = loaded.special.vocab_size
        tokens = max(_ROW_LENGTH, min(32768 if on_cuda else 4096, _LOGITS // words))
    shape = BatchShape(tokens // _ROW_LENGTH, _ROW_LENGTH)
    world = World(0, 1, loaded.device, Environment("none"))
    return ScoringModel(loaded.model, special, world, shape, autocast, loaded=loaded, document_end=ends)


def check_output(path: str | None, flag: str) -> None:
    """Refuse a file that could not be written in the end, before any long work. Raises UsageError."""
    if path is None:
        return
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {path}: its folder cannot be made ({error.strerror}).") from None
    if file.is_dir():
        raise UsageError(f"{flag} {path} is a folder: give a file name.")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: its folder cannot be written to.")


def about(options: argparse.Namespace) -> dict[str, Any]:
    """How results begin: the model and which of its weights."""
    return {"model": options.model, "weights": weights_file(options.ema) if options.ema else "trained"}


def write_results(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write results as JSON, and what they are of, where --output names a file."""
    if options.output:
        write_json(options.output, {**about(options), **results})


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a device's lack of memory into a UsageError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError("the device has too little memory for a batch: give a lower --batch_tokens.") from None
