"""How messages are cut out of the bytes of a connection: to a dynamic cluster's scheduler, between ranks that copy
files.

::

    4 bytes   b"MXE1": this package, and the version of what follows
    4 bytes   length of the content, big endian
    content   a JSON object, sealed where the job has a key (`agreement.sealed`)

A receiver says how long a content may be, and ends the connection for anything else (`FrameError`). Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["HEAD_BYTES", "FrameError", "Frames", "content_length", "frame"]

_MAGIC = b"MXE1"
_HEAD = struct.Struct(">4sI")
HEAD_BYTES = _HEAD.size
"""In front of a content."""


class FrameError(ConnectionError):
    """The other side does not speak this protocol, or sends more than this one takes."""


def frame(content: bytes) -> bytes:
    """`content` as it is sent."""
    return _HEAD.pack(_MAGIC, len(content)) + content


def content_length(head: bytes, most: int) -> int:
    """How long the content after these `HEAD_BYTES` is. Raises FrameError for another protocol, and for more than
    `most` bytes."""
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise FrameError("the other side does not speak our protocol")
    if length > most:
        raise FrameError(f"the other side sends a message of {length} bytes, and {most} are the most")
    return int(length)


class Frames:
    """What comes over one connection. One thread."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of a content."""
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents that are whole with `data`. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= HEAD_BYTES:
            end = HEAD_BYTES + content_length(bytes(self._buffer[:HEAD_BYTES]), self._most)
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[HEAD_BYTES:end])
            del self._buffer[:end]
            yield content
