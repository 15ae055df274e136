"""Minimal pairs: scores against brute force, batching, ranks, temperatures, intervals, groups, files, refusals."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import flags, make_inputs, run, train_on
from tokenizers import Tokenizer

from evaluation import minimal_pairs
from evaluation.minimal_pairs import TEMPERATURES, select_temperature, selecting_half, summarise
from model import ModelConfig
from model_extra import GPTBert
from slurm.environment import Environment
from training.checkpoint import write_checkpoint
from training.config import ConfigError, TrainingConfig
from training.distributed import World, single_world
from training.loop import main as train
from training.metrics import read_metrics
from training.minimal_pairs import (
    Pair,
    PairScorer,
    PairSet,
    by_group,
    evaluate_pairs,
    grouping_fields,
    mean_share,
    read_pair_sets,
    share,
)
from training.sentence_scores import (
    Layout,
    Sentences,
    SpecialIds,
    encode_sentences,
    log_probabilities,
    sentence_sums,
    token_scores,
)
from training.setup import read_inputs

TEXT = "The function returns the length of the list. The list holds é, naïve and 東京 words. " * 20
TEXTS = [
    "The list holds words.",
    "unbelievable functionality",
    "a",
    "The naïve function returns 東京, and the list of lists.",
    "Words!",
]
WORLD = World(0, 1, torch.device("cpu"), Environment("none"))
SPECIAL = SpecialIds(bos=1, eos=2, pad=3, mask=4)
LAYOUT = Layout(4, 64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_on(TEXT, 300)


def tiny_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, vocab_size=vocab_size,
        max_position_embeddings=64, position_bucket_size=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPTBert:
    """Random weights, enlarged so that scores differ widely."""
    model = GPTBert(tiny_config(tokenizer.get_vocab_size()), torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@torch.no_grad()
def reference(
    model: GPTBert, ids: list[int], words: list[int], mode: str, *, eos: bool, temperatures=(1.0,)
) -> list[float]:
    """The definition at each temperature, one sentence and one mask at a time, in float64."""
    model = copy.deepcopy(model).double()
    totals = [0.0] * len(temperatures)
    for i in range(len(ids)):
        row = [1, *ids, *([2] if eos else [])]
        if mode == "causal":
            row = row[: i + 1]
        else:
            later = [j for j in range(i, len(ids)) if j == i or (mode == "word_l2r" and words[j] == words[i])]
            for j in later:
                row[1 + j] = 4
        inputs = torch.tensor([row])
        hidden = model.encode(inputs, torch.zeros_like(inputs), mode == "causal")
        logits = model.predict(hidden[0, i])
        for k, t in enumerate(temperatures):
            totals[k] += float((logits / t).log_softmax(-1)[ids[i]])
    return totals


def sums(model, tokenizer, layout=LAYOUT, special=SPECIAL, **options) -> np.ndarray:
    options = {"autocast": False, **options}
    sentences = encode_sentences(tokenizer, TEXTS, special)
    return sentence_sums(sentences, token_scores(model, sentences, special, WORLD, layout, **options))


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("mode", ["causal", "masked", "word_l2r"])
def test_scores_are_those_of_the_definition(model, tokenizer, mode, eos):
    special = SPECIAL if eos else SpecialIds(1, None, 3, 4)
    options = {"causal": mode == "causal", "word_l2r": mode == "word_l2r", "temperatures": (1.0, 2.5)}
    found = sums(model, tokenizer, special=special, **options)
    several = 0
    for index, text in enumerate(TEXTS):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        several += len(set(encoding.word_ids)) < len(encoding.ids)
        expected = reference(model, encoding.ids, encoding.word_ids, mode, eos=eos, temperatures=(1.0, 2.5))
        assert found[:, index].tolist() == pytest.approx(expected, rel=2e-6), text
    assert several >= 3  # words of several sub-words are among them


def test_modes_differ_and_special_tokens_are_not_scored(model, tokenizer):
    causal, masked = sums(model, tokenizer, causal=True)[0], sums(model, tokenizer, causal=False)[0]
    l2r = sums(model, tokenizer, causal=False, word_l2r=True)[0]
    assert (abs(causal - masked) > 1e-3).all()
    assert abs(masked - l2r)[1] > 1e-3
    sentences = encode_sentences(tokenizer, TEXTS, SPECIAL)
    scores = token_scores(model, sentences, SPECIAL, WORLD, Layout(4, 64), causal=False, autocast=False)[0]
    assert ((scores == 0) == (sentences.ids < 5)).all()  # <s> and </s>


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", [Layout(1, 32), Layout(64, 16), Layout(2, 200)])
def test_batching_and_packing_change_nothing(model, tokenizer, causal, layout):
    one = sums(model, tokenizer, causal=causal, layout=Layout(1, 128))
    np.testing.assert_allclose(sums(model, tokenizer, causal=causal, layout=layout), one, rtol=2e-6)


def test_logits_are_taken_in_parts(monkeypatch):
    logits, labels = torch.randn(11, 7), torch.randint(7, (11,))
    expected = torch.stack([(logits / t).log_softmax(-1)[torch.arange(11), labels] for t in (1.0, 0.5)])
    for parts in (4, 100):
        monkeypatch.setattr("training.sentence_scores._LABELS_AT_ONCE", parts)
        torch.testing.assert_close(log_probabilities(logits, labels, (1.0, 0.5)), expected)


def test_bf16_is_close(model, tokenizer):
    single, half = (sums(model, tokenizer, causal=True, autocast=autocast) for autocast in (False, True))
    assert (single != half).all()
    np.testing.assert_allclose(half, single, rtol=0.05)


def test_rows_grow_for_long_sentences_and_hold_as_many_tokens():
    assert Layout(8, 16).holding(16) == Layout(8, 16)
    assert Layout(8, 16).holding(33) == Layout(2, 64)
    assert Layout(1, 16).holding(40) == Layout(1, 64)


def test_shares_of_ranks_add_up(model, tokenizer):
    sentences = encode_sentences(tokenizer, TEXTS, SPECIAL)

    class Part(World):
        def sum(self, tensor, name=""):
            return tensor

    def scores(world):
        return token_scores(model, sentences, SPECIAL, world, Layout(2, 64), causal=False, autocast=False)

    parts = [scores(Part(rank, 3, WORLD.device, WORLD.environment)) for rank in range(3)]
    assert all((part != 0).sum() > 10 for part in parts)
    assert ((np.stack(parts) != 0).sum(0) <= 1).all()
    np.testing.assert_allclose(sum(parts), scores(WORLD), rtol=2e-6)


def pairs_of(texts: list[tuple[str, str]], paradigm: str = "p", **facts) -> tuple[Pair, ...]:
    return tuple(Pair(paradigm, good, bad, facts) for good, bad in texts)


def test_fused_is_the_mean_in_log_space(model, tokenizer):
    sets = [PairSet("a", pairs_of([("The list", "The lists"), ("a", "b")])), PairSet("b", pairs_of([("é", "naïve")]))]
    scorer = PairScorer(sets, tokenizer, SPECIAL)
    found = scorer.scores(model, ("masked", "causal", "fused"), WORLD, Layout(4, 32), autocast=False)
    assert [values.shape for values in found["fused"]] == [(1, 2, 2), (1, 1, 2)]
    for masked, causal, fused in zip(found["masked"], found["causal"], found["fused"], strict=True):
        np.testing.assert_array_equal(fused, (masked + causal) / 2)
    alone = scorer.scores(model, ("fused",), WORLD, Layout(4, 32), autocast=False)
    assert list(alone) == ["fused"]
    np.testing.assert_array_equal(alone["fused"][1], found["fused"][1])
    encoded = tokenizer.encode("naïve", add_special_tokens=False)
    expected = [reference(model, encoded.ids, encoded.word_ids, mode, eos=True)[0] for mode in ("masked", "causal")]
    assert found["fused"][1][0, 0, 1] == pytest.approx(sum(expected) / 2, rel=2e-6)


def test_a_model_trained_to_prefer_something_is_right_always():
    vocab, generator = 24, torch.Generator().manual_seed(1)
    model = GPTBert(tiny_config(vocab), generator).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(0)
    good = [[17, 18, 19, 20], [18, 19, 20, 21], [19, 20, 21, 22]]  # rising; falling ones are never seen
    rows = torch.tensor([[1, *ids, 2] for ids in good])
    causal, rows = torch.arange(6) < 3, torch.cat([rows, rows])
    for _ in range(40):
        hidden = torch.zeros_like(rows, dtype=torch.bool)
        hidden[torch.arange(3, 6), torch.randint(1, 5, (3,))] = True
        logits = model(rows.masked_fill(hidden, 4), torch.zeros_like(rows), causal)[:, :-1]
        wanted = rows[:, 1:].masked_fill(~(hidden | causal[:, None])[:, 1:], -100)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def metrics(texts: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        # The scorer is given ids instead of text.
        scorer = PairScorer([PairSet("s", pairs_of([("x", "y")] * len(texts)))], word_tokenizer(), SPECIAL)
        both = [[1, *ids, 2] for pair in texts for ids in pair]
        flat = np.concatenate(both)
        starts = np.cumsum([0, *(len(ids) for ids in both)])
        scorer.sentences = Sentences(flat, np.arange(len(flat)), starts, np.array([len(ids) - 2 for ids in both]))
        return evaluate_pairs(model, scorer, WORLD, Layout(4, 16), "all", autocast=False)

    preferred = [(ids, ids[::-1]) for ids in good]
    assert model.training
    expected = {f"eval/{mode}/s{of}": 1.0 for mode in ("masked", "causal", "fused") for of in ("", "/p")}
    assert metrics(preferred) == expected
    assert model.training  # the mode is restored
    assert set(metrics([(bad, ids) for ids, bad in preferred]).values()) == {0.0}


def word_tokenizer() -> Tokenizer:
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({"<unk>": 0, "x": 16, "y": 17}, unk_token="<unk>"))


# Statistics


def test_wilson_interval_by_its_definition():
    found = share(np.array([True] * 70 + [False] * 30))
    assert (found.value, found.pairs) == (0.7, 100)
    # The interval's ends are the p at which the observation is 1.96 standard errors of p away.
    for end in (found.low, found.high):
        assert abs(0.7 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 100), rel=1e-5)
    perfect = share(np.ones(10, bool))
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    assert perfect.low == pytest.approx(10 / (10 + 1.959964**2), rel=1e-5)


def test_mean_of_files_weighs_files_alike_and_its_interval_covers():
    many, few = share(np.ones(1000, bool)), share(np.zeros(10, bool))
    found = mean_share([many, few])
    assert found.value == 0.5
    assert found.pairs == 1010
    assert mean_share([many]) == many
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        found = mean_share([share(generator.random(n) < p) for n, p in ((40, 0.9), (100, 0.6), (25, 0.98))])
        covered += found.low <= (0.9 + 0.6 + 0.98) / 3 <= found.high
    assert 0.92 <= covered / 400 <= 0.985


def test_groups_and_which_fields_make_them():
    facts = [
        {"field": "syntax", "pair_id": str(n), "row": n, "kind": "AB"[n % 2], "UID": "pq"[n // 5]} for n in range(10)
    ]
    pairs = [Pair("pq"[n // 5], "g", "b", fact) for n, fact in enumerate(facts)]
    # one value only, as many values as pairs, numbers, the file's own name: no groups
    assert grouping_fields(pairs) == ["kind"]
    right = np.arange(10) % 2 == 0
    assert {name: (of.value, of.pairs) for name, of in by_group([f["kind"] for f in facts], right).items()} == {
        "A": (1.0, 5),
        "B": (0.0, 5),
    }


def many_pairs(count: int = 40) -> list[Pair]:
    return [Pair(name, f"good {n}", f"bad {n}", {}) for name in ("one", "two") for n in range(count)]


def test_halves_do_not_depend_on_the_order_of_lines():
    pairs = many_pairs(41)
    half = selecting_half(pairs)
    assert [half[:41].sum(), half[41:].sum()] == [20, 20]
    order = np.random.default_rng(0).permutation(len(pairs))
    assert (selecting_half([pairs[i] for i in order]) == half[order]).all()


def test_temperature_is_the_best_on_its_half_and_of_equals_the_closest_to_one():
    pairs = many_pairs(2)
    right = np.array([[1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1]], bool)
    assert select_temperature(pairs, right, [1.0, 1.5, 2.0]) == 1
    assert select_temperature(pairs, right, [3.0, 2.0, 1.5]) == 2
    # files weigh alike, not pairs
    unequal = [*many_pairs(3)[:3], Pair("two", "g", "b", {})]
    assert select_temperature(unequal, np.array([[1, 1, 1, 0], [0, 0, 1, 1]], bool), [1.0, 2.0]) == 1


def test_selection_never_touches_the_reported_half():
    pairs, temperatures = many_pairs(), (0.5, 1.0, 2.0)
    half = selecting_half(pairs)
    generator = np.random.default_rng(3)
    scores = generator.normal(size=(3, len(pairs), 2))
    scores[2, half, 0] += 3  # T = 2 is best on the half for choosing
    found = []
    for best_reported in range(3):
        changed = scores.copy()
        changed[:, ~half, 0] = changed[:, ~half, 1] - 1
        changed[best_reported, ~half, 0] += 2  # there, another temperature would be perfect
        found.append(summarise(PairSet("s", tuple(pairs)), {"causal": changed}, temperatures, True))
    for best_reported, result in enumerate(found):
        of = result["modes"]["causal"]
        assert of["temperature"] == 2.0
        assert result["pairs"] == of["all"]["pairs"] == (~half).sum()
        assert of["all"]["accuracy"] == (1.0 if best_reported == 2 else 0.0)
        assert of["mean_at_temperature_1"]["accuracy"] == (1.0 if best_reported == 1 else 0.0)
    # and without selection, all pairs count
    result = summarise(PairSet("s", tuple(pairs)), {"causal": scores[:1]}, (1.0,), False)
    assert result["pairs"] == len(pairs)
    assert 1.0 in TEMPERATURES


# Files and the command line


def write_pairs(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def pair(good: str = "The list holds.", bad: str = "The lists holds.", **facts) -> dict:
    return {"sentence_good": good, "sentence_bad": bad, **facts}


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
    assert sets[1].pairs[0].facts == {"row": 3}
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
        {"flags": {"document_end": False}},
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
    assert results["document_end"] is False  # as the checkpoint says
    modes = results["sets"]["set"]["modes"]
    assert list(modes) == ["masked", "causal", "fused"]
    each = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for index, line in enumerate(each):
        encoding = tokenizer.encode(lines[index]["sentence_good"], add_special_tokens=False)
        for mode in ("masked", "causal"):
            [expected] = reference(model, encoding.ids, encoding.word_ids, mode, eos=False)
            assert line[f"{mode}_good"] == pytest.approx(expected, rel=2e-6)
        assert line["sentence_bad"] == lines[index]["sentence_bad"]
    for mode, found in modes.items():
        right = [line[f"{mode}_good"] > line[f"{mode}_bad"] for line in each]
        assert found["all"]["accuracy"] == pytest.approx(sum(right) / 9)
        assert found["mean"]["accuracy"] == pytest.approx((sum(right[:5]) / 5 + sum(right[5:]) / 4) / 2)
        assert found["groups"]["linguistics_term"]["b"]["pairs"] == 4
    if plot:
        assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")

    # Uniform probabilities: the averaged weights were used, equal scores are not right, -n log V is the score.
    same = write_pairs(tmp_path / "same.jsonl", [pair("a b", "b a")] * 4)
    scored = ["--scores", str(tmp_path / "e.jsonl"), "--ema", "--mode", "causal"]
    assert minimal_pairs.main([str(checkpoint), "--data", str(same), "--device", "cpu", *scored]) == 0
    assert " 0.0 [0.0, " in capsys.readouterr().out
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


def test_training_evaluates_the_same_on_one_rank_and_on_two(tmp_path, capsys):
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
            assert train(arguments, "a run", single_world) == 0
            printed = capsys.readouterr().out
        assert "minimal pairs (EMA): pairs masked" in printed
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


def test_errors_in_the_data_come_before_training(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    bad = write_pairs(tmp_path / "bad.jsonl", [pair(), {"sentence_good": "x"}])
    cases = [
        ({"evaluate_data": bad}, f'--evaluate_data: {bad}, line 2: "sentence_bad" is missing'),
        ({"evaluate_every": 5}, "--evaluate_every is 5 but there is no --evaluate_data"),
    ]
    for options, words in cases:
        values = dict(item[2:].split("=", 1) for item in flags(inputs, tmp_path / "runs") if "=" in item)
        known = {name: values[name] for name in ("train_path", "config_file", "tokenizer_path", "output_dir", "name")}
        with pytest.raises(ConfigError) as caught:
            read_inputs(
                TrainingConfig(**known, **{key: v if isinstance(v, int) else str(v) for key, v in options.items()})
            )
        assert str(caught.value).startswith(words)
    assert not (tmp_path / "runs").exists()
