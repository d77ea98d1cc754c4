"""Keeps what a program sets on the data set of a loader: ``dataset.mosaic = False`` in the last epochs, the level of a
curriculum, the strength of an augmentation.

The line that sets it runs once (``if epoch == 270:``), so a resumed run, which does not come by it again, would train
on other samples. Kept are attributes that are plain values: of the data set, of what hangs on it (its transforms), of
the collate function's object and of samplers that are not torch's; of samplers also arrays and tensors. They count as
set by the program when they are others than at the guard's entry, unless one has changed while a batch was made in this
process, or an iteration was opened (``self.calls += 1`` in ``__getitem__``): that is the data set's own, and may belong
to what no file has. A sampler's own (it counts its epochs in ``__iter__``) is kept: a resumed iteration is made from
its begin.

So do what the loader and torch's samplers have (`_OF_LOADER`, `_ORDER`).

There are two values of each. *Begun*: when the iteration began, which is what its workers have a copy of, and what a
sampler began with. *Now*: at the boundary. A resumed iteration begins with the first, and goes on with the second.

Objects that the program exchanges (``dataset.transform = strong``) cannot be put back: the comparison of the resumed
step with the stopped process shows that its batch is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from mindx_elastic.core.looks import (
    are_equal,
    asked,
    attributes_of,
    has_attributes,
    is_comparable,
    items_of,
    table_of,
    text_of,
)
from mindx_elastic.core.printable import listed
from mindx_elastic.data.sampler import ResumableBatchSampler
from mindx_elastic.guard.checks.surroundings import is_of_library

__all__ = ["DataSettings"]

_DEPTH, _MOST_NODES, _MOST_ITEMS = 6, 256, 64
_MOST_OF_SAMPLER = 1 << 16
"""Of the lists, arrays and tensors of a sampler, which say for each sample whether and how often it comes."""
_MOST_NAMED = 4
_OTHER = object()
_ORDER = ("indices", "num_samples", "replacement", "sampler", "seed", "weights")
"""What programs set on samplers of torch's, beside the numbers that our loaders keep with their position."""
_OF_LOADER = ("batch_size", "collate_fn", "num_workers", "prefetch_factor", "worker_init_fn")
_AT_ONCE = ("batch_sampler", "batch_size")
"""Not as when the iteration began: its loader knows what each batch was asked for with (`data.position.Cursor`)."""
_HOLD_NOTHING = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, DataLoader)
_SCALARS = frozenset((type(None), bool, int, float, str))
_Key: TypeAlias = "tuple[str, str]"
"""The path of an object, ``dataset.transform.transforms[1]``, and the name of its attribute."""


