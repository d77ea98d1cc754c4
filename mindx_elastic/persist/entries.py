"""What a header says of its tensors: type, shape and place of each, in the order of the file, and the text of it.

A state may have tens of thousands of tensors, and each file of thousands is read at a start. So a text as `entry_texts`
writes it is taken apart by one expression, and what all its tensors have to fulfil is asked of columns. Any other text,
of another program or not sound, is read as JSON and checked tensor by tensor; only that way raises errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import accumulate, repeat
from operator import itemgetter, sub
from typing import Any, NamedTuple

import torch

from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.flatten import MAX_DIMS

__all__ = [
    "SURROGATE",
    "DescribedTensors",
    "TensorEntry",
    "described_by",
    "entries_of",
    "entries_of_own_text",
    "entry_texts",
    "place_tensors",
]

_MOST_KEPT = 1 << 20  # characters: four such texts and what was read of them stay in memory
_TOO_LARGE = 1 << 62
SURROGATE = re.compile("[\ud800-\udfff]")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_ENTRY = re.compile(
    rf',"([^"\\\x00-\x1f\ud800-\udfff]*)":'
    rf'\{{("dtype":"\w+","shape":\[(?:{_NUMBER}(?:,{_NUMBER})*)?\]),"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}',
    re.ASCII,
)
_BETWEEN = len(',"":{,"data_offsets":[,]}')
"""Characters of an entry beside what the groups of `_ENTRY` give."""


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


def _made(columns: Iterable[tuple[object, ...]]) -> Iterator[TensorEntry]:
    """As ``TensorEntry(*each)``, without a function of Python for each."""
    return map(tuple.__new__, repeat(TensorEntry), columns)


def place_tensors(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """Place tensors (of types in `dtypes.NAMES`) into the data section, widest elements first, then as given."""
    kinds: dict[tuple[torch.dtype, torch.Size], tuple[str, tuple[int, ...], int]] = {}
    by_width: dict[int, tuple[list[str], list[tuple[str, tuple[int, ...], int]]]] = {}
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, tensor.shape
        kind = kinds.get((dtype, shape))
        if kind is None:
            # One object each: the garbage collector looks at every one.
            kind = kinds[dtype, shape] = NAMES[dtype], tuple(shape), shape.numel() * dtype.itemsize
        names, own = by_width.setdefault(dtype.itemsize, ([], []))
        names.append(name)
        own.append(kind)
    entries: list[TensorEntry] = []
    position = 0
    for width in sorted(by_width, reverse=True):
        names, own = by_width[width]
        ends = [*accumulate([nbytes for _, _, nbytes in own], initial=position)]
        starts = ends[:-1]
        types, shapes = [stored for stored, _, _ in own], [shape for _, shape, _ in own]
        entries += _made(zip(names, types, shapes, starts, ends[1:], strict=True))
        position = ends[-1]
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


class DescribedTensors:
    """What a header says of its tensors, read and checked once for all files that say the same.

    The files of thousands of ranks and steps differ in their metadata, and the rest is the same text.
    """

    def __init__(self, content: Mapping[str, Any], entries: dict[str, TensorEntry] | None = None) -> None:
        self._content = content
        self._entries = entries

    def __contains__(self, name: str) -> bool:
        return name in (self._content if self._entries is None else self._entries)

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Raises ValueError and others for a malformed description."""
        return entries_of(self._content) if self._entries is None else self._entries


def described_by(rest: str) -> DescribedTensors:
    """What the text of a header says behind its first value. Raises ValueError for what is not JSON."""
    rest = rest.rstrip(" ")  # of which there are as many as the other values leave room for
    return _described(rest) if len(rest) <= _MOST_KEPT else _read(rest)


def _read(rest: str) -> DescribedTensors:
    entries = entries_of_own_text(rest)
    if entries is not None:
        return DescribedTensors({}, entries)
    return DescribedTensors(json.loads("{" + rest.removeprefix(",")))


_described = lru_cache(maxsize=4)(_read)


