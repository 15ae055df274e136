"""Measures of GLUE (Wang et al., 2019), exact, from predictions and labels: NumPy arrays of one length n >= 1."""

from __future__ import annotations

import numpy as np

CLASSIFICATION = ("accuracy", "f1", "matthews")
REGRESSION = ("pearson", "spearman")


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of equal entries."""
    return float(np.mean(predicted == labels))


def f1(predicted: np.ndarray, labels: np.ndarray, positive: int) -> float:
    """Harmonic mean of precision and recall of class `positive`; 0 where it is neither predicted nor right."""
    hits = np.sum((predicted == positive) & (labels == positive))
    marked = np.sum(predicted == positive) + np.sum(labels == positive)
    return float(2 * hits / marked) if marked else 0.0


def macro_f1(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Mean of the F1 of each class, for more than two."""
    return float(np.mean([f1(predicted, labels, number) for number in range(classes)]))


def matthews(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Matthews correlation, for more than two classes Gorodkin's (2004) R_K; 0 where either side is constant."""
    table = np.zeros((classes, classes))
    np.add.at(table, (labels, predicted), 1)
    total, right = table.sum(), np.trace(table)
    of_label, of_prediction = table.sum(axis=1), table.sum(axis=0)
    covariance = right * total - of_label @ of_prediction
    spread = (total**2 - of_prediction @ of_prediction) * (total**2 - of_label @ of_label)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation; 0 where either side is constant."""
    x, y = (np.asarray(side, dtype=np.float64) for side in (predicted, labels))
    x, y = x - x.mean(), y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / spread, -1, 1)) if spread > 0 else 0.0


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation of the ranks."""
    return pearson(ranks(predicted), ranks(labels))


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value from 1 on, equal values sharing the mean of theirs: float64 [n]."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


def measures(outputs: np.ndarray, labels: np.ndarray, classes: int, positive: int) -> dict[str, float]:
    """All measures of a kind of task.

    Classification: outputs are scores [n, classes], labels int64 [n]; f1 is that of `positive`, or with more than two
    classes the mean over classes. Regression: classes is 0, outputs and labels are numbers [n]."""
    if not classes:
        return {"pearson": pearson(outputs, labels), "spearman": spearman(outputs, labels)}
    predicted = outputs.argmax(axis=1)
    return {
        "accuracy": accuracy(predicted, labels),
        "f1": f1(predicted, labels, positive) if classes == 2 else macro_f1(predicted, labels, classes),
        "matthews": matthews(predicted, labels, classes),
    }
