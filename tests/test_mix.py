"""Mixes by weight, temperature and stages: what is asked for, what is real, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpus import Corpus, CorpusError
from data.loader import BatchBuilder
from data.masking import MaskingOptions
from data.mix import read_mix
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan
from data.shards import write_shard

HASH, VOCABULARY = "ab" * 32, 1 << 20
PLAN = DataPlan(40, 16, 32, batch_reduction=1, hybrid_numerator=3, hybrid_denominator=4, milestones=(), seed=3)
TOKENS = PLAN.tokens_before(40)  # 20,480


def sources(folder: Path, **sizes: tuple[int, int]) -> None:
    """A shard NAME.shard of so many documents of so many tokens each; the n-th name's tokens begin at n * 100,000 + 16.

    Each token of a document is one more than that of the document before.
    """
    for number, (name, (documents, length)) in enumerate(sizes.items()):
        first = number * 100_000 + 16
        write_shard(folder / f"{name}.shard", [np.full(length, first + n) for n in range(documents)], HASH, VOCABULARY)


def open_mix(folder: Path, content: dict[str, Any]) -> Corpus:
    (folder / "mix.json").write_text(json.dumps(content))
    return Corpus(folder / "mix.json", tokenizer_hash=HASH, bos_id=1, eos_id=2, seed=3)


def build(folder: Path, content: dict[str, Any], plan: DataPlan = PLAN) -> BatchBuilder:
    return BatchBuilder(open_mix(folder, content), plan, MaskingOptions(VOCABULARY, row_start=False))


def weights(**amounts: float) -> list[dict[str, Any]]:
    return [{"path": f"{name}.shard", "weight": amount} for name, amount in amounts.items()]


def read(builder: BatchBuilder, begin: int, end: int, objective: int | None = None) -> np.ndarray:
    """Stored tokens of the rows of steps `begin` .. `end` - 1 (their first columns, which begin what they own)."""
    tokens = []
    for step in range(begin, end):
        batch = builder.step(step, 0, 1, "rows", 64).batch
        rows = batch.tokens if objective is None else batch.tokens[batch.objective == objective]
        tokens.append(rows[:, :-1].numpy().ravel())
    flat = np.concatenate(tokens)
    return flat[flat >= 16]


def fractions(tokens: np.ndarray) -> np.ndarray:
    """The fraction of tokens from each source."""
    counts = np.bincount(tokens // 100_000)
    return counts / counts.sum()


def test_weights_are_fractions_of_tokens(tmp_path):
    sources(tmp_path, web=(300, 30), books=(20, 90), code=(40, 18))
    corpus = open_mix(tmp_path, {"sources": weights(web=7, books=2, code=1)})
    sizes = [300 * 32, 20 * 92, 40 * 20]
    repeats = corpus.stage_repeats[0]
    assert [r * size for r, size in zip(repeats, sizes, strict=True)] == [
        sum(sizes) * Fraction(w, 10) for w in (7, 2, 1)
    ]
    builder = build(tmp_path, {"sources": weights(web=7, books=2, code=1)})
    np.testing.assert_allclose(builder.mix.tokens(40) / TOKENS, [0.7, 0.2, 0.1], atol=0.01)
    # Without <s> and </s>, of which short documents have more.
    owned = np.array([0.7 * 30 / 32, 0.2 * 90 / 92, 0.1 * 18 / 20])
    np.testing.assert_allclose(fractions(read(builder, 0, 40)), owned / owned.sum(), atol=0.015)
    for begin in (0, 10, 30):  # and in every part of the run
        np.testing.assert_allclose(fractions(read(builder, begin, begin + 10)), owned / owned.sum(), atol=0.06)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_temperature_evens_out_sizes(tmp_path, temperature):
    sources(tmp_path, large=(600, 14), small=(100, 4))
    listed = [{"path": "large.shard"}, {"path": "small.shard"}]
    corpus = open_mix(tmp_path, {"sources": listed, "temperature": temperature})
    sizes = np.array([600 * 16, 100 * 6])
    expected = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
    found = np.array([float(r) for r in corpus.stage_repeats[0]]) * sizes
    np.testing.assert_allclose(found / found.sum(), expected, rtol=1e-5)


def uses(tokens: np.ndarray, length: int) -> Counter:
    """How often each document was used, by its token; parts of it are fractions."""
    values, counts = np.unique(tokens, return_counts=True)
    return Counter({int(value): count / length for value, count in zip(values, counts, strict=True)})


def test_no_document_is_used_more_often_than_max_repeats(tmp_path):
    sources(tmp_path, web=(900, 30), good=(20, 30))
    content = {"sources": weights(web=1, good=1)}
    content["sources"][1]["max_repeats"] = 4
    builder = build(tmp_path, content)
    assert builder.mix.limited == [{1}]
    good = builder.mix.tokens(40)[1]
    assert 0.97 * 4 * 20 * 32 < good <= 4 * 20 * 32
    found = uses(read(builder, 0, 40), 30)
    assert max(count for document, count in found.items() if document >= 100_000) <= 4
    first, second = builder.mix.lines()
    assert first.startswith("web: 50.00% of tokens asked for, 87.")
    assert "real (with what max_repeats takes from others)" in first
    assert "good: 50.00% of tokens asked for, 12." in second
    assert "real (max_repeats 4)" in second
    assert second.endswith(f"tokens; used {good / 640:.2f} times")


def test_limit_of_the_whole_mix_and_repeats(tmp_path):
    sources(tmp_path, web=(900, 30), good=(20, 30))
    listed = [{"path": "web.shard"}, {"path": "good.shard", "repeat": 20}]
    builder = build(tmp_path, {"sources": listed, "max_repeats": 2})
    assert builder.mix.limited == [{1}]
    assert uses(read(builder, 0, 40), 30).most_common(1)[0][1] <= 2
    # A limit that is never reached changes no proportion.
    builder = build(tmp_path, {"sources": listed, "max_repeats": 200})
    assert builder.mix.limited == [set()]
    assert float(builder.mix.repeats(40)[1] / builder.mix.repeats(40)[0]) == pytest.approx(20, rel=0.1)


def test_mix_that_cannot_be_had_is_refused(tmp_path):
    sources(tmp_path, web=(100, 30), good=(20, 30))
    with pytest.raises(CorpusError, match=r"uses 20,480, .* give 7,680; raise max_repeats, add data, or lower --"):
        build(tmp_path, {"sources": weights(web=1, good=1), "max_repeats": 2})


def stages(*rest: tuple[Any, list[dict[str, Any]]], first: list[dict[str, Any]]) -> dict[str, Any]:
    return {"stages": [{"from": 0, "sources": first}, *({"from": at, "sources": listed} for at, listed in rest)]}


@pytest.mark.parametrize("begin", [0.75, "75%", 30, "15360t", "1.5e"])
def test_stage_begins_at_its_step(tmp_path, begin):
    sources(tmp_path, web=(320, 30), good=(20, 30))  # 10,240 tokens an epoch of the first stage
    builder = build(tmp_path, stages((begin, weights(good=1)), first=weights(web=1)))
    assert builder.mix.steps == (0, 30, 40)
    for objective in (MASKED, CAUSAL):
        assert fractions(read(builder, 0, 30, objective)).tolist() == [1]
        assert fractions(read(builder, 30, 40, objective)).tolist() == [0, 1]
    first, web, second, good = builder.mix.lines()
    assert first == "stage 1 from step 0 (0) to 30:"
    assert second.startswith("stage 2 from step 30 (")
    assert web == "web: 100.00% of tokens asked for, 100.00% real: 15,360 tokens; used 1.50 times by then"
    assert good == "good: 100.00% of tokens asked for, 100.00% real: 5,120 tokens; used 8.00 times"


def test_documents_of_an_earlier_stage_are_continued(tmp_path):
    """Three stages of half an epoch at most: a source's documents are met again only when all were used."""
    sources(tmp_path, web=(1200, 30), good=(200, 30))
    content = stages((10, weights(web=1, good=1)), ("50%", weights(web=9, good=1)), first=weights(web=19, good=1))
    builder = build(tmp_path, content)
    found = uses(read(builder, 0, 40), 30)  # of both objectives: their walks are one
    assert max(found.values()) <= 1
    assert sum(count == 1 for count in found.values()) > 0.97 * len(found)  # the ends of stages cut a few
    rest = builder.mix.tokens(10)
    assert rest[1] / rest.sum() == pytest.approx(0.05, abs=0.01)
    parts = builder.mix.tokens(20) - rest
    assert parts[1] / parts.sum() == pytest.approx(0.5, abs=0.02)


