"""State of objects without ``state_dict`` that people keep in a training loop, so that they can be named in `stateful`
as they are: their own random generators, tensors, containers, and objects that are made of these."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mindx_elastic.capture.dtensors import local_part, with_layout_of
from mindx_elastic.capture.extra_state import TensorCopy
from mindx_elastic.capture.generators import Stateful, check_kind, generator_adapter
from mindx_elastic.capture.values import put_back, snapshot
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of, has_method
from mindx_elastic.errors import MismatchError, UnsupportedStateError, UsageError

__all__ = ["NO_STATE", "Attributes", "TensorAdapter", "adapted", "attributes"]


class TensorAdapter:
    """A tensor or parameter that is in no module."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, tensor
        self._copy = TensorCopy(tensor, closely=True)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        return {"kind": "torch.Tensor", "value": local_part(self._tensor).detach().clone()}

    def boundary_state(self, *, closely: bool) -> dict[str, Any]:
        """`state_dict` without a copy where none is needed; closely: look also for changes that move no version."""
        if closely:
            self._copy.recheck()
        else:
            self._copy.renew()
        assert self._copy.value is not None
        return {"kind": "torch.Tensor", "value": local_part(self._copy.value)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, "torch.Tensor")
        here, there = local_part(self._tensor), state["value"]
        if here.shape != there.shape or here.dtype != there.dtype:
            raise MismatchError(
                f"{self._name}: the checkpoint holds a tensor {list(there.shape)} of {there.dtype}, this one is "
                f"{list(here.shape)} of {here.dtype}"
            )
        self._tensor.copy_(with_layout_of(self._tensor, there))


class _Container:
    """A list, dict, deque, set or array, changed in place."""

    def __init__(self, name: str, container: Any) -> None:
        self._name, self._container = name, container
        self._kind = type(container).__name__

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._kind, "value": snapshot(self._container, self._name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, self._kind)
        if put_back(self._container, state["value"], self._name) is not self._container:
            raise MismatchError(
                f"{self._name}: the checkpoint's {self._kind} does not fit into this one (another size or type); make "
                "it as in the run that wrote the checkpoint"
            )


class Attributes:
    """What `attributes` returns."""

    def __init__(self, target: object, names: tuple[str, ...]) -> None:
        self.target, self.names = target, names


