"""The program's own variables, which no checkpoint need have: by them a difference is explained, and a resumed run is
compared with the stopped one.

Numbers, texts, tensors, arrays, and the length of containers, by the name that the program has for them: local and
global variables, those of generators, attributes of the program's objects, functions and classes, and those of what
the guard keeps. It runs no code of the program (see `checks.program_variables`),
and it is bounded.
Of texts only a hash is noted, because one may be a password.
"""

from __future__ import annotations

import gc
import io
import itertools
import operator
import os
import queue
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import FrameType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from mindx_elastic.capture.extra_state import set_by_torch
from mindx_elastic.core.looks import attributes_of, is_comparable
from mindx_elastic.guard.checks.program_variables import is_library, kind_of, locals_of, program_frames, variables_of
from mindx_elastic.prove.digests import digest
from mindx_elastic.prove.loop_variables import Loop, loops_around, rebound_in

__all__ = ["KEPT", "Variables", "draws_from", "is_clock"]

_Named = tuple[str, str, Any, int]  # its name, its place, the value, and how deep it is
KEPT = "kept object"
"""The place of what `Variables.of_kept` gives."""
_MOST = 2000
_MOST_ITEMS = 64
_MOST_BYTES = 1 << 20
_MOST_BYTES_IN_ALL = 1 << 26
_MOST_SAMPLED = 1 << 16
_DEPTH = 3
_LONGEST_KEY = 96  # that of a weight; no text that is looked up
_MOST_NESTED = 4
_MOST_INNER = 16
_MODULES = ("builtins", "itertools")
_OF_LOADERS = ("mindx_elastic.", "torch.utils.data.")
_NUMBERS = (int, float)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_COUNTS = (int, bool)
_BEGUN, _DAY_S = time.perf_counter() - 60, 86_400.0  # a program may import this package after it has looked at a clock
_SHORT = frozenset((bool, float, type(None)))
_TENSORS = (torch.Tensor, nn.Parameter, np.ndarray)  # exactly these
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_FILES = (io.BufferedReader, io.TextIOWrapper)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, tuple, set, deque, *_DICTS)
_OF_LIBRARY = (float, *_TENSORS)
"""Kept of an object of a library's class: a program may set the rate of a dropout. All else its class keeps."""
_INNER = ("instance", "scheduler")
"""What a named object has in it, which its state_dict may leave out."""
_LONGEST_NOTED = 1 << 16
"""Characters of a text of which a look within one process takes a digest."""
# Those of objects with a __getitem__ or a callable: to ask for their length runs code of the program.
_ASK_OTHERS = ("iterator", "callable_iterator", "reversed")


