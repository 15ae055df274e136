"""Demo corpus, real English without a download: the documentation inside the installed Python packages.

    python preprocessing/make_demo_corpus.py --output demo.jsonl --max_words 500000

Docstrings of the standard library come first, then those of site-packages by name, then the descriptions in package
metadata; each is one document. Source is parsed, never imported, so nothing in it runs. The same installed packages
give the same file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from itertools import chain
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tqdm import tqdm

from data.cli import Parser
from preprocessing.cli import CommandError, add_overwrite_flag, check_file, positive_int, run, write_file

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor", "vendor"}
_LARGEST_SOURCE = 1 << 20  # bytes; beyond are generated tables
_BLANK_LINES = re.compile(r"\n\s*\n")
_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.( |$))")


def docstrings(source: Path) -> Iterator[str]:
    """Docstrings of a Python file, of the module, its classes and functions, in their order, cleaned of indentation.
    Raises SyntaxError or ValueError for a file that Python cannot parse."""
    with tokenize.open(source) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like in other people's source
        tree = ast.parse(file.read())
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text:
                yield text


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements below it in order; ast.walk would visit every expression too, ten times as many."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody"):
        below = getattr(node, field, ())
        for child in below if isinstance(below, list) else ():
            yield from _statements(child)


def clean(text: str) -> str:
    """A docstring as prose: without examples from the interpreter (and what they print), without trailing spaces."""
    paragraphs = _BLANK_LINES.split(inspect.cleandoc(text))
    kept = [paragraph for paragraph in paragraphs if not _DOCTEST.match(paragraph)]
    return "\n\n".join("\n".join(line.rstrip() for line in paragraph.splitlines()) for paragraph in kept).strip()


def is_prose(text: str, min_words: int) -> bool:
    """Long enough, and words rather than tables or code: three quarters of the visible characters are letters, and the
    letters are mostly ASCII, i.e. English."""
    words = text.split()
    visible = "".join(words)
    letters = sum(map(str.isalpha, visible))
    ascii_letters = letters if text.isascii() else sum(c.isalpha() and c.isascii() for c in visible)
    return len(words) >= min_words and letters >= 0.75 * len(visible) and ascii_letters >= 0.95 * letters


def python_files(root: Path) -> Iterator[Path]:
    """Sources below `root` in a fixed order, without tests and vendored copies."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and path.stat().st_size <= _LARGEST_SOURCE:
                yield path


def descriptions(site_packages: Path) -> Iterator[str]:
    """The long descriptions in the metadata of installed packages, by name."""
    for metadata in sorted(site_packages.glob("*.dist-info/METADATA")):
        payload = BytesParser().parsebytes(metadata.read_bytes()).get_payload()
        if isinstance(payload, str):
            yield payload


@dataclass(frozen=True)
class Corpus:
    """Documents without duplicates; files that are not Python, or not of this version, are only counted."""

    documents: list[str]
    words: int
    unreadable_files: int


def collect(min_words: int, max_words: int, progress: bool = False) -> Corpus:
    """Documents of at least `min_words`, until together they have `max_words`."""
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys(Path(paths[key]) for key in ("purelib", "platlib")))
    unreadable = 0

    def texts() -> Iterator[str]:
        nonlocal unreadable
        for source in chain.from_iterable(map(python_files, (Path(paths["stdlib"]), *packages))):
            try:
                found = list(docstrings(source))
            except (SyntaxError, ValueError, RecursionError, OSError):
                unreadable += 1
            else:
                yield from found
        for root in packages:
            yield from descriptions(root)

    documents: dict[str, None] = {}  # in order, without duplicates
    words = 0
    with tqdm(total=max_words, desc="collecting", unit="word", unit_scale=True, disable=not progress) as bar:
        for text in map(clean, texts()):
            expressible = text == text.encode(errors="replace").decode()  # a docstring may hold half a surrogate pair
            if text not in documents and is_prose(text, min_words) and expressible:
                documents[text] = None
                words += len(text.split())
                bar.update(words - bar.n)
                if words >= max_words:
                    break
    return Corpus(list(documents), words, unreadable)


def command(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if output.suffix not in (".jsonl", ".txt"):
        raise CommandError(f"--output {output} must end in .jsonl or .txt")
    check_file("--output", output)
    corpus = collect(arguments.min_words, arguments.max_words, progress=sys.stderr.isatty())
    if not corpus.documents:
        raise CommandError("no documentation was found; this Python comes without the source of its standard library")
    if output.suffix == ".jsonl":
        content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in corpus.documents)
    else:
        content = "\n\n".join(_BLANK_LINES.sub("\n", text) for text in corpus.documents) + "\n"
    write_file(output, content.encode(), arguments.overwrite, "something else")
    print(f"{len(corpus.documents):,} documents, {corpus.words:,} words; {corpus.unreadable_files:,} unreadable files")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Write a corpus of real English from the documentation in installed Python packages.")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE",
        help=".jsonl (objects with text), or .txt, where a blank line inside a document becomes a line break",
    )  # fmt: skip
    parser.add_argument(
        "--max_words", type=positive_int, default=500_000, metavar="N", help="words after which to stop"
    )
    parser.add_argument("--min_words", type=positive_int, default=20, metavar="N", help="words a document must have")
    add_overwrite_flag(parser, "a different file at --output")
    return run(command, parser.parse_args(argv), "no corpus was written")


if __name__ == "__main__":
    sys.exit(main())
