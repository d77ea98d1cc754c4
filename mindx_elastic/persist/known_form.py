"""The form of a state that is saved again and again: its JSON tree, but for the numbers in it, and its tensors' names.

Most states differ in numbers and in the bytes of tensors only. Then the text of one tree with other numbers in it is
that of the other, and no second walk by `flatten` is needed, which takes five times as long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["KnownForm", "OtherFormError"]

_CONSTANTS = frozenset((type(None), bool, str, bytes))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_KEYS = frozenset((str, int))
_MARK = "\u2063{}\u2063"
_MARKS = re.compile(r'"\\u2063(\d+)\\u2063"')
_MOST = 1 << 63
_data_ptr = torch.Tensor.data_ptr
_FACTS = (
    attrgetter("dtype"),
    torch.Tensor.size,
    attrgetter("device"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
    attrgetter("requires_grad"),
)
_ARRAY_FACTS = attrgetter("dtype.str", "shape", "strides", "flags.writeable")


class OtherFormError(Exception):
    """The state does not have the form."""


class KnownForm:
    """The form of one state. Keeps none of its tensors. Not for several threads."""

    def __init__(self, state: Any) -> None:
        """Raises OtherFormError where `state` is more than numbers, texts, tensors, arrays and plain containers of
        these, or where two of its tensors begin at one address; UnsupportedStateError as `flatten` does."""
        self._containers: list[Any] = []
        self._num_outer = self._num_numbers = 0
        marked = self._look([state], 0, 0, -1)[0]
        _, leaves = self._walk(state)
        self._facts, tensors = _facts_of(leaves)
        tree, stored = flatten(marked)
        pieces = _MARKS.split(json.dumps(tree, separators=(",", ":")))
        self._pieces, order = pieces[::2], [*map(int, pieces[1::2])]
        names = {(tensor.data_ptr(), tensor.dtype): name for name, tensor in stored.items()}
        found = [names.get((tensor.data_ptr(), tensor.dtype), "") for tensor in tensors]
        if sorted(order) != [*range(self._num_numbers)] or sorted(found) != sorted(stored):
            raise OtherFormError
        self._order, self._names = _getter(order), found

    def fill(self, state: Any) -> tuple[str, dict[str, torch.Tensor]]:
        """The JSON text of the tree of `state`, and its tensors by name; as by `flatten`, but for their order. Raises
        OtherFormError."""
        numbers, leaves = self._walk(state)
        facts, tensors = _facts_of(leaves)
        if facts != self._facts:
            raise OtherFormError
        pieces = [""] * (2 * len(numbers) + 1)
        pieces[::2] = self._pieces
        if self._order is not None:
            pieces[1::2] = map(repr, self._order(numbers))
        return "".join(pieces), dict(zip(self._names, tensors, strict=True))

    def _walk(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The numbers and the tensors in `state`. In one function: a call for each container would take longer."""
        numbers: list[Any] = []
        leaves: list[Any] = []
        outer: list[Any] = [([state],)]
        for (
            parent,
            index,
            keys,
            of_keys,
            kinds,
            constants_of,
            expected,
            numbers_of,
            leaves_of,
            inner,
        ) in self._containers:
            value = outer[parent][index]
            if keys is not None:
                if [*value] != keys or [*map(type, value)] != of_keys:
                    raise OtherFormError
                value = [*value.values()]
            if [*map(type, value)] != kinds or (constants_of is not None and constants_of(value) != expected):
                raise OtherFormError
            if numbers_of is not None:
                numbers += numbers_of(value)
            if leaves_of is not None:
                leaves += leaves_of(value)
            if inner:
                outer.append(value)
        # `flatten` writes what is not finite, or has more than 64 bits, in another way.
        if numbers and not (min(numbers) >= -_MOST and max(numbers) < _MOST and all(map(math.isfinite, numbers))):
            raise OtherFormError
        return numbers, leaves

    def _look(self, value: Any, parent: int, index: int, depth: int) -> Any:
        """`value`, the item `index` of the container `parent` of those that have others in them, with marks in the
        place of its numbers."""
        if depth > MAX_DEPTH:
            raise OtherFormError
        keys = [*value] if type(value) is dict else None
        if keys is not None and not {*map(type, keys)} <= _KEYS:
            raise OtherFormError
        items = value if keys is None else [*value.values()]
        marked = [*items]
        constants, numbers, leaves, inner = [], [], [], []
        for i, item in enumerate(items):
            kind = type(item)
            if kind in _CONSTANTS:
                constants.append(i)
            elif kind is int or kind is float:
                marked[i] = _MARK.format(self._num_numbers)
                self._num_numbers += 1
                numbers.append(i)
            elif kind in _TENSORS or kind is np.ndarray:
                leaves.append(i)
            elif kind in (dict, list, tuple):
                inner.append(i)
            else:
                raise OtherFormError
        of_constants = _getter(constants)
        expected = None if of_constants is None else of_constants(items)
        of_keys = None if keys is None else [*map(type, keys)]
        kinds, has_inner = [*map(type, items)], bool(inner)
        getters = _getter(numbers), _getter(leaves)
        self._containers.append((parent, index, keys, of_keys, kinds, of_constants, expected, *getters, has_inner))
        self._num_outer += has_inner
        number = self._num_outer
        for i in inner:
            marked[i] = self._look(items[i], number, i, depth + 1)
        return dict(zip(keys, marked, strict=True)) if keys is not None else type(value)(marked)


def _getter(indices: Sequence[int]) -> Any:
    """Gives these items of a list or a tuple, as a list or a tuple; None for no items."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1)) if indices else None


def _facts_of(leaves: Sequence[Any]) -> tuple[Any, Sequence[torch.Tensor]]:
    """What `flatten` makes of tensors and arrays depends on, but for their names; and all as tensors. Raises
    OtherFormError."""
    arrays = [_ARRAY_FACTS(leaf) for leaf in leaves if type(leaf) is np.ndarray]
    if not all(map(itemgetter(-1), arrays)):
        raise OtherFormError  # torch warns of what cannot be written
    try:
        tensors = (
            [torch.from_numpy(leaf) if type(leaf) is np.ndarray else leaf for leaf in leaves] if arrays else leaves
        )
        facts = [[*map(fact, tensors)] for fact in _FACTS]
        if len({*map(_data_ptr, tensors)}) != len(leaves):
            raise OtherFormError
    except (TypeError, ValueError, RuntimeError) as error:  # a type that torch lacks; sparse; no memory
        raise OtherFormError from error
    return (arrays, facts), tensors
