"""Masking, from raw rows to model inputs: document boundaries, span masks and labels, computed where the model runs.

A row of T inputs comes as T + 1 tokens: output i is scored against token i + 1 under every objective. The row *owns*
tokens 1 .. T: they are its candidates for masking and its targets, each token of the corpus once per epoch. Token 0 is
owned by the row before it; the row shows `<s>` in its place (without MaskingOptions.row_start the token itself).

Masking follows the published method (spans of 1 to 3 tokens, those with the lowest random numbers first), with four
differences: exactly floor(p * n + u) tokens of a row's n maskable ones are masked (the last span is cut off), u being
uniform in [0, 1); p may be drawn for each row (data/mask_rates.py); all random numbers are pure functions of the row's
key, equal on CPU and GPU; and `even` masking can replace the published loader's per-token counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch

from data.counter_rng import fold_numpy, fold_torch, logical_right_shift, signed
from data.documents import OCCURRENCE_SHIFT
from data.mask_rates import MaskRates
from data.objectives import OBJECTIVES, Objective, numbers_of

IGNORE_INDEX = -100
PADDING = -1  # token id behind the end of a validation stream

# What a random number of a row is for; part of its key.
_COUNT, _PHASE, _PATTERN, _PRIORITY, _ACTION, _RANDOM_TOKEN, _FACTOR, _OFFSET, _RATE = range(101, 110)

_UNIFORM_BITS = 40  # resolution of a span's priority; the rest of an int64 breaks ties by position
_STRATA = 23  # a prime; so many spans are about 46 tokens
_RATE_BITS = 24  # of a row's mask rate: coarse enough that no processor's own rounding of a cosine makes another one
_BETA_TABLE = 1 << 16
_GOLDEN_STEP = round((5**0.5 - 1) / 2 * (1 << _UNIFORM_BITS))


@dataclass(frozen=True)
class MaskingOptions:
    """How masked rows are made. Probabilities are per span; `special_ids` (data/special_tokens.py) are never masked nor
    drawn. bos_ends: the token that begins a document also ends the one before it, and is a target as such."""

    vocab_size: int
    mask_id: int = 4
    bos_id: int = 1
    pad_id: int = 3
    special_ids: tuple[int, ...] = tuple(range(16))
    bos_ends: bool = False
    random_p: float = 0.1
    keep_p: float = 0.1
    even: bool = False
    span_length: int = 3  # the longest; lengths from 1 on are equally frequent
    rate_power: float = 0.0  # gamma: a masked row's targets weigh (its masked fraction) ** -gamma
    word_beginnings: bytes = b""  # a byte for each id, 1 where a word begins; spans are then whole words
    row_start: bool = True  # whether a row's first input is `<s>`, also where the row goes on in a document
    seed: int = 0  # of `even` masking, whose spans belong to the corpus and not to a row
    objectives: tuple[Objective, ...] = OBJECTIVES  # of the run
    sources: tuple[str, ...] = ()  # names of a mix's, whose losses are told apart


@dataclass(frozen=True)
class ModelInputs:
    """What the model and the loss need; int64 [B, T] where nothing else is said."""

    input_ids: torch.Tensor
    labels: torch.Tensor  # IGNORE_INDEX where nothing is predicted
    document_ids: torch.Tensor  # counts documents within the row; -1 is padding
    causal: torch.Tensor  # bool [B], or int32 [B, T] where rows look ahead: the column up to which each token sees
    objective: torch.Tensor  # int64 [B], the number of each row's


@cache
def _specials(vocab_size: int, special_ids: tuple[int, ...]) -> np.ndarray:
    """Whether an id is special; bool [vocab_size + 1], the last for PADDING, which is -1."""
    table = np.zeros(vocab_size + 1, bool)
    table[[*special_ids, PADDING]] = True
    return table


@cache
def _specials_and_words(
    vocab_size: int, special_ids: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """_specials, and the other ids, ascending (int64), on a device; copied once, as _patterns."""
    table = torch.from_numpy(_specials(vocab_size, special_ids))
    return table.to(device), torch.nonzero(~table).flatten().to(device)


class RowRates(NamedTuple):
    """Mask rates of a step's rows. p: the scheduled probability."""

    distribution: MaskRates
    p: float

    def of(self, row_keys: np.ndarray) -> float | np.ndarray:
        """The rates of rows by their keys, int64 [R]: float64 [R], or one for all."""
        kind, values = self.distribution.kind, self.distribution.values
        if kind == "fixed":
            return self.p
        bits = fold_numpy(row_keys, np.array([_RATE])) >> np.uint64(64 - _RATE_BITS)
        uniform = (bits + 0.5) * 2.0**-_RATE_BITS
        if kind == "bimodal":
            return np.where(uniform < values[0], values[1], self.p)
        if kind == "uniform":
            low, high = values or (0.0, 1.0)
            rates = low + (high - low) * uniform
        elif kind == "cosine":
            rates = 1 - np.cos(np.pi / 2 * uniform)
        else:
            rates = np.interp(uniform, *_beta_table(*values))
        # Odd multiples of a power of two, so that the rate times a row's length is no whole number.
        return (np.floor(rates * 2**_RATE_BITS) + 0.5) * 2.0**-_RATE_BITS


