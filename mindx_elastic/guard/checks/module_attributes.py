"""Finds state in plain attributes of named modules: a queue, a step count, a temperature, a flag. No state_dict has it.

A value that differs between two looks is not enough: most such values are caches (`self.attn = weights`), or are set by
the loop from the epoch. What is told must also go on from its own last value, as the source of the module's class and
of the running functions shows:

===================================================  ===================================================================
``self.step += 1``, ``m.p = min(0.5, m.p + 0.1)``     and it is read elsewhere, other than for a log
``if not self.ready: weight.copy_(...)``             a flag that is set there, in front of values set in place
``y, h = self.cell(x, self.h)``, then ``self.h = h``  it is read first and set afterwards, unless it was missing
``self.queue[i:j] = keys``                            a tensor that is the same one, with other values
===================================================  ===================================================================
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from mindx_elastic.core.looks import is_computed
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.own_tensors import carries
from mindx_elastic.guard.checks.source_reads import Sources, Tree, sets_from_itself, steering_reads
from mindx_elastic.guard.checks.syntax import walk

__all__ = ["ModuleAttributes"]

_NUMBERS = (int, float, bool, str)
_INTERNALS = frozenset(vars(nn.Module()))
_MOST = 20_000
_MOST_PARTS = 16
_LIBRARIES = ("torch", "builtins")
_HOSTS = (*_LIBRARIES, "accelerate", "lightning", "mindx_elastic", "pytorch_lightning", "transformers")
"""Of which objects that are not modules may be subclasses: what those do by themselves their integration keeps."""
_Key = tuple[str, str]


class ModuleAttributes:
    """One per guard. Training thread."""

    def __init__(self, sums: Collection[tuple[int, str]] = ()) -> None:
        """`sums`: attributes that a layer keeps: the `id` of a module, and the name."""
        self._sums = sums
        self._before: dict[_Key, Any] = {}
        self._done: set[_Key] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self,
        modules: Mapping[str, nn.Module],
        is_kept: Callable[[torch.Tensor], bool],
        files: Callable[[], Collection[str]],
        *,
        own: Mapping[str, object] | None = None,
        hosts: Mapping[str, object] | None = None,
    ) -> list[tuple[str, str]]:
        """What is known against them, and what to write. `modules`: the named ones. `files`: gives the program's.
        `own`: objects beside them (callbacks) that a layer asks for their state; `hosts`: others that are the layer's.
        """
        now: dict[_Key, Any] = {}
        found: dict[_Key, object] = {}
        certain: set[_Key] = set()
        left: set[_Key] = set()
        own, hosts = own or {}, hosts or {}
        for path, module in (*_parts(modules), *own.items(), *hosts.items()):
            for name, held in _plain(module, is_kept):
                key, value = (path, name), held[0] if type(held) in (tuple, list) else held
                look = now[key] = value if type(value) in _NUMBERS else (weakref.ref(value), value._version)
                old = self._before.get(key, look)
                if key in self._done or type(old) is not type(look) or (id(module), name) in self._sums:
                    continue
                if isinstance(look, tuple):
                    if is_computed(value):  # what a forward has left, unless the next one reads it
                        left.add(key)
                    if old[0]() is value and old[1] != look[1]:
                        found[key] = module
                        certain.add(key)
                    elif old[0]() is not value:
                        found[key] = module
                elif repr(old) != repr(look):
                    found[key] = module
            if len(now) > _MOST:
                break
        self._before = now
        if not found:
            return []
        self._done.update(found)
        sources = _Classes(files())
        told = {
            k: m
            for k, m in found.items()
            if (k in certain and k not in left) or sources.carries(m, k[1], replaced=k in left)
        }
        return [_words(told, now, own, hosts)] if told else []


def _parts(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for target, module in modules.items():
        for path, child in module.named_modules():
            if type(child).get_extra_state is nn.Module.get_extra_state:
                yield f"{target}.{path}" if path else target, child


def _plain(module: object, is_kept: Callable[[torch.Tensor], bool]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in _INTERNALS or name.startswith("_") or "cache" in name:
            continue
        some = value if type(value) in (tuple, list) and 0 < len(value) <= _MOST_PARTS else [value]
        are_state = all(type(one) is torch.Tensor and not one.is_inference() for one in some)
        if type(value) in _NUMBERS or (are_state and not any(map(is_kept, some))):
            yield name, value


def _words(
    told: Mapping[_Key, object], now: Mapping[_Key, Any], asked: Collection[str], hosts: Collection[str]
) -> tuple[str, str]:
    names = [f'"{path}.{name}"' for path, name in told]
    are = "is a plain attribute" if len(told) == 1 else "are plain attributes"
    of = "" if any(path in asked or path in hosts for path, _ in told) else " of a named module"
    what = f"{listed(names, 6)} {are}{of}, in no state_dict, and the training carries the values from one step into "
    what += "another"
    if classes := sorted({path for path, _ in told if path in asked}):
        return what, f"Write state_dict() and load_state_dict() in {listed(classes, 4)}, with these in it"
    if any(path in hosts for path, _ in told):
        return what, "Keep these in an object with state_dict() and load_state_dict(), and name that in stateful"
    own = [(path, name) for (path, name), module in told.items() if not _is_torchs(module)]
    derived = "from guard.epoch or guard.step alone"
    if not own:
        return what, f"Work the value out {derived}, at the head of each epoch or step"
    lines = [f'self.register_buffer("{n}", ...)' for p, n in own if isinstance(now[p, n], tuple)]
    if number := next((n for p, n in own if not isinstance(now[p, n], tuple)), ""):
        lines.append(f'self.register_buffer("{number}", torch.tensor(...)), or get_extra_state() and set_extra_state()')
    return what, f"Write {'; '.join(dict.fromkeys(lines))} in the class of the module, or work the value out {derived}"


def _is_torchs(module: object) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


class _Classes:
    """The source of the program and of the classes of its modules."""

    def __init__(self, files: Iterable[str]) -> None:
        self._sources = Sources(files)

    def carries(self, module: object, name: str, *, replaced: bool = False) -> bool:
        """Whether an attribute goes on from its own last value, and is read other than for a log; or a method reads it
        and sets another one afterwards, as of a hidden state. `replaced`: only in that way."""
        is_it = partial(_is_attribute, name)
        from_outside = partial(_is_attribute_of_another, name)  # `self` may be of another class there
        own = [(tree, up, is_it) for tree, up in self._classes(module)]
        if any(carries(tree, up, name, replaced=True) for tree, up, _ in own):
            return True
        if replaced:
            return False
        if any(_is_flag(tree, is_it) for tree, _, _ in own):
            return True
        places = [*own, *((tree, up, from_outside) for tree, up in self._sources.trees())]
        goes_on = [node for tree, _, is_this in places for node in walk(tree) if sets_from_itself(node, is_this)]
        if not goes_on:
            return False
        if _is_torchs(module):
            return True  # its own forward reads it
        inside = {id(inner) for node in goes_on for inner in walk(node)}
        reads = (read for tree, up, is_this in places for read in steering_reads(tree, is_this, up))
        return any(id(read) not in inside for read in reads)

    def _classes(self, module: object) -> Iterator[Tree]:
        skipped = _LIBRARIES if isinstance(module, nn.Module) else _HOSTS
        for kind in type(module).__mro__:
            if kind.__module__.partition(".")[0] in skipped:
                continue
            try:
                file = inspect.getsourcefile(kind)
            except (TypeError, OSError):
                continue
            found = None if file is None else self._sources.tree(file)
            if found is None:
                continue
            for node in walk(found[0]):
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    yield node, found[1]


def _is_attribute(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _is_attribute_of_another(name: str, node: ast.AST) -> bool:
    return _is_attribute(name, node) and not (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def _is_flag(tree: ast.AST, is_it: Callable[[ast.AST], bool]) -> bool:
    """Whether ``if not self.x: weight.copy_(...); self.x = True`` is there."""
    for node in walk(tree):
        if not isinstance(node, ast.If) or not any(map(is_it, walk(node.test))):
            continue
        inner = [each for statement in node.body for each in walk(statement)]
        sets = any(isinstance(each, ast.Assign) and any(map(is_it, each.targets)) for each in inner)
        if sets and any(map(_sets_values, (*inner, *_called(tree, inner)))):
            return True
    return False


def _called(tree: ast.AST, nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What the methods do that are called there by ``self.method()``."""
    names = {node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield from walk(node)


def _sets_values(node: ast.AST) -> bool:
    """``weight.data = ...``, ``weight.copy_(...)``."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "zero_grad_")
