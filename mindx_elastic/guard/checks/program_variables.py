"""Looks through the program's variables for what a training keeps: optimizers, schedulers, modules, generators.

Breadth first, so that each object gets its shortest name: the local variables of the functions that called the guard,
the globals of the program's own modules, then attributes, items and closures of what is found, a few levels deep. It
runs no code of the program: instance dictionaries and plain containers are read, no property, no ``__getattr__``. It
keeps no reference, and it is bounded, because it runs in the training thread.
"""

from __future__ import annotations

import os
import random
import sys
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import PurePath
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from mindx_elastic.capture.generators import GENERATORS
from mindx_elastic.core.looks import askable, attributes_of, items_of, table_of

__all__ = [
    "Found",
    "Seen",
    "inner_schedulers",
    "is_library",
    "is_of_library",
    "kind_of",
    "locals_of",
    "look",
    "place_of",
    "program_frames",
    "reachable",
    "variables_of",
]

_MOST_OBJECTS = 6000
_DEPTH = 4
_MOST_ITEMS = 256
_OURS = __name__.partition(".")[0]
_OPTIMIZED = 0x1  # code flag: the locals are a snapshot, not a namespace

# Libraries whose objects keep no state of a training, or none that could be found by looking into them.
_LIBRARIES = frozenset(
    """
    IPython PIL _pytest absl accelerate click comm cv2 debugpy fire fsspec hydra ipykernel ipywidgets jedi
    jupyter_client matplotlib numpy omegaconf packaging pandas pip pkg_resources pluggy pyarrow pydantic pytest requests
    rich scipy setuptools sklearn sympy tensorboard torch torchvision tornado tqdm traitlets triton typer
    typing_extensions wandb xxhash yaml zmq
    """.split()  # noqa: SIM905
)
_CLOSED = _LIBRARIES | sys.stdlib_module_names | {_OURS, "builtins"}
_closed_names: set[str] = set()
"""Modules in these packages that were met: most of the two thousand are torch's, and each look would judge them all."""
_HOLDERS = (types.SimpleNamespace,)  # of the standard library, that programs keep their objects in
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_OPTIMIZER_INTERNALS = frozenset(("state", "param_groups", "defaults"))
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_PLAIN = (int, float, complex, str, bytes, bytearray, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_OF_PYTHON = (types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.FrameType, types.TracebackType)
_WORDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("", (*_PLAIN, *_OF_PYTHON, random.SystemRandom, ChainMap)),
    ("tensor", (torch.Tensor,)),
    ("module", (nn.Module,)),
    ("optimizer", (torch.optim.Optimizer,)),
    ("scheduler", _SCHEDULERS),
    ("scaler", (torch.amp.GradScaler,)),
    ("generator", GENERATORS),
    ("loader", (DataLoader,)),
    ("dict", (dict,)),
    ("sequence", (list, tuple, set, frozenset, deque)),
    ("function", (types.FunctionType,)),
    ("method", (types.MethodType,)),
    ("partial", (partial,)),
    ("class", (type,)),
)
"""See `kind_of`; the first that fits counts."""
_SEARCHED = ("optimizer", "scheduler", "scaler", "module", "generator")
_OUR_DATA = f"{_OURS}.data"
_TO_LOADERS = (DataLoader, partial, types.MethodType)


class Found(NamedTuple):
    """An object and the name that the program has for it."""

    name: str
    """``disc_opt``, ``trainer.ema``."""
    place: str
    """``train.py``, or ``main() in train.py``."""
    value: Any

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        return f'"{self.name}" ({type(self.value).__name__}{where})'


class Seen:
    """What `look` has found."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, Found]] = {kind: {} for kind in _SEARCHED}
        """Found objects by kind and `id`, the nearest first; of modules those that are found by a variable or an
        attribute, and not only inside another module."""
        self.asked: dict[int, Found] = {}
        """The nearest variables, attributes and items that hold those that were asked for."""


def look(frame: FrameType | None, roots: Mapping[str, object], asked: Iterable[int] = ()) -> Seen:
    """Look from `frame` and its callers, and from `roots`. `asked`: ids of objects whose names are wanted."""
    walk = _Walk(set(asked))
    for place, variables in variables_of(frame):
        walk.add_variables(variables, place)
    walk.add_variables(roots, "")
    return walk.run()


def variables_of(frame: FrameType | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place (see `Found`) and variables of the functions that called the guard, and of the program's own modules."""
    for each in program_frames(frame):
        yield place_of(each), locals_of(each)
    for module in _program_modules():
        file = getattr(module, "__file__", None)
        yield os.path.basename(file) if file else module.__name__, vars(module)


