"""Turn an exported folder into an ONNX model, for onnxruntime and what builds on it.

    python export/to_onnx.py FOLDER OUT [--task masked|encoder|classifier]

FOLDER is one that to_huggingface.py wrote, or that transformers saved after fine-tuning. OUT gets model.onnx and
FOLDER's tokenizer and configuration. Inputs: input_ids and attention_mask, int64 [batch, length], both of any size;
output: `logits` (masked: [batch, length, vocabulary], as AutoModelForMaskedLM; classifier: [batch, labels]) or
`last_hidden_state` (encoder: [batch, length, features]), float32. The result is compared with FOLDER's own in
onnxruntime before it is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor, nn

from data.cli import Parser, run_command
from export.hf_format import is_exported
from export.to_huggingface import ExportError, check_output, writing

# By task: the class that reads FOLDER, what the names of its head begin with, and the output's name.
_TASKS = {
    "masked": ("AutoModelForMaskedLM", "classifier.", "logits"),
    "encoder": ("AutoModel", "", "last_hidden_state"),
    "classifier": ("AutoModelForSequenceClassification", "score.", "logits"),
}
_MOST_DIFFERENCE = 1e-4
_INPUTS = ("input_ids", "attention_mask")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Turn an exported folder into an ONNX model.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder that to_huggingface.py wrote")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    parser.add_argument("--task", choices=(*_TASKS,), default="masked", help="what the model is for (default: masked)")
    options = parser.parse_args(arguments)

    def write() -> None:
        difference, file = convert(options), options.output / "model.onnx"
        print(f"wrote {file}; onnxruntime differs from {options.folder} by {difference:.1e} at most")

    return run_command(write, ExportError)


def convert(options: argparse.Namespace) -> float:
    """Write OUT, whole or not at all; returns the largest difference that onnxruntime makes. Raises ExportError."""
    check_output(options.output)
    packages = ("onnx", "onnxruntime", "onnxscript", "transformers")  # torch's exporter imports onnxscript
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ExportError(f"{missing[0]} is not installed: pip install {' '.join(packages)}")
    import onnxruntime
    import transformers

    auto, head, name = _TASKS[options.task]
    check_folder(options.folder, options.task, head)
    model = getattr(transformers, auto).from_pretrained(
        options.folder, trust_remote_code=True, attn_implementation="eager", dtype=torch.float32
    )
    one = _FirstOutput(model.eval())
    size = {axis: torch.export.Dim(word) for axis, word in enumerate(("batch", "length"))}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names what it would have liked to be installed
    with writing(options.output) as (temporary, finish), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside torch
        program: Any = torch.onnx.export(
            one, examples(2, 9, model.config.vocab_size), dynamo=True, dynamic_shapes=(size, size), verbose=False,
            input_names=list(_INPUTS), output_names=[name],
        )  # fmt: skip
        program.save(temporary / "model.onnx")
        session = onnxruntime.InferenceSession(temporary / "model.onnx", providers=["CPUExecutionProvider"])
        difference = max(
            float((torch.from_numpy(session.run(None, by_name(inputs))[0]) - one(*inputs)).abs().max())
            for inputs in (examples(*shape, model.config.vocab_size) for shape in ((1, 1), (3, 40)))
        )
        if not difference <= _MOST_DIFFERENCE:
            raise ExportError(f"onnxruntime differs from FOLDER {options.folder} by {difference:.1e}; nothing is kept")
        for file in (*options.folder.glob("*token*.json"), options.folder / "config.json"):
            shutil.copyfile(file, temporary / file.name)
        finish(temporary)
    return difference


def check_folder(folder: Path, task: str, head: str) -> None:
    """Refuse a folder that has not got what the task needs. Raises ExportError."""
    from safetensors import safe_open

    weights = folder / "model.safetensors"
    if not is_exported(folder) or not weights.is_file():
        raise ExportError(f"FOLDER {folder} is no exported model: write one with export/to_huggingface.py first")
    if "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        raise ExportError(f"FOLDER {folder} is of a class of transformers' own: give it to optimum-cli export onnx")
    with safe_open(weights, "pt") as tensors:
        if not any(name.startswith(head) for name in tensors.keys()):  # noqa: SIM118 - it is no dictionary
            raise ExportError(
                f"--task {task}: FOLDER {folder} has no such head; fine-tune one with transformers and save it, or "
                f"give --task {'encoder' if task == 'masked' else 'masked'}"
            )


class _FirstOutput(nn.Module):
    """The first output of a model, by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]


def examples(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [rows, length], of which the last row is padded on the right and the first one on the left."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, : length // 4] = 0
    mask[-1, length - length // 3 :] = 0
    return torch.randint(vocabulary, mask.shape, generator=torch.Generator().manual_seed(length)), mask


def by_name(inputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The inputs as onnxruntime takes them."""
    return {name: tensor.numpy() for name, tensor in zip(_INPUTS, inputs, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
