"""Corpus: the documents of a shard folder, a glob or a mix file, their sources, and in which epochs they are used."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from data.blocks import BlockOrder, Blocks
from data.documents import OCCURRENCE_SHIFT, Documents
from data.epochs import Epochs, Stage
from data.mix import CorpusError, MixStage, Source, plain_mix, read_mix
from data.positions import Exposure
from data.remote_shards import RemoteFile, ShardCache
from data.shard_paths import find_shards
from data.shards import Shard, ShardError, open_shard


class Corpus(Documents):
    """Documents of one or more sources, addressed by a running number, and the epochs of their streams.

    path: a shard folder, a shard file, a glob of either, or a mix file ending in .json.
    tokenizer_hash: refuse shards made with another tokenizer; None accepts any.
    bos_id, eos_id: ids that open and close each document; eos_id None leaves the end unmarked (published behaviour).
    seed: of the samples that fractions of a source are.
    order: of epochs that are made of blocks; None: of documents.
    trusted: take manifests at their word, as other processes of a run may where one checks all files.
    cache: of remote shards.
    Raises CorpusError or ShardError, each a sentence naming the file."""

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer_hash: str | None,
        bos_id: int,
        eos_id: int | None,
        seed: int = 0,
        order: BlockOrder | None = None,
        trusted: bool = False,
        cache: ShardCache | None = None,
    ):
        as_path = Path(path)
        is_mix = as_path.suffix == ".json" and as_path.is_file()
        self.mix = read_mix(as_path) if is_mix else plain_mix(str(path))
        shards: list[Shard] = []
        counts: list[int] = []
        words: list[int] = []
        for source in self.mix.sources:
            found = _open_source(source.path, tokenizer_hash, trusted, cache)
            counts.append(sum(shard.num_documents for shard in found))
            words.append(sum(s.words for s in found) if all(s.words for s in found if s.num_tokens) else 0)
            shards += found
        if not trusted:
            _refuse_twice(path, shards)
        if cache is not None:
            _refuse_small(path, shards, cache, order)
        hashes = {shard.tokenizer_hash for shard in shards}
        if len(hashes) > 1:
            raise CorpusError(
                f"{path}: its shards were made with {len(hashes)} different tokenizers; tokenise them again"
            )
        super().__init__(shards, counts, bos_id, eos_id, seed)
        self.block_order, self.blocks = order, None if order is None else Blocks(self, order.size, seed)
        # How often an epoch of each stage uses each source.
        self.stage_repeats = [self._repeats(stage) for stage in self.mix.stages]
        self.sources = [
            Source(
                source.path,
                float(next(repeats[number] for repeats in self.stage_repeats if repeats[number])),
                int(self.first_documents[number]),
                counts[number],
                words[number],
                source.name,
                source.max_repeats,
            )
            for number, source in enumerate(self.mix.sources)
        ]
        self.epochs = Epochs(self.units, [Stage(0, self.stage_repeats[0])], self.keyed)

    @property
    def units(self) -> Documents | Blocks:
        """What epochs are made of."""
        return self.blocks or self

    @cached_property
    def source_tokens(self) -> list[int]:
        """Tokens of each source, special ones included."""
        return super().source_tokens if self.blocks is None else self.blocks.source_tokens

    def sources_of(self, origins: np.ndarray) -> np.ndarray:
        """The source of each row's first stored token, int64 [R]; origins: of its tokens (TokenStream.read), [R, T]."""
        first = np.take_along_axis(origins, (origins != 0).argmax(axis=1)[:, None], axis=1)[:, 0]
        return np.searchsorted(self._source_ends, first & ((1 << OCCURRENCE_SHIFT) - 1), side="right")

    @cached_property
    def _source_ends(self) -> np.ndarray:
        """Stored tokens up to the end of each source."""
        of_shards = np.searchsorted(self.shard_documents, [*self.first_documents[1:], self.num_documents])
        return self.shard_tokens[of_shards]

    def _repeats(self, stage: MixStage) -> tuple[Fraction, ...]:
        """How often an epoch of a stage uses each source, 0 for those that it does not have."""
        numbers = {source.path: number for number, source in enumerate(self.mix.sources)}
        of_stage = [numbers[source.path] for source in stage.sources]
        found = dict(zip(of_stage, stage.repeats([self.source_tokens[n] for n in of_stage]), strict=True))
        return tuple(found.get(number, Fraction(0)) for number in range(len(numbers)))

    @property
    def keyed(self) -> list[bool]:
        """Of each source, whether documents are used in a keyed order; or as stored, where epochs are whole passes."""
        return [self.mix.planned or repeat.denominator > 1 for repeat in self.stage_repeats[0]]

    @property
    def sampled(self) -> bool:
        """Whether epochs hold samples of a source."""
        return any(self.keyed)

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
        for source, repeat, count in zip(self.sources, self.stage_repeats[0], self.source_tokens, strict=True):
            words += repeat * source.words
            tokens += repeat * count
        unknown = next((source.path for source in self.sources if not source.words), "")
        return Exposure(self.tokens_before_epoch(1), None if unknown else words / tokens, unknown)

    @property
    def _order(self) -> str:
        order = "rows shuffled within an epoch" + ("; fractions sampled" if self.sampled else "")
        return order if self.block_order is None else f"{order}; {self.block_order}"

    def identity(self) -> str:
        """A hash that changes when documents, their order, tokenizer, mix or document ends change; cheap."""
        content: dict[str, object] = {"bos": self.bos_id, "eos": self.eos_id, "order": self._order}
        content["sources"] = [(source.num_documents, source.repeat) for source in self.sources]
        content["shards"] = [(shard.num_documents, shard.tokenizer_hash, shard.content_hash) for shard in self.shards]
        if self.mix.planned:
            stages = zip(self.mix.stages, self.stage_repeats, strict=True)
            content["stages"] = [(str(stage.begin), [str(repeat) for repeat in repeats]) for stage, repeats in stages]
            content["max_repeats"] = [source.max_repeats for source in self.sources]
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


