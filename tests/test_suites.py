"""All zero-shot suites at once, as during training, against their commands; examples before an item."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_evaluation import (
    EWOK,
    MODES,
    SPECIAL,
    WORLD,
    brute,
    checkpoint_of,
    enlarged,
    write_lines,
    write_pipeline,
)  # fmt: skip

from evaluation import all_suites, babylm, zero_shot
from evaluation.suites import measure_suites, read_suites
from evaluation.token_log_probs import BatchShape, Scorer, sentence_sums, token_scores
from evaluation.zero_shot import find_datasets
from model_extra import GPTBert
from training.config import ConfigError

MODEL, TOKENIZER = enlarged()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    checkpoint_of(folder, MODEL, TOKENIZER, step=2)
    return folder


def logits_of(model: GPTBert) -> Callable[..., torch.Tensor]:
    def logits(input_ids, document_ids, causal, positions):
        return model.predict(model.encode(input_ids, document_ids, causal).flatten(0, 1)[positions])

    return logits


def test_examples_before_an_item_are_read_and_not_scored(tmp_path, run_folder, capsys):
    lines = [
        {**EWOK, "Context1": f"The {a} is old.", "Target1": f"It holds {b}.", "Target2": f"It returns {a}."}
        for a, b in (("list", "words"), ("word", "lists"), ("function", "naïve 東京"), ("length", "a list"))
    ]
    write_lines(tmp_path / "data/ewok/space.jsonl", lines)
    wug = [{"sentences": f"The {n}\tA {n}", "ratio": n / 7} for n in range(5)]
    write_lines(tmp_path / "data/wug_past/x.jsonl", wug)
    datasets = {each.task: each for each in find_datasets(tmp_path / "data", "--data")[0]}
    shown = zero_shot.with_examples(datasets["ewok"], 2, 7, " | ")
    assert zero_shot.with_examples(datasets["wug_past"], 2, 7, "\n") == datasets["wug_past"]
    assert (
        shown
        == zero_shot.with_examples(datasets["ewok"], 2, 7, " | ")
        != zero_shot.with_examples(datasets["ewok"], 2, 8, " | ")
    )
    exact = copy.deepcopy(MODEL).double()
    right = [item.texts[0] for item in datasets["ewok"].items]
    for item, plain in zip(shown.items, datasets["ewok"].items, strict=True):
        examples = item.shown.split(" | ")
        assert examples.pop() == ""
        assert len(set(examples) & set(right)) == 2
        assert plain.texts[0] not in examples
    texts = zero_shot.encode_items(shown.items, TOKENIZER, SPECIAL)
    scores = token_scores(Scorer(logits_of(MODEL), SPECIAL, WORLD, BatchShape(2, 64)), texts, causal=True)
    found = zero_shot.by_item(shown.items, sentence_sums(texts, scores)[0])
    for item, line in zip(shown.items, found, strict=True):
        parts = zip(item.prefixes, item.completions, strict=True)
        expected = [brute(exact, TOKENIZER, item.shown + prefix, completion, "causal") for prefix, completion in parts]
        assert line.tolist() == pytest.approx(expected, rel=1e-5)
    command = [str(run_folder), "--data", str(tmp_path / "data"), "--device", "cpu", "--mode", "causal", "--shots"]
    assert babylm.main([*command, "1", "--output", str(tmp_path / "out")]) == 0
    assert "without examples, as no choice is right there: wug_past" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/mine-1shot/main/zero_shot/results.json").read_text())["shots"] == 1
    assert babylm.main([*command, "4"]) == 2
    assert "--shots is 4, and ewok has 3 other items of space; give fewer" in capsys.readouterr().err


def test_suites_during_training_give_what_the_commands_give(run_folder, tmp_path, capsys):
    """All of a folder at once: pairs, items with choices, reading times, SyntaxGym and LAMBADA; and by one command,
    which measures nothing twice."""
    data = write_pipeline(tmp_path / "full_eval")
    folder = shutil.copytree(data, tmp_path / "every")
    write_lines(folder / "lambada_test.jsonl", [{"text": "The function returns the list"}, {"text": "The words of a"}])
    conditions = [
        {"condition_name": name, "regions": [{"region_number": n, "content": of} for n, of in enumerate(texts, 1)]}
        for name, texts in (("a", ("The", "list holds")), ("b", ("The", "words")))
    ]
    suite = {"items": [{"conditions": conditions}], "predictions": [{"formula": "(2;%a%) < (2;%b%)"}]}
    (folder / "syntax").mkdir()
    (folder / "syntax/npi.json").write_text(json.dumps(suite))
    suites, notes = read_suites(folder, TOKENIZER, SPECIAL)
    assert [note.split(" ")[0] for note in notes] == ["cdi_childes/cdi.jsonl", "glue_filtered/boolq.jsonl"]
    found = measure_suites(Scorer(logits_of(MODEL), SPECIAL, WORLD, BatchShape(4, 64)), suites, "all")
    (run_folder / "metrics.jsonl").write_text('{"step": 2, "train/masked_loss": 3.0}\n')
    (tmp_path / "held_out.txt").write_text("The function returns the length of the list.\n" * 9)
    command = [str(run_folder), "--data", str(folder), "--held_out", str(tmp_path / "held_out.txt"), "--device", "cpu"]
    assert all_suites.main(command) == 0
    measured = run_folder / "evaluation"
    results = measured / "mine/step_00000002/zero_shot/results.json"
    datasets = json.loads(results.read_text())["datasets"]
    for mode in MODES:
        names = []
        for name, of in datasets.items():
            expected = of["modes"][mode]
            if name == "reading_data":
                for part in ("eye_tracking", "self_paced"):
                    assert found[f"eval/{mode}/reading_data_{part}"] == pytest.approx(expected[part]["gain"], abs=1e-6)
                continue
            names.append(name)
            if name != "blimp_filtered":  # there UIDs, here files
                value = expected["spearman"] if "spearman" in expected else expected["mean"]["accuracy"]
                assert found[f"eval/{mode}/{name}"] == pytest.approx(value), name
        assert len(names) == 7
        space = datasets["ewok_filtered"]["modes"][mode]["paradigms"]["space"]["accuracy"]
        assert found[f"eval/{mode}/ewok_filtered/space"] == space
    of = json.loads((measured / "syntaxgym_step_00000002.json").read_text())["suites"]["npi"]
    for mode in MODES:
        assert found[f"eval/{mode}/syntaxgym"] == found[f"eval/{mode}/syntaxgym/npi"] == of[mode]["mean"]["accuracy"]
    of = json.loads((measured / "lambada_test_step_00000002.json").read_text())
    assert found["eval/causal/lambada_test"] == of["causal"]["accuracy"]["accuracy"]
    assert "eval/fused/lambada_test" not in found
    page = (run_folder / "report.html").read_text()
    assert all(name in page for name in ("ewok_filtered", "syntaxgym", "lambada, word perplexity", "held_out.txt"))
    capsys.readouterr()
    assert all_suites.main(command) == 0
    assert capsys.readouterr().out.count("$ python ") == 1  # the report
    write_lines(folder / "blimp_filtered/mixed.jsonl", [{"text": "The list"}])
    with pytest.raises(ConfigError, match="blimp_filtered holds minimal pairs and others"):
        read_suites(folder, TOKENIZER, SPECIAL)
    lines = write_lines(tmp_path / "x.jsonl", [{"words": "The list"}])
    with pytest.raises(ConfigError, match=r"x.jsonl, line 1: \"sentence_good\" is missing, and the fields \(words\)"):
        read_suites(lines, TOKENIZER, SPECIAL)
    (folder / "blimp_filtered/mixed.jsonl").unlink()
    (measured / "lambada_test_step_00000002.json").unlink()
    (folder / "lambada_test.jsonl").write_text('{"text": ""}\n')
    assert all_suites.main(command) == 2
    assert "evaluation/lambada.py ended with exit code 2; its message is above" in capsys.readouterr().err
