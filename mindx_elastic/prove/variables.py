"""The program's own variables, as `mindx-elastic prove` notes them at each step: what no checkpoint has.

Numbers, texts, small tensors and arrays, and the length of containers, by the name that the program has for them. It
runs no code of the program (see `checks.surroundings`), and it is bounded. Of texts only a hash is noted, because one
may be a password.
"""

from __future__ import annotations

import gc
import operator
import os
import queue
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FrameType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch

from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.tensor_memory import memory_of
from mindx_elastic.guard.checks.surroundings import is_library, kind_of, variables_of
from mindx_elastic.prove.digests import digest

__all__ = ["own_variables"]

_MOST = 2000
_MOST_ITEMS = 64
_MOST_BYTES = 1 << 20
_MOST_BYTES_IN_ALL = 1 << 26
_BLOCK, _MOST_BLOCKS = 4096, 64
_DEPTH = 3
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, tuple, set, deque, *_DICTS)
_LONGEST_KEY = 32
_TENSORS = (torch.Tensor, np.ndarray)  # exactly these: parameters belong to modules
_MODULES = ("builtins", "itertools")
_MOST_NESTED = 4
_MOST_INNER = 16
_NUMBERS = (int, float)
# Those of objects with a __getitem__ or a callable: to ask for their length runs code of the program.
_ASK_OTHERS = ("iterator", "callable_iterator", "reversed")


def own_variables(
    frame: FrameType | None, kept: Collection[int], *, positions: bool = False, without_epoch: Collection[int] = ()
) -> dict[str, str]:
    """``"best_loss" (train.py)`` -> digest. `kept`: `id` of what the guard keeps, which is left out. `positions`: also
    where iterators stand, how many items queues have, what only functions and classes of the program have, and samples
    of large tensors and arrays. `without_epoch`: `id` of objects of which all but the ``epoch`` is noted."""
    found: dict[str, str] = {}
    known = set(kept)
    left: float = _MOST_BYTES_IN_ALL
    waiting: deque[tuple[str, str, Any, int]] = deque()
    of_callers: dict[str, int] = {}
    for place, variables in variables_of(frame):
        for name, value in list(variables.items()):
            of_callers[name] = id(value)
            if isinstance(name, str) and not (name.startswith("__") and name.endswith("__")):
                waiting.append((name, place, value, 0))
    while waiting and len(found) < _MOST:
        name, place, value, depth = waiting.popleft()
        if type(value) in _PLAIN:
            found.setdefault(f'"{name}" ({place})', _noted(value))
        elif type(value) in _TENSORS:
            if id(value) not in known and (nbytes := _num_bytes(value)) <= min(left, _MOST_BYTES):
                left -= nbytes
                found.setdefault(f'"{name}" ({place})', digest(value))
            elif positions and id(value) not in known and (sample := _sample(value)) is not None:
                found.setdefault(f'"{name}" ({place})', digest(sample))
        elif positions and type(value) in _QUEUES:
            found.setdefault(f'the length of "{name}" ({place})', str(len(value.queue)))
        elif positions and _is_iterator(value):
            if id(value) not in known:
                known.add(id(value))
                found.setdefault(f'the position of "{name}" ({place})', _position(value))
        elif positions and type(value) is FunctionType:
            if id(value) not in known and depth < _DEPTH and not is_library(str(value.__module__)):
                known.add(id(value))
                where = f"{value.__name__}() in {os.path.basename(value.__code__.co_filename)}"
                cells, own = _closure_of(value), [*vars(value).items(), *_defaults_of(value)]
                waiting.extend((n, where, child, depth + 1) for n, child in cells if of_callers.get(n) != id(child))
                waiting.extend((f"{name}.{n}", place, child, depth + 1) for n, child in own)
        elif positions and isinstance(value, torch.optim.Optimizer):  # also a kept one: no state_dict has these
            waiting.extend((f"{name}.{n}", place, child, _DEPTH) for n, child in _own_numbers(value))
        elif positions and isinstance(value, type):
            if id(value) not in known and depth < _DEPTH and not is_library(value.__module__):
                known.add(id(value))
                children = ((n, child) for n, child in list(vars(value).items()) if not n.startswith("__"))
                waiting.extend((f"{name}.{n}", place, child, depth + 1) for n, child in children)
        elif depth < _DEPTH and id(value) not in known and len(known) < _MOST:
            known.add(id(value))
            if type(value) in _CONTAINERS:  # `isinstance` with an abstract class takes 0.1 ms for each new type
                found.setdefault(f'the length of "{name}" ({place})', str(len(value)))
            left_out = ".epoch" if id(value) in without_epoch else None
            children = (each for each in _children(value) if each[0] != left_out)
            waiting.extend((f"{name}{suffix}", place, child, depth + 1) for suffix, child in children)
            if positions and type(value) is deque:  # a full one has the same length for ever
                items = [("[0]", value[0]), ("[-1]", value[-1])] if value else []
                waiting.extend((f"{name}{suffix}", place, child, depth + 1) for suffix, child in items)
    return found


