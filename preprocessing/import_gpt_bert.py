"""Import of the published GPT-BERT project's files: tokenised corpora and checkpoints.

    python preprocessing/import_gpt_bert.py data --input train.bin... --output shards/ --tokenizer_path tokenizer.json
    python preprocessing/import_gpt_bert.py checkpoint --input model.bin --config_file base.json --output checkpoint/

Corpora are lists of int16 tensors, one per document, as torch.save writes them; import_tokens.py says what becomes of
them.

Checkpoints are a plain state dict, the one of averaged (EMA) weights, or a whole training state with "model" (and
perhaps "ema_model"). Parameters keep their names and become float32; `position_indices` and the second name of the tied
word table go. The result is a folder of the form that training writes, except that training cannot be resumed from it.

Everything is loaded with weights_only=True, so a file can bring data but run nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import sync_folder, write_atomically
from data.cli import Parser
from data.shards import sha256_file
from preprocessing import import_tokens
from preprocessing.cli import CommandError, add_shard_flags, run
from preprocessing.token_readers import GPT_BERT, load_published
from preprocessing.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    import torch

_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_WORDS, _TIED = "embedding.word_embedding.weight", "classifier.nonlinearity.5.weight"


def state_dicts(content: Any, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """Weights and, where the file has them, averaged weights, under plain names. Raises CommandError."""
    if not isinstance(content, Mapping):
        raise CommandError(f"--input {path} holds a {type(content).__name__}, not a state dict")
    model, ema = content, None
    if isinstance(content.get("model"), Mapping):
        model, ema = content["model"], content.get("ema_model")
    return _plain(model, path), None if ema is None else _plain(ema, path)


def _plain(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Without wrappers' prefixes, derived buffers and the word table's second name; float32."""
    import torch

    strange = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if strange or not state:
        raise CommandError(f"--input {path} is not a state dict: '{(strange or ['it'])[0]}' holds no tensor")
    plain: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        while name.startswith(_PREFIXES):
            name = name.removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1])
        if not name.endswith("position_indices") and name != "n_averaged":
            plain[name] = value.to(torch.float32).contiguous() if value.is_floating_point() else value
    tied = plain.pop(_TIED, None)
    if tied is not None and _WORDS in plain and not torch.equal(tied, plain[_WORDS]):
        raise CommandError(f"--input {path}: {_TIED} differs from {_WORDS}, but the model has one table for both")
    return plain


def check_parameters(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any], path: Path, config_file: Path
) -> None:
    """Raises CommandError unless names and shapes are those of the model that the configuration describes."""
    import torch

    from model import ModelConfig
    from model_extra import build_model

    with torch.device("meta"):  # shapes without memory
        wanted = {
            name: value.shape for name, value in build_model(ModelConfig.from_dict(dict(config))).state_dict().items()
        }
    missing = sorted(set(wanted) - set(state))
    unknown = sorted(set(state) - set(wanted))
    if missing or unknown:
        has = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which the model has not"
        raise CommandError(
            f"{path} {has} ({len(missing)} missing, {len(unknown)} unknown); check num_hidden_layers and model_type in "
            f"--config_file {config_file}"
        )
    for name, shape in wanted.items():
        if state[name].shape != shape:
            raise CommandError(
                f"{path}: {name} has shape {list(state[name].shape)} where --config_file {config_file} asks for "
                f"{list(shape)}; give the configuration of this model"
            )


