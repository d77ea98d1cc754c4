"""Small files of the planner: read whole with a bound, written whole or not at all, protobuf messages on demand.

Unlike the platform's ConfigMaps these are files of ours, beside checkpoints: no link is followed, nothing blocks.
"""

from __future__ import annotations

import errno
import importlib
import os
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import SaveError, StrPath, UsageError
from mindx_elastic.persist.storage import create_temp, fsync_dir, make_directory_durable, publish

__all__ = [
    "MAX_FIELDS",
    "MAX_FILE_BYTES",
    "ArgumentTypeError",
    "messages",
    "parse_message",
    "read_bounded",
    "write_whole",
]

MAX_FILE_BYTES = 64 << 20
MAX_FIELDS = 1_000_000
"""Of a message, its repeated fields counted each."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a wrong type, where MindSpore's function of the same name raises TypeError."""


def read_bounded(path: StrPath, what: str) -> bytes:
    """The bytes of a regular file of at most `MAX_FILE_BYTES`. Raises UsageError with what is wrong; links, pipes and
    devices are refused. `what` names the kind of file in the message."""
    try:
        text = os.fspath(path)
        fd = open_regular(text)
    except TypeError:
        raise ArgumentTypeError(f"{path!r:.80} where the path of a {what} should be") from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        problem = getattr(error, "strerror", None) or str(error)
        if os.path.islink(text):
            problem = "is a symbolic link"
        elif isinstance(error, OSError) and error.errno == errno.EINVAL:
            problem = "is no regular file"
        raise UsageError(f"{what} {path}: {problem}") from None
    try:
        with open(fd, "rb") as file:
            small = os.fstat(fd).st_size <= MAX_FILE_BYTES
            data = file.read(MAX_FILE_BYTES + 1) if small else b"x" * (MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from None
    if not 0 < len(data) <= MAX_FILE_BYTES:
        problem = f"is larger than {MAX_FILE_BYTES >> 20} MiB" if data else "is empty"
        raise UsageError(f"{what} {path}: {problem}")
    return data


def write_whole(path: StrPath, data: bytes) -> Path:
    """Make `path` hold `data`, in one step and durably; its folder is made. Raises SaveError."""
    final = Path(path)
    temp = None
    try:
        make_directory_durable(final.parent)
        fd, temp = create_temp(final)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            publish(temp, final)
        finally:
            os.close(fd)
        fsync_dir(final.parent)
    except (OSError, ValueError) as error:
        if temp is not None:
            temp.unlink(missing_ok=True)
        raise SaveError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}", path=path) from error
    return final


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
            elif kind not in (3, 4):  # groups: their ends have tags of their own
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
