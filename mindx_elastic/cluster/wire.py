"""A connection between a worker and the scheduler: frames, and their seal.

::

    4 bytes   b"MXS1"
    4 bytes   length of the text, big endian
    text      a JSON object, sealed where the job has a key (see `agreement.sealed`)

Each side first says ``{"nonce": ...}``, the scheduler before it has heard anything. From then on every message
(`messages`) carries the HMAC of both nonces, its direction and its number, so that none can be forged, repeated or
moved by a process without the key. The two greetings themselves are not sealed: they say nothing. Without a key the
text is sent as it is.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterator
from typing import Any

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.cluster.messages import Message, as_json, parse

__all__ = ["MAX_REPLY_BYTES", "MAX_REQUEST_BYTES", "Line", "WireError"]

MAX_REQUEST_BYTES = 16 << 10
"""Of a worker's message."""
MAX_REPLY_BYTES = 4 << 20
"""Of the scheduler's: it names the new ranks of a job of up to `messages.MAX_WORKERS`."""

_MAGIC = b"MXS1"
_PREFIX = struct.Struct(">4sI")
_NONCE_CHARS = 32


class WireError(ValueError):
    """The other side does not speak this protocol, or not with the job's key."""


class Line:
    """One end of a connection: turns messages into bytes and back. One thread."""

    def __init__(self, key: bytes | None, *, is_scheduler: bool) -> None:
        self._key, self._is_scheduler = key, is_scheduler
        self._limit = MAX_REQUEST_BYTES if is_scheduler else MAX_REPLY_BYTES
        self._nonce = secrets.token_hex(_NONCE_CHARS // 2)
        self._seal: Seal | None = None
        self._buffer = bytearray()
        self._num_sent = self._num_received = 0

    @property
    def is_open(self) -> bool:
        """Whether the other side has greeted."""
        return self._seal is not None

    def greeting(self) -> bytes:
        return _frame(json.dumps({"nonce": self._nonce}))

    def pack(self, message: Message) -> bytes:
        """The bytes of a message; after both greetings."""
        assert self._seal is not None
        text = self._seal.close(self._name(self._is_scheduler, self._num_sent), json.dumps(as_json(message)))
        self._num_sent += 1
        return _frame(text)

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole with `data`; the other side's greeting is none of them. Raises WireError."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            magic, length = _PREFIX.unpack_from(self._buffer)
            if magic != _MAGIC:
                raise WireError("it does not speak our protocol")
            if length > self._limit:
                raise WireError(f"it sends a message of {length} bytes")
            if len(self._buffer) < _PREFIX.size + length:
                return
            text = bytes(self._buffer[_PREFIX.size : _PREFIX.size + length])
            del self._buffer[: _PREFIX.size + length]
            try:
                if self._seal is not None:
                    yield parse(json.loads(self._open(self._seal, text)))
                else:
                    self._hear_greeting(json.loads(text))
            except NotOursError as error:
                raise WireError(f"its message is not of this job: {error}") from None
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                raise WireError("it sends what is no JSON") from None
            except ValueError as error:
                raise WireError(str(error)) from None

    def _open(self, seal: Seal, text: bytes) -> str:
        name = self._name(not self._is_scheduler, self._num_received)
        self._num_received += 1
        return seal.open(name, text, author=int(not self._is_scheduler))

    def _hear_greeting(self, content: Any) -> None:
        nonce = content.get("nonce") if isinstance(content, dict) else None
        if not isinstance(nonce, str) or len(nonce) != _NONCE_CHARS:
            raise WireError("it does not greet")
        both = (self._nonce, nonce) if self._is_scheduler else (nonce, self._nonce)
        # As an author the scheduler is 1 and the worker 0.
        self._seal = Seal(self._key, f"mindx-cluster/{'/'.join(both)}", int(self._is_scheduler))

    @staticmethod
    def _name(by_scheduler: bool, number: int) -> str:
        return f"{'down' if by_scheduler else 'up'}/{number}"


def _frame(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _PREFIX.pack(_MAGIC, len(data)) + data