@lru_cache(maxsize=4)
def _beta_table(a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of the distribution function of Beta(a, b), and where it has them, both [_BETA_TABLE + 1]."""
    middle = (np.arange(_BETA_TABLE) + 0.5) / _BETA_TABLE
    density = (a - 1) * np.log(middle) + (b - 1) * np.log1p(-middle)
    sums = np.concatenate([[0.0], np.cumsum(np.exp(density - density.max()))])
    return sums / sums[-1], np.arange(_BETA_TABLE + 1) / _BETA_TABLE


def maskable_counts(tokens: np.ndarray, options: MaskingOptions, among: np.ndarray | None = None) -> np.ndarray:
    """How many tokens of each row may be masked, among those of bool [B, T+1]: [B, T+1] -> int64 [B]."""
    words = ~_specials(options.vocab_size, options.special_ids)[tokens[:, 1:]]
    return np.count_nonzero(words if among is None else words & among[:, 1:], axis=1)


def masked_counts(
    tokens: np.ndarray,
    row_keys: np.ndarray,
    p: float | np.ndarray,
    options: MaskingOptions,
    among: np.ndarray | None = None,
) -> np.ndarray:
    """How many tokens of each row are masked: floor(p * n + u). tokens [B, T+1], keys [B] -> int64 [B]."""
    maskable = maskable_counts(tokens, options, among)
    uniform = (fold_numpy(row_keys, np.array([_COUNT])) >> np.uint64(11)) * 2.0**-53
    return np.floor(p * maskable + uniform).astype(np.int64)


def token_counts(tokens: np.ndarray, options: MaskingOptions, scored: np.ndarray | None = None) -> np.ndarray:
    """How many tokens each row owns, padding left out, and `<s>` where it ends nothing: [B, T+1] -> int64 [B].

    scored: bool [B, T+1], the tokens that count; None for all."""
    owned = tokens[:, 1:]
    counted = (owned != PADDING) & ((owned != options.bos_id) | options.bos_ends)
    return np.count_nonzero(counted if scored is None else counted & scored[:, 1:], axis=1)


def row_counts(
    objective: Objective,
    tokens: np.ndarray,
    row_keys: np.ndarray,
    rates: RowRates,
    options: MaskingOptions,
    scored: np.ndarray | None = None,
    ends: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each row of an objective are masked and how many are targets; int64 [B] each.

    scored, ends: as in `build_inputs`."""
    masked, seen = np.zeros(len(tokens), np.int64), None
    if objective.looks_ahead and ends is not None:
        seen = np.pad(ends > np.arange(1, tokens.shape[1]), ((0, 0), (1, 0)))
        scored = ~seen if scored is None else scored & ~seen
    if objective.mask:
        p = np.minimum(1.0, objective.mask * rates.of(row_keys))
        if rates.distribution.continuous:
            masked = np.ceil(p * maskable_counts(tokens, options, seen)).astype(np.int64)
        else:
            masked = masked_counts(tokens, row_keys, p, options, seen)
    targets = token_counts(tokens, options, scored) if objective.all_targets else masked
    return masked, targets + masked if objective.looks_ahead else targets


def target_weights(
    objective: Objective, tokens: np.ndarray, masked: np.ndarray, options: MaskingOptions
) -> np.ndarray | None:
    """What each target of a row weighs beside others of its objective, float32 [B], 1 or more; None where all weigh 1.
    (masked / maskable tokens) ** -gamma: with gamma 1 and uniform rates the bound of masked diffusion."""
    if not options.rate_power:
        return None
    if objective.all_targets:
        return np.ones(len(tokens), np.float32)
    rows = maskable_counts(tokens, options) / np.maximum(1, masked)
    return np.where(masked > 0, rows**options.rate_power, 1.0).astype(np.float32)


def _rows_of(objective: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """Which rows have one of the objectives `numbers`; bool [B]."""
    if not numbers:
        return torch.zeros_like(objective, dtype=torch.bool)
    return reduce(torch.logical_or, [objective == number for number in numbers])


def _ways(objective: torch.Tensor, options: MaskingOptions) -> Iterator[torch.Tensor]:
    """Which rows are causal, have no masks, and have all tokens as targets; bool [B] each."""
    # Of the same objectives once: of the published two, causal rows are those without masks and with all targets.
    kinds = [
        numbers_of(wanted, options.objectives)
        for wanted in (lambda each: each.causal, lambda each: not each.mask, lambda each: each.all_targets)
    ]
    rows = {numbers: _rows_of(objective, numbers) for numbers in dict.fromkeys(kinds)}
    return (rows[numbers] for numbers in kinds)


def build_inputs(
    tokens: torch.Tensor,
    row_keys: torch.Tensor,
    objective: torch.Tensor,
    mask_counts: torch.Tensor,
    options: MaskingOptions,
    origins: torch.Tensor | None = None,
    scored: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    *,
    draw_masks: bool = True,
) -> ModelInputs:
    """Inputs and labels of a micro-batch, on the device of its tensors and without host synchronisation.

    tokens: [B, T+1] integers, PADDING behind the end of the data. row_keys: int64 [B]. objective: int64 [B], numbers
    in options.objectives. mask_counts: int64 [B], from `row_counts`. origins: int64 [B, T+1] from TokenStream.read,
    needed for `even` masking. scored: bool [B, T+1], the tokens that are targets of objectives with all targets; None
    for all. ends: int32 [B, T] of data/reading.py, in runs with rows that look ahead. Masked rows mask everywhere.
    draw_masks: False where the caller knows that no row has masks, which saves the work."""
    tokens = tokens.long()
    padding = tokens == PADDING
    tokens = tokens.masked_fill(padding, options.pad_id)
    documents = (tokens == options.bos_id).cumsum(1).masked_fill(padding, -1)
    owned = tokens[:, 1:]

    causal, unmasked, whole = _ways(objective, options)
    no_targets = padding[:, 1:] if options.bos_ends else (owned == options.bos_id) | padding[:, 1:]
    if scored is not None:
        no_targets = no_targets | ~scored[:, 1:]
    unmasked, whole = unmasked[:, None], whole[:, None]
    if ends is not None:
        shown = ends > torch.arange(1, tokens.shape[1], device=tokens.device)  # output i sees token i + 1
        ahead = _rows_of(objective, numbers_of(lambda each: each.looks_ahead, options.objectives))[:, None]
        unmasked, shown, causal = unmasked | (ahead & ~shown), ahead & shown, ends
        no_targets, whole = no_targets | shown, whole & ~shown
    all_labels = owned.masked_fill(no_targets, IGNORE_INDEX)
    document_ids = documents[:, :-1]
    if not draw_masks:
        return ModelInputs(tokens[:, :-1], all_labels, document_ids, causal, objective)
    is_special, _ = _specials_and_words(options.vocab_size, options.special_ids, tokens.device)
    maskable = ~is_special[owned] & ~padding[:, 1:] & ~unmasked
    begins = None
    if options.word_beginnings:
        begins = _word_beginnings(options.word_beginnings, tokens.device)[owned] | is_special[tokens[:, :-1]]
    origins = None if origins is None else origins[:, 1:]
    selected, span_key = _select(maskable, row_keys, mask_counts, origins, begins, options)
    masked_labels = owned.masked_fill(~selected, IGNORE_INDEX)

    corrupted = torch.where(selected, _replacements(owned, row_keys, span_key, options), owned)
    return ModelInputs(
        input_ids=torch.cat([tokens[:, :1], corrupted[:, :-1]], dim=1),
        labels=torch.where(whole, all_labels, masked_labels),
        document_ids=document_ids,
        causal=causal,
        objective=objective,
    )


def _bits(key: torch.Tensor, counter: torch.Tensor | int, count: int) -> torch.Tensor:
    """`count` (at most 63) random bits as a non-negative int64."""
    return logical_right_shift(fold_torch(key, counter), 64 - count)


def _scaled(bits: torch.Tensor, bits_count: int, size: int) -> torch.Tensor:
    """Random integers below `size` (under 2**31) from `bits_count` <= 32 random bits."""
    return (bits * size) >> bits_count


@cache
def _patterns(longest: int, device: torch.device) -> torch.Tensor:
    """Which of its block's spans a token belongs to, by the order of their lengths: [factorial(longest), block].

    Tokens are divided into blocks, each with one span of each length from 1 to `longest`: six tokens with 3, and spans
    of 2, 1 and 3 tokens are 0 0 1 2 2 2. So lengths are equally frequent, and the span of a token is found from its
    position alone. Copied to a device once: a copy from pageable memory synchronises with it."""
    orders = permutations(range(1, longest + 1))
    return torch.tensor([[i for i, length in enumerate(p) for _ in range(length)] for p in orders]).to(device)


@cache
def _word_beginnings(table: bytes, device: torch.device) -> torch.Tensor:
    """MaskingOptions.word_beginnings on a device, bool [V]; copied once, as _patterns."""
    return torch.tensor(list(table), dtype=torch.bool, device=device)


def _select(maskable, row_keys, mask_counts, origins, begins, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Which owned tokens are masked (bool [B, T]), and a number naming the span of each token (int64 [B, T]). begins:
    whether a word begins with each token, bool [B, T], where spans are words."""
    column = torch.arange(maskable.shape[1], device=maskable.device)
    if begins is None:
        priority, span = _spans(column, row_keys, origins, options)
    else:
        span = begins.cumsum(1)
        priority = _bits(fold_torch(row_keys[:, None], _PRIORITY), span, _UNIFORM_BITS)

    # Order tokens by (priority of their span, column) and take the first mask_counts of each row. The threshold is the
    # last that is taken: a sort and a gather, where a loop over rows would synchronise with the host.
    order = (priority << (63 - _UNIFORM_BITS)) + column
    order = order.masked_fill(~maskable, torch.iinfo(torch.int64).max)
    threshold = order.sort(dim=1).values.gather(1, (mask_counts - 1).clamp(min=0)[:, None])
    return (order <= threshold) & maskable & (mask_counts > 0)[:, None], span


def _spans(column, row_keys, origins, options) -> tuple[torch.Tensor, torch.Tensor]:
    """The priority of the span of each owned token, of _UNIFORM_BITS, and the span's number; int64 [B, T] each."""
    keys = row_keys[:, None]
    patterns = _patterns(options.span_length, column.device)
    size = patterns.shape[1]  # tokens in a block
    if options.even:
        if origins is None:
            raise ValueError("even masking needs the origin of every token: read the stream with origins=True")
        # Spans are fixed in the corpus, and so is each span's first random number. With every use of its document the
        # number moves on by the golden ratio (modulo 1): a sequence of low discrepancy, so over 1/p uses a span falls
        # below p about once.
        position = origins & ((1 << OCCURRENCE_SHIFT) - 1)
        uses = origins >> OCCURRENCE_SHIFT
        key = torch.full_like(keys, signed(options.seed))
    else:
        # Blocks begin at a random place of each row, so that no column is more often the beginning of a span.
        position, uses = column + _scaled(_bits(keys, _PHASE, 32), 32, size), 0
        key = keys
    block = torch.div(position, size, rounding_mode="floor")
    pattern = _scaled(_bits(fold_torch(key, _PATTERN), block, 32), 32, len(patterns))
    span = block * options.span_length + patterns[pattern, position - block * size]
    priority = _bits(fold_torch(key, _PRIORITY), span, _UNIFORM_BITS)
    if options.even:
        priority = (_stratified(priority, span, key) + uses * _GOLDEN_STEP) & ((1 << _UNIFORM_BITS) - 1)
    return priority, span


def _stratified(priority: torch.Tensor, span: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Stratified sampling: of `_STRATA` consecutive spans, each gets a priority in another of as many equal strata.

    Then any stretch of text has about the same fraction of spans below p, so that a row's threshold hardly moves and
    the spans that are masked are those whose priorities say so. All arguments int64, [B, T], [B, T] and [B, 1]."""
    group = torch.div(span, _STRATA, rounding_mode="floor")
    factor = 1 + _scaled(_bits(fold_torch(key, _FACTOR), group, 32), 32, _STRATA - 1)
    offset = _scaled(_bits(fold_torch(key, _OFFSET), group, 32), 32, _STRATA)
    # A random affine map with a factor that is not 0 permutes 0 .. _STRATA - 1, because that is a prime.
    stratum = (factor * (span - group * _STRATA) + offset) % _STRATA
    return ((stratum << _UNIFORM_BITS) + priority) // _STRATA  # uniform within the stratum, 40 bits again


def _replacements(owned, row_keys, span, options) -> torch.Tensor:
    """What the model sees in place of each token if it is masked: `<mask>`, a random token or the token itself."""
    keys = row_keys[:, None]
    draw = _bits(fold_torch(keys, _ACTION), span, 31)
    is_random = draw < round(options.random_p * 2**31)
    is_kept = ~is_random & (draw < round((options.random_p + options.keep_p) * 2**31))
    column = torch.arange(owned.shape[1], device=owned.device)
    _, words = _specials_and_words(options.vocab_size, options.special_ids, owned.device)
    random_ids = words[_scaled(_bits(fold_torch(keys, _RANDOM_TOKEN), column, 32), 32, len(words))]
    shown = torch.where(is_random, random_ids, torch.full_like(owned, options.mask_id))
    return torch.where(is_kept, owned, shown)


def fingerprint(inputs: ModelInputs, row_numbers: torch.Tensor) -> torch.Tensor:
    """A hash of a micro-batch that adds up (modulo 2**64) to the global batch's; int64 [].

    Covers tokens, labels, document ids and objective of each row, keyed by `row_numbers` (int64 [B], the row's key),
    so that neither the order of rows nor their distribution over ranks changes the sum."""
    column = torch.arange(inputs.input_ids.shape[1], device=inputs.input_ids.device)
    value = fold_torch(row_numbers[:, None], column)
    for part in (inputs.input_ids, inputs.labels, inputs.document_ids, inputs.objective[:, None]):
        value = fold_torch(value, part)
    return value.sum()
