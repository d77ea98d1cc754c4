"""The random generators that a data set keeps: on itself, in its transforms, in the functions that they call.

Augmentation libraries keep generators of their own (``self.rng = np.random.default_rng(0)``), which run on from sample
to sample. To make a sample a function of its index they are found here and seeded for each sample, as the global
streams are.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mindx_elastic.core.looks import attributes_of
from mindx_elastic.data.permutation import mix

__all__ = ["find_generators", "is_generator", "may_read_streams", "seed_generators", "set_state", "state_of"]

_OWN = 7  # keeps their seeds apart from the other hashes
_MOST_OBJECTS, _DEEPEST, _LONGEST = 4000, 8, 256
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor, np.ndarray)
_METHODS = ("__call__", "__getitem__", "__getitems__", "__iter__", "apply", "forward", "get_params", "transform")


_READERS = frozenset(
    ("fork_rng", "get_rng_state", "get_state", "getstate", "initial_seed", "set_rng_state", "set_state", "setstate")
)
_KNOWN = frozenset(("torch", "numpy", "builtins", *sys.stdlib_module_names)) - {"__main__"}


def may_read_streams(root: Any) -> bool:
    """Whether code that can be reached from `root` may use the state of a global stream without moving it: it names one
    of the functions that read, set or fork one. True also where there is too much code to look through."""
    seen: set[int] = set()
    queue: list[Any] = [root]
    for value in queue:
        if isinstance(value, types.FunctionType):
            if _is_known(value) or id(value.__code__) in seen:
                continue
            seen.add(id(value.__code__))
            names = _names_of(value.__code__)
            if not _READERS.isdisjoint(names):
                return True
            parts = [part for _, part in _parts_of_function(value)]
            used = [value.__globals__.get(name) for name in names]
            for module in [one for one in used if isinstance(one, types.ModuleType)]:
                parts += [vars(module).get(name) for name in names]
            parts += [one for one in used if isinstance(one, (types.FunctionType, type))]
        elif isinstance(value, type):
            parts = [vars(kind) for kind in value.__mro__ if not _is_known(kind)]
            parts = [part for table in parts for part in table.values()]
        else:
            parts = [type(value), *(part for _, part in _parts(value))]
        for part in map(_function_of, parts):
            if id(part) in seen or (isinstance(part, _LEAVES) and not isinstance(part, type)):
                continue
            if len(queue) >= _MOST_OBJECTS:
                return True
            if not isinstance(part, types.FunctionType):
                seen.add(id(part))
            queue.append(part)
    return False


def _function_of(value: Any) -> Any:
    """The function that a class has as a method of some kind or as a property; anything else as it is."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_known(value: Any) -> bool:
    """Whether torch, numpy or the standard library has made it."""
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
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def find_generators(root: Any, *, beside: Any = None) -> dict[str, Any]:
    """The generators that can be reached from `root`, each once, by their place (``transform.transforms.0.rng``).
    Not those reached only through `beside`.

    In an order that is the same in every process. Long lists (file names) are not gone through, nor arrays. Takes
    microseconds for each object that is reached.
    """
    found: dict[str, Any] = {}
    seen = {id(root), id(beside), *_GLOBAL}
    queue: list[tuple[str, Any, int]] = [("", root, 0)]
    for place, value, depth in queue:
        if is_generator(value):
            found[place] = value
            continue
        if depth >= _DEEPEST:
            continue
        for name, part in _parts(value):
            if isinstance(part, _LEAVES) or id(part) in seen:
                continue
            if len(queue) >= _MOST_OBJECTS:
                return found
            seen.add(id(part))
            queue.append((f"{place}.{name}" if place else name, part, depth + 1))
    return found


def _global_generators() -> set[int]:
    """Those that are seeded and kept as the global streams."""
    return {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}


_GLOBAL = _global_generators()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        if len(value) <= _LONGEST:
            yield from ((str(number), part) for number, part in enumerate(value))
        return
    if isinstance(value, dict):
        if len(value) <= _LONGEST:
            yield from ((str(key), part) for key, part in value.items())
        return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
        return
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
        return
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if attributes := attributes_of(value):
        yield from ((str(name), part) for name, part in attributes.items())
        for name in _METHODS:
            method = getattr(type(value), name, None)
            if isinstance(method, types.FunctionType) and not method.__module__.startswith("torch."):
                yield name, method


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield "defaults", [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # Of the globals only generators themselves, and functions and objects that use them: not the whole program.
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if is_generator(used) or (
            isinstance(used, types.FunctionType) and used.__globals__ is function.__globals__ and used is not function
        ):
            yield name, used


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
