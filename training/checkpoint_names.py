"""Names of checkpoint folders. Apart from checkpoint.py, so that job scripts can read them without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{8,})")
ABANDONED = "abandoned_"  # before the name of a checkpoint that is the run's no more


def folder_name(step: int) -> str:
    """Name of the checkpoint folder after `step` optimizer steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Optimizer steps done, from a checkpoint folder's name."""
    return int(path.name.removeprefix("step_"))


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Where a run's checkpoints may be: in its own folder, and where --spare_checkpoint_dir let it save."""
    config = _read_config(run_folder)
    spare = [] if copied_from(run_folder, config) else config.get("spare_checkpoints", [])
    return [run_folder / "checkpoints", *map(Path, spare)]


def copied_from(run_folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The run folder of which this one, with this config.json, is a copy; None for one that is none, or was moved."""
    original = Path(config.get("folder") or run_folder)
    try:
        same = original.samefile(run_folder) or _read_config(original).get("wandb_id") != config.get("wandb_id")
    except OSError:  # moved, or seen under another path on this host
        same = True
    return None if same else original


def _read_config(run_folder: Path) -> dict[str, Any]:
    """A run's config.json; {} where there is none or it is damaged."""
    try:
        config = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    return config if isinstance(config, dict) else {}


def list_checkpoints(*parents: Path) -> list[Path]:
    """Checkpoint folders, newest first, of equal ones those of the first parent; whether they are whole is not seen."""
    found = [path for parent in parents if parent.is_dir() for path in parent.iterdir()]
    return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of, reverse=True)


def newest_step(*parents: Path) -> int:
    """Steps done by the newest checkpoint in folders of checkpoints, 0 where there is none."""
    return max((step_of(path) for path in list_checkpoints(*parents)), default=0)
