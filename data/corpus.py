"""Corpus and token streams: documents in shards, read as endless streams of tokens.

A `Corpus` is a set of documents in shards. A `TokenStream` walks through it in a keyed pseudo-random order, a new one
each epoch, and reads any ranges of tokens in time that does not depend on where the ranges lie. Every document is
wrapped as `<s> tokens </s>` on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Event

import numpy as np

from data.atomic_io import allow_open_files
from data.counter_rng import Permutation, fold
from data.mix import CorpusError, Source, read_mix
from data.positions import Exposure
from data.shard_paths import find_shards
from data.shards import Shard, ShardError, open_shard

_IndexMap = Callable[[np.ndarray], np.ndarray]
_BLOCK = 16  # documents per entry of an epoch's length index: a row that is read looks at about so many
_CHUNK = 1 << 18  # documents handled at once while an epoch's index is built
_DROP_BYTES = 1 << 30  # release mapped pages after about so many bytes were mapped
_FAULT_BYTES = 64 << 10  # that Linux maps around an access
_INDICES = 4  # kept of a corpus: a range of either objective may touch the end of one epoch and the next
OCCURRENCE_SHIFT = 46  # an origin is (times the document was used before) << 46 | position in the corpus
_SAMPLE = -2  # purpose of the key that orders sampled sources

# Set by a thread that may have to end while an index is built: then building raises IndexStopped.
stop_event: ContextVar[Event | None] = ContextVar("stop_event", default=None)


class IndexStopped(RuntimeError):
    """The thread that builds an index was told to end."""


@dataclass(frozen=True)
class EpochIndex:
    """Where documents lie in one epoch of a stream; half a byte or so per document."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: tokens up to the end of each block of _BLOCK documents


@dataclass(frozen=True)
class _Sample:
    """The order in which the documents of a sampled source are used, over and over."""

    permutation: Permutation
    block_ends: np.ndarray  # [blocks] int64: stored tokens up to the end of each block of _BLOCK documents


