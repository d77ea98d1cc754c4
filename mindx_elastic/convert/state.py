"""The state in a checkpoint in the forms that other programs read."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindx_elastic.errors import UnsupportedStateError, UsageError

__all__ = ["MODEL", "flat_tensors", "num_tensors", "plain_values"]

MODEL = "model"


def plain_values(value: Any, where: str = "state") -> Any:
    """`value` of types that ``torch.load(weights_only=True)`` reads: arrays become tensors, their scalars numbers.

    Raises UnsupportedStateError for a value that has no such form.
    """

    def inner(item: Any, key: object) -> Any:
        return plain_values(item, f"{where}.{key}"[:300])

    if isinstance(value, Counter):
        return Counter(dict(value))
    if isinstance(value, OrderedDict):
        ordered = OrderedDict((key, inner(item, key)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # a module's version numbers
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered
    if isinstance(value, dict):
        return {key: inner(item, key) for key, item in value.items()}
    if isinstance(value, list | deque):
        return [inner(item, index) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(inner(item, index) for index, item in enumerate(value))
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, order="C"))
        except TypeError:
            return value.tolist()
    if type(value) in _KNOWN or value is None:
        return value
    raise UnsupportedStateError(where, f"a value of type {type(value).__qualname__} has no form there")


_KNOWN = (
    *(bool, int, float, complex, str, bytes, set, torch.Tensor, torch.nn.Parameter),
    *(torch.Size, torch.dtype, torch.device),
)


def flat_tensors(model: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Every tensor of `model` by its dotted name, and the names of other values.

    Raises UsageError where two tensors would have one name.
    """
    found: dict[str, torch.Tensor] = {}
    others: list[str] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if name in found:
                raise UsageError(f"two tensors would be called {name}")
            found[name] = value
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | Mapping) for item in value):
            for index, item in enumerate(value):
                walk(item, f"{name}.{index}")
        else:
            others.append(name)

    walk(model, "")
    return found, [name for name in others if name]


def num_tensors(value: Any) -> tuple[int, int]:
    """How many tensors, and their bytes."""
    if isinstance(value, torch.Tensor):
        return 1, value.numel() * value.element_size()
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    found = [num_tensors(each) for each in inner]
    return sum(count for count, _ in found), sum(nbytes for _, nbytes in found)
