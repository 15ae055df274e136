"""Token shards: tokenised documents in self-describing, memory-mapped files.

Layout of NAME.shard, little-endian throughout:

    bytes 0-255     header: magic, format version, dtype, number of documents, of tokens, vocabulary size, hash of the
                    tokenizer, CRC-32 of all that; padded with zeros
    then            tokens, uint16 where the vocabulary has at most 65,536 ids, else uint32; zeros up to a multiple of 8
    then            document offsets, uint64 [documents + 1]: document d is tokens[offsets[d]:offsets[d + 1]]
    version 2 only  marks, a bit for each token from the lowest of the first byte on: 1 where it is scored under
                    objectives whose every token is a target (of conversations, what an assistant says)

Documents are stored without special tokens: `<s>` and `</s>` are the loader's business. `manifest.json` beside the
shards lists them in order, with sizes and SHA-256, and says how they were made; a folder without it is unfinished.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.atomic_io import PARTIAL_SUFFIX, sha256_file, sync_folder, write_atomically

SHARD_SUFFIX = ".shard"
MANIFEST_NAME = "manifest.json"
JOURNAL_NAME = "journal.json"  # only while work is under way: beside the shards, or above train/ and validation/
MANIFEST_FORMAT = "token-shards"
FORMAT_VERSION = 1
MARKED_VERSION = 2  # of a shard with marks

_MAGIC = b"TOKSHARD"
_HEADER_BYTES = 256
_FIELDS = struct.Struct("<8sI8sQQQ32s")  # magic, version, dtype, documents, tokens, vocabulary size, tokenizer hash
_CHECKSUM = struct.Struct("<I")
_DTYPES = {b"uint16": np.dtype("<u2"), b"uint32": np.dtype("<u4")}
_BLOCK_BYTES = 1 << 20
_HASHED_WHOLE, _STRETCHES, _STRETCH = 1 << 20, 16, 4096  # bytes, how many, bytes: what is hashed of loose shards


class ShardError(ValueError):
    """A shard, a shard folder or a tokenizer file that cannot be used; the message is one sentence for the user."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The stored type of token ids: little-endian uint16 up to 65,536 ids, else uint32."""
    if not 0 < vocab_size <= 1 << 32:
        raise ShardError(f"a vocabulary of {vocab_size} ids cannot be stored; shards hold 1 to 4,294,967,296 ids")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokenizer_hash(path: str | Path) -> str:
    """SHA-256 (64 hex digits) of what the tokenizer file means.

    Layout of the JSON, the order of its keys and the two spellings of merges ("a b", ["a", "b"]) do not count, nor do
    truncation and padding, which nothing here applies; everything else does. Raises ShardError if it is unreadable."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid JSON"
        raise ShardError(f"cannot read the tokenizer {path} ({reason}); give a tokenizer.json") from None
    if not isinstance(content, dict) or "model" not in content:
        raise ShardError(f"{path} is not a tokenizer: its JSON has no 'model'; give a tokenizer.json")
    meaning = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    merges = meaning["model"].get("merges") if isinstance(meaning["model"], dict) else None
    if merges:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        meaning["model"] = {**meaning["model"], "merges": pairs}
    canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class Shard:
    """One opened shard. The file is mapped when `tokens` or `offsets` is first used, and read page by page."""

    path: Path
    num_documents: int
    num_tokens: int
    dtype: np.dtype
    tokenizer_hash: str
    vocab_size: int
    sha256: str | None = None  # as the manifest beside it says; None for a loose shard
    scattered: bool = False  # tokens are read at random: no readahead of what lies around them
    words: int = 0  # as the manifest says; 0 where it is not known
    has_marks: bool = False
    remote: Any = None  # a data.remote_shards.RemoteFile: where to fetch the file from, if it is not there

    def fetch(self) -> None:
        """Have the file of a remote shard at `path`. Raises ShardError."""
        if self.remote is not None:
            self.remote.fetch(self.path)

    @cached_property
    def content_hash(self) -> str:
        """A hash of this shard's content: the manifest's SHA-256.

        Of a loose shard the hash of the file: all of a small one; of others the header and stretches all through
        the tokens and the document offsets, so that opening a large corpus stays cheap."""
        if self.sha256 is not None:
            return self.sha256
        digest = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            size, offsets = os.fstat(file.fileno()).st_size, _offsets_start(self.num_tokens, self.dtype)
            if size <= _HASHED_WHOLE:
                digest.update(file.read())
            else:
                for begin, end in ((0, offsets), (offsets, size)):
                    for offset in np.linspace(begin, max(begin, end - _STRETCH), _STRETCHES).astype(int):
                        digest.update(os.pread(file.fileno(), _STRETCH, offset))
        return digest.hexdigest()

    @cached_property
    def _map(self) -> mmap.mmap:
        self.fetch()
        try:
            with open(self.path, "rb") as file:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise ShardError(f"{self.path} cannot be opened, too many files are open; raise `ulimit -n`") from error
        if len(found) < size_without_marks(self.num_tokens, self.num_documents, self.dtype):
            raise ShardError(f"{self.path} is truncated: it has {len(found):,} bytes; {REMAKE}")
        if self.scattered and self._token_pages:
            found.madvise(mmap.MADV_RANDOM, 0, self._token_pages)
        return found

    @cached_property
    def _token_pages(self) -> int:
        """Bytes of the pages that hold tokens alone, which are the first ones."""
        return _offsets_start(self.num_tokens, self.dtype) // mmap.PAGESIZE * mmap.PAGESIZE

    def check_size(self) -> None:
        """To be called before a read: one beyond the end of a file that has shrunk would end the process (SIGBUS)."""
        size, needed = self._map.size(), len(self._map)
        if size < needed:
            raise ShardError(f"{self.path} has shrunk from {needed:,} to {size:,} bytes while it was in use; {REMAKE}")

    def prefetch(self, token: int, count: int) -> None:
        """Have the pages of `count` tokens from `token` on read without waiting for them."""
        self._map.madvise(mmap.MADV_WILLNEED, *self.bytes_of(token, count))

    def bytes_of(self, token: int, count: int) -> tuple[int, int]:
        """First byte of the page that holds a token, and bytes from there to the end of `count` tokens."""
        first = (_HEADER_BYTES + token * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        return first, _HEADER_BYTES + (token + count) * self.dtype.itemsize - first

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, [num_tokens], uint16 or uint32, read only."""
        return np.frombuffer(self._map, self.dtype, self.num_tokens, _HEADER_BYTES)

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each document, uint64 [num_documents + 1], read only; the last entry is num_tokens."""
        return np.frombuffer(self._map, "<u8", self.num_documents + 1, _offsets_start(self.num_tokens, self.dtype))

    def scored(self, tokens: np.ndarray) -> np.ndarray:
        """Whether tokens, by their numbers (int64 [n]), are scored where every token is a target; bool [n]."""
        if not self.has_marks:
            return np.ones(len(tokens), bool)
        start = _offsets_start(self.num_tokens, self.dtype) + 8 * (self.num_documents + 1)
        marks = np.frombuffer(self._map, np.uint8, -(-self.num_tokens // 8), start)
        return (marks[tokens >> 3] >> (tokens & 7).astype(np.uint8)) & 1 > 0

    def read_offsets(self, out: np.ndarray) -> None:
        """Read the first token of each document into `out`, int64 [num_documents], without mapping the file."""
        self.fetch()
        with open(self.path, "rb") as file:
            file.seek(_offsets_start(self.num_tokens, self.dtype))
            if file.readinto(out.view(np.uint8).data) != out.nbytes:
                raise ShardError(f"{self.path} ends before its document offsets; {REMAKE}")

    def close(self) -> None:
        """Let go of the file, which is mapped again when it is used."""
        for name in ("_map", "tokens", "offsets"):
            self.__dict__.pop(name, None)

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, without special tokens; a view into the map."""
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def drop_cache(self) -> None:
        """Give the tokens' pages back, so that resident memory does not grow with what was read; later reads work on.
        The offsets stay: 8 bytes a document, and every read needs some of them."""
        if "_map" in self.__dict__ and self._token_pages:
            self._map.madvise(mmap.MADV_DONTNEED, 0, self._token_pages)

    def __getstate__(self) -> dict[str, Any]:
        """Without the map: another process opens its own."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def open_shard(
    path: str | Path,
    expected_tokenizer_hash: str | None = None,
    sha256: str | None = None,
    *,
    scattered: bool = False,
    words: int = 0,
) -> Shard:
    """Opens a shard after checking magic, version, header checksum, dtype, exact file size, first and last offset and,
    where given, the tokenizer's hash. Costs three small reads. Raises ShardError in one sentence.

    sha256, scattered, words: as in Shard; the sum is not checked."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size, header = os.fstat(file.fileno()).st_size, file.read(_HEADER_BYTES)
            shard = replace(_parse_header(path, header, size), sha256=sha256, scattered=scattered, words=words)
            start = _offsets_start(shard.num_tokens, shard.dtype)
            ends = [os.pread(file.fileno(), 8, start + 8 * number) for number in (0, shard.num_documents)]
    except OSError as error:
        raise ShardError(f"cannot open the shard {path} ({error.strerror}); check the path") from None
    if [int.from_bytes(each, "little") for each in ends] != [0, shard.num_tokens]:
        raise ShardError(f"{path} is damaged: its document offsets do not span its tokens; {REMAKE}")
    if expected_tokenizer_hash is not None and shard.tokenizer_hash != expected_tokenizer_hash:
        raise ShardError(
            f"{path} was made with another tokenizer (hash {shard.tokenizer_hash[:12]}..., not "
            f"{expected_tokenizer_hash[:12]}...); give the tokenizer.json that lies beside the shard, or tokenize again"
        )
    return shard