class Corpus:
    """Documents of one or more sources, addressed by a running number.

    path: a shard folder, a shard file, a glob of either, or a mix file ending in .json.
    tokenizer_hash: refuse shards made with another tokenizer; None accepts any.
    bos_id, eos_id: ids that open and close each document; eos_id None leaves the end unmarked (published behaviour).
    seed: of the samples that fractions of a source are.
    Raises CorpusError or ShardError, each a sentence naming the file.
    """

    def __init__(self, path: str | Path, *, tokenizer_hash: str | None, bos_id: int, eos_id: int | None, seed: int = 0):
        self.bos_id, self.eos_id, self._seed = bos_id, eos_id, seed
        self.specials_per_document = 1 + (eos_id is not None)
        as_path = Path(path)
        parts = read_mix(as_path) if as_path.suffix == ".json" and as_path.is_file() else [(str(path), 1.0)]
        self.shards: list[Shard] = []
        self.sources: list[Source] = []
        first = 0
        for part, repeat in parts:
            found = find_shards(part)
            shards = [open_shard(file, tokenizer_hash, sha, scattered=True, words=words) for file, sha, words in found]
            count = sum(shard.num_documents for shard in shards)
            if not any(shard.num_tokens for shard in shards):
                what = "tokens, its documents are empty" if count else "documents"
                raise CorpusError(f"{part}: holds no {what}; check the input of preprocessing/tokenize_corpus.py")
            known = all(shard.words for shard in shards if shard.num_tokens)
            self.sources.append(Source(part, repeat, first, count, words=known * sum(shard.words for shard in shards)))
            self.shards += shards
            first += count
        if not any(source.uses_before(1) for source in self.sources):  # an epoch of less than half a document
            self.sources = [replace(source, rounded_up=True) for source in self.sources]
        _refuse_twice(path, self.shards)
        if not allow_open_files(len(self.shards)):  # a mapped file keeps a descriptor
            raise CorpusError(
                f"{path} has {len(self.shards):,} shards, more than the files that this process may open; raise that "
                "limit (ulimit -Hn), or make fewer shards (tokenize_corpus.py --shard_size)"
            )
        hashes = {shard.tokenizer_hash for shard in self.shards}
        if len(hashes) > 1:
            raise CorpusError(
                f"{path}: its shards were made with {len(hashes)} different tokenizers; tokenise them again"
            )
        self.num_documents = first
        # First document, and first token, of each shard.
        self._shard_documents = np.cumsum([0, *(shard.num_documents for shard in self.shards)])
        self._shard_tokens = np.cumsum([0, *(shard.num_tokens for shard in self.shards)])
        self.num_tokens = int(self._shard_tokens[-1])
        ends = [source.first_document + source.num_documents for source in self.sources]
        self._source_tokens = np.diff([self._tokens_before(end) for end in (0, *ends)]).tolist()
        self._first_documents = np.array([source.first_document for source in self.sources])
        self._counts = np.array([source.num_documents for source in self.sources])
        self._sample = lru_cache(maxsize=None)(self._build_sample)
        self._tokens_before_epoch = lru_cache(maxsize=256)(self._count_tokens)
        self._uses_before = lru_cache(maxsize=8)(self._count_uses)
        self._bytes_mapped = 0
        self.indices: dict[tuple[int | None, int], EpochIndex] = {}  # of its streams, by key and epoch

    @property
    def sampled(self) -> bool:
        """Whether a source is used a fractional number of times per epoch."""
        return any(source.sampled for source in self.sources)

    @cached_property
    def exposure(self) -> Exposure:
        """How tokens of its streams are counted in epochs and words; sources count as often as they are repeated."""
        words = tokens = Fraction(0)
        for source, stored in zip(self.sources, self._source_tokens, strict=True):
            words += Fraction(repr(source.repeat)) * source.words
            tokens += Fraction(repr(source.repeat)) * (stored + source.num_documents * self.specials_per_document)
        unknown = next((source.path for source in self.sources if not source.words), "")
        return Exposure(self.tokens_before_epoch(1), None if unknown else words / tokens, unknown)

    @property
    def _order(self) -> str:
        return "rows shuffled within an epoch" + ("; fractions sampled" if self.sampled else "")

    def identity(self) -> str:
        """A hash that changes when documents, their order, tokenizer, mix or document ends change; cheap."""
        content: dict[str, object] = {"bos": self.bos_id, "eos": self.eos_id, "order": self._order}
        content["sources"] = [(source.num_documents, source.repeat) for source in self.sources]
        content["shards"] = [(shard.num_documents, shard.tokenizer_hash, shard.content_hash) for shard in self.shards]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def first_identity(self) -> str:
        """The identity in checkpoints from before the manifests' SHA-256 counted; sees only the ends of the shards."""
        digest = hashlib.sha256()
        content: dict[str, object] = {"bos": self.bos_id, "eos": self.eos_id, "order": self._order}
        content["sources"] = [(source.num_documents, source.uses_before(1)) for source in self.sources]
        content["shards"] = [(s.num_documents, s.num_tokens, s.dtype.name, s.tokenizer_hash) for s in self.shards]
        digest.update(json.dumps(content, sort_keys=True).encode())
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
        order, shard_of, groups, local = _by_shard(self._shard_documents, documents)
        starts, ends = np.empty(len(documents), np.int64), np.empty(len(documents), np.int64)
        after = local + 1
        for number, begin, end in groups:
            shard = self.shards[number]
            shard.check_size()
            starts[begin:end] = shard.offsets[local[begin:end]]
            ends[begin:end] = shard.offsets[after[begin:end]]
        ends -= starts
        if order is None:
            return starts, ends
        result = np.empty((2, len(documents)), np.int64)
        result[0, order], result[1, order] = starts + self._shard_tokens[shard_of], ends
        return result[0], result[1]

    def _read(self, tokens: np.ndarray, targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray) -> None:
        """Copy stored tokens to `tokens` int32: so many (`lengths`) from each of `sources` to each of `targets`.

        sources: in the concatenation of all shards. All int64 [n], lengths above 0, no piece in two shards.
        """
        order, shard_of, groups, local = _by_shard(self._shard_tokens, sources)
        if order is not None:
            targets, lengths = targets[order], lengths[order]
        for number, first, length in zip(shard_of.tolist(), local.tolist(), lengths.tolist(), strict=True):
            self.shards[number].prefetch(first, length)  # of all at once: the disk is not asked piece by piece
        source, ends = _ranges(local, lengths), [0, *np.cumsum(lengths).tolist()]
        found = np.empty(len(source), np.int32)
        for number, first, last in groups:
            found[ends[first] : ends[last]] = self.shards[number].tokens[source[ends[first] : ends[last]]]
        tokens[_ranges(targets, lengths)] = found

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

    # Documents by epoch and slot: an epoch's slots are the uses of the first source in it, then those of the next, ...

    def _count_uses(self, epoch: int) -> np.ndarray:
        return np.array([source.uses_before(epoch) for source in self.sources])

    def documents_in(self, epoch: int) -> int:
        """Documents in an epoch, repeats counted."""
        return int((self._uses_before(epoch + 1) - self._uses_before(epoch)).sum())

    def tokens_before_epoch(self, epoch: int) -> int:
        """Tokens, special ones included, that a stream has delivered when `epoch` (from 0) begins."""
        return self._tokens_before_epoch(epoch)

    def _count_tokens(self, epoch: int) -> int:
        total = 0
        for number, uses in enumerate(self._uses_before(epoch).tolist()):
            passes, rest = divmod(uses, self.sources[number].num_documents)
            total += passes * self._source_tokens[number] + uses * self.specials_per_document
            total += self._sampled_tokens(number, rest) if rest else 0
        return total

    def _sampled_tokens(self, number: int, count: int) -> int:
        """Stored tokens of the first `count` documents in the order of a sampled source."""
        sample, block = self._sample(number), count // _BLOCK
        rest = sample.permutation(np.arange(block * _BLOCK, count)) + self.sources[number].first_document
        return int(sample.block_ends[block - 1] if block else 0) + int(self._spans(rest)[1].sum())

    def _build_sample(self, number: int) -> _Sample:
        source = self.sources[number]
        permutation = Permutation(fold(fold(self._seed, _SAMPLE), number), source.num_documents)
        ends = self.block_ends(source.num_documents, lambda index: source.first_document + index, permutation.inverse)
        return _Sample(permutation, ends)

    def block_ends(self, count: int, documents: _IndexMap, order: _IndexMap, extra: int = 0) -> np.ndarray:
        """Tokens up to the end of each block of _BLOCK documents in an order, `extra` added for each: int64 [blocks].

        documents, order: functions from 0 .. count-1, in pieces, to the documents and to their index in the order. Fast
        where these documents follow each other as stored. Raises IndexStopped.
        """
        sums, stop = np.zeros(-(-count // _BLOCK), np.int64), stop_event.get()
        for start in range(0, count, _CHUNK):
            if stop is not None and stop.is_set():
                raise IndexStopped
            index = np.arange(start, min(start + _CHUNK, count))
            np.add.at(sums, order(index) // _BLOCK, self._spans(documents(index))[1] + extra)
        return np.cumsum(sums)

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
        before = self._uses_before(epoch)
        firsts = np.cumsum(self._uses_before(epoch + 1) - before)
        source_of = np.searchsorted(firsts, slots, side="right")
        firsts = np.concatenate([[0], firsts[:-1]])  # of each source, among the slots
        uses, local = np.divmod(slots + (before - firsts)[source_of], self._counts[source_of])
        for number in np.flatnonzero(np.bincount(source_of)).tolist() if self.sampled else ():
            if self.sources[number].sampled:
                here = np.flatnonzero(source_of == number)
                local[here] = self._sample(number).permutation(local[here])
        return self._first_documents[source_of] + local, uses


class TokenStream:
    """The corpus, epoch after epoch, each epoch in its own keyed order (or stored order where `key` is None)."""

    def __init__(self, corpus: Corpus, key: int | None):
        self.corpus, self._key = corpus, key

    def _index(self, epoch: int) -> EpochIndex:
        """The index of an epoch, built where no stream of this key has built it lately."""
        known, name = self.corpus.indices, (self._key, epoch)
        index = known.pop(name, None) or self._build_index(epoch)
        known[name] = index  # the last of them
        while len(known) > _INDICES:
            del known[next(iter(known))]
        return index

    def _order(self, permutation: Permutation, index: np.ndarray) -> np.ndarray:
        return index if self._key is None else permutation(index)

    def _build_index(self, epoch: int) -> EpochIndex:
        corpus, count = self.corpus, self.corpus.documents_in(epoch)
        permutation = Permutation(fold(self._key or 0, epoch), count)
        # In the order of the slots, which is that of the shards: only the sums are looked up here and there.
        order = permutation.inverse if self._key is not None else lambda slots: slots
        ends = corpus.block_ends(
            count, lambda slots: corpus.documents_of(epoch, slots)[0], order, corpus.specials_per_document
        )
        return EpochIndex(permutation, ends)

    def read(self, position: int, count: int, *, origins: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens `position` .. `position + count - 1` of the stream.

        Returns tokens (int32 [count]) and, on request, origins (int64 [count]): for a stored token
        uses << OCCURRENCE_SHIFT | its position in the corpus, where `uses` counts earlier appearances of its document
        in this stream; 0 for the `<s>` and `</s>` that the stream adds.
        """
        tokens, found_origins = [], []
        while count > 0:
            epoch = self.corpus.epoch_of(position)
            begin, end = self.corpus.tokens_before_epoch(epoch), self.corpus.tokens_before_epoch(epoch + 1)
            take = min(count, end - position)
            part, part_origins = self._read_epoch(epoch, np.array([position - begin]), take, origins)
            tokens.append(part[0])
            found_origins.append(None if part_origins is None else part_origins[0])
            position += take
            count -= take
        if len(tokens) == 1:
            return tokens[0], found_origins[0]
        return np.concatenate(tokens), np.concatenate(found_origins) if origins else None

    def read_rows(
        self, positions: np.ndarray, count: int, *, origins: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`read` of `count` tokens at each of `positions`, int64 [n]: tokens int32 [n, count], origins or None."""
        tokens = np.empty((len(positions), count), np.int32)
        all_origins = np.empty((len(positions), count), np.int64) if origins else None
        left = np.arange(len(positions))
        while len(left):
            epoch = self.corpus.epoch_of(int(positions[left[0]]))
            begin, end = self.corpus.tokens_before_epoch(epoch), self.corpus.tokens_before_epoch(epoch + 1)
            here = (positions[left] >= begin) & (positions[left] < end)
            rows, left = left[here], left[~here]
            inside = positions[rows] + count <= end
            for row in rows[~inside]:  # at most a few: the last row of an epoch goes on in the next
                found, found_origins = self.read(int(positions[row]), count, origins=origins)
                tokens[row] = found
                if all_origins is not None and found_origins is not None:
                    all_origins[row] = found_origins
            rows = rows[inside]
            if len(rows):
                tokens[rows], found_origins = self._read_epoch(epoch, positions[rows] - begin, count, origins)
                if all_origins is not None and found_origins is not None:
                    all_origins[rows] = found_origins
        return tokens, all_origins

    def _read_epoch(self, epoch: int, begins: np.ndarray, count: int, want_origins: bool):
        """`read_rows` for ranges that lie within one epoch; `begins` [n] count from the epoch's first token.

        In the comments: n ranges, B blocks of the index, D documents in them, P pairs of a range and a document."""
        corpus, index = self.corpus, self._index(epoch)
        # All documents of every block that a range touches, in the order of the epoch. The index knows the ends of
        # blocks alone, so the lengths of these D documents are looked up and added up below.
        first_blocks = np.searchsorted(index.block_ends, begins, side="right")  # [n]
        last_blocks = np.searchsorted(index.block_ends, begins + count, side="left")
        blocks = np.unique(_ranges(first_blocks, last_blocks - first_blocks + 1))  # [B], ascending, perhaps with gaps
        order = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()  # [D] indices of documents in the epoch
        if (blocks[-1] + 1) * _BLOCK > index.permutation.size:  # the last block may be cut short
            order = order[order < index.permutation.size]
        documents, uses = corpus.documents_of(epoch, self._order(index.permutation, order))
        starts, lengths = corpus._spans(documents)  # [D]
        wrapped = lengths + corpus.specials_per_document
        firsts = np.arange(len(blocks)) * _BLOCK  # of each block, in `order`
        before = np.cumsum(wrapped) - wrapped  # tokens of the documents in front, blocks without gaps between them
        skipped = np.where(blocks > 0, index.block_ends[blocks - 1], 0) - before[firsts]  # [B] tokens in the gaps
        ends = before + wrapped + np.repeat(skipped, np.diff(firsts, append=len(order)))  # [D] in the epoch

        # Pairs of a range and a document that overlap, in the order of the output.
        low = np.searchsorted(ends, begins, side="right")  # [n] first document that ends behind the range's beginning
        overlapping = np.searchsorted(ends, begins + count, side="left") + 1 - low
        document = _ranges(low, overlapping)  # [P] into `documents`
        row = np.repeat(np.arange(len(begins)), overlapping)  # [P]
        opens = (ends - wrapped)[document] - begins[row]  # [P] column of the <s>; negative where it lies before the row
        closes = ends[document] - begins[row] - 1  # [P] column of its last token; behind the row from `count` on

        # Stored tokens lie behind `opens` and, where there is a </s>, before `closes`: the columns [after_bos, until)
        # of a row. A pair without any, such as of an empty document, is left out of what is read.
        after_bos, until = np.maximum(opens + 1, 0), np.minimum(closes + (corpus.eos_id is None), count)
        some = np.flatnonzero(until > after_bos)
        targets, lengths = (row * count + after_bos)[some], (until - after_bos)[some]  # in the flat output
        sources = (starts[document] - opens - 1 + after_bos)[some]  # in the concatenation of all shards
        tokens = np.empty(len(begins) * count, np.int32)
        corpus._read(tokens, targets, sources, lengths)
        corpus.count_mapped(len(document), len(tokens))
        bos = (row * count + opens)[opens >= 0]
        tokens[bos] = corpus.bos_id
        if corpus.eos_id is not None:
            tokens[(row * count + closes)[closes < count]] = corpus.eos_id
        if not want_origins:
            return tokens.reshape(-1, count), None
        origins = np.zeros(len(tokens), np.int64)
        origins[_ranges(targets, lengths)] = _ranges(sources + (uses[document[some]] << OCCURRENCE_SHIFT), lengths)
        return tokens.reshape(-1, count), origins.reshape(-1, count)


def _refuse_twice(path: str | Path, shards: list[Shard]) -> None:
    """Refuse a shard that is taken twice, and one whose copy in another folder is taken. Raises CorpusError."""
    real = [shard.path.resolve() for shard in shards]
    several, seen = len({file.parent for file in real}) > 1, {}
    for shard, file in zip(shards, real, strict=True):
        for key in (file, shard.content_hash) if several else (file,):
            other, folder = seen.setdefault(key, (shard, file.parent))
            if other is not shard and (key == file or folder != file.parent):
                what = (
                    f"{shard.path} twice" if other.path == shard.path else f"one shard as {other.path} and {shard.path}"
                )
                raise CorpusError(
                    f'{path} takes {what}; name it once ("repeat" in a mix file uses documents more often)'
                )


def _by_shard(
    firsts: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray, list[tuple[int, int, int]], np.ndarray]:
    """`values` (documents or positions in the corpus) sorted by shard; `firsts` [shards + 1]: the first of each shard.

    Returns their order (None: as they are), the shard of each in that order, (shard, begin, end) for each shard that
    occurs, and the values in that order, counted from the first of their shard.
    """
    if len(firsts) == 2 or not len(values):
        return None, np.zeros(len(values), np.int64), [(0, 0, len(values))], values
    shard_of = np.searchsorted(firsts, values, side="right") - 1
    order = np.argsort(shard_of.astype(np.uint16) if len(firsts) < 1 << 16 else shard_of, kind="stable")  # radix sort
    shard_of = shard_of[order]
    begins = np.flatnonzero(np.diff(shard_of, prepend=-1))
    pieces = [*zip(shard_of[begins].tolist(), begins.tolist(), [*begins[1:].tolist(), len(values)], strict=True)]
    return order, shard_of, pieces, values[order] - firsts[shard_of]


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first, first + 1, ... (count of them) for each pair, one range after the other."""
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)


__all__ = ["OCCURRENCE_SHIFT", "Corpus", "CorpusError", "ShardError", "Source", "TokenStream", "read_mix"]
