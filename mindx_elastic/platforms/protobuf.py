"""Protobuf messages of MindSpore's schema (``strategy.proto``): to bytes, and from files of any quality.

The runtime and the generated module are imported when a file is read. What every start writes is written without them:
their import takes 10 ms and 2 MiB, a quarter of what entering a guard takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["MAX_FIELDS", "dims", "message", "messages", "packed", "parse_message"]

MAX_FIELDS = 1_000_000
"""Fields of a message, each repeated one counted."""


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """The bytes of a message with these fields, each its number in the schema and its value, as they are given: a
    number of any integer type, a text, or the bytes of a message or of `packed`."""
    data = bytearray()
    for field, value in fields:
        if isinstance(value, int):
            data += packed([field << 3, value])
        else:
            content = value.encode() if isinstance(value, str) else value
            data += packed([field << 3 | 2, len(content)]) + content
    return bytes(data)


def packed(values: Iterable[int]) -> bytes:
    """The value of a repeated field that is packed."""
    data = bytearray()
    for value in values:
        rest = value & (1 << 64) - 1  # of a negative one the two's complement
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def dims(values: Iterable[int]) -> bytes:
    """A message of MindSpore's that is a list of numbers: it calls them ``dim``."""
    return message(*((1, value) for value in values))


def messages() -> Any:
    """The generated module, imported when it is needed."""
    return importlib.import_module("mindx_elastic.platforms.strategy_pb2")


def parse_message(kind: str, data: bytes, where: str) -> Any:
    """A message of ``strategy.proto`` from bytes of unknown quality. Raises UsageError."""
    # Counted first: 64 MiB hold 33 million empty items, and with so many the runtime's own checks crash the process.
    if _has_more_fields(data, MAX_FIELDS):
        raise UsageError(f"{where}: more than {MAX_FIELDS} entries")
    found = getattr(messages(), kind)()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    try:
        found.MergeFromString(data)
    except (decode_error, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: {error!s:.200}") from None
    missing = found.FindInitializationErrors() if not found.IsInitialized() else ()
    if missing:
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: {missing[0]:.200} is missing")
    return found


def _has_more_fields(data: bytes, limit: int) -> bool:
    """Whether a message consists of more than `limit` fields; False where it is malformed before that."""
    place = count = 0
    try:
        while place < len(data) and count <= limit:
            tag, place = _varint(data, place)
            count += 1
            kind = tag & 7
            if kind == 0:
                _, place = _varint(data, place)
            elif kind == 2:
                length, place = _varint(data, place)
                place += length
            elif kind in (1, 5):
                place += 8 if kind == 1 else 4
            elif kind not in (3, 4):  # groups: their ends have their own tags
                return False
    except IndexError:
        return False
    return count > limit


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, place
        shift += 7
