"""Small runs for tests: a corpus, a tokenizer, shards and a tiny model in a folder, and training in processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.shards import tokenizer_hash, write_shard
from helpers.forked import Forked
from preprocessing.tokenizer import ALPHABET, SPECIAL_TOKENS, new_tokenizer
from training.metric_logger import read_metrics

ROOT = Path(__file__).resolve().parents[2]
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", *(f"<special_{i}>" for i in range(11))]
_WORDS = ("the", "cat", "dog", "sees", "runs", "to", "a", "tree", "and", "sleeps", "near", "old", "house", "by", "day")
VOCABULARY = 320
TEXT = "The function returns the length of the list. The list holds é, naïve and 東京 words. " * 20


def make_texts(count: int, seed: int) -> list[str]:
    """Documents in which words follow each other by rule, so that a model can learn something."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        place, words = generator.randrange(len(_WORDS)), []
        for _ in range(generator.randrange(4, 60)):
            words.append(_WORDS[place])
            place = (place * 2 + generator.choice((1, 1, 1, 4))) % len(_WORDS)
        texts.append(" ".join(words))
    return texts


def train_on(text: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of this project's kind for one text; special tokens in a text are text."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=list(ALPHABET), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def make_inputs(folder: Path, documents: int = 600, dropout: float = 0.1, **model) -> Path:
    """tokenizer.json, train/, valid/ and model.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = make_texts(documents, seed=1)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    words = tokenizer.get_vocab_size()
    key = tokenizer_hash(folder / "tokenizer.json")
    for name, part in (("train", texts), ("valid", make_texts(60, seed=2))):
        (folder / name).mkdir(exist_ok=True)
        encoded = [np.array(tokenizer.encode(text).ids) for text in part]
        half = len(encoded) // 2
        for number, piece in enumerate((encoded[:half], encoded[half:])):
            write_shard(folder / name / f"part_{number}.shard", piece, tokenizer_hash=key, vocab_size=words)
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": words,
        "max_position_embeddings": 64,
        "position_bucket_size": 8,
        "attention_probs_dropout_prob": dropout,
        "hidden_dropout_prob": dropout,
        "layer_norm_eps": 1e-5,
        **model,
    }
    (folder / "model.json").write_text(json.dumps(config))
    return folder


def flags(inputs: Path, output: Path, name: str = "run", **options) -> list[str]:
    """Command-line flags of a short run in fp32 with dropout and both schedules moving."""
    values = {
        "train_path": str(inputs / "train" / "*.shard"),
        "valid_path": str(inputs / "valid" / "*.shard"),
        "config_file": inputs / "model.json",
        "tokenizer_path": inputs / "tokenizer.json",
        "output_dir": output,
        "name": name,
        "hybrid_numerator": 3,
        "hybrid_denominator": 4,
        "seq_length": 16,
        "global_batch_size": 64,
        "batch_reduction": 2,
        "local_batch_size": 16,
        "max_steps": 30,
        "learning_rate": 1e-2,
        "warmup_proportion": 0.1,  # as in real runs: Adam's very first step turns rounding errors into whole steps
        "validate_every": 15,
        "save_every": 10,
        "validation_samples": 0,  # a second or two of each validation
        "device": "cpu",
        "wandb_mode": "disabled",
        **options,
    }
    result = []
    for key, value in values.items():
        if value is True or value is False:
            result.append(f"--{key}" if value else f"--no-{key}")
        else:
            result.append(f"--{key}={value}")
    return result


def command(arguments: list[str], ranks: int = 0, script: Path | None = None) -> list[str]:
    """The command of a run: 0 ranks is train_single_gpu.py, others train_multi_gpu.py under torchrun; or `script`."""
    if ranks == 0:
        return [sys.executable, str(script or ROOT / "train_single_gpu.py"), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(script or ROOT / "train_multi_gpu.py"), *arguments]


def environment() -> dict[str, str]:
    """One thread per rank, whatever the launcher of the tests has set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("SLURM")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run(
    arguments: list[str], ranks: int = 0, check: bool = True, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Train to the end, in forked processes where possible: ranks as torchrun starts them, whose exit code is 1.

    A GPU's driver cannot be forked, and a copy of the suite has modules of its own.
    """
    own = script is not None and (script.parent / "training").is_dir() and script.parent != ROOT
    if own or "--device=cpu" not in arguments:
        words = command(arguments, ranks, script)
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    else:
        ended = start(arguments, ranks, script).finish()
        code = int(any(each.code for each in ended)) if ranks else ended[0].code
        printed = ("".join(each.stdout for each in ended), "".join(each.stderr for each in ended))
        done = subprocess.CompletedProcess(arguments, code, *printed)
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def start(arguments: list[str], ranks: int = 0, script: Path | None = None) -> Forked:
    """A run in forked processes; ranks have the variables and the store that torchrun would give them."""
    words = [str(script or ROOT / f"train_{'multi' if ranks else 'single'}_gpu.py"), *arguments]
    if not ranks:
        return Forked(words, [environment()])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    return Forked(words, [{**environment(), **common, **each} for each in own], store)


def training_lines(folder: Path) -> list[dict]:
    """The training lines of a run's metrics, in order."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]


def refusal(capsys: pytest.CaptureFixture[str], script: Callable[..., int], *arguments: object) -> str:
    """The one sentence on standard error with which `script` refuses arguments."""
    capsys.readouterr()
    assert script(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1, f"not one sentence: {error}"
    return error
