r"""Give a model another vocabulary: more tokens, or those of another tokenizer.

    python export/extend_vocabulary.py MODEL TOKENIZER OUT [--new_rows pieces|mean] [--ema]
    python train_single_gpu.py --initial_weights OUT --config_file OUT/config.json \
        --tokenizer_path OUT/tokenizer.json ...

MODEL is a run folder, a checkpoint, an exported folder, or what from_huggingface.py wrote. TOKENIZER is a
tokenizer.json: the model's own with tokens appended (preprocessing/special_tokens.py), or one for other texts. A token
that MODEL has keeps its row of the word table and of the head, whatever its id; any other begins as the mean of the
rows of the pieces into which MODEL's tokenizer cuts it, and special ones as the mean of all rows, so that they are
neither likely nor unlikely at first (Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models").
OUT has the form of a checkpoint without optimizer; texts must be tokenised anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from tokenizers import Tokenizer

from data.cli import Parser, run_command
from data.shards import ShardError
from data.special_tokens import roles_beside, special_tokens, tokenizer_file
from export.load_model import load_model
from export.to_huggingface import ExportError, check_output, writing
from model import ModelConfigError
from model_extra import build_model
from training.checkpoint import CheckpointError, training_flags, write_checkpoint

# Parameters with a row for each token: the word table, the head's bias and, where it is not tied, its weight.
_BY_TOKEN = ("embedding.word_embedding.", "classifier.nonlinearity.5.")
_FLAGS = ("document_end", "row_start", "special_tokens", "n_special_tokens")  # by which a model reads texts


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Give a model another vocabulary.")
    parser.add_argument("model", metavar="MODEL", help="run folder, checkpoint, or exported or imported folder")
    parser.add_argument("tokenizer", metavar="TOKENIZER", type=Path, help="tokenizer.json of the new vocabulary")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    parser.add_argument(
        "--new_rows", choices=("pieces", "mean"), default="pieces",
        help="what new tokens begin as: the mean of their pieces under the old tokenizer, or of all rows "
        "(default: pieces)",
    )  # fmt: skip
    parser.add_argument("--ema", action="store_true", help="of the averaged weights (default: the trained weights)")
    options = parser.parse_args(arguments)
    return run_command(lambda: print(extend(options)), ExportError, CheckpointError, ModelConfigError, ShardError)


def extend(options: argparse.Namespace) -> str:
    """Write OUT, whole or not at all; returns what was done. Raises ExportError, CheckpointError, ModelConfigError or
    ShardError."""
    check_output(options.output)
    path = tokenizer_file(options.tokenizer)
    try:
        new = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ExportError(f"TOKENIZER {path} cannot be read ({error}); give a tokenizer.json") from None
    model, old, config = load_model(options.model, ema=options.ema)
    vocabulary = new.get_vocab(with_added_tokens=True)
    wider = dataclasses.replace(config, vocab_size=max(vocabulary.values()) + 1)
    sources = row_sources(old, new, options.new_rows)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in build_model(wider).state_dict().items()}
    tensors = {
        name: new_rows(value[: config.vocab_size], sources, shapes[name][0]) if name.startswith(_BY_TOKEN) else value
        for name, value in model.state_dict().items()
    }
    text = path.read_text(encoding="utf-8")
    flags = training_flags(Path(options.model))
    given, beside = flags.get("special_tokens") or "", roles_beside(Path(options.model))
    tokens = special_tokens(text, given, beside=beside, where=f"TOKENIZER {path}").tokens
    roles = {f"{role}_token": token for role, token in tokens.items()}
    files = {
        "config.json": json.dumps(wider.to_dict(), indent=1).encode(),
        "tokenizer.json": text.encode(),
        "special_tokens_map.json": json.dumps(roles, indent=1).encode(),
    }
    kept_flags = {name: flags[name] for name in _FLAGS if name in flags}
    record = {"extended_from": Path(options.model).resolve().name, "flags": kept_flags}
    with writing(options.output) as (temporary, finish):
        finish(write_checkpoint(temporary, 0, {"model": tensors}, record, files))
    had = old.get_vocab(with_added_tokens=True)
    kept, means = sum(token in had for token in vocabulary), sum(not ids for ids in sources)
    out = options.output
    return (
        f"wrote {out}: of {len(vocabulary)} tokens {kept} keep their rows, {len(sources) - kept - means} begin as the "
        f"mean of their pieces and {means} as that of all rows; {sum(token not in vocabulary for token in had)} old "
        f"ones are gone; tokenise texts with {out / 'tokenizer.json'} and start with --initial_weights {out} "
        f"--config_file {out / 'config.json'} --tokenizer_path {out / 'tokenizer.json'}"
    )


def row_sources(old: Tokenizer, new: Tokenizer, by: str) -> list[list[int]]:
    """For each id of `new` the ids of `old` whose rows it begins as the mean of; none is the mean of all."""
    had = old.get_vocab(with_added_tokens=True)
    special = {number for number, token in new.get_added_tokens_decoder().items() if token.special}
    vocabulary = new.get_vocab(with_added_tokens=True)
    sources: list[list[int]] = [[] for _ in range(max(vocabulary.values()) + 1)]
    for token, number in vocabulary.items():
        if token in had:
            sources[number] = [had[token]]
        elif by == "pieces" and number not in special:
            sources[number] = _pieces(old, new, token, number)
    return sources


def _pieces(old: Tokenizer, new: Tokenizer, token: str, number: int) -> list[int]:
    """Ids of the pieces of a new token under the old tokenizer; none where it knows no way to write it."""
    # As a string of the model's own alphabet ("Ġ" for a space), where both write tokens in one.
    plain = token.removeprefix("##")
    pieces = old.model.tokenize(plain)
    if "".join(piece.value.removeprefix("##") for piece in pieces) == plain:
        return [piece.id for piece in pieces]
    ids = old.encode(new.decode([number], skip_special_tokens=False), add_special_tokens=False).ids
    unknown = json.loads(old.to_str())["model"].get("unk_token")
    return [number for number in ids if old.id_to_token(number) != unknown]


def new_rows(rows: torch.Tensor, sources: list[list[int]], count: int) -> torch.Tensor:
    """Rows [V, ...] of the old vocabulary -> [count, ...], of which those beyond the new vocabulary are the mean."""
    rows = rows.float()
    found = rows.mean(0).expand(count, *rows.shape[1:]).clone()
    for number, ids in enumerate(sources):
        if ids:
            found[number] = rows[ids].mean(0)
    return found


if __name__ == "__main__":
    sys.exit(main())
