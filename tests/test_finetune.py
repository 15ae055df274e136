"""finetune.py: tasks checked line by line, settings chosen on train alone, and models that learn."""

import copy
import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import make_inputs
from tokenizers import Tokenizer

from data.results import read_results
from evaluation import finetune, generation
from evaluation.finetune_data import read_task
from evaluation.finetune_forms import encode
from evaluation.finetune_model import TaskModel, pad
from evaluation.finetune_task import Examples, Task, TaskError, find_tasks, split
from evaluation.finetune_training import (
    Finetuner,
    Settings,
    epoch_batches,
    learning_rate,
    token_batches,
)
from model import ModelConfig
from model_extra import build_model
from ops.dropout import DropoutKeys
from training.forward_backward import compile_layers

SETTINGS = Settings(
    learning_rates=(3e-3,), epochs=3, batch_size=8, max_length=64, num_seeds=2, selection_seeds=1, seed=0,
    held_out=0.2, weight_decay=0.01, warmup=0.1, max_gradient=1.0, bf16=True,
)  # fmt: skip
CPU = torch.device("cpu")


def classified(count: int, seed: int, pair: bool = False) -> Examples:
    """Short texts; the label says whether "cat" is in the (second) text."""
    generator = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        words = generator.choices(["dog", "tree", "house"], k=generator.randrange(2, 6))
        label = generator.randrange(2)
        if label:
            words[generator.randrange(len(words))] = "cat"
        texts.append(("the dog", " ".join(words)) if pair else (" ".join(words),))
        labels.append(label)
    return Examples(texts, np.array(labels, dtype=np.int64))


def numbered(count: int, seed: int) -> Examples:
    """The label is 20 and 3 for each "cat" in the text."""
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(["cat", "dog"], k=4)) for _ in range(count)]
    return Examples([(text,) for text in texts], np.array([20.0 + 3 * text.count("cat") for text in texts]))


def write_rows(path: Path, examples: Examples) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            **dict(zip(["sentence"] if len(texts) == 1 else ["sentence1", "sentence2"], texts, strict=True)),
            "label": label,
        }
        for texts, label in zip(examples.texts, examples.labels.tolist(), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), documents=60)


@pytest.fixture(scope="module")
def tokenizer(inputs) -> Tokenizer:
    return Tokenizer.from_file(str(inputs / "tokenizer.json"))


@pytest.fixture
def encoder(inputs):
    return build_model(ModelConfig.from_json(inputs / "model.json"), torch.Generator().manual_seed(0))


# Tasks


def test_tasks_of_a_folder_in_both_layouts(tmp_path):
    for name in ("b/train.jsonl", "b/valid.jsonl", "a.train.jsonl", "a.valid.jsonl"):
        write_rows(tmp_path / name, classified(20, 0))
    assert [name for name, *_ in find_tasks(tmp_path)] == ["b", "a"]
    (tmp_path / "a.valid.jsonl").unlink()
    with pytest.raises(TaskError, match=r"a\.valid\.jsonl: is missing"):
        find_tasks(tmp_path)


def test_fields_labels_and_measures_are_recognised(tmp_path):
    pair = read_task("mrpc", *(write_rows(tmp_path / f"{n}.jsonl", classified(20, n, pair=True)) for n in range(2)))
    assert (pair.metric, pair.classes, pair.positive) == ("f1", ("0", "1"), 1)
    assert len(pair.train.texts[0]) == 2
    numbers = read_task("x", *(write_rows(tmp_path / f"{n}.jsonl", numbered(20, n)) for n in range(2)))
    assert (numbers.metric, numbers.classes) == ("spearman", ())
    assert numbers.train.labels.dtype == np.float64

    rows = [{"text": f"He is Tom {n}", "span1_text": "Tom", "span2_text": "He", "label": n % 2 == 0} for n in range(12)]
    (tmp_path / "wsc").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    spans = read_task("wsc", tmp_path / "wsc", tmp_path / "wsc")
    senses = [
        {"word": "place", "sentence1": f"my place {n}", "sentence2": "no place", "label": n % 2} for n in range(12)
    ]
    (tmp_path / "wic").write_text("".join(json.dumps(row) + "\n" for row in senses))
    assert read_task("wic", tmp_path / "wic", tmp_path / "wic").train.texts[3] == ("place: my place 3", "no place")
    squad = [{"context": "c", "question": "q", "answers": {"text": ["a"]}, "label": n % 2} for n in range(12)]
    (tmp_path / "squad").write_text("".join(json.dumps(row) + "\n" for row in squad))
    with pytest.raises(TaskError, match="as in SQuAD"):
        read_task("t", tmp_path / "squad", tmp_path / "squad")
    assert spans.train.texts[3] == ("He is Tom 3", "He refers to Tom.")
    assert spans.classes == ("false", "true")


