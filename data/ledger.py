"""Ledger: what a run has used of each source after a step, for the table that a paper needs.

A pure function of the step. A source's part of a stream is exact where an epoch ends; inside an epoch all sources are
as far as the epoch is, as they are on average (Epochs.source_tokens). A document or word counts each time it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data.objectives import OBJECTIVES, Objective

if TYPE_CHECKING:  # reports read ledgers without torch
    from data.corpus import Corpus
    from data.epochs import Epochs


def make_ledger(
    corpus: Corpus,
    epochs: Sequence[Epochs],
    positions: Sequence[int],
    step: int,
    objectives: Sequence[Objective] = OBJECTIVES,
) -> dict[str, Any]:
    """What the streams have delivered after `step` steps, as JSON.

    epochs, positions: of each objective's stream, and the tokens read of it. Every entry has `tokens` (`<s>` and `</s>`
    counted), `documents`, `words` (None where a manifest does not say) and `repetitions`: tokens used for each token
    held, in `objectives` and in `sources` with `tokens_held`, `documents_held` and `words_held`."""
    used = np.stack([of.source_tokens(at) for of, at in zip(epochs, positions, strict=True)])  # [objectives, sources]
    held = np.array(corpus.source_tokens)
    documents, words = corpus.counts, np.array([source.words for source in corpus.sources])

    def entry(tokens: np.ndarray, chosen: slice) -> dict[str, Any]:
        """tokens: used of each of the chosen sources."""
        repeats = tokens / held[chosen]
        return {
            "tokens": round(float(tokens.sum())),
            "documents": round(float(repeats @ documents[chosen])),
            "words": int(float(repeats @ words[chosen]) + 1e-6) if words[chosen].all() else None,
            "repetitions": round(float(tokens.sum() / held[chosen].sum()), 6),
        }

    everything = slice(None)
    by_objective = zip(objectives, used, strict=True)
    sources = []
    for number, source in enumerate(corpus.sources):
        one = slice(number, number + 1)
        holds = {"tokens": int(held[number]), "documents": int(documents[number]), "words": source.words or None}
        sources.append(
            {
                "name": source.name,
                "path": source.path,
                **{f"{key}_held": value for key, value in holds.items()},
                **entry(used.sum(axis=0)[one], one),
                "objectives": {each.name: entry(used[n, one], one) for n, each in enumerate(objectives)},
            }
        )
    return {
        "step": step,
        **entry(used.sum(axis=0), everything),
        "objectives": {objective.name: entry(tokens, everything) for objective, tokens in by_objective},
        "sources": sources,
    }


def ledger_rows(ledger: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the ledger as a table: a row for each source, and for all where there are several."""
    names = list(ledger["objectives"])
    head = ["source", "tokens held", "tokens used", "words used", "documents used", "repetitions", *names]
    rows = []
    for source in ledger["sources"]:
        place = source.get("name") or "/".join(source["path"].split("/")[-2:])
        rows.append([place, f"{source['tokens_held']:,}", *_cells(source, names)])
    if len(rows) != 1:
        held = sum(source["tokens_held"] for source in ledger["sources"])
        rows.append(["in all", f"{held:,}", *_cells(ledger, names)])
    return head, rows


def _cells(entry: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    words = "?" if entry["words"] is None else f"{entry['words']:,}"
    repeats = [entry["repetitions"], *(entry["objectives"][name]["repetitions"] for name in names)]
    return [f"{entry['tokens']:,}", words, f"{entry['documents']:,}", *(f"{each:.2f}" for each in repeats)]
