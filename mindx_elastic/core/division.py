"""How replicas divide a state among their files. Pure.

Ranks that hold the same tensors need not all write all of them. A `Division` cuts the tensors, in the order of their
names, into parts of about equally many bytes: along the first dimension, so that each piece is a tensor that any
safetensors reader shows. It follows from names, types and shapes alone, so every rank works out the same one. A file
has some of the parts, and says which (`PartsHeld`); what is not divided is in every file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

__all__ = ["MAX_PARTS", "Divided", "Division", "RowPiece", "parts_of_member", "piece_name"]

MAX_PARTS = 1024
"""A division is made for the ranks of one machine."""
_MAX_DIMS = 64


class RowPiece(NamedTuple):
    """Rows `start` to `stop` of a tensor."""

    part: int
    start: int
    stop: int


class Divided(NamedTuple):
    """One tensor of a division."""

    dtype: str
    """The safetensors type name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor; it has a first dimension, which is not 0."""
    pieces: tuple[RowPiece, ...]
    """The pieces in the order of their rows; together they are the tensor."""

    def shape_of(self, piece: RowPiece) -> tuple[int, ...]:
        return (piece.stop - piece.start, *self.shape[1:])


def piece_name(name: str, tensor: Divided, piece: RowPiece) -> str:
    """The name of a piece in a file; the tensor's own where the piece is all of it."""
    is_whole = (piece.start, piece.stop) == (0, tensor.shape[0])
    return name if is_whole else f"{name}[{piece.start}:{piece.stop}]"


@dataclass(frozen=True)
class Division:
    """Which rows of which tensors belong to which part."""

    count: int
    """Number of parts."""
    tensors: Mapping[str, Divided]
    """Divided tensors by their names in the files; others are not divided."""

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[str, tuple[int, ...], int]], count: int) -> Division:
        """Cut `tensors` (name -> type, shape, bytes) into `count` parts of about equally many bytes."""
        total = sum(nbytes for _, _, nbytes in tensors.values())
        made: dict[str, Divided] = {}
        done = 0
        for name in sorted(tensors):
            dtype, shape, nbytes = tensors[name]
            rows = shape[0]
            # The part of a row is that with its middle: a part is off by half a row at most.
            bounds = [round((total * part / count - done) * rows / nbytes) for part in range(count + 1)]
            bounds = [min(max(bound, 0), rows) for bound in bounds]
            bounds[0], bounds[-1] = 0, rows
            pieces = [RowPiece(part, bounds[part], bounds[part + 1]) for part in range(count)]
            made[name] = Divided(dtype, shape, tuple(piece for piece in pieces if piece.start < piece.stop))
            done += nbytes
        return cls(count, made)

    def pieces(self, parts: Collection[int]) -> list[tuple[str, str, RowPiece]]:
        """The pieces of `parts`: name in the file, name of the tensor, piece."""
        return [
            (piece_name(name, tensor, piece), name, piece)
            for name, tensor in self.tensors.items()
            for piece in tensor.pieces
            if piece.part in parts
        ]

    @cached_property
    def text(self) -> str:
        """Compact JSON, the same for equal divisions."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.text.encode())

    def to_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` is the way back."""
        return {
            "count": self.count,
            "tensors": {
                name: [t.dtype, list(t.shape), [[p.part, p.start, p.stop] for p in t.pieces]]
                for name, t in self.tensors.items()
            },
        }

    @classmethod
    def from_json(cls, content: Any) -> Division:
        """Raises ValueError, KeyError, TypeError or AttributeError for anything that `to_json` does not give."""
        count = content["count"]
        if type(count) is not int or not 1 <= count <= MAX_PARTS:
            raise ValueError(f"a division into {count!r:.40} parts")
        return cls(count, {name: _divided(each, count) for name, each in content["tensors"].items()})


def _divided(content: Any, count: int) -> Divided:
    dtype, shape, rows = content
    if not isinstance(dtype, str) or not 1 <= len(shape) <= _MAX_DIMS:
        raise ValueError("a divided tensor without type or dimensions")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or math.prod(shape) < 1:
        raise ValueError("a divided tensor of a shape that cannot be divided")
    pieces = tuple(RowPiece(*row) for row in rows)
    end, last = 0, -1
    for piece in pieces:
        if not all(type(n) is int for n in (piece.part, piece.start, piece.stop)):
            raise ValueError("the rows of a divided tensor are not whole numbers")
        if piece.start != end or piece.stop <= end or not last < piece.part < count:
            raise ValueError("the pieces of a divided tensor overlap, or leave rows out")
        end, last = piece.stop, piece.part
    if end != shape[0]:
        raise ValueError("the pieces of a divided tensor leave rows out")
    return Divided(dtype, tuple(shape), pieces)


def parts_of_member(member: int, count: int, copies: int) -> tuple[int, ...]:
    """The parts in the file of the `member`-th of `count` ranks, where each part is in `copies` files."""
    return tuple(sorted((member + copy) % count for copy in range(min(copies, count))))
