"""Plain Python state that programs keep in a loop: lists, dicts, deques, counters, tensors, random
generators, and objects of them.

`snapshot` copies such a value into what a checkpoint can hold; `put_back` makes the live value equal to it again, in
place as far as that goes, because the program has other references to it. What a checkpoint has no word for (a named
tuple, a dataclass, an enumeration, a tensor's device) is a dict with the key `MARK`. Classes are looked up among the
modules that are imported, and nothing is imported or run for them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch

from mindx_elastic.capture.dtensors import filled
from mindx_elastic.capture.generators import GENERATORS, generator_adapter, with_state
from mindx_elastic.capture.nested import ATOMS
from mindx_elastic.capture.stand_ins import MARK, class_of, fields_of, originals, stand_in
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.errors import UnsupportedStateError

__all__ = ["GENERATOR", "put_back", "snapshot"]

_DEEPEST = 60
GENERATOR = "generator"
"""The class that a stand-in names for a random generator."""


def snapshot(value: Any, place: str, depth: int = 0) -> Any:
    """A copy of `value` that a checkpoint can hold and that shares nothing mutable with it.

    Raises UnsupportedStateError, which names the `place`, for what could not be put back.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if depth > _DEEPEST:
        raise UnsupportedStateError(place, f"nested deeper than {_DEEPEST} levels, or it contains itself")
    if kind in (list, tuple, deque, set, frozenset):
        if ATOMS.issuperset(map(type, value)):  # numbers, in a tenth of the time
            return value if kind in (tuple, frozenset) else value.copy()
        items = [snapshot(item, f"{place}.{number}", depth + 1) for number, item in enumerate(value)]
        return deque(items, value.maxlen) if kind is deque else items if kind is list else kind(items)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        if MARK in value:
            raise UnsupportedStateError(place, f"the key {MARK!r} is taken")
        pairs = ((key, snapshot(item, f"{place}.{key}", depth + 1)) for key, item in value.items())
        if kind is not OrderedDict:
            return Counter(dict(pairs)) if kind is Counter else dict(pairs)
        copied = OrderedDict(pairs)
        if (metadata := vars(value).get("_metadata")) is not None:
            copied._metadata = snapshot(metadata, f"{place}._metadata", depth + 1)  # type: ignore[attr-defined]
        return copied
    if kind.__module__ == "numpy":
        return value.copy() if hasattr(value, "dtype") else value  # arrays and scalars
    if issubclass(kind, GENERATORS) and (generator := generator_adapter(place, value)) is not None:
        return {MARK: GENERATOR, "state": snapshot(generator.state_dict(), place, depth + 1)}
    known = stand_in(value, lambda part: snapshot(part, place, depth + 1), also=GENERATORS)
    if known is not value:
        return known
    if issubclass(kind, torch.Tensor):
        return _tensor(value)
    raise UnsupportedStateError(
        place,
        f"a {kind.__module__}.{kind.__qualname__} cannot be kept here; use numbers, strings, tensors, arrays, lists, "
        "tuples, dicts, sets, deques, named tuples, dataclasses, random generators and objects that have only these, "
        "or name the object itself in stateful=",
    )


def put_back(live: Any, saved: Any, place: str) -> Any:
    """`saved` as the live value: `live` itself, changed in place, where it is of the same type; else a new value."""
    if isinstance(saved, dict) and MARK in saved:
        return _unmarked(live, saved, place)
    kind = type(saved)
    if kind is list and type(live) is list:
        live[:] = _items(live, saved, place)
        return live
    if kind is deque:
        items = _items(live, saved, place)
        if type(live) is deque and live.maxlen == saved.maxlen:
            live.clear()
            live.extend(items)
            return live
        return deque(items, saved.maxlen)
    if kind in (dict, OrderedDict, Counter):
        pairs = {key: put_back(_get(live, key), item, f"{place}.{key}") for key, item in saved.items()}
        if isinstance(live, dict):
            live.clear()
            live.update(pairs)  # in the saved order
            made = live
        else:
            made = kind(pairs)
        if kind is OrderedDict and isinstance(made, OrderedDict) and "_metadata" in vars(saved):
            made._metadata = put_back(None, vars(saved)["_metadata"], place)  # type: ignore[attr-defined]
        return made
    if kind is set and type(live) is set:
        live.clear()
        live.update(_items(None, saved, place))
        return live
    if kind in (list, tuple, set, frozenset):
        return kind(_items(live if kind is tuple else None, saved, place))
    if isinstance(saved, torch.Tensor):
        return filled(live, saved)
    if hasattr(saved, "dtype") and kind.__module__ == "numpy":
        alike = type(live) is kind and live.ndim > 0 and (live.shape, live.dtype) == (saved.shape, saved.dtype)
        if alike and live.flags.writeable:
            live[...] = saved
            return live
        return saved.copy()
    return saved


def _items(live: Any, saved: Any, place: str) -> list[Any]:
    """The items, in place where both have the same number of them (a list of tensors)."""
    alike = isinstance(live, (list, tuple, deque)) and len(live) == len(saved)
    now = list(live) if alike else [None] * len(saved)
    return [put_back(old, new, f"{place}.{number}") for number, (old, new) in enumerate(zip(now, saved, strict=True))]


def _get(live: Any, key: Any) -> Any:
    return live[key] if isinstance(live, dict) and key in live else None


def _tensor(value: torch.Tensor) -> Any:
    copy = value.detach().clone()
    if value.device.type == "cpu" and not value.requires_grad:
        return copy
    mark = {MARK: "torch.Tensor", "value": copy, "device": str(value.device), "grad": value.requires_grad}
    return {**mark, "parameter": isinstance(value, torch.nn.Parameter)}


def _unmarked(live: Any, saved: Mapping[str, Any], place: str) -> Any:
    if saved[MARK] == "torch.Tensor":
        tensor = filled(live, saved["value"], torch.device(saved["device"]))
        if tensor is live:
            return live
        if saved["parameter"]:
            return torch.nn.Parameter(tensor, requires_grad=saved["grad"])
        return tensor.requires_grad_(saved["grad"])
    if saved[MARK] == GENERATOR:
        return with_state(live, saved["state"], place)
    kind = class_of(saved[MARK], place)
    if issubclass(kind, tuple) and "values" in saved:
        return tuple.__new__(kind, put_back(live if type(live) is kind else None, saved["values"], place))
    if not {"fields", "attributes"} & saved.keys():
        return originals(saved)
    made = live if type(live) is kind else object.__new__(kind)
    now = attributes_of(made)
    for name, value in fields_of(saved, kind, place).items():
        object.__setattr__(made, name, put_back(now.get(name), value, f"{place}.{name}"))
    return made
