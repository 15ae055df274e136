"""Input files: those that --input names, those of a folder that are left out and why, and whether one has changed."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePath

from data.atomic_io import is_remote
from data.wording import count
from preprocessing.cli import CorpusError
from preprocessing.hub_datasets import PROTOCOL, describe_parts, list_dataset
from preprocessing.remote import describe_remote, list_remote, open_remote

_KINDS = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
# Read where a file or a glob names them. BabyLM's .train, .dev and .test: a folder of them would mix training and
# held-out text. Plain .json: beside data it mostly describes the data. (Compressed, as C4's, it is the data.)
_KINDS_IF_NAMED = {".train": "text", ".dev": "text", ".test": "text", ".json": "jsonl"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar", ".lz4", ".lzma", ".z")  # for other programs
_READABLE = ".txt, .jsonl, .ndjson (each also .gz, .bz2, .xz, .zst), .json.gz (and so on), .parquet and .arrow"

# What reads a file of a folder that is not read as it is
_FLAG, _GLOB, _UNPACK = "--other_files text (or jsonl) reads", "a glob in quotes reads", "unpack"
_RENAME, _RESTORE, _NOTHING = "rename", "restore", "nothing reads"
_EXAMPLES = 6  # suffixes that the note names for each of these


@dataclass(frozen=True)
class InputFile:
    """One file of the input. `name` is relative to what the user named, so it does not depend on where that lies."""

    path: Path | str  # str: the URL of a remote file or of a part of a dataset
    name: str
    kind: str  # "text", "jsonl", "parquet", "arrow" or "dataset"
    compression: str  # "", ".gz", ".bz2", ".xz" or ".zst"
    size: int  # bytes on the disk
    modified: int  # nanoseconds since 1970; of a remote file RemoteFile.version

    @property
    def place(self) -> str:
        """Where it lies, the same for all ways to name it."""
        return self.path if isinstance(self.path, str) else str(self.path.resolve())


@dataclass(frozen=True)
class _Unread:
    """A file of a folder that is not read: what would read it, and what it is."""

    remedy: str
    what: str  # its suffix, or what else is special about it
    path: Path | str


def find_inputs(arguments: Sequence[str | Path], other_files: str | None = None) -> list[InputFile]:
    """The files that --input names, in its order; folders and globs in sorted order. Prints one line on what in the
    folders is not read. other_files: what files with another suffix or none hold, "text" or "jsonl"; None leaves them
    out. Raises CorpusError for a path that does not exist, holds nothing readable, has an unknown suffix, is compressed
    and has no bytes, or is named twice."""
    unread: list[_Unread] = []
    found = [file for argument in arguments for file in _expand(str(argument), other_files, unread)]
    seen: dict[str, Path | str] = {}
    for file in found:
        if file.place in seen:
            also = f", also as {seen[file.place]}" if seen[file.place] != file.path else ""
            raise CorpusError(f"--input names {file.path} twice{also}; name each file once")
        seen[file.place] = file.path
    if unread:
        print(f"note: of --input, {_account(unread)}", flush=True)
    return found


def files_of_part(files: Sequence[InputFile], part: int, parts: int) -> list[InputFile]:
    """The files of one part: neighbours in the list, cut where the bytes on the disk come nearest to equal parts. A
    part may be empty; every file is in exactly one."""
    total = sum(file.size for file in files)
    before, chosen = 0, []
    for file in files:
        middle = (2 * before + file.size) * parts // max(2 * total, 1)
        if min(middle, parts - 1) == part:
            chosen.append(file)
        before += file.size
    return chosen


def check_unchanged(file: InputFile) -> None:
    """Raises CorpusError if a file is no longer as it was when it was found: what is stored would be neither."""
    if isinstance(file.path, str):
        (remote,) = describe_parts([file.path]) if file.kind == "dataset" else describe_remote([file.path])
        size, modified = remote.size, remote.version
    else:
        status = file.path.stat()
        size, modified = status.st_size, status.st_mtime_ns
    if (size, modified) != (file.size, file.modified):
        raise CorpusError(
            f"{file.path} was changed while this was at work ({file.size:,} bytes before, {size:,} now); "
            "begin again when nothing writes to it any more"
        )


def open_input(file: InputFile) -> BufferedReader:
    """The bytes of a file as they are stored."""
    return open_remote(file.path, file.size) if isinstance(file.path, str) else open(file.path, "rb")


def _expand(argument: str, other_files: str | None, unread: list[_Unread]) -> list[InputFile]:
    if argument.startswith(PROTOCOL):
        names = list_dataset(argument)
        found = describe_parts(names)
        return [InputFile(each.url, names[each.url], "dataset", "", each.size, each.version) for each in found]
    if is_remote(argument):
        return _remote_files(argument, other_files, unread)
    path = Path(argument)
    if path.is_dir():
        return _folder_files(path, other_files, unread)
    if path.is_file():
        return [_describe(path, path.name, other_files)]
    if not glob.has_magic(argument):
        raise CorpusError(f"--input {argument} does not exist; give files, folders or globs in quotes")
    files: list[InputFile] = []
    for match in sorted(Path(match) for match in glob.glob(argument, recursive=True)):
        files += _folder_files(match, other_files, unread) if match.is_dir() and "**" not in argument else []
        files += [_describe(match, match.name, other_files)] if match.is_file() else []
    if not files:
        raise CorpusError(f"--input {argument} matches no file; check the glob and put it in quotes")
    return files


def _remote_files(argument: str, other_files: str | None, unread: list[_Unread]) -> list[InputFile]:
    names, is_folder = list_remote(argument)
    urls = list(names)
    here: list[_Unread] = []
    if is_folder:
        hidden = {url for url in urls if any(part.startswith(".") for part in names[url].split("/"))}
        found = {url: _Unread(_RENAME, "hidden", url) if url in hidden else _unread(url, other_files) for url in urls}
        here = [each for each in found.values() if each]
        urls = [url for url, each in found.items() if each is None]
    if not urls and is_folder:
        raise CorpusError(f"--input {argument} holds no {_READABLE}: {_account(here) if here else 'it is empty'}")
    if not urls:
        raise CorpusError(f"--input {argument} matches no file; check the glob and put it in quotes")
    unread += here
    kinds = [_known_kind(url, names[url], other_files) for url in urls]
    return [
        _checked(InputFile(file.url, names[file.url], kind, _suffixes(names[file.url])[1], file.size, file.version))
        for file, kind in zip(describe_remote(urls), kinds, strict=True)
    ]


def _folder_files(folder: Path, other_files: str | None, unread: list[_Unread]) -> list[InputFile]:
    inside = sorted(_inside(folder, other_files), key=lambda found: found.path if isinstance(found, _Unread) else found)
    here = [found for found in inside if isinstance(found, _Unread)]
    files = [found for found in inside if isinstance(found, Path)]
    if not files:
        raise CorpusError(f"--input {folder} holds no {_READABLE}: {_account(here) if here else 'it is empty'}")
    unread += here
    return [_describe(path, path.relative_to(folder).as_posix(), other_files) for path in files]


def _inside(folder: Path, other_files: str | None, above: tuple[Path, ...] = ()) -> Iterator[Path | _Unread]:
    """Everything below a folder, in any order. Links to folders are followed."""
    resolved = folder.resolve()
    if resolved in above:
        yield _Unread(_NOTHING, "link to a folder above it", folder)
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith("."):
                yield _Unread(_RENAME, "hidden", path)
            elif entry.is_dir():
                yield from _inside(path, other_files, (*above, resolved))
            elif not entry.is_file():
                broken = entry.is_symlink() and not path.exists()
                yield _Unread(_RESTORE, "broken link", path) if broken else _Unread(_NOTHING, "pipe or device", path)
            else:
                yield _unread(path, other_files) or path


def _unread(path: Path | str, other_files: str | None) -> _Unread | None:
    """Why a file in a folder is not read, None if it is."""
    suffix, compression = _suffixes(path)
    what = suffix + compression or "without suffix"
    if suffix in _KINDS_IF_NAMED and not (suffix == ".json" and compression):
        return _Unread(_GLOB, what, path)
    return None if _kind(path, other_files) else _Unread(_UNPACK if _is_archive(path) else _FLAG, what, path)


def _suffixes(path: Path | str) -> tuple[str, str]:
    """The suffix that tells the format, and the compression's ("" for none)."""
    name = PurePath(path)
    last = name.suffix.lower()
    return (PurePath(name.stem).suffix.lower(), last) if last in _COMPRESSIONS else (last, "")


