"""Ages at which words are acquired: curves against brute force, the command over checkpoints, what is refused."""

import copy
import json
import math
import re
from itertools import product

import numpy as np
import pytest
from helpers.tiny_evaluation import brute_word, checkpoint_of, enlarged, write_lines

from data.results import read_results
from evaluation import age_of_acquisition as aoa
from evaluation.finetune_metrics import pearson

MODEL, TOKENIZER = enlarged()
X = np.log10([1e6 * n for n in (*range(1, 11), *range(20, 110, 10))])


def sigmoid(x: np.ndarray | float, center: float, slope: float, high: float, low: float) -> np.ndarray:
    return low + (high - low) / (1 + np.exp(slope * (np.asarray(x) - center)))


def test_curves_of_the_formula_are_found_again():
    for center, slope, high, low in ((6.7, 5.0, 9.0, 3.0), (7.5, 20.0, 12.0, 2.0), (6.2, 3.0, 10.0, 7.0)):
        found = aoa.falling_sigmoid(X, sigmoid(X, center, slope, high, low))
        assert found == pytest.approx((center, slope, high, low), rel=1e-3)
        cut = (high + low) / 2 + 0.3
        fine = np.linspace(5, 9, 400_001)
        at = fine[(sigmoid(fine, center, slope, high, low) < cut).argmax()]
        assert aoa.acquired(X, sigmoid(X, center, slope, high, low), cut) == pytest.approx(at, abs=1e-3)
    assert math.isnan(aoa.acquired(X, sigmoid(X, 6.7, 5.0, 9.0, 3.0), 8.9))  # before the first checkpoint
    assert math.isnan(aoa.acquired(X, sigmoid(X, 8.5, 5.0, 9.0, 3.0), 6.0))  # after the last
    assert math.isnan(aoa.acquired(X, X, 6.5))  # rises
    assert math.isnan(aoa.acquired(X, np.where(X < 7, np.nan, 3.0), 6.5))


def test_the_nearest_sigmoid_is_as_near_as_the_best_of_many():
    noise, span = np.random.default_rng(0), X[-1] - X[0]
    for _ in range(3):
        y = sigmoid(X, noise.uniform(6.2, 7.8), noise.uniform(2, 15), 10.0, 4.0) + noise.normal(0, 0.7, len(X))
        best = math.inf
        for center, slope in product(
            np.linspace(X[0] - span / 2, X[-1] + span / 2, 81), np.geomspace(1, 200, 81) / span
        ):
            terms = np.stack([np.ones(len(X)), sigmoid(X, center, slope, 1.0, 0.0)], axis=1)
            fit = np.linalg.lstsq(terms, y, rcond=None)[0]
            best = min(best, float(((y - terms @ fit) ** 2).sum())) if fit[1] > 0 else best
        assert ((y - sigmoid(X, *aoa.falling_sigmoid(X, y))) ** 2).sum() <= best * (1 + 1e-6)


def test_childrens_ages_are_those_of_the_likeliest_curve():
    shares = {16.0: 0.1, 18.0: 0.22, 22.0: 0.4, 25.0: 0.77, 30.0: 0.9}
    months, share = np.array(list(shares)), np.array(list(shares.values()))
    age, slope = np.meshgrid(np.linspace(20, 24, 801), np.linspace(0.1, 0.6, 501), indexing="ij")
    p = 1 / (1 + np.exp(-slope[..., None] * (months - age[..., None])))
    likeliest = (share * np.log(p) + (1 - share) * np.log(1 - p)).sum(-1).argmax()
    assert aoa.half_age(shares) == pytest.approx(age.flat[likeliest], abs=0.01)
    assert 20 < aoa.half_age({16.0: 0.0, 20.0: 0.0, 21.0: 1.0, 30.0: 1.0}) < 21  # no curve is the likeliest
    for missing in ({16.0: 0.8, 30.0: 0.9}, {16.0: 0.1, 30.0: 0.3}, {16.0: 0.6, 30.0: 0.4}, {16.0: 0.5}, {}):
        assert math.isnan(aoa.half_age(missing))