class Variables:
    """One look at them. Breadth first, so that each object gets its shortest name."""

    def __init__(
        self,
        kept: Collection[int],
        *,
        positions: bool = False,
        quick: bool = False,
        parameters: bool = False,
        sources: Collection[int] = (),
        but: Collection[tuple[int, str]] = (),
    ) -> None:
        """`kept`: `id` of what the guard keeps, which is left out. `positions`: also where iterators stand, and how
        many items queues have. `quick`: of tensors and arrays only what changes with each assignment, for comparisons
        within a process. `parameters`: also those that are not in `kept`. `sources`: `id` of loaders: what draws from
        them is left out. `but`: `id` of objects and names of their attributes, which are left out."""
        self._known = set(kept)
        self._positions, self._quick, self._parameters = positions, quick, parameters
        self._sources, self._but = sources, but
        self._waiting: deque[_Named] = deque()
        self._last: deque[_Named] = deque()
        """Variables that loops bind: `c` of ``for c in callbacks`` is another one soon, and the list goes on."""
        self._of_callers: dict[str, int] = {}
        """The variables that were begun with; what functions share with them is not noted twice."""
        self._left = _MOST_BYTES_IN_ALL

    def of_program(self, frame: FrameType | None) -> dict[str, str]:
        """``"best_loss" (train.py)`` -> the value where it is short, else a digest; of a file that is read where it
        stands. `frame` and its callers have the local variables."""
        loops: list[Loop] = next(filter(None, map(loops_around, program_frames(frame))), [])
        bound = {name for loop in loops for name in loop.bound}
        for place, variables in variables_of(frame):
            for name, value in list(variables.items()):
                if isinstance(name, str):
                    self._of_callers[name] = id(value)
                    if not (name.startswith("__") and name.endswith("__")):
                        (self._last if name in bound else self._waiting).append((name, place, value, 0))
        return self._run()

    def of_kept(self, targets: Mapping[str, Any]) -> dict[str, str]:
        """``"model.head.calls" (kept object)``: attributes of the named objects, of modules in them, and of parameters,
        which no state_dict need have. Private ones count too, unless the class is a library's: an optimizer may keep
        its own count there."""
        self._known.update(map(id, targets.values()))
        for name, target in targets.items():
            with suppress(Exception):  # a table that changes meanwhile
                self._waiting.extend(_attributes(name, target, self._but))
        return self._run()

    def _run(self) -> dict[str, str]:
        found: dict[str, str] = {}
        functions: dict[str, str] = {}
        while (self._waiting or self._last) and len(found) < _MOST:
            name, place, value, depth = (self._waiting or self._last).popleft()
            kind = type(value)
            try:
                if type(kind) is not type and not is_comparable(kind):
                    continue
                if kind in _SHORT:  # no call for these, which are most
                    text = "a clock" if kind is float and is_clock(value) else repr(value)
                    found.setdefault(f'"{name}" ({place})', text)
                    continue
                if (treatment := _treatments.get(kind)) is None:
                    treatment = _treatments[kind] = _treatment_of(kind)
                if treatment == "value":
                    if (shown := self._shown(value)) is not None:
                        found.setdefault(f'{shown[0]}"{name}" ({place})', shown[1])
                    elif kind is GeneratorType and depth < _DEPTH and id(value) not in self._known:
                        self._go_into_generator(place, value, depth)
                    continue
                if treatment == "function" and self._positions:  # another one is bound to the name: that is wrapped
                    functions.setdefault(f'"{name}" ({place})', f"{value.__module__}.{value.__qualname__}")
                if treatment and depth < _DEPTH and id(value) not in self._known and len(self._known) < _MOST:
                    if treatment == "container":
                        found.setdefault(f'the length of "{name}" ({place})', str(len(value)))
                    self._go_into(treatment, name, place, value, depth)
            except Exception:  # a table that changes meanwhile, a number of a million digits
                continue
        return functions | found

    def _shown(self, value: Any) -> tuple[str, str] | None:
        """What is noted of a value itself, and the words in front of its name."""
        kind = type(value)
        if kind in _PLAIN or issubclass(kind, np.generic):
            is_long = self._quick and kind in (str, bytes) and len(value) > _LONGEST_NOTED
            return "", str(hash(value)) if is_long else _noted(value)  # which such an object has once it was asked
        if id(value) in self._known or (kind is nn.Parameter and not self._parameters):
            return None
        if kind in _TENSORS:
            return None if (shown := self._shown_tensor(value)) is None else ("", shown)
        if kind in _FILES:
            return None if value.writable() else ("the position of ", str(_place_in_file(value)))
        if not self._positions:
            return None
        if kind in _QUEUES:
            return "the length of ", str(len(value.queue))
        if self._sources and draws_from(value, self._sources):
            return None
        return "the position of ", _position(value)

    def _shown_tensor(self, value: Any) -> str | None:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return None
        elif self._quick:  # what a forward has left is none of the step's state
            return None if value.grad_fn is not None else f"{_number_of(value)} {value._version}"
        elif value.layout is not torch.strided or value.is_nested:  # no plain bytes
            return None
        elif value.dim() == 0:  # people read it as a number
            return digest(value.item())
        if value.nbytes > min(self._left, _MOST_BYTES) and (value := _sample(value)) is None:
            return None
        self._left -= value.nbytes
        return digest(value)

    def _go_into_generator(self, place: str, value: GeneratorType[Any, Any, Any], depth: int) -> None:
        """What it has for its next item: a resumed run makes it again, from the beginning."""
        frame = value.gi_frame
        if frame is None or value.gi_running or is_library(str(frame.f_globals.get("__name__"))):
            return
        self._known.add(id(value))
        again = rebound_in(frame)
        for name, variable in locals_of(frame).items():
            if name not in again:
                self._waiting.append((f"{name} of {value.__name__}()", place, variable, depth + 1))

    def _go_into(self, kind: str, name: str, place: str, value: Any, depth: int) -> None:
        if kind in ("function", "class") and is_library(str(value.__module__)):
            return
        self._known.add(id(value))
        if kind == "function":
            where = f"{value.__name__}() in {os.path.basename(value.__code__.co_filename)}"
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                with suppress(ValueError):  # it is empty yet
                    if self._of_callers.get(variable) != id(cell.cell_contents):
                        self._waiting.append((variable, where, cell.cell_contents, depth + 1))
        for suffix, part in _parts(kind, value):
            if suffix == "._parameters":  # a module is seen where it acts
                continue
            if (id(value), suffix[1:]) not in self._but:
                self._waiting.append((f"{name}{suffix}", place, part, depth + 1))