def reachable(value: object, *, models: bool, but: Collection[object] = ()) -> dict[int, object]:
    """Everything that hangs on `value`, by `id`, itself included; `models`: also on modules and optimizers that it has.

    `but`: objects to leave out, with all that hangs on them alone. The caller drops it soon.
    """
    walk = _Walk(set(), everything=True, models=models)
    left_out = {id(each): each for each in but}
    walk.known.update(left_out)
    walk.add_variables({"": value}, "")
    walk.run()
    return {key: each for key, each in walk.known.items() if key not in left_out}


def inner_schedulers(scheduler: object) -> dict[int, object]:
    """The schedulers that hang on `scheduler` (`SequentialLR`, `ChainedScheduler`, a warm-up around another), by id."""
    found: dict[int, object] = {}
    waiting = [scheduler]
    while waiting:
        for value in attributes_of(waiting.pop()).values():
            for one in value if type(value) in (list, tuple) else (value,):
                if issubclass(type(one), _SCHEDULERS) and id(one) not in found and one is not scheduler:
                    found[id(one)] = one
                    waiting.append(one)
    return found


def program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the program's own code, the nearest first, as far as where it begins: what runs it (a profiler, a
    debugger, a test) has its own variables. Those of libraries and ours are left out."""
    main = sys.modules.get("__main__")
    begin = None if main is None else table_of(main)
    while frame is not None:
        if not is_library(str(frame.f_globals.get("__name__", ""))):
            yield frame
        if frame.f_globals is begin and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


_kinds: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


class _Walk:
    """Calls are what it costs, so it goes through the children of an object in one of them."""

    def __init__(self, asked: set[int], *, everything: bool = False, models: bool = True) -> None:
        self.seen = Seen()
        self.known: dict[int, object] = {}
        self._asked, self._everything = asked, everything
        self._left_out = frozenset(("",)) if models else frozenset(("", "module", "optimizer"))
        self._most, self._depth = (_MOST_OBJECTS, 2 * _DEPTH) if everything else (_MOST_ITEMS, _DEPTH)
        self._queue: deque[tuple[str, str, Any, int]] = deque()
        self._kinds = dict(_kinds)  # faster than the weak one

    def add_variables(self, variables: Mapping[str, Any], place: str) -> None:
        named = [(n, v) for n, v in askable(list(variables.items())) if isinstance(n, str)]
        self._meet("", place, [(n, v) for n, v in named if not (n.startswith("__") and n.endswith("__"))], 0)

    def run(self) -> Seen:
        while self._queue:
            name, place, value, depth = self._queue.popleft()
            kind = self._kinds[type(value)]
            if (of_kind := self.seen.of.get(kind)) is not None:
                of_kind[id(value)] = Found(name, place, value)
            if depth < self._depth:
                self._meet(name, place, self._children(kind, value), depth + 1)
        return self.seen

    def _meet(self, name: str, place: str, items: Iterable[tuple[str, Any]], depth: int) -> None:
        """`items`: the objects that hang on one of this name, each with what to add to it."""
        known, kinds = self.known, self._kinds
        for suffix, value in items:
            kind = kinds.get(type(value))
            if kind is None:
                kind = kinds[type(value)] = kind_of(type(value))
            key = id(value)
            if key in self._asked:
                self.seen.asked.setdefault(key, Found(f"{name}{suffix}", place, value))
            if kind in self._left_out or key in known:
                continue
            if kind == "tensor":
                if self._everything:
                    known[key] = value
            elif (kind == "function" and value.__closure__ is None) or (kind == "class" and not _is_own_class(value)):
                continue
            elif len(known) >= _MOST_OBJECTS:
                return
            else:
                known[key] = value
                self._queue.append((f"{name}{suffix}", place, value, depth))

    def _children(self, kind: str, value: Any) -> Iterable[tuple[str, Any]]:
        if kind in ("dict", "sequence"):
            items = items_of(value, self._most) or ()
            return [(f"[{key!r}]" if type(key) in (str, int) else "[...]", item) for key, item in items]
        if kind == "module":
            return self._children_of_module(value)
        if kind == "optimizer":
            held = attributes_of(value).items()
            return [(f".{name}", item) for name, item in held if name not in _OPTIMIZER_INTERNALS]
        if kind == "loader" and not self._everything:  # what hangs on it is its own business
            kinds = [(name, item, type(item)) for name, item in attributes_of(value).items()]
            ours = [(n, i) for n, i, k in kinds if issubclass(k, _TO_LOADERS) or k.__module__.startswith(_OUR_DATA)]
            return [(f".{name}", item) for name, item in ours]
        if kind in ("instance", "loader", "scheduler", "scaler"):
            found = [(f".{name}", item) for name, item in attributes_of(value).items()]
            return [*found, ("", type(value))] if kind == "instance" else found
        return _children_of_code(kind, value)

    def _children_of_module(self, value: nn.Module) -> list[tuple[str, Any]]:
        """Its children are its own: only what hangs on them as a plain attribute is looked at."""
        found: list[tuple[str, Any]] = []
        for path, module in islice(nn.Module.named_modules(value), _MOST_OBJECTS // 4):
            if self._everything:
                self.known.setdefault(id(module), module)
                for table in (module._parameters, module._buffers):
                    self.known.update({id(tensor): tensor for tensor in table.values() if tensor is not None})
            held = object.__getattribute__(module, "__dict__")
            if len(held) > len(_MODULE_INTERNALS) or held.keys() - _MODULE_INTERNALS:
                prefix = f".{path}." if path else "."
                own = askable(list(held.items()))
                found += [(f"{prefix}{n}", item) for n, item in own if n not in _MODULE_INTERNALS]
        return found


def kind_of(kind: type) -> str:
    """How to treat the objects of a class; empty: leave them alone."""
    found = _kinds.get(kind)
    if found is None:
        found = _kinds[kind] = _kind_of(kind)
    return found


def _kind_of(kind: type) -> str:
    if not isinstance(kind.__module__, str):  # a metaclass of Cython's, whose classes have the name
        return ""
    if kind.__module__.startswith(_OUR_DATA):
        return "loader"
    for word, kinds in _WORDS:
        if issubclass(kind, kinds):
            return word
    if issubclass(kind, _HOLDERS) or kind.__module__ == "argparse":
        return "instance" if kind.__name__ in ("SimpleNamespace", "Namespace") else ""
    return "" if is_of_library(kind) else "instance"


def is_of_library(kind: type) -> bool:
    """Whether a class is of one of the libraries whose objects keep no state of a training."""
    return kind.__module__.partition(".")[0] in _CLOSED


def _is_own_class(value: type) -> bool:
    return not is_library(str(type.__getattribute__(value, "__module__")))


def _children_of_code(kind: str, value: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    if kind == "function":
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):
                found.append((f".<{name}>", cell.cell_contents))
    elif kind == "method":
        found.append((".__self__", value.__self__))
    elif kind == "partial":
        found += [(f".args[{number}]", item) for number, item in enumerate(value.args)]
        found += [(f".keywords[{name!r}]", item) for name, item in value.keywords.items()]
        found.append((".func", value.func))
    elif kind == "class":
        found += [(f".{name}", item) for name, item in list(value.__dict__.items()) if not name.startswith("__")]
    return found


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function. Drops what `FrameType.f_locals` keeps alive."""
    found = frame.f_locals
    if not frame.f_code.co_flags & _OPTIMIZED:
        return found  # the namespace of a module or a class
    copied = dict(found)
    # A snapshot that the frame keeps: it would keep the batch alive. More references than the frame's, `found` and the
    # argument: the program has it too (`config = locals()`).
    if sys.version_info < (3, 13) and sys.getrefcount(found) <= 3:
        found.clear()
    return copied


