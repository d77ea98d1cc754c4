"""Finds what an optimizer of the program's own keeps (momentum, second moments), which torch's hooks never see.

Only where weights of the guard's are known to change without any of torch's optimizers. What has the shapes of trained
weights there, stays the same tensors from one look to the next and gets other values is most likely such state: a risk.
So are other tensors in the same container, where the source reads what it sets (``s["m"] = 0.9 * s["m"] + g``).
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mindx_elastic.core.looks import attributes_of, is_computed
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.movements import TensorsLook
from mindx_elastic.guard.checks.source_reads import Sources
from mindx_elastic.guard.checks.surroundings import Found, kind_of
from mindx_elastic.guard.checks.syntax import walk

__all__ = ["OwnOptimizers"]

_MOVES = 2
_MOST = 256
_MOST_TENSORS = 10_000


@dataclass
class _Slots:
    """Tensors that look like those that an optimizer keeps for each weight."""

    first: weakref.ref[torch.Tensor]
    sample: str
    moves: int = 0


class OwnOptimizers:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], _Slots] = {}
        self._told = False
        self.told_of: set[int] = set()
        """By `id`: what was named."""

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self,
        found: Iterable[Found],
        trained: Iterable[torch.Tensor],
        is_kept: Callable[[torch.Tensor], bool],
        line_of: Callable[[Sequence[str]], str],
        files: Callable[[], Collection[str]],
    ) -> tuple[str, str] | None:
        """What is known against those of `found` that no named object keeps, and what to write.

        `trained`: the weights that change. `line_of`: gives the line that names the objects of these names. `files`:
        gives the program's.
        """
        if self._told:
            return None
        weights = list(trained)
        shapes = {p.shape for p in weights}
        whole = torch.Size([sum(p.numel() for p in weights)])
        before, self._before = self._before, {}
        moved: list[Found] = []
        for one in found:
            if len(self._before) >= _MOST:
                break
            tensors = [t for t in _tensors_of(one.value) if t.shape in shapes or t.shape == whole]
            tensors = [t for t in tensors if not t.requires_grad and not is_computed(t) and not is_kept(t)]
            if not tensors:
                continue
            key = id(one.value), one.name
            now = _Slots(weakref.ref(tensors[0]), repr(TensorsLook.at(tensors).sample))
            old = before.get(key)
            if old is not None and (old.first() is tensors[0] or _goes_on(one, files)):
                now.moves = old.moves + (old.sample != now.sample)
            self._before[key] = now
            if now.moves >= _MOVES:
                moved.append(one)
        if not moved:
            return None
        self._told = True
        self.told_of = {id(one.value) for one in moved}
        names = listed([str(one) for one in moved], 2)
        are = "changes with them and is" if len(moved) == 1 else "change with them and are"
        what = f"the weights change without any of torch's optimizers, and {names} {are} not kept: that looks like the "
        return (
            f"{what}state of an optimizer of the program's own",
            f"Write {line_of(list(dict.fromkeys(map(_owner_of, moved))))}, with whatever else that optimizer counts",
        )


def _goes_on(found: Found, files: Callable[[], Collection[str]]) -> bool:
    """Whether a function sets an item of the container, or one under a key of its, after it has read it."""
    names = {found.name.partition("[")[0].rpartition(".")[2].strip("<>")}
    if isinstance(found.value, dict):
        names |= {repr(key) for key in dict.keys(found.value) if isinstance(key, str)}
    return any(names & _items_that_go_on(tree) for tree, _ in Sources(files()).trees())


@lru_cache(maxsize=64)  # files; each container is asked for by itself
def _items_that_go_on(tree: ast.AST) -> frozenset[str]:
    """In the functions of a file: of ``self.m[p]`` the name ``m``, of ``state["m"]`` the key."""
    scopes = (node for node in walk(tree) if isinstance(node, (ast.Module, ast.FunctionDef)))
    return frozenset(name for scope in scopes for name in _items_in(scope))


def _items_in(scope: ast.AST) -> set[str]:
    items = [node for node in walk(scope) if isinstance(node, ast.Subscript)]
    read: dict[str, int] = {}
    for item in items:
        if isinstance(item.ctx, ast.Load):
            text = ast.unparse(item)
            read[text] = min(item.lineno, read.get(text, item.lineno))
    found = set()
    for item in items:
        if isinstance(item.ctx, ast.Store) and item.lineno >= read.get(ast.unparse(item), item.lineno + 1):
            base = item.value
            found |= {base.id} if isinstance(base, ast.Name) else set()
            found |= {base.attr} if isinstance(base, ast.Attribute) else set()
            found |= {repr(item.slice.value)} if isinstance(item.slice, ast.Constant) else set()
    return found


def _owner_of(found: Found) -> str:
    """``opt`` for ``opt.m`` and ``opt.state['m']``."""
    name, dot, last = found.name.rpartition(".")
    return name if dot else last.partition("[")[0]


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        some = list(dict.values(value)) if isinstance(value, dict) else []
    elif type(value) in (list, tuple):
        some = list(value)
    elif kind_of(type(value)) == "instance":
        some = list(attributes_of(value).values())
    else:
        return []
    some = some[:_MOST_TENSORS]
    return [one for one in some if type(one) is torch.Tensor and one.ndim]
