"""The random generators that a data set uses: on itself, in its transforms, in the functions that they call and in the
objects that these name (a global transform).

Augmentation libraries keep their own generators (``self.rng = np.random.default_rng(0)``), which run on from batch
to batch. To make a batch a function of its place they are found here and seeded for each batch, as the global streams
are.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.core.looks import askable, attributes_of, is_comparable, items_of
from mindx_elastic.data.permutation import mix

__all__ = ["find_generators", "is_generator", "seed_generators", "set_state", "state_of"]

_OWN = 7  # keeps their seeds apart from the other hashes
_MOST_OBJECTS, _DEEPEST, _LONGEST = 4000, 8, 256
_CONTAINERS = (list, tuple, dict, types.MethodType, functools.partial)
_KEYS = (str, int, float, bool, type(None))
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor, np.ndarray)
_KNOWN = frozenset(("torch", "numpy", "builtins", __name__.partition(".")[0], *sys.stdlib_module_names)) - {"__main__"}


def _is_known(value: Any) -> bool:
    """Whether torch, numpy, the standard library or this package has made it."""
    return str(value.__module__).partition(".")[0] in _KNOWN


def _names_of(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def is_generator(value: Any) -> bool:
    """Whether it has a state that can be read and set."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return issubclass(type(value), kinds) and not issubclass(type(value), random.SystemRandom)


def find_generators(root: Any, *, excluding: Any = None) -> dict[str, Any]:
    """The generators that can be reached from `root`, each once, by their place (``transform.transforms.0.rng``).
    Not those reached only through `excluding`.

    In an order that is the same in every process. Long lists (file names) are not gone through, nor arrays. Takes
    microseconds for each object that is reached.
    """
    return {place: value for place, value in _reach(root, excluding) if is_generator(value)}


def _reach(root: Any, excluding: Any = None) -> Iterator[tuple[str, Any]]:
    """What the code that loads samples can get at, each once, with its place: attributes, items, closures and defaults,
    the globals that functions name, and the methods and attributes of classes. Objects come before code."""
    seen = {id(root), id(excluding), *_GLOBAL}
    objects, code = deque([("", root, 0)]), deque[tuple[str, Any, int]]()
    while (objects or code) and len(seen) < _MOST_OBJECTS:
        place, value, depth = objects.popleft() if objects else code.popleft()
        yield place, value
        if depth >= _DEEPEST or is_generator(value):
            continue
        for name, part in askable(_parts(value)):
            kind = type(part)
            is_code = kind is types.FunctionType or issubclass(kind, type)
            if id(part) in seen or (_is_known(part) if is_code else issubclass(kind, _LEAVES)):
                continue
            seen.add(id(part))
            (code if is_code else objects).append((f"{place}.{name}" if place else name, part, depth + 1))


def _global_generators() -> set[int]:
    """The generators that are seeded and kept as the global streams."""
    return {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}


_GLOBAL = _global_generators()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, (list, tuple, dict)):
        items = enumerate(items_of(value, _LONGEST) or ())
        yield from ((str(key) if type(key) in _KEYS else str(number), part) for number, (key, part) in items)
        return
    if kind is types.FunctionType:
        yield from _parts_of_function(value)
        return
    if kind is types.MethodType:
        yield "self", value.__self__
        yield "function", value.__func__
        return
    if issubclass(kind, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if not issubclass(kind, type):
        yield from ((str(name), part) for name, part in attributes_of(value).items())
    for each in (value if issubclass(kind, type) else kind).__mro__:
        if is_comparable(each) and not _is_known(each):
            yield from _parts_of_class(each)


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(kind).items()):
        is_wrapped = issubclass(type(value), (staticmethod, classmethod))
        part = value.__func__ if is_wrapped else value.fget if issubclass(type(value), property) else value
        if _may_draw(part):
            yield name, part


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield "defaults", [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = sorted(_names_of(function.__code__))
    used = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for module in [one for _, one in used if issubclass(type(one), types.ModuleType) and one.__name__ not in _KNOWN]:
        used += [(name, vars(module)[name]) for name in names if name in vars(module)]
    yield from ((name, one) for name, one in askable(used) if _may_draw(one))


def _may_draw(value: Any) -> bool:
    """Whether something that code has by a name can be a generator, or code or an object that uses one."""
    kind = type(value)
    if issubclass(kind, (types.FunctionType, type)):
        return not _is_known(value)
    if issubclass(kind, (*_CONTAINERS, nn.Module)) or is_generator(value):
        return True
    return not issubclass(kind, _LEAVES) and not _is_known(kind)


def seed_generators(generators: dict[str, Any], seed: int) -> None:
    """Seed each from `seed` (64 bits) and its number. About 25 us for one of numpy's, 2 us for one of torch's."""
    for number, generator in enumerate(generators.values()):
        own = mix(seed, _OWN, number)
        if isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(own).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own & 0xFFFFFFFF)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        else:
            generator.manual_seed(own >> 1)


def state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` gave."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
