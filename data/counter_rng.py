"""Counter-based random numbers: pure functions of integers, equal in Python, NumPy and PyTorch.

Every random decision about data is `fold(key, counter)` for a key that says what is drawn and a counter that says for
which item, so nothing depends on how often, in which order or on which device a generator was called.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, figure 16); `fold` feeds it a Weyl sequence in the counter.
"""

from __future__ import annotations

from collections.abc import Callable

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
    beyond it (Black and Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5).
    """

    _ROUNDS = 4  # each round mixes both halves once

    def __init__(self, key: int, size: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._a = max(1, int(np.ceil(np.sqrt(size))))
        self._b = -(-size // self._a)
        self._keys = [fold(key, i) for i in range(2 * self._ROUNDS)]

    def _round(self, key: int, value: np.ndarray, modulus: int) -> np.ndarray:
        """A number below `modulus` for every value: the upper 32 bits of the hash, scaled by multiplication."""
        return ((fold_numpy(key, value) >> np.uint64(32)) * np.uint64(modulus)) >> np.uint64(32)

    def _encrypt(self, index: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._a), np.uint64(self._b)
        right, left = np.divmod(index, a)  # left in Z_a, right in Z_b
        for i in range(self._ROUNDS):
            # Adding a function of the other half modulo a or b can be undone, whatever the function is.
            left = left + self._round(self._keys[2 * i], right, self._a)
            left = np.where(left >= a, left - a, left)
            right = right + self._round(self._keys[2 * i + 1], left, self._b)
            right = np.where(right >= b, right - b, right)
        return right * a + left

    def _decrypt(self, image: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._a), np.uint64(self._b)
        right, left = np.divmod(image, a)
        for i in reversed(range(self._ROUNDS)):
            right = right + b - self._round(self._keys[2 * i + 1], left, self._b)
            right = np.where(right >= b, right - b, right)
            left = left + a - self._round(self._keys[2 * i], right, self._a)
            left = np.where(left >= a, left - a, left)
        return right * a + left

    def _walk(self, step: Callable[[np.ndarray], np.ndarray], index: np.ndarray) -> np.ndarray:
        """Cycle walking: `step` again where it leaves 0 .. size-1, as at most about one value in sqrt(size) does."""
        out = step(np.asarray(index).astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            out[outside] = step(out[outside])
            outside = outside[out[outside] >= self.size]
        return out.astype(np.int64)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Images of `index` (integers in 0 .. size-1, any shape [n]) as int64 [n]."""
        return self._walk(self._encrypt, index)

    def inverse(self, image: np.ndarray) -> np.ndarray:
        """What has the images `image` (integers in 0 .. size-1, any shape [n]); int64 [n]."""
        return self._walk(self._decrypt, image)
