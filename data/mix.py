"""Data mixes: the sources of a run, in which proportions they are used, and from when on.

{"sources": [{"path": ..., "repeat": 2}, ...]} uses documents so often per epoch; "weight" instead of "repeat" gives a
source its fraction of the tokens, "temperature": T all of them tokens^(1/T). "stages": [{"from": POSITION, "sources":
[...]}, ...] changes the proportions in mid-run, "max_repeats" limits how often a source is used in all of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count
from pathlib import Path
from typing import Any

from data.atomic_io import is_remote
from data.cli import closest
from data.positions import Position, PositionError, parse_position

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPLITS = ("train", "validation", "shards")  # folders that say nothing of what is in them
_FIRST = Position(Fraction(0), "steps")
_DIGITS = 6  # of the weights that a temperature gives: the same on every host, whatever its rounding of powers


class CorpusError(ValueError):
    """The training data cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Source:
    """Consecutive documents of the corpus, used `repeat` times per epoch (of the first stage that has them). words: 0
    where a manifest does not say. max_repeats: uses in all of the run, of all objectives together; None: any number.

    The source is walked through again and again, and an epoch goes on where the one before it stopped: with a fraction,
    too, all documents are used equally often over time."""

    path: str
    repeat: float
    first_document: int
    num_documents: int
    words: int = 0
    name: str = ""
    max_repeats: float | None = None


@dataclass(frozen=True)
class MixSource:
    """What a mix file says of a source in a stage. amount: its repeat or weight; None where a temperature decides."""

    path: str
    name: str
    amount: Fraction | None
    max_repeats: float | None


@dataclass(frozen=True)
class MixStage:
    """The sources from `begin` on. by: repeat, weight or temperature."""

    begin: Position
    sources: tuple[MixSource, ...]
    by: str
    temperature: float = 1.0

    def repeats(self, tokens: Sequence[int]) -> list[Fraction]:
        """How often an epoch uses each source, exact; tokens: of each. By weight, it is as long as all of them."""
        amounts = [Fraction(0) if source.amount is None else source.amount for source in self.sources]
        if self.by == "repeat":
            return amounts
        if self.by == "temperature":  # tokens^(1/T), divided by the largest before it is rounded
            powers = [(size / max(tokens)) ** (1 / self.temperature) for size in tokens]
            amounts = [Fraction(f"{power:.{_DIGITS}g}") for power in powers]
        return [
            amount / sum(amounts) * Fraction(sum(tokens), size) for amount, size in zip(amounts, tokens, strict=True)
        ]


@dataclass(frozen=True)
class Mix:
    """A mix file. planned: what its epochs hold depends on the run's length, as all but plain repeats do."""

    stages: tuple[MixStage, ...]
    planned: bool

    @property
    def sources(self) -> list[MixSource]:
        """The sources of all stages, each once, in the order in which they come."""
        return list({source.path: source for stage in self.stages for source in stage.sources}.values())


def plain_mix(path: str) -> Mix:
    """One source, used once per epoch."""
    return Mix((MixStage(_FIRST, (MixSource(path, _name_of(path), Fraction(1), None),), "repeat"),), planned=False)


