"""Mask filling: a trained model proposes words for the gaps of texts.

    python evaluation/fill_mask.py MODEL --text "Return the <mask> of the list."
    python evaluation/fill_mask.py MODEL          (in a terminal: asks for texts)

The hybrid model reads in both directions here. It predicts the next token (MNTP), so what fills a gap at position i is
read from output i - 1. A gap is one token; gaps of the same text are filled independently of each other.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from tokenizers import pre_tokenizers

from data.cli import Parser
from evaluation.generation import (
    LoadedModel,
    Sampling,
    UsageError,
    add_model_flags,
    check,
    for_each_line,
    load,
    run,
    top_k_top_p,
)

MASK = "<mask>"


@dataclass(frozen=True)
class Filling:
    """What may fill one gap: ids, most probable first, and their probabilities among all words."""

    ids: list[int]
    probabilities: list[float]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Let a trained model fill the gaps of texts.")
    add_model_flags(parser)
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT",
        help=f"text with {MASK} where tokens are missing; may be given several times (default: the lines of standard "
        "input)",
    )  # fmt: skip
    parser.add_argument("--top_k", type=int, default=5, metavar="N", help="candidates to print for each gap")
    return run(fill_mask, parser.parse_args(arguments))


def fill_mask(options: argparse.Namespace) -> None:
    """Print the candidates for every gap of every text, and the text with the most probable ones."""
    check(options, "top_k", lambda n: n >= 1, "give 1 or more")
    for text in options.text:
        check_text(text)
    model = load(options.model, options.ema, options.device)
    for text in options.text:
        answer(model, text, options.top_k)
    if not options.text:
        for_each_line("--text", lambda text: answer(model, text, options.top_k))


def answer(model: LoadedModel, text: str, top_k: int) -> None:
    """Print what fills the gaps of one text. Raises UsageError where it has none."""
    check_text(text)
    row, gaps = mask_row(model, text)
    fillings = predict_gaps(model, row, gaps, top_k)
    print(text)
    for number, filling in enumerate(fillings, start=1):
        pairs = zip(filling.ids, filling.probabilities, strict=True)
        words = "   ".join(f"{show_token(model, token)} {100 * p:.1f} %" for token, p in pairs)
        print(f"  {f'gap {number}' if len(fillings) > 1 else 'gap'}: {words}")
    print(f"  -> {filled_text(model, row, gaps, fillings)}\n", flush=True)


def check_text(text: str) -> None:
    if MASK not in text:
        raise UsageError(
            f"there is no {MASK} in the text {text!r}: write {MASK} where the model shall fill in a token."
        )


def mask_row(model: LoadedModel, text: str) -> tuple[list[int], list[int]]:
    """Return the row of a text, `<s> ... </s>` with mask ids for its gaps (written <mask> whatever the tokenizer calls
    them), and the positions of these in it.

    A token holds the space before its word, so one space before a gap belongs to what fills it."""
    pieces = text.split(MASK)
    row, gaps = [], []
    for number, piece in enumerate(pieces):
        before_gap = number < len(pieces) - 1
        row += model.encode(piece.removesuffix(" ") if before_gap else piece)
        if before_gap:
            gaps.append(1 + len(row))  # <s> comes before it
            row.append(model.special_id("mask"))
    return model.document(row), gaps


def predict_gaps(model: LoadedModel, row: list[int], gaps: list[int], top_k: int) -> list[Filling]:
    """Return the top_k words for each gap; probabilities are among all tokens that are not special."""
    forbidden = torch.tensor(model.special.special_ids, dtype=torch.int64)
    fillings = []
    for logits in model.logits(row, [gap - 1 for gap in gaps], causal=False):
        ids, probabilities = top_k_top_p(logits, forbidden, Sampling())
        fillings.append(Filling(ids[:top_k].tolist(), probabilities[:top_k].tolist()))
    return fillings


def filled_text(model: LoadedModel, row: list[int], gaps: list[int], fillings: list[Filling]) -> str:
    """Return the text with the most probable word in each gap."""
    filled = list(row)
    for gap, filling in zip(gaps, fillings, strict=True):
        filled[gap] = filling.ids[0]
    return model.decode(filled[1 : len(filled) - len(model.closing)])


def show_token(model: LoadedModel, token: int) -> str:
    r"""Return a token as text in quotes, with the space that is part of it; parts of a character show as \xNN."""
    text = model.decode([token])
    if "\ufffd" in text:
        byte_of = byte_alphabet()
        written = model.tokenizer.id_to_token(token) or ""
        text = "".join(f"\\x{byte_of[char]:02x}" if char in byte_of else char for char in written)
    else:
        text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'"{text}"'


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each of the 256 characters stands for in a byte-level vocabulary. Printable characters of
    Latin-1 stand for their own code; characters from U+0100 on for the other bytes, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [ord(char) for char in alphabet if ord(char) < 256]
    others = [byte for byte in range(256) if byte not in own]
    return dict(zip(alphabet, own + others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
