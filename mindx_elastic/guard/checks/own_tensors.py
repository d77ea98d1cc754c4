"""Finds tensors and arrays that an object of the program's own carries from step to step: the centre of a loss, labels
that follow the predictions, the state of an environment or of a recurrent network.

That a value changes is not enough: statistics for a log, caches and buffers of one step do that, too. What is told must
also be used in the method that sets it, as the source of its class shows:

===================================================  ===================================================================
``self.c = 0.9 * self.c + x``, ``self.labels[i] *= a``  and the method reads it elsewhere, other than for a log or
                                                     for another attribute (``self.mean = self.sum / self.count``)
``shuffle(self.order)``                              it is read anywhere, and not made anew in front of it
``y, h = net(x, self.h)``, then ``self.h = h``       it is read first and set afterwards, unless it was missing
===================================================  ===================================================================

or a data set makes its samples of it and another method sets it from its last value (pseudo labels),
or the gradients must depend on it, as the source of the program shows (see `loss_reads`):

===================================================  ===================================================================
``self.bank[i] = 0.5 * self.bank[i] + f``            and ``f @ memory.bank.T`` is in a loss, wherever that is written
``if self.first is None: self.first = x.detach()``   and a loss is divided by it: a resumed run would take a later one
===================================================  ===================================================================

Single numbers are left alone: most of them are statistics, and nothing tells which are not.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset, Sampler

from mindx_elastic.core.looks import attributes_of, is_computed
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.loss_reads import line_of_gradients, takes_a_result
from mindx_elastic.guard.checks.rebound import content_of
from mindx_elastic.guard.checks.remedies import can_be_named
from mindx_elastic.guard.checks.source_reads import Sources, Tree, steering_reads
from mindx_elastic.guard.checks.surroundings import Found, is_library
from mindx_elastic.guard.checks.syntax import children, walk

__all__ = ["OwnTensors", "carries"]

_MOST = 256
_MOST_BYTES = 1 << 20
_MOST_ITEMS = 20_000
_OVERWRITES = ("zero_", "copy_", "fill_", "normal_", "uniform_", "random_", "fill", "set_")
_OF_NO_VALUE = ("shape", "size", "device", "dtype", "ndim", "dim", "numel")
_NOT_OF_A_STEP = (
    "__init__",
    "__new__",
    "__repr__",
    "__str__",
    "__len__",
    "state_dict",
    "load_state_dict",
    "__post_init__",
)


_MAKES_SAMPLES = ("__getitem__", "__getitems__", "__iter__")


@dataclass
class _Value:
    owner: weakref.ref[Any]
    look: object
    moves: int = 0


class OwnTensors:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], _Value] = {}
        self._done: set[tuple[type, str]] = set()
        self._looked_for_first: set[tuple[type, str]] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self,
        found: Iterable[Found],
        kept: Kept,
        files: Callable[[], Collection[str]],
        line_of: Callable[[list[str]], str],
    ) -> Iterator[tuple[str, str]]:
        """What is known against those of `found` that no named object keeps, and what to write."""
        before, self._before = self._before, {}
        sources: Sources | None = None
        for one in found:
            moved = []
            in_loader = id(one.value) in kept.objects  # and so is all that it has
            for name, value in attributes_of(one.value).items():
                if id(value) in kept.objects and not in_loader:
                    continue
                if (type(one.value), name) in self._done or len(self._before) >= _MOST or not _is_state(value, kept):
                    continue
                try:
                    now = _Value(weakref.ref(one.value), _look_at(value))
                except TypeError:  # no weak references
                    break
                key = id(one.value), name
                old = before.get(key)
                if old is not None and old.owner() is one.value and old.look != now.look:
                    moved.append(name)
                self._before[key] = now
            if not moved:
                continue
            self._done.update((type(one.value), name) for name in moved)
            sources = sources or Sources(files())
            trees = list(sources.classes_of(type(one.value)))
            own = attributes_of(one.value)
            carried = [
                name
                for name in moved
                if any(carries(*tree, name, shuffled=isinstance(own[name], list)) for tree in trees)
                or (not isinstance(own[name], list) and _is_in_a_loss(trees, sources, name))
                or (isinstance(one.value, Dataset) and _is_in_samples(trees, name))
            ]
            if carried and not _is_reset_in_steps(one, sources):
                yield _words(one, carried, line_of)

    def look_for_first_values(
        self,
        found: Iterable[Found],
        kept: Kept,
        files: Callable[[], Collection[str]],
        line_of: Callable[[list[str]], str],
    ) -> Iterator[tuple[str, str]]:
        """The same for what an object has taken from its first step, and divides a loss by."""
        sources: Sources | None = None
        for one in found:
            for name, value in attributes_of(one.value).items():
                key = type(one.value), name
                if key in self._looked_for_first or len(self._looked_for_first) >= _MOST:
                    continue
                if not isinstance(value, (torch.Tensor, np.ndarray, float)) or id(one.value) in kept.objects:
                    continue
                if isinstance(value, torch.Tensor) and (value.requires_grad or kept.has(value)):
                    continue
                self._looked_for_first.add(key)
                sources = sources or Sources(files())
                for tree, parents in sources.classes_of(type(one.value)):
                    if _takes_the_first(tree, parents, name) and _line_in_a_loss(tree, sources, name):
                        self._done.add(key)
                        yield _words(one, [name], line_of)


def _is_reset_in_steps(found: Found, sources: Sources) -> bool:
    """Whether the loop around ``step_end()`` begins with ``env.reset()``, an episode for each step."""
    if not hasattr(type(found.value), "reset"):
        return False
    for tree, _ in sources.trees_with("reset"):
        for loop in walk(tree):
            if isinstance(loop, (ast.For, ast.While)) and _calls(loop, "step_end"):
                own = [one.value for one in loop.body if isinstance(one, (ast.Assign, ast.Expr))]
                for call in own:
                    if (
                        isinstance(call, ast.Call)
                        and isinstance(call.func, ast.Attribute)
                        and call.func.attr == "reset"
                    ):
                        owner = ast.unparse(call.func.value)
                        if f"{found.name}.".startswith(f"{owner}."):
                            return True
    return False


def _calls(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == name for n in walk(node)
    )


def _is_state(value: Any, kept: Kept) -> bool:
    if type(value) is torch.Tensor:
        is_plain = not is_computed(value) and not value.requires_grad and not value.is_inference()
        return is_plain and value.numel() > 1 and not kept.has(value)
    if type(value) is list:
        return 1 < len(value) <= _MOST_ITEMS and type(value[0]) is int
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.memmap)  # of a file, and slow
    return is_array and value.size > 1 and value.dtype != object


def _look_at(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value._version, repr(content_of(value))
    if isinstance(value, list):
        return len(value), hash(tuple(value)) if all(type(one) is int for one in value) else 0
    part = value if value.nbytes <= _MOST_BYTES else value.reshape(-1)[:: max(1, value.size // 1024)]
    return value.shape, xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part).tobytes())


def _words(found: Found, names: list[str], line_of: Callable[[list[str]], str]) -> tuple[str, str]:
    shown = listed([f'"{found.name}.{name}"' for name in names], 4)
    whose = f"{type(found.value).__name__}{', ' * bool(found.place)}{found.place}"
    are = "is" if len(names) == 1 else "are"
    what = f"{shown} ({whose}) {are} carried from one step into another and not kept"
    kind = type(found.value)
    if issubclass(kind, Dataset) and not issubclass(kind, IterableDataset):
        line = line_of([found.name])
        has_state = hasattr(kind, "state_dict")
        return what, f"Write {line}" if has_state else (
            f"Write state_dict() and load_state_dict() in {kind.__name__}, and {line}"
        )
    if issubclass(kind, (Sampler, Dataset)):
        why = "If the order of the samples depends on it, make it anew in each epoch, or give"
        return what, f"{why} {kind.__name__} state_dict() and load_state_dict(), which the loader then keeps"
    if any(hasattr(kind, method) for method in ("__getitem__", "__iter__", "__next__")):
        return what, f"If the training depends on it, write {line_of([f'{found.name}.{name}' for name in names])}"
    if can_be_named(found.value):
        return what, f"If the training depends on it, write {line_of([found.name])}"
    if is_library(kind.__module__):
        return what, (
            "If the training depends on it, name an object of your own whose state_dict() gives it and whose "
            f"load_state_dict() sets it: {line_of(['world'])}"
        )
    own = f"{found.name}.state"
    return what, (
        f"If the training depends on it, keep it in a dict, {own} = {{{names[0]!r}: ...}}, and write {line_of([own])}, "
        "or name an object with state_dict() and load_state_dict() that gives it"
    )


# --- source ---


def _of_self(name: str) -> Callable[[ast.AST], bool]:
    def is_it(node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr != name:
            return False
        return isinstance(node.value, ast.Name) and node.value.id == "self"

    return is_it


def _methods(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in children(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in _NOT_OF_A_STEP and "reset" not in node.name:
            yield node


def _is_in_a_loss(trees: Iterable[Tree], sources: Sources, name: str) -> bool:
    """Whether a method sets a new value from the last one, and a loss depends on it."""
    for tree, _ in trees:
        is_it = _of_self(name)
        nodes = [node for method in _methods(tree) for node in walk(method) if isinstance(node, ast.stmt)]
        if any(_writes(node, is_it) and _goes_on(node, is_it) for node in nodes) and _line_in_a_loss(
            tree, sources, name
        ):
            return True
    return False


def _is_in_samples(trees: Iterable[Tree], name: str) -> bool:
    """Whether a method of a data set sets a new value from the last one, and samples are made of it: pseudo labels."""
    is_it, methods = _of_self(name), [method for tree, _ in trees for method in _methods(tree)]
    makes = [method for method in methods if method.name in _MAKES_SAMPLES]
    sets = [node for each in methods if each not in makes for node in walk(each) if isinstance(node, ast.stmt)]
    goes_on = any(_writes(node, is_it) and _goes_on(node, is_it) for node in sets)
    return goes_on and any(_is_read(node, is_it) for method in makes for node in walk(method))


def _line_in_a_loss(kind: ast.AST, sources: Sources, name: str) -> int | None:
    """`kind`: the class; in others ``self.<name>`` is another thing."""
    inside = set(map(id, walk(kind)))
    is_self = _of_self(name)

    def is_it(node: ast.AST) -> bool:
        if id(node) in inside:
            return is_self(node)
        return isinstance(node, ast.Attribute) and node.attr == name and not is_self(node)

    lines = (line_of_gradients(tree, is_it, _NOT_OF_A_STEP) for tree, _ in sources.trees())
    return next((line for line in lines if line is not None), None)


def _takes_the_first(tree: ast.AST, parents: Mapping[int, ast.AST], name: str) -> bool:
    """``if self.x is None: self.x = loss.detach()``, and nothing takes it away again."""
    is_it = _of_self(name)
    nodes = [node for method in _methods(tree) for node in walk(method) if isinstance(node, ast.Assign)]
    sets = [node for node in nodes if any(map(is_it, node.targets))]
    return bool(sets) and all(
        takes_a_result(node.value) and _fills_what_is_missing(node, parents, is_it) for node in sets
    )


def carries(
    tree: ast.AST, parents: Mapping[int, ast.AST], name: str, *, shuffled: bool = False, replaced: bool = False
) -> bool:
    """Whether a method of a class uses the last value of ``self.<name>`` and sets another. `shuffled`, `replaced`: only
    in that way."""
    is_it = _of_self(name)
    for method in walk(tree):
        if not isinstance(method, ast.FunctionDef) or method.name in _NOT_OF_A_STEP or "reset" in method.name:
            continue
        nodes = list(walk(method))
        writes = [node for node in nodes if isinstance(node, ast.stmt) and _writes(node, is_it)]
        for call in (node for node in nodes if isinstance(node, ast.Call) and _shuffles(node, is_it)):
            anew = any(_overwrites(node, is_it) and _place(node) < _place(call) for node in writes)
            if not anew and any(_is_read(node, is_it) and parents.get(id(node)) is not call for node in walk(tree)):
                return True
        if not writes or shuffled:
            continue
        inside = {id(inner) for node in writes for inner in walk(node)}
        reads = [
            read
            for read in steering_reads(method, is_it, dict(parents))
            if id(read) not in inside and _uses_the_value(read, parents)
        ]
        first = min(map(_place, (*reads, *writes)))
        if any(_overwrites(node, is_it) and node in method.body and _place(node) <= first for node in writes):
            continue
        if any(_goes_on(node, is_it) for node in writes) and reads and not replaced:
            return True
        plain = [node for node in writes if not _overwrites(node, is_it, in_place=True)]
        if any(
            _place(read) < _place(w) and not _fills_what_is_missing(w, parents, is_it) for read in reads for w in plain
        ):
            return True
    return False


def _shuffles(call: ast.Call, is_it: Callable[[ast.AST], bool]) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "shuffle" and bool(call.args) and is_it(call.args[0])


def _is_read(node: ast.AST, is_it: Callable[[ast.AST], bool]) -> bool:
    return is_it(node) and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def _place(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _writes(node: ast.stmt, is_it: Callable[[ast.AST], bool]) -> bool:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(map(is_it, (part for target in targets for part in _parts(target))))
    return isinstance(node, ast.Expr) and _in_place(node.value, is_it) != ""


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    """``a``, ``a[i]`` and ``(a, b)``: what is set."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _parts(element)
    elif isinstance(target, (ast.Subscript, ast.Starred)):
        yield from _parts(target.value)
    else:
        yield target


