"""Reads and puts back the Mersenne twisters of a process, Python's `random` and numpy's global one, as raw bytes. Of
torch's it tells whether it has moved.

Both libraries give their state as objects only: `random.getstate` makes 625 integers (7 us, and 26 where a training
step has just used the caches), numpy's `get_state` takes 30 us and its `set_state` 45. The bytes themselves are one
copy of 2,500 bytes, below 1 us. Whether a generator has moved shows in the one line of a cache that has the index and
the words next to it, at least eleven: a draw moves the index or makes all words anew, and another seed gives all other
words. To compare all of them takes 15 us, where a training step has just used the caches.

numpy documents the address of its words. Where CPython and torch have them, and where numpy has the normal deviate that
it keeps back, is not documented: that is compared once a process with what the libraries say of generators that are
made for it (`_python_is_as_expected`, `_gauss_offset`, `_torch_block`). Where anything is not as expected (another
interpreter, another bit generator of numpy's) the libraries' own functions are used.

Rejected: to count draws, which are not counted anywhere.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

__all__ = [
    "NumpyState",
    "PythonState",
    "have_moved",
    "numpy_state",
    "put_back_numpy",
    "put_back_python",
    "python_state",
    "torch_state",
]

_NUM_WORDS = 624
_WORDS, _INDEX = struct.Struct(f"={_NUM_WORDS}I"), struct.Struct("=i")
_RAW_BYTES = _WORDS.size + _INDEX.size
_RawTwister = ctypes.c_char * _RAW_BYTES
_RawLine = ctypes.c_char * 64
_PYTHON_GAUSS = struct.Struct("=?d")  # whether one is kept back, and it
_GAUSS = struct.Struct("@id")  # whether one is kept back, and it
_RawGauss = ctypes.c_char * _GAUSS.size
_TORCH_HEAD, _TORCH_BEFORE = 24, 20
"""Bytes in front of the words: in what torch says, and in memory (the seed, how many are left, and which is next)."""
_TORCH_KEPT = 28  # bytes behind the words
_RawTorch = ctypes.c_char * (_TORCH_BEFORE + 4 * _NUM_WORDS + _TORCH_KEPT)


# --- Python's ---------------------------------------------------------------------------------------------------------


class PythonState:
    """The state of Python's global generator. Never changed."""

    __slots__ = ("gauss", "packed", "raw")

    def __init__(self, raw: bytes, gauss: float | None) -> None:
        self.packed: Any = None
        """Kept by who packs it."""
        self.raw = raw
        """The index and the words, as in memory."""
        self.gauss = gauss
        """The normal deviate that is kept back, if any."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonState) and self.raw == other.raw and self.gauss == other.gauss

    __hash__ = None  # type: ignore[assignment]

    @property
    def words(self) -> bytes:
        """The words and the index, 4 bytes each in the order of `as_tuple`."""
        return self.raw[_INDEX.size :] + self.raw[: _INDEX.size]

    def to_bytes(self) -> bytes:
        """All of it; of the same length for each state."""
        gauss = self.gauss
        return self.raw + _PYTHON_GAUSS.pack(gauss is not None, gauss or 0.0)

    @classmethod
    def from_bytes(cls, data: bytes) -> PythonState:
        """The inverse of `to_bytes`. Raises ValueError."""
        if len(data) != _RAW_BYTES + _PYTHON_GAUSS.size:
            raise ValueError(f"a state of Python's generator in {len(data)} bytes")
        is_kept, gauss = _PYTHON_GAUSS.unpack_from(data, _RAW_BYTES)
        return cls(data[:_RAW_BYTES], gauss if is_kept else None)

    def as_tuple(self) -> tuple[int, tuple[int, ...], float | None]:
        """The same as `random.getstate` gives it."""
        return random.Random.VERSION, _python_words(self.raw), self.gauss


python_twister: Any = random._inst
"""The generator behind the module's functions."""


def python_state(earlier: object = None) -> PythonState | tuple[Any, ...]:
    """What `random.getstate` says; as it gives it where that is the only way. `earlier` itself where that is equal."""
    words, gauss = _live_python(), python_twister.gauss_next
    if words is None:
        return random.getstate()
    if type(earlier) is PythonState and earlier.raw.startswith(_python_line()) and earlier.gauss == gauss:
        return earlier
    return PythonState(words.raw, gauss)


def put_back_python(state: PythonState | tuple[Any, ...]) -> None:
    """`random.setstate` for what `python_state` gives."""
    words = _live_python()
    if isinstance(state, PythonState) and words is not None:
        words.raw, python_twister.gauss_next = state.raw, state.gauss
    else:
        random.setstate(state.as_tuple() if isinstance(state, PythonState) else state)


@cache
def _live_python() -> Any:
    """The index and the words; None: only Python's own functions will do."""
    return _python_block(python_twister) if _python_is_as_expected() else None


@cache
def _python_line() -> Any:
    """The index and the first words, where `_live_python` gives any."""
    return _RawLine.from_address(ctypes.addressof(_live_python()))


def _python_block(generator: Any) -> Any:
    """The index and the words of `generator`, live. The caller keeps the generator."""
    return _RawTwister.from_address(id(generator) + object.__basicsize__)


def _python_words(raw: bytes) -> tuple[int, ...]:
    return (*_WORDS.unpack_from(raw, _INDEX.size), *_INDEX.unpack_from(raw))