def attributes(target: object, /, *names: str) -> Attributes:
    """Some attributes of an object, as its state: ``stateful={"trainer": mx.attributes(self, "best", "history")}``.

    Each may be plain data (numbers, strings, tensors, arrays, containers of these), a random generator, or an object
    with ``state_dict`` and ``load_state_dict``; a property needs a setter. They are read at each boundary, and a resume
    sets them on the same `target`. Raises UsageError for names that are no strings; the guard does, when it is entered,
    for an attribute that is not there or cannot be kept. Any thread.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"attributes({type(target).__name__}, ...): give the names of its attributes that are state, as strings: "
            'mx.attributes(self, "global_step", "best")'
        )
    return Attributes(target, names)


class _Object:
    """An object without ``state_dict``, by its attributes: all, or those that `Attributes` names.

    What it refers to and others keep (the model) is left out, as is, of all, what is not a state (functions, process
    groups).
    """

    def __init__(self, name: str, target: object, others: Collection[int]) -> None:
        self._names = target.names if isinstance(target, Attributes) else None
        self._target = target.target if isinstance(target, Attributes) else target
        self._name, self._others = name, others
        self._class = f"{type(self._target).__module__}.{type(self._target).__qualname__}"
        for key in self._names or ():
            kind = inspect.getattr_static(type(self._target), key, None)
            if isinstance(kind, property) and kind.fset is None:
                raise UsageError(f"{name}: {self._class}.{key} is a property without a setter: name what it reads")
        self.state_dict()

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        if self._names is None:
            yield from ((k, v) for k, v in attributes_of(self._target).items() if not isinstance(v, NO_STATE))
            return
        for key in self._names:
            try:
                yield key, getattr(self._target, key)
            except AttributeError:
                own = [*attributes_of(self._target)]
                raise UsageError(
                    f"{self._name}: {self._class} has no attribute {key!r}: set it before the guard is entered, or "
                    f"correct the name in attributes(...); it has {', '.join(own[:8]) or 'none'}"
                ) from None

    def state_dict(self) -> dict[str, Any]:
        plain, nested = {}, {}
        refused: dict[str, UnsupportedStateError] = {}
        for key, value in self._attributes():
            if id(value) in self._others:
                continue
            if (inner := self._inner(key, value)) is not None:
                nested[key] = snapshot(inner.state_dict(), f"{self._name}.{key}")
                continue
            try:
                plain[key] = snapshot(value, f"{self._name}.{key}")
            except UnsupportedStateError as error:
                refused[key] = error
        if refused:
            raise UsageError(self._unkept(refused, plain))
        return {"kind": self._class, "plain": plain, "nested": nested}

    def _unkept(self, refused: Mapping[str, UnsupportedStateError], kept: Collection[str]) -> str:
        first = next(iter(refused.values()))
        if self._names is not None:
            return f"{self._name} cannot keep {', '.join(refused)} ({first})"
        listed = "".join(f', "{key}"' for key in list(kept)[:6]) or ', "its_attribute"'
        return (
            f"{self._name} is a {self._class} without state_dict() and load_state_dict(), and its "
            f"{'attributes' if len(refused) > 1 else 'attribute'} {', '.join(refused)} cannot be kept for it "
            f'({first}). Name what is state: stateful={{"{self._name}": mx.attributes({self._name}{listed})}}, or '
            "give the class the two methods"
        )

    def _inner(self, key: str, value: object) -> Stateful | Any:
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            raise UsageError(
                f"{self._name} is a {self._class}, and holds a {type(value).__name__} in {key}: name that by itself, "
                f'stateful={{"{self._name}": ..., "{self._name}_{key}": {self._name}.{key}}}'
            )
        inner = generator_adapter(f"{self._name}.{key}", value)
        return value if inner is None and has_method(value, "state_dict", "load_state_dict") else inner

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, self._class)
        there = {**state["plain"], **state["nested"]}
        live = attributes_of(self._target) if self._names is None else dict(self._attributes())
        if self._names is not None and (differ := set(self._names).symmetric_difference(there)):
            differ -= {key for key in differ if id(live.get(key)) in self._others}
            for key in sorted(differ):
                where = "in the checkpoint, and not named now" if key in there else "named, and not in the checkpoint"
                logger.warning(
                    "%s: the attribute %s is %s: it stays as the program has made it", self._name, key, where
                )
            there = {key: value for key, value in there.items() if key in self._names}
        for key, value in there.items():
            if key in state["plain"]:
                made = put_back(live.get(key), value, f"{self._name}.{key}")
                if key not in live or made is not live[key]:
                    (object.__setattr__ if self._names is None else setattr)(self._target, key, made)
                continue
            inner = self._inner(key, live.get(key))
            if inner is None:
                raise MismatchError(
                    f"{self._name}: the checkpoint holds the state of its attribute {key}, which it lacks"
                )
            inner.load_state_dict(value)


NO_STATE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    logging.Logger,
    logging.LoggerAdapter,
    ProcessGroup,
    PurePath,
    type(threading.Lock()),
    type(threading.RLock()),
)
_CONTAINERS = (list, dict, set, deque)
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


def adapted(name: str, target: object, others: Collection[int] = ()) -> Stateful | None:
    """The adapter for `target`; None for a type that has none. `name` is used in errors.

    others: ids of objects that are kept by themselves. Raises UsageError for what could not be kept, with the reason.
    """
    if (generator := generator_adapter(name, target)) is not None:
        return generator
    if isinstance(target, Attributes):
        return _Object(name, target, others)
    if isinstance(target, torch.Tensor):
        return TensorAdapter(name, target)
    if isinstance(target, _CONTAINERS):
        return _Container(name, target)
    if type(target).__module__ == "numpy" and getattr(target, "ndim", False):
        return _Container(name, target)
    if isinstance(target, _IMMUTABLE) or type(target).__module__ == "numpy":
        raise UsageError(
            f"{name} is a {type(target).__name__}, which cannot be changed in place at a resume: keep it in a dict, "
            f'stateful={{"state": state}}, or as an attribute, stateful={{"trainer": mx.attributes(self, "{name}")}}'
        )
    if isinstance(target, (*NO_STATE, Iterator)) or (callable(target) and not _is_own(target)):
        return None
    if any(hasattr(type(target), method) for method in ("__next__", "__iter__", "__getitem__")):
        return None  # a container or an iterator of an unknown kind
    return _Object(name, target, others)


def _is_own(target: object) -> bool:
    """Whether it is of a class that the program may have written: a loss that can be called, with tensors in it."""
    root = type(target).__module__.partition(".")[0]
    return (root not in ("torch", "numpy", "builtins") and root not in sys.stdlib_module_names) or root == "__main__"