REMAKE = "copy it again or make it again with preprocessing/tokenize_corpus.py"


def _parse_header(path: Path, header: bytes, size: int) -> Shard:
    if header[: len(_MAGIC)] != _MAGIC:
        raise ShardError(f"{path} is not a token shard; make shards with preprocessing/tokenize_corpus.py")
    if len(header) < _HEADER_BYTES:
        raise ShardError(f"{path} is truncated: it ends inside its header, after {size:,} bytes; {REMAKE}")
    _, version, dtype_name, documents, tokens, vocab_size, digest = _FIELDS.unpack_from(header)
    if version not in (FORMAT_VERSION, MARKED_VERSION):
        raise ShardError(f"{path} has format version {version}, this program reads 1 and 2; tokenize again")
    (checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    if checksum != zlib.crc32(header[: _FIELDS.size]):
        raise ShardError(f"{path} is damaged: its header does not match its checksum; {REMAKE}")
    dtype = _DTYPES.get(dtype_name.rstrip(b"\0"))
    if dtype is None or dtype != token_dtype(vocab_size):
        raise ShardError(f"{path} stores {vocab_size:,} ids as {dtype_name!r}, which cannot be read; {REMAKE}")
    has_marks = version == MARKED_VERSION
    expected = size_without_marks(tokens, documents, dtype) + has_marks * -(-tokens // 8)
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ShardError(f"{path} is {kind}: it has {size:,} bytes where its header asks for {expected:,}; {REMAKE}")
    return Shard(path, documents, tokens, dtype, digest.hex(), vocab_size, has_marks=has_marks)


def _offsets_start(num_tokens: int, dtype: np.dtype) -> int:
    end_of_tokens = _HEADER_BYTES + num_tokens * dtype.itemsize
    return -(-end_of_tokens // 8) * 8


def size_without_marks(num_tokens: int, num_documents: int, dtype: np.dtype) -> int:
    return _offsets_start(num_tokens, dtype) + 8 * (num_documents + 1)


@dataclass(frozen=True)
class ShardFile:
    """What the manifest says about one finished shard; `words` is 0 where the writer was not told."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    words: int = 0


class ShardWriter:
    """Writes one shard piece by piece, in memory independent of its size.

    Tokens go to PATH.partial and the ends of documents, and marks, to files without a name; `finish` appends these,
    writes the header and renames. marked: whether tokens come with marks."""

    def __init__(self, path: str | Path, tokenizer_hash: str, vocab_size: int, marked: bool = False) -> None:
        self.path = Path(path)
        self.num_documents = self.num_tokens = 0
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._digest = bytes.fromhex(tokenizer_hash)
        if len(self._digest) != 32:
            raise ShardError(f"'{tokenizer_hash}' is not a tokenizer hash; use data.shards.tokenizer_hash(path)")
        self._partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self._tokens_file = open(self._partial, "wb", buffering=_BLOCK_BYTES)  # noqa: SIM115 - finish or discard closes it
        self._offsets_file = self._nameless()
        self._marks_file = self._nameless() if marked else None  # a byte a token
        self._tokens_file.write(bytes(_HEADER_BYTES))

    def _nameless(self) -> IO[bytes]:
        """A file beside the shard that goes with its last descriptor."""
        return tempfile.TemporaryFile(dir=self.path.parent, buffering=_BLOCK_BYTES)

    def append(self, tokens: np.ndarray, ends: Sequence[int] | np.ndarray, marks: np.ndarray | None = None) -> None:
        """Adds token ids [N]. ends: where in them documents end, ascending; what lies behind the last end is the
        beginning of a document that goes on with the next tokens. marks: bool [N], of a shard that has them."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            found = f"{tokens.dtype} of shape {tokens.shape}"
            raise ShardError(f"{self.path}: token ids must be a 1-D array of integers, not {found}")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            wrong = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            raise ShardError(f"{self.path}: token id {wrong} lies outside the vocabulary of {self._vocab_size} ids")
        if len(ends) and int(ends[-1]) > tokens.size:
            raise ShardError(f"{self.path}: a document ends behind the {tokens.size} tokens given")
        self._tokens_file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._offsets_file.write((self.num_tokens + np.asarray(ends, "<u8")).tobytes())
        if self._marks_file is not None:
            assert marks is not None
            assert len(marks) == tokens.size
            self._marks_file.write(marks.astype(np.uint8).tobytes())
        self.num_documents += len(ends)
        self.num_tokens += tokens.size

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._close()
        self._partial.unlink(missing_ok=True)

    def finish(self, words: int = 0) -> ShardFile:
        """Completes the file under its final name, durably, and describes it."""
        try:
            self._offsets_file.seek(0)
            padding = _offsets_start(self.num_tokens, self._dtype) - self._tokens_file.tell()
            self._tokens_file.write(bytes(padding + 8))  # the first offset is 0
            shutil.copyfileobj(self._offsets_file, self._tokens_file, _BLOCK_BYTES)
            if self._marks_file is not None:
                self._marks_file.seek(0)
                while block := self._marks_file.read(_BLOCK_BYTES):  # a multiple of 8, but for the last
                    self._tokens_file.write(np.packbits(np.frombuffer(block, np.uint8), bitorder="little").tobytes())
            self._tokens_file.seek(0)
            self._tokens_file.write(self._header())
            self._tokens_file.flush()
            os.fsync(self._tokens_file.fileno())
        finally:
            self._close()
        os.replace(self._partial, self.path)
        sync_folder(self.path.parent)
        return describe_shard(self.path, words)

    def _close(self) -> None:
        for file in (self._tokens_file, self._offsets_file, self._marks_file):
            with suppress(OSError):  # a full disk, reported where it was met first
                if file is not None:
                    file.close()

    def _header(self) -> bytes:
        name = self._dtype.name.encode()
        counts = (self.num_documents, self.num_tokens, self._vocab_size)
        version = FORMAT_VERSION if self._marks_file is None else MARKED_VERSION
        content = _FIELDS.pack(_MAGIC, version, name, *counts, self._digest)
        return (content + _CHECKSUM.pack(zlib.crc32(content))).ljust(_HEADER_BYTES, b"\0")


def write_shard(
    path: str | Path, documents: Iterable[np.ndarray], tokenizer_hash: str, vocab_size: int, words: int = 0
) -> ShardFile:
    """Writes documents (1-D integer arrays, without special tokens) as one shard, in memory independent of its size.

    The file appears under `path` only when it is complete and on the disk. An id outside [0, vocab_size) raises
    ShardError; nothing is left behind then. `words` only goes into the returned description."""
    writer = ShardWriter(path, tokenizer_hash, vocab_size)
    try:
        for document in documents:
            writer.append(document, [len(document)])
        return writer.finish(words)
    except BaseException:
        writer.discard()
        raise


def describe_shard(path: str | Path, words: int = 0) -> ShardFile:
    """The manifest's entry for a finished shard; reads all of it for the checksum."""
    shard = open_shard(path)
    size = shard.path.stat().st_size
    return ShardFile(shard.path.name, size, sha256_file(path), shard.num_documents, shard.num_tokens, words)


def write_manifest(
    folder: str | Path, shards: Sequence[ShardFile], tokenizer_hash: str, vocab_size: int, created_by: dict[str, Any]
) -> None:
    """Declares a folder of shards complete. No time stamps, so that equal inputs give equal bytes."""
    totals = {f"num_{key}": sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "words")}
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": FORMAT_VERSION,
        "tokenizer_hash": tokenizer_hash,
        "vocab_size": vocab_size,
        **totals,
        "shards": [vars(shard) for shard in shards],
        "created_by": created_by,
    }
    write_atomically(Path(folder) / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a shard folder, its form checked. Raises ShardError, also where the folder is unfinished."""
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        below = [name for name in ("train", "validation") if (path.parent / name / MANIFEST_NAME).is_file()]
        hint = f"did you mean {Path(folder) / below[0]}?" if below else "finish or make it with tokenize_corpus.py"
        raise ShardError(f"{folder} is not a complete shard folder, it has no {MANIFEST_NAME}; {hint}")
    with suppress(OSError, ValueError):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if is_manifest(manifest):
            return manifest
    raise ShardError(f"{path} is damaged or of another format or version; make the folder again")


def is_manifest(manifest: Any) -> bool:
    """Whether that is a manifest of this format and version."""
    keys = ("tokenizer_hash", "vocab_size", "num_documents", "num_tokens", "num_words", "created_by")
    names = {field.name for field in fields(ShardFile)}
    try:
        known = manifest["format"] == MANIFEST_FORMAT and manifest["version"] == FORMAT_VERSION
        listed = all(names <= set(each) and Path(each["file"]).name == each["file"] for each in manifest["shards"])
        return known and listed and all(key in manifest for key in keys)
    except (KeyError, TypeError):
        return False