def place_of(frame: FrameType) -> str:
    """The place (see `Found`) of the variables of a running function."""
    code = frame.f_code
    file = "the notebook" if "ipykernel" in code.co_filename or code.co_filename.startswith("<ipython") else ""
    file = file or os.path.basename(code.co_filename)
    return file if code.co_name == "<module>" else f"{code.co_name}() in {file}"


# --- whose code it is ---

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")  # also of modules that no list has, `_sysconfigdata_...`


@cache
def is_library(module: str) -> bool:
    """Whether a module's name says that it is not the program's own code."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in _CLOSED:
        return True
    # No call for plain modules: this judges hundreds at a start.
    main, known = sys.modules.get("__main__"), sys.modules.get(module)
    spec = (vars(main) if type(main) is types.ModuleType else table_of(main) or {}).get("__spec__")
    if spec is not None and root == spec.name.partition(".")[0]:
        return False  # python -m program
    file = (vars(known) if type(known) is types.ModuleType else table_of(known) or {}).get("__file__")
    return file is not None and (file.startswith(_STANDARD) or not _INSTALLED.isdisjoint(PurePath(file).parts))


def _program_modules() -> list[types.ModuleType]:
    main = sys.modules.get("__main__")
    found = [] if main is None else [main]
    others = [name for name in list(sys.modules) if name not in _closed_names]
    _closed_names.update([name for name in others if name.partition(".")[0] in _CLOSED])
    roots = {name.partition(".")[0] for name in others} - _CLOSED  # by the package first: it has many modules
    own = {root for root in roots if not is_library(root)}
    names = [name for name in others if name.partition(".")[0] in own and not is_library(name)]
    for module in map(sys.modules.get, names):
        if module is None or type(module) is not types.ModuleType or module is main:
            continue
        if vars(module).get("__file__") is not None:
            found.append(module)
    return found
