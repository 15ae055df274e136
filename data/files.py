"""Files that are whole or absent, whatever happens while they are written. Needs nothing but Python."""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL_SUFFIX = ".partial"


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a rename is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Puts `content` under `path` durably; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
