"""Packs the small state of one boundary after another: its shape is worked out once, and then only its bytes move.

A packed state is a run of sections. Each begins with 8 bytes (the length of its JSON text, little endian) and the text,
and has a part of the state, for the place `at`, a list of keys. A section whose shape is known::

    {"at": [...], "shape": tree, "numbers": "qqd", "blobs": [5056, ["int64", [625]], ...]}
    the numbers, 8 bytes each (q: integer, d: float, little endian)
    the blobs, one after the other: byte strings of that length, tensors of that type and shape

In the tree ``{"$number": 0}`` and ``{"$blob": 0}`` refer to these, ``{"$tuple": [...]}`` is a tuple, and the rest is
itself. Any other section is as `persist.packed` has it, with `at` next to the tree.

Rejected: marshal and pickle, which are as fast, because the bytes come from a file that a damaged process or another
user may have written, and these are not safe to read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.flatten import MAX_DEPTH
from mindx_elastic.persist.packed import pack_state, tensor_at, unpack_section

__all__ = ["SectionPacker", "StatePacker", "unpack_sections"]

Piece = bytes | memoryview
_MOST_MISSES = 8
"""A part that has another shape so many times in a row is not given one any more."""
_CONSTANTS = frozenset((type(None), bool, str))
_NUMBERS = {int: "q", float: "d"}
_WITH_NUMPY = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)


class _OtherShape(Exception):
    """The state is not of the shape that was worked out."""


class StatePacker:
    """Packs a state that is a dict: one section for each item, and for each item in the dict named `split`, so that one
    that has another shape each time costs the others nothing. Not for several threads."""

    def __init__(self, split: str, frozen: str = "") -> None:
        """`frozen`: the item of this name is never changed in place, so the very same one is packed once."""
        self._split, self._frozen = split, frozen
        self._last: tuple[object, bytes] = None, b""
        self._packers: dict[str, SectionPacker] = {}
        self._split_packers: dict[str, SectionPacker] = {}

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Raises UnsupportedStateError as `flatten` does."""
        pieces: list[Piece] = []
        packers = self._packers
        for key, part in state.items():
            if key == self._split and part:
                for name, own in part.items():
                    packer = self._split_packers.get(name)
                    if packer is None:
                        packer = self._split_packers[name] = SectionPacker(key, name)
                    pieces += packer.pack(own)
                continue
            packer = packers.get(key)
            if packer is None:
                packer = packers[key] = SectionPacker(key)
            if key == self._frozen:
                if self._last[0] is not part:
                    self._last = part, b"".join(packer.pack(part))
                pieces.append(self._last[1])
                continue
            pieces += packer.pack(part)
        return b"".join(pieces)


class SectionPacker:
    """Packs the part of the state at one place. Not for several threads."""

    def __init__(self, *at: str) -> None:
        self._at = list(at)
        self._shape: _Shape | None = None
        self._misses = 0

    def pack(self, state: Any) -> Sequence[Piece]:
        """Raises UnsupportedStateError as `flatten` does. The pieces may be views of the tensors of `state`."""
        shape = self._shape
        if shape is not None:
            try:
                pieces = shape.pack(state)
            except (_OtherShape, struct.error):  # another shape, or a number beyond 64 bits
                pass
            else:
                self._misses = 0
                return pieces
        self._shape = None
        if self._misses < _MOST_MISSES:
            self._misses += 1
            try:
                self._shape = shape = _Shape(self._at, state)
                return shape.pack(state)
            except (_OtherShape, struct.error):
                self._shape = None
        return pack_state(state, at=self._at)


class _Shape:
    """The shape that states have in common which differ in numbers and bytes only."""

    def __init__(self, at: Sequence[str], state: Any) -> None:
        """Raises _OtherShape where there is something else than plain values, containers and tensors in it."""
        self._formats: list[str] = []
        self._blobs: list[Any] = []
        tree, self._take = self._look(state, 0)
        formats = "".join(self._formats)
        text = json.dumps(
            {"at": list(at), "shape": tree, "numbers": formats, "blobs": self._blobs}, separators=(",", ":")
        ).encode()
        self._head = struct.pack("<Q", len(text)) + text
        self._pack_numbers = struct.Struct("<" + formats).pack

    def pack(self, state: Any) -> list[Piece]:
        numbers: list[Any] = []
        pieces: list[Piece] = [self._head, b""]
        self._take(state, numbers, pieces)
        pieces[1] = self._pack_numbers(*numbers)
        return pieces

    def _look(self, value: Any, depth: int) -> tuple[Any, Callable[[Any, list[Any], list[Piece]], None]]:
        """The tree of `value`, and what takes numbers and bytes out of a value of its shape."""
        kind = type(value)
        if depth > MAX_DEPTH:
            raise _OtherShape
        if kind is dict:
            if not all(type(key) is str and not key.startswith("$") for key in value):
                raise _OtherShape
            found = [self._look_item(item, depth) for item in value.values()]
            tree: Any = dict(zip(value, (node for node, _ in found), strict=True))
            return tree, _taker(dict, list(value), list(value.values()), [take for _, take in found])
        if kind in (list, tuple):
            found = [self._look_item(item, depth) for item in value]
            nodes = [node for node, _ in found]
            takes = [take for _, take in found]
            return nodes if kind is list else {"$tuple": nodes}, _taker(kind, None, list(value), takes)
        node, take = self._look_item(value, depth)
        take_items = _taker(None, None, [value], [take])
        return node, lambda value, numbers, pieces: take_items([value], numbers, pieces)

    def _look_item(self, value: Any, depth: int) -> tuple[Any, Any]:
        """As `_look`; instead of the function None for a constant, and `_number` for a number."""
        kind = type(value)
        if kind in _CONSTANTS:
            return value, None
        if kind in _NUMBERS:
            self._formats.append(_NUMBERS[kind])
            return {"$number": len(self._formats) - 1}, _number
        if kind is bytes:
            self._blobs.append(len(value))
            return {"$blob": len(self._blobs) - 1}, _taker_of_bytes(len(value))
        if kind is torch.Tensor:
            if not _is_plain(value):
                raise _OtherShape
            self._blobs.append([NAMES[value.dtype], list(value.shape)])
            return {"$blob": len(self._blobs) - 1}, _taker_of_tensor(value)
        if kind in (dict, list, tuple):
            return self._look(value, depth + 1)
        raise _OtherShape


