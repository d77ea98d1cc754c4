"""Digests of what a data set goes through: with other entries, or in another order, a resumed epoch would give samples
twice and others never.

That is so where files are listed as the file system gives them, where an unseeded ``random_split`` divides, or rows in
memory are shuffled. Looked at are lists of texts (names of files, also with their labels), rows that are as many as the
samples (of lists, tensors, arrays and tables) and indices: after a death or an exception no step is compared that would
show another order. No sample is made: that draws random numbers. The folder that all files are in may be another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

from mindx_elastic.core.looks import attributes_of, length_of

__all__ = ["Listing", "difference", "listing_of"]

Listing = Mapping[str, tuple[int, str]]
"""By the list's path (``dataset.samples``): its length, and a digest of some items."""

_MOST_LISTS, _MOST_ITEMS, _MOST_PARTS, _MOST_VALUES = 8, 32, 4, 1024
_LISTS, _LABELS = (list, tuple, range, np.ndarray, torch.Tensor), (bool, int, float, type(None))


def listing_of(parts: Mapping[str, Any]) -> Listing:
    """`parts`: the objects of a loader by their paths (``dataset``, ``dataset.dataset``, ``sampler``)."""
    found: dict[str, tuple[int, str]] = {}
    for path, owner in parts.items():
        for name, held in attributes_of(owner).items() if path.startswith(("dataset", "sampler")) else ():
            for number, values in enumerate(held if name == "tensors" and type(held) is tuple else (held,)):
                if len(found) < _MOST_LISTS and (type(values) in _LISTS or hasattr(type(values), "iloc")):
                    with suppress(Exception):  # of a library's table
                        if words := _words(values, name == "indices", length_of(owner)):
                            found[f"{path}.{name}" + f"[{number}]" * (values is not held)] = len(values), words
    return found


def difference(now: Listing, begun: Listing) -> str:
    """The difference in words; empty: none."""
    for path, ours in now.items():
        theirs = begun.get(path, ours)
        if ours[0] != theirs[0]:
            return f"{path} has {ours[0]} items and had {theirs[0]}"
        if ours != theirs:
            return f"{path} has other items, or has them in another order"
    return ""


def _words(values: Any, are_indices: bool, num_samples: int | None) -> str:
    """Empty: it is none of these lists."""
    if not getattr(values, "ndim", 1) or not (length := len(values)):
        return ""
    most, items = min(length, _MOST_ITEMS), getattr(values, "iloc", values)
    picked = [items[number * (length - 1) // max(1, most - 1)] for number in range(most)]
    if are_indices:
        return _digest([int(each) for each in picked])
    rows = [each if type(each) is tuple else (each,) for each in picked]
    if not all(row and issubclass(type(row[0]), (str, PurePath)) for row in rows):
        contents = [*map(_content, picked)] if length == num_samples else []
        return _digest(contents) if any(each is not None for each in contents) else ""
    names = [str(row[0]).partition("?")[0] for row in rows]  # without the signature of a URL
    folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - up to a slash
    return _digest([(n.removeprefix(folder), *filter(_is_label, row[1:])) for n, row in zip(names, rows, strict=True)])


def _content(row: Any) -> object:
    """A row in memory, as far as it is plain; None: it is not."""
    if type(row) is dict:
        row = [*row.values()]
    if type(row) in (list, tuple) or hasattr(type(row), "iloc"):
        found = [_content(each) for each in [*row][:_MOST_PARTS]]
        return found if any(each is not None for each in found) else None
    if issubclass(type(row), (str, PurePath)):
        return PurePath(str(row).partition("?")[0]).name
    if type(row) is torch.Tensor:
        # A copy: numpy fixes the size of what it looks at.
        row = row.detach().flatten()[:_MOST_VALUES].to("cpu", torch.float64, copy=True).numpy()
    if issubclass(type(row), (np.ndarray, np.generic)):
        values = np.asarray(row).flat[:_MOST_VALUES]
        return None if values.dtype.hasobject else xxhash.xxh3_64_hexdigest(values.tobytes())
    return row if _is_label(row) else None


def _is_label(value: object) -> bool:
    return type(value) in _LABELS


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(content).encode("utf-8", "surrogatepass"))
