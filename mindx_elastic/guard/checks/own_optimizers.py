"""Finds what an optimizer of the program's own keeps (momentum, second moments), which torch's hooks never see.

Only where weights of the guard's are known to change without any of torch's optimizers. What has the shapes of trained
weights there, stays the same tensors from one look to the next and gets other values is most likely such state: a risk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.movements import TensorsLook
from mindx_elastic.guard.checks.surroundings import Found, attributes_of, kind_of

__all__ = ["OwnOptimizers"]

_MOVES = 2
_MOST = 256
_MOST_TENSORS = 10_000


@dataclass
class _Slots:
    """Tensors that look like those that an optimizer keeps for each weight."""

    first: weakref.ref[torch.Tensor]
    sample: str
    moves: int = 0


class OwnOptimizers:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], _Slots] = {}
        self._told = False

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self,
        found: Iterable[Found],
        trained: Iterable[torch.Tensor],
        is_kept: Callable[[torch.Tensor], bool],
        line_of: Callable[[Sequence[str]], str],
    ) -> tuple[str, str] | None:
        """What is known against those of `found` that no named object keeps, and what to write.

        `trained`: the weights that change. `line_of`: gives the line that names the objects of these names.
        """
        if self._told:
            return None
        weights = list(trained)
        shapes = {p.shape for p in weights}
        whole = torch.Size([sum(p.numel() for p in weights)])
        before, self._before = self._before, {}
        moved: list[Found] = []
        for one in found:
            if len(self._before) >= _MOST:
                break
            tensors = [t for t in _tensors_of(one.value) if t.shape in shapes or t.shape == whole]
            tensors = [t for t in tensors if not t.requires_grad and t.grad_fn is None and not is_kept(t)]
            if not tensors:
                continue
            key = id(one.value), one.name
            now = _Slots(weakref.ref(tensors[0]), repr(TensorsLook.at(tensors).sample))
            old = before.get(key)
            if old is not None and old.first() is tensors[0]:
                now.moves = old.moves + (old.sample != now.sample)
            self._before[key] = now
            if now.moves >= _MOVES:
                moved.append(one)
        if not moved:
            return None
        self._told = True
        names = listed([str(one) for one in moved], 2)
        are = "changes with them and is" if len(moved) == 1 else "change with them and are"
        what = f"the weights change without any of torch's optimizers, and {names} {are} not kept: that looks like the "
        return (
            f"{what}state of an optimizer of the program's own",
            f"Write {line_of(list(dict.fromkeys(map(_owner_of, moved))))}, with whatever else that optimizer counts",
        )


def _owner_of(found: Found) -> str:
    """``opt`` for ``opt.m`` and ``opt.state['m']``."""
    name, dot, last = found.name.rpartition(".")
    return name if dot else last.partition("[")[0]


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        some = list(dict.values(value)) if isinstance(value, dict) else []
    elif type(value) in (list, tuple):
        some = list(value)
    elif kind_of(type(value)) == "instance":
        some = list(attributes_of(value).values())
    else:
        return []
    some = some[:_MOST_TENSORS]
    return [one for one in some if type(one) is torch.Tensor and one.ndim]
