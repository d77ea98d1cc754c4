"""State through the checkpoint format and back, and comparison down to the bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from mindx_elastic.persist.flatten import flatten, unflatten

__all__ = ["assert_same", "through_format"]


def through_format(state: Any) -> Any:
    """What a later process would read: nothing is shared with `state`."""
    tree, tensors = flatten(state)
    return unflatten(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Same types, same bits; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), where
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), where
        left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(left, right), where
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple, deque)):
        assert type(a) is type(b) and len(a) == len(b), where
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert type(a) is type(b) and (a == b or (a != a and b != b)), f"{where}: {a!r} {b!r}"
