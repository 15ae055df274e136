"""Turn a trained model into a folder that the transformers library loads, without this repository.

    python export/to_huggingface.py MODEL OUT [--native] [--ema] [--license mit] [--language en] [--push USER/NAME]
    python export/to_huggingface.py RUN OUT --all_checkpoints [--push USER/NAME or the address of a git repository]

OUT holds the weights (safetensors), a configuration, the code of the model, the tokenizer, and a model card written
from the run's records. `trust_remote_code=True` lets transformers run that code. With --native no code is needed: the
folder is that of a class of transformers' own, where the shape allows (export/native.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import sync_folder, take_folder_mode
from data.cli import Parser, run_command
from data.results import ResultFile, given_results, read_results
from data.shards import ShardError
from data.special_tokens import SpecialTokens
from export.hf_format import TOKENIZER_NOTE, adapt_tokenizer, is_exported
from export.load_model import load_model, load_special_tokens
from export.model_card import NOTHING_STATED, Stated, longest_row, model_card, read_records
from export.native import NativeForm, native_form
from export.push import PushError, check_hub, push
from export.revisions import GitError, Revision, find_revisions, is_git_address, push_revisions, write_revisions
from export.sentence_files import write_sentence_files
from model import LTGBert, ModelConfig, ModelConfigError
from model_config import PUBLISHED_KEYS
from training.checkpoint import Checkpoint, CheckpointError, locate, rows_begin_with_bos

_SHIPPED = tuple(f"{name}_gpt_bert.py" for name in ("attention", "base", "configuration", "layers", "modeling"))


class ExportError(ValueError):
    """The folder cannot be written or uploaded; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Choices:
    """What is exported and how. ema: the averaged weights, or a further average by its name. name: how the model card
    calls the model (default: the run's name). native: as a class of transformers' own. sentences: also as a model of
    sentence-transformers."""

    ema: bool | str = False
    name: str = ""
    stated: Stated = NOTHING_STATED
    native: bool = False
    sentences: bool = False


