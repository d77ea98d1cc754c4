"""Finds copies of the weights that a training carries from step to step: the best ones so far, a snapshot of an epoch.

A copy is a dict with the names and shapes of a named module's weights, or a module like it. Most are made and used in
one step. One that is carried is known by one of these, and it must be read other than to be saved or logged:

===================================================  ===================================================================
it was the same at two looks, and another later      it has crossed boundaries, and a resumed run makes another one
it is set below ``if loss < best:``                  it is chosen, as the source shows
``ema = {k: 0.9 * ema[k] + ...}``                    it goes on from its own last value, as the source shows
===================================================  ===================================================================
"""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindx_elastic.guard.checks.source_reads import Sources, steering_reads
from mindx_elastic.guard.checks.surroundings import Found
from mindx_elastic.guard.checks.syntax import walk

__all__ = ["WeightCopies"]

_MOST = 64
_WRAPPERS = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)\.)+")
_SAVES = re.compile(r"save|dump|write|log|upload|put")
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CHOSEN = re.compile(r"best|better|improve")


@dataclass
class _Copy:
    tensor: weakref.ref[torch.Tensor]
    version: int
    boundary: int
    has_stayed: bool = False
    num_changes: int = 0


class WeightCopies:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], _Copy] = {}
        self._looks = 0
        self._done: set[tuple[str, str]] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before, self._looks = {}, 0

    def look(
        self,
        found: Iterable[Found],
        weights: Sequence[Mapping[str, torch.Tensor]],
        is_kept: Callable[[torch.Tensor], bool],
        files: Callable[[], Collection[str]],
        boundary: int,
    ) -> Iterator[tuple[str, str]]:
        """What is known against those of `found` that no named object keeps, and what to write.

        `weights`: the parameters of each named module, by name. `files`: gives the program's. `boundary`: the number of
        the last one; there may be two looks at it.
        """
        before, self._before = self._before, {}
        self._looks += 1
        sources: Sources | None = None
        for one in found:
            key = one.place, one.name
            if key in self._done or len(self._before) >= _MOST or key in self._before:
                continue
            tensor = _copied(one.value, weights, is_kept)
            if tensor is None:
                continue
            # What changes inside of a module is looked at with the modules.
            version = 0 if isinstance(one.value, nn.Module) else tensor._version
            now = self._before[key] = _Copy(weakref.ref(tensor), version, boundary)
            old = before.get(key)
            if old is None:
                now.num_changes = int(self._looks > 1)  # the first look cannot tell since when it is there
            else:
                is_same = old.tensor() is tensor and old.version == version
                now.has_stayed = old.has_stayed or (is_same and old.boundary != boundary)
                now.num_changes = old.num_changes + (not is_same)
            if old is None and now.num_changes == 0:
                continue
            sources = sources or Sources(files())
            if _is_carried(one, now, sources):
                self._done.add(key)
                yield _words(one)


def _copied(
    value: Any, weights: Sequence[Mapping[str, torch.Tensor]], is_kept: Callable[[torch.Tensor], bool]
) -> torch.Tensor | None:
    """A tensor of `value`, where that is a copy of a named module's weights."""
    if isinstance(value, nn.Module):
        own: dict[Any, Any] = dict(nn.Module.named_parameters(value))
    elif isinstance(value, dict):
        own = value  # read without running the code of a subclass
    else:
        return None
    first = next(dict.__iter__(own), None)
    if type(first) is not str:
        return None
    for named in weights:
        trained = [name for name, p in named.items() if p.requires_grad]
        if not trained or dict.__len__(own) < len(trained):
            continue
        prefix = _WRAPPERS.match(first)
        start = "" if prefix is None or first in named else prefix[0]
        copies = [dict.get(own, f"{start}{name}") for name in trained]
        tensors = [copy for copy in copies if isinstance(copy, torch.Tensor)]
        if [tensor.shape for tensor in tensors] == [named[name].shape for name in trained]:
            return None if any(map(is_kept, tensors)) else tensors[0]
    return None


def _is_carried(found: Found, copy: _Copy, sources: Sources) -> bool:
    name = _last_name(found.name)
    # A variable is that file's own; an attribute may be read anywhere.
    place = found.place if found.name.isidentifier() and found.place else None
    uses = [_uses(tree, parents, name) for tree, parents in sources.trees_with(name, place)]
    if not uses:
        return copy.has_stayed and copy.num_changes > 0
    if not any(each.is_read for each in uses):
        return False
    if copy.has_stayed and copy.num_changes:
        return True
    return any(each.is_chosen or (each.goes_on and copy.num_changes > 1) for each in uses)