def _attributes(name: str, target: Any, but: Collection[tuple[int, str]]) -> list[_Named]:
    owners: list[tuple[str, Any]] = [(name, target)]
    if type(target).__module__.startswith("mindx_elastic."):  # an adapter around an object of the program
        owners = [(name, held) for held in attributes_of(target).values() if kind_of(type(held)) == "instance"]
    elif isinstance(target, nn.Module):
        owners = [(f"{name}.{inner}" if inner else name, module) for inner, module in target.named_modules()]
        owners += [(f"{at}.{key}", p) for at, m in owners for key, p in m._parameters.items() if p is not None]
    found = []
    for label, owner in owners:
        is_tensor, kind = isinstance(owner, torch.Tensor), type(owner)
        has_table = is_tensor or isinstance(owner, nn.Module)
        own = object.__getattribute__(owner, "__dict__") if has_table else attributes_of(owner)
        hooks = owner._forward_pre_hooks.values() if isinstance(owner, nn.Module) else ()
        # Torch's older `weight_norm` and `spectral_norm` make the weight again before each forward.
        made = {getattr(each, "name", "") for each in hooks if type(each).__module__.startswith("torch.nn.utils.")}
        for key in sorted(own.keys() - set_by_torch() - made):  # nearly all modules and parameters have nothing else
            value = own[key]
            if key.startswith("__") or (id(owner), key) in but:
                continue
            if type(type(value)) is not type and not is_comparable(type(value)):
                continue
            is_set = not key.startswith("_") and (is_tensor or type(value) in _OF_LIBRARY)
            is_inner = not has_table and kind_of(type(value)) in _INNER
            if is_set or is_inner or not is_library(kind.__module__):
                found.append((f"{label}.{key}", KEPT, value, _DEPTH - 1))
    return found


def is_clock(value: float) -> bool:
    """Whether it is what a clock has shown since this process began: a resumed run has another, and should."""
    return _BEGUN < value <= time.perf_counter() or 0 <= time.time() - value < _DAY_S


_numbers: Any = WeakTensorKeyDictionary()
_next_number = itertools.count()
_treatments: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _treatment_of(kind: type) -> str:
    """How to treat the objects of a class; empty: leave them alone."""
    if kind in _PLAIN or kind in _TENSORS or kind in _QUEUES or kind in _FILES or issubclass(kind, np.generic):
        return "value"
    if _iterates(kind):
        return "value"
    if kind in _CONTAINERS:
        return "container"
    found = kind_of(kind)
    if found == "module" and kind.__module__.partition(".")[0] != "torch":  # a metric, whose sums are attributes
        return "instance"
    if found == "scheduler":  # one that is named is kept as a whole, so this hangs on another object
        return "instance"
    return found if found in ("class", "function", "instance", "loader") else ""


