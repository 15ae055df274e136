"""Hugging Face format: folders of the transformers library, told apart from checkpoints and read back.

The tokenizer of an exported folder begins texts with `<s>` and lets `<mask>` take the space before it. Shards know
their tokenizer by a hash of its meaning, so what training used is noted in config.json and restored from there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from data.special_tokens import SpecialTokens
from export.native import native_form
from model import ModelConfig, ModelConfigError
from model_config import PUBLISHED_KEYS
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
    """Configuration, weights under our names and training's tokenizer.json of a folder that to_huggingface.py wrote.
    Also of one that transformers saved again, provided it still holds a language model. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "model.safetensors")
        tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
        text = restore_tokenizer(tokenizer, values.get(TOKENIZER_NOTE))
        form = native_form(str(values.get("model_type")))
        config = model_config(values) if form is None else form.read_configuration(values)
        tensors = tensors if form is None else form.our_parameters(tensors, config)
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
    if "model_type" not in values:
        raise ModelConfigError('key "model_type" is missing')
    return ModelConfig.from_dict({key: value for key, value in values.items() if key in PUBLISHED_KEYS})


def adapt_tokenizer(text: str, special: SpecialTokens) -> tuple[str, dict[str, Any]]:
    """A tokenizer.json as transformers shall use it, and the note by which `restore_tokenizer` undoes that. A text
    becomes `<s> text`, a pair `<s> first </s> second </s>`. No `</s>` ends a single text: it may go on."""
    content = json.loads(text)
    bos = special.tokens["bos"]
    eos = special.tokens.get("eos", bos)
    before = {token["content"]: token for token in content["added_tokens"]}
    roles = {special.tokens[role]: number for role, number in special.ids.items()}
    changed = {name: before.get(name) for name in roles if name == special.tokens["mask"] or name not in before}
    note = {"post_processor": content.get("post_processor"), "added_tokens": changed}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in changed:
        # A token holds the space before its word, so that space belongs to what fills the gap.
        strip = {"lstrip": True} if name == special.tokens["mask"] else {}
        before[name] = {
            "id": roles[name],
            "content": name,
            **plain,
            **(before.get(name) or {}),
            **strip,
            "special": True,
        }
    content["added_tokens"] = sorted(before.values(), key=lambda token: token["id"])

    def part(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [part(bos), first],
        "pair": [part(bos), first, part(eos), second, part(eos)],
        "special_tokens": {name: {"id": name, "ids": [roles[name]], "tokens": [name]} for name in (bos, eos)},
    }
    content["truncation"] = content["padding"] = None
    return json.dumps(content, ensure_ascii=False, indent=1), note


def restore_tokenizer(text: str, note: dict[str, Any] | None) -> str:
    """The tokenizer.json that training used; without a note (a foreign folder) the text as it is."""
    if note is None:
        return text
    content = json.loads(text)
    content["post_processor"] = note["post_processor"]
    changed = note.get("added_tokens", {})
    tokens = (changed.get(token["content"], token) for token in content["added_tokens"])
    content["added_tokens"] = [token for token in tokens if token is not None]
    for token in content["added_tokens"]:
        if token["content"] == "<mask>" and "mask_lstrip" in note:  # as notes were before other tokenizers
            token["lstrip"] = note["mask_lstrip"]
    return json.dumps(content, ensure_ascii=False, indent=1)
