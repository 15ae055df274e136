"""The corpus as endless streams of tokens.

A `Corpus` is a set of documents in shards. A `TokenStream` walks through it in a keyed pseudo-random order, a new one
each epoch, and reads any ranges of tokens in time that does not depend on where the ranges lie. Every document is
wrapped as `<s> tokens </s>` on the way.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.hashing import Permutation, fold
from data.shard_paths import find_shards
from data.shards import Shard, ShardError, open_shard

_BLOCK = 16  # documents per entry of an epoch's length index: a row that is read looks at about so many
_CHUNK = 1 << 18  # documents handled at once while an epoch's index is built
_DROP_BYTES = 64 << 20  # release mapped pages after about so many bytes were mapped
_FAULT_BYTES = 64 << 10  # that Linux maps around an access
OCCURRENCE_SHIFT = 40  # an origin is (times the document was used before) << 40 | position in the corpus


class CorpusError(ValueError):
    """The training data cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Source:
    """Consecutive documents of the corpus that are used `repeat` times per epoch.

    first_document: index of the source's first document in the corpus.
    num_documents: documents in the source.
    documents_per_epoch: round(repeat * num_documents). Where it is no multiple of num_documents, an epoch continues in
        the source where the epoch before it stopped, so that all documents are used equally often over time.
    """

    path: str
    repeat: float
    first_document: int
    num_documents: int
    documents_per_epoch: int


