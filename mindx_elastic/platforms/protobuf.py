"""Protobuf messages of MindSpore's schema (``strategy.proto``), from files of any quality.

The generated module is imported when a file is read or written: ``import mindx_elastic`` needs no protobuf.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["messages", "parse_message"]


def messages() -> Any:
    """The generated module, imported when it is needed."""
    return importlib.import_module("mindx_elastic.platforms.strategy_pb2")


def parse_message(kind: str, data: bytes, where: str) -> Any:
    """A message of ``strategy.proto`` from bytes of unknown quality. Raises UsageError."""
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
