"""A connection between a worker and the scheduler: JSON objects in frames (`core.frames`), and their seal.

Each side first says ``{"nonce": ...}``, the scheduler before it has heard anything. From then on every message
(`messages`) carries the HMAC of both nonces, its direction and its number, so that none can be forged, repeated or
moved by a process without the key. The two greetings themselves are not sealed: they say nothing. Without a key the
text is sent as it is.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.cluster.messages import Message, as_json, parse
from mindx_elastic.core.frames import FrameError, Frames, frame

__all__ = ["Line", "WireError"]

_MAX_BYTES = 16 << 10  # of a message
_PIECE = 1 << 16
_NONCE_CHARS = 32


class WireError(ConnectionError):
    """The other side does not speak this protocol, or not with the job's key."""


class Line:
    """One end of a connection, for both roles. Nothing here waits. One thread."""

    def __init__(self, sock: socket.socket, key: bytes | None, *, is_scheduler: bool) -> None:
        """Greets."""
        sock.setblocking(False)
        self.socket, self._key, self._is_scheduler = sock, key, is_scheduler
        self._frames = Frames(_MAX_BYTES)
        self._nonce = secrets.token_hex(_NONCE_CHARS // 2)
        self._seal: Seal | None = None
        self._num_sent = self._num_received = 0
        self._unsaid: list[Message] = []
        """Before the other side has greeted."""
        self._unsent = bytearray(self.greeting())
        self._is_ending = False
        self.flush()

    @property
    def is_open(self) -> bool:
        """Whether the other side has greeted."""
        return self._seal is not None

    @property
    def is_done(self) -> bool:
        """Whether the last message is sent."""
        return self._is_ending and not self._unsent

    def greeting(self) -> bytes:
        return frame(json.dumps({"nonce": self._nonce}).encode())

    def send(self, message: Message, *, is_last: bool = False) -> None:
        """Now as far as the system takes it, the rest with `flush`. Nothing follows the last one."""
        if not self._is_ending:
            self._is_ending = is_last
            self._unsaid.append(message)
            self.flush()

    def flush(self) -> None:
        while self._unsaid and self.is_open:
            self._unsent += self.pack(self._unsaid.pop(0))
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # it has gone; what it has said before is read first, and then its end

    def receive(self) -> Iterator[Message]:
        """What there is. Raises OSError where the connection has ended, and WireError."""
        try:
            data = self.socket.recv(_PIECE)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("it has closed the connection")
        yield from self.feed(data)
        self.flush()

    def pack(self, message: Message) -> bytes:
        """The bytes of a message; after both greetings."""
        assert self._seal is not None
        text = self._seal.close(self._name(self._is_scheduler, self._num_sent), json.dumps(as_json(message)))
        self._num_sent += 1
        return frame(text.encode("utf-8", "surrogatepass"))

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole with `data`; the other side's greeting is none of them. Raises WireError."""
        try:
            for text in self._frames.feed(data):
                if self._seal is not None:
                    yield parse(json.loads(self._open(self._seal, text)))
                else:
                    self._hear_greeting(json.loads(text))
        except NotOursError as error:
            raise WireError(f"its message is not of this job: {error}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise WireError("it sends what is not JSON") from None
        except (FrameError, ValueError) as error:
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
