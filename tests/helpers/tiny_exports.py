"""Small random models as checkpoints and exported folders, for the tests of export/."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from export.to_huggingface import export
from helpers.tiny_runs import TEXT, train_on
from model import LTGBert, ModelConfig
from model_extra import build_model
from training.checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAD, BOS, EOS, MASK = 3, 1, 2, 4
VOCABULARY = 320  # at most so many words
FORMS = {
    "gpt-bert": {"model_type": "gpt-bert"},
    "ltg-bert": {"model_type": "ltg-bert"},
    "gpt-bert-rope": {"model_type": "gpt-bert", "position_embedding": "rope"},
    "ltg-bert-rope": {"model_type": "ltg-bert", "position_embedding": "rope"},
}


def tokenizer_text() -> str:
    """A tokenizer.json as preprocessing/train_tokenizer.py makes it."""
    return train_on(TEXT, VOCABULARY).to_str()


def random_model(form: str, seed: int = 0) -> LTGBert:
    """A model all of whose parameters matter: nothing is left at 0 or 1 as at the start of training."""
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, vocab_size=VOCABULARY,
        max_position_embeddings=24, position_bucket_size=8, **FORMS[form],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = build_model(config, generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def make_checkpoint(parent: Path, model: LTGBert, ema: LTGBert | None = None) -> Path:
    """A checkpoint as training writes it, without the optimizer."""
    tensors = {"model": model.state_dict(), **({"ema": ema.state_dict()} if ema else {})}
    files = {"config.json": json.dumps(model.config.to_dict()).encode(), "tokenizer.json": tokenizer_text().encode()}
    return write_checkpoint(parent / "checkpoints", 7, tensors, {"tokens": 0, "flags": {}}, files)


def make_exported(folder: Path, form: str) -> tuple[LTGBert, Path]:
    """A random model and its exported folder."""
    model = random_model(form)
    export(make_checkpoint(folder / form, model), folder / form / f"exported-{form}")
    return model, folder / form / f"exported-{form}"


@cache
def library() -> Any:
    """transformers, which copies the code of what it loads into a folder."""
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf-modules-")
    return pytest.importorskip("transformers", reason="needs transformers (requirements.lock has it)")


def load(auto: str, folder: Path, **options) -> Any:
    """`auto`.from_pretrained of an exported folder."""
    return getattr(library(), auto).from_pretrained(folder, trust_remote_code=True, **options)


def environment(folder: Path) -> dict[str, str]:
    """For programs that know nothing of this repository and have no network."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {
        **kept, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "TQDM_DISABLE": "1",
    }  # fmt: skip
