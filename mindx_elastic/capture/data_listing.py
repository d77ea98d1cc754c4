"""Digests of what a data set goes through: with other entries, or in another order, a resumed epoch would give samples
twice and others never.

That is so where files are listed as the file system gives them, or where an unseeded ``random_split`` divides. Looked
at are lists of texts (names of files), rows that are as many as the samples (of lists, tensors, arrays and tables) and
indices. No sample is made: that draws random numbers. The folder that all files are in may be another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler

from mindx_elastic.core.looks import attributes_of, length_of

__all__ = ["Listing", "difference", "listing_of"]

Listing = Mapping[str, tuple[int, str]]
"""By the list's path (``dataset.samples``): its length, and a digest of some items."""

_MOST_LISTS, _MOST_ITEMS, _MOST_PARTS, _MOST_VALUES = 8, 32, 4, 1024


def listing_of(dataset: object, parts: Mapping[str, Any]) -> Listing:
    """`parts`: the objects of a loader by their paths (``dataset``, ``dataset.dataset``, ``sampler``)."""
    found: dict[str, tuple[int, str]] = {}
    for path, values in _lists(dataset, parts):
        with suppress(Exception):  # of a library's list or table
            length, rows = len(values), values.iloc if _is_of_pandas(values) else values
            most = min(length, _MOST_ITEMS)
            numbers = sorted({number * (length - 1) // max(1, most - 1) for number in range(most)})
            names: list[str] = []
            if type(values) is torch.Tensor or issubclass(type(values), np.ndarray):
                words = [_word(values[numbers].reshape(len(numbers), -1)[:, :_MOST_VALUES], names)]
            else:
                words = [_word(rows[number], names) for number in numbers]
            if None not in words and len(found) < _MOST_LISTS:
                folder = os.path.commonprefix([each for each in names if "/" in each])  # noqa: RUF071 - up to a slash
                folder = folder.rpartition("/")[0]
                text = repr([words, [name.removeprefix(folder).lstrip("/") for name in names]])
                found[path] = length, xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
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


def _word(value: Any, names: list[str]) -> str | None:
    """None: it is of a kind that is not compared. Texts are added to `names`."""
    kind = type(value)
    if kind in (str, np.str_) or issubclass(kind, PurePath):
        names.append(str(value).partition("?")[0])  # without the signature of a URL
        return "text"
    if kind in (type(None), bool, int, float) or issubclass(kind, np.generic):
        return str(value)
    if kind in (list, tuple, dict) or _is_of_pandas(value):
        parts = value.values() if kind is dict else value
        words = [word for each in [*parts][:_MOST_PARTS] if (word := _word(each, names)) is not None]
        return ", ".join(words) or None
    most = _MOST_ITEMS * _MOST_VALUES
    if kind is torch.Tensor:
        value = value.detach().flatten()[:most].cpu().clone()  # numpy fixes the size of what it looks at
        value = value.view(torch.uint8).numpy() if value.dtype is torch.bfloat16 else value.numpy()
    if not issubclass(type(value), np.ndarray) or value.dtype.hasobject:
        return None
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value.flat[:most]).tobytes())