def test_settings_of_a_task(tmp_path):
    rows = [{"a": "x {b}", "b": f"y {n}", "gold": ["no", "yes"][n % 2]} for n in range(12)]
    path, settings = tmp_path / "rows", tmp_path / "task.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings.write_text(
        json.dumps({"texts": ["{a}: {b}"], "label": "gold", "labels": ["yes", "no"], "positive": "yes", "metric": "f1"})
    )
    task = read_task("t", path, path, settings)
    assert task.train.texts[1] == ("x {b}: y 1",)  # what looks like a field in a text is text
    assert (task.classes, task.positive, task.train.labels[:2].tolist()) == (("yes", "no"), 0, [1, 0])
    whole = [{"sentence": "x", "label": n} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in whole))
    settings.write_text('{"kind": "regression", "metric": "pearson"}')
    assert read_task("t", path, path, settings).train.labels.tolist() == list(range(12))


GOOD = [json.dumps({"sentence": f"text {n}", "label": n % 2}) for n in range(12)]


@pytest.mark.parametrize(
    ("train", "valid", "settings", "sentence"),
    [
        ([*GOOD[:5], '{"sentence": "x"}', *GOOD], GOOD, None, 'train.jsonl:6: has no field "label"'),
        (GOOD, [*GOOD, '{"label": 1}'], None, 'valid.jsonl:13: has no field "sentence"'),
        (GOOD, ['{"sentence": "x", "label": 1, "id": 3}', *GOOD], None, 'valid.jsonl:1: has a field "id"'),
        (GOOD, [*GOOD, "", '{"sentence": "x", "label": 2}'], None, "valid.jsonl:14: label is 2; the labels of"),
        (GOOD, ['{"sentence": "x", "label": "1x"}', *GOOD], None, 'valid.jsonl:1: label is "1x"'),
        (GOOD, ['{"sentence": "x", "label": true}', *GOOD], None, "valid.jsonl:1: label is true"),
        (GOOD, ['{"sentence": "x", "label": null}', *GOOD], None, "valid.jsonl:1: label is null"),
        ([*GOOD, '{"sentence": 5, "label": 1}'], GOOD, None, "train.jsonl:13: sentence is 5; a text must be a string"),
        ([*GOOD, "{oops"], GOOD, None, "train.jsonl:13: is not JSON"),
        ([*GOOD, "[1]"], GOOD, None, "train.jsonl:13: is not a JSON object"),
        (GOOD[:9], GOOD, None, "train.jsonl: has 9 examples; a task needs at least 10"),
        (GOOD, [], None, "valid.jsonl: has 0 examples"),
        (GOOD[::2] * 2, GOOD, None, "train.jsonl: every example has the same label"),
        ([*GOOD, '{"sentence": "x", "label": 7}'], GOOD, None, "train.jsonl: label 7 occurs once"),
        (['{"x": "a", "label": 0}'] * 12, GOOD, None, "train.jsonl:1: the fields label, x hold no text"),
        (GOOD, GOOD, '{"label": "gold"}', 'train.jsonl:1: has no field "gold"'),
        (GOOD, GOOD, '{"metric": "pearson"}', 'task.json: metric "pearson" does not fit classification'),
        (GOOD, GOOD, '{"positive": "2"}', 'task.json: "positive" is 2; the labels are 0, 1'),
        (GOOD, GOOD, '{"lables": [0, 1]}', "task.json: must be a JSON object with keys among"),
        (GOOD, GOOD, '{"kind": "ranking"}', "task.json: \"kind\" is 'ranking'"),
        (GOOD, GOOD, '{"labels": [0, 2]}', "train.jsonl:2: label is 1; the labels are 0, 2"),
        (GOOD, GOOD, "{", "task.json: cannot be read as JSON"),
        (['{"sentence": "x", "label": NaN}', *GOOD], GOOD, '{"kind": "regression"}', "train.jsonl:1: label is NaN"),
    ],
)  # fmt: skip
def test_bad_tasks_are_refused_before_a_model_is_loaded(tmp_path, capsys, train, valid, settings, sentence):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(train))
    (folder / "valid.jsonl").write_text("\n".join(valid))
    if settings:
        (folder / "task.json").write_text(settings)
    assert finetune.main([str(tmp_path / "no model"), "--tasks", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder / sentence.split(' ')[0]}"[: len(f"error: {folder}")])
    assert sentence in error
    assert error.count("\n") == 1


def test_held_out_part_has_its_fraction_of_each_class():
    labels = np.array([0] * 70 + [1] * 28 + [2] * 2)
    examples = Examples([(str(n),) for n in range(100)], labels)
    rest, held_out = split(examples, 3, 0.1, seed=0)
    assert sorted(rest.texts + held_out.texts) == sorted(examples.texts)
    assert np.bincount(held_out.labels).tolist() == [7, 3, 1]
    assert split(examples, 3, 0.1, seed=0)[1].texts == held_out.texts
    assert split(examples, 3, 0.1, seed=1)[1].texts != held_out.texts


# Rows and batches


def test_rows_and_how_long_ones_are_cut(tokenizer):
    def rows(texts, length=64):
        return encode(Examples([texts], np.zeros(1)), tokenizer, length)

    cat, dogs = tokenizer.encode("the cat").ids, tokenizer.encode("old dog " * 20).ids
    assert rows(("the cat",)).rows == [[1, *cat, 2]]
    assert rows(("the cat", "the cat")).rows == [[1, *cat, 2, *cat, 2]]
    cut = rows(("the cat", "old dog " * 20), 20)
    assert cut.rows == [[1, *cat, 2, *dogs[: 17 - len(cat)], 2]]
    assert cut.cut == 1
    assert rows(("old dog " * 20, "the cat"), 20).rows == [[1, *dogs[: 17 - len(cat)], 2, *cat, 2]]
    assert rows(("old dog " * 20, "old dog " * 30), 20).rows == [[1, *dogs[:9], 2, *dogs[:8], 2]]
    assert rows(("old dog " * 20,), 20).rows == [[1, *dogs[:18], 2]]
    assert rows(("", "the cat")).rows == [[1, 2, *cat, 2]]


def test_every_example_is_in_one_batch():
    lengths = [random.Random(n).randrange(3, 60) for n in range(333)]
    batches = epoch_batches(lengths, 16, key=1)
    assert sorted(np.concatenate(batches).tolist()) == list(range(333))
    assert len(batches) == 21
    waste = sum(max(lengths[n] for n in b) * len(b) for b in batches) / sum(lengths)
    assert waste < 1.25  # random batches: about 1.8
    assert [b.tolist() for b in epoch_batches(lengths, 16, key=1)] == [b.tolist() for b in batches]
    assert [b.tolist() for b in epoch_batches(lengths, 16, key=2)] != [b.tolist() for b in batches]

    batches = token_batches(lengths, 100)
    assert sorted(np.concatenate(batches).tolist()) == list(range(333))
    assert all(max(lengths[n] for n in batch) * len(batch) <= 100 for batch in batches)
    assert [len(batch) for batch in token_batches([500, 600], 100)] == [1, 1]


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[9] == max(rates) == 2.0
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(2.0 / 91)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(0, 1, 2.0, 0.0) == 2.0


def test_outputs_do_not_depend_on_padding_and_neighbours(encoder, tokenizer):
    """Of one example, in evaluation and under dropout, whatever else is in its batch."""
    model = TaskModel(encoder, 3)
    model.head.initialize(torch.Generator().manual_seed(0))
    short, long = encode(Examples([("cat",), ("the old dog sees a tree",)], np.zeros(2)), tokenizer, 64).rows
    keys = DropoutKeys(torch.tensor([5, 6]), torch.tensor(7))
    for training in (False, True):
        model.train(training)
        both = model(*pad([short, long], CPU), keys if training else None)
        alone = model(*pad([short], CPU), DropoutKeys(keys.rows[:1], keys.step) if training else None)
        torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-5)
        assert both.shape == (2, 3)
    assert not torch.allclose(both, model(*pad([short, long], CPU), keys._replace(step=torch.tensor(8))))


