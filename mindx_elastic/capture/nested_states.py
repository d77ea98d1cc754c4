"""States that have whole objects in them: a scheduler around another one, whose `state_dict` gives all its attributes.

An object stands in the file as its own state: what its `state_dict` gives, else its attributes. A load puts that into
the very object that the program has at the same place. What others keep (a named optimizer, the data) and what is no
state (functions) stays the program's, and only its place is noted.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from mindx_elastic.capture.adapters import NO_STATE
from mindx_elastic.capture.copying import copy_state
from mindx_elastic.core.looks import askable, attributes_of, defines, has_attributes, is_its_attributes
from mindx_elastic.errors import MismatchError

__all__ = ["NestedStates"]

_STATE, _ATTRIBUTES = "__mindx_state__", "__mindx_attributes__"
_OF_OTHERS = (*NO_STATE, DataLoader, Dataset, Sampler)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_DEEPEST = 8
_SHALLOW = (dict, list, tuple)
_PLAIN = frozenset((type(None), bool, int, float, str))


class NestedStates:
    """The nested states of one object. Training thread."""

    def __init__(self, name: str, others: Collection[int]) -> None:
        """`others`: ids of what is kept by itself."""
        self._name, self._others = name, others

    def are_in(self, state: Any, depth: int = 0) -> bool:
        """Whether an object is in `state`, as the program gives it."""
        if type(state) in _SHALLOW and depth < _DEEPEST:
            items = state.values() if type(state) is dict else state
            return any(
                self.are_in(item, depth + 1) for _, item in askable(enumerate(items)) if type(item) not in _PLAIN
            )
        return self._is_object(state)

    def _is_object(self, value: Any) -> bool:
        """Whether it is more than a file has a word for. A module is refused by name: its weights belong to a name; and
        so is what C code keeps more of than its attributes (`random.Random`)."""
        if issubclass(type(value), (torch.Tensor, nn.Module)) or type(value) in _SHALLOW or not has_attributes(value):
            return False
        if id(value) in self._others or _has_state(value) or issubclass(type(value), _FUNCTIONS):
            return True
        return not issubclass(type(value), NO_STATE) and is_its_attributes(value) and copy_state(value) is value

    def taken_apart(self, value: Any, depth: int = 0) -> Any:
        """`value` with the state of each object in its place."""
        kind = type(value)
        if depth < _DEEPEST and kind in _SHALLOW:
            if kind is dict:
                return {key: self.taken_apart(item, depth + 1) for key, item in value.items()}
            return kind(self.taken_apart(item, depth + 1) for item in value)
        if depth >= _DEEPEST or not self._is_object(value):
            return value
        if id(value) in self._others or issubclass(type(value), _OF_OTHERS):
            return {_STATE: None}
        if _has_state(value):
            return {_STATE: self.taken_apart(value.state_dict(), depth + 1)}
        own = {key: item for key, item in attributes_of(value).items() if not issubclass(type(item), NO_STATE)}
        return {_ATTRIBUTES: self.taken_apart(own, depth + 1)}

    def stand_in(self, saved: Any) -> bool:
        """Whether the state of an object is in `saved`: the program may have had one at the save, and none now."""
        items = saved.values() if type(saved) is dict else saved if type(saved) in _SHALLOW else ()
        return _stands_for_object(saved) or any(self.stand_in(item) for item in items if type(item) not in _PLAIN)

    def put_together(self, saved: Any, live: Any, place: str = "") -> Any:
        """`saved` with the objects of the program in it, as `live` has them, after their states were loaded.

        Raises MismatchError where the program has none at a place.
        """
        kind = type(saved)
        if _stands_for_object(saved):
            ((key, state),) = saved.items()
            if not has_attributes(live):
                raise MismatchError(f"the checkpoint does not fit {self._name}: {place[1:]} is not an object here")
            if key == _ATTRIBUTES:
                for name, value in self.put_together(state, attributes_of(live), place).items():
                    object.__setattr__(live, name, value)
            elif state is not None:
                live.load_state_dict(self.put_together(state, live.state_dict(), place))
            return live
        if kind is dict:
            have = live if isinstance(live, dict) else {}
            return {key: self.put_together(item, have.get(key), f"{place}.{key}") for key, item in saved.items()}
        if kind in (list, tuple):
            there = [*live] if type(live) is kind and len(live) == len(saved) else [None] * len(saved)
            pairs = enumerate(zip(saved, there, strict=True))
            return kind(self.put_together(item, each, f"{place}.{number}") for number, (item, each) in pairs)
        return saved


def _stands_for_object(saved: Any) -> bool:
    return type(saved) is dict and len(saved) == 1 and (_STATE in saved or _ATTRIBUTES in saved)


def _has_state(value: Any) -> bool:
    return defines(value, "state_dict", "load_state_dict")
