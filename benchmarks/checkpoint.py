"""Checkpoint times: the pause of training, writing in the background, and opening with all checksums.

    python benchmarks/checkpoint.py [--config configs/base.json] [--folder FOLDER] [--output checkpoint.json]

Weights, their average and LAMB's two moments of one model, on the GPU where there is one, are written as training
writes them (flushed to disk, checksummed, renamed) and opened as a resumed run opens them. "pause" is the copy into the
host's memory, until it is complete (training's next passes run beside it on CUDA: what a run notices is less); "write"
is what follows in the background; "waiting" is a save without such a copy, for which training would stop altogether;
"reserve" makes the room for copies, once a run, beside its start. "plain" is what the same bytes take as one file that
is written and flushed, without checksums: the disk's own time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import write_results
from data.cli import Parser
from model import ModelConfig
from model_extra import build_model
from training.checkpoint import open_checkpoint, write_checkpoint
from training.saves import Snapshot
from training.state import Tensors

_ROOT = Path(__file__).resolve().parent.parent


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_plain(path: Path, data: memoryview) -> None:
    """One file, written and flushed."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(
    tensors: Tensors, device: torch.device, folder: Path, size: int, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of everything, by name; the first snapshot also makes its room."""
    times: dict[str, list[float]] = {"reserve": [], "pause": [], "write": [], "waiting": [], "open": [], "plain": []}
    data = memoryview(os.urandom(1 << 20) * (size >> 20))
    snapshot = Snapshot(device, size + (1 << 20))
    times["reserve"].append(seconds(lambda: (snapshot.take(tensors), snapshot.wait())))
    for step in range(repetitions):
        images = {}
        times["pause"].append(
            seconds(lambda images=images: (images.update(snapshot.take(tensors) or {}), snapshot.wait()))
        )
        assert images, "the host has too little memory for a copy"
        for number, (what, of) in enumerate((("write", images), ("waiting", tensors)), start=2 * step):
            times[what].append(seconds(lambda of=of, number=number: write_checkpoint(folder, number, of, {}, {})))
        folders = list(folder.glob("step_*"))
        times["open"].append(seconds(lambda folders=folders: open_checkpoint(folders[0])))
        times["plain"].append(seconds(lambda: write_plain(folder / "plain", data)))
        for written in folders:
            shutil.rmtree(written)
    snapshot.close()
    return times


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=str(_ROOT / "configs/base.json"), help="model configuration")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    weights = build_model(ModelConfig.from_json(options.config)).to(device).state_dict()
    tensors = {
        "model": weights,
        "ema": {name: tensor.clone() for name, tensor in weights.items()},
        "optimizer": {f"{kind}/{name}": torch.rand_like(t) for kind in ("m", "v") for name, t in weights.items()},
    }
    size = sum(tensor.numel() * tensor.element_size() for group in tensors.values() for tensor in group.values())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        times = measure(tensors, device, Path(name), size, options.repetitions)
    for what, values in times.items():
        median = statistics.median(values)
        spread = f"({min(values):.3f} - {max(values):.3f})"
        print(f"{what:<8} {median:7.3f} s {spread}, {size / median / 1e9:.2f} GB/s of {size:,} bytes")
    write_results(options, bytes=size, seconds=times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
