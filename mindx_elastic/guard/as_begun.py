"""Brings a survivor's objects to where a new process has them when the function of the training is called.

A survivor of another rank's death calls that function again, with the objects that it has. What the function has done
to them, and what no start puts back, would be done twice there and once in the new process: hooks are registered
twice, functions are wrapped twice. `AsBegun` takes that back. What it cannot take back are the program's own variables.
`VariablesPart` compares those that the training has changed with the new process's, and names the ones that differ.
"""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import nn

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of, items_of, table_of
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.guard.checks.surroundings import is_library, kind_of, program_files, variables_of
from mindx_elastic.guard.loops.followed_loader import with_epochs_put_back
from mindx_elastic.guard.observer import observers

__all__ = ["AsBegun", "VariablesPart"]

_MOST_NAMED = 5
_MOST_SAID = 500
_LONGEST = 120
_MOST_FILES = 64
_END = re.compile(r"(\w+)\" \(")
_MOST_OWNERS = 20_000
_MOST_ITEMS = 64
_DEPTH = 4
_WITH_ATTRIBUTES = ("module", "optimizer", "scheduler", "loader", "instance")
_OURS = __name__.partition(".")[0]
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_MISSING = object()
_OF_CLASSES = (FunctionType, staticmethod, classmethod, property)


class AsBegun:
    """What the guard's objects are when the function is called for the first time. Training thread."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        """Before the guard is entered, whose own hooks come and go with each entry."""
        self._targets = dict(targets)
        self._hooks = [(hooks, dict(hooks)) for target in targets.values() for hooks in _hooks_of(target)]
        self._tensor_hooks = [
            (parameter, name, dict(getattr(parameter, name, None) or {}))
            for target in targets.values()
            if isinstance(target, nn.Module)
            for parameter in target.parameters()
            for name in _OF_TENSORS
        ]
        self._functions = _BoundFunctions(targets.values())
        self._has_gradients = torch.is_grad_enabled()
        self.look_at_groups()
        self.variables: dict[str, str] | None = None
        """The program's own, at the first entry: names and digests."""

    def look_at_groups(self) -> None:
        """Those that there are now are made outside of the function: a spare gets its own after all else."""
        self._groups = _num_groups()

    @property
    def problem(self) -> str:
        """Why the function cannot be called again beside a new process; empty: it can."""
        if _num_groups() == self._groups:
            return ""
        return "process groups are made inside of the function that guard.run calls; make them before it"

    def put_back(self) -> None:
        """The guard has been left, and will be entered again."""
        torch.set_grad_enabled(self._has_gradients)  # an evaluation that was cut off may have switched them off by hand
        self._functions.put_back()
        for hooks, before in self._hooks:
            _put_back(hooks, before)
        for parameter, name, before in self._tensor_hooks:
            _put_back(getattr(parameter, name, None) or {}, before)
        for target in self._targets.values():
            if isinstance(target, torch.amp.GradScaler) and target.is_enabled():  # else it has no stages
                target._per_optimizer_states.clear()  # of the step that was cut off


_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(target: Any) -> Iterator[dict[Any, Any]]:
    owners = target.modules() if isinstance(target, nn.Module) else [target]
    if isinstance(target, (nn.Module, torch.optim.Optimizer)):
        for owner in owners:
            for name, value in vars(owner).items():
                if name.endswith("_hooks") and isinstance(value, dict):
                    yield value


