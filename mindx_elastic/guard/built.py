"""What a program has built before its guard, as far as it may depend on the number of ranks: facts of one process that
are compared with those of another one, which has run the same program in a job of another size.

Wider than `guard.variables`: what the guard keeps, loaders and samplers that are the program's own (of an evaluation),
and plain attributes of modules (a loss that knows the world size) count as well. A difference only costs a restart.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from mindx_elastic.config import RankInfo
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.guard.checks.surroundings import attributes_of, kind_of, variables_of
from mindx_elastic.guard.variables import own_variables

__all__ = ["TOO_MUCH", "what_is_built"]

TOO_MUCH = "more than can be compared"
"""A name that stands for what was left out. No process agrees with another one on it."""
_DEPTH, _MOST, _MOST_OWN, _MOST_ITEMS = 5, 20_000, 2000, 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEFT_OUT = (torch.Tensor, np.ndarray, type, types.ModuleType)
_WORKED_OUT = frozenset({"_length", "_settings"})
"""Attributes of our loaders that are worked out from others."""
_OF_ZYGOTE = "(<string>)"


def what_is_built(frame: FrameType | None, targets: Mapping[str, Any]) -> dict[str, str]:
    """Digests by name. `frame`: the caller's. `targets`: what the guard keeps, by name."""
    variables = own_variables(frame, (), positions=True)
    found = {"the number of torch's threads": str(torch.get_num_threads())}
    if len(variables) >= _MOST_OWN:
        found[TOO_MUCH] = str(id(found))
    # A start by the zygote has variables of its own, which are none of the program's.
    found |= {name: value for name, value in variables.items() if not name.endswith(_OF_ZYGOTE)}
    own, known = RankInfo.from_env(), set[int]()
    waiting: deque[tuple[str, Any, int, bool]] = deque((name, target, 0, True) for name, target in targets.items())
    for place, values in variables_of(frame):
        named = [(name, value) for name, value in list(values.items()) if isinstance(name, str)]
        waiting.extend((f'"{name}" ({place})', value, 1, False) for name, value in named if name[:2] != "__")
    while waiting:
        name, value, depth, is_kept = waiting.popleft()
        if len(found) >= _MOST:
            found[TOO_MUCH] = str(id(found))
            break
        if type(value) in _PLAIN:
            if is_kept:  # others are in `variables`
                found.setdefault(name, _digest([value]))
            continue
        if isinstance(value, _LEFT_OUT) or id(value) in known or depth > _DEPTH:
            continue
        known.add(id(value))
        if isinstance(value, nn.Module):
            found.update(_of_modules(name, value))
        elif (
            isinstance(value, partial)
            and value.func is rank_and_world_size
            and value.args
            == (
                own.rank,
                own.world_size,
            )
        ):
            continue  # renewed with the rank
        elif type(value) in (list, tuple, dict) and len(value) > _MOST_ITEMS:
            found.setdefault(f"what is in {name}", _digest(value))
        else:
            kept = is_kept or _is_of_torch(type(value))
            if kept or type(value) in (list, tuple, dict) or kind_of(type(value)) == "instance":
                children = _children(value)
                waiting.extend((f"{name}{end}", child, depth + 1, kept) for end, child in children)
    return found


def _is_of_torch(kind: type) -> bool:
    """Loaders, samplers, data sets, schedulers, and what is derived from them."""
    return any(base.__module__.startswith(("torch.utils.data", "torch.optim")) for base in kind.__mro__)


def _of_modules(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """The plain attributes of all modules in it. Those of torch itself do not depend on the number of ranks."""
    for inner, each in module.named_modules():
        if not type(each).__module__.startswith("torch."):
            plain = [(key, value) for key, value in sorted(vars(each).items()) if _is_plain(value)]
            yield f"attributes of {name}{'.' * bool(inner)}{inner}", _digest(plain)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple) and len(value) <= _MOST_ITEMS:
        return all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN


def _digest(values: Collection[Any]) -> str:
    """Of plain values, and of how many others there are."""
    found = xxhash.xxh3_64()
    for value in values.items() if isinstance(values, dict) else values:
        is_plain = _is_plain(value) or (type(value) is tuple and all(map(_is_plain, value)))
        found.update((repr(value) if is_plain else "other").encode("utf-8", "surrogatepass") + b"\0")
    return f"{len(values)} {found.hexdigest()}"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", child) for number, child in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in list(value.items()) if type(key) in _PLAIN)
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", dict(value.keywords)))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty yet
                yield f".{name}", cell.cell_contents
        yield from ((".defaults", value.__defaults__), (".kwdefaults", value.__kwdefaults__))
    elif not isinstance(value, types.MethodType):  # the object of a method is found by itself
        yield from ((f".{name}", child) for name, child in attributes_of(value).items() if name not in _WORKED_OUT)
