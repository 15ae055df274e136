"""Models of every form that this suite writes: run folders, checkpoints and folders of the transformers library."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from data.special_tokens import SpecialTokens, roles_beside, special_tokens
from export.hf_format import is_exported, read_exported
from model import ModelConfig
from model_extra import build_model
from model_protocol import PretrainingModel
from training.checkpoint import CheckpointError, locate, training_flags


def load_model(
    path: str | Path, ema: bool | str = False, device: str | torch.device = "cpu"
) -> tuple[PretrainingModel, Tokenizer, ModelConfig]:
    """Model (in evaluation mode), tokenizer and ModelConfig of a run folder, a checkpoint or an exported folder. `ema`
    takes the averaged weights, or a further average by its name. Raises CheckpointError."""
    if is_exported(Path(path)):
        if ema:
            raise CheckpointError(
                f"{path} holds one set of weights; export the averaged ones with --ema or --average, then use those"
            )
        config, tensors, text = read_exported(Path(path))
        tokenizer = Tokenizer.from_str(text)
    else:
        checkpoint = locate(path)
        config = ModelConfig.from_json(checkpoint.path / "config.json")
        tensors = checkpoint.weights(ema)
        tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    model = build_model(config)
    model.load_state_dict(tensors)
    return model.to(device).eval(), tokenizer, config


def load_special_tokens(path: str | Path, tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens of the model at `path` with its tokenizer, as it was trained. Raises ShardError."""
    flags, beside = training_flags(Path(path)), roles_beside(Path(path))
    given, below = flags.get("special_tokens") or "", flags.get("n_special_tokens") or 0
    return special_tokens(tokenizer.to_str(), given, below, beside=beside, where=f"the tokenizer of {path}")
