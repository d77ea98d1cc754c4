"""Where the streams of torch, numpy and Python begin for each sample: a function of the sample's seed.

The libraries' own seeding functions of numpy and Python work out 624 words one after the other, which takes 2 and 4 us
a sample, as long as loading a small one. So for these each pair of the 624 words is a hash of its own, of the seed and
the number of the pair: two multiplications, and the high bits are folded down after each (as in MurmurHash3 and
splitmix64). Seeds are hashes of 64 bits already (`permutation.mix`). A pair's number counts as a constant, a hash
again: with a sequence, the words of two samples might run in parallel, shifted by some places. The two streams have
different constants. The first 624 numbers of 32 bits that a sample draws are these words, tempered; then the twister
goes on as from any state. torch's stream is seeded as it does it itself (1 us).

Which version it is (`VERSION`) is part of a position: what is changed here changes what a resumed epoch draws, and is
said then. 1 was each library's own seeding, 2 did not know all generators that a data set uses.

Rejected: a generator for each sample (numpy takes 8 us to make one of any kind); numpy's Philox with another key for
each sample (1.6 us for the words, 0.8 for the key); a part of one long table of random words for each sample (samples
would share numbers).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mindx_elastic.core.mersenne import (
    NO_GAUSS,
    NUM_WORDS,
    LiveTwister,
    NumpyState,
    PythonState,
    is_numpy_plain,
    is_python_plain,
    live_numpy,
    live_python,
    put_back_numpy,
    put_back_python,
)
from mindx_elastic.data.permutation import mix, mix_array

__all__ = ["NUMPY", "PYTHON", "SEEDERS", "TORCH", "VERSION", "Start", "make_start"]

PYTHON, NUMPY, TORCH = range(3)
VERSION = 3
_PAIRS = NUM_WORDS // 2
_AT_ONCE = 16  # samples whose words stay in the processor's cache
# As arrays without a dimension: from numbers numpy would make these at each call.
_FIRST, _SECOND = np.array(0xFF51AFD7ED558CCD, dtype=np.uint64), np.array(0x94D049BB133111EB, dtype=np.uint64)
_HALF, _LESS = np.array(32, dtype=np.uint64), np.array(29, dtype=np.uint64)
_xor, _multiply, _shift = np.bitwise_xor, np.multiply, np.right_shift
_CONSTANTS = 9  # keeps them apart from the other hashes


class Start:
    """Lets one stream begin for each sample of a batch. One thread at a time."""

    def prepare(self, seeds: Sequence[int]) -> None:
        """`seeds`: of all samples that come."""
        raise NotImplementedError

    def begin(self, number: int) -> None:
        """The stream begins for sample `number`; they come in order."""
        raise NotImplementedError

    def fits(self) -> bool:
        """Whether `make_start` would still make one of this kind."""
        return True


def make_start(stream: int) -> Start:
    if stream == TORCH:
        return _SeedingTorch(stream)
    live = live_python() if stream == PYTHON else live_numpy()
    if live is not None:
        return _InPython(stream, live) if stream == PYTHON else _InNumpy(stream, live)
    return _Whole(stream) if _is_plain(stream) else _SeedingAnother(stream)


def _is_plain(stream: int) -> bool:
    return is_python_plain() if stream == PYTHON else is_numpy_plain()


# --- the libraries' own seeding ---


def _seed_python(seed: int) -> None:
    random.seed(seed)


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed >> 32)  # torch.manual_seed() seeds every accelerator and takes 100 us


SEEDERS: tuple[Callable[[int], None], ...] = (_seed_python, _seed_numpy, _seed_torch)


class _Seeding(Start):
    def __init__(self, stream: int) -> None:
        self._seed_one = SEEDERS[stream]
        self._seeds: Sequence[int] = ()

    def prepare(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds

    def begin(self, number: int) -> None:
        self._seed_one(self._seeds[number])


class _SeedingTorch(_Seeding):
    _manual_seed = torch.default_generator.manual_seed

    def begin(self, number: int) -> None:
        self._manual_seed(self._seeds[number] >> 32)


class _SeedingAnother(_Seeding):
    """A generator of the program's in the place of the twister."""

    def __init__(self, stream: int) -> None:
        super().__init__(stream)
        self._stream = stream

    def fits(self) -> bool:
        return not _is_plain(self._stream)


