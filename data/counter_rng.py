"""Counter-based random numbers: pure functions of integers, equal in Python, NumPy and PyTorch.

Every random decision about data is `fold(key, counter)` for a key that says what is drawn and a counter that says for
which item, so nothing depends on how often, in which order or on which device a generator was called.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, figure 16); `fold` feeds it a Weyl sequence in the counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def signed(value: int) -> int:
    """The two's-complement int64 with the bits of the unsigned `value`, which is what PyTorch computes with."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def fold(key: int, counter: int) -> int:
    """64 pseudo-random bits for (`key`, `counter`) as an unsigned Python integer; counters may be negative."""
    x = (key + (counter + 1) * _WEYL) & _MASK
    x = ((x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> _SHIFTS[2])


def fold_numpy(key: int | np.ndarray, counter: np.ndarray) -> np.ndarray:
    """`fold` over NumPy arrays of integers (broadcast against each other); returns uint64."""
    counter = np.atleast_1d(np.asarray(counter)).astype(np.uint64)  # one-dimensional: wrap-around without warnings
    key_array = np.asarray(key & _MASK if isinstance(key, int) else key).astype(np.uint64)
    x = key_array + (counter + np.uint64(1)) * np.uint64(_WEYL)
    x = (x ^ (x >> np.uint64(_SHIFTS[0]))) * np.uint64(_MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(_SHIFTS[1]))) * np.uint64(_MULTIPLIERS[1])
    return x ^ (x >> np.uint64(_SHIFTS[2]))


def logical_right_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift an int64 tensor right and fill with zeros (PyTorch's own shift copies the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def fold_torch(key: torch.Tensor | int, counter: torch.Tensor | int) -> torch.Tensor:
    """`fold` over int64 tensors (at least one argument is a tensor); returns int64 holding the same 64 bits."""
    key = signed(key) if isinstance(key, int) else key
    step = signed((counter + 1) * _WEYL) if isinstance(counter, int) else (counter + 1) * signed(_WEYL)
    x = key + step
    assert isinstance(x, torch.Tensor)
    x = x.bitwise_xor_(logical_right_shift(x, _SHIFTS[0])).mul_(signed(_MULTIPLIERS[0]))
    x = x.bitwise_xor_(logical_right_shift(x, _SHIFTS[1])).mul_(signed(_MULTIPLIERS[1]))
    return x.bitwise_xor_(logical_right_shift(x, _SHIFTS[2]))


class Permutation:
    """A keyed pseudo-random permutation of 0 .. size-1, evaluated for any index without storing a table.

    A generalised Feistel network over Z_a x Z_b with a*b just above `size`, and cycle walking for the few values
    beyond it, at most about one in sqrt(size) (Black and Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA
    2002, sections 4 and 5)."""

    _ROUNDS = 4  # each round mixes both halves once
    _LARGEST_TABLE = 1 << 17  # beyond the processor's caches the hash itself is faster

    def __init__(self, key: int, size: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self.a = max(1, int(np.ceil(np.sqrt(size))))
        self.b = -(-size // self.a)
        self.keys = [fold(key, i) for i in range(2 * self._ROUNDS)]
        self._tables: list[np.ndarray] = []

    def _added(self, number: int, half: np.ndarray) -> np.ndarray:
        if self._tables:
            return self._tables[number][half]
        return _hashed(self.keys[number], half, self.b if number % 2 else self.a)

    def _prepare(self, count: int) -> None:
        """Compute the rounds' functions for all halves, some square roots of the size, where `count` values ask."""
        if not self._tables and 2 * self.b < count and self.b <= self._LARGEST_TABLE:
            halves = [np.arange(self.a if number % 2 else self.b) for number in range(len(self.keys))]
            self._tables = [self._added(number, half) for number, half in enumerate(halves)]

    def _walk(self, network: Callable[..., np.ndarray], index: np.ndarray) -> np.ndarray:
        index = np.asarray(index, np.int64)
        self._prepare(index.size)
        out = network(index, self.a, self.b, self._added)
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            out[outside] = network(out[outside], self.a, self.b, self._added)
            outside = outside[out[outside] >= self.size]
        return out

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Images of `index` (integers in 0 .. size-1, [n]) as int64 [n]."""
        return self._walk(_encrypt, index)

    def inverse(self, image: np.ndarray) -> np.ndarray:
        """What has the images `image` (integers in 0 .. size-1, [n]); int64 [n]."""
        return self._walk(_decrypt, image)


def permute_each(permutations: Sequence[Permutation], which: np.ndarray, index: np.ndarray) -> np.ndarray:
    """permutations[w](i) for all pairs of `which` and `index`, int64 [n] both, at once: int64 [n]."""
    size, a, b = np.array([(one.size, one.a, one.b) for one in permutations]).T
    keys = np.array([one.keys for one in permutations], np.uint64).T

    def image(index: np.ndarray, which: np.ndarray) -> np.ndarray:
        of_a, of_b = a[which], b[which]
        return _encrypt(
            index, of_a, of_b, lambda number, half: _hashed(keys[number][which], half, of_b if number % 2 else of_a)
        )

    out = image(index, which)
    outside = np.flatnonzero(out >= size[which])
    while outside.size:
        out[outside] = image(out[outside], which[outside])
        outside = outside[out[outside] >= size[which[outside]]]
    return out


def _hashed(key: int | np.ndarray, half: np.ndarray, modulus: int | np.ndarray) -> np.ndarray:
    """A number below `modulus` for every value: the upper 32 bits of the hash, scaled by multiplication; int64."""
    bits = fold_numpy(key, half) >> np.uint64(32)
    return ((bits * np.asarray(modulus).astype(np.uint64)) >> np.uint64(32)).view(np.int64)


def _encrypt(index: np.ndarray, a: Any, b: Any, added: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    """The network. Even numbers of `added` are functions from Z_b to Z_a, odd ones from Z_a to Z_b."""
    right = index // a
    left = index - right * a  # left in Z_a, right in Z_b
    for number in range(0, 2 * Permutation._ROUNDS, 2):
        # Adding a function of the other half modulo a or b can be undone, whatever the function is.
        left += added(number, right)
        _reduce(left, a)
        right += added(number + 1, left)
        _reduce(right, b)
    right *= a
    right += left
    return right


def _decrypt(image: np.ndarray, a: Any, b: Any, added: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    """What `_encrypt` undoes."""
    right = image // a
    left = image - right * a
    for number in reversed(range(0, 2 * Permutation._ROUNDS, 2)):
        right += b
        right -= added(number + 1, left)
        _reduce(right, b)
        left += a
        left -= added(number, right)
        _reduce(left, a)
    right *= a
    right += left
    return right


def _reduce(values: np.ndarray, modulus: int | np.ndarray) -> None:
    """Values below twice the modulus, int64, modulo it, in place: without sign, what is below it wraps around."""
    unsigned = values.view(np.uint64)
    np.minimum(unsigned, unsigned - np.asarray(modulus).astype(np.uint64), out=unsigned)