def test_head_sees_both_directions(encoder, tokenizer):
    """What `<s>` gives depends on the last word; with causal attention it could not."""
    model = TaskModel(encoder, 2).eval()
    rows = encode(Examples([("the cat",), ("the dog",)], np.zeros(2)), tokenizer, 64).rows
    first, second = model(*pad(rows, CPU), None)
    assert not torch.allclose(first, second)


# Learning


@pytest.mark.slow
def test_classification_is_learned_and_repeatable(encoder, tokenizer):
    task = Task("pairs", ("0", "1"), 1, "accuracy", classified(120, 0, pair=True), classified(40, 1, pair=True))
    settings = dataclasses.replace(SETTINGS, learning_rates=(1e-6, 3e-3))
    finetuner = Finetuner(encoder, tokenizer, settings)
    said: list[str] = []
    choice = finetuner.choose(task, said.append)
    assert choice.learning_rate == 3e-3
    assert choice.score == max(map(max, choice.scores)) > 0.8
    assert choice.epochs == 1 + choice.scores[1].index(choice.score)  # the first of the best
    assert len(said) == 2
    train, valid = (encode(part, tokenizer, 64) for part in (task.train, task.valid))
    (found,) = finetuner.train(task, train, valid, 3e-3, 3, seed=5, last_only=True)
    assert found["accuracy"] > 0.9


