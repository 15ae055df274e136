"""Pool of tokenising processes: chunks of a corpus to token ids, in the order of the input."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from itertools import compress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from data.shards import token_dtype
from preprocessing.cli import CommandError
from preprocessing.fields import ASSISTANT, Conversation
from preprocessing.parsing import parse_chunk
from preprocessing.readers import Chunk, Layout
from preprocessing.slices import EncodedChunk
from preprocessing.tokenizer import DocumentEncoder, load_tokenizer, special_ids, vocabulary_size

_HASHED_CHARACTERS = 1 << 16  # a cut document's first piece is longer, so all formats hash the same


@dataclass(frozen=True)
class EncoderSettings:
    """Everything that decides what ids a chunk becomes and which of its documents are validation."""

    tokenizer_path: Path
    layout: Layout = field(default_factory=Layout)
    skip_bad_lines: bool = False
    validation_fraction: float = 0.0
    other_files: str | None = None  # what files with an unknown suffix are read as
    special_tokens: str = ""  # roles, as --special_tokens has them; for the manifest alone


class ChunkEncoder:
    """Encodes chunks on the calling core."""

    def __init__(self, settings: EncoderSettings) -> None:
        tokenizer = load_tokenizer(settings.tokenizer_path)
        self._settings = settings
        self._encoder = DocumentEncoder(tokenizer)
        self._dtype = token_dtype(vocabulary_size(tokenizer))
        self._is_special = np.zeros(vocabulary_size(tokenizer), bool)
        self._is_special[special_ids(tokenizer)] = True

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Raises CorpusError for a malformed line, unless bad lines are to be skipped."""
        layout = self._settings.layout
        found = parse_chunk(chunk, layout, self._settings.skip_bad_lines)
        is_piece = not (chunk.opens and chunk.closes)
        kept = [is_piece or (text != "" and not text.isspace()) for text in found.texts]
        texts, fields = list(compress(found.texts, kept)), list(compress(found.fields, kept))
        tokens, lengths, marks = self._encode(texts)
        words = np.array([len(text.split()) for text in texts], np.int64)
        validation = np.array([is_validation(text, self._settings.validation_fraction) for text in texts], bool)
        if not is_piece and not lengths.all():  # a foreign tokenizer may know no token for a text
            some = lengths > 0
            lengths, words, validation, fields = (
                lengths[some],
                words[some],
                validation[some],
                list(compress(fields, some)),
            )
        parsed = [json.loads(line) for line in fields] if chunk.closes else []
        without = {f"without_{name}": sum(each[name] is None for each in parsed) for name in layout.keep_fields}
        return EncodedChunk(
            tokens=tokens.astype(self._dtype),
            lengths=lengths,
            words=words,
            validation=validation,
            position=asdict(chunk.end),
            counts={
                "empty_documents": 0 if is_piece else len(found.texts) - len(lengths),
                "bad_lines": found.bad,
                "special_tokens": int(self._is_special[tokens].sum()),
                "text_bytes": chunk.num_bytes,
                **without,
            },
            fields=fields,
            marks=marks,
            opens=chunk.opens,
            closes=chunk.closes,
            progress=chunk.progress,
        )

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids of all texts, how many each has, and their marks (none: all are targets). The segments of a
        conversation are encoded one by one, so that no token belongs to two."""
        only_assistant = self._settings.layout.targets == ASSISTANT
        if not any(isinstance(text, Conversation) for text in texts):
            tokens, lengths = self._encoder.encode(texts)
            return tokens, lengths, np.ones(len(tokens) if only_assistant else 0, bool)
        parts = [text.segments if isinstance(text, Conversation) else ((text, True),) for text in texts]
        flat = [segment for part in parts for segment in part]
        tokens, lengths = self._encoder.encode([text for text, _ in flat])
        ends = np.cumsum([len(part) for part in parts])
        totals = np.concatenate([[0], np.cumsum(lengths)])
        marks = np.repeat([is_target for _, is_target in flat], lengths if only_assistant else 0)
        return tokens, np.diff(totals[np.concatenate([[0], ends])]), marks.astype(bool)


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by the hash of its first 65,536 characters, so that equal
    documents stay together and a document stays where it is when others come or go."""
    if fraction == 0:
        return False
    digest = hashlib.blake2b(text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def encode_in_order(
    chunks: Iterator[Chunk], settings: EncoderSettings, workers: int
) -> Generator[EncodedChunk, None, None]:
    """Encodes on `workers` processes (1: this one) and yields in the order of `chunks`, holding a bounded number.

    Raises CorpusError for a malformed line, after everything before it was yielded."""
    if workers == 1:
        yield from map(ChunkEncoder(settings), chunks)
        return
    pool = [_Worker(settings) for _ in range(workers)]
    try:
        yield from _through_pool(chunks, pool)
    finally:
        for worker in pool:
            worker.connection.close()  # an idle worker ends by itself
        deadline = time.monotonic() + 0.5
        for worker in pool:
            worker.process.join(timeout=max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()


def _through_pool(chunks: Iterator[Chunk], pool: list[_Worker]) -> Iterator[EncodedChunk]:
    idle, busy = list(pool), {}  # busy: connection -> worker
    finished: dict[int, EncodedChunk | CommandError] = {}
    window = 3 * len(pool)  # chunks that are out or wait for an earlier one
    sent = received = 0
    ended = False
    while True:
        while idle and not ended and sent - received < window:
            chunk = next(chunks, None)
            ended = chunk is None
            if chunk is not None:
                worker = idle.pop()
                worker.give(sent, chunk)
                busy[worker.connection] = worker
                sent += 1
        if received in finished:  # hand out after all workers have something to do
            result = finished.pop(received)
            if isinstance(result, CommandError):
                raise result
            received += 1
            yield result
        elif busy:
            for ready in connection.wait(list(busy)):
                worker = busy.pop(ready)  # type: ignore[arg-type]
                finished[worker.number] = worker.take()
                idle.append(worker)
        else:
            return


class _Worker:
    """A process with a pipe of its own. It ends when the pipe closes, also because this process was killed; shared
    queues, as in multiprocessing.Pool, would keep it alive."""

    def __init__(self, settings: EncoderSettings) -> None:
        context = get_context("spawn")  # forking a process with threads (tokenizers, tqdm) may lock up
        self.connection, other_end = context.Pipe()
        self.number = -1
        # The worker starts deaf to Ctrl-C and SIGTERM, which reach the whole group: this process ends the workers.
        signals = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self.process: BaseProcess = context.Process(target=_work, args=(other_end, settings), daemon=True)
            self.process.start()
        finally:
            other_end.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def give(self, number: int, chunk: Chunk) -> None:
        self.number = number
        try:
            self.connection.send(chunk)
        except OSError:
            raise self._died() from None

    def take(self) -> EncodedChunk | CommandError:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> CommandError:
        self.process.join(timeout=5)
        return CommandError(
            f"a worker process ended with exit code {self.process.exitcode} (-9 is mostly a lack of memory); run the "
            "same again to continue, with fewer --workers if memory is short"
        )


def _work(pipe: connection.Connection, settings: EncoderSettings) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    encode = ChunkEncoder(settings)
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, ConnectionResetError):  # reset: closed with a result that nobody took
            return
        try:
            result: EncodedChunk | CommandError = encode(chunk)
        except CommandError as error:
            result = error
        try:
            pipe.send(result)
        except OSError:  # nobody listens any more
            return
