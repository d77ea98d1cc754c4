"""What a header says of its tensors: type, shape and place of each, in the order of the file, and the text of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.flatten import MAX_DIMS

__all__ = [
    "SURROGATE",
    "TensorEntry",
    "entries_of_text",
    "entry_texts",
    "place_tensors",
]

_MOST_KEPT = 1 << 20  # characters: four such texts and what was read of them stay in memory
_TOO_LARGE = 1 << 62
SURROGATE = re.compile("[\ud800-\udfff]")


class TensorEntry(NamedTuple):
    """One tensor's place in the file."""

    name: str
    dtype: str
    """The safetensors type name, for example "F32"."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the data section."""
    end: int
    """One past the last byte."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        return BY_NAME[self.dtype]


def place_tensors(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """Place tensors (of types in `dtypes.NAMES`) into the data section, widest elements first, then as given."""
    kinds: dict[tuple[torch.dtype, torch.Size], tuple[str, tuple[int, ...], int]] = {}
    by_width: dict[int, list[tuple[str, tuple[str, tuple[int, ...], int]]]] = {}
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, tensor.shape
        kind = kinds.get((dtype, shape))
        if kind is None:
            # One object each: the garbage collector looks at every one.
            kind = kinds[dtype, shape] = NAMES[dtype], tuple(shape), shape.numel() * dtype.itemsize
        by_width.setdefault(dtype.itemsize, []).append((name, kind))
    entries: list[TensorEntry] = []
    start = 0
    for width in sorted(by_width, reverse=True):
        for name, (stored, sizes, nbytes) in by_width[width]:
            # As `TensorEntry(...)`, without a function of Python for each: there are thousands.
            entries.append(tuple.__new__(TensorEntry, (name, stored, sizes, start, start + nbytes)))
            start += nbytes
    return entries


def entry_texts(entries: Iterable[TensorEntry]) -> list[str]:
    """Each entry's JSON; a third of the time that a dict of dicts takes."""
    quoted = json.encoder.encode_basestring_ascii
    kinds: dict[tuple[str, tuple[int, ...]], str] = {}
    texts = []
    for name, dtype, shape, start, end in entries:
        kind = kinds.get((dtype, shape))
        if kind is None:
            kind = kinds[dtype, shape] = f'"dtype":"{dtype}","shape":{json.dumps(shape, separators=(",", ":"))}'
        texts.append(f'{quoted(name)}:{{{kind},"data_offsets":[{start},{end}]}}')
    return texts


def entries_of_text(text: str) -> dict[str, TensorEntry]:
    """The tensors of a header's text after its first value, in the order of the file. Raises ValueError and others
    where it is malformed.

    The files of thousands of ranks and steps differ in that first value, and say this alike: it is read once. Do not
    change what this gives."""
    text = text.rstrip(" ")  # of which there are as many as the other values leave room for
    return _known_entries(text) if len(text) <= _MOST_KEPT else _read(text)


def _read(text: str) -> dict[str, TensorEntry]:
    return _entries_of(json.loads("{" + text.removeprefix(",")))


_known_entries = lru_cache(maxsize=4)(_read)


def _entries_of(content: Mapping[str, Any]) -> dict[str, TensorEntry]:
    if SURROGATE.search("\n".join(content)):
        raise ValueError("a tensor's name has surrogates")
    numbers: list[Any] = []
    for value in content.values():
        numbers += value["data_offsets"]
        numbers += value["shape"]
    if not set(map(type, numbers)) <= {int}:
        raise ValueError("malformed shapes or offsets: they are no whole numbers")
    entries = []
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # of each type and shape, of which there are few
    for name, value in content.items():
        start, end = value["data_offsets"]
        shape, dtype = tuple(value["shape"]), value["dtype"]
        if not 0 <= start <= end < _TOO_LARGE:
            raise ValueError(f"tensor {name:.80}: malformed offsets")
        nbytes = sizes.get((dtype, shape))
        if nbytes is None:
            nbytes = sizes[dtype, shape] = _nbytes(name, dtype, shape)
        if end - start != nbytes:
            raise ValueError(f"tensor {name:.80}: {end - start} bytes do not fit its shape and type")
        entries.append(TensorEntry(name, dtype, shape, start, end))
    entries.sort(key=itemgetter(3, 4))  # start, end
    position = 0
    for entry in entries:
        if entry[3] != position:
            raise ValueError(f"tensor {entry.name} starts at {entry.start} instead of {position}: gap or overlap")
        position = entry[4]
    return {entry[0]: entry for entry in entries}


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor of this type and shape. Raises ValueError where there can be none."""
    if len(shape) > MAX_DIMS or not all(0 <= size < _TOO_LARGE for size in shape):
        raise ValueError(f"tensor {name:.80}: malformed shape; {MAX_DIMS} dimensions at most")
    if dtype not in BY_NAME:
        raise ValueError(f"tensor {name:.80}: unknown type {dtype!r:.80}")
    itemsize = BY_NAME[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize >= 1 << 63:  # its strides: torch cannot make it
        raise ValueError(f"tensor {name:.80}: its shape needs more bytes than a tensor can have")
    return math.prod(shape) * itemsize