@pytest.fixture
def files(tmp_path):
    """Six checkpoints whose weights grow from nothing, ages of words and their contexts."""
    for number, share in enumerate((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 1):
        model = copy.deepcopy(MODEL)
        for parameter in model.parameters():
            parameter.detach().mul_(share)
        checkpoint_of(tmp_path / "run", model, TOKENIZER, step=number)
        (tmp_path / f"run/checkpoints/chck_{number}M").symlink_to(f"step_{number:08d}")
    contexts = [("The", "list"), ("The function returns the", "list"), ("A", "function"), ("", "words"), ("x", "none")]
    write_lines(tmp_path / "contexts.jsonl", [{"context": text, "word": word} for text, word in contexts])
    (tmp_path / "cdi.csv").write_text(
        "word,X16,X23,X30\nlist,0.1,0.5,0.9\nfunction,0,0.2,0.7\nwords,0.1,0.6,0.8\nother,NA,,1\n"
    )
    names = [str(tmp_path / f"run/checkpoints/chck_{number}M") for number in (6, 1, 2, 3, 4, 5)]  # in any order
    return [*names, "--ages", str(tmp_path / "cdi.csv"), "--contexts", str(tmp_path / "contexts.jsonl"), "--device=cpu"]


def test_the_command_compares_checkpoints_with_children(files, tmp_path, monkeypatch, capsys):
    given = []
    real = aoa.compared
    monkeypatch.setattr(aoa, "compared", lambda *of: given.append(of) or real(*of))
    assert aoa.main([*files, "--output", str(tmp_path / "out.json")]) == 0
    assert "masked: too few words, over" in capsys.readouterr().out
    exact = copy.deepcopy(MODEL).double()
    places = [("The", "list"), ("The function returns the", "list"), ("A", "function"), ("", "words")]
    for mode, (x, curves, chance, months) in zip(("masked", "causal"), given, strict=True):
        assert x == pytest.approx(np.log10([1e6 * n for n in range(1, 7)]))
        first, second, *others = (brute_word(exact, TOKENIZER, text, word, mode) for text, word in places)
        expected = [(first + second) / 2, *others]
        assert curves[-1] == pytest.approx(expected, rel=1e-5)
        tokens = [len(TOKENIZER.encode(word, add_special_tokens=False).ids) for word in (" list", " function", "words")]
        assert chance == pytest.approx(np.array(tokens) * math.log(TOKENIZER.get_vocab_size()))
        assert months == pytest.approx([23.0, 27.5, 22.6], abs=0.5)
    written = json.loads((tmp_path / "out.json").read_text())
    modes = written["datasets"]["age_of_acquisition"]["modes"]
    assert modes["causal"]["log10_words"].keys() == {"list", "function", "words"}
    assert "not BabyLM's" in written["definition"]
    modes["causal"] |= {"spearman": 0.5, "low": -0.25, "high": 0.75}  # as of more words
    (tmp_path / "out.json").write_text(json.dumps(written))
    found = read_results(tmp_path / "out.json")
    assert found is not None
    assert [(each.name, each.mode, each.value) for each in found.results] == [("age_of_acquisition", "causal", 0.5)]


def test_correlations_are_of_the_words_that_both_acquire():
    centers = np.array([6.4, 6.9, 7.4, 8.6, 7.0, 7.2])
    curves = np.stack([sigmoid(X, center, 6.0, 10.0, 2.0) for center in centers], axis=1)
    chance = 2 * sigmoid(centers, centers, 6.0, 10.0, 2.0) - curves.min(axis=0)  # so that the cut is at the centre
    found = aoa.compared(X, curves, chance, [18.0, math.nan, 27.0, 20.0, 22.0, 21.0])
    assert found["log10_words"].pop(3) is None
    assert found["log10_words"] == pytest.approx(np.delete(centers, 3), abs=1e-3)
    assert (found["words"], found["outside_checkpoints"], found["outside_months"]) == (4, 1, 1)
    assert found["pearson"] == pytest.approx(pearson(centers[[0, 2, 4, 5]], np.array([18.0, 27.0, 22.0, 21.0])), 1e-3)
    assert found["spearman"] == pytest.approx(0.8)  # one exchange of neighbours among four
    assert "spearman" not in aoa.compared(X, curves[:, :3], chance[:3], [18.0, 20.0, 22.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cdi.csv": "word,aoa\nlist,x\n"}, r"line 2: \{'aoa': 'x'\} are not all numbers"),
        ({"cdi.csv": "word,16\nlist,0.5\n"}, "needs the columns word, and aoa or months such as 16, 17"),
        ({"cdi.csv": "word,16,17\nlist,50,60\n"}, "line 2: shares of children are fractions from 0 to 1"),
        ({"cdi.csv": "word,aoa\nlist,20\nlist,21\n"}, "line 3: the word 'list' is there twice"),
        ({"cdi.csv": "word,aoa\ncat,20\n"}, "has no word of --ages"),
        ({"contexts.jsonl": '{"word": "list"}\n'}, '"context"'),
    ],
)
def test_files_that_cannot_be_used_are_refused(files, tmp_path, capsys, change, message):
    for name, text in change.items():
        (tmp_path / name).write_text(text)
    assert aoa.main(files) == 2
    assert re.search(message, capsys.readouterr().err)


def test_checkpoints_that_make_no_curve_are_refused(files, capsys):
    assert aoa.main([*files[:4], *files[6:]]) == 2
    assert "4 checkpoints make no curve; give 5 or more" in capsys.readouterr().err
    assert aoa.main([str(files[0]).replace("chck_6M", "step_00000006"), *files[1:]]) == 2
    assert "is not named by words seen, such as chck_10M (--save_words)" in capsys.readouterr().err
