"""Digests of what a data set goes through: with other entries, or in another order, a resumed epoch would give samples
twice and others never.

That is so where files are listed as the file system gives them, or where an unseeded ``random_split`` divides. Looked
at are lists of texts (names of files, also with their labels) and indices. What lies in memory is seen by the
comparison of the first resumed step. No sample is made: that draws random numbers. The folder that all files are in may
be another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

from mindx_elastic.core.looks import attributes_of

__all__ = ["Listing", "difference", "listing_of"]

Listing = Mapping[str, tuple[int, str]]
"""By the list's path (``dataset.samples``): its length, and a digest of some items."""

_MOST_LISTS, _MOST_ITEMS = 8, 32
_LISTS, _LABELS = (list, tuple, range, np.ndarray, torch.Tensor), (bool, int, float, type(None))


def listing_of(parts: Mapping[str, Any]) -> Listing:
    """`parts`: the objects of a loader by their paths (``dataset``, ``dataset.dataset``, ``sampler``)."""
    found: dict[str, tuple[int, str]] = {}
    for path, owner in parts.items():
        for name, values in attributes_of(owner).items() if path.startswith(("dataset", "sampler")) else ():
            if type(values) in _LISTS and len(found) < _MOST_LISTS and (words := _words(values, name == "indices")):
                found[f"{path}.{name}"] = len(values), words
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


def _words(values: Any, are_indices: bool) -> str:
    """Empty: it is none of these lists."""
    if getattr(values, "ndim", 1) != 1 or not (length := len(values)):
        return ""
    most = min(length, _MOST_ITEMS)
    picked = [values[number * (length - 1) // max(1, most - 1)] for number in range(most)]
    if are_indices:
        return _digest([int(each) for each in picked])
    rows = [each if type(each) is tuple else (each,) for each in picked]
    if not all(row and issubclass(type(row[0]), (str, PurePath)) for row in rows):
        return ""
    names = [str(row[0]).partition("?")[0] for row in rows]  # without the signature of a URL
    folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - up to a slash
    return _digest([(n.removeprefix(folder), *filter(_is_label, row[1:])) for n, row in zip(names, rows, strict=True)])


def _is_label(value: object) -> bool:
    return type(value) in _LABELS


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(content).encode("utf-8", "surrogatepass"))
