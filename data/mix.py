"""Data mixes: sources, and how often each of their documents is used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path


class CorpusError(ValueError):
    """The training data cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Source:
    """Consecutive documents of the corpus that are used `repeat` times per epoch.

    first_document: index of the source's first document in the corpus.
    num_documents: documents in the source.
    words: in these documents; 0 where a manifest does not say.

    The source is walked through again and again, and an epoch goes on where the one before it stopped: with a fraction,
    too, all documents are used equally often over time. `sampled` sources are walked through in a keyed order, so that
    what falls into an epoch is a sample; the others, whose epochs are whole passes, in stored order.
    """

    path: str
    repeat: float
    first_document: int
    num_documents: int
    words: int = 0

    @property
    def exact_repeat(self) -> Fraction:
        return Fraction(repr(self.repeat))  # 0.1 is meant as a tenth

    @property
    def sampled(self) -> bool:
        """Whether epochs are no whole passes."""
        return not float(self.repeat).is_integer()


def read_mix(path: Path) -> list[tuple[str, float]]:
    """Paths and repeats of a mix file: {"sources": [{"path": "...", "repeat": 2}, ...]}, paths relative to the file."""
    try:
        mix = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{path}: cannot be read as a mix file ({error}); see preprocessing/README.md, 'Mixing sources'"
        ) from error
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
