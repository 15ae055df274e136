"""Command line of the preprocessing scripts: flags they have in common, and one sentence for whatever goes wrong."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from data.atomic_io import write_atomically
from data.cli import Parser
from data.shards import ShardError
from data.special_tokens import FLAG_HELP, tokenizer_file

DEFAULT_SHARD_SIZE = 100_000_000


class CommandError(ValueError):
    """Something that the user can correct; the message is one sentence that names the flag or file and the remedy."""


class CorpusError(CommandError):
    """Input text that cannot be found or read; the message names file and line."""


class Terminated(KeyboardInterrupt):
    """A signal arrived."""


def run(
    command: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    interrupted: str,
    signals: Sequence[int] = (signal.SIGTERM,),
) -> int:
    """Runs a script's command and returns its exit code: 2 with one sentence for what the user can correct, 130 or 143
    with the sentence `interrupted` after Ctrl-C or one of the signals."""
    previous = [(number, signal.signal(number, _terminate)) for number in signals]
    try:
        return command(arguments)
    except (CommandError, ShardError, OSError, MemoryError) as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nstopped: {interrupted}", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise Terminated


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; no unfinished file has a final name, so correct this and run the same again"
    return str(error) or type(error).__name__


def check_file(flag: str, path: Path) -> None:
    """Refuses a file that could not be written in the end."""
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"{flag} {path} cannot be written; give a file in a folder that exists")


def write_file(path: Path, content: bytes, overwrite: bool, what: str) -> None:
    """Writes --output, and says so, unless it is as it would be. what: another content than this, for the refusal."""
    if path.exists() and path.read_bytes() == content:
        print(f"{path} is unchanged")
    elif path.exists() and not overwrite:
        raise CommandError(f"--output {path} holds {what}; give another name or add --overwrite")
    else:
        write_atomically(path, content)
        print(f"wrote {path}")


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1, such as 100000 or 100,000."""
    try:
        value = int(text.replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def fraction(text: str) -> float:
    """An argparse type: a number from 0 up to, but not, 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, not {value}")
    return value


def field_names(text: str) -> tuple[str, ...]:
    """An argparse type: names with commas between them."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of different names such as id,url,meta.language")
    return names


def _separator(text: str) -> str | None:
    """An argparse type: Layout.separator."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give blank_line, file or a text")
    return None if text == "blank_line" else text.replace(r"\n", "\n").replace(r"\t", "\t")


def add_shard_flags(parser: Parser, tokenizer: str) -> None:
    """The flags of all scripts that write a folder of shards. tokenizer: the help of --tokenizer_path."""
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="shard folder to write")
    parser.add_argument(
        "--tokenizer_path", required=True, type=tokenizer_file, metavar="FILE",
        help=f"{tokenizer}, or a Hugging Face folder that holds one",
    )  # fmt: skip
    parser.add_argument("--special_tokens", default="", metavar="ROLE=TOKEN,...", help=FLAG_HELP)
    parser.add_argument(
        "--validation_fraction", type=fraction, default=0.0, metavar="X",
        help="fraction of documents (0 up to 1), chosen by the hash of their text, that go to FOLDER/validation, "
        "the others to FOLDER/train; 0 writes everything to FOLDER itself",
    )  # fmt: skip
    parser.add_argument(
        "--shard_size", type=positive_int, default=DEFAULT_SHARD_SIZE, metavar="TOKENS",
        help="tokens after which a shard file ends with its document",
    )  # fmt: skip
    add_overwrite_flag(parser, "what the output folder holds")


def add_overwrite_flag(parser: Parser, what: str) -> None:
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_input_flags(parser: Parser) -> None:
    """The flags that say what text to read, the same for all scripts that read text."""
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH",
        help="files, folders (searched to the bottom, links included) or globs in quotes, here or on a server (hf://, "
        "s3://, gs://, https://): .txt (a blank line between documents), .jsonl, .ndjson or .json.gz (a JSON string or "
        "object a line), each also as .gz, .bz2, .xz or .zst, .parquet and .arrow; named as files or by a glob, "
        ".train, .dev and .test are read as .txt, .json as .jsonl. dataset://NAME?config=...&split=...&revision=...: a "
        "Hugging Face dataset by name or folder, streamed (the split train unless given)",
    )  # fmt: skip
    parser.add_argument(
        "--other_files", choices=("text", "jsonl"),
        help="read files with another suffix or none, such as WikiExtractor's wiki_00, as .txt or as .jsonl (default: "
        "in folders they are named and not read)",
    )  # fmt: skip
    parser.add_argument(
        "--text_field", default="text", metavar="NAME",
        help="field (.jsonl) or column (.parquet, .arrow) that holds the text; a.b.c reaches into nested ones, and of "
        "a list of texts each is a line",
    )  # fmt: skip
    parser.add_argument(
        "--document_separator", type=_separator, metavar="blank_line|file|TEXT",
        help=r"what ends a document of text files: a blank line, the end of the file alone, or any text such as "
        r"'<|endoftext|>' or '\n---\n' (\n: line break, \t: tab) (default: blank_line)",
    )  # fmt: skip
    parser.add_argument(
        "--skip_bad_lines", action="store_true",
        help="count malformed lines and continue, instead of stopping at the first",
    )  # fmt: skip
