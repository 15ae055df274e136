r"""Turn a folder of the transformers library into weights that pretraining can start from.

    python export/from_huggingface.py FOLDER OUT
    python train_single_gpu.py --initial_weights OUT --config_file OUT/config.json \
        --tokenizer_path OUT/tokenizer.json ...

FOLDER is one that to_huggingface.py wrote (also after fine-tuning there, while it holds a language model), a published
GPT-BERT, or a model of a class of transformers' own that export/native.py names, such as ModernBERT: config.json with
weights as safetensors or pytorch_model.bin, in one file or several. LTG-BERT as it is published has other layers and is
refused. The tokenizer becomes the one that the shards were made with, so these go
on fitting. OUT has the form of a checkpoint without optimizer, and serves as MODEL everywhere; training starts from it
at step 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from data.cli import Parser, run_command
from data.special_tokens import roles_beside, special_tokens
from export.hf_format import TOKENIZER_NOTE, is_exported, model_config, restore_tokenizer
from export.native import native_form
from export.to_huggingface import ExportError, check_output, writing
from model import ModelConfig, ModelConfigError
from model_extra import build_model
from training.checkpoint import CheckpointError, write_checkpoint

_WORDS, _TIED, _TABLE = (
    "embedding.word_embedding.weight", "classifier.nonlinearity.5.weight", "embedding.relative_embedding",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Turn a folder of the transformers library into weights for pretraining.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder with config.json and weights")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    options = parser.parse_args(arguments)

    def write() -> None:
        note, out, tokenizer = convert(options.folder, options.output), options.output, ""
        if (out / "tokenizer.json").is_file():
            tokenizer = f" --tokenizer_path {out / 'tokenizer.json'}"
        print(f"wrote {out}; start with --initial_weights {out} --config_file {out / 'config.json'}{tokenizer}")
        if note:
            print(note)

    return run_command(write, ExportError, CheckpointError, ModelConfigError)


def convert(folder: Path, output: Path) -> str:
    """Write `output`, whole or not at all; returns what its user should know. Raises ExportError, CheckpointError or
    ModelConfigError."""
    check_output(output)
    if not is_exported(folder):
        raise ExportError(f"FOLDER {folder} is no folder of the transformers library: it needs config.json and weights")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = folder / "tokenizer.json"
        text = found.read_text(encoding="utf-8") if found.is_file() else None
    except (OSError, ValueError) as error:
        raise ExportError(f"FOLDER {folder}: config.json or tokenizer.json cannot be read ({error})") from None
    form, tensors = native_form(str(values.get("model_type"))), read_weights(folder)
    if form is None:
        tensors = our_parameters(tensors, folder)
        config = read_configuration(values, tensors, folder)
    else:
        try:
            config = form.read_configuration(values)
            tensors = form.our_parameters(tensors, config)
        except ModelConfigError as error:
            raise ExportError(f"FOLDER {folder}: config.json: {error}") from None
    check_parameters(tensors, config, folder)
    record: dict[str, Any] = {"imported_from": folder.resolve().name}
    if isinstance(values.get("flags"), dict):
        record["flags"] = values["flags"]
    files = {"config.json": (json.dumps(config.to_dict(), indent=1) + "\n").encode()}
    if text is not None:
        restored = restore_tokenizer(text, values.get(TOKENIZER_NOTE))
        files["tokenizer.json"] = restored.encode()
        given = record.get("flags", {}).get("special_tokens", "")
        tokens = special_tokens(restored, given, beside=roles_beside(folder)).tokens
        roles = {f"{role}_token": token for role, token in tokens.items()}
        files["special_tokens_map.json"] = (json.dumps(roles, indent=1) + "\n").encode()
    with writing(output) as (temporary, finish):
        finish(write_checkpoint(temporary, 0, {"model": tensors}, record, files))
    return form.NOTE if form is not None else ""


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's weights; nothing is unpickled but tensors. Raises ExportError."""
    import pickle

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise ExportError(f"FOLDER {folder} has none of {', '.join(_WEIGHTS)}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        parts = [name]
        if name.endswith(".index.json"):
            parts = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
        for part in parts:
            path = folder / Path(part).name
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"FOLDER {folder}: its weights cannot be read ({reason}); copy them again") from None
    return tensors


def our_parameters(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The parameters under the names of model.py, in float32: without a wrapper's prefix and what is no parameter."""
    words = [name for name in tensors if name.endswith(_WORDS)]
    if len(words) != 1:
        raise ExportError(
            f"FOLDER {folder} holds another architecture: it has {len(words)} parameters named {_WORDS}, where "
            "GPT-BERT and LTG-BERT have one"
        )
    prefix = words[0].removesuffix(_WORDS)
    if any(name.startswith(f"{prefix}transformer.layers.") for name in tensors):
        raise ExportError(
            f"FOLDER {folder} holds LTG-BERT as its authors published it, whose layers are built otherwise than those "
            "of model.py; take a published GPT-BERT, or a folder that to_huggingface.py wrote"
        )
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    tied = found.pop(_TIED, None)
    if tied is not None and not torch.equal(tied, found[_WORDS]):
        raise ExportError(f"FOLDER {folder}: {_TIED} differs from {_WORDS}, but this architecture ties them")
    return {
        name: tensor.float().contiguous() for name, tensor in found.items() if not name.endswith("position_indices")
    }


def read_configuration(values: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> ModelConfig:
    """ModelConfig; what a published configuration leaves out is read off the parameters. Raises ExportError."""
    gated = any(name.endswith("in_proj_vg.weight") for name in tensors)
    found: dict[str, Any] = {"vocab_size": tensors[_WORDS].size(0)}
    if _TABLE in tensors:
        found["position_bucket_size"] = (tensors[_TABLE].size(0) + 1) // 2
    try:
        return model_config({**found, **values, "model_type": "gpt-bert" if gated else "ltg-bert"})
    except ModelConfigError as error:
        raise ExportError(f"FOLDER {folder}: config.json: {error}") from None


def check_parameters(tensors: dict[str, torch.Tensor], config: ModelConfig, folder: Path) -> None:
    """Refuse parameters that are not those of the configuration's model. Raises ExportError."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in build_model(config).state_dict().items()}
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in expected]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ExportError(
            f"FOLDER {folder} does not hold the {config.model_type} of its config.json: {', '.join(wrong[:3])}{more}"
        )


if __name__ == "__main__":
    sys.exit(main())
