"""Minimal pairs: scores against brute force, batching, ranks; intervals, groups and the choice of a temperature."""

import math

import numpy as np
import pytest
import torch
from helpers.tiny_evaluation import reference, tiny_config, tiny_model
from helpers.tiny_runs import TEXT, train_on
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from evaluation.generation import LoadedModel
from evaluation.minimal_pairs import TEMPERATURES, score, select_temperature, selecting_half, summarise
from evaluation.pair_accuracy import (
    Pair,
    PairSet,
    accuracy,
    by_group,
    grouping_fields,
    mean_accuracy,
)
from evaluation.scoring import ScoringModel
from evaluation.suites import measure_suites, pair_suite
from evaluation.token_log_probs import (
    BatchShape,
    Scorer,
    SpecialIds,
    encode_sentences,
    log_probabilities,
    sentence_sums,
    token_scores,
)
from evaluation.validation import evaluation_mode
from model_extra import GPTBert
from training.distributed import World
from training.environment import Environment

TEXTS = [
    "The list holds words.",
    "unbelievable functionality",
    "a",
    "The naïve function returns 東京, and the list of lists.",
    "Words!",
]
WORLD = World(0, 1, torch.device("cpu"), Environment("none"))
SPECIAL = SpecialIds(bos=1, eos=2, pad=3, mask=4)
SHAPE = BatchShape(4, 64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_on(TEXT, 300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPTBert:
    """With weights enlarged so that scores differ widely."""
    return tiny_model(tokenizer.get_vocab_size(), scale=2)


def sums(model, tokenizer, shape=SHAPE, special=SPECIAL, **options) -> np.ndarray:
    sentences = encode_sentences(tokenizer, TEXTS, special)
    scorer = Scorer(model, special, WORLD, shape, options.pop("autocast", False))
    return sentence_sums(sentences, token_scores(scorer, sentences, **options))


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("mode", ["causal", "masked", "word_l2r"])
def test_scores_match_their_definition(model, tokenizer, mode, eos):
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
    scores = token_scores(Scorer(model, SPECIAL, WORLD, BatchShape(4, 64)), sentences, causal=False)[0]
    assert ((scores == 0) == (sentences.ids < 5)).all()  # <s> and </s>


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [BatchShape(1, 32), BatchShape(64, 16), BatchShape(2, 200)])
def test_scores_do_not_depend_on_batching_and_packing(model, tokenizer, causal, shape):
    one = sums(model, tokenizer, causal=causal, shape=BatchShape(1, 128))
    np.testing.assert_allclose(sums(model, tokenizer, causal=causal, shape=shape), one, rtol=2e-6)


def test_log_probabilities_take_logits_in_parts(monkeypatch):
    logits, labels = torch.randn(11, 7), torch.randint(7, (11,))
    expected = torch.stack([(logits / t).log_softmax(-1)[torch.arange(11), labels] for t in (1.0, 0.5)])
    for parts in (4, 100):
        monkeypatch.setattr("evaluation.token_log_probs._LABELS_AT_ONCE", parts)
        torch.testing.assert_close(log_probabilities(logits, labels, (1.0, 0.5)), expected)


def test_scores_in_bf16_are_close(model, tokenizer):
    single, half = (sums(model, tokenizer, causal=True, autocast=autocast) for autocast in (False, True))
    assert (single != half).all()
    np.testing.assert_allclose(half, single, rtol=0.05)


def test_rows_grow_for_long_sentences_and_hold_as_many_tokens():
    assert BatchShape(8, 16).holding(16) == BatchShape(8, 16)
    assert BatchShape(8, 16).holding(33) == BatchShape(2, 64)
    assert BatchShape(1, 16).holding(40) == BatchShape(1, 64)


def test_scores_of_ranks_add_up(model, tokenizer):
    sentences = encode_sentences(tokenizer, TEXTS, SPECIAL)

    class Part(World):
        def all_reduce(self, tensor, what):
            return tensor

    def scores(world):
        return token_scores(Scorer(model, SPECIAL, world, BatchShape(2, 64)), sentences, causal=False)

    parts = [scores(Part(rank, 3, WORLD.device, WORLD.environment)) for rank in range(3)]
    assert all((part != 0).sum() > 10 for part in parts)
    assert ((np.stack(parts) != 0).sum(0) <= 1).all()
    np.testing.assert_allclose(sum(parts), scores(WORLD), rtol=2e-6)


def pairs_of(texts: list[tuple[str, str]], paradigm: str = "p", **fields) -> tuple[Pair, ...]:
    return tuple(Pair(paradigm, good, bad, fields) for good, bad in texts)


def test_fused_score_is_the_mean_in_log_space(model, tokenizer):
    sets = [PairSet("a", pairs_of([("The list", "The lists"), ("a", "b")])), PairSet("b", pairs_of([("é", "naïve")]))]
    loaded = LoadedModel.of(model, tokenizer)
    scorer = ScoringModel(model, SPECIAL, WORLD, BatchShape(4, 32), loaded=loaded, document_end=True)
    found = score(scorer, sets, ("masked", "causal", "fused"))
    assert [values.shape for values in found["fused"]] == [(1, 2, 2), (1, 1, 2)]
    for masked, causal, fused in zip(found["masked"], found["causal"], found["fused"], strict=True):
        np.testing.assert_array_equal(fused, (masked + causal) / 2)
    alone = score(scorer, sets, ("fused",))
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
        labels = rows[:, 1:].masked_fill(~(hidden | causal[:, None])[:, 1:], -100)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def metrics(texts: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        words = WordLevel({"<unk>": 0, **{f"w{number}": number for number in range(16, vocab)}}, unk_token="<unk>")
        tokenizer = Tokenizer(words)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        pairs = pairs_of([tuple(" ".join(f"w{n}" for n in ids) for ids in pair) for pair in texts])
        suite = pair_suite(PairSet("s", pairs), tokenizer, SPECIAL)
        with evaluation_mode(model):
            return measure_suites(Scorer(model, SPECIAL, WORLD, BatchShape(4, 16)), [suite], "all")

    preferred = [(ids, ids[::-1]) for ids in good]
    assert model.training
    expected = {f"eval/{mode}/s{of}": 1.0 for mode in ("masked", "causal", "fused") for of in ("", "/p")}
    assert metrics(preferred) == expected
    assert model.training  # the mode is restored
    assert set(metrics([(bad, ids) for ids, bad in preferred]).values()) == {0.0}


# Statistics


def test_wilson_interval_matches_its_definition():
    found = accuracy(np.array([True] * 70 + [False] * 30))
    assert (found.value, found.pairs) == (0.7, 100)
    # The interval's ends are the p at which the observation is 1.96 standard errors of p away.
    for end in (found.low, found.high):
        assert abs(0.7 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 100), rel=1e-5)
    perfect = accuracy(np.ones(10, bool))
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    assert perfect.low == pytest.approx(10 / (10 + 1.959964**2), rel=1e-5)


def test_mean_of_files_weighs_files_alike_and_its_interval_covers():
    many, few = accuracy(np.ones(1000, bool)), accuracy(np.zeros(10, bool))
    found = mean_accuracy([many, few])
    assert found.value == 0.5
    assert found.pairs == 1010
    assert mean_accuracy([many]) == many
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        found = mean_accuracy([accuracy(generator.random(n) < p) for n, p in ((40, 0.9), (100, 0.6), (25, 0.98))])
        covered += found.low <= (0.9 + 0.6 + 0.98) / 3 <= found.high
    assert 0.92 <= covered / 400 <= 0.985


def test_groups_and_which_fields_make_them():
    fields = [
        {"field": "syntax", "pair_id": str(n), "row": n, "kind": "AB"[n % 2], "UID": "pq"[n // 5]} for n in range(10)
    ]
    pairs = [Pair("pq"[n // 5], "g", "b", each) for n, each in enumerate(fields)]
    # one value only, as many values as pairs, numbers, the file's own name: no groups
    assert grouping_fields(pairs) == ["kind"]
    right = np.arange(10) % 2 == 0
    assert {name: (of.value, of.pairs) for name, of in by_group([f["kind"] for f in fields], right).items()} == {
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
