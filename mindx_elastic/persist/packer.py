"""Packs the small state of one boundary after another: its shape is worked out once, and then only its bytes move.

A packed state is a run of sections. Each begins with 8 bytes (the length of its JSON text, little endian) and the text,
and has a part of the state, for the place `at`, a list of keys; of the state itself where that is empty. A section
whose shape is known::

    {"at": [...], "shape": tree, "numbers": "qqd", "blobs": [5056, ["int64", [625]], ...]}
    the numbers, 8 bytes each (q: integer, d: float, little endian)
    the blobs, one after the other: byte strings of that length, tensors of that type and shape

In the tree ``{"$number": 0}`` and ``{"$blob": 0}`` refer to these, ``{"$tuple": [...]}`` is a tuple, and the rest is
itself. Any other section is as `flatten` gives it::

    {"at": [...], "tree": ..., "tensors": [[name, dtype, shape], ...]}
    bytes of the tensors, one after the other

Rejected: marshal and pickle, which are as fast, because the bytes come from a file that a damaged process or another
user may have written, and these are not safe to read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from mindx_elastic.core.tensor_memory import flat_bytes, memory_of
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten, unflatten

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
    """Packs a state that is a dict: one section for each item of the dicts named in `split`, so that one that has
    another shape each time costs the others nothing, and one for all the rest. Not for several threads."""

    def __init__(self, *split: str, frozen: str = "") -> None:
        """`frozen`: the item of this name is never changed in place, so the very same one is packed once."""
        self._split, self._frozen = split, frozen
        self._last: tuple[object, bytes] = None, b""
        self._rest, self._of_frozen = SectionPacker(), SectionPacker(frozen)
        self._packers: dict[tuple[str, str], SectionPacker] = {}

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Raises UnsupportedStateError as `flatten` does."""
        pieces: list[Piece] = []
        rest = dict[str, Any]()
        parts: list[tuple[SectionPacker, Any]] = [(self._rest, rest)]
        for key, value in state.items():
            if key == self._frozen:
                if self._last[0] is not value:
                    self._last = value, b"".join(self._of_frozen.pack(value))
                pieces += self._last[1:]
            elif key not in self._split or not value:
                rest[key] = value
            else:
                for name, part in value.items():
                    if (key, name) not in self._packers:
                        self._packers[key, name] = SectionPacker(key, name)
                    parts += ((self._packers[key, name], part),)
        for packer, part in parts:
            try:  # as `packer.pack`, in one call for what has its shape
                pieces += packer.pack(part) if packer.shape is None else packer.shape.pack(part)
            except (_OtherShape, struct.error):
                pieces += packer.pack(part)
        return b"".join(pieces)


class SectionPacker:
    """Packs the part of the state at one place, or what the state itself has. Not for several threads."""

    def __init__(self, *at: str) -> None:
        self._at = list(at)
        self.shape: _Shape | None = None
        """That of the last state, where it had one."""
        self._misses = 0

    def pack(self, state: Any) -> Sequence[Piece]:
        """Raises UnsupportedStateError as `flatten` does. The pieces may be views of the tensors of `state`."""
        if self.shape is not None:
            try:
                return self.shape.pack(state)
            except (_OtherShape, struct.error):  # another shape, or a number beyond 64 bits
                if self.shape.num_packed > 1:
                    self._misses = 0
        self.shape = None
        if self._misses < _MOST_MISSES:
            self._misses += 1
            try:
                shape = _Shape(self._at, state)
                pieces = shape.pack(state)
            except (_OtherShape, struct.error):
                pass
            else:
                self.shape = shape
                return pieces
        return _unshaped(self._at, state)


