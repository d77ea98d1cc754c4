"""The messages between a worker and the scheduler: frames, their seal, and what may be in them.

::

    4 bytes   b"MXS1"
    4 bytes   length of the text, big endian
    text      a JSON object, sealed where the job has a key (see `agreement.sealed`)

The scheduler speaks first: ``{"op": "hello", "nonce": ...}``. The worker answers with ``{"op": "hello", "nonce": ...}``
and from then on every message of both sides carries the HMAC of both nonces, its direction and its number, so that none
can be forged, repeated or moved by a process without the key. The two hellos themselves are not sealed: they say
nothing. Without a key the text is sent as it is.

=============  ==================================================================  =====================================
worker says    fields                                                              then
=============  ==================================================================  =====================================
``register``   see `registration`                                                  ``welcome``, ``taken``, ``refused``
                                                                                   or ``dead``
``beat``                                                                           nothing
``store``      ``generation, host, port``: it hosts the next group's store         ``group``, to every worker
``join``       ``generation``: it is ready for that generation                     ``group``, when all are
``bye``        ``how, code, why``: it ends                                         the connection is closed
=============  ==================================================================  =====================================

The scheduler says besides: ``host`` (open the store of that generation), ``death`` (of another rank), ``fail`` (the job
is over). No object but numbers, texts and lists is ever built from a message.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.cluster.table import MAX_WORKERS, NODE_ID, Registration
from mindx_elastic.core.printable import printable

__all__ = [
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_BYTES",
    "Line",
    "WireError",
    "count_in",
    "farewell",
    "registration",
    "text_in",
]

MAX_REQUEST_BYTES = 16 << 10
"""Of a worker's message."""
MAX_REPLY_BYTES = 4 << 20
"""Of the scheduler's: it names the new ranks of a job of up to `MAX_WORKERS`."""

_MAGIC = b"MXS1"
_PREFIX = struct.Struct(">4sI")
_NONCE_CHARS = 32
_LONGEST_HOST, _LONGEST_WHY = 255, 500
_HOWS = ("done", "left", "away", "failed")
_MOST_GENERATION = 1 << 30


class WireError(ValueError):
    """The other side does not speak this protocol, or not with the job's key."""


class Line:
    """One end of a connection: turns messages into bytes and back. One thread."""

    def __init__(self, key: bytes | None, *, is_scheduler: bool, limit: int) -> None:
        """`limit`: most bytes of a message that comes in."""
        self._key, self._is_scheduler, self._limit = key, is_scheduler, limit
        self._nonce = secrets.token_hex(_NONCE_CHARS // 2)
        self._seal: Seal | None = None
        self._buffer = bytearray()
        self._num_sent = self._num_received = 0

    @property
    def is_open(self) -> bool:
        """Whether both sides have said hello."""
        return self._seal is not None

    def hello(self) -> bytes:
        return _frame(json.dumps({"op": "hello", "nonce": self._nonce}))

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """The bytes of a message; after both hellos."""
        assert self._seal is not None
        text = self._seal.close(self._name(self._is_scheduler, self._num_sent), json.dumps(message))
        self._num_sent += 1
        return _frame(text)

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that are whole with `data`; the other side's hello is none of them. Raises WireError."""
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
            if self._seal is None:
                self._greet(_parse(text))
            else:
                name = self._name(not self._is_scheduler, self._num_received)
                self._num_received += 1
                try:
                    opened = self._seal.open(name, text, author=int(not self._is_scheduler))
                except NotOursError as error:
                    raise WireError(f"its message is not of this job: {error}") from None
                yield _parse(opened)

    def _greet(self, message: Mapping[str, Any]) -> None:
        nonce = message.get("nonce")
        if message.get("op") != "hello" or not isinstance(nonce, str) or len(nonce) != _NONCE_CHARS:
            raise WireError("it does not say hello")
        both = (self._nonce, nonce) if self._is_scheduler else (nonce, self._nonce)
        # As an author the scheduler is 1 and the worker 0.
        self._seal = Seal(self._key, f"mindx-cluster/{'/'.join(both)}", int(self._is_scheduler))

    @staticmethod
    def _name(by_scheduler: bool, number: int) -> str:
        return f"{'down' if by_scheduler else 'up'}/{number}"


def _frame(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _PREFIX.pack(_MAGIC, len(data)) + data


def _parse(text: bytes | str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("it sends what is no JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("op"), str):
        raise WireError("it sends what is no message")
    return content


# --- what may be in a message ---


def text_in(message: Mapping[str, Any], name: str, *, limit: int = _LONGEST_WHY, cut: bool = False) -> str:
    """A text of at most `limit` characters. `cut`: a longer one is shortened. Raises WireError."""
    value = message.get(name)
    if not isinstance(value, str) or (len(value) > limit and not cut):
        raise WireError(f"its {name} is no text of at most {limit} characters")
    return value[:limit]


def count_in(message: Mapping[str, Any], name: str, *, low: int = 0, high: int = _MOST_GENERATION) -> int:
    """A whole number in the range. Raises WireError."""
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"its {name} is no whole number from {low} to {high}")
    return value


def registration(message: Mapping[str, Any]) -> Registration:
    """What a worker says when it registers. Raises WireError."""
    node_id = text_in(message, "node_id", limit=128)
    if node_id and not NODE_ID.fullmatch(node_id):
        raise WireError(f"its node id {printable(node_id, 40)!r} has other characters than letters, digits and ._:@-")
    incarnation = text_in(message, "incarnation", limit=64)
    if len(incarnation) != _NONCE_CHARS or not incarnation.isalnum():
        raise WireError("its incarnation is no name")
    return Registration(
        node_id=node_id,
        incarnation=incarnation,
        host=printable(text_in(message, "host", limit=_LONGEST_HOST), 100),
        pid=count_in(message, "pid", high=1 << 22),
        started=text_in(message, "started", limit=32),
        space=text_in(message, "space", limit=300),
        size=count_in(message, "size", low=1, high=MAX_WORKERS),
        recovery=message.get("recovery") is True,
        generation=count_in(message, "generation", low=-1),
        joined=count_in(message, "joined"),
        job=text_in(message, "job", limit=64),
    )


def farewell(message: Mapping[str, Any]) -> tuple[str, int, str]:
    """How a worker ends: ``done``, ``left``, ``away`` or ``failed``; its exit code; why. Raises WireError."""
    how = message.get("how")
    if how not in _HOWS:
        raise WireError("it does not say how it ends")
    return str(how), count_in(message, "code", high=255), printable(text_in(message, "why", cut=True))
