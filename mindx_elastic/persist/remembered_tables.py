"""Remembers what `flatten` has made of the tables of a state, for the next state that has the same ones.

A table is a dict of tensors (a module's state), or a dict of such dicts (an optimizer's, by parameter). In a snapshot
at every step all of them are the same but for the values. What the tree says of a table depends on its keys, on the
kind of each tensor, and on which of them share memory. That is compared column by column, at the speed of C, and takes
a small part of what making the tree and its text anew takes. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

__all__ = ["TABLES_DEPTH", "TENSORS", "RememberedTables", "Table", "tree_text"]

Tree = Any

_FEWEST = 4
"""Tensors of a table; for fewer it is not worth it."""
TABLES_DEPTH, _MOST_ITEMS = 2, 64
"""Where tables are looked for: among the objects, and in each object (``state``); in a tree not among many items."""
_KEYS = frozenset((str, int))
"""Of a table; among others, 1.0 and True would be equal."""
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_encode = json.JSONEncoder(separators=(",", ":")).encode
_address, _strides, _is_negated = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_neg
_columns_of = attrgetter("dtype", "requires_grad", "shape")


class _Columns(NamedTuple):
    """What the tree of a table depends on."""

    keys: list[str | int]
    inner_keys: list[tuple[str, ...]]
    """Of a dict of dicts."""
    types: list[type]
    kinds: list[tuple[Any, ...]]
    strides: list[tuple[int, ...]]
    negated: list[bool]
    first_at: list[int]
    """For each tensor the number of the first one at its address."""


class Table:
    """A table as it is now."""

    def __init__(self, columns: _Columns, tensors: list[torch.Tensor], addresses: list[int]) -> None:
        self.columns, self.tensors, self.addresses = columns, tensors, addresses

    @classmethod
    def of(cls, value: Mapping[Any, Any]) -> Table | None:
        """None: `value` is no table, or one of few or of unusual tensors."""
        for item in value.values():
            if type(item) is not dict and type(item) not in TENSORS:
                return None  # soon, for most dicts are none
            break
        keys = [*value]
        key_types = {*map(type, keys)}
        if not key_types <= _KEYS or (str in key_types and any(type(k) is str and k.startswith("$") for k in keys)):
            return None
        items: list[Any] = [*value.values()]
        types = {*map(type, items)}
        inner: list[tuple[str, ...]] = []
        if types == {dict}:
            inner = [*map(tuple, items)]
            names = {*chain.from_iterable(inner)}
            if {*map(type, names)} != {str} or any(name.startswith("$") for name in names):
                return None
            items = [*chain.from_iterable(map(dict.values, items))]
            types = {*map(type, items)}
        if len(items) < _FEWEST or not types <= TENSORS:
            return None
        try:
            addresses, strides = [*map(_address, items)], [*map(_strides, items)]
            negated = [*map(_is_negated, items)]
        except RuntimeError:  # a sparse one, say
            return None
        if not all(addresses):  # an empty tensor
            return None
        first: dict[int, int] = {}
        first_at = [*map(first.setdefault, addresses, range(len(items)))]
        kinds = [*map(_columns_of, items)]
        columns = _Columns(keys, inner, [*map(type, items)], kinds, strides, negated, first_at)
        return cls(columns, items, addresses)


class _TableTree(dict[str, Any]):
    """The tree of a table or of another part that is remembered, with its JSON as it is inside of a JSON text."""

    text: str


_MOST_PLAIN, _DEEPEST_PLAIN, _MOST_MISSES = 1 << 16, 8, 8  # characters, levels, snapshots
_PLAIN = frozenset((type(None), bool, int, float, str))
_PLAIN_OR_NESTED = _PLAIN | {dict, list, tuple}


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether there are only plain values in it. The types of many items are asked in one call."""
    if type(value) is dict:
        if not _PLAIN.issuperset(map(type, value)):
            return False
        value = value.values()
    elif type(value) not in (list, tuple):
        return type(value) in _PLAIN
    kinds = {*map(type, value)}
    if kinds <= _PLAIN:
        return True
    is_nested = kinds <= _PLAIN_OR_NESTED and depth < _DEEPEST_PLAIN
    return is_nested and all(map(_is_plain, value, repeat(depth + 1)))


class _Remembered(NamedTuple):
    columns: _Columns
    tree: _TableTree
    names: list[str]
    """Of the tensors, in their order."""