def _unshaped(at: Sequence[str], state: object) -> list[Piece]:
    """Views of the state's CPU tensors, not copies."""
    tree, tensors = flatten(state)
    named = [[name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    text = json.dumps({"at": list(at), "tree": tree, "tensors": named}, separators=(",", ":")).encode()
    kept = [memory_of(flat_bytes(tensor.detach().cpu())) for tensor in tensors.values() if tensor.numel()]
    return [struct.pack("<Q", len(text)) + text, *kept]


class _Shape:
    """The shape that states have in common which differ in numbers and bytes only."""

    def __init__(self, at: Sequence[str], state: Any) -> None:
        """Raises _OtherShape where there is something else than plain values, containers and tensors in it."""
        self._formats: list[str] = []
        self._blobs: list[Any] = []
        self._containers: list[Any] = []
        self._num_outer = 0  # of them that have others in them
        self.num_packed = 0
        """States that were of this shape."""
        (tree,) = self._look([state], 0, 0, -1)
        formats = "".join(self._formats)
        text = json.dumps(
            {"at": list(at), "shape": tree, "numbers": formats, "blobs": self._blobs}, separators=(",", ":")
        ).encode()
        self._head = struct.pack("<Q", len(text)) + text
        self._pack_numbers = struct.Struct("<" + formats).pack

    def pack(self, state: Any) -> Sequence[Piece]:
        """The section of `state`. In one function: a call for each container would take longer than all the rest."""
        numbers: list[Any] = []
        found: list[Piece] = []
        outer: list[Any] = [([state],)]
        for parent, index, keys, kinds, constants_of, expected, numbers_of, blobs, has_inner in self._containers:
            value = outer[parent][index]
            if keys is not None:
                if [*value] != keys:
                    raise _OtherShape
                value = [*value.values()]
            if [*map(type, value)] != kinds or (constants_of is not None and constants_of(value) != expected):
                raise _OtherShape
            if numbers_of is not None:
                numbers += numbers_of(value)
            for item, of in blobs:
                blob = value[item]
                found.append(blob if type(of) is int and len(blob) == of else _bytes_of(blob, of))
            if has_inner:
                outer.append(value)
        self.num_packed += 1
        return self._head, self._pack_numbers(*numbers), *found

    def _look(self, value: Any, parent: int, index: int, depth: int) -> list[Any] | dict[str, Any]:
        """The tree of the container `value`, which is the item `index` of the container `parent` of
        those that have others in them."""
        if depth > MAX_DEPTH:
            raise _OtherShape
        keys = [*value] if type(value) is dict else None
        if keys is not None and not all(type(key) is str and not key.startswith("$") for key in keys):
            raise _OtherShape
        items = value if keys is None else [*value.values()]
        trees = [*items]
        constants, numbers, inner = [], [], []
        blobs: list[tuple[int, Any]] = []
        for i, item in enumerate(items):
            kind = type(item)
            if kind in _CONSTANTS:
                constants.append(i)
            elif kind in _NUMBERS:
                numbers.append(i)
                trees[i] = {"$number": len(self._formats)}
                self._formats.append(_NUMBERS[kind])
            elif kind is bytes or (kind is torch.Tensor and _is_plain(item)):
                blobs.append((i, len(item) if kind is bytes else (item.dtype, item.shape)))
                trees[i] = {"$blob": len(self._blobs)}
                self._blobs.append(len(item) if kind is bytes else [NAMES[item.dtype], list(item.shape)])
            elif kind in (dict, list, tuple):
                inner.append(i)
            else:
                raise _OtherShape
        of_constants = _getter(constants)
        expected = None if of_constants is None else of_constants(items)
        kinds = [*map(type, items)]
        numbers_of = _getter(numbers)
        self._containers.append((parent, index, keys, kinds, of_constants, expected, numbers_of, blobs, bool(inner)))
        self._num_outer += bool(inner)
        number = self._num_outer
        for i in inner:
            trees[i] = self._look(items[i], number, i, depth + 1)
        if keys is not None:
            return dict(zip(keys, trees, strict=True))
        return trees if type(value) is list else {"$tuple": trees}


def _getter(indices: Sequence[int]) -> Any:
    """Gives these items of a list or a tuple, as a list or a tuple; None for no items."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1)) if indices else None


def _bytes_of(value: Any, of: Any) -> Any:
    """`of`: the length of a byte string, or type and shape of a tensor."""
    if type(of) is int:
        if len(value) != of:
            raise _OtherShape
        return value
    if (value.dtype, value.shape) != of or not _is_plain(value):
        raise _OtherShape
    return value.numpy().data if value.numel() else b""


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
    """The whole state, of the sections that `SectionPacker` has packed, one after the other. Every tensor has its own
    memory. Raises CorruptCheckpointError."""
    position = 0
    state: dict[str, Any] = {}
    try:
        while position < len(data) or not position:
            (length,) = struct.unpack_from("<Q", data, position)
            content = json.loads(data[position + 8 : position + 8 + length])
            at = content["at"]
            unpack = _unpack_shaped if "shape" in content else _unpack_tree
            value, position = unpack(content, data, position + 8 + length)
            inner: Any = state
            for key in at[:-1]:
                inner = inner.setdefault(key, {})
            if not (isinstance(inner, dict) and all(isinstance(key, str) for key in at)):
                raise ValueError(f"at {at!r}")
            inner.update({at[-1]: value} if at else value)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise CorruptCheckpointError(f"malformed packed state: {error!r}") from error
    return state


def _tensor_at(data: bytes, start: int, dtype: str, shape: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The tensor whose bytes begin at `start`, in its own memory, and where they end. Raises ValueError."""
    tensor = torch.empty(shape, dtype=BY_NAME[dtype], device="cpu")
    source = data[start : start + tensor.nbytes]
    if len(source) != tensor.nbytes:
        raise ValueError("cut off")
    if source:
        memory_of(tensor)[:] = source
    return tensor, start + tensor.nbytes


def _unpack_tree(content: dict[str, Any], data: bytes, position: int) -> tuple[Any, int]:
    """As `_unpack_shaped`, of a section without a shape."""
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in content["tensors"]:
        tensors[name], position = _tensor_at(data, position, dtype, shape)
    return unflatten(content["tree"], tensors), position


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
            piece, position = _tensor_at(data, position, *blob)
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
