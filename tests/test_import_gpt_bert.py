"""Files of the published project: tokenised corpora and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import refusal
from safetensors.torch import load_file

from data.shard_paths import resolve_shards
from data.shards import open_shard, read_manifest, sha256_file
from export.load_model import load_model
from model import ModelConfig
from model_extra import build_model
from preprocessing import import_gpt_bert, token_readers
from preprocessing.import_tokens import import_tokens
from preprocessing.tokenizer import load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer

CONFIG = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "position_bucket_size": 8,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "layer_norm_eps": 1e-5,
}
TEXTS = ["one two three", "a <mask> in text", "three\nlines\nhere", "ünï"] * 5


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(TEXTS), 300, 2).save(str(path))
    return path


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(*arguments: object) -> int:
    return import_gpt_bert.main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    return refusal(capsys, run, *arguments)


def stored(folder: Path) -> list[list[int]]:
    shards = [open_shard(path) for path in resolve_shards(folder)]
    return [shard.document(index).tolist() for shard in shards for index in range(shard.num_documents)]


# Corpora


@pytest.mark.parametrize("legacy", [False, True])
def test_token_files_become_shards(tokenizer_path, tmp_path, capsys, legacy):
    tokenizer = load_tokenizer(tokenizer_path)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]
    files = []
    for name, part in (("a.bin", ids[:11]), ("b.bin", ids[11:])):
        documents = [torch.tensor([1, *document, 2], dtype=torch.int16) for document in part]
        documents += [torch.tensor([1, 2], dtype=torch.int16), torch.tensor([], dtype=torch.int16)]
        torch.save(documents, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        files.append(tmp_path / name)
    flags = ["data", "--input", *files, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags, "--shard_size", 40) == 0
    assert stored(tmp_path / "out") == ids
    output = capsys.readouterr().out
    words, tokens = sum(len(text.split()) for text in TEXTS), sum(map(len, ids))
    assert f"20 documents, {words} words, {tokens} tokens" in output
    assert "dropped: 4 empty documents" in output
    assert f"dropped: {2 * 20 + 2 * 2} begin, end and padding tokens at ends" in output
    manifest = read_manifest(tmp_path / "out")
    assert manifest["num_words"] == words
    assert len(manifest["shards"]) == 2
    assert run(*flags, "--shard_size", 40) == 0
    assert "is complete already" in capsys.readouterr().out
    assert "differs in --shard_size" in refused(capsys, *flags)
    assert run(*flags, "--overwrite") == 0
    assert stored(tmp_path / "out") == ids


def test_special_ids_inside_a_document_stay(tokenizer_path, tmp_path, capsys):
    documents = [[1, 20, 1, 5, 0, 21, 3, 3], [0, 22], [2, 23, 4], [3, 1, 2]]
    torch.save([torch.tensor(document, dtype=torch.int16) for document in documents], tmp_path / "a.bin")
    flags = ["data", "--input", tmp_path / "a.bin", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags) == 0
    assert stored(tmp_path / "out") == [[20, 1, 5, 0, 21], [0, 22], [23, 4]]
    output = capsys.readouterr().out
    assert "kept: 5 special ids inside documents" in output
    assert "1 empty document\n" in output


def test_interrupted_import_continues(tokenizer_path, tmp_path, monkeypatch):
    documents = [torch.arange(16, 16 + number % 50, dtype=torch.int16) for number in range(1, 400)]
    torch.save(documents, tmp_path / "a.bin")
    monkeypatch.setattr(token_readers, "_BLOCK_TENSORS", 20)
    arguments = ([tmp_path / "a.bin"], tmp_path / "out", tokenizer_path)
    flags = {"form": token_readers.GPT_BERT, "shard_size": 700}
    real, calls = token_readers._tensor_ids, []

    def dies(path, number, document):
        calls.append(number)
        if number == 250:
            raise KeyboardInterrupt
        return real(path, number, document)

    monkeypatch.setattr(token_readers, "_tensor_ids", dies)
    with pytest.raises(KeyboardInterrupt):
        import_tokens(*arguments, **flags)
    assert not (tmp_path / "out" / "manifest.json").exists()
    calls.clear()
    monkeypatch.setattr(token_readers, "_tensor_ids", lambda *given: calls.append(given[1]) or real(*given))
    assert import_tokens(*arguments, **flags) is not None
    assert min(calls) >= 200
    assert stored(tmp_path / "out") == [document.tolist() for document in documents if len(document)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([torch.tensor([20, -32768 + 5], dtype=torch.int16)], "document 0: id -32763 is negative, as ids above 32,767"),
        ([torch.tensor([20]), torch.tensor([310])], "document 1: id 310 is not one of the tokenizer's 300 ids"),
        ([torch.tensor([[20]])], r"document 0: expected a 1-D tensor of token ids, found torch.int64 [1, 1]"),
        ([torch.tensor([0.5])], "found torch.float32 [1]"),
        ([[20, 21]], "expected a 1-D tensor"),
        ({"a": torch.tensor([20])}, "holds a dict, not a list of documents"),
        ([], "holds no tokens"),
        ([torch.tensor([1, 2])], "holds no tokens"),
    ],
)
def test_files_without_documents_are_refused(tokenizer_path, tmp_path, capsys, content, sentence):
    torch.save(content, tmp_path / "a.bin")
    flags = ["data", "--input", tmp_path / "a.bin", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert sentence in refused(capsys, *flags)
    assert not list(tmp_path.glob("out/*.shard"))
    assert not (tmp_path / "out" / "manifest.json").exists()


class Evil:
    """Unpickling runs a command."""

    def __reduce__(self):
        return os.system, ("touch evil_was_here",)


def test_nothing_is_unpickled(tokenizer_path, tmp_path, monkeypatch, capsys, config_file):
    monkeypatch.chdir(tmp_path)
    torch.save([Evil()], "a.bin")
    data = ["data", "--input", "a.bin", "--output", "out", "--tokenizer_path", tokenizer_path]
    checkpoint = ["checkpoint", "--input", "a.bin", "--output", "model", "--config_file", config_file]
    for flags in (data, checkpoint):
        assert "a.bin is not a file of plain tensors and is not loaded" in refused(capsys, *flags)
    assert not Path("evil_was_here").exists()
    for content in (b"", b"x" * 1000, Path("a.bin").read_bytes()[:300]):
        Path("a.bin").write_bytes(content)
        assert "error: --input a.bin" in refused(capsys, *checkpoint)
    assert "none.bin does not exist" in refused(capsys, *checkpoint[:2], "none.bin", *checkpoint[3:])


# Checkpoints


def published(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict as the published models have it."""
    config = ModelConfig.from_dict({**CONFIG, "model_type": kind})
    state = dict(build_model(config, torch.Generator().manual_seed(seed)).state_dict())
    for layer in range(2):
        state[f"transformer.attention_layers.{layer}.position_indices"] = torch.zeros(64, 64, dtype=torch.int64)
    state["classifier.nonlinearity.5.weight"] = state["embedding.word_embedding.weight"]
    return state