def _in_place(value: ast.expr, is_it: Callable[[ast.AST], bool]) -> str:
    """The first method of ``self.x.mul_(a).add_(b)``, else empty."""
    name = ""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name, value = value.func.attr, value.func.value
    while isinstance(value, ast.Subscript):
        value = value.value
    return name if is_it(value) and (name in _OVERWRITES or (name.endswith("_") and name[:1] != "_")) else ""


def _overwrites(node: ast.stmt, is_it: Callable[[ast.AST], bool], *, in_place: bool = False) -> bool:
    """Whether nothing of the last value is left."""
    if isinstance(node, ast.Expr):
        return _in_place(node.value, is_it) in _OVERWRITES
    if in_place or not isinstance(node, ast.Assign):
        return False
    return any(map(is_it, node.targets)) and not any(map(is_it, walk(node.value)))


def _goes_on(node: ast.stmt, is_it: Callable[[ast.AST], bool]) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Expr):
        return _in_place(node.value, is_it) not in _OVERWRITES
    return isinstance(node, ast.Assign) and any(map(is_it, walk(node.value)))


def _uses_the_value(read: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    node = read
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, ast.Attribute) and parent.attr in _OF_NO_VALUE:
            return False
        if (
            isinstance(parent, ast.Call)
            and isinstance(parent.func, ast.Name)
            and parent.func.id in ("len", "isinstance")
        ):
            return False
        if isinstance(parent, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            return False
        if isinstance(parent, (ast.Assign, ast.AugAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            own = [part for target in targets for part in _parts(target)]
            return not all(
                isinstance(p, ast.Attribute) and isinstance(p.value, ast.Name) and p.value.id == "self" for p in own
            )
        if isinstance(parent, ast.stmt):
            return True
        node = parent
    return True


def _fills_what_is_missing(node: ast.AST, parents: Mapping[int, ast.AST], is_it: Callable[[ast.AST], bool]) -> bool:
    """``if self.x is None: self.x = ...``, ``if not self.filled[i]: self.x[i] = ...``."""
    while (parent := parents.get(id(node))) is not None and not isinstance(parent, ast.FunctionDef):
        if isinstance(parent, ast.If):
            for inner in walk(parent.test):
                if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
                    return True
                if isinstance(inner, ast.Compare) and any(isinstance(o, (ast.Is, ast.NotIn)) for o in inner.ops):
                    return True
        node = parent
    return False
