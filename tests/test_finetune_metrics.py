"""The measures of finetune.py: exact, and defined where answers are constant."""

import math

import numpy as np
import pytest

from evaluation.finetune_metrics import accuracy, f1, macro_f1, matthews, measures, pearson, ranks, spearman


def test_measures_of_known_examples():
    guess, truth = np.array([1, 0, 1, 1]), np.array([1, 1, 1, 0])
    assert accuracy(guess, truth) == 0.5
    assert f1(guess, truth, 1) == pytest.approx(2 / 3)
    assert f1(guess, truth, 0) == 0.0
    assert macro_f1(guess, truth, 2) == pytest.approx(1 / 3)
    assert matthews(guess, truth, 2) == pytest.approx(-1 / 3)  # (2*0 - 1*1) / sqrt(3*3*1*1)
    x = np.array([1, 2, 3, 4, 5, 6, 7.0])
    assert pearson(x, np.array([10, 9, 2.5, 6, 4, 3, 2])) == pytest.approx(-0.828503883588428)
    assert spearman(x[:5], np.array([5, 6, 7, 8, 7.0])) == pytest.approx(0.8207826816681233)
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_matthews_is_the_correlation_of_indicators():
    """For two classes Pearson's; for more the covariances of all classes' indicators, added up."""
    generator = np.random.default_rng(1)
    for classes in (2, 3, 5):
        truth, guess = generator.integers(0, classes, (2, 200))
        guess = np.where(generator.random(200) < 0.4, truth, guess)
        eye = np.eye(classes)

        def covariance(a, b, eye=eye):
            return sum(np.cov(eye[a][:, k], eye[b][:, k])[0, 1] for k in range(len(eye)))

        expected = covariance(truth, guess) / math.sqrt(covariance(truth, truth) * covariance(guess, guess))
        assert matthews(guess, truth, classes) == pytest.approx(expected)
        if classes == 2:
            assert pearson(guess, truth) == pytest.approx(expected)


def test_constant_answers_have_no_correlation():
    truth = np.array([0, 1, 1, 0])
    assert matthews(np.ones(4, dtype=int), truth, 2) == 0.0
    assert pearson(np.ones(4), truth) == spearman(np.ones(4), truth) == 0.0
    assert f1(np.zeros(4, dtype=int), np.zeros(4, dtype=int), 1) == 0.0


def test_measures_by_kind():
    scores = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.6]])
    assert measures(scores, np.array([0, 1, 0]), 2, 0) == {
        "accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3), "matthews": pytest.approx(0.5),
    }  # fmt: skip
    assert measures(np.array([1.0, 2.0, 9.0]), np.array([1.0, 3.0, 4.0]), 0, 0)["spearman"] == pytest.approx(1.0)