def _parts(kind: str, value: Any) -> list[tuple[str, Any]]:
    """What hangs on it, by what comes after its name."""
    if kind == "instance":
        own = attributes_of(value)
        shared = [item for each in reversed(type(value).__mro__) for item in vars(each).items()]
        first = {name: item for name, item in shared if type(item) in _PLAIN and not name.startswith("__")}
        if is_library(
            type(value).__module__
        ):  # file names, times, queues: its class keeps them, and each run has others
            own = {name: item for name, item in own.items() if type(item) in _COUNTS or _has_tensors(item)}
            first = {}
        return [(f".{name}", item) for name, item in {**first, **own}.items()]
    if kind == "class":
        return [(f".{name}", item) for name, item in vars(value).items() if not name.startswith("__")]
    if kind == "function":
        code, defaults = value.__code__, value.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        given = [*zip(names, defaults, strict=True), *(value.__kwdefaults__ or {}).items()]
        # A container is made once: each call without the argument goes on with it.
        own = {**vars(value), **{name: item for name, item in given if type(item) in _CONTAINERS}}
        return [(f".{name}", item) for name, item in own.items()]
    if kind == "loader":
        return [(".dataset", attributes_of(value).get("dataset"))]
    if type(value) is set or not value:
        return []
    if type(value) in _DICTS:
        items = [(key, item) for key, item in islice(value.items(), _MOST_ITEMS) if type(key) in (int, str)]
        return [(f"[{key!r}]", item) for key, item in items if type(key) is int or len(key) <= _LONGEST_KEY]
    if type(value) is deque or len(value) > _MOST_ITEMS:  # a full one has the same length for ever
        return [("[0]", value[0]), ("[-1]", value[-1])]
    return [(f"[{number}]", item) for number, item in enumerate(value)]


def _number_of(tensor: torch.Tensor) -> int:
    """Its own in this process: an address is soon that of another one, and two tensors in turn have two of them."""
    if (number := _numbers.get(tensor)) is None:
        _numbers[tensor] = number = next(_next_number)
    return int(number)


def _has_tensors(value: Any) -> bool:
    """Whether it is a tensor or an array, or a container that begins with one."""
    if type(value) in _CONTAINERS and value:
        value = next(iter(value.values() if type(value) in _DICTS else value))
    return type(value) in _TENSORS


def _sample(value: Any) -> Any:
    """Some of the elements of a large tensor or array, from all over it: what changes it at random places or as a whole
    is seen, and its size does not count. None: its elements are not one after the other."""
    is_tensor = isinstance(value, torch.Tensor)
    if not (value.is_contiguous() if is_tensor else value.flags.c_contiguous):
        return None
    flat = value.detach().reshape(-1) if is_tensor else value.reshape(-1)
    return flat[:: max(1, len(flat) // _MOST_SAMPLED)]


def _noted(value: Any) -> str:
    return digest(value.encode("utf-8", "surrogatepass") if type(value) is str else value)


def _iterates(kind: type) -> bool:
    """Whether it is the class of generators, or of an iterator of Python itself."""
    return kind.__module__ in _MODULES and hasattr(kind, "__next__")


def _place_in_file(file: Any) -> int:
    """Bytes. Of a text file that is gone through line by line, which tells no place, those that were read ahead."""
    try:
        return int(file.tell())
    except OSError:
        return int(file.buffer.tell())


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
        for name, variable in locals_of(value.gi_frame).items():
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


def draws_from(iterator: Any, sources: Collection[int]) -> bool:
    """Whether one of these, or a loader of torch or ours, is among what the iterator holds."""
    waiting, seen = [iterator], set[int]()
    while waiting and len(seen) < _MOST_ITEMS:
        each = waiting.pop()
        kind = type(each)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if id(each) in sources or kind_of(kind) == "loader" or kind.__module__.startswith(_OF_LOADERS):
            return True
        if kind is GeneratorType and each.gi_frame is not None:
            if str(each.gi_frame.f_globals.get("__name__")).startswith(_OF_LOADERS):
                return True
            waiting.append(each.gi_frame)
        if _iterates(kind) or kind is FrameType or (kind in (list, tuple) and len(each) <= _MOST_INNER):
            waiting += gc.get_referents(each)
    return False


def _inner(value: Any) -> Iterator[Any]:
    """The iterators that this one draws from."""
    for each in gc.get_referents(value):
        inner = each if type(each) is tuple and len(each) <= _MOST_INNER else (each,)
        yield from (one for one in inner if _iterates(type(one)))
