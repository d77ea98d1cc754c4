"""Some of what a data set goes through, by number: with other entries, or in another order, a resumed epoch would give
samples twice and others never.

That is so where files are listed as the file system gives them, or where an unseeded ``random_split`` divides. Looked
at are lists of texts (names of files), rows that are as many as the samples (of lists, tensors, arrays and tables) and
indices. No sample is made: that draws random numbers. Folders that all names begin with do not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler

from mindx_elastic.core.looks import attributes_of, length_of

__all__ = ["Listing", "first_difference", "listing_of"]

Listing = Mapping[str, Mapping[str, Any]]
"""By the list's path (``dataset.samples``): its ``length``, and ``items``: the texts of some, see `_numbers`."""

_MOST_LISTS, _MOST_ITEMS, _MOST_PARTS, _MOST_VALUES, _LONGEST = 8, 32, 4, 1024, 60


def listing_of(dataset: object, parts: Mapping[str, Any]) -> Listing:
    """`parts`: the objects of a loader by their paths (``dataset``, ``dataset.dataset``, ``sampler``)."""
    found: dict[str, Mapping[str, Any]] = {}
    for path, values in _lists(dataset, parts):
        with suppress(Exception):  # of a library's list or table
            length, is_table = len(values), _is_of_pandas(values)
            rows = values.iloc if is_table else values
            several = [rows[number] for number in _numbers(length)]
            if type(values) is torch.Tensor or issubclass(type(values), np.ndarray):
                items = _words_of([None if word is None else [word] for word in _words(several)])
            else:
                items = _words_of([_parts(each, is_of_table=is_table) for each in several])
            if items and len(found) < _MOST_LISTS:
                found[path] = {"length": length, "items": items}
    return found


def first_difference(now: object, begun: object) -> str:
    """In words; empty: none. Both as of `listing_of`."""
    if not isinstance(now, Mapping) or not isinstance(begun, Mapping):
        return ""
    for path, ours in now.items():
        theirs = begun.get(path)
        if not isinstance(theirs, Mapping) or ours == theirs:
            continue
        if ours["length"] != theirs.get("length"):
            return f"{path} has {ours['length']} items and had {theirs.get('length')}"
        for number, item, other in zip(_numbers(ours["length"]), ours["items"], theirs.get("items", ()), strict=False):
            if item != (other[1] if isinstance(other, list) else other):  # [number, text] in older files
                return f"item {number} of {path} is now {item} and was {other}"
    return ""


def _lists(dataset: object, parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if _is_list(dataset):
        yield "dataset", dataset
    for path, owner in parts.items():
        is_sampler = issubclass(type(owner), Sampler)
        if not is_sampler and not path.startswith("dataset"):
            continue
        for name, value in attributes_of(owner).items():
            if is_sampler and name != "indices":
                continue
            rows = value if name == "tensors" and isinstance(value, tuple) else (value,)
            for number, each in enumerate(rows):
                if _is_list(each) and (is_sampler or _is_text(each) or length_of(each) == length_of(owner)):
                    yield f"{path}.{name}" + (f"[{number}]" if each is not value else ""), each


def _is_list(value: Any) -> bool:
    if type(value) in (list, tuple, range):
        return bool(value)
    if issubclass(type(value), np.ndarray) or type(value) is torch.Tensor:
        return value.ndim > 0 and len(value) > 0
    return _is_of_pandas(value)


def _is_of_pandas(value: object) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series")


def _is_text(value: Any) -> bool:
    return type(value) in (list, tuple) and issubclass(type(value[0]), (str, PurePath))


def _numbers(length: int) -> list[int]:
    most = min(length, _MOST_ITEMS)
    return sorted({number * (length - 1) // max(1, most - 1) for number in range(most)})


def _parts(item: Any, *, is_of_table: bool) -> list[str] | None:
    """The texts of one item; None: it is of a kind that is not compared."""
    if type(item) is dict:
        item = list(item.values())
    several = item if type(item) in (list, tuple) else list(item) if is_of_table and _is_of_pandas(item) else [item]
    return [word for word in _words(several[:_MOST_PARTS]) if word is not None] or None


def _words(values: Sequence[Any]) -> list[str | None]:
    """One for each, in one call: there are many."""
    found: list[str | None] = []
    for each in values:
        value, kind = each, type(each)
        if kind in (str, np.str_) or issubclass(kind, PurePath):
            found.append(str(value).partition("?")[0])  # a signature of a URL
            continue
        if kind in (type(None), bool, int, float) or issubclass(kind, np.generic):
            found.append(str(value))
            continue
        if kind is torch.Tensor:
            value = value.detach().flatten()[:_MOST_VALUES].cpu().clone()  # numpy fixes the size of what it looks at
            value = value.view(torch.uint8).numpy() if value.dtype is torch.bfloat16 else value.numpy()
        if not issubclass(type(value), np.ndarray) or value.dtype.hasobject:
            found.append(None)
            continue
        row = np.ascontiguousarray(value.flat[:_MOST_VALUES])
        found.append(str(row[0]) if row.size == 1 else f"values {xxhash.xxh3_64_hexdigest(row.tobytes())[:8]}")
    return found


def _words_of(items: Sequence[list[str] | None]) -> list[str]:
    """Without the folders that all names are in; empty: they are of a kind that is not compared."""
    if not all(items):
        return []
    for place in range(_MOST_PARTS):
        column = [parts for parts in items if parts is not None and len(parts) > place]
        names = [parts[place] for parts in column]
        if names and all("/" in name for name in names):
            folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - up to a slash
            for parts in column:
                parts[place] = parts[place].removeprefix(folder).lstrip("/")
    texts = [", ".join(parts or ()) for parts in items]
    return [text if len(text) <= _LONGEST else _short(text) for text in texts]


def _short(text: str) -> str:
    return f"...{text[-_LONGEST:]} ({xxhash.xxh3_64_hexdigest(text.encode('utf-8', 'surrogatepass'))[:4]})"
