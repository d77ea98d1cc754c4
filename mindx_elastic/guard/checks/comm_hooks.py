"""State of DDP's communication hooks (PowerSGD's error feedback, counters of local SGD): in no module, and never saved
unless it is named in `stateful`.

The state that was given to ``register_comm_hook`` is refused when it changes. Tensors of the object whose method the
hook is, or that the hook has in its closure, are a risk: some are only looked at.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mindx_elastic.capture.adapters import adapted
from mindx_elastic.capture.copying import map_tensors, same_tree
from mindx_elastic.core.looks import attributes_of, has_method
from mindx_elastic.errors import MindxError
from mindx_elastic.guard.checks.surroundings import kind_of
from mindx_elastic.guard.replicas import DdpModules
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["CommHooks"]

_KNOWN = ("PowerSGDState", "PostLocalSGDState")
"""torch's own; by name, importing them takes long."""
_DEPTH = 3


@dataclass
class _Owner:
    """An object that a hook refers to."""

    place: str
    value: Any
    names: frozenset[str]
    """Of its attributes: those that the hook's code has."""
    tensors: list[torch.Tensor] | None = None
    """Theirs at the last look."""


class CommHooks:
    """Those of all DDP modules among the guard's objects. Training thread."""

    def __init__(self, targets: Mapping[str, Any], ddp: DdpModules, unmanaged: Unmanaged) -> None:
        """Raises UnmanagedStateError for a hook of torch's with state that is not named."""
        self._unmanaged = unmanaged
        self._watched: list[tuple[str, Any, Any]] = []
        """Place, state of a kind that may be none, and what it was."""
        self._owners: list[_Owner] = []
        named = {id(target) for target in targets.values()}
        for place, module in ddp:
            for hook, state in module._comm_hooks:
                self._owners += [
                    _Owner(place, owner, names)
                    for owner, names in _owners(hook)
                    if id(owner) not in named and not named & set(map(id, attributes_of(owner).values()))
                ]
                if state is None or isinstance(state, ProcessGroup) or id(state) in named:
                    continue
                if any(kind.__name__ in _KNOWN for kind in type(state).__mro__):
                    self._refuse(place, state)
                elif (seen := _look(state)) is not None:
                    self._watched.append((place, state, seen))

    def look(self) -> None:
        """Whether the state of a hook of the program's own changes. A few times, early in the run."""
        for place, state, seen in list(self._watched):
            now = _look(state)
            if now is None or not same_tree(now, seen):
                self._watched.remove((place, state, seen))
                self._refuse(place, state)
        for owner in list(self._owners):
            before, owner.tensors = owner.tensors, _tensors(owner.value, owner.names)
            if before is not None and not same_tree(owner.tensors, before):
                self._owners.remove(owner)
                kind = type(owner.value).__name__
                self._unmanaged.risk(
                    f"{owner.place}: the communication hook of its DDP uses tensors of an object ({kind}) that change, "
                    "and it is not named",
                    f'If the hook carries them from step to step, name that object: Guard(stateful={{"comm_hook": '
                    f"hook}}, ...), with the {kind} in place of hook",
                )

    def _refuse(self, place: str, state: object) -> None:
        kind = type(state).__name__
        self._unmanaged.certain(
            f"{place}: its DDP has a communication hook with state ({kind}) that is not named",
            f'Name that object: Guard(stateful={{"comm_hook": state}}, ...), with the {kind} that was given to '
            "register_comm_hook",
        )


def _owners(hook: Any, depth: int = 0) -> Iterator[tuple[Any, frozenset[str]]]:
    """The objects whose tensors a hook of the program's own can use, and the names that its code has."""
    if isinstance(hook, types.MethodType):
        parts, code = [hook.__self__], getattr(hook.__func__, "__code__", None)
    elif isinstance(hook, partial):
        parts, code = [hook.func, *hook.args, *hook.keywords.values()], getattr(hook.func, "__code__", None)
    elif isinstance(hook, types.FunctionType):
        parts, code = [cell.cell_contents for cell in hook.__closure__ or () if _is_set(cell)], hook.__code__
    else:
        parts, code = [hook], getattr(inspect.getattr_static(type(hook), "__call__", None), "__code__", None)
    names = frozenset() if code is None else frozenset(_names(code))
    for part in parts:
        if isinstance(part, (types.MethodType, types.FunctionType, partial)):
            yield from _owners(part, depth + 1) if depth < _DEPTH else ()
        elif type(part) in (list, dict):
            yield part, names
        elif kind_of(type(part)) == "instance":
            methods = [getattr(getattr(type(part), name, None), "__code__", None) for name in names]
            yield part, names.union(*(_names(method) for method in methods if method is not None))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _tensors(owner: Any, names: frozenset[str]) -> list[torch.Tensor]:
    """Copies of the tensors that it has under `names`, single numbers apart, which are for a log."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 1 and not tensor.requires_grad:
            found.append(tensor.detach().clone())
        return tensor

    if type(owner) in (list, dict):
        some = list(owner.values() if type(owner) is dict else owner)
    else:
        some = [value for name, value in attributes_of(owner).items() if name in names]
    map_tensors([each for each in some if isinstance(each, (torch.Tensor, list, tuple, dict))], note)
    return found


def _look(state: object) -> Any:
    """A copy of what a state holds; None where it cannot be told."""
    if has_method(state, "state_dict"):
        return None
    try:
        adapter = adapted("comm_hook", state)
        return None if adapter is None else adapter.state_dict()
    except MindxError:
        return None