def _number(value: Any, numbers: list[Any], pieces: list[Piece]) -> None:
    """Stands for what takes a number; `_taker` does it."""


def _taker(kind: type | None, keys: list[str] | None, values: list[Any], takes: list[Any]) -> Any:
    """`kind`: of the container; None: a list of items that the caller has made. `keys`: of a dict."""
    kinds = [*map(type, values)]
    constants = [i for i, take in enumerate(takes) if take is None]
    constants_of = itemgetter(*constants) if constants else None
    expected = constants_of(values) if constants_of is not None else None
    steps = [(i, take) for i, take in enumerate(takes) if take is not None]

    def take(value: Any, numbers: list[Any], pieces: list[Piece]) -> None:
        if kind is not None and type(value) is not kind:
            raise _OtherShape
        if keys is not None:
            if [*value] != keys:
                raise _OtherShape
            value = [*value.values()]
        if [*map(type, value)] != kinds:
            raise _OtherShape
        if constants_of is not None and constants_of(value) != expected:
            raise _OtherShape
        for i, take_item in steps:  # in the order of the items, for so are the numbers counted
            if take_item is _number:
                numbers += (value[i],)  # a call would take longer
            else:
                take_item(value[i], numbers, pieces)

    return take


def _taker_of_bytes(length: int) -> Any:
    def take(value: Any, numbers: list[Any], pieces: list[Piece]) -> None:
        if len(value) != length:
            raise _OtherShape
        pieces.append(value)

    return take


def _taker_of_tensor(tensor: torch.Tensor) -> Any:
    dtype, shape = tensor.dtype, tensor.shape

    def take(value: Any, numbers: list[Any], pieces: list[Piece]) -> None:
        if value.dtype is not dtype or value.shape != shape or not _is_plain(value):
            raise _OtherShape
        if value.numel():
            pieces.append(value.numpy().data)

    return take


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _WITH_NUMPY
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def unpack_sections(data: bytes) -> Any:
    """The whole state, of the sections that `SectionPacker` has packed, one after the other; or what `pack_state` has
    packed. Every tensor has its own memory. Raises CorruptCheckpointError."""
    position = 0
    state: dict[str, Any] = {}
    while position < len(data) or not position:
        at, value, position = unpack_section(data, position, _unpack_shaped)
        if not at:
            if state or position < len(data):
                raise CorruptCheckpointError(f"malformed packed state: {len(data)} bytes instead of {position}")
            return value
        inner: Any = state
        for key in at[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise CorruptCheckpointError(f"malformed packed state: a section inside of another one ({at})")
        inner[at[-1]] = value
    return state


def _unpack_shaped(content: dict[str, Any], data: bytes, position: int) -> tuple[Any, int]:
    """The value of a section with a shape, whose content begins at `position`, and where it ends. Raises ValueError and
    others for what makes no sense."""
    formats = content["numbers"]
    if not isinstance(formats, str) or formats.strip("qd"):
        raise ValueError(f"numbers {formats!r}")
    layout = struct.Struct("<" + formats)
    numbers = layout.unpack_from(data, position)
    position += layout.size
    blobs: list[Any] = []
    for blob in content["blobs"]:
        if isinstance(blob, int):
            if not 0 <= blob <= len(data) - position:
                raise ValueError("cut off")
            piece: Any = data[position : position + blob]
            position += blob
        else:
            piece, position = tensor_at(data, position, *blob)
        blobs.append(piece)
    return _build(content["shape"], numbers, blobs), position


def _build(node: Any, numbers: Sequence[Any], blobs: Sequence[Any]) -> Any:
    if isinstance(node, list):
        return [_build(item, numbers, blobs) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((key, value),) = node.items()
        if key == "$number":
            return numbers[value]
        if key == "$blob":
            return blobs[value]
        if key == "$tuple":
            return tuple(_build(item, numbers, blobs) for item in value)
    return {key: _build(item, numbers, blobs) for key, item in node.items()}