def test_any_step_of_a_stage_is_found_without_the_steps_before(tmp_path):
    sources(tmp_path, web=(320, 30), good=(20, 30))
    content = stages((25, weights(web=1, good=2)), first=weights(web=3, good=1))
    whole = build(tmp_path, content)
    expected = [whole.step(step, 0, 1, "rows", 64).batch for step in range(40)]
    for step in (39, 26, 25, 24, 3):
        builder = build(tmp_path, content)
        np.testing.assert_array_equal(builder.step(step, 0, 1, "rows", 64).batch.tokens, expected[step].tokens)
        parts = [builder.step(step, rank, 4, "rows", 64).batch for rank in range(4)]
        keys = np.sort(np.concatenate([part.row_keys.numpy() for part in parts]))
        np.testing.assert_array_equal(keys, np.sort(expected[step].row_keys.numpy()))


def test_names_come_from_paths_and_differ(tmp_path):
    listed = [
        {"path": "a/wiki/*.shard"}, {"path": "b/wiki/train"}, {"path": "c d/x.shard", "name": "mine"}, {"path": "e f"}
    ]  # fmt: skip
    (tmp_path / "mix.json").write_text(json.dumps({"sources": listed}))
    assert [source.name for source in read_mix(tmp_path / "mix.json").sources] == ["wiki", "wiki_2", "mine", "e_f"]