def _python_is_as_expected() -> bool:
    """Whether a `random.Random` is a header, an index and the words."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    if _random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_RawTwister):
        return False
    one, other = random.Random(1), random.Random(2)
    here, there = _python_block(one), _python_block(other)
    for draws in (0, 1, 700, 547):  # the last one ends where the words are used up
        for _ in range(draws):
            one.getrandbits(32)
        internal = one.getstate()[1]
        if _python_words(here.raw) != internal:
            return False
        there.raw = here.raw
        if other.getstate()[1] != internal:
            return False
    one.setstate(random.Random(3).getstate())
    return bool(_python_words(here.raw) == one.getstate()[1])


# --- numpy's ----------------------------------------------------------------------------------------------------------


class NumpyState:
    """The state of numpy's global generator, a Mersenne twister. Never changed."""

    __slots__ = ("gauss", "packed", "raw")

    def __init__(self, raw: bytes, gauss: bytes) -> None:
        self.packed: Any = None
        """Kept by who packs it."""
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
        is_plain = type(bits) is MT19937 and type(owner) is RandomState
        offset = _gauss_offset() if is_plain else None
        self.words: Any = None
        """The words and the index, live; None: only numpy's own functions will do."""
        if offset is not None:
            self.words = _RawTwister.from_address(bits.ctypes.state_address)
            end = bits.ctypes.state_address + _RAW_BYTES
            self.line = _RawLine.from_address(end - ctypes.sizeof(_RawLine))  # the last words and the index
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
    if type(earlier) is NumpyState and earlier.raw.endswith(access.line) and earlier.gauss.startswith(access.gauss):
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

    block = _torch_block()
    if block is not None and _torch_last[0].startswith(block.line) and _torch_last[0].endswith(block.end):
        return _torch_last[1]
    before = None if block is None else block.all.raw
    state: Any = torch.default_generator.get_state()
    raw = bytes(memory_of(state)) if block is None else block.all.raw
    if before not in (None, raw):
        return state  # another thread has drawn meanwhile
    if raw != _torch_last[0]:
        _torch_last = raw, state
    return _torch_last[1]


class _TorchBlock(NamedTuple):
    """The state of torch's global generator, live."""

    all: Any
    line: Any
    """Its seed, its indices and the first words."""
    end: Any
    """The normal deviates that it keeps back."""


@cache
def _torch_block() -> _TorchBlock | None:
    """None: it is not in one place for certain. `get_state` itself takes longer: after a step the caches have none of
    torch's code for it."""
    import torch

    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    one = torch.Generator()
    one.manual_seed(1)
    words = _torch_says(one)[_TORCH_HEAD : _TORCH_HEAD + 64]
    address = getattr(one, "_cdata", None)
    if type(address) is not int:
        return None
    # Eight words, of which there are 8 bytes each in what it says.
    found = ctypes.string_at(address, 256).find(struct.pack("=8I", *struct.unpack("=8Q", words)))
    if found < _TORCH_BEFORE:
        return None
    offset = found - _TORCH_BEFORE
    block = _RawTorch.from_address(address + offset)
    double, single = torch.float64, torch.float32
    for draw in (
        lambda: torch.randn(1, dtype=double, generator=one, device="cpu"),
        lambda: torch.randperm(5, generator=one, device="cpu"),
        lambda: torch.randn(1, dtype=double, generator=one, device="cpu"),
        lambda: torch.randn(1, dtype=single, generator=one, device="cpu"),
        lambda: torch.rand(700, generator=one, device="cpu"),
        lambda: one.manual_seed(1 << 40),
        lambda: torch.randn(20, dtype=single, generator=one, device="cpu"),
    ):
        raw, said = block.raw, _torch_says(one)
        draw()
        then = _torch_says(one)
        if then == said or block.raw == raw:
            return None
        block.raw = raw
        if _torch_says(one) != said:
            return None
        draw()
        if _torch_says(one) != then:
            return None
    found = torch.default_generator._cdata + offset  # type: ignore[attr-defined]
    end = found + ctypes.sizeof(_RawTorch) - _TORCH_KEPT
    kept = (ctypes.c_char * _TORCH_KEPT).from_address(end)
    return _TorchBlock(_RawTorch.from_address(found), _RawLine.from_address(found), kept)


def _torch_says(generator: Any) -> bytes:
    from mindx_elastic.core.tensor_memory import memory_of

    return bytes(memory_of(generator.get_state()))


mark: tuple[Any, ...] = (None, None, None, None, (), b"")
"""When `have_moved` has last said no: the three states, the bit generator of numpy's, the lines, and their bytes."""


def have_moved(python: Any, numpy: Any, torch: Any) -> bool:
    """Whether one of the three may be another now than the states given here, of one moment. False: `python_state`,
    `numpy_state` and `torch_state` would give these very objects again. Where `mark` has them, it tells that at once:
    `capture.rng`."""
    global mark
    access, block = _numpy, _torch_block()
    lines: tuple[Any, ...] = ()
    if type(python) is PythonState and type(numpy) is NumpyState and access is not None and block is not None:
        lines = () if access.words is None else (_python_line(), access.line, access.gauss, block.line, block.end)
    before = b"".join(lines)  # another thread may draw
    if python_state(python) is not python or numpy_state(numpy) is not numpy or torch_state() is not torch:
        return True
    if lines and access is _numpy:
        mark = python, numpy, torch, access, lines, before
    return False
