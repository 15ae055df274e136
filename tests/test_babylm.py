"""BabyLM's zero-shot tasks: scores of every format against brute force in float64, results, files, what is refused."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_evaluation import (
    EWOK,
    MODES,
    PAIR,
    PLACES,
    SPECIAL,
    WORLD,
    brute,
    brute_word,
    checkpoint_of,
    enlarged,
    tiny_model,
    write_lines,
    write_pipeline,
)  # fmt: skip
from tokenizers import Tokenizer, models, pre_tokenizers

from data.results import read_results
from evaluation import babylm, reading_times, zero_shot
from evaluation.babylm import Suite, encode, model_name, score
from evaluation.generation import LoadedModel
from evaluation.reading_times import ReadingTimes, encode_places, r_squared, surprisals
from evaluation.scoring import ScoringModel
from evaluation.token_log_probs import BatchShape, Scorer, SpecialIds, joined, sentence_sums, token_scores
from evaluation.zero_shot import Item, encode_items, find_datasets
from training.config import ConfigError

MODEL, TOKENIZER = enlarged()
EXACT = copy.deepcopy(MODEL).double()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("data") / "full_eval")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run with two checkpoints, the first of which has weights of zero, as the averaged ones of both."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    zero = copy.deepcopy(MODEL)
    for parameter in zero.parameters():
        parameter.detach().zero_()
    checkpoint_of(folder, zero, TOKENIZER, step=1, ema=True)
    checkpoint_of(folder, MODEL, TOKENIZER, step=2, ema=True)
    return folder


def test_every_task_against_brute_force(data, run_folder, tmp_path, capsys):
    command = [str(run_folder), "--data", str(data), "--device", "cpu", "--output", str(tmp_path)]
    assert babylm.main(command) == 0
    printed = capsys.readouterr()
    assert "glue_filtered is left out: fine-tuning" in printed.err
    assert "cdi_childes is left out: age of acquisition" in printed.err
    assert "each counted as 1 / k: masked 2, causal 2, fused 2" in printed.out
    base = tmp_path / "mine/main/zero_shot"
    found = json.loads((base / "results.json").read_text())["datasets"]
    datasets = [each for each in find_datasets(data, "--data")[0] if each.items]
    assert [each.name for each in datasets] + ["reading_data"] == sorted(found, key=lambda name: name == "reading_data")
    for each in datasets:
        for mode in MODES:
            scores = [
                [brute(EXACT, TOKENIZER, p, c, mode) for p, c in zip(item.prefixes, item.completions, strict=True)]
                for item in each.items
            ]
            backend = {"masked": "mlm"}.get(mode, mode)
            predicted = json.loads((base / backend / each.task / each.name / "predictions.json").read_text())
            lines = {line["id"]: line for of in predicted.values() for line in of["predictions"]}
            entry, by_uid, seen = found[each.name]["modes"][mode], {}, {}
            for item, line in zip(each.items, scores, strict=True):
                name = f"{item.paradigm}_{seen.setdefault(item.paradigm, 0)}"
                seen[item.paradigm] += 1
                ranked = [max(line) - score < 1e-9 for score in line]
                assert lines[name]["pred"] == item.texts[ranked.index(True)], (each.name, name, line)
                by_uid.setdefault((item.part, item.paradigm), []).append(ranked[0] / sum(ranked))
                if item.share is not None:
                    share = 1 / sum(math.exp(score - line[0]) for score in line)
                    assert lines[name]["prob"] == pytest.approx(share, rel=1e-4)
            if each.task.startswith("wug"):
                ranks = [
                    np.argsort(np.argsort(x)) for x in ([a - b for a, b in scores], [item.share for item in each.items])
                ]
                assert entry["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
                continue
            parts = {}
            for (part, _), right in by_uid.items():
                parts.setdefault(part, []).append(np.mean(right))
            assert entry["mean"]["accuracy"] == pytest.approx(np.mean([np.mean(of) for of in parts.values()]))
            assert entry["mean"]["low"] <= entry["mean"]["accuracy"] <= entry["mean"]["high"]
    shown = {(each.name, each.mode, each.measure): each for each in read_results(base / "results.json").results}
    for mode in MODES:  # as reports and model cards read them
        ewok, wug = found["ewok_filtered"]["modes"][mode], found["wug_past_tense"]["modes"][mode]
        assert shown["ewok_filtered", mode, "accuracy"].value == ewok["mean"]["accuracy"]
        assert shown["ewok_filtered/time", mode, "accuracy"].low == ewok["paradigms"]["time"]["low"]
        assert shown["wug_past_tense", mode, "Spearman's rho"].high == wug["high"]
        gain = found["reading_data"]["modes"][mode]["self_paced"]
        assert shown["reading_data_self_paced", mode, "gain in R2"].value == gain["gain"]
    one = found["supplement_filtered"]["modes"]["causal"]
    assert one["ties"] == 1
    assert one["official"] == pytest.approx(one["mean"]["accuracy"] + 0.25)  # the tie is one of two pairs


def test_surprisals_and_gains_of_reading(data, run_folder, tmp_path):
    command = [str(run_folder), "--data", str(data / "reading"), "--device", "cpu", "--output", str(tmp_path)]
    assert babylm.main(command) == 0
    base = tmp_path / "mine/main/zero_shot"
    found = json.loads((base / "results.json").read_text())["datasets"]["reading_data"]
    for mode in MODES:
        by_mode = [
            [[brute_word(EXACT, TOKENIZER, *place, part) if place[1] else math.nan for place in (line[:2], line[2:])]
             for line in PLACES] for part in (("masked", "causal") if mode == "fused" else (mode,))
        ]  # fmt: skip
        expected = np.mean(by_mode, axis=0)
        path = base / {"masked": "mlm"}.get(mode, mode) / "reading/reading_data/predictions.json"
        lines = json.loads(path.read_text())["reading"]["predictions"]
        assert [line["id"] for line in lines] == [f"reading_{n}" for n in range(48)]
        assert lines[0]["prev_pred"] is None
        shown = np.array([[line["pred"], line["prev_pred"]] for line in lines[: len(PLACES)]], float)
        np.testing.assert_allclose(shown, expected, rtol=1e-5)
        entry = found["modes"][mode]
        assert entry["measures"]["RTfirstfix"]["words"] == 47  # one has no frequency
        assert (
            entry["measures"]["self_paced_reading_time"]["words"] == 47 - 24
        )  # two words before have no frequency, nor is there one before the first
        gains = [entry["measures"][name]["gain"] for name in ("RTfirstfix", "RTgopast")]
        assert entry["eye_tracking"]["gain"] == pytest.approx(np.mean(gains))
        assert entry["self_paced"]["low"] <= entry["self_paced"]["high"]


def test_gains_are_those_of_the_linear_model():
    generator = np.random.default_rng(1)
    n = 400
    controls, own = generator.normal(size=(n, 3)) * [1, 5, 30] + [3, 4, 9], generator.uniform(2, 9, n)
    before, surprisal_before = generator.normal(size=(n, 2)), generator.uniform(2, 9, n)
    f, length, place = controls.T
    noise = generator.normal(size=n)
    eyes = 3 * own + f * length + place + 4 * noise
    paced = own + 2 * surprisal_before + before[:, 0] * length + noise
    times = {"RTfirstpass": eyes, "self_paced_reading_time": paced}
    found = reading_times.results(ReadingTimes((), times, controls, before), np.concatenate([own, surprisal_before]))

    def residual(columns, y):
        q, _ = np.linalg.qr(np.column_stack([np.ones(n), *columns]))
        left = y - q @ (q.T @ y)
        return 1 - left @ left / (n * y.var())

    base = [f, length, place, f * length, f * place, length * place]
    entry = found["measures"]["RTfirstpass"]
    assert entry["r2_without"] == pytest.approx(residual(base, eyes), rel=1e-9)
    assert entry["r2"] == pytest.approx(residual([*base, own], eyes), rel=1e-9)
    assert entry["gain"] == pytest.approx(entry["r2"] - entry["r2_without"])
    assert entry["gain_of_rest"] == pytest.approx(entry["gain"] / (1 - entry["r2_without"]))
    five = [f, length, place, *before.T]
    products = [five[i] * five[j] for i in range(5) for j in range(i)]
    gain = residual([*five, *products, own, surprisal_before], paced) - residual([*five, *products], paced)
    assert found["self_paced"]["gain"] == pytest.approx(gain, rel=1e-9)
    # The bootstrap's interval is about that of resampling in a loop.
    drawn = [generator.integers(n, size=n) for _ in range(300)]
    gains = [residual([x[i] for x in [*base, own]], eyes[i]) - residual([x[i] for x in base], eyes[i]) for i in drawn]
    width = np.subtract(*np.quantile(gains, [0.975, 0.025]))
    assert entry["high"] - entry["low"] == pytest.approx(width, rel=0.25)
    assert entry["low"] < entry["gain"] < entry["high"]
    assert r_squared(np.ones((3, 1)), np.full(3, 2.0)) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_completions_do_not_depend_on_what_shares_their_batches(causal):
    items = [
        Item("a", ("The list", "") * 2, (" holds words", "a", "s", " of"))
        for _ in range(3)
    ]  # fmt: skip
    choices = encode_items(items, TOKENIZER, SPECIAL)
    words, owners = encode_places((("The list", "returns"), ("", ""), ("", "naïve")), TOKENIZER, SPECIAL, causal)
    sums = []
    for parts, shape in (([choices, words], BatchShape(3, 40)), ([words, choices], BatchShape(1, 16))):
        texts = joined(parts)
        scores = token_scores(Scorer(MODEL, SPECIAL, WORLD, shape), texts, causal=causal)
        assert (scores[0] != 0).sum() == texts.counts.sum()
        found = np.split(sentence_sums(texts, scores)[0], [len(parts[0])])
        sums.append(found if parts[0] is choices else found[::-1])
    np.testing.assert_allclose(sums[0][0], sums[1][0], rtol=2e-6)
    np.testing.assert_allclose(sums[0][0].reshape(3, 4), sums[0][0][:4][None].repeat(3, 0), rtol=2e-6)
    np.testing.assert_allclose(sums[0][1], sums[1][1], rtol=2e-6)
    assert np.isnan(surprisals(sums[0][1], owners, 3)).tolist() == [False, True, False]


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_unknown_characters_and_choices_beyond_the_positions(tmp_path, capsys, unknown):
    """Dropped by the tokenizer, or a token like any other; rows of 72 tokens of a model with 64 positions."""
    words = {**{f"<{n}>": n for n in range(5)}, "<s>": 1, "<unk>": 0, "a": 5, "b": 6}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>", "<mask>"])
    lines = [{"prefix_acceptable": "a", "prefix_unacceptable": "b " * 70 + "a", "property_phrase": of} for of in "éb"]
    write_lines(tmp_path / "comps/a.jsonl", lines)
    [dataset], _ = find_datasets(tmp_path, "--data")
    special = SpecialIds(tokenizer.token_to_id("<s>"), None, 3, 4)
    choices = encode_items(dataset.items, tokenizer, special)
    assert choices.counts.tolist() == ([1, 1, 1, 1] if unknown else [0, 0, 1, 1])
    model = tiny_model(tokenizer.get_vocab_size())
    loaded = LoadedModel(model, tokenizer, torch.device("cpu"))
    scoring = ScoringModel(model, special, WORLD, BatchShape(2, 64), loaded=loaded, document_end=False)
    suite = Suite((dataset,), {})
    exact = copy.deepcopy(model).double()
    for mode, found in score(scoring, suite, encode(suite, tokenizer, special, MODES[:2]), MODES).items():
        for item, line in zip(dataset.items, found["comps"], strict=True):
            for prefix, completion, of in zip(item.prefixes, item.completions, line, strict=True):
                scored = unknown or completion == " b"
                assert of == pytest.approx(brute(exact, tokenizer, prefix, completion, mode) if scored else 0, rel=1e-5)
    said = capsys.readouterr().err
    assert "note: 2 texts of up to 73 tokens, beyond the model's 64 positions" in said
    assert ("note: 2 choices without a token" in said) == (not unknown)


def test_several_checkpoints_and_averaged_weights(data, run_folder, tmp_path, capsys):
    named = run_folder / "checkpoints/chck_1M"  # as --save_words names them
    named.symlink_to("step_00000002")
    checkpoints = [str(run_folder / "checkpoints/step_00000001"), str(named)]
    part = tmp_path / "fast_eval"
    part.mkdir()
    (part / "supplement_fast").symlink_to(data / "supplement_filtered")
    command = ["--data", str(part), "--device", "cpu", "--mode", "causal", "--output", str(tmp_path / "out")]
    assert babylm.main([*checkpoints, *command]) == 0
    printed = capsys.readouterr().out
    assert printed.count("supplement_fast") == 3  # twice alone, once beside each other
    assert "mine/step_00000001" in printed
    for name in ("step_00000001", "chck_1M"):
        assert (tmp_path / f"out/mine/{name}/zero_shot/results.json").exists()
    named.unlink()
    assert babylm.main([str(run_folder), "--ema", *command]) == 0
    zero = json.loads((tmp_path / "out/mine-ema/main/zero_shot/results.json").read_text())
    assert zero["weights"] == "ema"
    assert model_name("/x/model/chck_10M", ema=False) == ("model", "chck_10M")
    assert babylm.main([str(run_folder), str(run_folder), *command]) == 2
    assert "two models would write to mine/main" in capsys.readouterr().err
    assert babylm.main([str(run_folder), str(tmp_path / "none"), *command]) == 2
    assert capsys.readouterr().out == ""  # refused before anything is scored


@pytest.mark.parametrize(
    ("file", "lines", "words"),
    [
        ("ewok/a.jsonl", [{**EWOK, "Context1": "a", "Target1": "b"}], 'line 1: "Target2" is missing'),
        ("comps/a.jsonl", [{"prefix_acceptable": "a", "prefix_unacceptable": 3}], '"prefix_unacceptable" is 3'),
        ("entity_tracking/a.jsonl", [{"input_prefix": "a", "options": ["b"]}], '"options" must be a list of two'),
        ("entity_tracking/a.jsonl", [{"input_prefix": "a", "options": ["b", "c"]}], '"numops" is missing'),
        ("wug_past_tense/a.jsonl", [{"sentences": "a", "ratio": 1}], '"sentences" must be two sentences'),
        ("wug_adj/a.jsonl", [{"sentences": "a\tb", "ratio": "x"}], "\"ratio\" is 'x'"),
        ("wug_adj/a.jsonl", ["{"], "line 1: not valid JSON"),
        ("reading/a.csv", ["item,word", "a,b"], "has no column 'prev_item'"),
        ("reading/a.txt", ["a"], "holds no .csv file"),
        ("blimp/a.txt", ["a"], "holds no .jsonl file"),
        ("other/a.jsonl", [PAIR], "holds no task"),
    ],
)
def test_bad_files_are_named(tmp_path, run_folder, capsys, file, lines, words):
    write_lines(tmp_path / file, lines)
    assert babylm.main([str(run_folder), "--data", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --data")
    assert words in error
    assert error.count("\n") == 1


def test_fast_and_full_together_are_refused_where_they_share_a_name(tmp_path):
    for name in ("fast_eval", "full_eval"):
        write_lines(tmp_path / name / "comps/a.jsonl",
                    [{"prefix_acceptable": "a", "prefix_unacceptable": "b", "property_phrase": "c"}])  # fmt: skip
    with pytest.raises(ConfigError, match="holds comps twice"):
        find_datasets(tmp_path, "--data")
    write_lines(tmp_path / "fast_eval/notes.jsonl", [PAIR])
    datasets, notes = find_datasets(tmp_path / "fast_eval", "--data")
    assert [each.task for each in datasets] == ["comps"]
    assert "notes.jsonl is left out: its name begins as that of no task" in notes[0]


def test_shares_and_their_correlation():
    scores = np.array([[0.0, math.log(3)], [math.log(4), 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(1 / (1 + np.exp(-zero_shot.first_log_odds(scores))), [0.25, 0.8, 0.5])
    items = [Item("w", ("", ""), ("a", "b"), share=share) for share in (0.1, 0.9, 0.2)]
    found = zero_shot.results(items * 10, np.tile(scores, (10, 1)))
    assert found["spearman"] == pytest.approx(1)
    z, se = math.atanh(0.5), math.sqrt(1.125 / 27)
    low, high = zero_shot.spearman_interval(0.5, 30)
    assert (low, high) == pytest.approx((math.tanh(z - 1.959964 * se), math.tanh(z + 1.959964 * se)))
