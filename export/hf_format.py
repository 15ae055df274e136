"""Hugging Face format: folders of the transformers library, told apart from checkpoints and read back.

The tokenizer of an exported folder begins texts with `<s>` and lets `<mask>` take the space before it. Shards know
their tokenizer by a hash of its meaning, so what training used is noted in config.json and restored from there.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from model import ModelConfig, ModelConfigError
from training.checkpoint import RECORD, CheckpointError

TOKENIZER_NOTE = "pretraining_tokenizer"  # key of config.json


def is_exported(path: Path) -> bool:
    """Whether a folder has the form of the transformers library: its kind of configuration, and weights."""
    if (path / RECORD).exists() or not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        return False
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and ("auto_map" in values or "architectures" in values)


def read_exported(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], str]:
    """Configuration, weights and training's tokenizer.json of a folder that export/to_huggingface.py wrote.

    Also of one that transformers saved again, provided it still holds a language model. Raises CheckpointError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "model.safetensors")
        tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
        text = restore_tokenizer(tokenizer, values.get(TOKENIZER_NOTE))
        config = model_config(values)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"exported folder {path} cannot be read ({error}); export it again, or, where another program wrote it, "
            "convert it first: python export/from_huggingface.py FOLDER OUT"
        ) from None
    if not any(name.startswith("classifier.") for name in tensors):
        raise CheckpointError(
            f"exported folder {path} has no language modelling head (saved from another model class?)"
        )
    return config, tensors, text


def model_config(values: dict[str, Any]) -> ModelConfig:
    """ModelConfig from a config.json of transformers, which has more keys. Raises ModelConfigError."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if "model_type" not in values:
        raise ModelConfigError('key "model_type" is missing')
    return ModelConfig.from_dict({key: value for key, value in values.items() if key in known})


def adapt_tokenizer(text: str) -> tuple[str, dict[str, Any]]:
    """A tokenizer.json as transformers shall use it, and the note by which `restore_tokenizer` undoes that.

    A text becomes `<s> text`, a pair `<s> first </s> second </s>`. No `</s>` ends a single text: it may go on.
    """
    content = json.loads(text)
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    mask = next(token for token in content["added_tokens"] if token["content"] == "<mask>")
    note = {"post_processor": content.get("post_processor"), "mask_lstrip": mask["lstrip"]}

    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special("<s>"), first],
        "pair": [special("<s>"), first, special("</s>"), second, special("</s>")],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("<s>", "</s>")
        },
    }  # fmt: skip
    mask["lstrip"] = True  # a token holds the space before its word, so that space belongs to what fills the gap
    return json.dumps(content, ensure_ascii=False, indent=1), note


def restore_tokenizer(text: str, note: dict[str, Any] | None) -> str:
    """The tokenizer.json that training used; without a note (a foreign folder) the text as it is."""
    if note is None:
        return text
    content = json.loads(text)
    content["post_processor"] = note["post_processor"]
    for token in content["added_tokens"]:
        if token["content"] == "<mask>":
            token["lstrip"] = note["mask_lstrip"]
    return json.dumps(content, ensure_ascii=False, indent=1)