def same_model(folder: Path, state: dict[str, torch.Tensor], ema: bool = False) -> None:
    """The imported folder gives the logits of the published weights."""
    model, tokenizer, config = load_model(folder, ema=ema)
    reference = build_model(config).eval()
    reference.load_state_dict(dict(state))
    ids = torch.tensor([tokenizer.encode("one two three").ids])
    with torch.no_grad():
        found, expected = (m(ids, torch.zeros_like(ids), causal=True) for m in (model, reference))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["gpt-bert", "ltg-bert"])
def test_state_dicts(tokenizer_path, config_file, tmp_path, capsys, kind):
    """The kind of model is read off the weights, as published configurations do not tell."""
    state = published(kind)
    torch.save(state, tmp_path / "model.bin")
    torch.save(published(kind, seed=1), tmp_path / "model_ema.bin")
    flags = ["checkpoint", "--input", tmp_path / "model.bin", "--ema_input", tmp_path / "model_ema.bin"]
    flags += ["--config_file", config_file, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags) == 0
    same_model(tmp_path / "out", state)
    same_model(tmp_path / "out", published(kind, seed=1), ema=True)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in weights if "position_indices" in name or name == "classifier.nonlinearity.5.weight"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    count = sum(value.numel() for value in weights.values())
    assert f"model.safetensors: {count:,} parameters" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    for name, facts in record["files"].items():
        path = tmp_path / "out" / name
        assert facts == {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    assert set(record["files"]) == {"model.safetensors", "ema.safetensors", "config.json", "tokenizer.json"}
    assert "exists already; give a new folder" in refused(capsys, *flags)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_training_states(tokenizer_path, config_file, tmp_path, prefix):
    state, ema = published("gpt-bert"), published("gpt-bert", seed=1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    content = {
        "model": {prefix + name: value for name, value in state.items()},
        "ema_model": {prefix + name: value for name, value in ema.items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last_epoch": 3},
        "global_step": 17,
        "args": argparse.Namespace(learning_rate=0.1, name="x"),
    }
    torch.save(content, tmp_path / "checkpoint.bin")
    flags = ["checkpoint", "--input", tmp_path / "checkpoint.bin", "--config_file", config_file]
    assert run(*flags, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path) == 0
    same_model(tmp_path / "out", state)
    same_model(tmp_path / "out", ema, ema=True)


def test_weights_become_float32_and_the_tokenizer_is_optional(config_file, tmp_path, capsys):
    state = {name: value.to(torch.bfloat16) for name, value in published("gpt-bert").items()}
    torch.save(state, tmp_path / "model.bin")
    flags = ["checkpoint", "--input", tmp_path / "model.bin", "--config_file", config_file]
    assert run(*flags, "--output", tmp_path / "out") == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert torch.equal(weights["classifier.nonlinearity.1.bias"], state["classifier.nonlinearity.1.bias"].float())
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint.json", "config.json", "model.safetensors"]
    assert "evaluation needs the tokenizer there too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda state, config: state.pop("classifier.nonlinearity.1.bias"),
            "has no classifier.nonlinearity.1.bias (1 missing",
        ),
        (
            lambda state, config: state.update(more=torch.ones(1)),
            "has more, which the model has not (0 missing, 1 unknown)",
        ),
        (lambda state, config: config.update(num_hidden_layers=3), "check num_hidden_layers and model_type"),
        (lambda state, config: config.update(model_type="ltg-bert"), "check num_hidden_layers and model_type"),
        (lambda state, config: config.update(vocab_size=321), "has shape [320, 24] where --config_file"),
        (lambda state, config: config.update(hidden=3), 'config.json cannot be used: unknown key "hidden"'),
        (
            lambda state, config: config.update(hidden_size=25),
            "config.json cannot be used: hidden_size 25 is not a multiple",
        ),
        (lambda state, config: state.update(step=3), "is not a state dict: 'step' holds no tensor"),
        (
            lambda state, config: state.update({"classifier.nonlinearity.5.weight": torch.ones(320, 24)}),
            "classifier.nonlinearity.5.weight differs from embedding.word_embedding.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, config_file, capsys, change, sentence):
    state, config = published("gpt-bert"), dict(CONFIG)
    change(state, config)
    torch.save(state, tmp_path / "model.bin")
    config_file.write_text(json.dumps(config))
    flags = ["checkpoint", "--input", tmp_path / "model.bin", "--config_file", config_file]
    assert sentence in refused(capsys, *flags, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_configurations_and_tokenizers_that_do_not_fit_are_refused(tmp_path, config_file, capsys):
    torch.save(published("gpt-bert"), tmp_path / "model.bin")
    train_tokenizer(iter([" ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")] * 3), 330, 2).save(
        str(tmp_path / "large.json")
    )
    flags = ["checkpoint", "--input", tmp_path / "model.bin", "--output", tmp_path / "out"]
    assert "has 330 ids, more than the model's 320" in refused(
        capsys, *flags, "--config_file", config_file, "--tokenizer_path", tmp_path / "large.json"
    )
    assert "none.json cannot be read" in refused(capsys, *flags, "--config_file", tmp_path / "none.json")
    config_file.write_text("{")
    assert "config.json cannot be read" in refused(capsys, *flags, "--config_file", config_file)
    torch.save(torch.ones(3), tmp_path / "model.bin")
    assert "holds a Tensor, not a state dict" in refused(capsys, *flags, "--config_file", config_file)


@pytest.mark.parametrize("name", ["model", "model_extra"])
def test_golden_parameters_are_accepted(tmp_path, name):
    """The names and shapes that the published code itself wrote."""
    golden = Path(__file__).resolve().parent / "golden"
    tensors = np.load(golden / f"{name}.npz")
    state = {key.removeprefix("param/"): torch.tensor(tensors[key]) for key in tensors.files if "param/" in key[:6]}
    torch.save(state, tmp_path / "model.bin")
    import_gpt_bert.import_checkpoint(tmp_path / "model.bin", golden / f"{name}.json", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == set(state)
    assert all(torch.equal(weights[key], state[key]) for key in state)
