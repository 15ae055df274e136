"""perplexity.py: equal to brute force and to validation during training, per word and per byte, text and shards."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import make_inputs
from tokenizers import Tokenizer

from data.results import read_results
from data.shards import tokenizer_hash, write_shard
from evaluation import perplexity
from evaluation.perplexity import read_documents, windows
from evaluation.token_log_probs import SpecialIds
from model import ModelConfig
from model_extra import GPTBert
from training.checkpoint import write_checkpoint

DOCUMENTS = ["the cat sees a tree", "day by day\nthe old house sleeps é", "dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """tokenizer.json, valid/*.shard, model.json, and `checkpoint` with random weights."""
    folder = make_inputs(tmp_path_factory.mktemp("perplexity"), documents=60)
    model = random_model(folder)
    files = {name: (folder / source).read_bytes() for name, source in FILES.items()}
    made = write_checkpoint(folder, 3, {"model": model.state_dict()}, {"flags": {"document_end": True}}, files)
    made.rename(folder / "checkpoint")
    flags = {"document_end": True, "row_start": True}
    write_checkpoint(folder, 3, {"model": model.state_dict()}, {"flags": flags}, files).rename(folder / "row_start")
    return folder


FILES = {"config.json": "model.json", "tokenizer.json": "tokenizer.json"}


def random_model(folder: Path) -> GPTBert:
    model = GPTBert(ModelConfig.from_json(folder / "model.json"), torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def measured(folder: Path, data: Path, *options: str, model: str = "checkpoint") -> dict:
    output = folder / "out.json"
    command = [str(folder / model), "--data", str(data), "--device", "cpu", "--output", str(output), *options]
    assert perplexity.main(command) == 0
    found = json.loads(output.read_text())["texts"][str(data)]
    shown = {each.mode: each.value for each in read_results(output).results}  # as reports and model cards read them
    assert shown == {mode: found[mode]["perplexity"] for mode in ("masked", "causal") if mode in found}
    return found


@torch.no_grad()
def losses(folder: Path, causal: bool) -> list[float]:
    """Of every token of DOCUMENTS by the definition in float64, `</s>` too where causal."""
    model, tokenizer = copy.deepcopy(random_model(folder)).double(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for text in DOCUMENTS:
        ids = [1, *tokenizer.encode(text).ids, 2]
        for i in range(1, len(ids) if causal else len(ids) - 1):
            row = ids[:i] if causal else [*ids[:i], 4, *ids[i + 1 :]]
            inputs = torch.tensor([row])
            hidden = model.encode(inputs, torch.zeros_like(inputs), causal)
            found.append(-float(model.predict(hidden[0, i - 1]).log_softmax(-1)[ids[i]]))
    return found


def test_causal_and_every_token_loss_match_their_definition(folder, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("\n \n".join(DOCUMENTS) + "\n")
    found = measured(folder, path, "--every_token")
    tokens = len(losses(folder, False))
    sizes = {"documents": 3, "tokens": tokens, "words": 14, "bytes": sum(len(text.encode()) for text in DOCUMENTS)}
    assert {key: found[key] for key in sizes} == sizes
    for mode in ("causal", "masked"):
        each = losses(folder, mode == "causal")
        assert found[mode]["loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)
        assert found[mode]["perplexity"] == pytest.approx(math.exp(found[mode]["loss"]))
        assert found[mode]["word_perplexity"] == pytest.approx(math.exp(min(sum(each) / 14, 700)), rel=1e-3)
        assert found[mode]["bits_per_byte"] == pytest.approx(sum(each) / math.log(2) / sizes["bytes"], rel=1e-5)
    printed = capsys.readouterr().out
    assert "3 documents, 14 words" in printed
    assert f"{found['causal']['loss']:.4f}" in printed


def test_perplexity_of_shards_text_and_json_lines_agrees(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("\n\n".join(DOCUMENTS))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS))
    key = tokenizer_hash(folder / "tokenizer.json")
    encoded = [np.array(tokenizer.encode(text).ids) for text in DOCUMENTS]
    write_shard(tmp_path / "text.shard", encoded, tokenizer_hash=key, vocab_size=tokenizer.get_vocab_size())
    found = [measured(folder, tmp_path / f"text.{kind}", "--text_field", "body") for kind in ("txt", "jsonl", "shard")]
    assert found[0] == found[1] == found[2]
    assert "accuracy" in found[0]["masked"]


@pytest.mark.parametrize("row_start", [True, False])
def test_perplexity_equals_validation_during_training(folder, row_start):
    """Of the model's own run: `checkpoint` comes from before there was --row_start."""
    from data.corpus import Corpus
    from data.loader import ValidationSet
    from data.masking import MaskingOptions
    from evaluation.validation import validate
    from training.distributed import World
    from training.environment import Environment

    shard = folder / "valid" / "part_0.shard"
    model = random_model(folder)
    corpus = Corpus(shard, tokenizer_hash=None, bos_id=1, eos_id=2)
    held_out = ValidationSet(corpus, MaskingOptions(model.config.vocab_size, row_start=row_start), 32)
    expected = validate(model, held_out, World(0, 1, torch.device("cpu"), Environment("none")), 8, False, "")
    found = measured(folder, shard, "--seq_length", "32", model="row_start" if row_start else "checkpoint")
    for mode in ("masked", "causal"):
        assert found[mode]["loss"] == pytest.approx(expected[f"{mode}_loss"], rel=1e-6)
        assert found[mode]["accuracy"] == pytest.approx(expected[f"{mode}_accuracy"], rel=1e-9)


def test_windows_score_every_token_once(folder):
    from data.corpus import Corpus

    corpus = Corpus(folder / "valid" / "part_0.shard", tokenizer_hash=None, bos_id=1, eos_id=2)
    for eos, row_start in ((2, True), (2, False), (None, False)):
        found = windows(corpus, SpecialIds(1, eos, 3, 4), 12, row_start)
        assert found.scored.sum() == corpus.num_tokens
        lengths = np.diff(found.starts)
        assert lengths.max() <= 12
        scored = [found.ids[s + 1 : s + 1 + n] for s, n in zip(found.starts[:-1], found.scored, strict=True)]
        assert (np.concatenate(scored) == corpus.shards[0].tokens).all()
        first = found.ids[found.starts[:-1]]
        assert (first == 1).sum() == (len(first) if row_start else corpus.num_documents)
        assert (found.ids == 2).sum() == (corpus.num_documents if eos else 0)


def test_documents_are_separated_by_blank_lines(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\none\ntwo\n\n \t\n  three \n")
    (tmp_path / "b.dev").write_text("four")
    assert read_documents(str(tmp_path / "a.txt"), "text") == ["one\ntwo", "  three "]
    assert read_documents(str(tmp_path), "text") == ["one\ntwo", "  three ", "four"]
    assert capsys.readouterr().out == ""
    (tmp_path / "c.ndjson").write_text('{"text": "five"}\n')
    (tmp_path / "below").mkdir()
    assert read_documents(str(tmp_path), "text") == ["one\ntwo", "  three ", "four", "five"]
    note = f"note: in --data {tmp_path} folders and hidden files are not read: 1, such as below\n"
    assert capsys.readouterr().out == note


def test_refusals_are_one_sentence(folder, tmp_path, capsys):
    (tmp_path / "good.txt").write_text("the cat")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "packed.txt.gz").write_bytes(b"the cat")
    for name in ("folder/table.parquet", "nested/below/good.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("the cat")
    write_shard(tmp_path / "other.shard", [np.array([20, 21])], tokenizer_hash="0" * 64, vocab_size=300)
    cases = [
        ("good.txt", ["--seq_length", "3"], "--seq_length is 3"),
        ("good.txt", ["--mask_p", "0"], "--mask_p is 0"),
        ("good.txt", ["--ema"], f"checkpoint {folder / 'checkpoint'} has no ema.safetensors"),
        ("none.txt", [], f"--data: {tmp_path / 'none.txt'} cannot be read"),
        ("empty.txt", [], f"--data: {tmp_path / 'empty.txt'} holds no text"),
        ("bytes.txt", [], f"--data: {tmp_path / 'bytes.txt'} is not UTF-8"),
        ("bad.jsonl", [], f"--data: {tmp_path / 'bad.jsonl'}, line 1: no text in field"),
        ("packed.txt.gz", [], f"--data: {tmp_path / 'packed.txt.gz'} is not read here"),
        (
            "folder",
            [],
            f"--data: {tmp_path / 'folder' / 'table.parquet'} is not read here; unpack it or give the shards",
        ),
        ("nested", [], f"--data: {tmp_path / 'nested'} holds no text"),
        ("other.shard", [], f"--data: {tmp_path / 'other.shard'} was made with another tokenizer"),
    ]
    for name, options, words in cases:
        command = [str(folder / "checkpoint"), "--data", str(tmp_path / name), "--device", "cpu", *options]
        assert perplexity.main(command) == 2, name
        error = capsys.readouterr().err
        assert error.startswith(f"error: {words}"), error
        assert error.count("\n") == 1
