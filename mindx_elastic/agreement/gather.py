"""Roll calls of a start: every rank says something and hears all others, or all of them fail together.

While a job starts, the ranks meet again and again: who is there, what lies on whose disk, what could be read. An error
on one rank between two such meetings (a directory that is refused, no memory, a bug) must not leave the others waiting
for it until a time-out. So the meetings are numbered, and a rank that fails answers the coming one with its error:
whoever comes there raises it at once, with the rank and the cause.

Rejected: a key "somebody has failed" (a c10d store waits for all of some keys, not for any, so it would have to be
polled); a try/except and a field for problems at each meeting (that was here before, and was forgotten at some).

::

    with all_or_none(exchange):                 # around everything that a rank may fail in
        ...
        told = exchange.gather("strategy", text, timeout_s)

An answer is ``{name}\\n{value}``, or ``!\\n{JSON}`` from a rank that has failed.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from mindx_elastic import errors
from mindx_elastic.core.events import logger
from mindx_elastic.errors import (
    CheckpointError,
    MindxError,
    PeerStartError,
    UnsupportedStateError,
    UntrustedMessageError,
    UsageError,
)

__all__ = ["Gathering", "all_or_none"]

_FAILED = "!"
_HEARD_S = 3.0
"""How long a failed rank stays, for the others to hear of it: its process may host the store, and a launcher that sees
it end will end theirs."""
_POLL_S = 0.02
_MOST_CHARACTERS = 4000


class Gathering:
    """The part of an exchange that is used at the start. Main thread, all ranks together."""

    _round = 0
    _told = False

    @abstractmethod
    def publish(self, name: str, value: str) -> None: ...

    @abstractmethod
    def collect(self, name: str, timeout_s: float) -> list[str]: ...

    @abstractmethod
    def try_collect(self, name: str) -> list[str] | None: ...

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """What every rank has said here, in rank order. `name`: the same on all ranks, for people.

        Raises what another rank has failed with since the last meeting (see `_error_of`), UsageError when the ranks
        are not at the same point of the start, TimeoutError when one does not come.
        """
        key = f"round{self._round}"
        self._round += 1
        self.publish(key, f"{name}\n{value}")
        try:
            answers = [text.partition("\n") for text in self.collect(key, timeout_s)]
        except TimeoutError as error:
            raise TimeoutError(str(error).replace(repr(key), repr(name))) from error
        failed = next((rank for rank, (what, _, _) in enumerate(answers) if what == _FAILED), None)
        if failed is not None:
            self._told = True  # it has told everybody
            self.publish(f"heard/{key}", "")
            raise _error_of(failed, answers[failed][2])
        for rank, (what, _, _) in enumerate(answers):
            if what != name:
                raise UsageError(
                    f"rank {rank} is at {_printable(what)!r} of its start and this rank at {name!r}: give all ranks "
                    "the same arguments and environment variables"
                )
        return [said for _, _, said in answers]

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others, in place of what they wait for. Never raises; blocks for seconds at
        most."""
        if self._told:
            return
        self._told = True
        key = f"round{self._round}"
        text = str(error)[:_MOST_CHARACTERS]
        try:
            self.publish(key, f"{_FAILED}\n{json.dumps([type(error).__name__, text])}")
            self.publish(f"heard/{key}", "")
            end = time.monotonic() + _HEARD_S
            while self.try_collect(f"heard/{key}") is None and time.monotonic() < end:
                time.sleep(_POLL_S)
        except Exception as problem:
            logger.debug("the other ranks cannot be told of %r: %s", error, problem)


class _Fails(Protocol):
    def fail(self, error: BaseException) -> None: ...


@contextmanager
def all_or_none(exchange: _Fails) -> Iterator[None]:
    """An error inside becomes an error on every rank, at its next `gather`. Main thread."""
    try:
        yield
    except BaseException as error:
        exchange.fail(error)
        raise


def _error_of(rank: int, text: str) -> MindxError:
    """What another rank's error is here: of the same class where it is one of ours, so that a program that catches it
    does so on every rank; else a PeerStartError."""
    try:
        name, message = json.loads(text)
    except (ValueError, TypeError):
        name, message = "", text
    name, message = _printable(str(name)), _printable(str(message))
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, CheckpointError | UsageError | UntrustedMessageError):
        return kind(f"rank {rank}: {message}")
    if kind is UnsupportedStateError:
        return UnsupportedStateError(f"rank {rank}", message)
    return PeerStartError(rank, f"{name}: {message}" if message else name)


def _printable(text: str) -> str:
    """What another process says, for the log: no control characters but line ends, and not without end."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:_MOST_CHARACTERS])
