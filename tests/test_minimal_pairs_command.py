"""Minimal pairs in use: sets of files, the command and what it refuses, and the same during training."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.tiny_evaluation import reference, tiny_model
from helpers.tiny_runs import TEXT, flags, make_inputs, run, train_on
from tokenizers import Tokenizer

from data.results import read_results
from evaluation import minimal_pairs
from evaluation.pair_accuracy import read_pair_sets
from evaluation.suites import ZeroShot
from model_extra import GPTBert
from train_single_gpu import main as train
from training.checkpoint import write_checkpoint
from training.config import ConfigError, TrainingConfig
from training.distributed import single_world
from training.inputs import read_inputs
from training.metric_logger import read_metrics


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_on(TEXT, 300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPTBert:
    """With weights enlarged so that scores differ widely."""
    return tiny_model(tokenizer.get_vocab_size(), scale=2)


# Files and the command line


def write_pairs(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def pair(good: str = "The list holds.", bad: str = "The lists holds.", **fields) -> dict:
    return {"sentence_good": good, "sentence_bad": bad, **fields}


def test_sets_are_files_and_folders(tmp_path):
    write_pairs(tmp_path / "all/blimp/a.jsonl", [pair(linguistics_term="x"), "", pair()])
    write_pairs(tmp_path / "all/blimp/b.jsonl", [pair()])
    write_pairs(tmp_path / "all/more/c.jsonl", [pair(row=3)])
    sets = read_pair_sets([tmp_path / "all", tmp_path / "all/blimp/b.jsonl"], "--data")
    assert [(s.name, [p.paradigm for p in s.pairs]) for s in sets] == [
        ("blimp", ["a", "a", "b"]),
        ("more", ["c"]),
        ("b", ["b"]),
    ]
    assert [p.phenomenon for p in sets[0].pairs] == ["x", "a", "b"]
    assert sets[1].pairs[0].fields == {"row": 3}
    assert read_pair_sets([tmp_path / "all/blimp"], "--data")[0].name == "blimp"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{"], "line 1: not valid JSON"),
        ([pair(), {"sentence_good": "a"}], 'line 2: "sentence_bad" is missing'),
        ([pair(good=" ")], "line 1: \"sentence_good\" is ' '"),
        (["[1]"], 'line 1: "sentence_good" is missing'),
        ([pair(bad=3)], 'line 1: "sentence_bad" is 3'),
        (['{"sentence_good": "\\ud800", "sentence_bad": "b"}'], "half a surrogate pair"),
        ([""], "holds no pair"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, sentence):
    path = write_pairs(tmp_path / "x.jsonl", lines)
    with pytest.raises(ConfigError) as caught:
        read_pair_sets([path], "--data")
    assert str(caught.value).startswith(f"--data: {path}")
    assert sentence in str(caught.value)


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    write_pairs(tmp_path / "1/same.jsonl", [pair()])
    write_pairs(tmp_path / "2/same.jsonl", [pair()])
    cases = {
        "none.jsonl": "cannot be read: No such file",
        "empty": "holds no .jsonl file",
        "bytes.jsonl": "is not UTF-8",
    }
    for name, words in cases.items():
        with pytest.raises(ConfigError, match=words):
            read_pair_sets([tmp_path / name], "--data")
    with pytest.raises(ConfigError, match="two sets of pairs are called 'same'"):
        read_pair_sets([tmp_path / "1/same.jsonl", tmp_path / "2/same.jsonl"], "--data")


@pytest.fixture(scope="module")
def checkpoint(model, tokenizer, tmp_path_factory) -> Path:
    """A checkpoint of the tiny model; its averaged weights are zero, which finds all sentences of a length alike."""
    weights = model.state_dict()
    files = {"config.json": json.dumps(model.config.to_dict()).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        7,
        {"model": weights, "ema": {name: torch.zeros_like(value) for name, value in weights.items()}},
        {"flags": {"document_end": True}},
        files,
    )


def test_command_line(model, tokenizer, checkpoint, tmp_path, capsys):
    lines = [pair(f"The list holds {n} words.", f"{n} the words list.", linguistics_term="ab"[n % 2]) for n in range(9)]
    write_pairs(tmp_path / "set/first.jsonl", lines[:5])
    write_pairs(tmp_path / "set/second.jsonl", lines[5:])
    output = tmp_path / "new" / "scores.json"
    command = [str(checkpoint), "--data", str(tmp_path / "set"), "--device", "cpu", "--output", str(output)]
    plot = [] if not has_matplotlib() else ["--plot", str(tmp_path / "scores.png")]
    assert minimal_pairs.main([*command, "--scores", str(tmp_path / "s.jsonl"), *plot]) == 0
    printed = capsys.readouterr().out
    assert "set: 9 pairs in 2 files" in printed
    assert "by linguistics_term" in printed
    results = json.loads(output.read_text())
    assert results["document_end"] is False  # whatever closed the documents of training
    modes = results["sets"]["set"]["modes"]
    assert list(modes) == ["masked", "causal", "fused"]
    shown = {(each.name, each.mode): each for each in read_results(output).results}
    assert shown["set", "fused"].interval == "[{low:.1f}, {high:.1f}]".format(
        **{key: 100 * modes["fused"]["mean"][key] for key in ("low", "high")}
    )
    each = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for index, line in enumerate(each):
        encoding = tokenizer.encode(lines[index]["sentence_good"], add_special_tokens=False)
        for mode in ("masked", "causal"):
            [expected] = reference(model, encoding.ids, encoding.word_ids, mode, eos=False)
            assert line[f"{mode}_good"] == pytest.approx(expected, rel=2e-6)
        assert line["sentence_bad"] == lines[index]["sentence_bad"]
    for mode, found in modes.items():
        right = [line[f"{mode}_good"] > line[f"{mode}_bad"] for line in each]
        assert found["ties"] == 0
        assert found["all"]["accuracy"] == pytest.approx(sum(right) / 9)
        assert found["mean"]["accuracy"] == pytest.approx((sum(right[:5]) / 5 + sum(right[5:]) / 4) / 2)
        assert found["groups"]["linguistics_term"]["b"]["pairs"] == 4
    if plot:
        assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")

    # Uniform probabilities: the averaged weights were used, equal scores are half right, -n log V is the score.
    same = write_pairs(tmp_path / "same.jsonl", [pair("a b", "b a")] * 4)
    scored = ["--scores", str(tmp_path / "e.jsonl"), "--ema", "--mode", "causal"]
    assert minimal_pairs.main([str(checkpoint), "--data", str(same), "--device", "cpu", *scored]) == 0
    printed = capsys.readouterr().out
    assert " 50.0 [" in printed
    assert "counted as half right: causal 4" in printed
    line = json.loads((tmp_path / "e.jsonl").read_text().splitlines()[0])
    count = len(tokenizer.encode("a b", add_special_tokens=False).ids)
    assert line["causal_good"] == pytest.approx(-count * math.log(model.config.vocab_size), rel=1e-5)

    options = ["--select_temperature", "--mode", "fused", "--batch_tokens", "256"]
    assert minimal_pairs.main([*command, *options]) == 0
    assert "set: 5 pairs in 2 files, temperature chosen on 4 others" in capsys.readouterr().out
    assert json.loads(output.read_text())["sets"]["set"]["pairs_for_temperature"] == 4


def has_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def test_refusals_are_one_sentence(checkpoint, tmp_path, capsys):
    data = str(write_pairs(tmp_path / "x.jsonl", [pair()]))
    (tmp_path / "folder").mkdir()
    cases = [
        (["--temperature", "0"], "--temperature is 0"),
        (["--temperature", "2", "--select_temperature"], "--temperature and --select_temperature"),
        (["--batch_tokens", "5"], "--batch_tokens is 5"),
        (["--output", str(tmp_path / "folder")], "--output"),
        (["--output", data + "/below.json"], "--output"),
        (["--plot", str(tmp_path / "p.txt")], "--plot"),
        (["--select_temperature"], "--select_temperature: x has no file with two pairs"),
    ]
    for extra, words in cases:
        assert minimal_pairs.main([str(checkpoint), "--data", data, "--device", "cpu", *extra]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {words}"), error
        assert error.count("\n") == 1
    for model_path, data_path in ((tmp_path / "none", data), (checkpoint, tmp_path / "none.jsonl")):
        assert minimal_pairs.main([str(model_path), "--data", str(data_path), "--device", "cpu"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# During training


@pytest.mark.slow
def test_pair_accuracy_in_training_is_the_same_on_one_rank_and_on_two(tmp_path, capsys):
    inputs = make_inputs(tmp_path / "inputs")
    words = ("the", "cat", "dog", "sees", "runs", "to", "a", "tree")
    lines = [pair(f"{a} {b} {a}", f"{b} {a} {b}", linguistics_term=a) for a in words for b in words if a < b]
    write_pairs(tmp_path / "pairs/first.jsonl", lines[:20])
    write_pairs(tmp_path / "pairs/second.jsonl", lines[20:])
    options = {
        "max_steps": 4, "evaluate_every": 2, "evaluate_data": tmp_path / "pairs", "validate_every": 0, "save_every": 0,
        "valid_path": "", "ema_decay": 0.5,
    }  # fmt: skip
    found = {}
    for name in ("one", "two"):
        arguments = flags(inputs, tmp_path / "runs", name, **options)
        if name == "two":
            printed = run(arguments, ranks=2).stdout
        else:
            assert train(arguments, single_world) == 0
            printed = capsys.readouterr().out
        assert "zero-shot (EMA): pairs masked" in printed
        records = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
        found[name] = [record for record in records if "eval/masked/pairs" in record]
    assert [record["step"] for record in found["one"]] == [2, 4]
    assert found["one"] == found["two"]
    last = found["one"][-1]
    names = {f"pairs{of}" for of in ("", *(f"/{word}" for word in {line["linguistics_term"] for line in lines}))}
    assert {k for k in last if k.startswith("eval/")} == {
        f"eval/{m}/{n}" for m in ("masked", "causal", "fused") for n in names
    }
    assert "stats/tokens" in last

    # The averaged weights of the last checkpoint give the same.
    output = tmp_path / "scores.json"
    command = [str(tmp_path / "runs" / "two"), "--ema", "--data", str(tmp_path / "pairs"), "--device", "cpu"]
    assert minimal_pairs.main([*command, "--output", str(output)]) == 0
    modes = json.loads(output.read_text())["sets"]["pairs"]["modes"]
    for mode, of in modes.items():
        assert of["mean"]["accuracy"] == pytest.approx(last[f"eval/{mode}/pairs"], abs=1e-9)


def test_bad_pairs_are_refused_before_training(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    bad = write_pairs(tmp_path / "bad.jsonl", [pair(), {"sentence_good": "x"}])
    cases = [
        ({"evaluate_data": bad}, f'--evaluate_data: {bad}, line 2: "sentence_bad" is missing'),
        ({"evaluate_every": 5}, "--evaluate_every is 5 but there is no --evaluate_data"),
    ]
    for options, words in cases:
        values = dict(item[2:].split("=", 1) for item in flags(inputs, tmp_path / "runs") if "=" in item)
        known = {name: values[name] for name in ("train_path", "config_file", "tokenizer_path", "output_dir", "name")}
        given = {key: v if isinstance(v, int) else str(v) for key, v in options.items()}
        with pytest.raises(ConfigError) as caught:
            ZeroShot.read(read_inputs(TrainingConfig(**known, **given)))
        assert str(caught.value).startswith(words)
    assert not (tmp_path / "runs").exists()
