"""Keeps what a program sets on the data set of a loader: ``dataset.mosaic = False`` in the last epochs, the level of a
curriculum, the strength of an augmentation.

The line that sets it runs once (``if epoch == 270:``), so a resumed run, which does not come by it again, would train
on other samples. Kept are attributes that are plain values: of the data set, of what hangs on it (its transforms), of
the collate function's object and of samplers that are not torch's. They count as set by the program when they are
others than at the guard's entry, unless one has changed while a batch was made in this process, or an iteration was
opened (``self.calls += 1`` in ``__getitem__``): that is the data set's own, and may belong to what no file has.

So do what the loader and torch's samplers have (`_OF_LOADER`, `_ORDER`).

There are two values of each. *Begun*: when the iteration began, which is what its workers have a copy of, and what a
sampler began with. *Now*: at the boundary. A resumed iteration begins with the first, and goes on with the second.

Objects that the program exchanges (``dataset.transform = strong``) cannot be put back. Their kinds are kept, and a
resumed iteration with others is told.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Sampler

from mindx_elastic.core.looks import asked, attributes_of, has_attributes, items_of, table_of, text_of
from mindx_elastic.core.printable import listed
from mindx_elastic.data.sampler import ResumableBatchSampler
from mindx_elastic.guard.checks.surroundings import is_of_library

__all__ = ["DataSettings", "parts_of"]

_DEPTH, _MOST_NODES, _MOST_ITEMS = 6, 256, 64
_FIRST, _EVERY = 3, 16
"""Boundaries at which all is looked at: in between, only what is known to be set by the program."""
_MOST_NAMED, _LONGEST = 4, 60
_OTHER = object()
_ORDER = ("indices", "num_samples", "sampler", "seed", "weights")
"""What programs set on samplers of torch's, beside the numbers that our loaders keep with their position."""
_OF_LOADER = ("batch_size", "collate_fn", "num_workers", "prefetch_factor", "worker_init_fn")
_AT_ONCE = ("batch_sampler", "batch_size")
"""Not as when the iteration began: its loader knows what each batch was asked for with (`data.position.Cursor`)."""
_HOLD_NOTHING = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, DataLoader)
_TEXTS = (bool, int, float, str, np.float64, np.str_)
_PLAIN = "a plain value"
_HOW_TO_EXCHANGE = (
    "Set it at the head of each epoch, from the epoch: `if epoch >= 10:` in place of `if epoch == 10:`. A plain value "
    "(a switch, a strength) is kept"
)
_Key: TypeAlias = "tuple[str, str]"
"""The path of an object, ``dataset.transform.transforms[1]``, and the name of its attribute."""
_ByPath: TypeAlias = "dict[str, dict[str, Any]]"


@dataclass
class _Look:
    """What is there at one time."""

    owners: dict[str, Any] = field(default_factory=dict)
    """The objects, by their paths."""
    values: dict[_Key, Any] = field(default_factory=dict)
    """Copies of the plain values."""
    kinds: dict[_Key, str] = field(default_factory=dict)
    """What else there is, in words."""


