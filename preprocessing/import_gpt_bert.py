"""Import of the published GPT-BERT project's files: tokenised corpora and checkpoints.

    python preprocessing/import_gpt_bert.py data --input train.bin... --output shards/ --tokenizer_path tokenizer.json
    python preprocessing/import_gpt_bert.py checkpoint --input model.bin --config_file base.json --output checkpoint/

Corpora are lists of int16 tensors, one per document, as torch.save writes them. `<s>`, `</s>` and `<pad>` at either end
of a document are taken off, since the loader puts its own there. Special ids inside a document stay and are counted:
they are part of the text as its makers tokenised it, and the loader never masks or replaces them. Documents that are
empty after that are dropped.

Checkpoints are a plain state dict, the one of averaged (EMA) weights, or a whole training state with "model" (and
perhaps "ema_model"). Parameters keep their names and become float32; `position_indices` and the second name of the tied
word table go. The result is a folder of the form that training writes, except that training cannot be resumed from it.

Everything is loaded with weights_only=True, so a file can bring data but run nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from data.atomic_io import sync_folder, write_atomically
from data.cli import Parser
from data.shards import sha256_file, token_dtype, tokenizer_hash
from data.special_tokens import read_special_tokens
from data.wording import count
from preprocessing.cli import CommandError, add_shard_flags, run
from preprocessing.inputs import InputFile
from preprocessing.resumable_output import FolderPlan, OutputFolder
from preprocessing.slices import EncodedChunk
from preprocessing.tokenizer import load_tokenizer, roles_to_record, special_ids, vocabulary_size

if TYPE_CHECKING:
    import torch

_BATCH = 1000  # documents
_SAVE_SECONDS = 10.0
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_WORDS, _TIED = "embedding.word_embedding.weight", "classifier.nonlinearity.5.weight"


def load_published(path: Path) -> Any:
    """What torch.save wrote, on the CPU, mapped rather than read where the format allows. Raises CommandError."""
    import pickle

    import torch

    if not path.is_file():
        raise CommandError(f"--input {path} does not exist or is no file")
    try:
        # A training state may hold its command-line arguments; a Namespace of plain values can do no harm.
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # torch.save's old format has no maps
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise CommandError(f"--input {path} is not a file of plain tensors and is not loaded ({reason})") from None
    except (RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["it ends too early"])[0]
        raise CommandError(f"--input {path} is damaged or not a file of torch.save ({reason}); copy it again") from None


# ------------------------------------------------------------------------------------------------------------ data


def import_data(
    inputs: Sequence[Path],
    output: Path,
    tokenizer_path: Path,
    shard_size: int,
    overwrite: bool,
    progress: bool = False,
    special_tokens: str = "",
) -> dict[str, int] | None:
    """Token files to a shard folder; counts of what was found, or None if the folder was complete already.

    Raises CommandError naming file and document for anything that is not a list of documents of this tokenizer."""
    tokenizer = load_tokenizer(tokenizer_path)
    digest = tokenizer_hash(tokenizer_path)
    ends = sorted(read_special_tokens(tokenizer_path, special_tokens).ends)
    for path in inputs:
        if not path.is_file():
            raise CommandError(f"--input {path} does not exist or is no file")
    found = [(path, path.stat()) for path in inputs]
    files = [InputFile(path, path.name, "gpt-bert", "", stat.st_size, stat.st_mtime_ns) for path, stat in found]
    plan = FolderPlan(
        folder=output,
        files=tuple(files),
        tokenizer_path=tokenizer_path,
        tokenizer_hash=digest,
        vocab_size=vocabulary_size(tokenizer),
        shard_size=shard_size,
        options={
            "script": "preprocessing/import_gpt_bert.py",
            "shard_size": shard_size,
            **roles_to_record(tokenizer_path, special_tokens),
        },
    )
    folder = OutputFolder(plan)
    with folder.making(0, _SAVE_SECONDS, overwrite) as slices:
        if slices is None:
            return None
        if not slices.progress.complete:
            slices.write(_encoded(inputs, slices.progress.position, tokenizer, plan.vocab_size, ends, progress))
    totals = folder.assemble()
    if totals is None:
        return None
    if not any(totals.shards):
        raise CommandError(f"--input holds no tokens in {count(len(inputs), 'file')}; check --input")
    sums = {key: sum(getattr(shard, key) for shard in totals.shards[0]) for key in ("documents", "words", "tokens")}
    return {**sums, **totals.counts}


def _encoded(
    inputs: Sequence[Path],
    position: Mapping[str, int],
    tokenizer: Tokenizer,
    vocab_size: int,
    ends: list[int],
    progress: bool,
) -> Iterator[EncodedChunk]:
    """Documents behind a position, without the ends of the published format."""
    specials = np.array(special_ids(tokenizer))
    for number in range(position.get("file", 0), len(inputs)):
        path, documents = inputs[number], load_published(inputs[number])
        if not isinstance(documents, list):
            raise CommandError(
                f"--input {path} holds a {type(documents).__name__}, not a list of documents (1-D tensors)"
            )
        start = position.get("document", 0) if number == position.get("file", 0) else 0
        for first in tqdm(range(start, len(documents), _BATCH), unit="batch", desc=path.name, disable=not progress):
            batch = documents[first : first + _BATCH]
            ids = [_checked(path, first + index, ids, vocab_size) for index, ids in enumerate(batch)]
            kept = [inner for document in ids if len(inner := _without_ends(document, ends))]
            tokens = np.concatenate(kept) if kept else np.empty(0, np.int64)
            texts = tokenizer.decode_batch([document.tolist() for document in kept], skip_special_tokens=True)
            yield EncodedChunk(
                tokens=tokens.astype(token_dtype(vocab_size)),
                lengths=np.array([len(document) for document in kept], np.int64),
                words=np.array([len(text.split()) for text in texts], np.int64),
                validation=np.zeros(len(kept), bool),
                position={"file": number, "document": first + len(batch)},
                counts={
                    "empty_documents": len(batch) - len(kept),
                    "stripped_tokens": sum(map(len, ids)) - len(tokens),
                    "special_tokens": int(np.isin(tokens, specials).sum()),
                },
            )


def _checked(path: Path, number: int, document: Any, vocab_size: int) -> np.ndarray:
    """Token ids of one document as int64. Raises CommandError."""
    import torch

    where = f"--input {path}, document {number}"
    if not isinstance(document, torch.Tensor) or document.ndim != 1 or document.is_floating_point():
        found = f"{document.dtype} {list(document.shape)}" if isinstance(document, torch.Tensor) else type(document)
        raise CommandError(f"{where}: expected a 1-D tensor of token ids, found {found}")
    ids = document.to(torch.int64).numpy()
    if ids.size and ids.min() < 0:
        raise CommandError(
            f"{where}: id {ids.min()} is negative, as ids above 32,767 become in int16, so the file cannot be used; "
            "tokenize the text again with tokenize_corpus.py"
        )
    if ids.size and ids.max() >= vocab_size:
        raise CommandError(
            f"{where}: id {ids.max()} is not in the tokenizer's {vocab_size} ids; give --tokenizer_path "
            "the tokenizer that the file was made with"
        )
    return ids


def _without_ends(ids: np.ndarray, ends: list[int]) -> np.ndarray:
    inside = np.flatnonzero(~np.isin(ids, ends))
    return ids[inside[0] : inside[-1] + 1] if len(inside) else ids[:0]


# ----------------------------------------------------------------------------------------------------- checkpoints


def state_dicts(content: Any, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """Weights and, where the file has them, averaged weights, under plain names. Raises CommandError."""
    import torch

    if not isinstance(content, Mapping):
        raise CommandError(f"--input {path} holds a {type(content).__name__}, not a state dict")
    model, ema = content, None
    if isinstance(content.get("model"), Mapping):
        model, ema = content["model"], content.get("ema_model")
    result: list[dict[str, torch.Tensor] | None] = []
    for state in (model, ema):
        if state is None:
            result.append(None)
            continue
        strange = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
        if strange or not state:
            raise CommandError(f"--input {path} is not a state dict: '{(strange or ['it'])[0]}' holds no tensor")
        result.append(_plain(state, path))
    assert result[0] is not None
    return result[0], result[1]


def _plain(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Without wrappers' prefixes, derived buffers and the word table's second name; float32."""
    import torch

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


