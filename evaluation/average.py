"""The mean of the weights of several checkpoints, as a checkpoint of weights alone.

    python evaluation/average.py runs/a/checkpoints/step_0000{8,9}000 --output runs/a_average
    python evaluation/average.py runs/a --last 5 --output runs/a_average

An average of the last fifth of a run, with a constant rate or one that decays late, is often better than its end. The
output is a MODEL for every program here, and --initial_weights starts from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from data.cli import Parser
from evaluation.generation import UsageError, add_weights_flags, run
from training.checkpoint import Checkpoint, SaveError, locate, open_checkpoint, write_checkpoint
from training.status import checkpoint_folders, list_checkpoints


def mean_weights(checkpoints: list[Checkpoint], average: bool | str) -> dict[str, torch.Tensor]:
    """The mean of each tensor of their weights, or of an average that they hold (`weights_file`), summed in float64.
    Raises UsageError where they differ, CheckpointError where one has no such average."""
    sums: dict[str, torch.Tensor] = {}
    first: dict[str, torch.Tensor] = {}
    for number, checkpoint in enumerate(checkpoints):
        tensors = checkpoint.weights(average)
        first = first or tensors
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (first, tensors)]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"{checkpoint.path} holds another model than {checkpoints[0].path}; give those of one model"
            )
        for name, tensor in tensors.items():
            sums[name] = tensor.double() if number == 0 else sums[name].add_(tensor)
    return {name: (total / len(checkpoints)).to(first[name].dtype) for name, total in sums.items()}


def _average(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if output.exists():
        raise UsageError(f"--output {options.output!r} exists; give the name of a new folder")
    if options.last:
        folders = [folder for model in options.model for folder in checkpoint_folders(Path(model))]
        found = [open_checkpoint(path) for path in list_checkpoints(*folders)[: options.last]]
    else:
        found = [locate(model) for model in options.model]
    if len(found) < max(2, options.last):
        wanted = f"--last {options.last}" if options.last else "an average"
        raise UsageError(f"{' '.join(options.model)}: {len(found)} checkpoints are too few for {wanted}")
    weights = mean_weights(found, options.ema)
    newest = max(found, key=lambda checkpoint: checkpoint.step)
    record = {name: value for name, value in newest.record.items() if name not in ("format", "step", "files")}
    record["average_of"] = [str(checkpoint.path) for checkpoint in found]
    files = {name: (newest.path / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    try:
        write_checkpoint(output.parent, newest.step, {"model": weights}, record, files, output.name)
    except SaveError as error:
        raise UsageError(f"--output {options.output!r}: {error}") from error
    print(f"{output}: the mean of {', '.join(checkpoint.path.name for checkpoint in found)}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="+", metavar="MODEL", help="checkpoints, or a run folder with --last")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="the newest N checkpoints of the run folder")
    add_weights_flags(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="checkpoint to write")
    return run(_average, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
