"""Shard paths: the shards that a path on the command line or in a mix file names: folders, single shards and globs."""

from __future__ import annotations

import glob
import re
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache as cached
from pathlib import Path
from typing import Any, NamedTuple

from data.atomic_io import is_remote
from data.remote_shards import RemoteFile, ShardCache
from data.shards import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    REMAKE,
    SHARD_SUFFIX,
    Shard,
    ShardError,
    is_manifest,
    read_manifest,
    size_without_marks,
    token_dtype,
)

_SPLITS = ("train", "validation")  # folders that --validation_fraction makes


class ListedShard(NamedTuple):
    """A shard and what the manifest beside it says; of a loose shard nothing. words: 0 where not known.

    shard: all that there is to know of it, by a manifest that is taken at its word."""

    path: Path
    sha256: str | None = None
    words: int = 0
    shard: Shard | None = None


def find_shards(path: str | Path, trusted: bool = False, cache: ShardCache | None = None) -> list[ListedShard]:
    """The shards that `path` names, in order, each with what the manifest says of it.

    trusted: another process of this run checks the files that a manifest beside them lists; here none is looked at.

    path: a shard folder (its manifest's list), one .shard file, or a glob of either (sorted). Raises ShardError if
    there is none, if a listed file is missing or has another size, for a shard that is not in the manifest beside it
    or belongs to unfinished work, and for a glob that takes a corpus with the part that was held out of it."""
    if is_remote(path):
        return _remote_shards(str(path), cache)
    if Path(path).is_dir():
        return _folder_shards(Path(path), trusted)
    if Path(path).is_file():
        return [_listed(Path(path), _manifest, trusted)]
    if not re.search(r"[*?\[]", str(path)):
        raise ShardError(f"{path} does not exist; give a shard folder, a .shard file or a glob in quotes")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    manifests = cached(_manifest)
    shards: list[ListedShard] = []
    for match in matches:
        listed = match.name in manifests(match.parent)[1]  # then it is a file, as a manifest says
        if not listed and match.is_dir():
            shards += _folder_shards(match, trusted)
        elif match.suffix == SHARD_SUFFIX:
            shards.append(_listed(match, manifests, trusted))
    if not shards:
        raise ShardError(f"the glob {path} matches no shard; give a shard folder, a .shard file or another glob")
    folders = {shard.path.parent for shard in shards}
    for folder in () if trusted else folders:  # a shard that was lost would not be missed otherwise
        for name, entry in manifests(folder)[1].items():
            if fnmatch(name, Path(path).name):
                _check_entry(folder, entry)
    for folder in folders:
        train = folder.with_name(_SPLITS[0])
        if folder.name == _SPLITS[1] and train in folders:
            raise ShardError(f"the glob {path} takes {train} and {folder}, which was held out of it; give {train}")
    return shards


def resolve_shards(path: str | Path) -> list[Path]:
    """The shard files that `path` names, in order. Raises as `find_shards`."""
    return [shard.path for shard in find_shards(path)]


def _manifest(folder: Path) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The manifest of a folder, None where there is none, and what it lists by file name."""
    if not (folder / MANIFEST_NAME).exists():
        return None, {}
    manifest = read_manifest(folder)
    return manifest, {entry["file"]: entry for entry in manifest["shards"]}


def _listed(path: Path, manifests, trusted: bool) -> ListedShard:
    """A shard named by itself, by the manifest beside it or beside what it links to."""
    for file in (lambda: path), path.resolve:
        manifest, entries = manifests((real := file()).parent)
        if manifest is not None:
            entry = entries.get(real.name)
            if entry is None:
                raise ShardError(
                    f"{real} is not listed in the {MANIFEST_NAME} beside it; give the folder {real.parent}, or move "
                    "the shard to a folder of its own if it is to be used"
                )
            if not trusted:
                _check_entry(real.parent, entry)
            shard = _described(path, entry, manifest) if trusted else None
            return ListedShard(path, entry["sha256"], entry["words"], shard)
    folder = real.parent.parent if real.parent.name in _SPLITS else real.parent
    for journal in {real.parent / JOURNAL_NAME, folder / JOURNAL_NAME}:
        if journal.exists():
            raise ShardError(f"{path} belongs to unfinished work, see {journal}; run the command that makes it again")
    return ListedShard(path)


def _folder_shards(folder: Path, trusted: bool = False) -> list[ListedShard]:
    manifest = read_manifest(folder)
    if not manifest["shards"]:
        raise ShardError(f"{folder} holds no document, its {MANIFEST_NAME} lists no shard; give another folder")
    if trusted:
        shards = [_described(folder / entry["file"], entry, manifest) for entry in manifest["shards"]]
        return [ListedShard(shard.path, shard.sha256, shard.words, shard) for shard in shards]
    return [ListedShard(_check_entry(folder, entry), entry["sha256"], entry["words"]) for entry in manifest["shards"]]


def _check_entry(folder: Path, entry: dict[str, Any]) -> Path:
    """The path of a listed shard, which is there and has its size. Raises ShardError."""
    path = folder / entry["file"]
    try:
        size = path.stat().st_size
    except OSError:
        size = None
    if size != entry["bytes"]:
        found = "is missing" if size is None else f"has {size:,} bytes"
        raise ShardError(f"{path} {found}, but {MANIFEST_NAME} lists it with {entry['bytes']:,} bytes; {REMAKE}")
    return path


def _remote_shards(url: str, cache: ShardCache | None) -> list[ListedShard]:
    if cache is None:
        raise ShardError(f"{url} is remote; give --data_cache_dir, a folder on this node for copies of its shards")
    manifest = cache.manifest(url)
    if not is_manifest(manifest):
        raise ShardError(f"{url}/{MANIFEST_NAME} is of another format or version; make the folder again")
    found = []
    for entry in manifest["shards"]:
        file = RemoteFile(f"{url.rstrip('/')}/{entry['file']}", entry["bytes"], entry["sha256"], cache)
        shard = replace(_described(cache.place(url, entry["file"]), entry, manifest), remote=file)
        found.append(ListedShard(shard.path, shard.sha256, shard.words, shard))
    return found


def _described(path: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Shard:
    """A shard as its manifest describes it; the file is not looked at before it is read."""
    documents, tokens, dtype = entry["documents"], entry["tokens"], token_dtype(manifest["vocab_size"])
    has_marks = entry["bytes"] > size_without_marks(tokens, documents, dtype)
    kept = {"sha256": entry["sha256"], "words": entry["words"], "has_marks": has_marks, "scattered": True}
    return Shard(path, documents, tokens, dtype, manifest["tokenizer_hash"], manifest["vocab_size"], **kept)