class DataSettings:
    """One per loader of a guard, for all its entries. Called where the loader is iterated."""

    def __init__(self, loader: Any, num_ranks: int) -> None:
        """Before the state is loaded."""
        self._loader, self._num_ranks = loader, num_ranks
        self._start = self._newest = _look(loader, {})
        self._own: set[_Key] = set()
        self._exchanged: set[_Key] = set()
        self._begun: Mapping[_Key, Any] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._epoch_loaded = 0
        self._made: set[_Key] = set()
        self._tables: list[tuple[str, dict[str, Any]]] = []  # where their attributes are, while those are watched
        self._before: list[tuple[tuple[str, ...], tuple[Any, ...]]] = []
        self._looks = self._left_after_look = 0
        self.boundaries_left = 0
        """Until all is looked at again; whoever passes one counts it."""
        self.is_used = False
        """Whether the program has set anything, as far as is known."""
        self.tell: Callable[[str, str], None] | None = None
        """Called with what a resumed run has otherwise, and a remedy."""

    def reset(self) -> None:
        """As at the guard's first entry."""
        self._loaded, self._looks, self.boundaries_left = None, 0, 0
        self._put({key: self._start.values[key] for key in self._own if key in self._start.values})

    @property
    def owners(self) -> list[Any]:
        """The data set and what hangs on it, as of the last look."""
        return list(self._newest.owners.values())

    def keeps(self, owner: object, name: str) -> bool:
        """Whether that attribute is one of those that are kept. Looks anew."""
        self.look()
        return any(self._start.owners.get(path) is owner and name == own for path, own in self._own)

    def look(self) -> bool:
        """Look for what the program has set. Returns whether there is something new."""
        before, self._newest = self._newest, _look(self._loader, self._start.owners)
        known = len(self._own), len(self._exchanged)
        for key, value in self._newest.values.items():
            if self._newest.owners[key[0]] is not self._start.owners.get(key[0]):
                continue  # of an object that the program has exchanged
            is_new = key not in self._own and key not in self._made
            if is_new and not _same(self._start.values.get(key, _OTHER), value):
                self._own.add(key)
        for key, kind in self._newest.kinds.items():
            was = before.kinds.get(key, repr(before.values[key])[:_LONGEST] if key in before.values else kind)
            if was != kind and key not in self._made and not key[1].startswith("_"):
                self._exchanged.add(key)
        self.is_used = bool(self._own or self._exchanged)
        return known != (len(self._own), len(self._exchanged))

    # --- a boundary ---

    def state(self) -> dict[str, Any] | None:
        """What to save; None: nothing. Called at each boundary at which there is something, or `boundaries_left` is
        negative."""
        if self.boundaries_left < 0:
            self._looks += 1
            self.boundaries_left = self._left_after_look = 0 if self._looks < _FIRST else _EVERY
            self.look()
        if not self.is_used:
            return None
        now = self._now()
        state: dict[str, Any] = {"num_ranks": self._num_ranks, "now": _by_path(now)}
        begun = {key: value for key in now if not _same(value := self._begun.get(key, _OTHER), now[key])}
        begun = {key: value for key, value in begun.items() if value is not _OTHER}
        if begun:
            state["begun"] = _by_path(begun)
        if self._exchanged:
            kinds = self._newest.kinds
            state["kinds"] = _by_path({key: kinds.get(key, _PLAIN) for key in self._exchanged})
        return state

    def load(self, state: Any, epoch: Any) -> None:
        """`state`: as `state` has given it; None: there was nothing. `epoch`: the loader's, at that boundary."""
        self.reset()
        if not isinstance(state, Mapping):
            return
        self._own |= set(_keys_of(state.get("now")))
        self._exchanged |= set(_keys_of(state.get("kinds")))
        self.is_used = bool(self._own or self._exchanged)
        self._put(_flat(state.get("now")))
        self._loaded, self._epoch_loaded = state, epoch

    def other_than(self, state: Any) -> list[str]:
        """Which attributes are others now than at the last boundary, at which `state` has given this."""
        then = _flat(state.get("now")) if isinstance(state, Mapping) else {}
        has_looked = self.boundaries_left == self._left_after_look  # else what is new may have been set before
        if has_looked:
            self.look()
        return sorted(
            f"{path}.{name}"
            for (path, name), value in self._now().items()
            if (has_looked or (path, name) in then) and not _same(value, then.get((path, name), _OTHER))
        )

    # --- an iteration ---

    def at_begin(self, epoch: int, *, goes_on_with_workers: bool) -> None:
        """An iteration of that epoch begins. `goes_on_with_workers`: those of the last one, with their copies."""
        self._before = []
        loaded = self._loaded
        if loaded is not None and epoch == self._epoch_loaded and self._is_own(loaded):
            # The head of the epoch has run a second time: what it has done to them is undone.
            self._put({**_flat(loaded.get("now")), **_flat(loaded.get("begun"))})
        self.look()
        if not goes_on_with_workers:
            owners, first = self._newest.owners, self._start.owners
            self._begun = {
                key: value
                for key, value in self._newest.values.items()
                if owners[key[0]] is first.get(key[0]) and key != _AT_ONCE
            }
        self._tables = [(path, table_of(owner) or {}) for path, owner in self._newest.owners.items()]
        self.begin_making()

    def begin_making(self) -> None:
        """Code that makes samples may run from here on, up to `end_making`."""
        self._before = [(tuple(table), tuple(table.values())) for _, table in self._tables]

    def end_making(self) -> None:
        """What has changed since is the data set's own affair."""
        for (path, table), (names, values) in zip(self._tables, self._before, strict=False):
            now = tuple(table.values())
            if len(now) != len(values) or not all(map(operator.is_, now, values)):
                before = dict(zip(names, values, strict=True))
                self._made |= {(path, name) for name, value in table.items() if before.get(name, _OTHER) is not value}
        self._before = []

    def at_opened(self, epoch: int) -> None:
        """Its workers are there, and its sampler has skipped what was used."""
        self.end_making()
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        gone = sorted(f"{path}.{name}" for path, name in _flat(loaded.get("now")) if path not in self._start.owners)
        if gone and self.tell is not None:
            self.tell(
                f"the training had set {listed(gone, _MOST_NAMED)}, and there is no such object now",
                "Use the data set of that run, or start afresh",
            )
        if epoch != self._epoch_loaded:
            return
        if self._is_own(loaded) and "begun" in loaded:
            self._put(_flat(loaded.get("now")))
        kinds = self._newest.kinds
        others = [
            f"{path}.{name} ({kinds.get((path, name), _PLAIN)}, was {kind})"
            for (path, name), kind in _flat(loaded.get("kinds")).items()
            if kinds.get((path, name), _PLAIN) != kind
        ]
        if others and self.tell is not None:
            self.tell(
                f"the resumed epoch has another {listed(sorted(others), _MOST_NAMED)} than at its boundary: the "
                "training had exchanged it, and no file has such objects",
                _HOW_TO_EXCHANGE,
            )

    # --- how ---

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Whether it is of this rank, and of as many ranks. Else what the head of the epoch sets (this rank's shard) is
        right, and what it does not set (a switch) has been put back before."""
        return state.get("num_ranks") == self._num_ranks

    def _now(self) -> dict[_Key, Any]:
        found: dict[_Key, Any] = {}
        for key in self._own:
            value = _plain(attributes_of(self._start.owners.get(key[0])).get(key[1], _OTHER))
            if value is not _OTHER:
                found[key] = value
        return found

    def _put(self, values: Mapping[_Key, Any]) -> None:
        for (path, name), value in values.items():
            owner = self._start.owners.get(path)
            if owner is not None:  # else the program's code has changed: `at_opened` tells it
                _set(owner, name, value)


def parts_of(loader: Any) -> Mapping[str, Any]:
    """The data set of a loader and what hangs on it, by paths: ``dataset``, ``dataset.dataset``, ``sampler``."""
    return _look(loader, {}).owners


def _look(loader: Any, first: Mapping[str, Any]) -> _Look:
    """`first`: the objects at the guard's entry, by their paths; empty: it is now."""
    look = _Look()
    known: set[int] = set()
    waiting: deque[tuple[str, Any, int]] = deque()
    others: list[tuple[_Key, Any]] = []

    def add(path: str, value: Any, depth: int) -> None:
        if type(value) is MethodType:
            value = value.__self__
        if depth > _DEPTH or id(value) in known or len(known) >= _MOST_NODES:
            return
        if not _may_hold(value) and value is not loader:
            return
        known.add(id(value))
        waiting.append((path, value, depth))

    for path, root in _roots(loader):
        add(path, root, 0)
    while waiting:
        path, owner, depth = waiting.popleft()
        look.owners[path] = owner
        for name, held in _settable(owner).items():
            value = _plain(held)
            if value is not _OTHER:
                look.values[path, name] = value
                continue
            others.append(((path, name), held))
            for suffix, child in _items(held):
                add(f"{path}.{name}{suffix}", child, depth + 1)
    paths = {id(owner): path for path, owner in (first or look.owners).items()}

    def words_of(place: str, value: Any) -> str:
        """An object of the first ones by its path, where that is another one; a new object with its values."""
        name, path = type(value).__name__, paths.get(id(value))
        if path is not None:
            return name if path == place else f"{name} of {path}"
        if not _may_hold(value):
            return name
        values = ", ".join(f"{n}={v!r}" for n, v in attributes_of(value).items() if _plain(v) is not _OTHER)
        return f"{name}({values})"[:_LONGEST]

    for (path, name), held in others:
        if (kind := _kind(held, f"{path}.{name}", words_of)) is not None:
            look.kinds[path, name] = kind
    return look


def _roots(loader: Any) -> Iterator[tuple[str, Any]]:
    for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
        value = asked(loader, name)
        if value is not None:
            yield name, value
    if isinstance(loader, DataLoader):
        yield "loader", loader


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
    if issubclass(type(owner), Sampler) and is_of_library(type(owner)):
        return {} if isinstance(owner, ResumableBatchSampler) else {n: v for n, v in found.items() if n in _ORDER}
    return found


def _may_hold(value: Any) -> bool:
    """Whether it is an object whose attributes a program may set."""
    kind = type(value)
    if issubclass(kind, _HOLD_NOTHING) or not has_attributes(value):
        return False
    return not _has_parameters(value) if issubclass(kind, nn.Module) else _is_followed(kind)


def _has_parameters(module: Any) -> bool:
    """A transform of torchvision's has none."""
    own = attributes_of(module)
    found = own.get("_parameters", {}).values(), own.get("_modules", {}).values()
    return any(each is not None for each in found[0]) or any(map(_has_parameters, found[1]))


def _is_followed(kind: type) -> bool:
    return kind.__module__.startswith(("torch.utils.data.", "torchvision.")) or not is_of_library(kind)


def _items(held: Any) -> Iterator[tuple[str, Any]]:
    """The objects in a small container; else itself."""
    if issubclass(type(held), (list, tuple, dict)):
        for key, one in items_of(held, _MOST_ITEMS) or ():
            yield f"[{key!r}]" if type(key) in (int, str) else "[...]", one
    else:
        yield "", held


def _plain(value: Any) -> Any:
    """A copy of a plain value or of a small container of such ones; `_OTHER`: it is none."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str) or (issubclass(kind, np.generic) and kind is not np.void):
        return value
    if kind in (list, tuple, set, frozenset) and len(value) <= _MOST_ITEMS:
        found = [_plain(one) for one in value.copy()] if kind in (list, set) else [*map(_plain, value)]
        return _OTHER if any(one is _OTHER for one in found) else kind(found)
    if kind is dict and len(value) <= _MOST_ITEMS:
        pairs = {key: _plain(one) for key, one in value.copy().items()}  # another thread may have it
        is_plain = all(type(key) in (int, str) and one is not _OTHER for key, one in pairs.items())
        return pairs if is_plain else _OTHER
    return _OTHER


def _kind(held: Any, place: str, words_of: Callable[[str, Any], str]) -> str | None:
    """In words, what a program may exchange: a function, an object that is called, a list; None for other things."""
    kind = type(held)
    if kind is MethodType:
        held, kind = held.__func__, type(held.__func__)
    if kind is FunctionType:
        return f"{held.__qualname__}, line {held.__code__.co_firstlineno}"
    if issubclass(kind, (list, tuple)):
        base: Any = list if issubclass(kind, list) else tuple
        if (length := base.__len__(held)) <= _MOST_ITEMS:
            return f"[{', '.join(words_of(f'{place}[{number}]', one) for number, one in items_of(held) or ())}]"
        parts = slice(None, _MOST_ITEMS), slice(-_MOST_ITEMS, None)
        ends = [one for part in parts for one in base.__getitem__(held, part)]
        if not all(type(one) in _TEXTS for one in ends):
            return None
        return f"{length} values, {xxhash.xxh3_64_hexdigest(repr(ends).encode('utf-8', 'surrogatepass'))[:8]}"
    if kind is torch.Tensor and place.endswith(".weights"):
        held = held.reshape(-1)
        held = [*held[:_MOST_ITEMS].tolist(), *held[-_MOST_ITEMS:].tolist()]
        return f"values {xxhash.xxh3_64_hexdigest(repr(held).encode())[:8]}"
    if issubclass(kind, Sampler) and place == "batch_sampler.sampler":
        return words_of(place, held)
    if callable(held) and not issubclass(kind, (type, torch.Tensor)) and _is_followed(kind):
        return words_of(place, held)
    return None


def _set(owner: Any, name: str, value: Any) -> None:
    value = _plain(value)  # of its own
    if value is _OTHER:
        return
    held = attributes_of(owner).get(name, _OTHER)
    if type(held) is list and type(value) is list:  # others may have the same one
        held[:] = value
    elif type(held) is dict and type(value) is dict:
        held.clear()
        held.update(value)
    elif type(table := table_of(owner)) is dict and (name in table or held is _OTHER):
        table[name] = value
    else:
        object.__setattr__(owner, name, value)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and text_of(one) == text_of(other))


def _by_path(values: Mapping[_Key, Any]) -> _ByPath:
    found: _ByPath = {}
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


def _keys_of(by_path: Any) -> Iterable[_Key]:
    return _flat(by_path).keys()
