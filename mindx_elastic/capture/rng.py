"""Random number generators: python, numpy (legacy global), torch CPU and torch CUDA.

Copied at every boundary, so it is measured in microseconds: python 26, numpy 46, torch 6. The copy is
kept in the form that the library gives; `pack` turns it into plain values for a checkpoint only when one is written.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindx_elastic.errors import MismatchError

__all__ = ["capture_rng", "equal_rng", "kept_rng", "pack_rng", "restore_rng", "seed_rng"]

_MT19937_BYTES = 624 * 4 + 4  # struct s_mt19937_state: uint32_t key[624]; int pos


def capture_rng(earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of every generator that this process uses. No copies are shared with the generators.

    `earlier` is a captured state whose parts may be taken over where the generator has not moved since.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state(None if earlier is None else earlier.get("numpy"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return state


class _NumpyState(dict[str, Any]):
    """What numpy gives, with the raw words of the generator to compare with."""

    raw: bytes | None = None


def _numpy_state(earlier: Any) -> dict[str, Any]:
    """numpy's global state, in 1 us instead of 46 when it has not moved.

    The raw words alone do not suffice: a normal deviate that was kept back is used without drawing. But one can only be
    kept back after a draw, so with none kept in `earlier`, equal words mean an equal state.
    """
    import numpy

    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in its stubs
    raw = None
    if isinstance(generator, numpy.random.MT19937):
        raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if isinstance(earlier, _NumpyState) and earlier.raw == raw and not earlier["has_gauss"]:
            return earlier
    state = _NumpyState(numpy.random.get_state(legacy=False))
    state.raw = raw
    return state


def pack_rng(state: dict[str, Any]) -> dict[str, Any]:
    """Make a captured state fit for a checkpoint: long tuples become tensors."""
    version, words, gauss = state["python"]
    packed = dict(state)
    if "numpy" in packed:
        packed["numpy"] = dict(packed["numpy"])
    words = torch.frombuffer(array("q", words), dtype=torch.int64)  # four times as fast as torch.tensor(words)
    packed["python"] = {"version": version, "words": words, "gauss": gauss}
    return packed


def equal_rng(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captured states are the same."""
    if one.keys() != other.keys() or one["python"] != other["python"]:
        return False
    if not torch.equal(one["torch"], other["torch"]):
        return False
    if "numpy" in one and not _equal_numpy(one["numpy"], other["numpy"]):
        return False
    return all(map(torch.equal, one.get("cuda", ()), other.get("cuda", ())))


def _equal_numpy(one: Any, other: Any) -> bool:
    if one is other:
        return True
    raw = getattr(one, "raw", None)
    if raw is None:  # a bit generator of the user's choice: small, plain numbers
        return repr(one) == repr(other)
    same = raw == getattr(other, "raw", None)
    return same and (one["has_gauss"], one["gauss"]) == (other["has_gauss"], other["gauss"])


def seed_rng(seed: int) -> None:
    """Start every generator anew from `seed` (0 to 2**63 - 1)."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed % 2**32)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever is drawn or seeded inside is not seen outside, also when it ends with an exception. About 70 us.

    A generator that the block itself brings to life (CUDA's first use) begins at its seed afterwards, as it would have
    without the block. Only numpy's, imported for the first time in there, goes on: it begins at random anyway.
    """
    state = capture_rng()
    try:
        yield
    finally:
        _put_back(state, state["python"])
        if "cuda" not in state and torch.cuda.is_available() and torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def restore_rng(state: dict[str, Any]) -> None:
    """Put back a packed state. Raises MismatchError when the number of CUDA devices has changed."""
    python = state["python"]
    _put_back(state, (python["version"], tuple(python["words"].tolist()), python["gauss"]))


def _put_back(state: dict[str, Any], python: Any) -> None:
    random.setstate(python)
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        if not torch.cuda.is_available() or torch.cuda.device_count() < len(state["cuda"]):
            raise MismatchError(
                f"the checkpoint holds the random state of {len(state['cuda'])} CUDA devices, this process sees "
                f"{torch.cuda.device_count()}; start it with the same devices visible"
            )
        for index, one in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(one, index)