def entries_of_own_text(rest: str) -> dict[str, TensorEntry] | None:
    """The same as `entries_of` for the JSON, if it is sound and as `entry_texts` writes it; None: anything else."""
    text = rest.rstrip(" ")
    found = _ENTRY.findall(text)
    if not found:
        return None
    names, kinds, begin, end = zip(*found, strict=True)
    length = sum(sum(map(len, column)) for column in (names, kinds, begin, end)) + _BETWEEN * len(found)
    if not text.endswith("}") or length != len(text) - 1:  # something else is between them
        return None
    known: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for kind in set(kinds):
        described = json.loads(f"{{{kind}}}")
        dtype, shape = described["dtype"], tuple(described["shape"])
        if dtype not in BY_NAME or max(shape, default=0) >= _TOO_LARGE:
            return None
        nbytes = math.prod(shape) * BY_NAME[dtype].itemsize
        try:
            known[kind] = dtype, shape, _nbytes("", dtype, shape, nbytes)
        except ValueError:
            return None
    starts, ends = [*map(int, begin)], [*map(int, end)]
    dtypes, shapes, sizes = ([known[kind][i] for kind in kinds] for i in range(3))
    if starts != [0, *ends[:-1]] or [*map(sub, ends, starts)] != sizes or ends[-1] >= _TOO_LARGE:
        return None
    entries = dict(zip(names, _made(zip(names, dtypes, shapes, starts, ends, strict=True)), strict=True))
    return entries if len(entries) == len(names) else None


def entries_of(content: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """The tensors of a header's JSON, in the order of the file. Raises ValueError and others where it is malformed."""
    _check_names_and_numbers(content)
    entries = []
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # of each type and shape, of which there are few
    for name, value in content.items():
        start, end = value["data_offsets"]
        shape, dtype = tuple(value["shape"]), value["dtype"]
        nbytes = sizes.get((dtype, shape))
        if nbytes is None:
            nbytes = sizes[dtype, shape] = _nbytes(name, dtype, shape, end - start)
        if end - start != nbytes:
            raise _misfit(name, end - start)
        entries.append(TensorEntry(name, dtype, shape, start, end))
    entries.sort(key=itemgetter(3, 4))  # start, end
    position = 0
    for entry in entries:
        if entry[3] != position:
            raise ValueError(f"tensor {entry.name} starts at {entry.start} instead of {position}: gap or overlap")
        position = entry[4]
    return {entry[0]: entry for entry in entries}


def _check_names_and_numbers(content: Mapping[str, Any]) -> None:
    """Look at all of them at once, and for the first bad one only where there is one."""
    numbers: list[Any] = []
    for value in content.values():
        numbers += value["data_offsets"]
        numbers += value["shape"]
    sound = set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0 and max(numbers, default=0) < _TOO_LARGE
    if sound and not SURROGATE.search("\n".join(content)):
        return
    for name, value in content.items():
        if SURROGATE.search(name):
            raise ValueError(f"tensor {name!a:.80}: a name with surrogates")
        if not all(type(each) is int and 0 <= each < _TOO_LARGE for each in (*value["data_offsets"], *value["shape"])):
            raise ValueError(f"tensor {name:.80}: malformed shape or offsets")


def _misfit(name: str, nbytes: int) -> ValueError:
    return ValueError(f"tensor {name:.80}: {nbytes} bytes do not fit its shape and type")


def _nbytes(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> int:
    """`nbytes` if a tensor of this type and shape has so many. Raises ValueError otherwise."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name:.80}: malformed shape; {MAX_DIMS} dimensions at most")
    if dtype not in BY_NAME:
        raise ValueError(f"tensor {name:.80}: unknown type {dtype!r:.80}")
    itemsize = BY_NAME[dtype].itemsize
    if math.prod(shape) * itemsize != nbytes:
        raise _misfit(name, nbytes)
    if math.prod(max(size, 1) for size in shape) * itemsize >= 1 << 63:  # its strides: torch cannot make it
        raise ValueError(f"tensor {name:.80}: its shape needs more bytes than a tensor can have")
    return nbytes
