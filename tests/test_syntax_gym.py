"""SyntaxGym's suites: regions against brute force in float64, formulas, what is refused."""

import copy
import itertools
import json
import math

import pytest
from helpers.tiny_evaluation import checkpoint_of, enlarged, reference

from data.results import read_results
from evaluation import syntax_gym
from evaluation.syntax_gym import compiled

WORDS = ("list", "lists", "function", "東京", "words", "length")
FORMULAS = ["(3;%good one%) < (3;%bad%)", "[(*;%good one%) - (1;%bad%) > (2;%bad%)] & [(2;%bad%) = (2;%bad%)]"]


BOUNDS = ("accuracy", "low", "high")


def suite(metric: str = "sum") -> dict:
    def condition(name: str, *contents: str) -> dict:
        regions = [{"region_number": n, "content": content} for n, content in enumerate(contents, 1)]
        return {"condition_name": name, "regions": regions}

    items = []
    for a, b in zip(WORDS, reversed(WORDS), strict=True):
        good, bad = condition("good one", f"The {a}", "", f"holds {b}"), condition("bad", "", f"A {b} of", f"holds {a}")
        items.append({"conditions": [good, bad]})
    return {"meta": {"metric": metric}, "items": items, "predictions": [{"formula": text} for text in FORMULAS]}


@pytest.mark.parametrize("metric", ["sum", "mean"])
def test_formulas_against_brute_force(tmp_path, metric):
    model, tokenizer = enlarged()
    checkpoint = checkpoint_of(tmp_path / "run", model, tokenizer)
    (tmp_path / "npi.json").write_text(json.dumps(suite(metric)))
    output = tmp_path / "results.json"
    command = [str(checkpoint), "--data", str(tmp_path / "npi.json"), "--device", "cpu", "--output", str(output)]
    assert syntax_gym.main(command) == 0
    found = json.loads(output.read_text())["suites"]["npi"]

    exact = copy.deepcopy(model).double()
    for mode in ("masked", "causal"):
        right = [[], []]
        for item in suite()["items"]:
            good, bad = (surprisals(exact, tokenizer, each, mode, metric == "mean") for each in item["conditions"])
            right[0].append(good[2] < bad[2])
            right[1].append(good[3] - bad[0] > bad[1])
        for formula, of in zip(FORMULAS, right, strict=True):
            assert found[mode]["predictions"][formula]["accuracy"] == pytest.approx(sum(of) / len(of))
        assert 0 < sum(right[0]) < len(right[0])  # both outcomes are among them
        assert found[mode]["mean"]["accuracy"] == pytest.approx(sum(map(sum, right)) / 2 / len(right[0]))
        [shown] = (each for each in read_results(output).results if (each.name, each.mode) == ("syntaxgym", mode))
        assert [shown.value, shown.low, shown.high] == pytest.approx([found[mode]["mean"][k] for k in BOUNDS])


def surprisals(model, tokenizer, condition: dict, mode: str, mean: bool) -> list[float]:
    """Of each region and of the whole sentence, in bits."""
    contents = [region["content"] for region in condition["regions"]]
    spans = [len(" ".join(filter(None, contents[:n]))) for n in range(4)]
    encoding = tokenizer.encode(" ".join(filter(None, contents)), add_special_tokens=False)
    last = [end for _, end in encoding.offsets]
    totals, counts = [], []
    for begin, end in itertools.pairwise(spans):
        own = [i for i in range(len(last)) if begin < last[i] <= end]
        [total] = reference(model, encoding.ids, encoding.word_ids, mode, eos=False, only=own)
        totals.append(-total / math.log(2))
        counts.append(len(own) if mean else 1)
    totals, counts = [*totals, sum(totals)], [*counts, sum(counts) if mean else 1]
    return [total / max(1, n) for total, n in zip(totals, counts, strict=True)]


def test_formulas_are_read_as_they_are_written():
    values = {("1", "a"): 1.0, ("2", "a & b"): 2.0, ("*", "a"): 3.0}
    for formula, expected in {
        "(1;%a%) < (2;%a & b%)": True,
        "( 1 ; %a%) + (2;%a & b%) = (*;%a%)": True,
        "[(1;%a%)>(2;%a & b%)] | [(*;%a%) >= 3]": True,
        "((1;%a%) < (2;%a & b%)) & ((*;%a%) <= -1)": False,
    }.items():
        assert eval(compiled(formula), {"v": values}) is expected
    for bad in ("__import__('os')", "v.x", "(1;%a%) <", "open(1)", "[1 for x in v]"):
        with pytest.raises((ValueError, SyntaxError)):
            compiled(bad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"items": []}, '"items" or "predictions" is empty'),
        ({"items": [{}]}, "is no suite of SyntaxGym (lacks 'conditions')"),
        ({"predictions": [{"formula": "(1;%bad%) < exit()"}]}, "the formula '(1;%bad%) < exit()' cannot be read"),
        ({"predictions": [{"formula": "(1;%none%) < 2"}]}, "item 1 has no region 1 of condition 'none'"),
        ({"meta": {"metric": "range"}}, "\"metric\" is 'range'"),
    ],
)
def test_bad_suites_are_named(tmp_path, capsys, change, words):
    (tmp_path / "x.json").write_text(json.dumps({**suite(), **change}))
    assert syntax_gym.main(["model", "--data", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --data: {tmp_path / 'x.json'}")
    assert words in error
    assert error.count("\n") == 1
