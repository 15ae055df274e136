"""How far tokens see ahead: prefixes and blocks that are read in both directions, in rows that are causal otherwise.

Output i is scored against token i + 1, and token i attends to its document up to `ends[i]`, at least to itself. So a
token is hidden from the output before it, and a target without a mask, where `ends[i]` is at most i + 1.

Prefixes are drawn for each document of a row, uniformly from its first token alone to all but its last one, and keyed
by the row; what is behind them is predicted from all of the prefix and what is between.

Blocks are those of Block Diffusion (Arriola et al. 2025, arXiv 2503.09573), which denoises each given the *clean* ones
before it, in rows of twice the length. In one pass over a row the blocks before show their masks, too, as in diffusion
forcing (Chen et al. 2024, arXiv 2407.01392). As outputs are shifted by one, the last token of a block predicts the
first of the next, which is always a target and never masked. So blocks of one token are causal rows, and blocks no
shorter than the row masked ones, both exactly. Blocks are counted from the beginning of a row.
"""

from __future__ import annotations

import numpy as np

from data.counter_rng import fold_numpy
from data.masking import PADDING, MaskingOptions
from data.objectives import Objective

_PREFIX = 110  # purpose of a row's prefixes, among the purposes in data/masking.py


def row_ends(objective: Objective, tokens: np.ndarray, row_keys: np.ndarray, options: MaskingOptions) -> np.ndarray:
    """The column up to which each input sees its document: int32 [R, T] of tokens [R, T+1] and keys int64 [R]. Above T,
    so that even the token behind the row counts as seen, in rows that are read in both directions."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    column = np.arange(length)
    if objective.prefix:
        return _prefix_ends(tokens[:, :-1], row_keys, options.bos_id).astype(np.int32)
    if objective.block and objective.block < length:
        ends = (column // objective.block + 1) * objective.block
    else:
        ends = np.full(length, 0 if objective.causal and not objective.block else length + 1)
    return np.tile(ends.astype(np.int32), (rows, 1))


def _prefix_ends(inputs: np.ndarray, row_keys: np.ndarray, bos_id: int) -> np.ndarray:
    """Where the prefix of each input's document ends: [R, T] -> int64 [R, T]."""
    column = np.arange(inputs.shape[1])
    begins = (inputs == bos_id) | np.diff(inputs == PADDING, axis=1, prepend=False)
    begins[:, 0] = True
    start = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    last = np.roll(begins, -1, axis=1)  # the next input begins a document; behind the last one is the first
    stop = np.minimum.accumulate(np.where(last, column + 1, inputs.shape[1])[:, ::-1], axis=1)[:, ::-1]
    key = fold_numpy(row_keys, np.array([_PREFIX]))[:, None]
    uniform = fold_numpy(key, np.cumsum(begins, axis=1)) >> np.uint64(32)
    room = np.maximum(1, stop - start - 1).astype(np.uint64)
    return start + 1 + (uniform * room >> np.uint64(32)).astype(np.int64)
