"""Lists, numbers and tensors of a trainer's module that have changed since the training began.

``self.outputs.append(loss)`` in each step, and ``torch.stack(self.outputs)`` with ``self.outputs.clear()`` after the
last one, is what Lightning's pages show; others write ``self.total += loss.item()`` and set it back in a hook.
A run that is resumed in the epoch would have the rest of it only, and one that is resumed after the last step nothing
to stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mindx_elastic.capture.copying import copy_tree, tensors_in
from mindx_elastic.capture.nested import put_on
from mindx_elastic.core.events import logger
from mindx_elastic.guard.loops.epoch_tail import stored_size

__all__ = ["Gathered"]

_MOST_BYTES = 1 << 24
_MOST_ITEMS = 100_000
_LISTS = (list, deque)
_VALUES = frozenset((bool, int, float, torch.Tensor))

_Place = tuple[str, str | int | None]
"""The attribute, and of a dict of lists the key."""


class _Copied:
    """Copies of the items of a list, each made once: a list only grows, as a rule."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.copies: list[Any] = []
        self.num_bytes = 0

    def follow(self, items: Sequence[Any]) -> bool:
        """Returns whether a checkpoint can hold it."""
        known = len(self.items)
        if known > len(items) or any(old is not new for old, new in zip(self.items, items, strict=False)):
            self.items, self.copies, self.num_bytes, known = [], [], 0, 0
        for item in list(items)[known:]:
            size = stored_size(item)
            self.num_bytes += size or 0
            if size is None or self.num_bytes > _MOST_BYTES or len(self.items) >= _MOST_ITEMS:
                return False
            self.items.append(item)
            self.copies.append(copy_tree(item))
        return True


class Gathered:
    """What the lists, numbers and tensors of `owner` are that have changed since this was made. What has not is a
    setting of the program's lines."""

    def __init__(self, owner: Any, but: object) -> None:
        """`but`: an object whose attributes are the library's."""
        self._owner, self._left_out = owner, {*vars(but)}
        self._begun = {place: list(items) for place, items in self._lists()}
        self._first = {name: _look(value) for name, value in self._values()}
        self._moved: set[str] = set()
        self._copied: dict[_Place, _Copied] = {}
        self._too_much: set[_Place] = set()

    def state(self) -> list[dict[str, Any]]:
        """The state, which shares no memory with them."""
        found, before, self._copied = [], self._copied, {}
        for place, items in self._lists():
            if place in self._too_much or _are_same(self._begun.get(place, []), items):
                continue
            copied = self._copied[place] = before.get(place) or _Copied()
            if not copied.follow(items):
                self._tell(place)
                continue
            found.append(_entry(place, list(copied.copies)))
        for name, value in self._values():
            if name not in self._moved and self._first.setdefault(name, _look(value)) != _look(value):
                self._moved.add(name)
            if name in self._moved and stored_size(value) is not None:
                found.append({**_entry((name, None), [copy_tree(value)]), "is_sum": True})
        return found

    def load(self, state: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """`device`: where tensors go that were on an accelerator."""
        for each in state:
            items = copy_tree(each["items"])
            if any(kind != "cpu" for kind in each["device"]):
                items = put_on(items, str(device))
            owner, attribute, key = self._owner, each["attribute"], each["key"]
            if each.get("is_sum"):
                self._moved.add(attribute)
                setattr(owner, attribute, items[0])
                continue
            now = vars(owner).get(attribute)
            if key is not None and isinstance(now, dict):
                now.setdefault(key, [])
                now = now[key]
            if type(now) in _LISTS:
                now.clear()
                now.extend(items)
            elif key is None:
                setattr(owner, attribute, items)

    def _values(self) -> list[tuple[str, Any]]:
        held = vars(self._owner).items()
        return [(name, value) for name, value in held if type(value) in _VALUES and name not in self._left_out]

    def _lists(self) -> Iterator[tuple[_Place, Any]]:
        for name, value in list(vars(self._owner).items()):
            if name in self._left_out:
                continue
            if type(value) in _LISTS:
                yield (name, None), value
            elif isinstance(value, dict):
                for key, inner in value.items():
                    if type(inner) in _LISTS and type(key) in (str, int):
                        yield (name, key), inner

    def _tell(self, place: _Place) -> None:
        self._too_much.add(place)
        kind, (attribute, key) = type(self._owner).__name__, place
        name = f"{kind}.{attribute}" if key is None else f"{kind}.{attribute}[{key!r}]"
        logger.warning(
            "%s gathers more than %d MiB or %d items, or what a checkpoint cannot hold: an epoch that is resumed in "
            "its middle has the rest of it only. Gather sums, or use a torchmetrics metric",
            name, _MOST_BYTES >> 20, _MOST_ITEMS,
        )  # fmt: skip


def _entry(place: _Place, items: list[Any]) -> dict[str, Any]:
    devices = {each.device.type for _, each in tensors_in(items[-1:])}
    return {"attribute": place[0], "key": place[1], "items": items, "device": sorted(devices)}


def _look(value: Any) -> object:
    """Equal as long as the value is the same."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    return type(value), repr(value)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