class DataSettings:
    """One per loader of a guard, for all its entries. Called where the loader is iterated, and at each boundary."""

    def __init__(self, loader: Any, num_ranks: int) -> None:
        """Before the state is loaded."""
        self._num_ranks = num_ranks
        self.parts = _parts_of(loader)
        """The data set of the loader and what hangs on it at the guard's first entry, by paths: ``dataset``,
        ``dataset.dataset``, ``sampler``."""
        self._tables = {path: table for path, part in self.parts.items() if type(table := table_of(part)) is dict}
        self._all = list(self._tables.values())
        self._has_slots = len(self._tables) < len(self.parts)  # where nothing shows that a value is another one
        self._start = self._values()
        self._now = dict(self._start)
        """The values at the last look."""
        self._own: set[_Key] = set()
        self._made: set[_Key] = set()
        self._begun: Mapping[_Key, Any] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._epoch_loaded = 0
        self._see()  # what the attributes hold
        self._contents: list[tuple[dict[str, Any], _Key, Any]] = []  # of what may change in place, at the last look
        self._state: dict[str, Any] | None = None
        self._is_stale = True
        """Something has changed since `_state` was made."""
        self.tell: Callable[[str, str], None] | None = None
        """Called with what a resumed run has otherwise, and a remedy."""

    def reset(self) -> None:
        """As at the guard's first entry."""
        self._loaded = None
        self._put({key: self._start[key] for key in self._own if key in self._start})

    # --- a boundary ---

    def state(self) -> dict[str, Any] | None:
        """What to save, not to be changed; None: nothing is set. At each boundary."""
        if [*map(id, chain.from_iterable(map(dict.values, self._all)))] != self._seen_ids or (
            self._has_slots or (self._contents and self._are_other_contents())
        ):
            self._look()
        if self._is_stale:
            self._state, self._is_stale = self._make_state(), False
        return self._state

    def _make_state(self) -> dict[str, Any] | None:
        if not self._own:
            return None
        now = {key: value for key in self._own if (value := self._now.get(key, _OTHER)) is not _OTHER}
        begun = {key: self._begun[key] for key in now.keys() & self._begun.keys()}
        begun = {key: value for key, value in begun.items() if not _same(value, now[key])}
        state: dict[str, Any] = {"num_ranks": self._num_ranks, "now": _by_path(now)}
        return {**state, "begun": _by_path(begun)} if begun else state

    def load(self, state: Any, epoch: Any) -> None:
        """`state`: as `state` has given it; None: there was nothing. `epoch`: the loader's, at that boundary."""
        self.reset()
        if not isinstance(state, Mapping):
            return
        now = _flat(state.get("now"))
        self._own |= now.keys()
        self._put(now)
        self._loaded, self._epoch_loaded = state, epoch

    def _look(self) -> None:
        """Find what the program has set."""
        self._see()
        self._is_stale = True
        values = self._now = self._values()
        for key in values.keys() - self._own - self._made:
            if not _same(self._start.get(key, _OTHER), values[key]):
                self._own.add(key)
        self._contents = [
            (table, (path, name), values[path, name] if (mark := _mark(held)) is None else mark)
            for path, table in self._tables.items()
            for name, held in table.items()
            if (path, name) in values and type(held) in (list, tuple, dict, set, torch.Tensor, np.ndarray)
        ]

    def _see(self) -> None:
        self._seen = {path: table.copy() for path, table in self._tables.items()}
        self._seen_ids = [*map(id, chain.from_iterable(map(dict.values, self._seen.values())))]

    # --- an iteration ---

    def at_begin(self, epoch: int, *, goes_on_with_workers: bool) -> None:
        """An iteration of that epoch begins. `goes_on_with_workers`: those of the last one, with their copies."""
        loaded = self._loaded
        if loaded is not None and epoch == self._epoch_loaded and self._is_own(loaded):
            # The head of the epoch has run a second time: what it has done to them is undone.
            self._put({**_flat(loaded.get("now")), **_flat(loaded.get("begun"))})
        self._look()
        begun = {key: value for key, value in self._now.items() if key != _AT_ONCE}
        if goes_on_with_workers:
            begun = {**self._begun, **{key: value for key, value in begun.items() if _is_of_sampler(key[0])}}
        self._begun = begun
        self.begin_making()

    def begin_making(self) -> None:
        """Code that makes samples may run from here on, up to `end_making`."""
        if [*map(id, chain.from_iterable(map(dict.values, self._all)))] != self._seen_ids:
            self._look()

    def end_making(self) -> None:
        """What has changed since is the data set's own affair. What a sampler counts is kept."""
        if [*map(id, chain.from_iterable(map(dict.values, self._all)))] == self._seen_ids:
            return
        before = self._seen
        self._see()
        for path, held in self._seen.items():
            made = {(path, name) for name, value in held.items() if before[path].get(name, _OTHER) is not value}
            if made and _is_of_sampler(path):
                settable = _settable(self.parts[path])
                self._own |= {key for key in made if key[1] in settable}
            else:
                self._made |= made
            self._now.update({key: _plain(held[key[1]], _most_of(path)) for key in made & self._own})
        self._is_stale = True

    def at_opened(self, epoch: int) -> None:
        """Its workers are there, and its sampler has skipped what was used."""
        self.end_making()
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        now = _flat(loaded.get("now"))
        gone = sorted(f"{path}.{name}" for path, name in now if path not in self.parts)
        if gone and self.tell is not None:
            self.tell(
                f"the training had set {listed(gone, _MOST_NAMED)}, and there is no such object now",
                "Use the data set of that run, or start afresh",
            )
        if epoch == self._epoch_loaded and self._is_own(loaded) and "begun" in loaded:
            self._put(now)

    # --- how ---

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Whether it is of this rank, and of as many ranks. Else what the head of the epoch sets (this rank's shard) is
        right, and what it does not set (a switch) has been put back before."""
        return state.get("num_ranks") == self._num_ranks

    def _are_other_contents(self) -> bool:
        for table, (path, name), seen in self._contents:
            held = table.get(name, _OTHER)
            if not _same(_plain(held, _most_of(path)) if (mark := _mark(held)) is None else mark, seen):
                return True
        return False

    def _values(self) -> dict[_Key, Any]:
        return {
            (path, name): value
            for path, part in self.parts.items()
            for name, held in _settable(part).items()
            if (value := held if type(held) in _SCALARS else _plain(held, _most_of(path))) is not _OTHER
        }

    def _put(self, values: Mapping[_Key, Any]) -> None:
        self._seen_ids = []  # what is put back is looked at again
        for (path, name), value in values.items():
            part = self.parts.get(path)
            if part is not None:  # else the program's code has changed: `at_opened` tells it
                _set(part, name, value)


def _parts_of(loader: Any) -> dict[str, Any]:
    """The objects whose attributes count, by paths."""
    parts: dict[str, Any] = {}
    roots = [(name, asked(loader, name), 0) for name in ("dataset", "collate_fn", "sampler", "batch_sampler")]
    waiting = deque((*roots, ("loader", loader, 0)) if isinstance(loader, DataLoader) else roots)
    known: set[int] = set()
    while waiting:
        path, value, depth = waiting.popleft()
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is MethodType:
            value = value.__self__
        if depth > _DEPTH or id(value) in known or len(known) >= _MOST_NODES:
            continue
        if not _may_hold(value) and value is not loader:
            continue
        known.add(id(value))
        parts[path] = value
        for name, held in _settable(value).items():
            waiting += [(f"{path}.{name}{suffix}", child, depth + 1) for suffix, child in _items(held)]
    return parts


def _settable(owner: Any) -> dict[str, Any]:
    """The attributes of an object that count."""
    found = attributes_of(owner)
    if issubclass(type(owner), DataLoader):
        is_own = not is_of_library(type(owner))
        inner = {"dataset", "sampler", "batch_sampler", *DataLoader.__annotations__}
        return {
            name: value
            for name, value in found.items()
            if name in _OF_LOADER or (is_own and not name.startswith("_") and name not in inner)
        }
    if issubclass(type(owner), ResumableBatchSampler):  # isinstance would ask the object
        return {}
    if issubclass(type(owner), Sampler) and type(owner).__module__.startswith("torch."):
        return {n: v for n, v in found.items() if n in _ORDER}
    return found


def _may_hold(value: Any) -> bool:
    """Whether it is an object whose attributes a program may set."""
    kind = type(value)
    if issubclass(kind, _HOLD_NOTHING) or not has_attributes(value):
        return False
    if issubclass(kind, nn.Module):
        return not _has_parameters(value)
    is_for_data = issubclass(kind, Sampler) or kind.__module__.startswith(("torch.utils.data.", "torchvision."))
    return is_for_data or not is_of_library(kind)


def _is_of_sampler(path: str) -> bool:
    return path.startswith(("sampler", "batch_sampler"))


def _has_parameters(module: Any) -> bool:
    """A transform of torchvision's has none."""
    own = attributes_of(module)
    found = own.get("_parameters", {}).values(), own.get("_modules", {}).values()
    return any(each is not None for each in found[0]) or any(map(_has_parameters, found[1]))


def _items(held: Any) -> Iterator[tuple[str, Any]]:
    """The objects in a small container; else itself."""
    if type(held) in _SCALARS or not issubclass(type(held), (list, tuple, dict)):
        yield "", held
        return
    for key, one in items_of(held, _MOST_ITEMS) or ():
        yield f"[{key!r}]" if type(key) in (int, str) else "[...]", one


def _most_of(path: str) -> int:
    return _MOST_OF_SAMPLER if _is_of_sampler(path) else _MOST_ITEMS


def _mark(value: Any) -> int | None:
    """What shows of a tensor, or of a long list, that it is as it was; None: it is neither."""
    if type(value) is torch.Tensor and not value.is_inference():
        return value._version
    return len(value) if type(value) is list and len(value) > _MOST_ITEMS else None


def _plain(value: Any, most: int = _MOST_ITEMS) -> Any:
    """A copy of a plain value, or of a container of at most so many, for a sampler also of an array or tensor of them;
    `_OTHER`: it is none."""
    kind = type(value)
    if type(kind) is not type and not is_comparable(kind):
        return _OTHER
    if kind in (torch.Tensor, np.ndarray):
        is_kept = most > _MOST_ITEMS and (value.numel() if kind is torch.Tensor else value.size) <= most
        return (value.detach().clone() if kind is torch.Tensor else value.copy()) if is_kept else _OTHER
    if kind is range and len(value) <= most:
        return list(value)
    if kind in _SCALARS or (issubclass(kind, np.generic) and kind is not np.void):
        return value
    if kind in (list, tuple, set, frozenset) and len(value) <= most:
        items = value.copy() if kind in (list, set) else value  # another thread may have it
        found = [one if type(type(one)) is type and type(one) in _SCALARS else _plain(one) for one in items]
        return _OTHER if any(one is _OTHER for one in found) else kind(found)
    if kind is dict and len(value) <= _MOST_ITEMS:
        pairs = {key: _plain(one) for key, one in value.copy().items()}
        is_plain = all(type(key) in (int, str) and one is not _OTHER for key, one in pairs.items())
        return pairs if is_plain else _OTHER
    return _OTHER


def _set(owner: Any, name: str, value: Any) -> None:
    value = _plain(value, _MOST_OF_SAMPLER)  # of its own
    if value is _OTHER:
        return
    held = attributes_of(owner).get(name, _OTHER)
    if type(held) is type(value) is torch.Tensor and (held.shape, held.dtype) == (value.shape, value.dtype):
        held.copy_(value)
    elif type(held) is list and type(value) is list:  # others may have the same one
        held[:] = value
    elif type(held) is dict and type(value) is dict:
        held.clear()
        held.update(value)
    elif type(table := table_of(owner)) is dict and (name in table or held is _OTHER):
        table[name] = value
    else:
        object.__setattr__(owner, name, value)


def _same(one: Any, other: Any) -> bool:
    kind = type(one)
    if kind is not type(other) or kind is torch.Tensor:
        return kind is type(other) and torch.equal(one, other)
    if kind is np.ndarray or (kind is list and len(one) > _MOST_ITEMS):
        return are_equal(one, other)
    return one is other or text_of(one) == text_of(other)


def _by_path(values: Mapping[_Key, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (path, name), value in sorted(values.items(), key=lambda item: item[0]):
        found.setdefault(path, {})[name] = value
    return found


def _flat(by_path: Any) -> dict[_Key, Any]:
    if not isinstance(by_path, Mapping):
        return {}
    return {
        (path, name): value
        for path, values in by_path.items()
        if isinstance(path, str) and isinstance(values, Mapping)
        for name, value in values.items()
        if isinstance(name, str)
    }