# ---------------------------------------------------------------------------------------------------- command line


def command(arguments: argparse.Namespace) -> int:
    if arguments.kind == "checkpoint":
        paths = (arguments.ema_input, arguments.tokenizer_path)
        written = import_checkpoint(arguments.input, arguments.config_file, arguments.output, *paths)
        for name, number in written.items():
            print(f"wrote {arguments.output / name}: {number:,} parameters")
        if arguments.tokenizer_path is None:
            print("note: evaluation needs the tokenizer there too; --tokenizer_path puts it beside the weights")
        return 0
    progress = sys.stderr.isatty()
    inputs = (arguments.input, arguments.output, arguments.tokenizer_path)
    counts = import_data(*inputs, arguments.shard_size, arguments.overwrite, progress, arguments.special_tokens)
    if counts is None:
        print(f"{arguments.output} is complete already, from the same inputs and options: nothing to do")
        return 0
    print(", ".join(count(counts[f"{noun}s"], noun) for noun in ("document", "word", "token")))
    print(f"dropped: {count(counts['empty_documents'], 'empty document')}")
    print(f"dropped: {counts['stripped_tokens']:,} <s>, </s> and <pad> at ends")
    print(f"kept: {count(counts['special_tokens'], 'special id')} inside documents (never masked in training)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Import files of the published GPT-BERT project.")
    commands = parser.add_subparsers(dest="kind", required=True, metavar="data|checkpoint", parser_class=Parser)
    data = commands.add_parser(
        "data", help="tokenised corpora to token shards", description="Import tokenised corpora."
    )
    data.add_argument("--input", nargs="+", required=True, type=Path, metavar="FILE", help="files of int16 tensors")
    add_shard_flags(data, "tokenizer.json that made the files", validation=False)
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
