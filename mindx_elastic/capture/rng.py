"""Random number generators: python, numpy (legacy global), torch CPU and torch CUDA.

Copied at every boundary, so it is measured in microseconds: all of them 3 together. The copy is kept as raw bytes where
that is possible (see `core.mersenne`); `pack_rng` turns it into plain values for a checkpoint only when one is written.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.copying import same_tree
from mindx_elastic.core import mersenne
from mindx_elastic.core.mersenne import (
    NumpyState,
    PythonState,
    have_moved,
    numpy_state,
    put_back_numpy,
    put_back_python,
    python_state,
    torch_state,
)
from mindx_elastic.errors import MismatchError

__all__ = [
    "capture_rng",
    "equal_rng",
    "kept_rng",
    "moved_streams",
    "pack_rng",
    "raw_rng",
    "restore_rng",
    "seed_rng",
    "unpack_raw_rng",
]

_HAS_CUDA = torch.backends.cuda.is_built()


def capture_rng(earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of every generator that this process uses. No copies are shared with the generators.

    `earlier` is a captured state whose parts may be taken over where the generator has not moved since; itself where
    none has. Do not change what this gives.
    """
    has_cuda = _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_available()
    old = earlier or {}
    if old and not has_cuda and "cuda" not in old:
        ours, of_numpy, of_torch, access, lines, before = mersenne.mark
        is_marked = old["python"] is ours and old["numpy"] is of_numpy and old["torch"] is of_torch
        if is_marked and access.current_bits() is access.bits:  # as after most steps, without a call
            moved = ours.gauss != mersenne.python_twister.gauss_next or b"".join(lines) != before
        else:
            moved = have_moved(old["python"], old["numpy"], old["torch"])
        if not moved:
            return old
    python, numpy = python_state(old.get("python")), numpy_state(old.get("numpy"))
    state: dict[str, Any] = {"python": python, "torch": torch_state(), "numpy": numpy}
    if has_cuda:
        state["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return state


def pack_rng(state: dict[str, Any]) -> dict[str, Any]:
    """Make a captured state fit for a checkpoint: long tuples become tensors. Do not change what it gives in place."""
    numpy = state["numpy"]
    if isinstance(numpy, NumpyState):
        if numpy.packed is None:  # else it has not moved since it was packed
            numpy.packed = numpy.as_dict()
        numpy = numpy.packed
    return {**state, "python": _pack_python(state["python"]), "numpy": numpy}


def raw_rng(state: dict[str, Any]) -> dict[str, Any]:
    """As `pack_rng`, but all CPU states as bytes, in a microsecond; `unpack_raw_rng` does the rest."""
    python, numpy = state["python"], state["numpy"]
    if type(python) is not PythonState or type(numpy) is not NumpyState:
        return pack_rng(state)
    words = state["torch"].numpy().tobytes()
    return {**state, "python": python.to_bytes(), "torch": words, "numpy": numpy.to_bytes()}


def unpack_raw_rng(raw: dict[str, Any]) -> dict[str, Any]:
    """What `pack_rng` gives, from what `raw_rng` or `pack_rng` has given. Raises ValueError."""
    if not isinstance(raw.get("python"), bytes):
        return raw
    python, numpy = PythonState.from_bytes(raw["python"]), NumpyState.from_bytes(raw.get("numpy", b""))
    torch_state = torch.frombuffer(bytearray(raw["torch"]), dtype=torch.uint8)
    return pack_rng({**raw, "python": python, "torch": torch_state, "numpy": numpy})


def _pack_python(state: Any) -> dict[str, Any]:
    if isinstance(state, PythonState):
        if state.packed is None:
            words = torch.frombuffer(bytearray(state.words), dtype=torch.int32).to(torch.int64)
            words.bitwise_and_(0xFFFFFFFF)  # they have no sign
            state.packed = {"version": random.Random.VERSION, "words": words, "gauss": state.gauss}
        packed: dict[str, Any] = state.packed
        return packed
    version, words, gauss = state
    words = torch.frombuffer(array("q", words), dtype=torch.int64)  # four times as fast as torch.tensor(words)
    return {"version": version, "words": words, "gauss": gauss}


def equal_rng(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captured states are the same."""
    return one is other or (one.keys() == other.keys() and not moved_streams(one, other))


def moved_streams(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The streams that two captured states have differently: "python", "torch", "numpy", "cuda"."""
    moved = []
    if one["python"] is not other["python"] and one["python"] != other["python"]:
        moved.append("python")
    if not _equal_bytes(one["torch"], other["torch"]):
        moved.append("torch")
    if not same_tree(one["numpy"], other["numpy"]):
        moved.append("numpy")
    if not all(map(torch.equal, one.get("cuda", ()), other.get("cuda", ()))):
        moved.append("cuda")
    return moved


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    # `torch.equal` takes three times as long for bytes.
    return one is other or (one.shape == other.shape and bool(one.numpy().tobytes() == other.numpy().tobytes()))


def seed_rng(seed: int) -> None:
    """Seed every generator with `seed` (0 to 2**63 - 1)."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever is drawn or seeded inside is not seen outside, also when it ends with an exception. About 5 us.

    A generator that the block itself brings to life (CUDA's first use) begins at its seed afterwards, as it would have
    without the block.
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
    put_back_python(python)
    torch.default_generator.set_state(state["torch"])
    if "numpy" in state:
        put_back_numpy(state["numpy"])
    if "cuda" in state:
        if not torch.cuda.is_available() or torch.cuda.device_count() < len(state["cuda"]):
            raise MismatchError(
                f"the checkpoint holds the random state of {len(state['cuda'])} CUDA devices, this process sees "
                f"{torch.cuda.device_count()}; start it with the same devices visible"
            )
        for index, one in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(one, index)