def _is_archive(path: Path | str) -> bool:
    suffix, compression = _suffixes(path)
    return suffix in _ARCHIVES or (suffix in (".parquet", ".arrow") and compression != "")


def _kind(path: Path | str, other_files: str | None) -> str | None:
    """What a file holds; None where neither its name nor a flag says so."""
    suffix, _ = _suffixes(path)
    return None if _is_archive(path) else _KINDS.get(suffix) or _KINDS_IF_NAMED.get(suffix) or other_files


def _known_kind(path: Path | str, name: str, other_files: str | None) -> str:
    kind = _kind(name, other_files)
    if kind is None:
        remedy = "unpack it" if _is_archive(name) else f"{_FLAG} it"
        raise CorpusError(f"--input {path} has no known format ({_READABLE}); {remedy}")
    return kind


def _describe(path: Path, name: str, other_files: str | None) -> InputFile:
    kind, status = _known_kind(path, name, other_files), path.stat()
    return _checked(InputFile(path, name, kind, _suffixes(path)[1], status.st_size, status.st_mtime_ns))


def _checked(file: InputFile) -> InputFile:
    if not file.size and (file.compression or file.kind in ("parquet", "arrow")):
        raise CorpusError(
            f"--input {file.path} has 0 bytes, as after a download that failed; get it again or remove it"
        )
    return file


def _account(unread: Sequence[_Unread]) -> str:
    """How many files are not read, by what would read them and what they are, with examples."""
    parts: list[str] = []
    for remedy in dict.fromkeys(each.remedy for each in unread):
        some = [each for each in unread if each.remedy == remedy]
        example = {each.what: each.path for each in reversed(some)}
        frequent = Counter(each.what for each in some).most_common()
        named = [f"{number:,} {what} (such as {example[what]})" for what, number in frequent[:_EXAMPLES]]
        rest = sum(number for _, number in frequent[_EXAMPLES:])
        parts.append(f"{remedy} {', '.join(named)}" + (f" and {rest:,} others" if rest else ""))
    return f"{count(len(unread), 'file')} {'is' if len(unread) == 1 else 'are'} not read: {'; '.join(parts)}"