DEFAULTS = Choices()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("Write a model in the form of the transformers library.")
    parser.add_argument("model", metavar="MODEL", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    parser.add_argument("--ema", action="store_true", help="export the averaged weights (default: the trained weights)")
    text = "export a further average of the weights: 0.9999 of --ema_decay 0.999,0.9999, or tail (--tail_average)"
    parser.add_argument("--average", dest="ema", default=argparse.SUPPRESS, metavar="NAME", help=text)
    parser.add_argument(
        "--native", action="store_true",
        help="as the class that transformers has for this model_type, such as ModernBertForMaskedLM, which other "
        "programs know and which needs no code of ours; refused where that class is another model",
    )  # fmt: skip
    parser.add_argument(
        "--sentence_transformers", action="store_true",
        help="also write modules.json and what it names, by which OUT is a model of sentence-transformers with mean "
        "pooling, cut at the longest row of training",
    )  # fmt: skip
    parser.add_argument(
        "--all_checkpoints", action="store_true",
        help="make OUT a git repository in which every checkpoint of the run is a branch, such as chck_10M, for "
        "from_pretrained(..., revision=); main is the newest",
    )  # fmt: skip
    parser.add_argument(
        "--push", default="", metavar="USER/NAME",
        help="also upload to this repository of the Hugging Face Hub, which is made private where it is new; with "
        "--all_checkpoints also the path or URL of a git repository, such as /srv/model.git",
    )  # fmt: skip
    parser.add_argument(
        "--license", default="", metavar="NAME",
        help="for the model card: the Hub's name of a license, such as apache-2.0 (default: none is stated)",
    )  # fmt: skip
    parser.add_argument(
        "--language", nargs="+", default=[], metavar="CODE",
        help="for the model card: ISO 639 codes of the languages of the texts, such as en (default: none is stated)",
    )  # fmt: skip
    parser.add_argument("--author", nargs="+", default=[], metavar="NAME", help="for the model card: who made it")
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[], metavar="PATH",
        help="for the model card: files of results of evaluation/, or folders of them, beside those in the run folder "
        "and its evaluation/",
    )  # fmt: skip
    parser.add_argument(
        "--watts", type=float, default=0.0, metavar="W",
        help="for the card's footprint: what a device drew (default: its limit by the data sheet, where known)",
    )  # fmt: skip
    parser.add_argument(
        "--grams_per_kwh", type=float, default=0.0, metavar="G",
        help="for the card's footprint: CO2-equivalent of the place's electricity (default: 480, the world's mean)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse_arguments(arguments)
    errors = (ExportError, PushError, GitError, CheckpointError, ModelConfigError, ShardError)
    return run_command(lambda: write_and_push(options), *errors)


def write_and_push(options: argparse.Namespace) -> None:
    """Write OUT, and upload it where that is asked for. Raises what `main` names."""
    stated = Stated(
        options.license, tuple(options.language), tuple(options.author), options.watts, options.grams_per_kwh,
        tuple(file for path in options.results for file in given_results(path)),
    )  # fmt: skip
    check_stated(stated, options.model)
    to_git = options.all_checkpoints and is_git_address(options.push)
    if options.push and not to_git:
        check_hub(options.push)
    name = "" if to_git else options.push
    chosen = Choices(options.ema, name, stated, options.native, options.sentence_transformers)
    if options.all_checkpoints:
        revisions = export_all(options.model, options.output, chosen)
        names = [branch for revision in revisions for branch in revision.names]
        print(f"{options.output} is a git repository; branches: {', '.join(names)}; main is the last")
    else:
        export(options.model, options.output, chosen)
    how = "needs no code of ours" if options.native else "loads it with trust_remote_code=True"
    print(f"{options.output} is ready: transformers {how}", flush=True)
    if options.push:
        address = push_revisions(options.output, options.push) if to_git else ""
        print(f"uploaded to {address or push(options.output, options.push, say=print)}")


def export(model_path: str | Path, output: Path, chosen: Choices = DEFAULTS) -> None:
    """Write `output`, whole or not at all. Raises ExportError, CheckpointError or ModelConfigError."""
    check_output(output)
    with writing(output) as (temporary, finish):
        _export_into(temporary, model_path, chosen, chosen.name or output.name)
        finish(temporary)


def export_all(run: str | Path, output: Path, chosen: Choices = DEFAULTS) -> list[Revision]:
    """Write `output`, a git repository with a branch for each checkpoint of a run, whole or not at all. Raises
    ExportError, GitError, CheckpointError or ModelConfigError."""
    check_output(output)
    revisions, place = find_revisions(Path(run)), chosen.name or output.name
    with writing(output) as (temporary, finish):
        write_revisions(temporary, revisions, lambda path, to: _export_into(to, path, chosen, place))
        finish(temporary)
    return revisions


def _export_into(folder: Path, model_path: str | Path, chosen: Choices, place: str) -> None:
    """All files of an exported model, which the model card's examples find at `place`."""
    if is_exported(Path(model_path)):
        raise ExportError(f"MODEL {model_path} is an exported folder already; give the run or checkpoint, or copy it")
    checkpoint = locate(model_path)
    model, tokenizer, _ = load_model(checkpoint.path, ema=chosen.ema)
    if not isinstance(model, LTGBert):
        raise ExportError(f"MODEL {checkpoint.path} is a {model.config.model_type}, for which transformers has no code")
    form = _form(model.config, checkpoint.path, chosen.native)
    special = load_special_tokens(checkpoint.path, tokenizer)
    special.require(("bos", "pad", "mask"), f"the tokenizer of {checkpoint.path}")
    write_files(folder, checkpoint, model, special, chosen, place, form)
    if chosen.sentences:
        write_sentence_files(folder, place)


def _form(config: ModelConfig, path: Path, native: bool) -> NativeForm | None:
    """The form of transformers' own to write, None for that of the code we ship. Raises ExportError."""
    form = native_form(config.model_type)
    if not native:
        if keys := config.unpublished_keys():
            raise ExportError(
                f"MODEL {path} is no GPT-BERT or LTG-BERT as published, which the exported code alone knows, by its "
                f"{', '.join(keys[:4])}" + "; try --native" * (form is not None)
            )
        return None
    if form is None:
        raise ExportError(f"--native: transformers has no class for a {config.model_type}; leave it out")
    if problem := form.native_problem(config):
        raise ExportError(f"--native: MODEL {path} is no {form.TRANSFORMERS_CLASS}: {problem}")
    return form


@contextmanager
def writing(output: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A folder to write into, and what makes it, or a folder in it, `output`, which is written whole or not at all.
    Call `check_output` first. Raises ExportError where the disk refuses."""
    temporary = output.with_name(f".{output.name}.partial")

    def finish(folder: Path) -> None:
        if output.exists():
            output.rmdir()  # empty, by check_output
        os.rename(folder, output)
        sync_folder(output.parent)

    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary, finish
    except OSError as error:
        raise ExportError(f"OUT {output} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(output: Path) -> None:
    """Refuse a folder that holds something. Raises ExportError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"OUT {output} exists already; give a new folder, or remove it first")


def check_stated(stated: Stated, model: str) -> None:
    """Refuse what the Hub's metadata cannot hold, and results of another model. Raises ExportError."""
    run = ResultFile("", model, "", ()).run_folder.resolve()
    for path in stated.results:
        found = read_results(path)
        if found is None:
            raise ExportError(f"--results {path}: holds no results of the scripts in evaluation/ (their --output)")
        if found.run_folder.resolve() != run and found.run_folder.name != run.name:
            raise ExportError(f"--results {path}: is of model {found.model}, and MODEL is {model}")
    if stated.watts < 0 or stated.grams < 0:
        raise ExportError(f"--watts is {stated.watts:g} and --grams_per_kwh {stated.grams:g}: give numbers above 0")
    if any(not name.strip() or set("{}\n") & set(name) for name in stated.authors):
        raise ExportError(f"--author {' '.join(stated.authors)!r}: give names, each in quotes")
    if stated.license and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", stated.license):
        raise ExportError(f"--license {stated.license!r} is none of the Hub's names, such as apache-2.0 or cc-by-4.0")
    for code in stated.languages:
        if not re.fullmatch(r"[a-z]{2,3}", code):
            raise ExportError(f"--language {code!r} is no ISO 639 code of two or three small letters, such as en")


def write_files(
    folder: Path,
    checkpoint: Checkpoint,
    model: LTGBert,
    special: SpecialTokens,
    chosen: Choices,
    place: str,
    form: NativeForm | None,
) -> None:
    """All files of an exported model; place: for the model card. form: as `_form` returns it."""
    from safetensors.torch import save_file

    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    tensors = tensors if form is None else form.their_parameters(tensors, model.config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    take_folder_mode(folder / "model.safetensors")
    text, note = adapt_tokenizer((checkpoint.path / "tokenizer.json").read_text(encoding="utf-8"), special)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    records = read_records(checkpoint, chosen.stated)
    flags = records.run.get("flags") or checkpoint.record.get("flags") or {}
    config = model.config.to_dict()
    roles = {f"{role}_token": token for role, token in special.tokens.items()}
    contents = {
        "config.json": {
            **(model_configuration(config) if form is None else form.native_configuration(model.config)),
            **_for_continuing(special, note, flags),
        },
        "generation_config.json": generation_configuration(special),
        "tokenizer_config.json": {
            **tokenizer_configuration(max(config["max_position_embeddings"], longest_row(flags))),
            **roles,
        },
        "special_tokens_map.json": roles,
    }
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    title = chosen.name or flags.get("name") or checkpoint.path.name
    native = "" if form is None else form.TRANSFORMERS_CLASS
    about = (config, model.num_parameters(), special.tokens, chosen.ema, records, chosen.stated, native)
    card = model_card(title, place, *about)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in _SHIPPED if form is None else ():
        shutil.copyfile(Path(__file__).with_name(file), folder / file)


def model_configuration(config: dict[str, Any]) -> dict[str, Any]:
    """config.json: ModelConfig's keys, and where transformers finds the code."""
    config = {key: config[key] for key in PUBLISHED_KEYS}
    prefix = "GPTBert" if config["model_type"] == "gpt-bert" else "LTGBert"
    classes = {
        "AutoModel": "Model",
        "AutoModelForMaskedLM": "ForMaskedLM",
        "AutoModelForCausalLM": "ForCausalLM",
        "AutoModelForSequenceClassification": "ForSequenceClassification",
        "AutoModelForTokenClassification": "ForTokenClassification",
        "AutoModelForQuestionAnswering": "ForQuestionAnswering",
        "AutoModelForMultipleChoice": "ForMultipleChoice",
        "AutoModelForPreTraining": "ForCausalLM",
    }
    return {
        **config,
        # `transformers serve` looks the first name up in transformers itself, which has no class of ours but this way
        # to one that generates. Other libraries take a first name that ends in ForCausalLM for a decoder: embeddings
        # would be those of the last token. The second name is what is in the file.
        "architectures": ["AutoModelForPreTraining", f"{prefix}ForMaskedLM"],
        "auto_map": {
            "AutoConfig": f"configuration_gpt_bert.{prefix}Config",
            **{auto: f"modeling_gpt_bert.{prefix}{name}" for auto, name in classes.items()},
        },
        "tie_word_embeddings": True,
    }


def _for_continuing(special: SpecialTokens, note: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of config.json that continued pretraining must know."""
    return {
        **_token_ids(special),
        "mask_token_id": special.ids["mask"],
        "dtype": "float32",
        "flags": {
            "document_end": bool(flags.get("document_end", True)),
            "row_start": rows_begin_with_bos(flags),
            "special_tokens": str(special),
            "n_special_tokens": flags.get("n_special_tokens") or 0,
        },
        TOKENIZER_NOTE: note,
    }


def _token_ids(special: SpecialTokens) -> dict[str, int | None]:
    return {f"{role}_token_id": special.ids.get(role) for role in ("bos", "eos", "pad")}


def generation_configuration(special: SpecialTokens) -> dict[str, Any]:
    """generation_config.json. As in evaluation/generate.py, no special token but </s> is ever written."""
    return {**_token_ids(special), "suppress_tokens": sorted(set(special.special_ids) - {special.ids.get("eos")})}


def tokenizer_configuration(longest: int) -> dict[str, Any]:
    """tokenizer_config.json.

    Padding stands on the right, so that states [:, 0] are those of <s>: on the left, where generation needs it, that is
    silently wrong. Pipelines of transformers 5 and lm-eval turn it themselves, and generate() refuses the other side.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


if __name__ == "__main__":
    sys.exit(main())
