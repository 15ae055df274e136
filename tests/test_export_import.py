"""Export and its reverse as commands: what is written, what evaluation and training can do with it, clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import tiny_runs
from helpers.tiny_exports import FORMS, make_checkpoint, make_exported, random_model, tokenizer_text
from safetensors.torch import load_file, save_file

from data.shards import tokenizer_hash
from evaluation import fill_mask, generate
from export import from_huggingface, to_huggingface
from export.load_model import load_model
from training.checkpoint import CheckpointError, locate
from training.config import FIELDS

GOLDEN = Path(__file__).parent / "golden"

FLAGS = {
    "document_end": False, "row_start": True, "n_special_tokens": 0,
    "special_tokens": "bos=<s>,eos=</s>,pad=<pad>,mask=<mask>,unk=<unk>",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with inputs, and a short finished run in `runs/run`."""
    folder = tmp_path_factory.mktemp("trained")
    inputs = tiny_runs.make_inputs(folder / "inputs")
    tiny_runs.run(
        tiny_runs.flags(inputs, folder / "runs", max_steps=6, save_every=3, validate_every=3, document_end=False)
    )
    return folder


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def refused(script, arguments: list, capsys, *parts: str) -> None:
    assert script.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_folder_is_a_model_for_our_scripts(tmp_path, form, capsys):
    model, folder = make_exported(tmp_path, form)
    loaded, tokenizer, config = load_model(folder)
    assert equal(loaded, model)
    assert config == model.config
    assert json.loads(tokenizer.to_str()) == json.loads(tokenizer_text())  # as in training, not as in transformers
    outputs = []
    for place in (folder, tmp_path / form / "checkpoints" / "step_00000007"):
        assert generate.main([str(place), "--device", "cpu", "--prompt", "The list", "--max_new_tokens", "5"]) == 0
        assert fill_mask.main([str(place), "--device", "cpu", "--text", "The <mask> holds"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_averaged_weights(tmp_path, capsys):
    model, ema = random_model("gpt-bert", 0), random_model("gpt-bert", 1)
    checkpoint = make_checkpoint(tmp_path, model, ema)
    assert to_huggingface.main([str(tmp_path), str(tmp_path / "plain")]) == 0  # a run folder
    assert to_huggingface.main([str(checkpoint), str(tmp_path / "averaged"), "--ema"]) == 0
    assert equal(load_model(tmp_path / "plain")[0], model)
    assert equal(load_model(tmp_path / "averaged")[0], ema)
    assert "averaged weights" in (tmp_path / "averaged" / "README.md").read_text()
    with pytest.raises(CheckpointError, match="export the averaged ones with --ema"):
        load_model(tmp_path / "plain", ema=True)
    capsys.readouterr()


def test_license_and_languages_of_the_card(tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path, random_model("gpt-bert"))
    given = [str(checkpoint), str(tmp_path / "out")]
    refused(to_huggingface, [*given, "--license", "Apache 2"], capsys, "--license 'Apache 2'", "apache-2.0")
    refused(to_huggingface, [*given, "--language", "en", "English"], capsys, "--language 'English'", "ISO 639")
    assert to_huggingface.main([*given, "--license", "cc-by-4.0", "--language", "no", "sme"]) == 0
    head = (tmp_path / "out" / "README.md").read_text().split("---\n")[1]
    assert head.startswith('license: "cc-by-4.0"\nlanguage:\n  - "no"\n  - "sme"\nlibrary_name: "transformers"\n')
    assert to_huggingface.main([str(checkpoint), str(tmp_path / "plain")]) == 0
    assert (tmp_path / "plain" / "README.md").read_text().startswith('---\nlibrary_name: "transformers"\n')


def test_model_card_tells_the_run(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "runs" / "run", run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "eval/masked/blimp": 0.625, "eval/causal/blimp": 0.5}) + "\n")
        file.write(json.dumps({"step": 7, "valid/masked_loss": 99.0}) + "\n")  # after the checkpoint
    found = {"weights": "trained", "sets": {"blimp": {"modes": {"fused": {"mean": {"accuracy": 0.7125}}}}}}
    (run / "scores.json").write_text(json.dumps(found))
    recorded = json.loads((run / "config.json").read_text())
    recorded["flags"] |= {"seq_length": 1000, "length_milestones": [0.5]}  # beyond the positions
    (run / "config.json").write_text(json.dumps(recorded))
    assert to_huggingface.main([str(run), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 2000
    card = (tmp_path / "out" / "README.md").read_text()
    last = tiny_runs.training_lines(run)[-1]
    validation = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = next(
        line["valid/masked_loss"]
        for line in reversed(validation)
        if line.get("step") == 6 and "valid/masked_loss" in line
    )
    config = json.loads((run / "config.json").read_text())
    for part in (
        f"{last['stats/tokens']:,} tokens in 6 of 6 steps; 3/4 of the rows masked",
        f"{config['data']['documents']:,} documents, {config['data']['tokens']:,} tokens an epoch",
        f"torch {torch.__version__}", "| learning_rate | 0.01 |", "| optimizer | \"lamb\" |",
        f"| validation: masked loss | {loss:.4g} |", "| averaged weights: masked/blimp | 0.625 |",
        "| minimal pairs | blimp | fused | accuracy | 71.2 | not computed | ? |", "Training closed no document",
        'from_pretrained("out"',
    ):  # fmt: skip
        assert part in card
    table = card.split("| hyperparameter | value |")[1].split("\n\n")[0]
    listed = {line.split()[1] for line in table.splitlines()[2:]}
    assert listed == {name for name, spec in FIELDS.items() if spec.metadata["fixed"]}
    assert str(trained) not in card  # nobody's folders
    assert "ema" not in card.split("### While it trained")[1].split("## ")[0]
    assert to_huggingface.main([str(run), str(tmp_path / "ema"), "--ema"]) == 0
    averaged = (tmp_path / "ema" / "README.md").read_text()
    assert "| validation: masked loss |" in averaged
    assert f"| {loss:.4g} |" not in averaged
    assert "| minimal pairs |" not in averaged
    flags = json.loads((tmp_path / "out" / "config.json").read_text())["flags"]
    assert flags == FLAGS


def continue_from(folder: Path, trained: Path, output: Path) -> None:
    """Start a run from converted weights, on the shards of the run before."""
    options = {
        "initial_weights": folder, "config_file": folder / "config.json", "tokenizer_path": folder / "tokenizer.json",
        "max_steps": 2, "document_end": False,
    }  # fmt: skip
    tiny_runs.run(tiny_runs.flags(trained / "inputs", output, **options))


@pytest.mark.slow
def test_pretraining_goes_on_from_an_exported_folder(trained, tmp_path, capsys):
    exported, out = tmp_path / "exported", tmp_path / "out"
    assert to_huggingface.main([str(trained / "runs" / "run"), str(exported)]) == 0
    assert from_huggingface.main([str(exported), str(out)]) == 0
    assert f"--initial_weights {out} --config_file {out / 'config.json'} --tokenizer_path" in capsys.readouterr().out
    assert equal(load_model(out)[0], load_model(trained / "runs" / "run")[0])
    assert locate(out).record["flags"] == FLAGS
    # Shards know their tokenizer by this hash.
    original = tokenizer_hash(trained / "inputs" / "tokenizer.json")
    assert tokenizer_hash(exported / "tokenizer.json") != original
    assert tokenizer_hash(out / "tokenizer.json") == original
    continue_from(out, trained, tmp_path / "next")
    first = tiny_runs.training_lines(tmp_path / "next" / "run")[0]["train/loss"]
    anew = tiny_runs.training_lines(trained / "runs" / "run")[0]["train/loss"]
    assert first < anew - 0.3  # it begins where the other one ended


def published(folder: Path, name: str, prefix: str = "", weights: str = "safetensors") -> dict[str, torch.Tensor]:
    """A folder as the published code's authors put on the Hub: other keys, tied table, position indices."""
    folder.mkdir()
    with np.load(GOLDEN / f"{name}.npz") as archive:
        found = {
            k.removeprefix("param/"): torch.from_numpy(archive[k]) for k in archive.files if k.startswith("param/")
        }
    tensors = {prefix + key: value for key, value in found.items()}
    tensors[f"{prefix}classifier.nonlinearity.5.weight"] = found["embedding.word_embedding.weight"].clone()
    tensors[f"{prefix}transformer.attention_layers.0.position_indices"] = torch.zeros(4, 4, dtype=torch.int64)
    config = json.loads((GOLDEN / f"{name}.json").read_text())
    del config["position_bucket_size"]  # read off the table
    config |= {"architectures": ["LtgbertForMaskedLM"], "auto_map": {}, "torch_dtype": "float32", "output_all": True}
    (folder / "config.json").write_text(json.dumps(config))
    if weights == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif weights == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names, parts = sorted(tensors), {}
        for number in (0, 1):
            part = f"model-{number}.safetensors"
            save_file({key: tensors[key] for key in names[number::2]}, folder / part)
            parts |= dict.fromkeys(names[number::2], part)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    return found


@pytest.mark.parametrize(
    ("name", "prefix", "weights"),
    [("model_extra", "", "safetensors"), ("model", "model.", "bin"), ("model_extra", "", "parts")],
)
def test_published_folders_become_ours(tmp_path, name, prefix, weights):
    expected = published(tmp_path / "hub", name, prefix, weights)
    assert from_huggingface.main([str(tmp_path / "hub"), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint.json", "config.json", "model.safetensors",
    ]  # fmt: skip
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == ("gpt-bert" if name == "model_extra" else "ltg-bert")
    assert config["position_bucket_size"] == 8


def test_folders_that_cannot_be_converted(tmp_path, capsys):
    hub, out = tmp_path / "hub", tmp_path / "out"
    refused(from_huggingface, [hub, out], capsys, f"FOLDER {hub}", "config.json and weights")
    tensors = published(hub, "model_extra")
    refused(to_huggingface, [hub, out], capsys, "exported folder already")
    with pytest.raises(CheckpointError, match="from_huggingface"):
        load_model(hub)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    refused(from_huggingface, [hub, out], capsys, "has shape", "instead of")
    (hub / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    refused(from_huggingface, [hub, out], capsys, "config.json", 'key "hidden_size" is missing')
    (hub / "config.json").write_text(json.dumps(config))
    save_file(
        {"classifier.nonlinearity.5.weight": tensors["embedding.word_embedding.weight"] + 1, **tensors},
        hub / "model.safetensors",
    )
    refused(from_huggingface, [hub, out], capsys, "differs from", "ties them")
    save_file({"bert.embeddings.word_embeddings.weight": torch.ones(2, 2)}, hub / "model.safetensors")
    refused(from_huggingface, [hub, out], capsys, "another architecture")
    (hub / "model.safetensors").write_bytes(b"damaged")
    refused(from_huggingface, [hub, out], capsys, "cannot be read", "copy them again")
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_exports_that_cannot_be_made(tmp_path, capsys, monkeypatch):
    checkpoint, out = make_checkpoint(tmp_path / "run", random_model("gpt-bert")), tmp_path / "out"
    refused(to_huggingface, [tmp_path / "none", out], capsys, str(tmp_path / "none"), "not a folder")
    refused(to_huggingface, [checkpoint, out, "--ema"], capsys, "has no ema.safetensors")
    out.mkdir()
    (out / "file").touch()
    refused(to_huggingface, [checkpoint, out], capsys, f"OUT {out} exists already")
    (out / "file").unlink()
    monkeypatch.setattr(
        to_huggingface.shutil, "copyfile", mock.Mock(side_effect=OSError(28, "No space left on device"))
    )
    refused(to_huggingface, [checkpoint, out], capsys, f"OUT {out} cannot be written: No space left on device")
    assert not list(out.iterdir())
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(SystemExit) as stopped:
        to_huggingface.main([str(checkpoint)])
    assert stopped.value.code == 2
    monkeypatch.undo()
    assert to_huggingface.main([str(checkpoint), str(out)]) == 0  # an empty folder is a fine place
    (out / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(out)


def test_the_published_ltg_bert_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "ltg-bert"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LtgbertForMaskedLM"], "hidden_size": 8}')
    names = ("embedding.word_embedding.weight", "transformer.layers.0.attention.in_proj_qk.weight")
    save_file({name: torch.zeros(8, 8) for name in names}, folder / "model.safetensors")
    arguments = [folder, tmp_path / "out"]
    refused(from_huggingface, arguments, capsys, "LTG-BERT as its authors published it", "take a published GPT-BERT")
