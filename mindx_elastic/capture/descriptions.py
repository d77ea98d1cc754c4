"""Says whether tensors still mean the same by their memory: type, shape, strides, a conjugate that was put off.

A program can change all of these in place (``buffer.data = buffer.data.view(torch.int32)``, `as_strided_`), and neither
the object, nor its address, nor its version counter shows it. Asked of each tensor in Python it takes 16 us for sixty;
the class that torch's compiler guards its code with asks all of them in one call, in 3. It is no public part of torch,
so it is tried out once a process on tensors that are changed in each of these ways, and where it does not notice one,
or does not exist, Python asks.

That class also looks at things that mean nothing here, such as autocast at the time of the call. So its "no" is not
believed: Python asks then, and a "yes" is kept for tensors in the new surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

__all__ = ["Descriptions"]

_size, _stride, _is_conj, _is_neg = (
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_dtype_of = attrgetter("dtype")
_MOST_SURROUNDINGS = 4
"""Such as: forward under autocast, boundary without; each with gradients and without."""
_Check = Callable[..., bool]


class Descriptions:
    """Of some plain tensors, dense and on the CPU, as they are when it is made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._described = _describe(tensors)
        self._checks: list[_Check] = []
        self._learn(tensors)

    def fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these, the same objects, are still as described."""
        for check in self._checks:
            if check(*tensors):
                return True
        if _describe(tensors) != self._described:
            return False
        self._learn(tensors)
        return True

    def _learn(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(self._checks) < _MOST_SURROUNDINGS and (make := _fast_check()) is not None:
            self._checks.append(make(tensors))


def _describe(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [
        [*map(_dtype_of, tensors)],
        [*map(_size, tensors)],
        [*map(_stride, tensors)],
        [*map(_is_conj, tensors)],
        [*map(_is_neg, tensors)],
    ]


@cache
def _fast_check() -> Callable[[Sequence[torch.Tensor]], _Check] | None:
    """Makes the check of all tensors in one call; None where this torch has none that notices everything."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        def make(tensors: Sequence[torch.Tensor]) -> _Check:
            guards: Any = TensorGuards
            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            check: _Check = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            return check

        return make if all(_notices(make, change) for change in _CHANGES) else None
    except Exception:  # it is another class there, or wants other arguments
        return None


def _notices(make: Callable[[Sequence[torch.Tensor]], _Check], change: Callable[[Any], object]) -> bool:
    """Whether a check says yes as long as nothing has changed, and no afterwards."""
    room = torch.zeros(8, dtype=torch.complex64, device="cpu")
    beside, tensor = torch.zeros(3, device="cpu"), room[:4]
    check = make([beside, tensor])
    before = check(beside, tensor) is True
    with torch.no_grad():
        change(tensor)
    return before and check(beside, tensor) is False


def _assign(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], object]:
    def assign(tensor: Any) -> None:
        tensor.data = make(tensor.data)

    return assign


_CHANGES: tuple[Callable[[Any], object], ...] = (
    _assign(lambda data: data.view(torch.int64)),
    _assign(lambda data: data.view(torch.int16)),
    _assign(lambda data: data.view(2, 2)),
    _assign(lambda data: data[:3]),
    _assign(lambda data: data.as_strided((4,), (2,))),
    _assign(lambda data: data.conj()),
    _assign(lambda data: data.view(torch.float32)[:4]),
    _assign(torch._neg_view),
    lambda tensor: tensor.as_strided_((4,), (2,)),
    lambda tensor: tensor.resize_(3),
    lambda tensor: tensor.unsqueeze_(0),
)
