"""Corpus: the documents of a shard folder, a glob or a mix file, their sources, and in which epochs they are used."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from data.atomic_io import allow_open_files
from data.documents import Documents
from data.epochs import Epochs, Stage
from data.mix import CorpusError, Source, read_mix
from data.positions import Exposure
from data.shard_paths import find_shards
from data.shards import Shard, ShardError, open_shard


class Corpus(Documents):
    """Documents of one or more sources, addressed by a running number, and the epochs of their streams.

    path: a shard folder, a shard file, a glob of either, or a mix file ending in .json.
    tokenizer_hash: refuse shards made with another tokenizer; None accepts any.
    bos_id, eos_id: ids that open and close each document; eos_id None leaves the end unmarked (published behaviour).
    seed: of the samples that fractions of a source are.
    Raises CorpusError or ShardError, each a sentence naming the file.
    """

    def __init__(self, path: str | Path, *, tokenizer_hash: str | None, bos_id: int, eos_id: int | None, seed: int = 0):
        as_path = Path(path)
        parts = read_mix(as_path) if as_path.suffix == ".json" and as_path.is_file() else [(str(path), 1.0)]
        shards: list[Shard] = []
        self.sources: list[Source] = []
        for part, repeat in parts:
            found = [
                open_shard(file, tokenizer_hash, sha, scattered=True, words=words)
                for file, sha, words in find_shards(part)
            ]
            count = sum(shard.num_documents for shard in found)
            if not any(shard.num_tokens for shard in found):
                what = "tokens, its documents are empty" if count else "documents"
                raise CorpusError(f"{part}: holds no {what}; check the input of preprocessing/tokenize_corpus.py")
            known = all(shard.words for shard in found if shard.num_tokens)
            first = sum(shard.num_documents for shard in shards)
            self.sources.append(Source(part, repeat, first, count, words=known * sum(shard.words for shard in found)))
            shards += found
        _refuse_twice(path, shards)
        if not allow_open_files(len(shards)):  # a mapped file keeps a descriptor
            raise CorpusError(
                f"{path} has {len(shards):,} shards, more than the files that this process may open; raise that "
                "limit (ulimit -Hn), or make fewer shards (tokenize_corpus.py --shard_size)"
            )
        hashes = {shard.tokenizer_hash for shard in shards}
        if len(hashes) > 1:
            raise CorpusError(
                f"{path}: its shards were made with {len(hashes)} different tokenizers; tokenise them again"
            )
        super().__init__(shards, [source.num_documents for source in self.sources], bos_id, eos_id, seed)
        stage = Stage(0, tuple(source.exact_repeat for source in self.sources))
        self.epochs = Epochs(self, [stage], [source.sampled for source in self.sources])

    @property
    def sampled(self) -> bool:
        """Whether a source is used a fractional number of times per epoch."""
        return any(source.sampled for source in self.sources)

    def tokens_before_epoch(self, epoch: int) -> int:
        """Tokens, special ones included, that a stream has delivered when `epoch` (from 0) begins."""
        return self.epochs.tokens_before_epoch(epoch)

    def epoch_of(self, position: int) -> int:
        """The epoch that holds the stream's token number `position`."""
        return self.epochs.epoch_of(position)

    @cached_property
    def exposure(self) -> Exposure:
        """How tokens of its streams are counted in epochs and words; sources count as often as they are repeated."""
        words = tokens = Fraction(0)
        for source, count in zip(self.sources, self.source_tokens, strict=True):
            words += source.exact_repeat * source.words
            tokens += source.exact_repeat * count
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
        content["sources"] = list(zip(self.counts.tolist(), self.epochs.uses_before(1).tolist(), strict=True))
        content["shards"] = [(s.num_documents, s.num_tokens, s.dtype.name, s.tokenizer_hash) for s in self.shards]
        digest.update(json.dumps(content, sort_keys=True).encode())
        for shard in self.shards:
            # Sizes alone would not notice a re-tokenised text of equal length: sample the ends of the token array.
            digest.update(np.ascontiguousarray(shard.tokens[:4096]).tobytes())
            digest.update(np.ascontiguousarray(shard.tokens[-4096:]).tobytes())
            shard.drop_cache()
        return digest.hexdigest()


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


__all__ = ["Corpus", "CorpusError", "ShardError", "Source", "read_mix"]
