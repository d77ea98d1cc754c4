"""Random number generators: python, numpy (legacy global), torch CPU and torch CUDA.

Copied at every boundary, so it is measured in microseconds: python 26, numpy 46, torch 6 (FACTS 2.12). The copy is
kept in the form that the library gives; `pack` turns it into plain values for a checkpoint only when one is written.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from mindx_elastic.errors import MismatchError

__all__ = ["capture_rng", "pack_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The state of every generator that this process uses. No copies are shared with the generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return state


def pack_rng(state: dict[str, Any]) -> dict[str, Any]:
    """Make a captured state fit for a checkpoint: long tuples become tensors."""
    version, words, gauss = state["python"]
    packed = dict(state)
    packed["python"] = {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    return packed


def restore_rng(state: dict[str, Any]) -> None:
    """Put back a packed state. Raises MismatchError when the number of CUDA devices has changed."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
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
