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
from safetensors.torch import save_file
from tokenizers import Tokenizer

from export.to_huggingface import Choices, export
from helpers.tiny_runs import TEXT, train_on
from model import LTGBert, ModelConfig
from model_extra import build_model
from training.checkpoint import give_name, write_checkpoint

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


def random_model(form: str, seed: int = 0, **sizes: int) -> LTGBert:
    """A model all of whose parameters matter: nothing is left at 0 or 1 as at the start of training."""
    config = ModelConfig(
        num_hidden_layers=3, num_attention_heads=2, vocab_size=VOCABULARY, max_position_embeddings=24,
        position_bucket_size=8, **FORMS[form], **({"hidden_size": 32, "intermediate_size": 48} | sizes),
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


# The revisions of `make_run`, with the step of each, which is the seed of its weights.
STEPS = {"step_00000003": 3, "chck_1M": 5, "chck_0.5e": 5, "chck_2M": 7, "step_00000012": 12, "main": 12}


def make_run(run: Path) -> Path:
    """Checkpoints of the steps 3, 5, 7 and 12 with other weights each; 5 has two names, 7 is weights alone."""
    for step, name in ((3, ""), (5, ""), (7, "chck_2M"), (12, "")):
        model = random_model("gpt-bert", seed=step)
        files = {"config.json": json.dumps(model.config.to_dict()), "tokenizer.json": tokenizer_text()}
        encoded = {key: text.encode() for key, text in files.items()}
        tensors = {"model": model.state_dict(), "ema": random_model("gpt-bert", seed=step + 100).state_dict()}
        path = write_checkpoint(run / "checkpoints", step, tensors, {"tokens": 0, "flags": {}}, encoded, name)
        if step == 5:
            give_name(path, "chck_1M")
            give_name(path, "chck_0.5e")
    return run


def make_exported(folder: Path, form: str, sentences: bool = False, **sizes: int) -> tuple[LTGBert, Path]:
    """A random model and its exported folder."""
    model = random_model(form, **sizes)
    export(make_checkpoint(folder / form, model), folder / form / f"exported-{form}", Choices(sentences=sentences))
    return model, folder / form / f"exported-{form}"


def padded_rows(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 40, 17 and 1 tokens (the first longer than the model's positions), padded on a side; and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.full((3, 40), PAD), torch.zeros(3, 40, dtype=torch.int64)
    for row, length in enumerate((40, 17, 1)):
        place = slice(40 - length, 40) if side == "left" else slice(0, length)
        ids[row, place] = torch.randint(16, 300, (length,), generator=generator)
        ids[row, 40 - length if side == "left" else 0] = BOS
        mask[row, place] = 1
    return ids, mask


def greedy(model: LTGBert, row: list[int], count: int) -> list[int]:
    """Token ids and their most probable continuation by our model, without special tokens but </s>."""
    row = list(row)
    for _ in range(count):
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model.predict(model.encode(ids, torch.zeros_like(ids), True)[0, -1])
        logits[[*range(EOS), *range(EOS + 1, 16)]] = -torch.inf
        row.append(int(logits.argmax()))
        if row[-1] == EOS:
            break
    return row


@torch.no_grad()
def write_expected(model: LTGBert, folder: Path) -> None:
    """expected.safetensors of an exported folder, for tests/environments/: what our own code computes."""
    known = {}
    for side in ("left", "right"):
        ids, mask = padded_rows(side)
        hidden, causal = (model.encode(ids, torch.where(mask.bool(), 0, -1), kind) for kind in (False, True))
        known |= {f"{side}/ids": ids, f"{side}/mask": mask, f"{side}/hidden": hidden, f"{side}/causal": causal}
        known |= {f"{side}/masked_logits": model.predict(hidden), f"{side}/causal_logits": model.predict(causal)}
    prompt = [BOS, *Tokenizer.from_str(tokenizer_text()).encode("The function returns the length of the list.").ids]
    known["greedy"] = torch.tensor(greedy(model, prompt, 12)[len(prompt) :])
    save_file({key: value.contiguous() for key, value in known.items()}, folder / "expected.safetensors")


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
