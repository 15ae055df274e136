"""Reading times in BabyLM's pipeline: how much do a model's surprisals explain beyond length and frequency of words?

A line of the CSV file is a word: `item` is the text before it, `prev_item`, `prev_word` of the word before. Surprisals,
in nats: causal of the word's tokens after the text; masked, of each token behind the text and the word's tokens so far
when it and two more are masked. The gain is that in R2 of a linear model (De Varda et al., 2024).
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from evaluation.pair_accuracy import read_text
from evaluation.token_log_probs import SpecialIds, TokenizedSentences, encode_ids
from training.config import ConfigError

_EYES = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
_SELF_PACED = "self_paced_reading_time"
_BRAIN = ("ELAN", "LAN", "N400", "EPNP", "P600", "PNP")
_FREQUENCY = "Subtlex_log10"
_NEEDED = ("item", "word", "prev_item", "prev_word", _FREQUENCY)
_MASKS = 3  # behind the text; the first is read
_RESAMPLES = 1000


@dataclass(frozen=True)
class ReadingTimes:
    """n words. places: (text before, word), n of the words and n of those before them. columns: numbers, NaN: none.
    controls: frequency, length and context length, float64 [n, 3]; before: frequency and length of the word before."""

    places: tuple[tuple[str, str], ...]
    times: dict[str, np.ndarray]
    controls: np.ndarray
    before: np.ndarray


def read_reading_times(path: Path, flag: str) -> ReadingTimes:
    """The words of a CSV file. Raises ConfigError where it lacks a column or has no line."""
    rows = list(csv.DictReader(io.StringIO(read_text(path, flag))))
    columns = rows[0].keys() if rows else ()
    times = [name for name in (*_EYES, _SELF_PACED, *_BRAIN) if name in columns]
    missing = [name for name in _NEEDED if name not in columns] or ([] if times else [_SELF_PACED])
    if missing:
        raise ConfigError(f"{flag}: {path} has no column {missing[0]!r}; it must be BabyLM's table of reading times")
    here = [((row["item"] or "").rstrip(), (row["word"] or "").strip()) for row in rows]
    there = [((row["prev_item"] or "").rstrip(), (row["prev_word"] or "").strip()) for row in rows]
    frequency = _numbers(rows, _FREQUENCY)
    by_word = {word: value for (_, word), value in zip(here, frequency, strict=True) if np.isfinite(value)}
    given = next((name for name in (f"prev_{_FREQUENCY}", f"{_FREQUENCY}_prev") if name in columns), "")
    frequency_before = _numbers(rows, given) if given else np.array([by_word.get(word, np.nan) for _, word in there])
    controls = [frequency, [len(word) for _, word in here], [len(text.split()) for text, _ in here]]
    before = [frequency_before, [len(word) for _, word in there]]
    numbers = {name: _numbers(rows, name) for name in times}
    return ReadingTimes((*here, *there), numbers, np.array(controls, float).T, np.array(before, float).T)


def _numbers(rows: list[dict[str, str]], name: str) -> np.ndarray:
    def number(text: str | None) -> float:
        try:
            return float(text or "nan")
        except ValueError:  # "NA"
            return float("nan")

    return np.array([number(row[name]) for row in rows])


def encode_places(
    places: tuple[tuple[str, str], ...], tokenizer: Tokenizer, special: SpecialIds, causal: bool
) -> tuple[TokenizedSentences, np.ndarray]:
    """The sentences whose sums are the words' log-probabilities, and the index in `places` of each."""
    contexts = tokenizer.encode_batch([text for text, _ in places], add_special_tokens=False)
    spaced = [f" {word}" if text and word else word for text, word in places]
    words = tokenizer.encode_batch(spaced, add_special_tokens=False)
    rows: list[list[int]] = []
    first: list[int] = []
    owners: list[int] = []
    for index, (context, word) in enumerate(zip(contexts, words, strict=True)):
        row = [special.bos, *context.ids]
        if causal and word.ids:
            rows.append(row + word.ids)
            first.append(len(row))
            owners.append(index)
        for number, token in enumerate(() if causal else word.ids):
            rows.append([*row, *word.ids[:number], token, *[special.mask] * (_MASKS - 1)])
            first.append(len(row) + number)
            owners.append(index)
    return encode_ids(rows, first, special, behind=0 if causal else _MASKS - 1), np.array(owners, np.int64)