def _put_back(hooks: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Torch's own hooks stay: they belong to what it has made of a module (pruned weights), which stays as well."""
    if hooks.keys() != before.keys():
        kept = {key: hook for key, hook in hooks.items() if key not in before and _is_of_torch(hook)}
        hooks.clear()
        hooks.update({**before, **kept})


def _num_groups() -> tuple[int, int]:
    import torch.distributed as dist

    if not dist.is_available():
        return 0, 0
    world: Any = dist.distributed_c10d._world
    return int(world.group_count), len(world.pg_map)


class VariablesPart(Part):
    """Names the program's variables that the training has changed on ranks that live on, and that a new process has
    otherwise: the guard does not keep them."""

    name = "variables"

    def __init__(self, begun: AsBegun, kept: Collection[Any], rank: int, *, is_new: bool) -> None:
        """`kept`: what the guard keeps, which is put back. `is_new`: this process takes a dead rank's place."""
        without_epoch = with_epochs_put_back(kept)
        now = observers().own_variables(sys._getframe(), {*map(id, kept)}, positions=True, without_epoch=without_epoch)
        self._is_new, self._rank = is_new, rank
        self._now = now
        self._said: dict[str, str] = {}
        if begun.variables is None:
            begun.variables = now
        before = begun.variables
        changed = {name for name, digest in now.items() if name in before and before[name] != digest}
        self._changed = sorted(changed)[:_MOST_SAID]
        self._added = _looked_for([name for name in now if name not in before])[:_MOST_SAID]

    def say(self) -> Any:
        if self._is_new:
            return {"all": {_short(name): _short(digest) for name, digest in self._now.items()}}
        changed, added = ([[name, _short(self._now[name])] for name in each] for each in (self._changed, self._added))
        return {"changed": changed, **({"added": added} if added else {})}

    def merge(self, said: Sequence[Any]) -> Merged:
        new = [each["all"] for each in said if "all" in each]
        names = {
            str(name)[:_LONGEST]
            for each in said
            for kind in ("changed", "added")
            for name, digest in each.get(kind, ())
            if any(other.get(_short(str(name)), digest if kind == "changed" else None) != digest for other in new)
        }
        return Merged(sorted(names)[:_MOST_SAID])

    def hear(self, answer: Answer) -> None:
        if answer.common and self._rank == 0:
            names = [printable(str(name), _LONGEST) for name in answer.common]
            has_iterator = any(name.startswith("the position of ") for name in names)
            logger.warning(
                "%s: the ranks that live on and the new one differ in this, because the guard does not keep it. If the "
                "training depends on it, name it in Guard(stateful={...}), or set it in the function that guard.run "
                "calls%s",
                listed(names, _MOST_NAMED),
                "; an iterator cannot be kept: make it in that function, and advance it to guard.step"
                if has_iterator
                else "",
            )


def _looked_for(names: Sequence[str]) -> list[str]:
    """Those of the variables that the training has made which the program asks for before it uses them, as in
    ``getattr(train, "calls", 0)``: a name that it has in quotes. Others are set before they are read."""
    ends = {name: match[1] for name in names if (match := _END.search(name))}
    if not ends:
        return []
    text = "".join(line for file in program_files(sys._getframe())[:_MOST_FILES] for line in linecache.getlines(file))
    return sorted(name for name, end in ends.items() if f'"{end}"' in text or f"'{end}'" in text)


def _short(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


class _BoundFunctions:
    """Which functions the program's objects, classes and modules have under which name, to have them so again.

    A training wraps functions in place: ``model.forward = scaled(model.forward)``. Values that are modules of torch
    stay: what replaces them has a state, and that is for the guard's checks to judge. It runs no code of the program,
    and it is bounded.
    """

    def __init__(self, targets: Collection[Any]) -> None:
        """`targets`: what the guard keeps. What hangs on them is looked at as well, and the program's own modules."""
        self._before = [(owner, frozenset(space), _kept(space)) for owner, space in _walk(targets)]

    def put_back(self) -> None:
        for owner, names, before in self._before:
            space = _space_of(owner)
            for name in [*before, *(space.keys() - before.keys() - _OF_EACH_MODULE)]:
                old, new = before.get(name, _MISSING), space.get(name, _MISSING)
                if old is new or not (_is_function(old) or _is_function(new)) or _is_of_others(new):
                    continue
                if old is not _MISSING:
                    _bind(owner, name, old)
                elif name not in names:
                    _unbind(owner, name)


def _is_of_torch(function: Any) -> bool:
    """Also one that is wrapped, or a part of a `partial`."""
    return _root(function) == "torch"


def _root(function: Any) -> str:
    for _ in range(_DEPTH):
        inner = function.func if issubclass(type(function), partial) else attributes_of(function).get("hook")
        if inner is None:
            break
        function = inner
    kind = type(function)
    module = getattr(function, "__module__", None) if kind.__module__ == "builtins" else kind.__module__
    return str(module or kind.__module__).partition(".")[0]


def _is_of_others(function: Any) -> bool:
    """What torch or this package has bound belongs to what they have made of the object, and they take it back."""
    return function is not _MISSING and _is_function(function) and _root(function) in ("torch", _OURS)


def _is_function(value: Any) -> bool:
    if type(value) in _OF_CLASSES:
        return True
    return callable(value) and not issubclass(type(value), (nn.Module, type, weakref.ref))


def _kept(space: Mapping[str, Any]) -> dict[str, Any]:
    """What can be bound again; other values are not held on to."""
    items = ((name, value) for name, value in space.items() if name not in _OF_EACH_MODULE)
    return {
        name: value for name, value in items if value is None or (type(value) not in _PLAIN and _is_function(value))
    }


def _space_of(owner: Any) -> dict[str, Any]:
    table = owner if type(owner) is dict else table_of(owner) or {}
    return dict(table) if issubclass(type(owner), type) else table


def _bind(owner: Any, name: str, value: Any) -> None:
    if issubclass(type(owner), type):
        type.__setattr__(owner, name, value)
    else:
        _space_of(owner)[name] = value


def _unbind(owner: Any, name: str) -> None:
    if issubclass(type(owner), type):
        type.__delattr__(owner, name)
    else:
        _space_of(owner).pop(name, None)


def _walk(targets: Collection[Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Owners of names, and their names: objects, classes of the program, and the dictionaries of its modules."""
    known: set[int] = set()
    waiting: deque[tuple[Any, int]] = deque((target, 0) for target in targets)
    for _, variables in variables_of(None):
        if type(variables) is dict:
            yield variables, variables
            waiting.extend((value, 1) for value in list(variables.values()))
    while waiting and len(known) < _MOST_OWNERS:
        value, depth = waiting.popleft()
        kind = kind_of(type(value))
        if id(value) in known or depth > _DEPTH or kind not in (*_WITH_ATTRIBUTES, "class", "dict", "sequence"):
            continue
        if kind != "class":
            known.add(id(value))
        if kind in ("dict", "sequence"):
            waiting.extend((child, depth + 1) for _, child in items_of(value, _MOST_ITEMS) or ())
            continue
        for each in value.__mro__ if kind == "class" else type(value).__mro__:
            if id(each) not in known and not is_library(each.__module__):
                known.add(id(each))
                yield each, _space_of(each)
        if kind != "class":
            yield value, _space_of(value)
            waiting.extend((child, depth + (kind != "module")) for child in _children(value, kind))


def _children(value: Any, kind: str) -> Iterator[Any]:
    attributes = attributes_of(value)
    if kind == "module":
        yield from list(attributes.get("_modules", {}).values())
    for name, each in list(attributes.items()):
        if name not in _OF_EACH_MODULE and type(each) not in _PLAIN:
            yield each
