"""Keeps what a program sets on the data set of a loader: ``dataset.mosaic = False`` in the last epochs, the level of a
curriculum, the strength of an augmentation.

The line that sets it runs once (``if epoch == 270:``), so a resumed run, which does not come by it again, would train
on other samples. Kept are attributes that are plain values: of the data set, of what hangs on it (its transforms), of
the collate function's object, of samplers that are not torch's, and what programs set on the loader and on torch's
samplers (`_OF_LOADER`, `_ORDER`); of samplers also arrays and tensors. They count as set by the program when they are
others than at the guard's entry, unless one has changed while a batch was made in this process, or an iteration was
opened (``self.calls += 1`` in ``__getitem__``): that is the data set's own, and may belong to what no file has. What
a sampler counts is kept: a resumed epoch begins with its value of the epoch's begin, and has that of the boundary then.

What cannot be put back, the comparison of the resumed step with the stopped process shows: its batch is another one. So
it is with objects that the program exchanges (``dataset.transform = strong``), and with what it sets while workers
have their copy already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from mindx_elastic.capture.copying import copy_tree, same_tree
from mindx_elastic.capture.values import put_back
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import asked, attributes_of, has_attributes, items_of, table_of
from mindx_elastic.core.printable import listed
from mindx_elastic.data.sampler import ResumableBatchSampler
from mindx_elastic.guard.checks.program_variables import is_of_library

__all__ = ["DataSettings"]

_DEPTH, _MOST_NODES, _MOST_ITEMS = 6, 256, 64
_MOST_OF_SAMPLER = 1 << 16
"""The most of the lists, arrays and tensors of a sampler, which say for each sample whether and how often it comes."""
_MOST_NAMED = 4
_OTHER = object()
_ORDER = ("indices", "num_samples", "replacement", "sampler", "seed", "weights")
"""What programs set on samplers of torch's."""
_OF_LOADER = ("batch_size", "collate_fn", "num_workers", "prefetch_factor", "worker_init_fn")
_of_loader = itemgetter(*_OF_LOADER)
_HOLD_NOTHING = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, DataLoader)
_SCALARS = frozenset((type(None), bool, int, float, str))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_CHANGE_IN_PLACE = (list, tuple, set, dict, torch.Tensor, np.ndarray)
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
        self._tells = False  # what is put back
        self._tables = {path: table for path, part in self.parts.items() if type(table := table_of(part)) is dict}
        # Of a loader of a library's class a few of its many attributes.
        few = [p for p, t in self._tables.items() if set(_OF_LOADER) <= t.keys() and is_of_library(type(self.parts[p]))]
        ours = [p for p, part in self.parts.items() if type(part) is ResumableBatchSampler]
        self._all = [table for path, table in self._tables.items() if path not in (*few, *ours)]
        self._few = [self._tables[path] for path in few]
        self._made: set[_Key] = set()
        """What has changed while a sample was made."""
        self._loaded: Mapping[str, Any] | None = None
        self._epoch_loaded, self._goes_on = 0, False
        self._start: Mapping[_Key, Any] = {}
        self._begun: Mapping[_Key, Any] = {}
        """Settings of samplers, as the iteration began."""
        self._look()
        self._start = self._now
        self._make_state()

    def begin_again(self) -> None:
        """The guard is entered a second time, and the program may have set other values since."""
        self._loaded, self._tells = None, True
        self._look()

    def reset(self) -> None:
        """As at the guard's first entry."""
        self._loaded, self._tells = None, False
        self._put({key: value for key, value in self._start.items() if key not in self._made})

    def kept(self) -> Iterator[tuple[object, str]]:
        """Objects, and the names of their attributes that a checkpoint has once they are other than at the entry."""
        return ((self.parts[path], name) for path, name in self._now if (path, name) not in self._made)

    # --- a boundary ---

    def state(self) -> dict[str, Any] | None:
        """What to save, not to be changed; None: nothing is set. At each boundary."""
        values = [*chain.from_iterable(map(dict.values, self._all))]  # as `_ids`, without the call
        for table in self._few:
            values += _of_loader(table)
        if [*map(id, values)] != self._seen_ids or (self._in_place and self._are_other_contents()):
            self._look()
        return self._state

    def load(self, state: Any, epoch: Any) -> None:
        """`state`: as `state` has given it; None: there was nothing. `epoch`: the loader's, at that boundary."""
        tells, before = self._tells, self._now
        self.reset()
        if isinstance(state, Mapping):
            now = _flat(state.get("now"))
            self._put(now)
            self._loaded, self._epoch_loaded = state, epoch
            if gone := sorted(f"{path}.{name}" for path, name in now if path not in self.parts):
                logger.warning(
                    "the training had set %s, and there is no such object now. Use the data set of that run, or start "
                    "afresh",
                    listed(gone, _MOST_NAMED),
                )
        if tells:
            self._tell_of_other_values(before)

    def _tell_of_other_values(self, before: Mapping[_Key, Any]) -> None:
        now = self._now
        if changed := [".".join(key) for key in now if not same_tree(before.get(key, now[key]), now[key])]:
            logger.warning(
                "%s: put back as at the last boundary, for it was changed before the guard was entered again. To "
                "change it from here on, do it inside the loop",
                listed(changed, _MOST_NAMED),
            )

    def _ids(self) -> list[int]:
        values = [*chain.from_iterable(map(dict.values, self._all))]
        for table in self._few:
            values += _of_loader(table)
        return [*map(id, values)]

    def _see(self) -> None:
        self._seen_ids = self._ids()
        self._seen = {path: table.copy() for path, table in self._tables.items()}  # so that no `id` comes again

    def _look(self) -> None:
        """Find what the program has set."""
        self._see()
        self._now = {
            (path, name): value
            for path, table in self._tables.items()
            for name, held in _settable(self.parts[path]).items()
            if name in table and (value := _plain(held, _most_of(path))) is not _OTHER
        }
        self._in_place = [
            (path, name, value) for (path, name), value in self._now.items() if type(value) in _CHANGE_IN_PLACE
        ]
        self._make_state()

    def _make_state(self) -> None:
        start, own = self._start, {key: value for key, value in self._now.items() if key not in self._made}
        now = {key: value for key, value in own.items() if not same_tree(start.get(key, _OTHER), value)}
        begun = {key: each for key, each in self._begun.items() if key in own and not same_tree(each, own[key])}
        found = {name: _by_path(values) for name, values in (("now", now), ("begun", begun)) if values}
        self._state: dict[str, Any] | None = {"num_ranks": self._num_ranks, **found} if found else None

    def _are_other_contents(self) -> bool:
        for path, name, value in self._in_place:
            held = self._tables[path].get(name)
            if type(value) is list and len(value) > _MOST_ITEMS:  # to compare them all would take too long
                if type(held) is list and len(held) != len(value):
                    return True
            elif not same_tree(_plain(held, _most_of(path)), value):
                return True
        return False

    # --- an iteration ---

    def at_begin(self, epoch: int) -> None:
        """An iteration of that epoch begins."""
        loaded = self._loaded
        if loaded is not None and epoch == self._epoch_loaded and loaded.get("num_ranks") == self._num_ranks:
            # The head of the epoch has run a second time: what it has done to them is undone. On another rank, or with
            # more of them, what it sets (this rank's shard) is right.
            self._put({**_flat(loaded.get("now")), **_flat(loaded.get("begun"))})
            self._goes_on = True
        self._look()
        self._begun = {key: value for key, value in self._now.items() if _is_of_sampler(key[0])}
        self._make_state()

    def begin_making(self) -> None:
        """Code that makes samples may run from here on, up to `end_making`."""
        if self._ids() != self._seen_ids:
            self._look()

    def end_making(self) -> None:
        """What has changed since is the data set's own affair, but for what a sampler counts."""
        if self._ids() == self._seen_ids:
            return
        before = self._seen
        self._see()
        changed = {
            (path, name)
            for path, held in self._seen.items()
            for name, value in held.items()
            if before[path].get(name, _OTHER) is not value
        }
        self._made |= {key for key in changed if not _is_of_sampler(key[0])}
        if changed <= self._made:
            self._make_state()
        else:
            self._look()

    def at_opened(self) -> None:
        """Its workers are there, and its sampler has skipped what was used."""
        self.end_making()
        loaded, self._loaded = self._loaded, None
        if self._goes_on:
            self._goes_on = False
            self._put({key: value for key, value in _flat(loaded and loaded.get("now")).items() if key in self._begun})

    def _put(self, values: Mapping[_Key, Any]) -> None:
        for (path, name), value in values.items():
            table = self._tables.get(path)
            if table is None or same_tree(_plain(table.get(name, _OTHER), _most_of(path)), value):
                continue  # a range stays one
            if _plain(value, _MOST_OF_SAMPLER) is not _OTHER:
                table[name] = put_back(table.get(name), value, name)
        self._look()


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


def _is_of_sampler(path: str) -> bool:
    return path.startswith(("sampler", "batch_sampler"))


def _plain(value: Any, most: int, depth: int = 0) -> Any:
    """A copy of a plain value, or of a container of at most so many, for a sampler also of an array or tensor of them;
    `_OTHER`: it is none."""
    kind = type(value)
    if type(kind) is type and (kind in _SCALARS or (issubclass(kind, np.generic) and kind is not np.void)):
        return value
    if kind is torch.Tensor or kind is np.ndarray:
        is_kept = most > _MOST_ITEMS and (value.numel() if kind is torch.Tensor else value.size) <= most
        return copy_tree(value) if is_kept else _OTHER
    if kind is range and len(value) <= most:
        return list(value)
    if type(kind) is not type or depth > _DEPTH or kind not in _CONTAINERS or len(value) > most:
        return _OTHER
    items = value.copy() if kind in (list, set, dict) else value  # another thread may have it
    found = [_plain(one, _MOST_ITEMS, depth + 1) for one in (items.values() if kind is dict else items)]
    if any(one is _OTHER for one in found) or (kind is dict and not {int, str}.issuperset(map(type, items))):
        return _OTHER
    return dict(zip(items, found, strict=True)) if kind is dict else kind(found)


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
