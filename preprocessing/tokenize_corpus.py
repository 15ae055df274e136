"""Tokenisation, text to token shards: parallel, in bounded memory, and continued where it stopped when run again.

    python preprocessing/tokenize_corpus.py --input corpus/ --output shards/ --tokenizer_path tokenizer.json

The main process reads, cuts the input into chunks of about 1 MiB at document boundaries, and writes; workers parse and
encode. Documents come out in the order of the input, so the files are the same for any number of workers. What a
document becomes follows from its text alone, and where a shard ends from the tokens before it, so they are also the
same after any interruption (resumable_output.py). Documents get no special tokens; "</s>" inside a text is encoded as
text.

With --part I --parts N it does part I of N of the files, and the process that completes the last part merges them;
slurm/preprocess.sbatch does that as a job array. The result is again the same.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tqdm import tqdm

from data.cli import Parser
from data.wording import count
from preprocessing.cli import (
    DEFAULT_SHARD_SIZE,
    CommandError,
    add_input_flags,
    add_shard_flags,
    field_names,
    positive_int,
    run,
)
from preprocessing.fields import ASSISTANT
from preprocessing.inputs import CorpusError, InputFile, files_of_part, find_inputs
from preprocessing.readers import Position, layout_of, read_chunks
from preprocessing.resumable_output import FolderPlan, OutputFolder, Totals, complete_line, number_of_parts
from preprocessing.slices import EncodedChunk, SliceWriter
from preprocessing.tokenize_pool import EncoderSettings, encode_in_order


@dataclass(frozen=True)
class Summary:
    """What a finished folder holds, and how fast this run was (which may have continued another)."""

    totals: Totals
    seconds: float
    bytes_per_second: float


def tokenize_files(
    files: Sequence[InputFile],
    output: Path,
    settings: EncoderSettings,
    *,
    part: int = 0,
    parts: int = 1,
    workers: int = 1,
    shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    journal_seconds: float = 10.0,
    progress: bool = False,
) -> Summary | str:
    """Tokenises part `part` of `parts` of the files, continuing unfinished work, and makes the shards if all parts are
    complete then. Returns the totals of the shards, or one line on what was found or done instead.

    shard_size: tokens after which a shard ends with its document. journal_seconds: how much work a crash may cost.
    Raises CorpusError or ShardError for bad input, CommandError if the folder holds something else, if the parts do not
    agree, or if another process makes this one."""
    folder = OutputFolder(_plan(files, output, settings, shard_size), parts)
    mine, started = files_of_part(files, part, parts), time.monotonic()
    with _naming(output):
        with folder.making(part, journal_seconds, overwrite) as slices:
            if slices is None:
                return complete_line(output)
            bytes_before = slices.progress.counts.get("text_bytes", 0)
            if not slices.progress.complete:
                _encode(slices, mine, settings, workers if mine else 1, progress)
            encoded = slices.progress.counts.get("text_bytes", 0) - bytes_before
        complete = folder.record(part)
        made = f"part {part} ({len(mine)} of {count(len(files), 'file')})"
        line = f"{made} is complete, as are {complete} of {parts} parts"
        if complete < parts:
            return f"{line}; whoever completes the last merges them"
        if parts > 1 and not folder.can_lock:  # another process may see the same, and two would spoil each other's work
            return f"{line}; the file system of {output} has no locks, so run the same with --merge instead of --part"
        return _merge(folder, started, encoded)


def merge_parts(
    files: Sequence[InputFile],
    output: Path,
    settings: EncoderSettings,
    parts: int | None = None,
    *,
    shard_size: int = DEFAULT_SHARD_SIZE,
) -> Summary | str:
    """Only the shards, of parts that are complete. parts: None for as many as were begun."""
    folder = OutputFolder(_plan(files, output, settings, shard_size), parts or number_of_parts(output) or 1)
    with _naming(output):
        return _merge(folder, time.monotonic(), 0)


def _merge(folder: OutputFolder, started: float, encoded: int) -> Summary | str:
    totals = folder.assemble()
    if totals is None:
        return complete_line(folder.plan.folder)
    if not any(totals.shards.values()):
        files = count(len(folder.plan.files), "file")
        raise CorpusError(f"--input holds no text in {files}; check --input and --text_field")
    seconds = time.monotonic() - started
    return Summary(totals, seconds, encoded / max(seconds, 1e-9))


def _encode(
    slices: SliceWriter, files: Sequence[InputFile], settings: EncoderSettings, workers: int, progress: bool
) -> None:
    """Tokenises files, from where their slices end."""
    start = Position(**slices.progress.position)
    before = [0, *accumulate(file.size for file in files)]  # bytes before each file
    scale = {"total": before[-1], "initial": before[start.file], "unit": "B", "unit_scale": True}
    encoded_chunks = encode_in_order(read_chunks(files, settings.layout, start), settings, workers)
    with closing(encoded_chunks), tqdm(**scale, desc="tokenizing", disable=not progress) as bar:

        def shown() -> Iterator[EncodedChunk]:
            for chunk in encoded_chunks:
                yield chunk
                bar.update(before[chunk.position["file"]] + chunk.progress - bar.n)

        slices.write(shown())


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """A full disk: say where."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error