class RememberedTables:
    """Of the last state, by place. One per series of states."""

    def __init__(self) -> None:
        self._before: dict[str, _Remembered] = {}
        self._now: dict[str, _Remembered] = {}
        self._plain: dict[str, tuple[str, _TableTree | None]] = {}
        """Of the parts with nothing but plain values: what they were, and their tree once they have stayed so."""
        self._misses: dict[str, int] = {}
        """How often in a row they were others."""

    def begin(self) -> None:
        """Another state is flattened. What the one before had no more is forgotten."""
        self._before, self._now = self._now, {}

    def content_of(self, key: str, part: object) -> str | None:
        """A text that is equal for equal parts of plain values (numbers, texts, and dicts, lists and tuples of them)
        only: Python's own, which for these tells 1 from 1.0 and True, and -0.0 from 0.0. None: it is another kind, or
        large, may have a number that is not finite, or the part `key` is another each time."""
        if type(part) is not dict or self._misses.get(key, 0) >= _MOST_MISSES or not _is_plain(part):
            return None
        try:
            content = repr(part)
        except ValueError:  # a number of thousands of digits
            return None
        return None if len(content) > _MOST_PLAIN or "nan" in content or "inf" in content else content

    def recall_plain(self, key: str, content: str) -> Tree | None:
        """The tree of the part `key` of the state before, if that had the same `content`; None: it had not."""
        known = self._plain.get(key)
        return known[1] if known is not None and known[0] == content else None

    def keep_plain(self, key: str, content: str, tree: Tree) -> Tree:
        """`tree` was made of the part with that `content`. Returns it, to be used."""
        known = self._plain.get(key)
        if known is None or known[0] != content:
            self._plain[key] = content, None  # not before it is the same again: most that change do so at each step
            self._misses[key] = self._misses.get(key, 0) + 1
            return tree
        remembered = _TableTree(tree)
        remembered.text = _quoted(_encode(tree))
        self._plain[key], self._misses[key] = (content, remembered), 0
        return remembered

    def recall(
        self,
        where: str,
        table: Table,
        tensors: MutableMapping[str, torch.Tensor],
        first: MutableMapping[int, torch.Tensor],
        first_name: MutableMapping[int, str],
    ) -> Tree | None:
        """The tree of an equal table at the same place, whose tensors are added to `tensors`, `first` and
        `first_name` (see `flatten`); None: there was none."""
        known = self._before.get(where)
        if known is None or known.columns != table.columns or not tensors.keys().isdisjoint(known.names):
            return None
        self._now[where] = known
        tensors.update(zip(known.names, map(torch.Tensor.detach, table.tensors), strict=True))
        first.update(zip(table.addresses, table.tensors, strict=True))
        first_name.update(zip(table.addresses, known.names, strict=True))
        return known.tree

    def keep(self, where: str, table: Table, tree: Tree) -> Tree:
        """`tree` was made of `table`, none of whose tensors has been met before. Returns it, to be used."""
        columns = table.columns
        views = [*zip(columns.kinds, columns.strides, columns.negated, strict=True)]
        if any(columns.negated) or any(views[i] != view for i, view in zip(columns.first_at, views, strict=True)):
            return tree  # stored otherwise than it is, or one memory seen in several ways
        nodes: Sequence[Any] = [node for _, node in tree["$map"]] if "$map" in tree else [*tree.values()]
        if columns.inner_keys:
            nodes = [*chain.from_iterable(map(dict.values, nodes))]
        names = [node["$tensor"] for node in nodes]
        if "~" in "".join(names) or any("dtype" in node for node in nodes):
            return tree  # a name that depends on others, or a type that the file has under another name
        remembered = _TableTree(tree)
        remembered.text = _quoted(_encode(tree))
        self._now[where] = _Remembered(columns, remembered, names)
        return remembered


def tree_text(tree: Tree) -> str:
    """The JSON of a tree, as a JSON text itself (with its quotes); that of remembered tables is not made anew."""
    texts: list[str] = []
    _add_text(tree, 0, texts)
    return f'"{"".join(texts)}"'


def _add_text(node: Tree, depth: int, texts: list[str]) -> None:
    if type(node) is _TableTree:
        texts.append(node.text)
        return
    if type(node) is not dict or not _has_table(node, depth):
        texts.append(_quoted(_encode(node)))
        return
    others: dict[str, Tree] = {}
    before = "{"
    for key, value in node.items():
        if type(value) is _TableTree or (type(value) is dict and _has_table(value, depth + 1)):
            if others:  # as many as there are in a row take one call
                texts.append(before + _quoted(_encode(others)[1:-1]))
                others, before = {}, ","
            texts.append(f"{before}{_quoted(_encode(key))}:")
            _add_text(value, depth + 1, texts)
            before = ","
        else:
            others[key] = value
    if others:
        texts.append(before + _quoted(_encode(others)[1:-1]))
    texts.append("}")


def _quoted(text: str) -> str:
    """As it is inside of a JSON text. Character by character, so pieces can be quoted one by one."""
    return _encode(text)[1:-1]


def _has_table(node: dict[str, Tree], depth: int) -> bool:
    if depth >= TABLES_DEPTH or len(node) > _MOST_ITEMS:
        return False
    values = node.values()
    return _TableTree in map(type, values) or any(_has_table(v, depth + 1) for v in values if type(v) is dict)
