"""Show which tokens of a tokenizer begin and end a text, pad, hide a word and are unknown; append those that it lacks.

    python preprocessing/special_tokens.py TOKENIZER
    python preprocessing/special_tokens.py TOKENIZER --output FOLDER --add mask pad

TOKENIZER is a tokenizer.json or a Hugging Face folder that holds one. New tokens get the ids behind its last, so that
texts keep theirs; the model's vocab_size grows by as many. FOLDER gets a tokenizer.json and a special_tokens_map.json,
which says what has which role.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tokenizers import AddedToken, Tokenizer

from data.atomic_io import write_atomically
from data.cli import Parser
from data.shards import ShardError
from data.special_tokens import (
    FLAG_HELP,
    OURS,
    ROLES,
    SpecialTokens,
    parse_roles,
    read_special_tokens,
    special_tokens,
    written,
)
from preprocessing.cli import CommandError, run
from preprocessing.resumable_output import TOKENIZER_NAME
from preprocessing.tokenizer import load_tokenizer

MAP_NAME = "special_tokens_map.json"


def add_special_tokens(path: Path, given: str, roles: Sequence[str]) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer with a token for each of `roles` that it lacks, and its special tokens.

    given: as --special_tokens; of the tokens that it names for `roles`, those that the vocabulary lacks are appended.
    Raises ShardError, one sentence."""
    tokenizer, named = load_tokenizer(path), parse_roles(given)
    new = {role: named.get(role, parse_roles(OURS)[role]) for role in roles}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    known = {role: token for role, token in named.items() if role not in new or token in vocabulary}
    found = read_special_tokens(path, written(known))
    new = {role: token for role, token in new.items() if role not in found.tokens or role in named}
    taken = next((role for role, token in new.items() if token in vocabulary and role not in known), None)
    if taken:
        raise ShardError(
            f"--add {taken}: the tokenizer {path} has {new[taken]} already; name another with --special_tokens "
            f"{taken}=TOKEN"
        )
    appended = [token for token in dict.fromkeys(new.values()) if token not in vocabulary]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in appended])
    tokens = written({**found.tokens, **new})
    return tokenizer, special_tokens(tokenizer.to_str(), tokens, where=f"the tokenizer {path}")


def command(arguments: argparse.Namespace) -> int:
    path, output = arguments.tokenizer, arguments.output
    if arguments.add and output is None:
        raise CommandError("--add needs --output FOLDER, where the new tokenizer.json shall lie; add it")
    if output is not None and (output / TOKENIZER_NAME).exists():
        raise CommandError(
            f"--output {output} holds a {TOKENIZER_NAME} already; give another folder, or remove it first"
        )
    before = load_tokenizer(path).get_vocab_size(with_added_tokens=True)
    tokenizer, special = add_special_tokens(path, arguments.special_tokens, arguments.add)
    for role in ROLES:
        print(f"{role:5}" + (f"{special.tokens[role]}  (id {special.ids[role]})" if role in special.ids else "-"))
    new = tokenizer.get_vocab_size(with_added_tokens=True) - before
    print(f"{special.vocab_size:,} ids" + f", {new} of them new" * bool(new))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        roles = {f"{role}_token": token for role, token in special.tokens.items()}
        write_atomically(output / MAP_NAME, (json.dumps(roles, indent=2, ensure_ascii=False) + "\n").encode())
        write_atomically(output / TOKENIZER_NAME, tokenizer.to_str(pretty=True).encode())
        print(f"{output / TOKENIZER_NAME} is ready: give the model's configuration vocab_size {special.vocab_size}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER", help="tokenizer.json, or a folder that holds one")
    parser.add_argument("--special_tokens", default="", metavar="ROLE=TOKEN,...", help=FLAG_HELP)
    parser.add_argument(
        "--add", nargs="+", default=[], choices=ROLES, metavar="ROLE",
        help=f"roles ({', '.join(ROLES)}) that get a new token where the tokenizer has none: {OURS} or as named above",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write tokenizer.json and its roles here")
    return run(command, parser.parse_args(argv), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