def read_mix(path: Path) -> Mix:
    """A mix file (this module's docstring says what is in it), paths relative to it. Raises CorpusError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{path}: cannot be read as a mix file ({error}); see preprocessing/README.md, 'Mixing sources'"
        ) from error
    if not isinstance(content, dict) or ("sources" in content) == ("stages" in content):
        raise CorpusError(f'{path}: a mix file is {{"sources": [{{"path": ..., "repeat": 1}}, ...]}} or has "stages"')
    limit = _limit(f"{path}", content)
    if "sources" in content:
        _refuse_unknown(f"{path}", content, ("sources", "temperature", "max_repeats"))
        stages = [_read_stage(path, f"{path}", content, limit)]
    else:
        _refuse_unknown(f"{path}", content, ("stages", "max_repeats"))
        listed = content["stages"]
        if not isinstance(listed, list) or not listed or not all(isinstance(stage, dict) for stage in listed):
            raise CorpusError(f'{path}: "stages" is a list of {{"from": POSITION, "sources": [...]}} with one or more')
        stages = []
        for number, stage in enumerate(listed):
            where = f"{path}: stages[{number}]"
            _refuse_unknown(where, stage, ("from", "sources", "temperature"))
            stages.append(_read_stage(path, where, stage, limit))
        if stages[0].begin.value != 0:
            raise CorpusError(f'{path}: stages[0] has "from": {listed[0]["from"]!r}; the first stage begins at 0')
    planned = "stages" in content or stages[0].by != "repeat" or any(s.max_repeats for s in stages[0].sources)
    return Mix(tuple(_with_names(path, stages)), planned)


def _refuse_unknown(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        close = closest(unknown, known)
        names = ", ".join(f'"{key}"' for key in known)
        raise CorpusError(
            f"{where} has an unknown key {unknown!r}"
            + f" (did you mean {close!r}?)" * bool(close)
            + f"; known: {names}"
        )


def _number(where: str, given: dict[str, Any], key: str, low: float, high: float) -> float | int:
    """given[key], a number above `low` and at most `high`."""
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise CorpusError(f'{where}: "{key}" is {value!r}; it must be a number above {low:g} and at most {high:g}')
    return value


def _limit(where: str, given: dict[str, Any]) -> float | None:
    return float(_number(where, given, "max_repeats", 0, 1e9)) if given.get("max_repeats") is not None else None


def _read_stage(path: Path, where: str, given: dict[str, Any], limit: float | None) -> MixStage:
    """A stage, or the whole of a mix file without stages."""
    sources = given.get("sources")
    if not isinstance(sources, list) or not sources:
        raise CorpusError(f'{where}: "sources" is a list of {{"path": ..., "repeat": 1}} with one or more')
    kinds = {key for source in sources if isinstance(source, dict) for key in ("repeat", "weight") if key in source}
    by, temperature = "weight" if "weight" in kinds else "repeat", 1.0
    if "temperature" in given:
        by, temperature = "temperature", float(_number(where, given, "temperature", 0.1, 1e6))
        if kinds:
            raise CorpusError(f'{where}: "temperature" decides the weights; leave out "{min(kinds)}" of its sources')
    elif len(kinds) > 1:
        raise CorpusError(f'{where}: some sources have "repeat", some "weight"; give all of them the same')
    read = tuple(_read_source(path, f"{where}: sources[{n}]", source, by, limit) for n, source in enumerate(sources))
    paths = [source.path for source in read]
    if twice := next((one for one in paths if paths.count(one) > 1), None):
        raise CorpusError(
            f'{where} takes the shards of {twice} twice; name it once ("repeat" or "weight" uses documents more often)'
        )
    try:
        begin = parse_position(str(given.get("from", 0)))
    except PositionError as error:
        raise CorpusError(f'{where}: "from": {error}') from error
    return MixStage(begin, read, by, temperature)


def _read_source(path: Path, where: str, given: Any, by: str, limit: float | None) -> MixSource:
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise CorpusError(f'{where} needs a "path" (a shard folder, a shard file or a glob)')
    _refuse_unknown(where, given, ("path", "repeat", "weight", "name", "max_repeats"))
    amount = None
    if by == "repeat":
        amount = Fraction(repr(float(_number(where, {"repeat": 1, **given}, "repeat", 0, 1000))))  # 0.1 means a tenth
    elif by == "weight":
        if "weight" not in given:
            raise CorpusError(f'{where} has no "weight", which others have; give all sources one')
        amount = Fraction(repr(float(_number(where, given, "weight", 0, 1e12))))
    name = given.get("name", "")
    if not isinstance(name, str) or (name and not _NAME.fullmatch(name)):
        raise CorpusError(f'{where}: "name" is {name!r}; it must be of letters, digits, "_", "." and "-"')
    own = _limit(where, given)
    where_it_is = given["path"] if is_remote(given["path"]) else str(path.parent / given["path"])
    return MixSource(where_it_is, name, amount, limit if own is None else own)


def _name_of(path: str) -> str:
    """A name for the source at a path: its last part that says something."""
    parts = [part.removesuffix(".shard") for part in Path(path).parts if not re.search(r"[*?\[]", part)]
    telling = [part for part in parts if part not in (*_SPLITS, "/", "..")]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", (telling or parts or ["data"])[-1])


def _with_names(path: Path, stages: list[MixStage]) -> list[MixStage]:
    """Stages whose sources have names, each its own, and the same in all stages; so have limits."""
    given: dict[str, MixSource] = {}
    for source in (source for stage in stages for source in stage.sources):
        known = given.setdefault(source.path, source)
        if (source.name and known.name not in ("", source.name)) or source.max_repeats != known.max_repeats:
            raise CorpusError(f'{path}: {source.path} has another "name" or "max_repeats" in another stage; give one')
        given[source.path] = known if known.name else source
    names = {where: source.name for where, source in given.items() if source.name}
    if twice := next((name for name in names.values() if list(names.values()).count(name) > 1), None):
        raise CorpusError(f'{path}: two sources have the name {twice!r}; give each its own "name"')
    for where in given:
        if where not in names:
            name, taken = _name_of(where), set(names.values())
            names[where] = next(n for n in chain([name], (f"{name}_{i}" for i in count(2))) if n not in taken)
    return [
        MixStage(
            stage.begin,
            tuple(MixSource(s.path, names[s.path], s.amount, s.max_repeats) for s in stage.sources),
            stage.by,
            stage.temperature,
        )
        for stage in stages
    ]


def named_paths(text: str) -> dict[str, str]:
    """The held-out sets of --valid_path: `web=PATH,books=PATH` by name, or a single path by "". Raises CorpusError."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    if not text or Path(text).exists() or not all(equals and _NAME.fullmatch(name) for name, equals, _ in parts):
        return {"": text} if text else {}
    found = {name: path for name, _, path in parts}
    if len(found) < len(parts) or not all(found.values()):
        raise CorpusError(f"--valid_path {text!r}: each set has a name and a path, as in web=PATH,books=PATH")
    if taken := {name for name in found if name.startswith("ema_")}:
        raise CorpusError(f"--valid_path {text!r}: {min(taken)} is the name of averaged weights; give another")
    return found
