"""Seals messages that go through the store, so that only a process with the job's key can have written them.

Every process that reaches the store's port can read, write and delete everything in it: torch's store has no passwords.
With a key that is not in the store, each message carries an HMAC-SHA256 over all that gives it its meaning: the attempt
and guard (*scope*), this start (*session*), the store's key, the rank that wrote it, and the content. `open` rejects a
message of a process without the key, for another store key, of another rank, or of another start.

::

    mx1.{mac, 64 hex digits}.{rank}.{content}

The session makes a replay of an earlier start's messages useless. It is a random number that rank 0 puts into the store
before all else, and finds there: a stranger can take its place with that of an earlier start, but then the ranks do not
understand each other, and the start fails.

Without a key the content is sent as it is. A rank with a key opens only messages that are sealed with it, so a job
cannot be downgraded to one without a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

__all__ = ["NotOursError", "Seal"]

_MARK = "mx1"
_DERIVED = "mx1-derived"
_SESSION_CHARACTERS = 32


class NotOursError(ValueError):
    """A message that was not written by a rank of this job for this place."""


class Seal:
    """One per rank and exchange. Call `begin` or `enter` in the start's thread; the other methods in any thread after
    that."""

    def __init__(self, key: bytes | None, scope: str, rank: int) -> None:
        """key: None sends messages unsealed. scope: the same on all ranks, different for each attempt and guard."""
        self._key, self._scope, self.rank = key, scope, rank
        self._session = ""

    @property
    def is_keyed(self) -> bool:
        """Whether there is a key, so that an opened message is known to come from this job."""
        return self._key is not None

    @property
    def has_session(self) -> bool:
        """Whether messages are bound to this start."""
        return bool(self._session) or self._key is None

    def begin(self, name: str) -> str:
        """Rank 0: bind all later messages to a new session. Returns the message for the others' `enter`."""
        session = secrets.token_hex(16)
        message = self.close(name, session)
        self._session = session
        return message

    def enter(self, name: str, message: bytes | str) -> None:
        """The other ranks: take over the session from rank 0. Raises NotOursError."""
        self._session = self.open(name, message, author=0, limit=_SESSION_CHARACTERS)

    def close(self, name: str, content: str) -> str:
        """Seal `content` for the store's key `name`."""
        if self._key is None:
            return content
        return f"{_MARK}.{self._mac(name, self.rank, content)}.{self.rank}.{content}"

    def open(
        self,
        name: str,
        message: bytes | str,
        *,
        author: int | None = None,
        limit: int | None = None,
        early: bool = False,
    ) -> str:
        """Check a message and return its content. `author`: the rank that must have written it; None: any. `limit`:
        most characters. `early`: its author was not bound to this start yet; a message of an earlier start under the
        same key and scope opens, too: for what can do no harm.

        Raises NotOursError.
        """
        if limit is not None and len(message) > limit + 200:
            raise NotOursError(f"{len(message)} bytes are too many")
        try:
            text = message if isinstance(message, str) else message.decode()
        except UnicodeDecodeError:
            raise NotOursError("no text") from None
        if self._key is None:
            if text.startswith(f"{_MARK}."):
                raise NotOursError("it is sealed with a key, and this rank has none")
            return text
        mark, mac, rank, content = [*text.split(".", 3), "", "", ""][:4]
        if mark != _MARK or not rank.isascii() or not rank.isdecimal() or len(rank) > 9:
            raise NotOursError("it is not sealed with the job's key")
        own = self._mac(name, int(rank), content, session="" if early else None)
        if not hmac.compare_digest(mac.encode(), own.encode()):
            raise NotOursError("it is sealed with another key, or for another place or start")
        if author is not None and int(rank) != author:
            raise NotOursError(f"it is sealed by rank {rank}")
        return content

    def derive(self, text: str) -> str:
        """A secret derived from `text` and the key; without a key `text` itself."""
        if self._key is None:
            return text
        return self._mac(_DERIVED, 0, text)

    def _mac(self, name: str, rank: int, content: str, session: str | None = None) -> str:
        assert self._key is not None
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        session = self._session if session is None else session
        for part in (self._scope, session, name, str(rank), content):
            data = part.encode("utf-8", "surrogatepass")
            mac.update(len(data).to_bytes(8, "big"))
            mac.update(data)
        return mac.hexdigest()
