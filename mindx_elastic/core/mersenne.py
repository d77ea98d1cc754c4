"""Reads and puts back the Mersenne twisters of a process, Python's `random` and numpy's global one. Of torch's, which
gives its own in a microsecond, it tells whether it has moved.

numpy gives its state as a dict: `get_state` takes 30 us and its `set_state` 45, 3 % of a step of 1 ms and more. The
bytes themselves are one copy of 2,500 bytes, below 1 us, and they show at once whether the generator has moved. numpy
documents the address of its words. Where it has the normal deviate that it keeps back is not documented: that is
compared once a process with what numpy says of a generator that is made for it (`_gauss_offset`). Where anything is not
as expected (another interpreter, another bit generator) numpy's own functions are used.

Python's generator is asked by its own functions, which take 7 to 12 us: to read its memory, too, was worth less than 1
% of a step of 1 ms.

Rejected: to count draws (they are not counted anywhere), and to compare a few words only (one draw moves an index, but
a seed may leave any of them as they were).
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = [
    "NumpyState",
    "bytes_of_python",
    "numpy_state",
    "put_back_numpy",
    "python_of_bytes",
    "python_state",
    "torch_state",
]

_NUM_WORDS = 624
_WORDS, _INDEX = struct.Struct(f"={_NUM_WORDS}I"), struct.Struct("=i")
_RAW_BYTES = _WORDS.size + _INDEX.size
_RawTwister = ctypes.c_char * _RAW_BYTES
_PYTHON = struct.Struct(f"=i{_NUM_WORDS}I?d")  # the index, the words, whether a normal deviate is kept back, and it
_GAUSS = struct.Struct("@id")  # whether one is kept back, and it
_RawGauss = ctypes.c_char * _GAUSS.size


# --- Python's ---------------------------------------------------------------------------------------------------------


def python_state(earlier: object = None) -> tuple[Any, ...]:
    """What `random.getstate` says. `earlier` itself where that is equal: then nothing was drawn in between."""
    state = random.getstate()
    return earlier if type(earlier) is tuple and earlier == state else state


def bytes_of_python(state: tuple[Any, ...]) -> bytes | None:
    """All of a state, of the same length for each; None: it is no state of a plain `random.Random`."""
    try:
        version, words, gauss = state
        if version == random.Random.VERSION:
            return _PYTHON.pack(words[_NUM_WORDS], *words[:_NUM_WORDS], gauss is not None, gauss or 0.0)
    except (TypeError, ValueError, LookupError, struct.error):
        pass
    return None


def python_of_bytes(data: bytes) -> tuple[Any, ...]:
    """The inverse of `bytes_of_python`. Raises ValueError."""
    if len(data) != _PYTHON.size:
        raise ValueError(f"a state of Python's generator in {len(data)} bytes")
    index, *words, is_kept, gauss = _PYTHON.unpack(data)
    return random.Random.VERSION, (*words, index), gauss if is_kept else None


# --- numpy's ----------------------------------------------------------------------------------------------------------


class NumpyState:
    """The state of numpy's global generator, a Mersenne twister. Never changed."""

    __slots__ = ("gauss", "raw")

    def __init__(self, raw: bytes, gauss: bytes) -> None:
        self.raw = raw
        """The words and the index, as in memory."""
        self.gauss = gauss
        """Whether a normal deviate is kept back, and it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyState) or self.raw != other.raw:
            return False
        return self.gauss == other.gauss or self.as_pair() == other.as_pair()

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        """All of it; of the same length for each state."""
        return self.raw + self.gauss

    @classmethod
    def from_bytes(cls, data: bytes) -> NumpyState:
        """The inverse of `to_bytes`. Raises ValueError."""
        if len(data) != _RAW_BYTES + _GAUSS.size:
            raise ValueError(f"a state of numpy's generator in {len(data)} bytes")
        return cls(data[:_RAW_BYTES], data[_RAW_BYTES:])

    def as_pair(self) -> tuple[int, float]:
        """Whether a normal deviate is kept back, and it."""
        return _GAUSS.unpack(self.gauss)

    def as_dict(self) -> dict[str, Any]:
        """The same as ``numpy.random.get_state(legacy=False)`` gives it."""
        import numpy

        key = numpy.frombuffer(self.raw, dtype=numpy.uint32, count=_NUM_WORDS).copy()
        (index,) = _INDEX.unpack_from(self.raw, _WORDS.size)
        has_gauss, gauss = self.as_pair()
        words = {"key": key, "pos": index}
        return {"bit_generator": "MT19937", "state": words, "has_gauss": has_gauss, "gauss": gauss}


class _NumpyAccess:
    """Where the state is of numpy's global generator, while it draws from `bits`."""

    def __init__(self) -> None:
        from numpy.random import MT19937, RandomState, get_bit_generator, mtrand  # type: ignore[attr-defined]

        self.current_bits: Callable[[], Any] = get_bit_generator
        bits = self.bits = get_bit_generator()
        owner = self._owner = mtrand._rand
        self.is_plain = type(bits) is MT19937 and type(owner) is RandomState
        offset = _gauss_offset() if self.is_plain else None
        self.words: Any = None
        """The words and the index, live; None: only numpy's own functions will do."""
        if offset is not None:
            self.words = _RawTwister.from_address(bits.ctypes.state_address)
            self.gauss = _RawGauss.from_address(id(owner) + offset)