def surprisals(sums: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    """Surprisals of `count` words in nats, from the sums of their sentences; NaN where a word has no token."""
    found = -np.bincount(owners, weights=sums, minlength=count)
    found[np.bincount(owners, minlength=count) == 0] = np.nan
    return found


def results(data: ReadingTimes, surprisal: np.ndarray, resamples: int = _RESAMPLES) -> dict[str, Any]:
    """Gains in R2 as JSON: of each column, and their mean for eye tracking; 95 % intervals by the bootstrap over words.
    surprisal: nats [2 n], of the words and of those before. Without `resamples` the intervals are the gains alone."""
    own, before = np.split(surprisal[:, None], 2)
    drawn = np.random.default_rng(0).multinomial(len(own), [1 / len(own)] * len(own), size=resamples)
    found: dict[str, Any] = {"measures": {}}
    gains: dict[str, np.ndarray] = {}
    for name, times in data.times.items():
        controls, added = data.controls, own
        if name == _SELF_PACED:
            controls, added = np.hstack([controls, data.before]), np.hstack([own, before])
        used = np.isfinite(np.hstack([times[:, None], controls, added])).all(axis=1)
        base = _terms(controls[used])
        full = np.hstack([base, added[used]])
        if used.sum() <= full.shape[1]:
            continue
        without, with_it = r_squared(base, times[used]), r_squared(full, times[used])
        resampled = [_resampled_r_squared(terms, times[used], drawn[:, used]) for terms in (base, full)]
        gains[name] = np.concatenate([[with_it - without], resampled[1] - resampled[0]])
        of_rest = (with_it - without) / (1 - without) if without < 1 else 0.0
        entry = {"r2_without": without, "r2": with_it, "gain_of_rest": of_rest, "words": int(used.sum())}
        found["measures"][name] = {**_interval(gains[name]), **entry}
    eyes = [gains[name] for name in _EYES if name in gains]
    if eyes:
        found["eye_tracking"] = _interval(np.mean(eyes, axis=0))
    if _SELF_PACED in gains:
        found["self_paced"] = _interval(gains[_SELF_PACED])
    return found


def _interval(gains: np.ndarray) -> dict[str, float]:
    """The first is of the words themselves, the others of resampled ones."""
    low, high = np.quantile(gains[1:] if len(gains) > 1 else gains, [0.025, 0.975])
    return {"gain": float(gains[0]), "low": float(low), "high": float(high)}


def _terms(columns: np.ndarray) -> np.ndarray:
    """1, the standardised columns [n, k] and the products of two of them."""
    spread = columns.std(axis=0)
    scaled = (columns - columns.mean(axis=0)) / np.where(spread > 0, spread, 1)
    products = [scaled[:, i] * scaled[:, j] for i, j in combinations(range(scaled.shape[1]), 2)]
    return np.column_stack([np.ones(len(scaled)), scaled, *products])


def r_squared(terms: np.ndarray, values: np.ndarray) -> float:
    """Of the least-squares fit of values [n] by terms [n, p], one of them constant; 0 where values are."""
    left = values - terms @ np.linalg.lstsq(terms, values, rcond=None)[0]
    around = values - values.mean()
    return float(1 - left @ left / (around @ around)) if around @ around > 0 else 0.0


def _resampled_r_squared(terms: np.ndarray, values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """R2 [B] of words that were drawn so many times each [B, n]: all fits at once, by their normal equations."""
    values = (values - values.mean()) / (values.std() or 1.0)
    p, weights = terms.shape[1], drawn.astype(float)
    squares = (weights @ (terms[:, :, None] * terms[:, None, :]).reshape(len(terms), -1)).reshape(-1, p, p)
    products = weights @ (terms * values[:, None])
    explained = np.einsum("bp,bpq,bq->b", products, np.linalg.pinv(squares, hermitian=True), products)
    mean = weights @ values / weights.sum(axis=1)
    total, around_zero = weights @ values**2 - weights.sum(axis=1) * mean**2, weights @ values**2
    return 1 - (around_zero - explained) / np.where(total > 0, total, 1)


def predictions(surprisal: np.ndarray) -> dict[str, Any]:
    """BabyLM's predictions.json of reading: surprisals of each word and of the one before; null for none."""
    own, before = ([None if np.isnan(value) else float(value) for value in half] for half in np.split(surprisal, 2))
    lines = zip(own, before, strict=True)
    entries = [{"id": f"reading_{n}", "pred": pred, "prev_pred": prev} for n, (pred, prev) in enumerate(lines)]
    return {"reading": {"predictions": entries}}
