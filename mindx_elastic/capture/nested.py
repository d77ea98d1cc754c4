"""Goes through nested dicts, lists, tuples and deques; notes on which devices the tensors in them are.

A file has bytes, and reading it gives tensors in host memory. A model and an optimizer of torch move what they load to
where their parameters are; an object of the program that keeps averages on a GPU takes what `load_state_dict` is given,
and would go on with tensors that do not fit the model's. So the devices are kept next to the state: for each tensor, in
the order in which it stands in the state, ``cpu``, ``cuda`` (that of the rank's own weights, whose number may be
another one after a resume) or ``cuda:1`` (another one); a single name where all are on the same device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["ATOMS", "are_in_use", "devices_of", "leaves_of", "put_on", "rebuilt"]

ATOMS = frozenset((type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size))
"""Immutable. A set: to look for a type in a tuple compares it with each one, and takes ten times as long."""

_CONTAINERS = (dict, list, tuple, deque)


def leaves_of(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """All that is in `value` and no container, each with its place: ``{place}.exp_avg``."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    else:
        return [(place, value)]
    found: list[tuple[str, Any]] = []
    for key, item in items:  # no call for what is not a container: states are large
        if isinstance(item, _CONTAINERS):
            found += leaves_of(item, f"{place}.{key}")
        else:
            found.append((f"{place}.{key}", item))
    return found


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` in new containers, with what `change` makes of each leaf. Named tuples are leaves."""
    kind = type(value)
    if issubclass(kind, dict):
        made = value.copy()
        for key, item in value.items():
            made[key] = rebuilt(item, change)
        return made
    if kind in (list, tuple):
        return kind([rebuilt(item, change) for item in value])
    if kind is deque:
        return deque([rebuilt(item, change) for item in value], value.maxlen)
    return change(value)


def are_in_use() -> bool:
    """Whether this process may have tensors elsewhere than in host memory."""
    private = torch._C._get_privateuse1_backend_name() != "privateuseone"  # a vendor's backend has named itself
    return private or torch.cuda.is_initialized() or torch.xpu.is_initialized()


def devices_of(state: Any, own: torch.device | None) -> str | list[str]:
    """Where the tensors in nested containers are; empty: all in host memory, or there are none. `own`: the device of
    this rank's weights; None: they are in host memory."""
    names: dict[torch.device, str] = {} if own is None else {own: own.type}
    found = [names.get(t.device) or names.setdefault(t.device, str(t.device)) for t in _tensors(state)]
    if len(kinds := {*found}) <= 1:
        return "" if kinds <= {"cpu"} else kinds.pop()
    return found


def put_on(state: Any, devices: str | Sequence[str], own: torch.device | None = None) -> Any:
    """`state` with its tensors on the `devices` that `devices_of` has named, as far as they are there; else where they
    are. Containers are new where something moves. `own`: as for that, in this process."""
    if not devices:
        return state
    names = iter(devices) if not isinstance(devices, str) else None
    if names is not None and len(_tensors(state)) != len(devices):
        return state
    known: dict[str, torch.device | None] = {}

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = devices if names is None else next(names)
        assert isinstance(name, str)
        if name not in known:
            known[name] = _device(name, own)
        device = known[name]
        return tensor if device is None else tensor.to(device)

    return rebuilt(state, move)


def _device(name: str, own: torch.device | None) -> torch.device | None:
    """The rank's own one where `name` has no number, or one that is not there. None: there is none of its type."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if own is not None and own.type == device.type and device.index is None:
        return own
    if device.type == "meta":
        return device
    module = torch.get_device_module(device.type)
    if not module.is_available():
        return None
    if (device.index or 0) < module.device_count():
        return device
    return own if own is not None and own.type == device.type else torch.device(device.type, module.current_device())


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves_of(state) if isinstance(leaf, torch.Tensor)]
