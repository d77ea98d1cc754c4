"""What objects of libraries keep in plain attributes, which no state_dict has: an optimizer (a wealth, a count, a
generator), its parameters (``p.hess``), a module that was named by itself (the place in a memory bank, the sums of a
metric).

Most attributes are settings, and the program's own lines set those. So an attribute is state once it has changed since
the guard was made; a run that goes on takes over what the run before has found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.capture.containers import put_back, snapshot
from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.capture.generators import generator_adapter
from mindx_elastic.core.looks import attributes_of, table_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError

__all__ = ["OwnAttributes", "set_by_torch"]

_NUMBERS = (bool, int, float, type(None), torch.dtype)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_MOST_ITEMS, _DEEPEST = 4096, 3
_Key = tuple[str, str]  # the place of an owner, and the attribute's name


class OwnAttributes:
    """The attributes of some owners, by place. Training thread, but for `state`."""

    def __init__(self, *, is_stable: bool) -> None:
        """`is_stable`: tensors and generators change only inside of updates, so that `state` reads them in place."""
        self._is_stable = is_stable
        self._keys = (str, int, nn.Parameter) if is_stable else (str, int)
        self._owners: Mapping[str, object] = {}
        self._moved: set[_Key] = set()
        self._first: dict[_Key, object] = {}
        self.seen: Mapping[_Key, Any] = {}
        """The attributes that have changed, as they were at the boundary that counts; without what is read in place."""

    def set_owners(self, owners: Mapping[str, object]) -> None:
        self._owners = owners
        self.copy()

    def copy(self) -> None:
        """Copy them, at a boundary."""
        if not self._owners:
            return
        seen: dict[_Key, Any] = {}
        for key, value in self._items():
            if key not in self._moved:
                look = _look(value)
                if self._first.setdefault(key, look) == look:
                    continue
                self._moved.add(key)
            if not self._is_stable or type(value) in _NUMBERS:
                seen[key] = _copied(key[1], value)
        self.seen = seen

    def state(self, but: Iterable[torch.Tensor] = ()) -> dict[str, dict[str, Any]]:
        """The attributes by place and name. `but`: tensors that are kept elsewhere. Empty: there are none."""
        found: dict[str, dict[str, Any]] = {}
        others = set(map(id, but))
        for place, name in sorted(self._moved & {key for key, _ in self._items()}):
            value = attributes_of(self._owners[place]).get(name)
            if any(id(tensor) in others for _, tensor in tensors_in(value, name)):
                continue
            if isinstance(value, torch.Tensor) and self._is_stable:
                found.setdefault(place, {})[name] = local_part(value).detach()
            else:
                key = place, name
                found.setdefault(place, {})[name] = self.seen[key] if key in self.seen else _copied(name, value)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `state` has given. Raises MismatchError for owners that are not there."""
        if lost := [place for place in state if place not in self._owners]:
            raise MismatchError(f"the checkpoint has attributes of objects that are not there: {listed(lost, 3)}")
        for place, values in state.items():
            owner = self._owners[place]
            for name, saved in values.items():
                self._moved.add((place, name))
                live = attributes_of(owner).get(name)
                if isinstance(saved, dict) and "generator" in saved:
                    if (adapter := generator_adapter(name, live)) is None:
                        raise MismatchError(f"the checkpoint has a generator for {name}, which its object lacks")
                    adapter.load_state_dict(saved["generator"])
                    continue
                value = put_back(live, saved, name)
                if value is not live and isinstance(value, torch.Tensor) and isinstance(owner, torch.Tensor):
                    value = value.to(owner.device)
                object.__setattr__(owner, name, value)
        self.copy()

    def _items(self) -> Iterator[tuple[_Key, Any]]:
        torchs = set_by_torch()
        for place, owner in self._owners.items():
            for name, value in (table_of(owner) or {}).items():
                if name not in torchs and _is_state(value, self._keys):
                    yield (place, name), value


@cache
def set_by_torch() -> frozenset[str]:
    """The attributes that torch itself sets on optimizers, modules and schedulers. Not at import: torch's first
    optimizer imports its whole compiler."""
    found = {*vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)), *vars(nn.Module())}
    return frozenset(found | {"_opt_called", "_step_count"})


def _is_state(value: Any, keys: tuple[type, ...], depth: int = 0) -> bool:
    """Numbers, tensors, generators; numbers and tensors in lists and in dicts with keys of the types `keys`."""
    kind = type(value)
    if kind in (list, tuple, deque, dict):
        inner: Any = value.values() if kind is dict else value
        if depth == _DEEPEST or len(value) > _MOST_ITEMS or (kind is dict and not {*map(type, value)} <= {*keys}):
            return False
        return all(_is_state(one, keys, depth + 1) for one in inner)
    return kind in _NUMBERS or kind is torch.Tensor or (depth == 0 and isinstance(value, _GENERATORS))


def _look(value: Any) -> object:
    """Equal as long as the value is the same."""
    if type(value) is torch.Tensor:
        return id(value), 0 if value.is_inference() else value._version
    if type(value) in (list, tuple, deque):
        return tuple(map(_look, value))
    if type(value) is dict:
        return tuple((id(key) if isinstance(key, torch.Tensor) else key, _look(one)) for key, one in value.items())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, _GENERATORS):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        state = bits.state if hasattr(bits, "state") else bits.get_state(legacy=False)
        return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in state["state"].values())
    return type(value), repr(value)


def _copied(name: str, value: Any) -> Any:
    adapter: Any = generator_adapter(name, value)
    return snapshot(value, name) if adapter is None else {"generator": snapshot(adapter.state_dict(), name)}