@dataclass(frozen=True)
class EpochIndex:
    """Where documents lie in one epoch of a stream; half a byte or so per document."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: tokens up to the end of each block of _BLOCK documents


def read_mix(path: Path) -> list[tuple[str, float]]:
    """Paths and repeats of a mix file: {"sources": [{"path": "...", "repeat": 2}, ...]}, paths relative to the file."""
    try:
        mix = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as a mix file ({error}); see README, 'Mixing sources'") from error
    sources = mix.get("sources") if isinstance(mix, dict) else None
    if not isinstance(sources, list) or not sources:
        raise CorpusError(f'{path}: a mix file is {{"sources": [{{"path": ..., "repeat": 1}}, ...]}} with one or more')
    result = []
    for number, source in enumerate(sources):
        where = f"{path}: sources[{number}]"
        if not isinstance(source, dict) or not isinstance(source.get("path"), str):
            raise CorpusError(f'{where} needs a "path" (a shard folder, a shard file or a glob)')
        unknown = sorted(set(source) - {"path", "repeat"})
        if unknown:
            raise CorpusError(f'{where} has an unknown key {unknown[0]!r}; known are "path" and "repeat"')
        repeat = source.get("repeat", 1)
        if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 < repeat <= 1000:
            raise CorpusError(f'{where}: "repeat" is {repeat!r}; it must be a number above 0 and at most 1000')
        result.append((str(path.parent / source["path"]), float(repeat)))
    return result


class Corpus:
    """Documents of one or more sources, addressed by a running number.

    path: a shard folder, a shard file, a glob of either, or a mix file ending in .json.
    tokenizer_hash: refuse shards made with another tokenizer; None accepts any.
    bos_id, eos_id: ids that open and close each document; eos_id None leaves the end unmarked (published behaviour).
    Raises CorpusError or ShardError, each a sentence naming the file.
    """

    def __init__(self, path: str | Path, *, tokenizer_hash: str | None, bos_id: int, eos_id: int | None):
        self.bos_id, self.eos_id = bos_id, eos_id
        self.specials_per_document = 1 + (eos_id is not None)
        as_path = Path(path)
        parts = read_mix(as_path) if as_path.suffix == ".json" and as_path.is_file() else [(str(path), 1.0)]
        self.shards: list[Shard] = []
        self.sources: list[Source] = []
        first = 0
        for part, repeat in parts:
            shards = [open_shard(file, tokenizer_hash, sha256) for file, sha256 in find_shards(part)]
            count = sum(shard.num_documents for shard in shards)
            if count == 0:
                raise CorpusError(f"{part}: holds no documents; check the input of preprocessing/tokenize_corpus.py")
            per_epoch = max(1, int(repeat * count + 0.5))
            self.sources.append(Source(part, repeat, first, count, per_epoch))
            self.shards += shards
            first += count
        _refuse_twice(path, self.shards)
        hashes = {shard.tokenizer_hash for shard in self.shards}
        if len(hashes) > 1:
            raise CorpusError(
                f"{path}: its shards were made with {len(hashes)} different tokenizers; tokenise them again"
            )
        self.num_documents = first
        self._shard_documents = np.cumsum(
            [0] + [shard.num_documents for shard in self.shards]
        )  # first document of each
        self._shard_tokens = np.cumsum([0] + [shard.num_tokens for shard in self.shards])  # first token of each
        self.num_tokens = int(self._shard_tokens[-1])
        self._epoch_slots = np.cumsum([0] + [source.documents_per_epoch for source in self.sources])
        self.documents_per_epoch = int(self._epoch_slots[-1])
        self._bytes_mapped = 0

    def identity(self) -> str:
        """A hash that changes when documents, their order, tokenizer, mix or document ends change; cheap."""
        facts: dict[str, object] = {"bos": self.bos_id, "eos": self.eos_id, "order": "rows shuffled within an epoch"}
        facts["sources"] = [(source.num_documents, source.repeat) for source in self.sources]
        facts["shards"] = [(shard.num_documents, shard.tokenizer_hash, shard.content_hash) for shard in self.shards]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def first_identity(self) -> str:
        """What runs recorded before the manifests' SHA-256 counted; sees only the ends of the shards."""
        digest = hashlib.sha256()
        facts: dict[str, object] = {"bos": self.bos_id, "eos": self.eos_id, "order": "rows shuffled within an epoch"}
        facts["sources"] = [(source.num_documents, source.documents_per_epoch) for source in self.sources]
        facts["shards"] = [(s.num_documents, s.num_tokens, s.dtype.name, s.tokenizer_hash) for s in self.shards]
        digest.update(json.dumps(facts, sort_keys=True).encode())
        for shard in self.shards:
            # Sizes alone would not notice a re-tokenised text of equal length: sample the ends of the token array.
            digest.update(np.ascontiguousarray(shard.tokens[:4096]).tobytes())
            digest.update(np.ascontiguousarray(shard.tokens[-4096:]).tobytes())
            shard.drop_cache()
        return digest.hexdigest()

    # Documents by their number in the corpus

    def _tokens_before(self, document: int) -> int:
        """Stored tokens in front of `document` (0 .. num_documents)."""
        shard = int(np.searchsorted(self._shard_documents, document, side="right")) - 1
        if shard == len(self.shards):
            return self.num_tokens
        return int(self._shard_tokens[shard]) + int(self.shards[shard].offsets[document - self._shard_documents[shard]])

    def _spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start (in the concatenation of all shards) and length of each document; int64 [n] both."""
        starts, lengths = np.empty(len(documents), np.int64), np.empty(len(documents), np.int64)
        shard_of = np.searchsorted(self._shard_documents, documents, side="right") - 1
        for shard in _numbers_in(shard_of) if len(self.shards) > 1 else (0,):
            where = np.flatnonzero(shard_of == shard) if len(self.shards) > 1 else slice(None)
            local = documents[where] - self._shard_documents[shard]
            offsets = self.shards[shard].offsets
            begin = offsets[local].astype(np.int64)
            starts[where] = begin + self._shard_tokens[shard]
            lengths[where] = offsets[local + 1].astype(np.int64) - begin
        return starts, lengths

    def _read(self, positions: np.ndarray) -> np.ndarray:
        """Stored tokens at `positions` in the concatenation of all shards; int32 [n]."""
        if len(self.shards) == 1:
            tokens = self.shards[0].tokens[positions].astype(np.int32)
        else:
            tokens = np.empty(len(positions), np.int32)
            shard_of = np.searchsorted(self._shard_tokens, positions, side="right") - 1
            for shard in _numbers_in(shard_of):
                where = np.flatnonzero(shard_of == shard)
                tokens[where] = self.shards[shard].tokens[positions[where] - self._shard_tokens[shard]]
        return tokens

    def count_mapped(self, documents: int, tokens: int) -> None:
        """Note that so many documents and tokens were read here and there; unmaps them once that adds up."""
        self._bytes_mapped += tokens * self.shards[0].dtype.itemsize + documents * _FAULT_BYTES
        if self._bytes_mapped > _DROP_BYTES:
            self.drop_cache()

    def drop_cache(self) -> None:
        """Give mapped pages back to the system; the page cache keeps them, this process stops counting them."""
        for shard in self.shards:
            shard.drop_cache()
        self._bytes_mapped = 0

    # Documents by epoch and slot: slot numbers run through each source `repeat` times

    def tokens_before_epoch(self, epoch: int) -> int:
        """Tokens, special ones included, that a stream has delivered when `epoch` (from 0) begins."""
        total = 0
        for source in self.sources:
            cycles, rest = divmod(epoch * source.documents_per_epoch, source.num_documents)
            first, last = source.first_document, source.first_document + source.num_documents
            start = self._tokens_before(first)
            total += cycles * (self._tokens_before(last) - start) + self._tokens_before(first + rest) - start
            total += epoch * source.documents_per_epoch * self.specials_per_document
        return total

    def epoch_of(self, position: int) -> int:
        """The epoch that holds the stream's token number `position`."""
        high = 1
        while self.tokens_before_epoch(high) <= position:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.tokens_before_epoch(middle) <= position else (low, middle)
        return low

    def documents_of(self, epoch: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Document behind each slot of an epoch, and how often it was used before; int64 [n] both."""
        source_of = np.searchsorted(self._epoch_slots, slots, side="right") - 1
        per_epoch = np.array([source.documents_per_epoch for source in self.sources])[source_of]
        count = np.array([source.num_documents for source in self.sources])[source_of]
        first = np.array([source.first_document for source in self.sources])[source_of]
        uses, local = np.divmod(slots - self._epoch_slots[source_of] + epoch * per_epoch, count)
        return first + local, uses


class TokenStream:
    """The corpus, epoch after epoch, each epoch in its own keyed order (or stored order where `key` is None)."""

    def __init__(self, corpus: Corpus, key: int | None):
        self.corpus, self._key = corpus, key
        self._index = lru_cache(maxsize=2)(self._build_index)  # a range may touch the end of one epoch and the next

    def _order(self, permutation: Permutation, index: np.ndarray) -> np.ndarray:
        return index if self._key is None else permutation(index)

    def _build_index(self, epoch: int) -> EpochIndex:
        corpus = self.corpus
        count = corpus.documents_per_epoch
        permutation = Permutation(fold(self._key or 0, epoch), count)
        sums = []
        for start in range(0, count, _CHUNK):
            slots = self._order(permutation, np.arange(start, min(start + _CHUNK, count)))
            lengths = corpus._spans(corpus.documents_of(epoch, slots)[0])[1] + corpus.specials_per_document
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK)))
        corpus.drop_cache()
        return EpochIndex(permutation, np.cumsum(np.concatenate(sums)))

    def read(self, position: int, count: int, *, origins: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens `position` .. `position + count - 1` of the stream.

        Returns tokens (int32 [count]) and, on request, origins (int64 [count]): for a stored token
        uses << OCCURRENCE_SHIFT | its position in the corpus, where `uses` counts earlier appearances of its document
        in this stream; 0 for the `<s>` and `</s>` that the stream adds.
        """
        tokens, places = [], []
        while count > 0:
            epoch = self.corpus.epoch_of(position)
            begin, end = self.corpus.tokens_before_epoch(epoch), self.corpus.tokens_before_epoch(epoch + 1)
            take = min(count, end - position)
            part, part_origins = self._read_epoch(epoch, np.array([position - begin]), take, origins)
            tokens.append(part[0])
            places.append(None if part_origins is None else part_origins[0])
            position += take
            count -= take
        if len(tokens) == 1:
            return tokens[0], places[0]
        return np.concatenate(tokens), np.concatenate(places) if origins else None

    def read_rows(
        self, positions: np.ndarray, count: int, *, origins: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`read` of `count` tokens at each of `positions`, int64 [n]: tokens int32 [n, count], origins or None."""
        tokens = np.empty((len(positions), count), np.int32)
        places = np.empty((len(positions), count), np.int64) if origins else None
        left = np.arange(len(positions))
        while len(left):
            epoch = self.corpus.epoch_of(int(positions[left[0]]))
            begin, end = self.corpus.tokens_before_epoch(epoch), self.corpus.tokens_before_epoch(epoch + 1)
            here = (positions[left] >= begin) & (positions[left] < end)
            rows, left = left[here], left[~here]
            inside = positions[rows] + count <= end
            for row in rows[~inside]:  # at most a few: the last row of an epoch goes on in the next
                found, found_places = self.read(int(positions[row]), count, origins=origins)
                tokens[row] = found
                if places is not None and found_places is not None:
                    places[row] = found_places
            rows = rows[inside]
            if len(rows):
                tokens[rows], found_places = self._read_epoch(epoch, positions[rows] - begin, count, origins)
                if places is not None and found_places is not None:
                    places[rows] = found_places
        return tokens, places

    def _read_epoch(self, epoch: int, begins: np.ndarray, count: int, want_origins: bool):
        """`read_rows` for ranges that lie within one epoch; `begins` [n] count from the epoch's first token."""
        corpus, index = self.corpus, self._index(epoch)
        # Documents of every block of the index that a range touches, in the order of the epoch.
        first_blocks = np.searchsorted(index.block_ends, begins, side="right")
        last_blocks = np.searchsorted(index.block_ends, begins + count, side="left")
        blocks = np.unique(_ranges(first_blocks, last_blocks - first_blocks + 1))
        places = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        if (blocks[-1] + 1) * _BLOCK > corpus.documents_per_epoch:  # the last block may be cut short
            places = places[places < corpus.documents_per_epoch]
        documents, uses = corpus.documents_of(epoch, self._order(index.permutation, places))
        starts, lengths = corpus._spans(documents)
        wrapped = lengths + corpus.specials_per_document
        firsts = np.arange(len(blocks)) * _BLOCK  # of each block in `places`
        before = np.cumsum(wrapped) - wrapped  # tokens of the documents in front, blocks without gaps between them
        skipped = np.where(blocks > 0, index.block_ends[blocks - 1], 0) - before[firsts]
        ends = before + wrapped + np.repeat(skipped, np.diff(firsts, append=len(places)))

        # Pairs of a range and a document that overlap, in the order of the output.
        low = np.searchsorted(ends, begins, side="right")
        overlapping = np.searchsorted(ends, begins + count, side="left") + 1 - low
        document = _ranges(low, overlapping)
        row = np.repeat(np.arange(len(begins)), overlapping)
        opens = (ends - wrapped)[document] - begins[row]  # offset of the <s> in its row; the first may be negative
        closes = ends[document] - begins[row] - 1
        pieces = np.minimum(closes + 1, count) - np.maximum(opens, 0)

        # Source position of every output token; the places of special tokens read a neighbour and are overwritten.
        source = np.tile(np.arange(count), len(begins)) + np.repeat(starts[document] - opens - 1, pieces)
        bos = (row * count + opens)[opens >= 0]
        eos = (row * count + closes)[closes < count] if corpus.eos_id is not None else bos[:0]
        source[bos] = source[eos] = min(int(starts[document[0]]), corpus.num_tokens - 1)
        tokens = corpus._read(source)
        corpus.count_mapped(len(document), len(source))
        tokens[bos] = corpus.bos_id
        if corpus.eos_id is not None:
            tokens[eos] = corpus.eos_id
        if not want_origins:
            return tokens.reshape(-1, count), None
        origins = source + (np.repeat(uses[document], pieces) << OCCURRENCE_SHIFT)
        origins[bos] = origins[eos] = 0
        return tokens.reshape(-1, count), origins.reshape(-1, count)


def _refuse_twice(path: str | Path, shards: list[Shard]) -> None:
    """Refuse a shard that is taken twice, and one whose copy in another folder is taken. Raises CorpusError."""
    real = [shard.path.resolve() for shard in shards]
    several, seen = len({place.parent for place in real}) > 1, {}
    for shard, place in zip(shards, real, strict=True):
        for key in (place, shard.content_hash) if several else (place,):
            other, folder = seen.setdefault(key, (shard, place.parent))
            if other is not shard and (key == place or folder != place.parent):
                which = (
                    f"{shard.path} twice"
                    if other.path == shard.path
                    else f"the same shard as {other.path} and {shard.path}"
                )
                raise CorpusError(
                    f'{path} takes {which}; name it once ("repeat" in a mix file uses documents more often)'
                )


def _numbers_in(values: np.ndarray) -> np.ndarray:
    """The small numbers that occur among many `values`, in order, much faster than np.unique."""
    return np.flatnonzero(np.bincount(values))


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first, first + 1, ... (count of them) for each pair, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)


__all__ = ["OCCURRENCE_SHIFT", "Corpus", "CorpusError", "ShardError", "Source", "TokenStream", "read_mix"]