def test_identity_follows_weights_stages_and_limits(tmp_path):
    sources(tmp_path, web=(32, 30), good=(20, 30))
    mixes = [
        {"sources": weights(web=1, good=1)},
        {"sources": weights(web=1, good=2)},
        {"sources": weights(web=1, good=1), "max_repeats": 100},
        stages((30, weights(good=1)), first=weights(web=1, good=1)),
        stages((31, weights(good=1)), first=weights(web=1, good=1)),
    ]
    assert len({open_mix(tmp_path, mix).identity() for mix in mixes}) == len(mixes)
    again = {"sources": [{**source, "name": f"n{i}"} for i, source in enumerate(weights(web=3, good=3))]}
    assert open_mix(tmp_path, again).identity() == open_mix(tmp_path, mixes[0]).identity()


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ({"sources": [{"path": "web.shard", "weight": 0}]}, '"weight" is 0; it must be a number above 0'),
        ({"sources": [{"path": "web.shard", "weigth": 1}]}, "unknown key 'weigth' .did you mean 'weight'"),
        ({"sources": [*weights(web=1), {"path": "good.shard", "repeat": 1}]}, "some sources have .*; give all of them"),
        ({"sources": [*weights(web=1), {"path": "good.shard"}]}, r'sources\[1\] has no "weight", which others have'),
        ({"sources": weights(web=1), "temperature": 2}, '"temperature" decides the weights; leave out "weight"'),
        ({"sources": [{"path": "web.shard"}], "temperature": 0}, '"temperature" is 0; it must be a number above'),
        ({"sources": [{"path": "web.shard", "name": "a/b"}]}, "\"name\" is 'a/b'; it must be of letters"),
        ({"sources": [{"path": f"{n}.shard", "name": "a"} for n in ("web", "good")]}, "two sources have the name 'a'"),
        ({"sources": weights(web=1), "stages": []}, "a mix file is"),
        ({"stages": [{"from": 5, "sources": weights(web=1)}]}, "the first stage begins at 0"),
        (stages(("half", weights(good=1)), first=weights(web=1)), "'half' is no position in a run; give a fraction"),
        (stages((40, weights(good=1)), first=weights(web=1)), "which is step 40 of 40; stages begin one after"),
        (stages((0, weights(good=1)), first=weights(web=1)), "which is step 0 of 40; stages begin one after"),
        (stages(("1Mt", weights(good=1)), first=weights(web=1)), "1Mt lies behind the end of the run, which has 20"),
        (stages(("1kw", weights(good=1)), first=weights(web=1)), "words are not known: .*web.shard"),
    ],
)  # fmt: skip
def test_what_a_mix_file_gets_wrong_is_one_sentence(tmp_path, mix, says):
    sources(tmp_path, web=(32, 30), good=(20, 30))
    with pytest.raises(CorpusError, match=says) as error:
        build(tmp_path, mix)
    assert "\n" not in str(error.value)


def test_with_an_open_end_a_longer_run_goes_on_in_the_same_mix(tmp_path):
    """Where the batch stays and the schedule has no end (--schedule constant, wsd): the rows of a run's steps are those
    of a longer one, which meets no document again before all were used."""
    sources(tmp_path, web=(1200, 30), good=(200, 30))
    plans = [replace(PLAN, max_steps=steps, open_end=True) for steps in (40, 50)]
    mix = stages((25, weights(web=1, good=2)), first=weights(web=9, good=1))
    short, long = (build(tmp_path, mix, plan) for plan in plans)
    for step in (0, 24, 25, 39):
        a, b = (builder.step(step, 0, 1, "rows", 64).batch for builder in (short, long))
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.row_keys, b.row_keys)
    assert not long.mix.moves_with_length
    assert fractions(read(long, 40, 50)).tolist() == pytest.approx([1 / 3, 2 / 3], abs=0.06)
    assert max(uses(read(long, 0, 50, MASKED), 30).values()) <= 2
    limited = {"sources": [{**source, "max_repeats": 100} for source in weights(web=1, good=1)]}
    halves = stages((0.5, weights(good=1)), first=weights(web=1))
    assert all(build(tmp_path, content, plans[0]).mix.moves_with_length for content in (limited, halves))
    assert build(tmp_path, mix).mix.moves_with_length