def _num_bytes(value: Any) -> float:
    """Infinite for what has no plain bytes: sparse and nested tensors, arrays of objects, which would be asked."""
    if isinstance(value, np.ndarray):
        return float("inf") if value.dtype.hasobject else value.nbytes
    is_plain = value.layout is torch.strided and not value.is_nested
    return float(value.nbytes) if is_plain else float("inf")


def _sample(value: Any) -> np.ndarray[Any, Any] | None:
    """Some of the bytes of a large tensor or array in host memory, from all over it: what changes it at random places
    or as a whole is seen, and its size does not count. None: it has no plain bytes."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
        if not is_plain or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return None
        value = np.frombuffer(memory_of(value), dtype=np.uint8)
    elif value.dtype.hasobject or not value.flags.c_contiguous:
        return None
    flat = value.reshape(-1).view(np.uint8)
    starts = np.linspace(0, len(flat) - _BLOCK, _MOST_BLOCKS, dtype=np.int64)
    return np.concatenate([flat[start : start + _BLOCK] for start in starts])


def _noted(value: Any) -> str:
    return digest(value.encode("utf-8", "surrogatepass") if type(value) is str else value)


def _closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # it is empty yet
            yield name, cell.cell_contents


def _defaults_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Containers that are made once, with the function: each call without the argument goes on with them."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
        if type(value) in _CONTAINERS:
            yield name, value


def _own_numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What a class of the program's keeps in attributes, the number of its steps, say."""
    for name, value in attributes_of(optimizer).items():
        if type(value) in _PLAIN and not name.startswith("_"):
            yield name, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    kind = kind_of(type(value))
    if kind == "instance":
        own = attributes_of(value)
        shared = (item for each in reversed(type(value).__mro__) for item in vars(each).items())
        first = {name: item for name, item in shared if type(item) in _PLAIN and not name.startswith("__")}
        yield from ((f".{name}", item) for name, item in {**first, **own}.items())
    elif kind == "loader":
        yield ".dataset", attributes_of(value).get("dataset")
    elif type(value) in (list, tuple) and len(value) <= _MOST_ITEMS:
        yield from ((f"[{number}]", item) for number, item in enumerate(list(value)))
    elif type(value) in _DICTS and len(value) <= _MOST_ITEMS:
        items = list(value.items())
        yield from ((f"[{key!r}]", item) for key, item in items if type(key) is int or _is_name(key))


def _is_name(key: Any) -> bool:
    """Of an entry, and no text that is looked up."""
    return type(key) is str and len(key) <= _LONGEST_KEY


def _is_iterator(value: object) -> bool:
    """Whether it is a generator, or an iterator of Python itself."""
    kind = type(value)
    return kind.__module__ in _MODULES and hasattr(kind, "__next__")


def _position(value: Any, depth: int = 0) -> str:
    """Where an iterator of Python or a generator stands, as a text that changes when it goes on. Does not advance it.

    No code of the program is run, so an iterator of a class of the program has none here (its attributes tell), nor has
    one that asks such an object.
    """
    kind = type(value)
    parts: list[str] = []
    if kind is GeneratorType:
        if value.gi_frame is None:
            return "ended"
        parts.append(str(value.gi_frame.f_lasti))
        for name, variable in value.gi_frame.f_locals.items():
            if type(variable) in _PLAIN:
                parts.append(f"{name}={_noted(variable)}")
    elif kind.__module__ == "builtins" and kind.__name__.endswith("iterator") and kind.__name__ not in _ASK_OTHERS:
        parts.append(str(operator.length_hint(value, -1)))
    elif kind.__name__ == "count" and all(
        type(each) in _NUMBERS for each in gc.get_referents(value) if each is not kind
    ):
        parts.append(repr(value))
    elif kind.__name__ == "repeat":
        parts.append(str(operator.length_hint(value, -1)))
    elif kind.__name__ == "cycle":
        parts += [str(len(each)) for each in gc.get_referents(value) if type(each) is list]
    if depth < _MOST_NESTED:
        parts += [f"({_position(each, depth + 1)})" for each in _inner(value)]
    return " ".join(parts)


def _inner(value: Any) -> Iterator[Any]:
    """The iterators that this one draws from."""
    for each in gc.get_referents(value):
        if _is_iterator(each):
            yield each
        elif type(each) is tuple and len(each) <= _MOST_INNER:
            yield from filter(_is_iterator, each)