_numpy: _NumpyAccess | None = None


def _numpy_access() -> _NumpyAccess:
    global _numpy
    access = _numpy
    # The function of the access: an `import` costs more than all the rest, where a step has just used the caches.
    if access is None or access.current_bits() is not access.bits:
        access = _numpy = _NumpyAccess()
    return access


def numpy_state(earlier: object = None) -> NumpyState | dict[str, Any]:
    """What ``numpy.random.get_state(legacy=False)`` says; as it gives it where that is the only way. `earlier` itself
    where that is equal."""
    access = _numpy
    if access is None or access.current_bits() is not access.bits:
        access = _numpy_access()
    if access.words is None:
        import numpy

        return dict(numpy.random.get_state(legacy=False))
    if (
        type(earlier) is NumpyState
        # Both are as long: this compares, without a copy of the words, which costs more where they are not cached.
        and earlier.raw.startswith(access.words)
        and earlier.gauss.startswith(access.gauss)
    ):
        return earlier
    return NumpyState(access.words.raw, access.gauss.raw)


def put_back_numpy(state: NumpyState | dict[str, Any]) -> None:
    """`numpy.random.set_state` for what `numpy_state` gives."""
    access = _numpy_access()
    if isinstance(state, NumpyState) and access.words is not None:
        with access.bits.lock:  # another thread may be drawing, without the GIL
            access.words.raw, access.gauss.raw = state.raw, state.gauss
        return
    import numpy

    numpy.random.set_state(state.as_dict() if isinstance(state, NumpyState) else state)


@cache
def _gauss_offset() -> int | None:
    """Where in a `RandomState` the kept normal deviate is, in bytes; None: not in one place for certain."""
    from numpy.random import MT19937, RandomState

    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    bits = MT19937(1)
    one = RandomState(bits)
    one.standard_normal()
    size = RandomState.__basicsize__
    kept = _numpy_gauss(one)
    found = ctypes.string_at(id(one), size).find(kept)
    if found < 0 or ctypes.string_at(id(one), size).count(kept) != 1:
        return None
    block = _RawGauss.from_address(id(one) + found)
    twister = _RawTwister.from_address(bits.ctypes.state_address)
    for draw in (one.standard_normal, one.random_sample, one.standard_normal, lambda: one.seed(4), one.standard_normal):
        draw()
        state = one.get_state(legacy=False)
        index = _INDEX.pack(state["state"]["pos"])
        if _GAUSS.unpack(block.raw) != (state["has_gauss"], state["gauss"]):
            return None
        if twister.raw != state["state"]["key"].tobytes() + index:
            return None
    before = one.get_state(legacy=False)
    raw, gauss = twister.raw, block.raw
    expected = [one.standard_normal() for _ in range(3)]
    twister.raw, block.raw = raw, gauss
    after = one.get_state(legacy=False)
    same = _plain(after) == _plain(before) and [one.standard_normal() for _ in range(3)] == expected
    return found if same else None


def _plain(state: dict[str, Any]) -> tuple[Any, ...]:
    """A state of numpy's as numbers and bytes. Not its `repr`: numpy takes 20 ms for the first one."""
    words = state["state"]
    return state["bit_generator"], words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"]


def _numpy_gauss(generator: Any) -> bytes:
    """The kept normal deviate of `generator` as it should be in memory."""
    state = generator.get_state(legacy=False)
    return _GAUSS.pack(state["has_gauss"], state["gauss"])


# --- torch's ----------------------------------------------------------------------------------------------------------


_torch_last: tuple[bytes, Any] = b"", None
"""The bytes and the state at the last call of `torch_state`."""


def torch_state() -> Any:
    """What `torch.default_generator.get_state` says. The same tensor again while it has not moved: do not change it."""
    global _torch_last
    import torch

    from mindx_elastic.core.tensor_memory import memory_of

    state: Any = torch.default_generator.get_state()
    raw = bytes(memory_of(state))
    if raw != _torch_last[0]:
        _torch_last = raw, state
    return _torch_last[1]
