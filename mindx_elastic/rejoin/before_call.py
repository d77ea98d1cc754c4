"""Takes back what the training function has done to the guard's objects, before a survivor calls it again.

A survivor of another rank's death calls that function with the objects that it has. What the function has done to them
and no start puts back would be done twice there and once in the new process: hooks are registered twice, methods are
wrapped twice. `ObjectsBeforeCall` takes that back. What it cannot take back are the program's own variables and
functions. `VariablesPart` compares those that the training has changed with the new process's, and names the ones that
differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import nn

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of, table_of
from mindx_elastic.core.printable import listed, printable

__all__ = ["ObjectsBeforeCall", "VariablesPart"]

_MOST_NAMED = 5
_MOST_SAID = 500
_LONGEST = 120
_DEPTH = 4
_OURS = __name__.partition(".")[0]
_MISSING = object()


class ObjectsBeforeCall:
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
        self._functions = [
            (table, frozenset(table), {key: each for key, each in table.items() if each is None or _is_function(each)})
            for target in targets.values()
            for owner in _owners_of(target)
            if (table := table_of(owner))
        ]
        self._has_gradients = torch.is_grad_enabled()
        self.look_at_groups()
        self.variables: dict[str, str] | None = None
        """The program's own, at the first entry: names and digests."""

    def look_at_groups(self) -> None:
        """Note the groups that exist now, which are made outside of the function: a spare gets its own after all
        else."""
        self._groups = _num_groups()

    @property
    def problem(self) -> str:
        """Why the function cannot be called again together with a new process; empty: it can."""
        if _num_groups() == self._groups:
            return ""
        return "process groups are made inside of the function that guard.run calls; make them before it"

    def put_back(self) -> None:
        """The guard has been left, and will be entered again."""
        torch.set_grad_enabled(self._has_gradients)  # an evaluation that was cut off may have switched them off by hand
        for table, names, functions in self._functions:
            _bind_again(table, names, functions)
        for hooks, before in self._hooks:
            _put_back(hooks, before)
        for parameter, name, before in self._tensor_hooks:
            _put_back(getattr(parameter, name, None) or {}, before)
        for target in self._targets.values():
            if isinstance(target, torch.amp.GradScaler) and target.is_enabled():  # else it has no stages
                target._per_optimizer_states.clear()  # of the step that was cut off


_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _owners_of(target: Any) -> list[Any]:
    return list(target.modules()) if isinstance(target, nn.Module) else [target]


def _hooks_of(target: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(target, (nn.Module, torch.optim.Optimizer)):
        for owner in _owners_of(target):
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
    otherwise: the guard does not keep them. And, as a fact, those that the training has made."""

    name = "variables"

    def __init__(self, objects: ObjectsBeforeCall, now: dict[str, str], rank: int, *, is_new: bool) -> None:
        """`now`: the program's own variables, names and digests. `is_new`: this process takes a dead rank's place."""
        self._is_new, self._rank = is_new, rank
        self._now = now
        self._said: dict[str, str] = {}
        if objects.variables is None:
            objects.variables = now
        before = objects.variables
        changed = {name for name, digest in now.items() if name in before and before[name] != digest}
        self._changed = sorted(changed)[:_MOST_SAID]
        made = now.keys() - before.keys()
        self._made = sorted(name for name in made if "[" not in name)[:_MOST_SAID]  # of a container its length

    def say(self) -> Any:
        if self._is_new:
            return {"all": {_short(name): _short(digest) for name, digest in self._now.items()}}
        return {"changed": [[name, _short(self._now[name])] for name in self._changed], "made": self._made}

    def merge(self, said: Sequence[Any]) -> Merged:
        new = [each["all"] for each in said if "all" in each]
        differ, made = set[str](), set[str]()
        for each in said:
            for name, digest in each.get("changed", ()):
                if any(other.get(_short(str(name)), digest) != digest for other in new):
                    differ.add(str(name)[:_LONGEST])
            made |= {str(n)[:_LONGEST] for n in each.get("made", ()) if any(_short(str(n)) not in o for o in new)}
        return Merged([sorted(differ)[:_MOST_SAID], sorted(made)[:_MOST_SAID]])

    def hear(self, answer: Answer) -> None:
        differ, made = answer.common
        if made and self._rank == 0:
            logger.info(
                "the training has made this on the ranks that live on, and the new one begins without it: %s",
                listed([printable(str(name), _LONGEST) for name in made], _MOST_NAMED),
            )
        if differ and self._rank == 0:
            names = [printable(str(name), _LONGEST) for name in differ]
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


def _short(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def _bind_again(table: dict[str, Any], names: Collection[str], functions: Mapping[str, Any]) -> None:
    """The functions among an object's own attributes (`table`) as they were. A training wraps methods in place:
    ``model.forward = scaled(model.forward)``. What torch or this package has bound stays: they take it back. `names`:
    of all attributes that there were."""
    for name in [*functions, *(table.keys() - functions.keys())]:
        old, new = functions.get(name, _MISSING), table.get(name, _MISSING)
        if old is new or not (_is_function(old) or _is_function(new)) or _root(new) in ("torch", _OURS):
            continue
        if old is not _MISSING:
            table[name] = old
        elif name not in names:
            del table[name]


def _is_function(value: Any) -> bool:
    """Modules of torch are none: what replaces them has a state, and that is for the guard's checks to judge."""
    if type(value) in (FunctionType, partial):
        return True
    return value is not _MISSING and callable(value) and not issubclass(type(value), (nn.Module, type, weakref.ref))


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