def _open_source(path: str, tokenizer_hash: str | None, trusted: bool, cache: ShardCache | None) -> list[Shard]:
    """The shards of a source. Raises CorpusError where they hold nothing."""
    shards = [
        found.shard or open_shard(found.path, tokenizer_hash, found.sha256, scattered=True, words=found.words)
        for found in find_shards(path, trusted, cache)
    ]
    if not any(shard.num_tokens for shard in shards):
        what = "tokens, its documents are empty" if any(shard.num_documents for shard in shards) else "documents"
        raise CorpusError(f"{path}: holds no {what}; check the input of preprocessing/tokenize_corpus.py")
    return shards


def _refuse_small(path: str | Path, shards: list[Shard], cache: ShardCache, order: BlockOrder | None) -> None:
    """Refuse a cache that does not hold what is in use at once. Raises CorpusError."""
    sizes = sorted((shard.remote.bytes for shard in shards if isinstance(shard.remote, RemoteFile)), reverse=True)
    if order is not None:  # windows of two objectives, these and the next, whose blocks may all lie in other shards
        tokens = max((shard.num_tokens for shard in shards), default=1)
        sizes = sizes[: 4 * -(-3 * order.window // (2 * min(order.size, max(1, tokens))))]
    if sum(sizes) > cache.gigabytes * 1e9:
        remedy = "" if order is None else "lower --shuffle_tokens, make --block_tokens as large as a shard, or "
        raise CorpusError(
            f"{path}: up to {sum(sizes) / 1e9:,.1f} GB of its shards are in use at once, more than --data_cache_gb "
            f"{cache.gigabytes:g}; {remedy}raise it" + " or take --order blocks" * (order is None)
        )


def _refuse_twice(path: str | Path, shards: list[Shard]) -> None:
    """Refuse a shard that is taken twice, and one whose copy in another folder is taken. Raises CorpusError."""
    folders = {folder: folder.resolve() for folder in {shard.path.parent for shard in shards}}
    real = [s.path.resolve() if s.path.is_symlink() else folders[s.path.parent] / s.path.name for s in shards]
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
