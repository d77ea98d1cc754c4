"""Protobuf messages of MindSpore's schema (``strategy.proto``), from files of any quality.

The generated module is imported when a file is read or written: ``import mindx_elastic`` needs no protobuf.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["MAX_FIELDS", "messages", "parse_message"]

MAX_FIELDS = 1_000_000
"""Fields of a message, each repeated one counted."""


def messages() -> Any:
    """The generated module, imported when it is needed."""
    return importlib.import_module("mindx_elastic.platforms.strategy_pb2")


def parse_message(kind: str, data: bytes, where: str) -> Any:
    """A message of ``strategy.proto`` from bytes of unknown quality. Raises UsageError."""
    # Counted first: 64 MiB hold 33 million empty items, and with so many the runtime's own checks crash the process.
    if _has_more_fields(data, MAX_FIELDS):
        raise UsageError(f"{where}: more than {MAX_FIELDS} entries")
    message = getattr(messages(), kind)()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    try:
        message.MergeFromString(data)
    except (decode_error, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: {error!s:.200}") from None
    missing = message.FindInitializationErrors() if not message.IsInitialized() else ()
    if missing:
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: {missing[0]:.200} is missing")
    return message


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