@dataclass(frozen=True)
class _Uses:
    """What a file does with a name."""

    is_read: bool
    """The value of an earlier step is used."""
    goes_on: bool
    """It is set from itself."""
    is_chosen: bool
    """It is set where something is better."""


_known_uses: dict[tuple[int, str], tuple[_Uses, ast.AST]] = {}  # by the tree's id, with the tree
_MOST_USES = 64


def _uses(tree: ast.AST, parents: dict[int, ast.AST], name: str) -> _Uses:
    key = id(tree), name
    if key not in _known_uses:
        if len(_known_uses) >= _MOST_USES:
            _known_uses.clear()

        def is_it(node: ast.AST) -> bool:
            return (isinstance(node, ast.Name) and node.id == name) or (
                isinstance(node, ast.Attribute) and node.attr == name
            )

        values = [(node, value) for node in walk(tree) if (value := _set_to(node, is_it)) is not None]
        found = _Uses(
            is_read=any(
                _is_used(read, parents) and not _is_set_before(read, parents, is_it)
                for read in steering_reads(tree, is_it, parents)
            ),
            goes_on=any(any(map(is_it, walk(value))) for _, value in values),
            is_chosen=any(_is_chosen(node, parents) for node, _ in values),
        )
        _known_uses[key] = found, tree
    return _known_uses[key][0]


def _last_name(name: str) -> str:
    """``best`` of ``best['state']``, ``best_state`` of ``trainer.best_state``."""
    return name.partition("[")[0].rpartition(".")[2].strip("<>")


def _is_used(read: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    """Whether a read is more than a test for None, or an argument of what saves it."""
    node = read
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            return False
        if isinstance(parent, ast.Call) and node is not parent.func and _SAVES.search(_called(parent)):
            return False
        if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store) and node is parent.value:
            return False  # best["state"] = ...
        if isinstance(parent, ast.Attribute) and parent.attr == "update":
            return False
        if isinstance(parent, ast.stmt):
            return True
        node = parent
    return True


def _is_set_before(read: ast.AST, parents: Mapping[int, ast.AST], is_it: Callable[[ast.AST], bool]) -> bool:
    """Whether it is always set anew in front of that read, without a loop in between: then nothing is carried."""
    node = read
    while (parent := parents.get(id(node))) is not None and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list) or node not in block:
                continue
            for earlier in reversed(block[: block.index(node)]):
                if _set_to(earlier, is_it) is not None:
                    return True
                inner = list(walk(earlier))
                has_loop = any(isinstance(each, (ast.For, ast.While)) for each in inner)
                if has_loop and any(_set_to(each, is_it) is not None for each in inner):
                    return False
        is_loop = isinstance(parent, (ast.For, ast.While))
        if is_loop and any(_set_to(each, is_it) is not None for each in walk(parent)):
            return False  # it may be from the pass before
        node = parent
    return False


def _called(call: ast.Call) -> str:
    func = call.func
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def _set_to(node: ast.AST, is_it: Callable[[ast.AST], bool]) -> ast.expr | None:
    """The value in ``best = ...``, ``a, best = ...``, ``best["state"] = ...``, if it is more than a constant."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or isinstance(node.value, ast.Constant):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return node.value if any(is_it(inner) for target in targets for inner in walk(target)) else None


def _is_chosen(node: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    """Whether it stands below a test of which of two values is better."""
    while (parent := parents.get(id(node))) is not None and not isinstance(node, (ast.For, ast.While, ast.FunctionDef)):
        if isinstance(parent, ast.If) and node is not parent.test and node in parent.body:
            for inner in walk(parent.test):
                if isinstance(inner, ast.Compare) and any(isinstance(op, _ORDER) for op in inner.ops):
                    return True
                name = (
                    inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else ""
                )
                if _CHOSEN.search(name):
                    return True
        node = parent
    return False


def _words(found: Found) -> tuple[str, str]:
    what = f"{found} is a copy of the weights, changes in the training, and is not kept"
    return what, (
        "If the program uses it later (the best weights so far), make a dict before the guard, "
        'best = {"value": None, "state": None}, write Guard(stateful={"best": best}, ...), and put both into it: '
        'best["state"] = copy.deepcopy(model.state_dict())'
    )