# --- words that are hashes ---


class _Hashes:
    """Makes the first words of some samples at once."""

    def __init__(self, stream: int) -> None:
        self._constants = mix_array(mix(_CONSTANTS, stream), np.arange(_PAIRS, dtype=np.uint64))[None, :]
        self._one = np.array(0, dtype=np.uint64)
        self._words = np.empty((_AT_ONCE, _PAIRS), dtype=np.uint64)
        self._shifted = np.empty_like(self._words)
        flat = self._words.reshape(-1).view(np.uint32).data
        self.rows = [flat[NUM_WORDS * number :][:NUM_WORDS] for number in range(_AT_ONCE)]
        """The words of each of them, until the next call of `make`."""

    def make(self, seeds: Sequence[int]) -> None:
        """For `_AT_ONCE` seeds at most."""
        count = len(seeds)
        words, shifted = self._words[:count], self._shifted[:count]
        if count == 1:  # batches of one: a third of the time
            self._one[()] = seeds[0]
            _xor(self._constants, self._one, words)
        else:
            _xor(np.array(seeds, dtype=np.uint64)[:, None], self._constants, words)
        _multiply(words, _FIRST, words)
        _shift(words, _HALF, shifted)
        _xor(words, shifted, words)
        _multiply(words, _SECOND, words)
        _shift(words, _LESS, shifted)
        _xor(words, shifted, words)
        if sys.byteorder == "big":  # the lower half is the first word of a pair
            words[:] = (words << _HALF) | (words >> _HALF)


class _Hashed(Start):
    """Makes the words of the samples some at a time."""

    def __init__(self, stream: int) -> None:
        self._hashes = _Hashes(stream)
        self._rows = self._hashes.rows
        self._seeds: Sequence[int] = ()
        self._first = self._end = 0  # of the samples whose words are made

    def prepare(self, seeds: Sequence[int]) -> None:
        self._seeds, self._end = seeds, 0

    def _go_on(self) -> None:
        self._first = self._end
        part = self._seeds[self._first : self._first + _AT_ONCE]
        self._end += len(part)
        self._hashes.make(part)


class _InPlace(_Hashed):
    """Writes the words into the generator's memory."""

    def __init__(self, stream: int, live: LiveTwister) -> None:
        super().__init__(stream)
        self._find = live_python if stream == PYTHON else live_numpy
        self._live, self._written, self._index = live, live.words[:NUM_WORDS], live.index

    def fits(self) -> bool:
        return self._find() is self._live


class _InPython(_InPlace):
    def begin(self, number: int) -> None:
        if number == self._end:
            self._go_on()
        self._written[:] = self._rows[number - self._first]
        self._index[0] = 0
        self._live.generator.gauss_next = None


class _InNumpy(_InPlace):
    def __init__(self, stream: int, live: LiveTwister) -> None:
        super().__init__(stream, live)
        self._has_gauss: Any = live.has_gauss

    def begin(self, number: int) -> None:
        # Without the lock of the generator: a thread that draws meanwhile gets some numbers, in any case.
        if number == self._end:
            self._go_on()
        self._written[:] = self._rows[number - self._first]
        self._index[0] = 0
        self._has_gauss[0] = 0


class _Whole(_Hashed):
    """By the libraries' own functions, where their memory is not as expected."""

    def __init__(self, stream: int) -> None:
        super().__init__(stream)
        self._stream = stream

    def fits(self) -> bool:
        return _is_plain(self._stream)

    def begin(self, number: int) -> None:
        if number == self._end:
            self._go_on()
        words, index = self._rows[number - self._first].tobytes(), bytes(4)
        if self._stream == PYTHON:
            put_back_python(PythonState(index + words, None))
        else:
            put_back_numpy(NumpyState(words + index, NO_GAUSS))
