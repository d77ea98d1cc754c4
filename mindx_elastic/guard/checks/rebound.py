"""Finds a tensor, container or module whose variable the loop binds anew: the checkpoint keeps the first object.

``protos = 0.9 * protos + 0.1 * means`` makes another tensor, of which the guard knows nothing. What is told:

- the variable (or attribute) that held the object when the guard was entered holds another one of its kind now, and no
  other one that held it has it still, and
- what it holds changes from look to look, and the guard's object does not.

A risk: each step, or each epoch, may make it from what the guard keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.capture.weight_samples import sample_of
from mindx_elastic.core.looks import attributes_of, items_of
from mindx_elastic.guard.checks.surroundings import Seen, variables_of
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["ReboundState"]

_KINDS = (torch.Tensor, np.ndarray, list, deque, dict, set, nn.Module)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_ITEMS = 32
_LONGEST_PATH = 3


@dataclass
class _Holder:
    """A variable or attribute that held a named object when the guard was entered."""

    key: str
    target: Any
    place: str
    path: Sequence[str]
    """``["protos"]``, ``["trainer", "h"]``."""
    was_bound: bool = False
    """Whether it has held the named object at a look."""
    before: tuple[object, object] | None = None
    """What was in the named object and in the other one at the last look, if it held that."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def value(self, places: Mapping[str, Mapping[str, Any]]) -> Any:
        """What it holds now; None where it is gone."""
        first, *others = self.path
        value = places.get(self.place, {}).get(first)
        for name in others:
            value = attributes_of(value).get(name)
        return value


@dataclass
class ReboundState:
    """One per guard. Training thread."""

    unmanaged: Unmanaged
    _holders: list[_Holder] = field(default_factory=list)

    def at_entry(self, targets: Mapping[str, Any], seen: Seen) -> None:
        """Remember where the program has the plain objects among `targets`, of all of which `seen` has the names."""
        self._holders = [
            _Holder(key, target, found.place, path)
            for key, target in targets.items()
            if isinstance(target, _KINDS) and not isinstance(target, nn.Parameter)
            for found in seen.asked.get(id(target), ())
            if found.place and all(map(str.isidentifier, path := found.name.split("."))) and len(path) <= _LONGEST_PATH
        ]

    def look(self, frame: FrameType | None) -> None:
        """At a boundary."""
        if not self._holders:
            return
        places: dict[str, Mapping[str, Any]] = {}
        for place, variables in variables_of(frame):
            places.setdefault(place, variables)
        values = [(holder, holder.value(places)) for holder in self._holders]
        bound = {holder.key for holder, value in values if value is holder.target}
        for holder, value in values:
            if value is holder.target or type(value) is not type(holder.target):
                holder.was_bound, holder.before = value is holder.target, None
                continue
            kept, content = _content_of(holder.target), _content_of(value)
            before, holder.before = holder.before, (kept, content)
            if before is None or before[0] != kept or content == kept or holder.key in bound:
                continue
            if holder.was_bound or before[1] != content:
                self._tell(holder, value)

    def _tell(self, holder: _Holder, value: Any) -> None:
        named = holder.key if isinstance(holder.target, nn.Module) else f'stateful["{holder.key}"]'
        what = f"the variable {holder.name} ({holder.place}) is bound to another object than {named}, which does not "
        self.unmanaged.risk(f"{what}change: checkpoints hold the first one", _remedy(holder, value))


def _content_of(value: Any) -> object:
    """Some of what is in it, to be compared."""
    kind = type(value)  # isinstance() would run a property `__class__`
    if issubclass(kind, torch.Tensor):
        return value.shape, value.dtype, _elements([value])
    if issubclass(kind, np.ndarray):
        every = max(1, value.size // _MOST_ITEMS)
        return value.shape, value.dtype.str, None if value.dtype.hasobject else value.flat[::every].tobytes()
    if issubclass(kind, nn.Module):
        return _elements([*value.parameters(), *value.buffers()])
    items = [item for _, item in items_of(value) or ()]
    some = [*items[:_MOST_ITEMS], *items[-_MOST_ITEMS:]]
    return len(items), [repr(item) if type(item) in _PLAIN else id(item) for item in some]


def _elements(tensors: Sequence[torch.Tensor]) -> str:
    """As text: NaN is NaN."""
    return repr([group.tolist() for group in sample_of(tensors).groups])


def _remedy(holder: _Holder, value: Any) -> str:
    name, target = holder.name, holder.target
    if isinstance(target, (torch.Tensor, np.ndarray)):
        line = f"{name}[...] = ..." if isinstance(target, np.ndarray) else f"{name}.copy_((...).detach())"
        if value.shape != target.shape or str(value.dtype) != str(target.dtype):
            return (
                f'Keep it in a dict: state = {{"{holder.path[-1]}": {name}}} before the guard, '
                f'Guard(stateful={{"{holder.key}": state}}, ...), and state["{holder.path[-1]}"] = ... in the loop'
            )
    elif isinstance(target, nn.Module):
        line = f"{name}.load_state_dict(...)"
    elif isinstance(target, list):
        line = f"{name}[:] = ..."
    else:
        add = "extend" if isinstance(target, deque) else "update"
        line = f"new = ...; {name}.clear(); {name}.{add}(new)"
    return f"Change that object in place: {line} where the loop has {name} = ..."