def test_training_is_a_function_of_the_seed_alone(encoder, tokenizer):
    """And each begins with the pretrained weights, whatever was trained before."""
    task = Task("t", ("0", "1"), 1, "accuracy", classified(24, 0), classified(10, 1))
    finetuner = Finetuner(encoder, tokenizer, SETTINGS)
    train, valid = (encode(part, tokenizer, 64) for part in (task.train, task.valid))
    outcomes = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(outcomes))  # plays no part
        before = finetuner.predict(finetuner._fresh_model(task, seed), valid)
        finetuner.train(task, train, valid, 1e-3, 1, seed)
        outcomes.append((before, encoder.transformer.mlp_layers[0].mlp["1"].weight.detach().clone().numpy()))
    assert all(np.array_equal(a, b) for a, b in zip(outcomes[0], outcomes[1], strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(outcomes[0], outcomes[2], strict=True))


def test_settings_are_chosen_without_the_validation_file(encoder, tokenizer):
    task = Task("t", ("0", "1"), 1, "matthews", classified(60, 0), classified(20, 1))
    other = dataclasses.replace(task, valid=Examples([("tree",)] * 20, 1 - task.valid.labels))
    finetuner = Finetuner(encoder, tokenizer, dataclasses.replace(SETTINGS, epochs=2))
    assert finetuner.choose(task, lambda text: None) == finetuner.choose(other, lambda text: None)


def test_regression_is_learned_in_its_own_units(encoder, tokenizer):
    task = Task("n", (), 0, "pearson", numbered(96, 0), numbered(40, 1))
    finetuner = Finetuner(encoder, tokenizer, SETTINGS)
    train, valid = (encode(part, tokenizer, 64) for part in (task.train, task.valid))
    (found,) = finetuner.train(task, train, valid, 3e-3, 3, seed=0, last_only=True)
    assert found["pearson"] > 0.8
    assert found["spearman"] > 0.8


def test_diverging_learning_rate_is_left_out(encoder, tokenizer):
    task = Task("t", ("0", "1"), 1, "accuracy", classified(40, 0), classified(20, 1))
    settings = dataclasses.replace(SETTINGS, learning_rates=(1e25, 1e-3), epochs=2, max_gradient=math.inf)
    choice = Finetuner(encoder, tokenizer, settings).choose(task, lambda text: None)
    assert choice.learning_rate == 1e-3
    assert all(map(math.isnan, choice.scores[0]))
    settings = dataclasses.replace(settings, learning_rates=(1e25,))
    with pytest.raises(generation.UsageError, match=r"task t: training diverges at every rate of --learning_rates"):
        Finetuner(encoder, tokenizer, settings).choose(task, lambda text: None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_learning_on_cuda_in_bf16_is_repeatable(inputs, tokenizer):
    """With heads that the fused kernels take, dropout on, rows of different lengths; and compiled."""
    config = ModelConfig.from_dict(json.loads((inputs / "model.json").read_text()) | {"hidden_size": 64})
    task = Task("pairs", ("0", "1"), 1, "accuracy", classified(160, 0, pair=True), classified(80, 1, pair=True))
    scores = []
    for compiled in (False, False, True):
        encoder = build_model(config, torch.Generator().manual_seed(0)).cuda()
        if compiled:
            compile_layers(encoder)
        finetuner = Finetuner(encoder, tokenizer, SETTINGS)
        train, valid = (encode(part, tokenizer, 64) for part in (task.train, task.valid))
        found = finetuner.train(task, train, valid, 3e-3, 3, seed=0)
        scores.append((found, encoder.transformer.mlp_layers[0].mlp["1"].weight.detach().cpu()))
        assert found[-1]["accuracy"] > 0.9
    assert scores[0][0] == scores[1][0]
    assert torch.equal(scores[0][1], scores[1][1])


# The command


@pytest.fixture
def loaded(monkeypatch, encoder, tokenizer):
    """Whatever MODEL is, it is a copy of `encoder`."""

    def load_model(path, ema, device):
        return copy.deepcopy(encoder).eval(), tokenizer, encoder.config

    monkeypatch.setattr(generation, "load_model", load_model)


@pytest.mark.slow
def test_command_prints_a_table_and_writes_json(loaded, tmp_path, capsys):
    for name, make in (("cola", classified), ("stsb", numbered)):
        write_rows(tmp_path / "tasks" / f"{name}.train.jsonl", make(40, 0))
        write_rows(tmp_path / "tasks" / f"{name}.valid.jsonl", make(20, 1))
    output = tmp_path / "out.json"
    flags = ["RUN", "--device", "cpu", "--tasks", str(tmp_path / "tasks"), "--output", str(output), "--epochs", "2"]
    flags += ["--batch_size", "8", "--learning_rates", "3e-3", "--num_seeds", "2"]
    assert finetune.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("-")] == ["task", "cola", "stsb", "average"]
    report = json.loads(output.read_text())
    cola = report["tasks"]["cola"]
    values = cola["measures"]["matthews"]["values"]
    assert cola["score"] == pytest.approx(np.mean(values))
    assert cola["measures"]["matthews"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert cola["simplest"] == 0.0
    assert (cola["seeds"], cola["learning_rate"], cola["train_examples"]) == ([0, 1], 3e-3, 40)
    assert set(report["tasks"]["stsb"]["measures"]) == {"pearson", "spearman"}
    assert report["average"] == pytest.approx(np.mean([task["score"] for task in report["tasks"].values()]))
    assert not list(tmp_path.glob("*.partial"))
    shown = {(each.name, each.measure): each for each in read_results(output).results}  # as reports and cards read them
    assert (shown["cola", "matthews"].value, shown["cola", "matthews"].seeds) == (cola["score"], 2)

    single = ["--train", str(tmp_path / "tasks" / "cola.train.jsonl")]
    single += ["--valid", str(tmp_path / "tasks" / "cola.valid.jsonl"), "--output", str(output)]
    assert finetune.main([*flags[:3], *single, *flags[7:]]) == 0
    again = json.loads(output.read_text())["tasks"]["cola"]
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in cola.items() if k != "seconds"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no task, or too much: give either --tasks FOLDER"),
        (["--train", "x"], "one of --train and --valid is missing"),
        (["--tasks", "x", "--train", "x"], "there is no task, or too much"),
        (["--tasks", "/nowhere"], "--tasks is /nowhere: there is no such folder"),
        (["--tasks", "/", "--epochs", "0"], "--epochs is 0: give 1 or more"),
        (["--tasks", "/", "--learning_rates", "1e-3", "-1"], "--learning_rates has -1"),
        (["--tasks", "/", "--held_out", "0"], "--held_out is 0: give a fraction"),
        (["--tasks", "/", "--max_length", "3"], "--max_length is 3"),
        (["--tasks", "/", "--warmup_proportion", "1"], "--warmup_proportion is 1"),
        (["--tasks", "/", "--seed", "-1"], "--seed is -1"),
    ],
)
def test_refusals_are_one_sentence(capsys, arguments, sentence):
    assert finetune.main(["RUN", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


def test_unknown_task_and_absent_output_folder(loaded, tmp_path, capsys):
    for name in ("train", "valid"):
        write_rows(tmp_path / "cola" / f"{name}.jsonl", classified(20, 0))
    for flags, sentence in (
        (["--only", "mnli"], f"--only names mnli: the tasks in {tmp_path} are cola."),
        (["--output", str(tmp_path / "no" / "x.json")], f"--output is {tmp_path}/no/x.json: there is no folder"),
        (["--output", str(tmp_path)], f"--output is {tmp_path}: it is a folder"),
    ):
        assert finetune.main(["RUN", "--device", "cpu", "--tasks", str(tmp_path), *flags]) == 2
        assert sentence in capsys.readouterr().err
