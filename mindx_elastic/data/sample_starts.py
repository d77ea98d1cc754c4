"""Where the streams of torch, numpy and Python begin for each sample: a function of the sample's seed, in two versions.

`SEEDED`, of version 0.1: each library's own seeding function. numpy's and Python's work out 624 words one after the
other, which takes 2 and 4 us a sample, as long as loading a small one.

`HASHED`: for Python and numpy each pair of the 624 words is a hash of its own, of the seed and the number of the pair:
two multiplications, and the high bits are folded down after each (as in MurmurHash3 and splitmix64). Seeds are hashes
of 64 bits already (`permutation.mix`). A pair's number counts as a constant, a hash again: with a sequence, the words
of two samples might run in parallel, shifted by some places. The two streams have different constants. The first 624
numbers of 32 bits that a sample draws are these words, tempered; then the twister goes on as from any state. torch's
stream is seeded as before (1 us).

Most samples draw a few numbers only. So the words can be made as far as they are needed. They then stand at the end of
the state, so that the twister makes new words when a sample has used them up; that is seen (`Start.is_dry`), and the
samples are loaded again with all words.

Which version a run has is part of its position, and the run keeps it. The versions are part of the checkpoint format:
what is changed here changes what a resumed epoch draws.

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
from mindx_elastic.data.permutation import U64Array, mix, mix_array

__all__ = ["ALL_PAIRS", "FEW_PAIRS", "HASHED", "NUMPY", "PYTHON", "SEEDED", "TORCH", "Start", "make_start"]

PYTHON, NUMPY, TORCH = range(3)
SEEDED, HASHED = 1, 2
ALL_PAIRS = NUM_WORDS // 2
FEW_PAIRS = 16
"""Enough for a crop, a flip and some jitter."""
_AT_ONCE, _MOST_AT_ONCE = 16 * ALL_PAIRS, 64  # pairs that stay in the processor's cache; samples
# As arrays without a dimension: from numbers numpy would make these at each call.
_FIRST, _SECOND = np.array(0xFF51AFD7ED558CCD, dtype=np.uint64), np.array(0x94D049BB133111EB, dtype=np.uint64)
_HALF, _LESS = np.array(32, dtype=np.uint64), np.array(29, dtype=np.uint64)
_xor, _multiply, _shift = np.bitwise_xor, np.multiply, np.right_shift
_CONSTANTS = 9  # keeps them apart from the other hashes


class Start:
    """Lets one stream begin for each sample of a batch. One thread at a time."""

    can_be_blank = False
    is_blank = False
    """`begin_blank` was called last, and nothing was dry until then."""

    def prepare(self, seeds: Sequence[int]) -> None:
        """`seeds`: of all samples that come."""
        raise NotImplementedError

    def begin(self, number: int) -> None:
        """The stream begins for sample `number`; they come in order."""
        raise NotImplementedError

    def begin_blank(self) -> None:
        """The stream begins without any words, for code that is not expected to draw. Where `can_be_blank`."""
        raise NotImplementedError

    def is_dry(self) -> bool:
        """Whether something has drawn more numbers than there were words, since `prepare`, or the generator was
        replaced. What was loaded with this is worthless then."""
        return not self.fits()

    @property
    def num_drawn(self) -> int:
        """How many words were drawn since the last `begin`, where that is known. After the last of all words it begins
        at 0 again."""
        return 0

    def fits(self) -> bool:
        """Whether `make_start` would still make one of this kind."""
        return True


def make_start(stream: int, version: int, pairs: int = ALL_PAIRS) -> Start:
    """`pairs`: how many pairs of words are made, where that can be chosen."""
    if stream == TORCH:
        return _SeedingTorch(stream)
    if version == SEEDED:
        return _Seeding(stream)
    live = live_python() if stream == PYTHON else live_numpy()
    if live is not None:
        return _InPython(stream, live, pairs) if stream == PYTHON else _InNumpy(stream, live, pairs)
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

    def __init__(self, stream: int, pairs: int) -> None:
        self._constants = _constants_of(stream, pairs)[None, :]
        self.at_once = min(_MOST_AT_ONCE, max(1, _AT_ONCE // pairs))
        self._one = np.array(0, dtype=np.uint64)
        self._words = np.empty((self.at_once, pairs), dtype=np.uint64)
        self._shifted = np.empty_like(self._words)
        flat = self._words.reshape(-1).view(np.uint32).data
        self.rows = [flat[2 * pairs * number :][: 2 * pairs] for number in range(self.at_once)]
        """The words of each of them, until the next call of `make`."""

    def make(self, seeds: Sequence[int]) -> None:
        """For `at_once` seeds at most."""
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


def _constants_of(stream: int, pairs: int) -> U64Array:
    return mix_array(mix(_CONSTANTS, stream), np.arange(pairs, dtype=np.uint64))


class _Hashed(Start):
    """Makes the words of the samples some at a time."""

    def __init__(self, stream: int, pairs: int) -> None:
        self._hashes = _Hashes(stream, pairs)
        self._rows = self._hashes.rows
        self._seeds: Sequence[int] = ()
        self._first = self._end = 0  # of the samples whose words are made

    def prepare(self, seeds: Sequence[int]) -> None:
        self._seeds, self._end = seeds, 0

    def _go_on(self) -> None:
        self._first = self._end
        part = self._seeds[self._first : self._first + self._hashes.at_once]
        self._end += len(part)
        self._hashes.make(part)


class _InPlace(_Hashed):
    """Writes the words into the generator's memory. If not all are written they are the last ones there, so that a
    sample that has drawn them all makes the generator renew its words: then the first ones change."""

    def __init__(self, stream: int, live: LiveTwister, pairs: int) -> None:
        super().__init__(stream, pairs)
        self.can_be_blank = pairs < ALL_PAIRS  # else there is nothing to tell by
        self._find = live_python if stream == PYTHON else live_numpy
        self._live, self._index, self._generator = live, live.index, live.generator
        self._from = NUM_WORDS - 2 * pairs
        self._written = live.words[self._from :]
        self._mark = memoryview(bytes(8)).cast("Q") if pairs == ALL_PAIRS else live.words[:2].cast("B").cast("Q")
        self._marked = 0

    def prepare(self, seeds: Sequence[int]) -> None:
        self._seeds, self._end = seeds, 0
        self._marked, self.is_blank = self._mark[0], False

    def begin_blank(self) -> None:
        self._index[0] = NUM_WORDS
        self._keep_no_gauss()
        self.is_blank = self._mark[0] == self._marked

    def _keep_no_gauss(self) -> None:
        raise NotImplementedError

    def is_dry(self) -> bool:
        return self._mark[0] != self._marked or not self.fits()

    @property
    def num_drawn(self) -> int:
        return int(self._index[0]) - self._from

    def fits(self) -> bool:
        return self._find() is self._live


class _InPython(_InPlace):
    def begin(self, number: int) -> None:
        if number == self._end:
            self._go_on()
        self._written[:] = self._rows[number - self._first]
        self._index[0] = self._from
        self._generator.gauss_next = None

    def _keep_no_gauss(self) -> None:
        self._generator.gauss_next = None


class _InNumpy(_InPlace):
    def __init__(self, stream: int, live: LiveTwister, pairs: int) -> None:
        super().__init__(stream, live, pairs)
        self._has_gauss: Any = live.has_gauss

    def begin(self, number: int) -> None:
        # Without the lock of the generator: a thread that draws meanwhile gets some numbers, in any case.
        if number == self._end:
            self._go_on()
        self._written[:] = self._rows[number - self._first]
        self._index[0] = self._from
        self._has_gauss[0] = 0

    def _keep_no_gauss(self) -> None:
        self._has_gauss[0] = 0


class _Whole(_Hashed):
    """By the libraries' own functions, where their memory is not as expected."""

    def __init__(self, stream: int) -> None:
        super().__init__(stream, ALL_PAIRS)
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
