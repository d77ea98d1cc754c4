"""Seals messages that go through the store, so that only a process with the job's key can have written them.

Every process that reaches the store's port can read, write and delete everything in it: torch's store has no passwords.
With a key that is not in the store, each message carries an HMAC-SHA256 over all that gives it its meaning: the attempt
and guard (*scope*), this start (*session*), the store's key, the rank that wrote it, and the content. `open` rejects a
message of a process without the key, for another store key, of another rank, or of another start.

::

    mx1.{mac, 64 hex digits}.{rank}.{nonce, 32 hex digits, or nothing}.{content}

The session makes a replay of an earlier start's messages useless. It costs no round trip: the values of the first
meeting carry a random nonce each, and all later messages are bound to the nonces of all ranks. Every rank knows its own
nonce for certain.

Without a key the content is sent as it is. A rank with a key opens only messages that are sealed with it, so a job
cannot be downgraded to one without a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

__all__ = ["NotOursError", "Seal"]

_MARK = "mx1"
_DERIVED = "mx1-derived"
_MOST_WELCOME = 200


class NotOursError(ValueError):
    """A message that was not written by a rank of this job for this place."""


class Seal:
    """One per rank and exchange. Call `join` in the start's thread; the other methods in any thread after that."""

    def __init__(self, key: bytes | None, scope: str, rank: int) -> None:
        """key: None sends messages unsealed. scope: the same on all ranks, different for each attempt and guard."""
        self._key, self._scope, self.rank = key, scope, rank
        self._nonce = secrets.token_hex(16)
        self._session = ""

    @property
    def is_keyed(self) -> bool:
        """Whether there is a key, so that an opened message is known to come from this job."""
        return self._key is not None

    @property
    def has_joined(self) -> bool:
        """Whether messages are bound to this start."""
        return bool(self._session) or self._key is None

    def close(self, name: str, content: str) -> str:
        """Seal `content` for the store's key `name`."""
        if self._key is None:
            return content
        nonce = "" if self._session else self._nonce
        return f"{_MARK}.{self._mac(name, self.rank, nonce, content)}.{self.rank}.{nonce}.{content}"

    def open(self, name: str, message: bytes | str, *, author: int | None = None, limit: int | None = None) -> str:
        """Check a message and return its content. `author`: the rank that must have written it; None: any. `limit`:
        most characters.

        Raises NotOursError.
        """
        return self._open(name, message, author, limit)[0]

    def open_early(self, name: str, message: bytes | str) -> str:
        """The same for a message whose author was not bound to this start yet. A message of an earlier start under the
        same key and scope opens, too: for what can do no harm. Raises NotOursError."""
        return self._open(name, message, None, None, session="")[0]

    def join(self, names: Sequence[str], messages: Sequence[bytes | str]) -> tuple[list[str], list[str]]:
        """Rank 0: open the first values of all ranks, in rank order, and bind all later messages to this start. Returns
        the nonces (none without a key), for `welcomes`, and the contents. Raises NotOursError."""
        found = [
            self._open(name, each, rank, None) for rank, (name, each) in enumerate(zip(names, messages, strict=True))
        ]
        if self._key is None:
            return [], [content for content, _ in found]
        if found[self.rank][1] != self._nonce:
            raise NotOursError(f"rank {self.rank}'s own message has been replaced by one of another start")
        nonces = [nonce for _, nonce in found]
        self._session = hashlib.sha256(".".join(nonces).encode()).hexdigest()
        return nonces, [content for content, _ in found]

    def welcomes(self, name: str, nonces: Sequence[str]) -> list[str]:
        """Rank 0, after `join`: for each rank the message that it needs for `enter`. It contains that rank's nonce, so
        that a message of an earlier start is rejected."""
        return [
            f"{_MARK}.{self._mac(f'{name}/{rank}', self.rank, nonce, self._session, session='')}.{self.rank}.{nonce}."
            f"{self._session}"
            for rank, nonce in enumerate(nonces)
        ]

    def enter(self, name: str, message: bytes | str) -> None:
        """The other ranks: take over the session from rank 0. Raises NotOursError."""
        session, nonce = self._open(f"{name}/{self.rank}", message, 0, _MOST_WELCOME)
        if nonce != self._nonce:
            raise NotOursError("it welcomes a rank of another start")
        self._session = session

    def derive(self, text: str) -> str:
        """A secret derived from `text` and the key; without a key `text` itself."""
        if self._key is None:
            return text
        return self._mac(_DERIVED, 0, "", text)

    def _open(
        self, name: str, message: bytes | str, author: int | None, limit: int | None, session: str | None = None
    ) -> tuple[str, str]:
        if limit is not None and len(message) > limit + 200:
            raise NotOursError(f"{len(message)} bytes are too many")
        try:
            text = message if isinstance(message, str) else message.decode()
        except UnicodeDecodeError:
            raise NotOursError("no text") from None
        if self._key is None:
            if text.startswith(f"{_MARK}."):
                raise NotOursError("it is sealed with a key, and this rank has none")
            return text, ""
        mark, mac, rank, nonce, content = [*text.split(".", 4), "", "", "", ""][:5]
        if mark != _MARK or not rank.isascii() or not rank.isdecimal() or len(rank) > 9:
            raise NotOursError("it is not sealed with the job's key")
        if not hmac.compare_digest(mac.encode(), self._mac(name, int(rank), nonce, content, session).encode()):
            raise NotOursError("it is sealed with another key, or for another place or start")
        if author is not None and int(rank) != author:
            raise NotOursError(f"it is sealed by rank {rank}")
        return content, nonce

    def _mac(self, name: str, rank: int, nonce: str, content: str, session: str | None = None) -> str:
        assert self._key is not None
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        session = self._session if session is None else session
        for part in (self._scope, session, name, str(rank), nonce, content):
            data = part.encode("utf-8", "surrogatepass")
            mac.update(len(data).to_bytes(8, "big"))
            mac.update(data)
        return mac.hexdigest()
