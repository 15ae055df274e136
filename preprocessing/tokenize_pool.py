"""Pool of tokenising processes: chunks of a corpus to token ids, in the order of the input."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import compress
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

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
            lengths, words, validation = lengths[some], words[some], validation[some]
            fields = list(compress(fields, some))
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
    others = set(active_children())
    # Forking a process with threads (tokenizers, tqdm) may lock up.
    with _deaf_children():
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (settings,))
    given: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            with _deaf_children():
                given.append(pool.submit(_encode_here, chunk))
            if len(given) == 3 * workers:
                yield given.popleft().result()
        while given:
            yield given.popleft().result()
    except BrokenProcessPool:
        raise CommandError(
            "a worker process was killed, mostly for a lack of memory; run the same again to continue, with fewer "
            "--workers if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.kill()
            process.join()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that begin meanwhile do so deaf to what reaches the whole group: this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_encoder: ChunkEncoder | None = None  # of a worker


def _start_worker(settings: EncoderSettings) -> None:
    global _encoder
    for number in _OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_GROUP)
    Thread(target=_end_with_parent, daemon=True).start()
    _encoder = ChunkEncoder(settings)


def _end_with_parent() -> None:
    """Else a worker would wait for ever where its parent was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_here(chunk: Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
