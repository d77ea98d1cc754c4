"""Loads into optimizers so that each leaf of their state has the type, class and dtype that was saved.

`torch.optim.Optimizer.load_state_dict` casts tensors to the parameter's dtype, makes tensors of Adam's whole numbers,
and other objects of texts, arrays and named tuples. Its own hooks let us put the saved leaves in their places, also in
optimizers inside of others. Devices are those that it chooses.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.nested import leaves_of, rebuilt
from mindx_elastic.core.looks import attributes_of

__all__ = ["exact_loads", "keep_objects", "other_types", "restore_types"]

_MAPPINGS, _SEQUENCES = (dict, OrderedDict), (list, tuple, deque)
_NUMBERS = (bool, int, float, complex, np.generic, torch.Tensor)


@contextmanager
def exact_loads(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside of it, what these optimizers load comes back as it was saved, into the groups and tables that they had."""
    saved: dict[int, tuple[Any, ...]] = {}

    def before(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        saved[id(optimizer)] = state, optimizer.param_groups, optimizer.state
        return {**state, "state": rebuilt(state["state"], _castable)}

    def after(optimizer: torch.optim.Optimizer) -> None:
        state, *held = saved.pop(id(optimizer))
        keep_objects(optimizer, *held)
        restore_types(optimizer, state)

    handles = []
    for each in optimizers:
        if "_optimizer_load_state_dict_pre_hooks" in vars(each):  # a wrapper may not have called the base's __init__
            handles += [each.register_load_state_dict_pre_hook(before), each.register_load_state_dict_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _castable(leaf: Any) -> Any:
    """Returns nothing for a value that torch would take apart: torch calls the type of anything that can be iterated
    over."""
    return leaf if isinstance(leaf, torch.Tensor) or not isinstance(leaf, Iterable) else None


def keep_objects(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Move what was loaded into the dicts and lists that were there before, `groups` and `state`.

    `Optimizer.load_state_dict` makes new ones, and optimizers around others (SAM, Lookahead) share theirs: after it,
    the inner one would no longer have the outer one's learning rate or moments.
    """
    loaded_groups, loaded_state = optimizer.param_groups, optimizer.state
    inner = [each for each in attributes_of(optimizer).values() if issubclass(type(each), torch.optim.Optimizer)]
    if loaded_groups is not groups and len(loaded_groups) == len(groups):
        for group, loaded in zip(groups, loaded_groups, strict=True):
            if loaded is not group:
                group.clear()
                group.update(loaded)
        for each in (*inner, optimizer):  # of a wrapper it may be a property that gives the inner one's
            if each.param_groups is loaded_groups:
                each.param_groups = groups
    if loaded_state is not state:
        state.clear()
        state.update(loaded_state)
        for each in (*inner, optimizer):
            if each.state is loaded_state:
                each.state = state


def restore_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give the leaves of what `optimizer` has loaded from `state` their saved types, as far as it still has them."""
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        saved, loaded = state["state"].get(number), optimizer.state.get(parameter)
        if isinstance(saved, dict) and isinstance(loaded, dict):
            for key in loaded.keys() & saved.keys():
                loaded[key] = _as_saved(saved[key], loaded[key], saved[key] if key == "step" else parameter)


def _as_saved(saved: Any, loaded: Any, near: Any) -> Any:
    """`loaded`, where it is as `saved`; else a copy of that, its tensors on the device of `loaded` or of `near`."""
    kind = type(saved)
    if isinstance(saved, torch.Tensor):
        if type(loaded) is kind and loaded.dtype == saved.dtype:
            return loaded
        device = next((each.device for each in (loaded, near) if isinstance(each, torch.Tensor)), saved.device)
        moved = saved.detach().to(device, copy=True)
        return torch.nn.Parameter(moved, saved.requires_grad) if kind is torch.nn.Parameter else moved
    if kind in _MAPPINGS:
        have = loaded if isinstance(loaded, dict) else {}
        return kind((key, _as_saved(item, have.get(key), near)) for key, item in saved.items())
    if kind in _SEQUENCES:
        there = [*loaded] if isinstance(loaded, _SEQUENCES) and len(loaded) == len(saved) else [None] * len(saved)
        made = [_as_saved(item, each, near) for item, each in zip(saved, there, strict=True)]
        return deque(made, saved.maxlen) if isinstance(saved, deque) else kind(made)
    return copy_tree(saved)


def other_types(saved: Any, now: Any) -> Iterator[str]:
    """The numbers and tensors of `saved` that are of another type in `now`, in words."""
    found = dict(leaves_of(now))
    for place, one in leaves_of(saved):
        other = found.get(place)
        if isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS) and _kind(one) != _kind(other):
            yield f"{place[1:]} was {_kind(one)} and is {_kind(other)}"


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
