"""The state in a checkpoint of any format: named components, one of which is the model."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindx_elastic.core.printable import listed
from mindx_elastic.errors import ForeignCheckpointError, UnsupportedStateError, UsageError

__all__ = ["MODEL", "components_of", "flat_tensors", "num_tensors", "plain_values"]

MODEL = "model"
_MODEL_NAMES = (MODEL, "state_dict", "model_state_dict", "module")
"""Names that training programs commonly give the weights."""
_NOT_THE_MODEL = {"optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng_state"}
"""Components that torchtitan and others put into one dictionary with the weights."""
_MAX_DEPTH = 100
_MAX_ITEMS = 10_000_000
_MAX_REPEATED_BYTES = 1 << 30


def components_of(content: Any, where: str, component: str | None) -> dict[str, Any]:
    """Sort what a foreign file holds into components, the weights under `MODEL`.

    A flat state dict is a model, without the optimizer and the like that are dictionaries in it. Among several things
    the model is `component`, or what has one of the usual names.
    Raises UsageError where that is not clear.
    """
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} holds a {type(content).__name__}; convert takes a state dict, or a dict of several")
    if component is not None:
        if not isinstance(content.get(component), Mapping):
            raise UsageError(f"{where}: no component {component!r}; there are {_listed(content) or 'none'}")
        names: list[str] = [component]
    else:
        names = [name for name in _MODEL_NAMES if isinstance(content.get(name), Mapping)]
    if names:
        rest = {key: value for key, value in content.items() if key != names[0] and key != MODEL}
        return {MODEL: content[names[0]], **rest}
    if any(isinstance(value, torch.Tensor) for value in content.values()) or not content:
        others = {k: v for k, v in content.items() if k in _NOT_THE_MODEL and isinstance(v, Mapping)}
        return {MODEL: {k: v for k, v in content.items() if k not in others} if others else content, **others}
    raise UsageError(f"{where} holds {_listed(content)}; say with --component which of them is the model")


def _listed(content: Mapping[Any, Any]) -> str:
    return listed([str(name)[:60] for name in content], 12)


def plain_values(value: Any, where: str = "state", depth: int = 0) -> Any:
    """`value` of types that ``torch.load(weights_only=True)`` reads: arrays become tensors, their scalars numbers.

    Raises UnsupportedStateError for a value that has no such form.
    """
    if depth > _MAX_DEPTH:
        raise UnsupportedStateError(where, f"nested deeper than {_MAX_DEPTH} levels, or it contains itself")

    def inner(item: Any, key: object) -> Any:
        return plain_values(item, f"{where}.{key}"[:300], depth + 1)

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

    def walk(value: Any, name: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise UsageError(f"{name[:80]}: nested deeper than {_MAX_DEPTH} levels, or it contains itself")
        if isinstance(value, torch.Tensor):
            if name in found:
                raise UsageError(f"two tensors would be called {name}")
            found[name] = value
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key), depth + 1)
        elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | Mapping) for item in value):
            for index, item in enumerate(value):
                walk(item, f"{name}.{index}", depth + 1)
        else:
            others.append(name)

    walk(model, "", 0)
    return found, [name for name in others if name]


def num_tensors(value: Any, where: str = "the checkpoint") -> tuple[int, int]:
    """How many tensors, and their bytes.

    Raises ForeignCheckpointError for what would be endless to write, however small its file: nested too deep, lists
    that hold one another many times over, a tensor that repeats a few elements a billion times.
    """
    count = nbytes = num_items = 0
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        num_items += 1
        if depth > _MAX_DEPTH or num_items > _MAX_ITEMS:
            raise ForeignCheckpointError(f"{where} holds more than {_MAX_DEPTH} levels or {_MAX_ITEMS:,} values")
        if isinstance(item, torch.Tensor):
            count, nbytes = count + 1, nbytes + item.numel() * item.element_size()
            _check_repeats(item, where)
        elif isinstance(item, Mapping):
            todo += [(one, depth + 1) for one in item.values()]
        elif isinstance(item, list | tuple | deque):
            todo += [(one, depth + 1) for one in item]
    return count, nbytes


def _check_repeats(tensor: torch.Tensor, where: str) -> None:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > _MAX_REPEATED_BYTES and tensor.layout is torch.strided and not tensor.is_meta:
        there = tensor.untyped_storage().nbytes()
        if nbytes > there:
            raise ForeignCheckpointError(f"{where} holds a tensor of {nbytes:,} bytes that repeats {there:,} bytes")
