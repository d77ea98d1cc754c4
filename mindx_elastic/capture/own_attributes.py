"""What an optimizer of a library keeps in attributes of its own, and in attributes of its parameters: a wealth, a count
of iterations, a generator, ``p.hess``. No state_dict has it.

Most attributes are settings, and the program's own lines set those. So an attribute is state once it has changed since
the guard was made; a run that goes on takes over what the run before has found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.adapters import generator_adapter
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError

__all__ = ["OwnAttributes"]

_NUMBERS = (bool, int, float, str, type(None))
_TORCHS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"_opt_called", "_step_count"}
_Key = tuple[str, str]  # the place of a parameter, empty for the optimizer, and the attribute's name


class OwnAttributes:
    """Of one optimizer: stable state as the rest of it, but for numbers, which the program may set between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Stock optimizers have none, and a look at each parameter of a large model is no longer nothing.
        self._is_stock = type(optimizer).__module__.startswith("torch.")
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._moved: set[_Key] = set()
        self._first: dict[_Key, object] = {}
        self.numbers: Mapping[_Key, Any] = {}
        """Those that have changed, as they were at the boundary that counts."""

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """`parameters`: those that it updates, by place."""
        self._parameters = {} if self._is_stock else parameters
        self.copy()

    def copy(self) -> None:
        """At a boundary."""
        if self._is_stock:
            return
        for key, value in self._items():
            look = _look(value)
            if key not in self._moved and self._first.setdefault(key, look) != look:
                self._moved.add(key)
        if self._moved:
            self.numbers = {key: v for key, v in self._items() if key in self._moved and type(v) in _NUMBERS}

    def state(self) -> dict[str, dict[str, Any]]:
        """By place and name. Empty: there are none."""
        found: dict[str, dict[str, Any]] = {}
        shared = {id(t) for t in _tensors_of(self._optimizer)}
        for place, name in sorted(self._moved):
            value = self.numbers.get((place, name), self._owner(place).get(name))
            if isinstance(value, torch.Tensor):
                if id(value) in shared:
                    continue
                value = local_part(value).detach()
            elif (adapter := generator_adapter(name, value)) is not None:
                value = {"generator": adapter.state_dict()}
            found.setdefault(place, {})[name] = value
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `state` has given. Raises MismatchError for parameters that are not there."""
        if lost := [place for place in state if place and place not in self._parameters]:
            raise MismatchError(f"the checkpoint has attributes of parameters that are not there: {listed(lost, 3)}")
        for place, values in state.items():
            own = self._owner(place)
            for name, saved in values.items():
                self._moved.add((place, name))
                live, value = own.get(name), saved
                if isinstance(saved, torch.Tensor):
                    like = live if isinstance(live, torch.Tensor) else self._parameters.get(place, saved)
                    value = saved.to(like.device, copy=True)
                    if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
                        value = live.copy_(value)
                elif isinstance(saved, dict):
                    if (adapter := generator_adapter(name, live)) is None:
                        raise MismatchError(f"the checkpoint has a generator for {name}, which the optimizer lacks")
                    adapter.load_state_dict(saved["generator"])
                    continue
                object.__setattr__(self._parameters[place] if place else self._optimizer, name, value)
        self.copy()

    def _owner(self, place: str) -> Mapping[str, Any]:
        return attributes_of(self._parameters[place]) if place else attributes_of(self._optimizer)

    def _items(self) -> Iterator[tuple[_Key, Any]]:
        for name, value in vars(self._optimizer).items():
            if name not in _TORCHS and _is_state(value):
                yield ("", name), value
        for place, parameter in self._parameters.items():
            for name, value in parameter.__dict__.items():
                if type(value) in (float, int, torch.Tensor):
                    yield (place, name), value


def _is_state(value: object) -> bool:
    return type(value) in _NUMBERS or type(value) is torch.Tensor or isinstance(value, _GENERATORS)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)


def _look(value: Any) -> object:
    """Equal as long as the value is the same."""
    if type(value) is torch.Tensor:
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, _GENERATORS):
        return repr(generator_adapter("", value).state_dict())  # type: ignore[union-attr]
    return type(value), repr(value)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    """What is in its state, or trained: an attribute that is one of these is kept there."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tables = [values.values() for values in optimizer.state.values() if isinstance(values, dict)]
    return [*parameters, *(value for table in tables for value in table if isinstance(value, torch.Tensor))]