def _plan(files: Sequence[InputFile], output: Path, settings: EncoderSettings, shard_size: int) -> FolderPlan:
    layout = settings.layout
    given = {
        "script": "preprocessing/tokenize_corpus.py",
        "text_field": layout.text_field,
        "document_separator": layout.separator,
        "keep_fields": list(layout.keep_fields) or None,
        "targets": None if layout.targets == "all" else layout.targets,
        "other_files": settings.other_files,
        "validation_fraction": settings.validation_fraction,
    }
    made_with = (settings.tokenizer_path, settings.special_tokens, shard_size)
    return FolderPlan(output, files, *made_with, given, settings.skip_bad_lines)


def print_summary(summary: Summary) -> None:
    """The lines that end a run."""
    print("\n".join(summary.totals.lines()))
    for empty in (name for name, shards in summary.totals.shards.items() if not shards):
        print(f"warning: no document fell into {empty}; raise --validation_fraction", file=sys.stderr)
    counts = summary.totals.counts
    empty, bad = count(counts["empty_documents"], "empty document"), count(counts["bad_lines"], "malformed line")
    print(f"dropped: {empty}, {bad}")
    if counts["special_tokens"]:
        print(f"note: the tokenizer produced {count(counts['special_tokens'], 'special id')} such as <unk>")
    for key, number in counts.items():
        if number and key.startswith("without_"):
            print(f"note: {count(number, 'document')} without {key.removeprefix('without_')} (--keep_fields)")
    print(f"{summary.seconds:.1f} seconds, {summary.bytes_per_second / 1e6:.1f} MB of text per second")


def _check_parts(arguments: argparse.Namespace) -> None:
    part, parts, output = arguments.part, arguments.parts or 1, arguments.output
    in_parts = arguments.merge or parts > 1
    if arguments.merge and part is not None:
        raise CommandError(f"--merge makes no part, so --part {part} has no meaning; leave one of them out")
    if arguments.overwrite and in_parts:
        what = "--merge" if arguments.merge else f"--parts {parts}"
        raise CommandError(
            f"--overwrite with {what} would remove what other processes have made; remove {output} by hand instead"
        )
    if part is None and parts > 1 and not arguments.merge:
        raise CommandError(f"--parts {parts} needs --part, 0 to {parts - 1}: the part of this process; add it")
    if part is not None and not 0 <= part < parts:
        remedy = "count parts from 0" if arguments.parts else "say how many there are with --parts N"
        raise CommandError(f"--part {part} lies outside 0..{parts - 1}, the parts of --parts {parts}; {remedy}")


def command(arguments: argparse.Namespace) -> int:
    _check_parts(arguments)
    files = find_inputs(arguments.input, arguments.other_files)
    settings = EncoderSettings(
        arguments.tokenizer_path,
        layout_of(arguments),
        arguments.skip_bad_lines,
        arguments.validation_fraction,
        arguments.other_files,
        arguments.special_tokens,
    )
    if arguments.merge:
        result = merge_parts(files, arguments.output, settings, arguments.parts, shard_size=arguments.shard_size)
    else:
        result = tokenize_files(
            files,
            arguments.output,
            settings,
            part=arguments.part or 0,
            parts=arguments.parts or 1,
            workers=arguments.workers,
            shard_size=arguments.shard_size,
            overwrite=arguments.overwrite,
            journal_seconds=arguments.journal_seconds,
            progress=sys.stderr.isatty(),
        )
    print_summary(result) if isinstance(result, Summary) else print(result)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Tokenise text into shards; run again after an interruption, it continues.")
    add_input_flags(parser)
    add_shard_flags(parser, "tokenizer.json, see train_tokenizer.py")
    parser.add_argument(
        "--keep_fields", type=field_names, default=(), metavar="NAME,...",
        help="fields or columns, such as id,url,meta.language, to write beside each shard as shard_00000.fields.jsonl, "
        "a line a document; inspect_shards.py shows them",
    )  # fmt: skip
    parser.add_argument(
        "--targets", choices=("all", ASSISTANT), default="all",
        help="of conversations (--text_field names a list of messages with role and content): which tokens causal rows "
        "learn to predict; masked rows mask everywhere",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=positive_int, default=1, metavar="N",
        help="processes that encode (some 90 MB each); the result is the same for any number",
    )  # fmt: skip
    parser.add_argument(
        "--part", type=int, metavar="I",
        help="do only this one, counted from 0, of --parts parts of the files; the process that completes the last one "
        "merges all of them into the folder that one process would have made (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=positive_int, metavar="N",
        help="parts of whole files, about equal in bytes, for as many processes; the same for all of them (default: "
        "1; with --merge: as many as were begun)",
    )  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="only merge parts that are complete already")
    parser.add_argument(
        "--journal_seconds", type=float, default=10.0, metavar="SECONDS",
        help="time between saves of progress, so what an interruption may cost",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    signals = (signal.SIGTERM, signal.SIGUSR1)  # SLURM's warning before a time limit, where a job asks for it
    unfinished = f"{arguments.output} is unfinished; the same command continues where it stopped"
    return run(command, arguments, unfinished, signals)


if __name__ == "__main__":
    sys.exit(main())
