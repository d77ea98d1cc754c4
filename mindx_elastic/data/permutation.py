"""A shuffle with random access: position -> index in O(1), without a table of the data set's size.

`torch.randperm` needs the whole epoch's permutation in memory, and a resumed run must draw it again before
it can skip. A *pseudo random permutation* is a cipher over ``0..n-1``: encrypting position p gives the
index at p. Here it is an alternating Feistel network over the next power of two, with *cycle walking* (a
value outside ``0..n-1`` is encrypted again; less than one extra walk on average). Integer arithmetic only,
so every platform and process gives the same order.

Rejected: sorting hashed keys (O(n) memory, O(n log n) time); a linear congruential step (visible patterns).
The constants and the number of rounds are part of the checkpoint format: changing them changes the order of
a resumed epoch.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Permutation", "mix"]

_U64Array: TypeAlias = npt.NDArray[np.uint64]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and its two multipliers (Steele, Lea, Flood 2014)
_MUL_A = 0xBF58476D1CE4E5B9
_MUL_B = 0x94D049BB133111EB
_ROUNDS = 8
_ROUNDS_SMALL = 16  # up to 256 values: few bits a half, so more rounds until every order is equally likely


def mix(*words: int) -> int:
    """One 64-bit hash of whole numbers (splitmix64 chained). Negative and large numbers are taken modulo 2**64."""
    state = 0
    for word in words:
        state = ((state ^ (word & _MASK64)) + _GOLDEN) & _MASK64
        state = ((state ^ (state >> 30)) * _MUL_A) & _MASK64
        state = ((state ^ (state >> 27)) * _MUL_B) & _MASK64
        state ^= state >> 31
    return state


class Permutation:
    """A fixed pseudo random order of ``0..size-1``, chosen by `key` (64 bits).

    Immutable, so any thread may call it. `size` may be 0.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._right_bits = bits // 2
        self._left_bits = bits - self._right_bits
        rounds = _ROUNDS_SMALL if bits <= 8 else _ROUNDS
        self._round_keys = [np.uint64(mix(key, number)) for number in range(rounds)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices at `positions` (any shape, each in ``0..size-1``), same shape."""
        values = self._encrypt(positions.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            walked = self._encrypt(values[outside])
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.size)]
        return values.astype(np.int64).reshape(positions.shape)

    def _encrypt(self, values: _U64Array) -> _U64Array:
        # The halves may differ by one bit, so even and odd rounds mask with different widths instead of
        # swapping halves.
        right_bits, left_bits = self._right_bits, self._left_bits
        right = values & np.uint64((1 << right_bits) - 1)
        left = values >> np.uint64(right_bits)
        for number, key in enumerate(self._round_keys):
            is_even = number % 2 == 0
            half, bits = (right, left_bits) if is_even else (left, right_bits)
            value = (half ^ key) * np.uint64(_MUL_A)
            value = (value ^ (value >> np.uint64(32))) * np.uint64(_MUL_B)
            value >>= np.uint64(64 - bits)  # the top bits, which depend on every bit below them
            if is_even:
                left = left ^ value
            else:
                right = right ^ value
        return (left << np.uint64(right_bits)) | right
