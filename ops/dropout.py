"""Counter-based dropout: a mask is a pure function of (row key, step key, site, token, column), never of a generator.

A row of the global batch therefore loses the same elements whatever rank, micro-batch or device it is computed on, in
forward, in backward and in any later recomputation. The rule below is exact integer arithmetic, the same bit for bit
on CPU and CUDA; a fused kernel must reproduce it.

All arithmetic wraps around (two's complement), ">>>" is a logical shift and

    mix64(z):   z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9
                z = (z ^ (z >>> 27)) * 0x94D049BB133111EB        (the finaliser of splitmix64)
                return z ^ (z >>> 31)

    state(k, t)        = mix64(mix64(k) ^ t)                                        64 bits
    hash(z, site, h)   = upper 32 bits of mix64(z ^ (site * 65536 + h)), as int32
    key of a mask row  = hash(state(row_key, t), site, h)                           for token t of a row
    column(j)          = hash(state(step_key, j), 32767, 0)                         for mask column j

    x = key ^ column(j);  x *= 0x7FEB352D;  x ^= x >>> 15;  x *= 0x846CA68B         (int32)
    element j is kept  <=>  x >= n - 2**31  as signed int32, where n = min(round(p * 2**32), 2**32 - 1)
    kept elements are multiplied by 1 / (1 - n / 2**32)

A mask row is a token of [B, T, D] (h = 0, columns are the D features) or a query of attention probabilities
[B, H, T, T] (h is the head, columns are the keys). Tables that all rows of a step share (the relative embeddings) use
the step key in place of the row key, and the table's row for t. `site`, from 0 to 32,766, numbers the modules of the
model where dropout is applied; there may be 65,536 heads.

Each wrapping product has a factor that was loaded from memory (row or step key). torch.compile would turn a product of
`arange` and large constants alone into index arithmetic, whose overflow is undefined in the C++ it generates and cut to
32 bits in its Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64  # as the signed int64 with the same bits, which is what torch computes with
_MIX_2 = 0x94D049BB133111EB - 2**64
_ELEMENT_1 = 0x7FEB352D
_ELEMENT_2 = 0x846CA68B - 2**32
_HEADS_PER_SITE = 65536
_COLUMN_SITE = 32767


class DropoutKeys(NamedTuple):
    """What the dropout of one (micro-)batch is keyed by.

    rows: int64 [B], a key for each row: a function of (seed, the row's position in the run) alone, different for
        different rows. step: int64 tensor [], the same for all rows of an optimizer step, on every rank.
    """

    rows: Tensor
    step: Tensor


class DropoutStates(NamedTuple):
    """What all sites of a forward pass derive their masks from.

    tokens: int64 [B, T] (or [N], for gathered tokens). columns: int32 [C], keys of mask columns, of which a mask with
    fewer columns uses the first. table: int64 [S], states of a table's rows.
    """

    tokens: Tensor
    columns: Tensor
    table: Tensor


def random_keys(rows: int, device: torch.device | str) -> DropoutKeys:
    """Fresh keys for `rows` rows from PyTorch's global generator, for callers that do not need reproducible masks."""
    bits = torch.randint(-(2**63), 2**63 - 1, (rows + 1,), dtype=torch.int64, device=device)
    return DropoutKeys(bits[:-1], bits[-1])


def dropout_states(keys: DropoutKeys, length: int, columns: int, table_rows: int = 0) -> DropoutStates:
    """States of rows of `length` tokens, of masks with up to `columns` columns and of a table, where the keys are."""
    if keys.rows.dtype != torch.int64 or keys.step.dtype != torch.int64 or keys.step.ndim != 0:
        raise ValueError(
            f"dropout keys are {keys.rows.dtype} rows and {keys.step.dtype} step of shape {tuple(keys.step.shape)}; "
            "rows must be int64 [B] and step int64 []."
        )
    step = keys.step.to(keys.rows.device)
    return DropoutStates(
        tokens=position_states(keys.rows, length),
        columns=token_keys(position_states(step, columns), _COLUMN_SITE),
        table=position_states(step, table_rows),
    )


def mix64(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014) on an int64 tensor of any shape: a bijection of 64 bits."""
    # torch shifts signed integers arithmetically; masking off the copied sign bits makes the shift logical.
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def position_states(keys: Tensor, length: int) -> Tensor:
    """State of each position below `length` for each key: int64 [...] -> int64 [..., length]."""
    return mix64(mix64(keys).unsqueeze(-1) ^ torch.arange(length, device=keys.device))


def token_keys(states: Tensor, site: int) -> Tensor:
    """Keys of mask rows at one site: int64 states of any shape -> int32 keys of the same shape."""
    return (mix64(states ^ (site * _HEADS_PER_SITE)) >> 32).to(torch.int32)  # the upper half, signed


def head_keys(states: Tensor, site: int, heads: int) -> Tensor:
    """Keys of mask rows at one site for each attention head: int64 states [B, T] -> int32 keys [B, heads, T]."""
    salts = torch.arange(heads, device=states.device) + site * _HEADS_PER_SITE  # [heads]
    return (mix64(states.unsqueeze(-2) ^ salts.unsqueeze(-1)) >> 32).to(torch.int32)


def keep_mask(keys: Tensor, columns: Tensor, p: float) -> Tensor:
    """Which elements survive: int32 keys [...] and columns [C] -> bool [..., C], True where kept."""
    x = keys.unsqueeze(-1) ^ columns  # int32 [..., C], the largest tensor of dropout: what follows is in place
    x.mul_(_ELEMENT_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(2**17 - 1))  # a logical shift, as in mix64
    x.mul_(_ELEMENT_2)
    return x >= kept_from(p)


def kept_from(p: float) -> int:
    """The smallest value of an element's hash, as a signed 32-bit integer, with which it is kept."""
    return _dropped_values(p) - 2**31


def keep_scale(p: float) -> float:
    """Factor that keeps the expectation: 1 / (1 - the exact probability that keep_mask realises)."""
    return 2**32 / (2**32 - _dropped_values(p))


def dropout(x: Tensor, p: float, keys: Tensor, columns: Tensor) -> Tensor:
    """Drop elements of x [..., D] with probability p in [0, 1), by int32 keys [...] of its rows and columns [>= D]."""
    if p == 0:
        return x
    return apply_mask(x, keep_mask(keys, columns[: x.size(-1)], p)) * keep_scale(p)


def drop_tokens(x: Tensor, p: float, states: DropoutStates | None, site: int) -> Tensor:
    """Dropout of tokens x [..., D] at one site, by states whose `tokens` are [...]; None (evaluation) drops nothing."""
    return x if states is None or p == 0 else dropout(x, p, token_keys(states.tokens, site), states.columns)


def apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    """x where the bool mask is True, 0 elsewhere; both of one shape."""
    # On a CPU float * bool runs a scalar loop, several times slower than converting and multiplying. On CUDA the
    # conversion happens in the kernel, and the bool tensor kept for the backward pass is a quarter of the size.
    return x * (mask.to(x.dtype) if x.device.type == "cpu" else mask)


def _dropped_values(p: float) -> int:
    """How many of the 2**32 values of the element hash are dropped."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is outside [0, 1); 0 switches dropout off.")
    return min(round(p * 2**32), 2**32 - 1)