def read_config(path: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The model configuration, completed. Published ones do not say which model they are for: the weights do."""
    from model import ModelConfig, ModelConfigError

    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(given, dict) and "model_type" not in given:
            gated = any(".in_proj_vg." in name for name in state)
            given["model_type"] = "gpt-bert" if gated else "ltg-bert"
            return ModelConfig.from_dict(given).to_dict()
        return ModelConfig.from_json(path).to_dict()
    except ModelConfigError as error:
        raise CommandError(f"--config_file {path} cannot be used: {error}") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"--config_file {path} cannot be read ({error}); give the model's JSON") from None


def import_checkpoint(
    path: Path, config_file: Path, output: Path, ema_path: Path | None = None, tokenizer_path: Path | None = None
) -> dict[str, int]:
    """Writes a checkpoint folder; parameters (scalars) by file written. Raises CommandError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CommandError(f"--output {output} exists already; give a new folder")
    model, ema = state_dicts(load_published(path), path)
    if ema_path is not None:
        ema, _ = state_dicts(load_published(ema_path), ema_path)
    config = read_config(config_file, model)
    check_parameters(model, config, path, config_file)
    if ema is not None:
        check_parameters(ema, config, ema_path or path, config_file)
    if tokenizer_path is not None:
        size = vocabulary_size(load_tokenizer(tokenizer_path))
        if size > config["vocab_size"]:
            raise CommandError(
                f"--tokenizer_path {tokenizer_path} has {size} ids, more than the model's {config['vocab_size']}; give "
                "the model's own tokenizer"
            )
    files = {"model.safetensors": model, **({"ema.safetensors": ema} if ema is not None else {})}
    _write_checkpoint(output, files, config, tokenizer_path, path.name)
    return {name: sum(value.numel() for value in state.values()) for name, state in files.items()}


def _write_checkpoint(
    output: Path,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
    tokenizer_path: Path | None,
    origin: str,
) -> None:
    """The files, then checkpoint.json with their checksums as training/checkpoint.py reads it, which makes it valid."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise CommandError(
            "writing checkpoints needs a package that is not installed: pip install safetensors"
        ) from None
    output.mkdir(parents=True, exist_ok=True)
    for name, state in weights.items():
        write_atomically(output / name, save(dict(state)))
    write_atomically(output / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer_path is not None:
        write_atomically(output / "tokenizer.json", tokenizer_path.read_bytes())
    paths = sorted(output.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths}
    record = {"format": 1, "step": 0, "imported_from": origin, "files": files}
    write_atomically(output / "checkpoint.json", (json.dumps(record, indent=1) + "\n").encode())
    sync_folder(output.parent)


def command(arguments: argparse.Namespace) -> int:
    if arguments.kind == "checkpoint":
        paths = (arguments.ema_input, arguments.tokenizer_path)
        written = import_checkpoint(arguments.input, arguments.config_file, arguments.output, *paths)
        for name, number in written.items():
            print(f"wrote {arguments.output / name}: {number:,} parameters")
        if arguments.tokenizer_path is None:
            print("note: evaluation needs the tokenizer there too; --tokenizer_path puts it beside the weights")
        return 0
    return import_tokens.command(argparse.Namespace(**vars(arguments), format=GPT_BERT, document_end=None))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Import files of the published GPT-BERT project.")
    commands = parser.add_subparsers(dest="kind", required=True, metavar="data|checkpoint", parser_class=Parser)
    data = commands.add_parser(
        "data", help="tokenised corpora to token shards", description="Import tokenised corpora."
    )
    data.add_argument("--input", nargs="+", required=True, type=Path, metavar="FILE", help="files of int16 tensors")
    add_shard_flags(data, "tokenizer.json that made the files")
    model = commands.add_parser("checkpoint", help="weights to our format", description="Import a checkpoint.")
    model.add_argument("--input", required=True, type=Path, metavar="FILE", help="state dict or whole training state")
    model.add_argument("--ema_input", type=Path, metavar="FILE", help="state dict of the averaged weights")
    model.add_argument("--config_file", required=True, type=Path, metavar="FILE", help="model configuration (JSON)")
    model.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="checkpoint folder to write")
    model.add_argument(
        "--tokenizer_path", type=Path, metavar="FILE", help="tokenizer.json to put beside; evaluation needs it there"
    )
    return run(command, parser.parse_args(argv), "nothing unfinished has a final name; run the same again")


if __name__ == "__main__":
    sys.exit(main())
