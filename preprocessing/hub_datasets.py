"""Hugging Face datasets by name or folder, streamed: dataset://NAME?config=...&split=...&revision=...

A dataset is as many inputs as it has data files, so that parts of a corpus may share it and reading goes on inside one.
`datasets` is imported only here; it reads the Hub and every format that it knows, and keeps nothing on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from preprocessing.cli import CommandError, CorpusError
from preprocessing.remote import RemoteFile
from preprocessing.tables import Columns

PROTOCOL = "dataset://"
_DEFAULTS = {"config": None, "split": "train", "revision": None}
_PART = "#part="


@dataclass(frozen=True)
class _Dataset:
    """One split. files: of which it is made; origins: for each what tells its versions apart, where it is not local."""

    stream: Any  # datasets.IterableDataset
    files: list[str]
    origins: list[str]
    rows: int  # 0 where it is not known

    def files_of(self, part: int) -> list[int]:
        """The numbers of the files of a part: its own, or where parts are something else, all."""
        return [part] if len(self.files) == self.stream.num_shards else list(range(len(self.files)))


def list_dataset(url: str) -> dict[str, str]:
    """The inputs of a dataset: of each part a URL and a name. Raises CorpusError."""
    path, options = _parsed(url)
    if Path(path).is_dir():
        path = str(Path(path).resolve())
    given = {key: value for key, value in options.items() if value != _DEFAULTS[key]}
    whole = PROTOCOL + path + (f"?{urlencode(given)}" if given else "")
    number = _dataset(whole).stream.num_shards
    name = "/".join(value for value in (Path(path).name, options["config"], options["split"]) if value)
    return {f"{whole}{_PART}{part}": f"{name}/{part:05d}-of-{number:05d}" for part in range(number)}


def describe_parts(urls: Iterable[str]) -> list[RemoteFile]:
    """Size (bytes of local files; of others 1) and version of the inputs that `list_dataset` gives."""
    found = []
    for url in urls:
        whole, _, part = url.partition(_PART)
        dataset, size, versions = _dataset(whole), 0, []
        for number in dataset.files_of(int(part)):
            path = Path(dataset.files[number])
            status = path.stat() if path.is_file() else None
            size += status.st_size if status else 1
            versions.append([str(path), status.st_size, status.st_mtime_ns] if status else dataset.origins[number])
        digest = hashlib.blake2b(json.dumps(versions).encode(), digest_size=6).digest()
        found.append(RemoteFile(url, size, int.from_bytes(digest, "big")))
    return found


class DatasetRows(Columns):
    """The rows of one part."""

    def __init__(self, url: str) -> None:
        whole, _, part = url.partition(_PART)
        dataset = _dataset(whole)
        self._stream = dataset.stream.shard(num_shards=dataset.stream.num_shards, index=int(part))
        self._rows = dataset.rows / dataset.stream.num_shards
        features = dataset.stream.features
        if features is None:
            raise CorpusError(f"{url} holds no rows, or does not say which columns it has; give its files instead")
        super().__init__(url, features.arrow_schema)

    def batches(self, columns: Sequence[str], first: int, size: int) -> Iterator[tuple[Any, float]]:
        """Batches of at most `size` rows from row `first` on, each with the estimated fraction read behind it."""
        row = first
        rows = self._stream.select_columns(list(columns)).skip(first).with_format("arrow")
        for table in rows.iter(batch_size=size):
            (batch,) = table.combine_chunks().to_batches()
            row += batch.num_rows
            yield batch, min(1.0, row / self._rows) if self._rows else 0.0


@contextmanager
def open_part(url: str) -> Iterator[DatasetRows]:
    """The rows of an input that `list_dataset` gives. Raises CorpusError for whatever fails meanwhile."""
    with _explained(url):
        yield DatasetRows(url)


def _parsed(url: str) -> tuple[str, dict[str, Any]]:
    path, _, query = url.removeprefix(PROTOCOL).partition("?")
    given = dict(parse_qsl(query))
    unknown = next((key for key in given if key not in _DEFAULTS), None)
    if unknown or not path:
        what = f"has no option '{unknown}'" if unknown else "names nothing"
        raise CorpusError(f"--input {url} {what}; give {PROTOCOL}NAME?config=...&split=...&revision=...")
    return path, {**_DEFAULTS, **given}


@cache
def _dataset(url: str) -> _Dataset:
    try:
        import datasets
    except ImportError:
        raise CorpusError(f"reading {url} needs a package that is not installed: pip install datasets") from None
    path, options = _parsed(url)
    with _explained(url):
        if (Path(path) / "dataset_dict.json").is_file():
            path = str(Path(path) / options["split"])
        if (Path(path) / "state.json").is_file():  # of save_to_disk
            saved: Any = datasets.load_from_disk(path)
            files = [entry["filename"] for entry in saved.cache_files]
            return _Dataset(saved.to_iterable_dataset(len(files) or 1), files, [""] * len(files), len(saved))
        builder = datasets.load_dataset_builder(path, options["config"], revision=options["revision"])
        stream = builder.as_streaming_dataset(split=options["split"])
        known: Any = (builder.config.data_files or {}).get(options["split"], [])
        origins = [json.dumps(each) for each in getattr(known, "origin_metadata", [])]
        splits: Any = builder.info.splits or {}
        rows = splits[options["split"]].num_examples if options["split"] in splits else 0
        if not origins:  # made by code of the dataset's own
            known, origins = [builder.hash or ""], [builder.hash or ""]
        return _Dataset(stream, list(known), origins, rows)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """`datasets` and what it reads through raise whatever they like."""
    try:
        yield
    except (CommandError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"{url} could not be read ({reason}); correct the name, or run the same again") from error
