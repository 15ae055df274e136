"""Names of checkpoint folders. Apart from checkpoint.py, so that job scripts can read them without torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})")
ABANDONED = "abandoned_"  # before the name of a checkpoint that is the run's no more


def folder_name(step: int) -> str:
    """Name of the checkpoint folder after `step` optimizer steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Optimizer steps done, from a checkpoint folder's name."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(parent: Path) -> list[Path]:
    """Checkpoint folders, newest first; whether they are whole is not looked at."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def newest_step(parent: Path) -> int:
    """Steps done by the newest checkpoint in a folder of checkpoints, 0 where there is none."""
    return max((step_of(path) for path in list_checkpoints(parent)), default=0)
