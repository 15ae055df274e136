"""finetune.py beyond labels of texts: words' labels, SuperGLUE's forms, embeddings, weights, answers for servers."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.foreign_tokenizers import write_tokenizer
from helpers.tiny_runs import make_inputs
from tokenizers import Tokenizer

from evaluation import finetune, finetune_grid, generation
from evaluation.finetune_data import read_task
from evaluation.finetune_embeddings import contrastive_loss, embedding_measures
from evaluation.finetune_forms import encode, loss_of
from evaluation.finetune_model import TaskModel, pad
from evaluation.finetune_superglue import answer_credit, grouped_measures
from evaluation.finetune_tags import entities, first_pieces, row_pieces, tag_measures
from evaluation.finetune_task import Examples, Task, TaskError, find_tasks, split
from evaluation.finetune_training import Finetuner, Settings
from model import ModelConfig
from model_extra import build_model

DRAW = random.Random(0)
WORDS = ["dog", "tree", "house", "old", "sees", "the"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), documents=60)


@pytest.fixture(scope="module")
def tokenizer(inputs) -> Tokenizer:
    return Tokenizer.from_file(str(inputs / "tokenizer.json"))


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# Words' labels


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", ""),
        ("B-A I-A O B-A", "A0-1 A3-3"),
        ("I-A I-A I-B O", "A0-1 B2-2"),  # IOB1; another type ends it
        ("B-A B-A I-A", "A0-0 A1-2"),
        ("O I-A O", "A1-1"),  # I- after O begins one
        ("B-A I-B", "A0-0 B1-1"),
        ("S-A S-A B-A E-A", "A0-0 A1-1 A2-3"),
        ("B-A I-A E-A I-A", "A0-2 A3-3"),  # behind an end a new one begins
        ("U-A B-A L-A O", "A0-0 A1-2"),
        ("E-A E-A", "A0-0 A1-1"),
        ("B-x-y I-x-y", "x-y0-1"),
    ],
)
def test_entities_of_hand_made_sentences(tags, found):
    assert sorted(f"{kind}{first}-{last}" for kind, first, last in entities(tags.split())) == found.split()


def test_entity_f1_counts_over_all_sentences():
    classes = ("B-A", "B-B", "I-A", "I-B", "O")
    gold = [np.array([0, 2, 4, 1]), np.array([4, 4])]
    guess = [np.array([0, 2, 4, 0]), np.array([4, 1])]  # one of two right, two wrong ones of three
    found = tag_measures(guess, gold, classes)
    assert found["precision"] == pytest.approx(1 / 3)
    assert found["recall"] == pytest.approx(1 / 2)
    assert found["f1"] == pytest.approx(2 / 5)
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert tag_measures([np.array([4])], [np.array([4])], classes)["f1"] == 0.0
    assert tag_measures(guess, gold, ("NOUN", "VERB", "ADJ", "DET", "X")) == {"accuracy": pytest.approx(4 / 6)}


CONLL = "-DOCSTART- -X- O\n\nEU NNP B-ORG\n# SYM O\nrejects VBZ O\n\n" + "Peter NNP B-PER\nsleeps VBZ O\n\n" * 10
CONLLU = (
    "# text = vom Haus\n1-2\tvom\t_\t_\n1\tvon\tvon\tADP\n2\tdem\tder\tDET\n2.1\tx\tx\tX\n3\tneuen Haus\tHaus\tNOUN\n\n"
)


def test_conll_files(tmp_path):
    for name, text in (("train.conll", CONLL), ("valid.conll", CONLL), ("u.conllu", CONLLU * 10)):
        (tmp_path / name).write_text(text)
    (tmp_path / "pos.train.conll").write_text(CONLL)
    (tmp_path / "pos.valid.conll").write_text(CONLL)
    assert find_tasks(tmp_path) == [("pos", tmp_path / "pos.train.conll", tmp_path / "pos.valid.conll")]
    task = read_task("ner", tmp_path / "train.conll", tmp_path / "valid.conll")
    assert task.train.texts[0] == ("EU", "#", "rejects")
    assert (task.classes, task.metric, len(task.train)) == (("B-ORG", "B-PER", "O"), "f1", 11)
    assert task.train.labels[0].tolist() == [0, 2, 2]
    task = read_task("pos", tmp_path / "u.conllu", tmp_path / "u.conllu")
    assert task.train.texts[0] == ("von", "dem", "neuen Haus")
    assert (task.classes, task.metric) == (("ADP", "DET", "NOUN"), "accuracy")
    (tmp_path / "train.conll").write_text(CONLL + "alone\n")
    with pytest.raises(TaskError, match=r"train\.conll:37: has 1 column"):
        read_task("ner", tmp_path / "train.conll", tmp_path / "valid.conll")


def test_tags_of_json_lines_may_be_numbers(tmp_path):
    rows = [{"tokens": ["EU", "rejects"], "ner_tags": [1, 0]}] * 12
    path, settings = (
        write(tmp_path / "train.jsonl", rows),
        write(tmp_path / "task.json", ['{"labels": ["O", "B-ORG"]}']),
    )
    assert (read_task("t", path, path).metric, read_task("t", path, path, settings).metric) == ("accuracy", "f1")
    assert read_task("t", path, path, settings).classes == ("O", "B-ORG")
    write(path, [*rows, {"tokens": ["EU"], "ner_tags": [1, 0]}])
    with pytest.raises(TaskError, match=r'train.jsonl:13: "ner_tags" must be a list of 1 tags'):
        read_task("t", path, path)


@pytest.mark.parametrize("kind", ["ours", "bert", "gpt2", "llama3", "llama2"])
def test_each_word_is_read_at_its_first_token(tokenizer, tmp_path, kind):
    """Whatever the tokenizer makes of spaces; long sentences take several rows, words without tokens are left out."""
    if kind != "ours":
        tokenizer = Tokenizer.from_file(str(write_tokenizer(kind, tmp_path) / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    words = ("The", "housetree", "sees", "\u00e9t\u00e9!", "dogs,", "old", "cats.") * 5
    labels = np.empty(1, dtype=object)
    labels[0] = np.arange(len(words)) % 7
    task = Examples([words], labels)
    for room in (400, 16):
        encoded = encode(task, tokenizer, room, form="tags")
        assert all(len(row) <= room for row in encoded.rows)
        seen = [number for _, own, _ in encoded.words for number in own]
        assert seen == list(range(len(words)))
        for row, label, (_, own, columns) in zip(encoded.rows, encoded.labels, encoded.words, strict=True):
            assert label[columns].tolist() == [number % 7 for number in own]
            assert int((label >= 0).sum()) == len(own)
            for column, after, number in zip(columns, [*columns[1:], len(row) - 1], own, strict=True):
                text = tokenizer.decode(row[column:after]).replace(" ", "").lower()
                word = words[number].lower()
                assert text == word or "unk" in text or not text.isascii() or not word.isascii()
    assert len(encoded.rows) > 5
    assert [token for row in encoded.rows for token in row[1:-1]] == encode(task, tokenizer, 400, form="tags").rows[0][
        1:-1
    ]


def test_words_without_tokens_and_words_longer_than_a_row():
    assert first_pieces([(0, 2), (3, 5)], ["ab", "\u200b", "c"], " ") == [0, 1, None]
    assert first_pieces([(0, 1), (1, 3), (3, 4)], ["a", "b", "c"], "") == [0, 1, 1]  # a token of two words
    assert row_pieces([0, 3, 5], 8, 3) == [(0, 3), (3, 5), (5, 8)]
    assert row_pieces([0, 7], 8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert row_pieces([], 0, 3) == [(0, 0)]


# SuperGLUE


def multirc(number: int) -> dict:
    answers = [{"text": f"answer {n}", "idx": n, "label": n % 2} for n in range(2)]
    questions = [{"question": f"q{q}?", "idx": q, "answers": answers} for q in range(2)]
    return {"idx": number, "passage": {"text": "The old dog.", "questions": questions}}


def record(number: int) -> dict:
    entities = [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 0, "end": 2}]
    query = {"query": "@placeholder barks", "answers": [{"start": 8, "end": 10, "text": "dog"}], "idx": number}
    return {"idx": number, "passage": {"text": "Cat and dog.", "entities": entities}, "qas": [query]}


def copa(number: int) -> dict:
    return {
        "premise": "The dog barks.", "choice1": "It sees a cat.", "choice2": "It is a tree.",
        "question": ("cause", "effect")[number % 2], "label": number % 2, "idx": number,
    }  # fmt: skip


def wic(number: int) -> dict:
    places = {"start1": 4, "end1": 7, "start2": 0, "end2": 3}
    return {"word": "dog", "sentence1": "the dog", "sentence2": "dog tree", "label": number % 2 == 0, **places}


def test_superglue_forms_are_read(tmp_path, tokenizer):
    def task(name, make, count=12):
        path = write(tmp_path / name / "train.jsonl", [make(number) for number in range(count)])
        return read_task(name, path, path)

    found = task("multirc", multirc)
    assert (found.metric, found.train.texts[1]) == ("f1_em", ("The old dog.", "q0? answer 1"))
    assert found.train.groups is not None
    assert found.train.groups[:5].tolist() == [0, 0, 1, 1, 2]
    rest, held = split(found.train, 2, 0.1, seed=0)
    assert rest.groups is not None
    assert held.groups is not None
    assert not set(rest.groups.tolist()) & set(held.groups.tolist())
    assert len(rest) + len(held) == 48

    found = task("record", record)
    assert found.train.texts[:2] == [("Cat and dog.", "Cat barks"), ("Cat and dog.", "dog barks")]
    assert found.train.labels[:2].tolist() == [0, 1]
    flat = {"passage": "Cat and dog.", "query": "@placeholder barks", "entities": ["Cat", "dog"], "answers": ["dog"]}
    again = task("flat", lambda number: {**flat, "idx": {"passage": 0, "query": number}})
    assert again.train.texts == found.train.texts
    assert again.train.labels.tolist() == found.train.labels.tolist()

    found = task("copa", copa)
    assert found.train.texts[0][0] == "The dog barks. What was the CAUSE of this?"
    encoded = encode(found.train, tokenizer, 64, form="choices")
    assert (encoded.per, len(encoded), len(encoded.rows)) == (2, 12, 24)
    assert (
        encoded.rows[1]
        == encode(Examples([(found.train.texts[0][0], "It is a tree.")], np.zeros(1)), tokenizer, 64).rows[0]
    )

    found = task("wic", wic)
    encoded = encode(found.train, tokenizer, 64, form="words")
    for row, spans in zip(encoded.rows, encoded.spans, strict=True):
        assert [tokenizer.decode(row[begin:end]).strip() for begin, end in spans] == ["dog", "dog"]
    with pytest.raises(TaskError, match=r"train.jsonl:13: start1 and end1 are 4 and 70, which are no characters"):
        task("wic", lambda number: wic(number) | ({"end1": 70} if number == 12 else {}), 13)
    with pytest.raises(TaskError, match=r"train.jsonl:2: is not in the form of the first line, record of SuperGLUE"):
        task("record", lambda number: record(number) if number != 1 else {"passage": {"text": "x"}, "qas": 3})


def test_measures_of_grouped_answers():
    assert answer_credit("the Dog!", ["dog", "old dog"]) == (1.0, 1.0)
    assert answer_credit("big old dog", ["old cat"]) == (pytest.approx(2 / 5), 0.0)
    outputs = np.array([[0, 1], [1, 0], [0, 1], [0, 2], [3, 0]])  # judged 1, 0, 1 | 1, 0
    groups, labels = np.array([0, 0, 0, 1, 1]), np.array([1, 0, 0, 1, 0])
    found = grouped_measures("questions", outputs, labels, groups, np.zeros((5, 2)))
    assert found == {"f1": pytest.approx(2 * 2 / (3 + 2)), "em": 0.5, "f1_em": pytest.approx(0.65)}
    credit = np.array([[0.2, 0], [0, 0], [0.4, 0], [1, 1], [0, 0]])
    found = grouped_measures("record", outputs, labels, groups, credit)  # row 0 (of equal ones the first) and row 3
    assert found == {"f1": pytest.approx(0.6), "em": 0.5, "f1_em": pytest.approx(0.55)}


# Embeddings and losses


def test_contrastive_loss_and_embedding_measures_by_their_formulas():
    vectors = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity
    total = 0.0
    for anchor in range(5):
        others = [vectors[n, 1] for n in range(5)] + [vectors[n, 2] for n in range(5)]
        scores = torch.stack([cosine(vectors[anchor, 0], other, dim=0) / 0.05 for other in others])
        total -= float(scores.log_softmax(0)[anchor]) / 5
    assert contrastive_loss(vectors).item() == pytest.approx(total, rel=1e-5)
    assert embedding_measures(np.eye(3)[:, None].repeat(2, 1), None) == {"accuracy": 1.0}
    assert embedding_measures(np.ones((3, 2, 4)), None) == {"accuracy": 0.0}  # all equal: nothing was found
    pairs = np.array([[[1, 0], [1, 0.1]], [[1, 0], [0, 1]], [[1, 0], [1, 1.0]]])
    assert embedding_measures(pairs, np.array([5.0, 0.0, 2.0]))["spearman"] == pytest.approx(1.0)


def test_weights_and_losses_by_their_formulas():
    task = Task("t", ("a", "b"), 1, "accuracy", *[Examples([("x",)] * 4, np.array([0, 0, 0, 1]))] * 2)
    assert task.balanced().weights == (pytest.approx(4 / 6), 2.0)
    outputs = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[0, -100, 1, -100, -100], [1, 1, -100, 0, -100]])
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    log = outputs.log_softmax(-1)
    places = [(0, 0), (0, 2), (1, 0), (1, 1), (1, 3)]
    each = [(float(weights[labels[p]]), -float(log[(*p, labels[p])])) for p in places]
    tags = dataclasses.replace(task, form="tags")
    weighted = sum(w * loss for w, loss in each) / sum(w for w, _ in each)
    assert loss_of(tags, outputs, labels, weights).item() == pytest.approx(weighted)
    assert loss_of(tags, outputs, labels, None).item() == pytest.approx(sum(loss for _, loss in each) / 5)
    assert loss_of(tags, outputs[:1], torch.full((1, 5), -100), None).item() == 0.0
    choices = loss_of(
        dataclasses.replace(task, form="choices"), outputs[0, :, :, None], torch.tensor([0, 1, 1, 0]), None
    )
    assert choices.item() == pytest.approx(-float(log[0][range(4), [0, 1, 1, 0]].mean()))


def test_wic_reads_the_marked_words(inputs, tokenizer):
    """The head has the states of `<s>` and the mean ones of both words, and embeddings are the mean of a row."""
    encoder = build_model(ModelConfig.from_json(inputs / "model.json"), torch.Generator().manual_seed(0)).eval()
    task = Task("t", ("0", "1"), 1, "accuracy", *[Examples([("x",)], np.zeros(1, np.int64))] * 2, "words")
    model = TaskModel.of(encoder, task, 2, seed=0).eval()
    rows = [[1, 9, 10, 11, 2, 12, 2], [1, 9, 2, 10, 11, 12, 13, 14, 2]]
    (ids, documents), spans = pad(rows, torch.device("cpu")), torch.zeros(2, 2, 12, dtype=torch.bool)
    for row, number, begin, end in ((0, 0, 1, 3), (0, 1, 5, 6), (1, 0, 1, 2), (1, 1, 4, 7)):
        spans[row, number, begin:end] = True
    hidden = encoder.encode(ids, documents, False)
    first = torch.stack([hidden[0, 0], hidden[0, 1:3].mean(0), hidden[0, 5]])
    second = torch.stack([hidden[1, 0], hidden[1, 1], hidden[1, 4:7].mean(0)])
    expected = model.head(torch.stack([first, second])[:, None], None)[:, 0]
    torch.testing.assert_close(model(ids, documents, None, spans), expected)
    means = torch.stack([hidden[0, :7].mean(0), hidden[1, :9].mean(0)])
    torch.testing.assert_close(TaskModel(encoder, 1, "embeddings").eval()(ids, documents, None), means)


# The command


def sentences(count: int) -> list[list[str]]:
    return [DRAW.choices([*WORDS, "cat"], k=DRAW.randrange(3, 7)) for _ in range(count)]


def test_every_form_is_learned_by_the_command_and_answers_its_server(inputs, tokenizer, tmp_path, monkeypatch, capsys):
    encoder = build_model(ModelConfig.from_json(inputs / "model.json"), torch.Generator().manual_seed(0)).eval()
    monkeypatch.setattr(generation, "load_model", lambda path, ema, device: (encoder, tokenizer, encoder.config))
    tagged = [{"tokens": words, "tags": ["B-A" if word == "cat" else "O" for word in words]} for words in sentences(72)]
    pairs = [{"anchor": f"the {a} {b}", "positive": f"{b} {a}"} for a in WORDS for b in WORDS if a != b]
    scored = [{"sentence1": p["anchor"], "sentence2": p["positive"], "score": 5} for p in pairs[:8]]
    others = zip(pairs[:8], pairs[9:17], strict=True)
    scored += [{"sentence1": a["anchor"], "sentence2": b["positive"], "score": 1} for a, b in others]
    tasks = {
        "ner": (tagged[:60], tagged[60:], tagged[60:]),
        "similar": (pairs, scored, None),
        "copa": ([copa(n) for n in range(10)], [copa(n) for n in range(4)], [copa(n) for n in range(4)]),
        "wic": ([wic(n) for n in range(12)], [wic(n) for n in range(6)], [wic(n) for n in range(4)]),
        "multirc": ([multirc(n) for n in range(10)], [multirc(0), multirc(1)], [multirc(7)]),
        "record": ([record(n) for n in range(10)], [record(0), record(1)], [record(7), record(9)]),
        "rte": ([{"premise": "cat" * (n % 2), "hypothesis": "a", "label": n % 2} for n in range(12)],) * 3,
    }  # fmt: skip
    for name, parts in tasks.items():
        for part, rows in zip(("train", "valid", "test"), parts, strict=True):
            if rows:
                write(tmp_path / "tasks" / name / f"{part}.jsonl", rows)
    flags = [
        "RUN",
        "--device",
        "cpu",
        "--tasks",
        tmp_path / "tasks",
        "--output",
        tmp_path / "out.json",
        "--epochs",
        "3",
    ]
    flags += ["--batch_size", "6", "--learning_rates", "3e-3", "--num_seeds", "1", "--class_weights", "balanced"]
    flags += ["--patience", "2", "--predictions", tmp_path / "answers"]
    assert finetune.main([str(flag) for flag in flags]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert {name: of["metric"] for name, of in found.items()} == {
        "ner": "f1", "similar": "spearman", "copa": "accuracy", "wic": "accuracy", "multirc": "f1_em",
        "record": "f1_em", "rte": "accuracy",
    }  # fmt: skip
    assert found["ner"]["score"] > 0.9
    assert found["similar"]["score"] > 0.5
    assert found["record"]["score"] == 1.0

    def lines(name):
        return [json.loads(line) for line in (tmp_path / "answers" / name).read_text().splitlines()]

    assert {line["label"] for line in lines("COPA.jsonl")} <= {0, 1}
    assert {line["label"] for line in lines("WiC.jsonl")} <= {"true", "false"}
    (passage,) = lines("MultiRC.jsonl")
    assert passage["idx"] == 7
    for number, question in enumerate(passage["passage"]["questions"]):
        assert question["idx"] == number
        assert [(answer["idx"], answer["label"] in (0, 1)) for answer in question["answers"]] == [(0, True), (1, True)]
    assert lines("ReCoRD.jsonl") == [{"idx": 7, "label": "dog"}, {"idx": 9, "label": "dog"}]
    assert {line["label"] for line in lines("RTE.jsonl")} <= {"entailment", "not_entailment"}
    assert (tmp_path / "answers" / "RTE.tsv").read_text().startswith("index\tprediction\n0\t")
    blocks = (tmp_path / "answers" / "ner.conll").read_text().rstrip("\n").split("\n\n")
    words = [[line.split("\t")[0] for line in block.split("\n")] for block in blocks]
    assert words == [each["tokens"] for each in tagged[60:]]


def test_a_grid_is_joined_by_the_held_out_scores_alone(tmp_path, capsys):
    def job(rate: float, seed: int, held_out: float, score: float, model: str = "runs/a") -> Path:
        measures = {"accuracy": {"mean": score, "deviation": None, "values": [score]}}
        entry = {
            "metric": "accuracy", "score": score, "measures": measures, "simplest": 0.5, "seeds": [seed], "epochs": 3,
            "learning_rate": rate, "held_out_score": held_out, "train_examples": 10, "valid_examples": 5,
        }  # fmt: skip
        path = tmp_path / f"{rate}_{seed}_{model[-1]}.json"
        path.write_text(json.dumps({"model": model, "ema": True, "tasks": {"rte": entry}, "average": score}))
        return path

    files = [job(1e-4, 0, 0.9, 0.6), job(1e-4, 1, 0.6, 0.7), job(3e-5, 0, 0.7, 0.9), job(3e-5, 1, 0.7, 0.8)]
    output = tmp_path / "joined.json"
    assert finetune_grid.main([*map(str, files), "--output", str(output)]) == 0
    found = json.loads(output.read_text())["tasks"]["rte"]
    assert (found["learning_rate"], found["seeds"]) == (1e-4, [0, 1])  # held out 0.75 against 0.7
    assert found["score"] == pytest.approx(0.65)
    assert found["measures"]["accuracy"]["deviation"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    assert found["held_out_by_rate"] == {"0.0001": pytest.approx(0.75), "3e-05": pytest.approx(0.7)}
    assert "65.0" in capsys.readouterr().out
    assert finetune_grid.main([str(files[0]), str(files[0])]) == 2
    assert "task rte with rate 0.0001 and seed 0 is there twice" in capsys.readouterr().err
    assert finetune_grid.main([str(files[0]), str(job(1e-4, 2, 0.9, 0.6, "runs/b"))]) == 2
    assert "is of model runs/b (ema True), and the first of runs/a" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tags", "words", "embeddings", "choices"])
def test_forms_on_cuda_in_bf16_are_repeatable(inputs, tokenizer, form):
    config = dataclasses.replace(ModelConfig.from_json(inputs / "model.json"), hidden_size=64)
    texts = {
        "tags": [tuple(words) for words in sentences(48)],
        "words": [("the dog", "dog tree")] * 48,
        "embeddings": [("the dog", "dog"), ("tree", "old tree")] * 24,
        "choices": [("the dog", "sees", "tree")] * 48,
    }[form]
    labels = np.arange(48) % 2
    if form == "tags":
        labels = np.empty(48, dtype=object)
        labels[:] = [np.array([int(word == "cat") for word in words]) for words in texts]
    places = dict(zip(("start1", "end1", "start2", "end2"), (4, 7, 0, 3), strict=True))
    examples = Examples(texts, labels, None, [places] * 48)
    task = Task("t", () if form == "embeddings" else ("O", "B-A"), 1, "accuracy", examples, examples, form)
    settings = Settings((3e-3,), 2, 8, 64, 1, 1, 0, 0.2, 0.01, 0.1, 1.0, True)
    weights = []
    for _ in range(2):
        encoder = build_model(config, torch.Generator().manual_seed(0)).cuda()
        finetuner = Finetuner(encoder, tokenizer, settings)
        rows = finetuner.encode(examples, task)
        (found,) = finetuner.train(task, rows, rows, 3e-3, 2, seed=0, last_only=True)
        assert 0 <= found["accuracy"] <= 1
        weights.append(encoder.transformer.mlp_layers[0].mlp["1"].weight.detach().cpu())
    assert torch.equal(*weights)
