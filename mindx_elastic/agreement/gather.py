"""Roll calls of a start: every rank says something, rank 0 merges it, and all hear the outcome; or all fail together.

While a job starts, the ranks meet a few times: who is here, what each has found on its disks, whether the chosen files
could be read. In a meeting (a *round*) each rank publishes one value. Rank 0 waits for all of them, merges them with a
pure function, and answers: one text that is the same for every rank, and where the merge says so a text for each rank
alone. So each rank reads two keys whatever the size of the job, and all together move O(ranks) bytes.

==============================  ==========================================================================
``round{n}/say/{rank}``         what the rank says: the name of the meeting, a line end, JSON
``round{n}/count``              how many have spoken; the last one rings ``round{n}/bell``, for rank 0
``round{n}/own/{rank}``         rank 0's answer for that rank alone
``round{n}/answer``             the answer (compare-and-set): JSON, or ``!`` and the error of a rank
``round{n}/heard``              how many have heard an error
``round{n}/more/{key}``         parts of an answer that a rank may ask for later (`Answer.more`)
``piece/{digest}``              large values that several ranks have, written once; ``claim/{digest}`` counts them
==============================  ==========================================================================

A rank that fails between two meetings takes the answer of the coming one and rings the bell: the others raise its error
at once, also those that are waiting already. The answer is one cell, so that all ranks come to the same outcome.

Rejected: every rank reads what every rank says (that was here before: the total grew with the square of the ranks, 23
GB at 1,024); a tree of ranks (rank 0 reads 16,384 small values in less than a second, and one level is one cause of
failure); a key "a rank has failed" beside the answer (two cells can be read in two orders).

::

    with all_or_none(exchange):                 # around everything that a rank may fail in
        ...
        answer = exchange.gather("here", value, merge)
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import xxhash

from mindx_elastic import errors
from mindx_elastic.agreement.validation import making_sense
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import (
    CheckpointError,
    MindxError,
    PeerStartError,
    UnsupportedStateError,
    UntrustedMessageError,
    UsageError,
)

__all__ = [
    "START_TIMEOUT_S",
    "Answer",
    "Gathering",
    "Merge",
    "Merged",
    "Part",
    "all_or_none",
    "hear_all",
    "meet",
    "merged",
    "value_of",
]

START_TIMEOUT_S = 1800.0
"""How long a rank waits for the others in a meeting of the start. Verifying hundreds of GB on a slow disk takes
minutes, on one rank longer than on another."""
_ANSWER_S = 60.0
"""How much longer the others wait than rank 0: it tells them who has not come."""
_FAILED = "!"
_HEARD_S = 3.0
"""How long a failed rank stays, for the others to hear of it: its process may host the store, and a launcher that sees
it end will end theirs."""
_POLL_S = 0.02
_PIECE_S = 60.0  # it was written before its author spoke
_MOST_CHARACTERS = 4000
_MOST_NAMED = 8


@dataclass(frozen=True)
class Merged:
    """What rank 0 makes of everything that was said. JSON-able."""

    common: Any
    """For every rank; keep it small, all of them read it."""
    own: Sequence[Any] | None = None
    """For each rank alone, in rank order; None: nothing."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What some rank may ask for later, by a key."""


@dataclass(frozen=True)
class Answer:
    """What a rank hears."""

    common: Any
    own: Any
    digest: str
    """Of both, as text: what rank 0 may compare with what it has sent."""
    more: Callable[[Sequence[str]], list[Any]]
    """Ask for values of `Merged.more` by their keys. Main thread; raises what reading the store raises."""


Merge = Callable[[list[Any]], Merged]


class Gathering:
    """The part of an exchange that is used at the start. Main thread, all ranks together."""

    rank = 0
    world_size = 1
    _round = 0
    _told = False

    # --- what a store has to do for it; texts are sealed and opened there ---

    @abstractmethod
    def _write(self, texts: Mapping[str, str]) -> None:
        """Set these keys."""

    @abstractmethod
    def _write_first(self, key: str, text: str) -> str:
        """Set the key unless it is set; returns what it holds."""

    @abstractmethod
    def _count(self, key: str) -> int:
        """Add one, and return the sum."""

    @abstractmethod
    def _ring(self, key: str) -> None:
        """Wake who waits for the key. Whoever can write to the store may ring: check what the bell announces."""

    @abstractmethod
    def _wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys are set within the time."""

    @abstractmethod
    def _read(self, keys: Sequence[str], authors: Sequence[int | None]) -> list[str]:
        """The texts of keys that are set, in their order. Raises UntrustedMessageError for one that its author has not
        written; None: any rank."""

    def _welcome(self, key: str) -> None:
        """Rank 0 has all the first values: bind what is said from now on to this start."""

    def _be_welcomed(self, key: str) -> None:
        """The first answer is there."""

    # --- one round ---

    def gather(self, name: str, value: Any, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> Answer:
        """Say `value` (JSON-able) in the next meeting and hear the answer. `name`: the same on all ranks, for people.

        `merge`: called on rank 0 with the values of all ranks, in rank order.

        Raises what another rank has failed with since the last meeting (see `_error_of`), what `merge` has raised on
        rank 0, UsageError when the ranks are not at the same point of the start, TimeoutError when one does not come.
        """
        self.say(name, value)
        if self.rank == 0:
            self.preside(name, merge, timeout_s=timeout_s)
        return self.hear(name, timeout_s=timeout_s)

    def say(self, name: str, value: Any) -> None:
        """First part of `gather`."""
        key = f"round{self._round}"
        self._write({f"{key}/say/{self.rank}": f"{name}\n{json.dumps(value, separators=(',', ':'))}"})
        if self._count(f"{key}/count") == self.world_size:
            self._ring(f"{key}/bell")

    def preside(self, name: str, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Second part of `gather`, on rank 0. Its errors are in the answer, which `hear` raises."""
        key = f"round{self._round}"
        try:
            if not self._wait([f"{key}/bell"], timeout_s):
                raise TimeoutError(self._who_is_missing(key, name, timeout_s))
            keys = [f"{key}/say/{rank}" for rank in range(self.world_size)]
            if not self._wait(keys, 0.0):
                # A rank has failed and has taken the answer; or somebody else has rung.
                if self._wait([f"{key}/answer"], 0.0):
                    return
                if not self._wait(keys, timeout_s):
                    raise TimeoutError(self._who_is_missing(key, name, timeout_s))
            said = [text.partition("\n") for text in self._read(keys, range(self.world_size))]
            self._welcome(key)
            for rank, (what, _, _) in enumerate(said):
                if what != name:
                    raise UsageError(
                        f"rank {rank} is at {printable(what, _MOST_CHARACTERS)!r} of its start and rank 0 at {name!r}: "
                        "give all ranks the same arguments and environment variables"
                    )
            with making_sense(f"what the ranks say of {name!r}"):
                merged = merge([json.loads(text) for _, _, text in said])
        except BaseException as error:
            self._told = True
            self._failure = error
            self._write_first(f"{key}/answer", _failure_text(self.rank, error))
            if not isinstance(error, Exception):
                raise
            return
        texts = {f"{key}/more/{each}": _dump(content) for each, content in merged.more.items()}
        if merged.own is not None:
            texts |= {f"{key}/own/{rank}": _dump(own) for rank, own in enumerate(merged.own)}
        if texts:
            self._write(texts)
        self._write_first(f"{key}/answer", _dump([merged.own is not None, merged.common]))

    _failure: BaseException | None = None

    def hear(self, name: str, *, timeout_s: float = START_TIMEOUT_S) -> Answer:
        """Last part of `gather`."""
        key = f"round{self._round}"
        self._round += 1
        if not self._wait([f"{key}/answer"], timeout_s + _ANSWER_S):
            raise TimeoutError(f"rank {self.rank} waited {timeout_s:g} s for rank 0 at {name!r} of the start")
        self._be_welcomed(key)
        (text,) = self._read([f"{key}/answer"], [None])
        if text.startswith(_FAILED):
            self._told = True  # the rank that has failed has told all others
            self._count(f"{key}/heard")
            if self._failure is not None:
                raise self._failure
            raise _error_of(text[len(_FAILED) :])
        with making_sense(f"the answer to {name!r}"):
            has_own, common = json.loads(text)
        own_text = self._read([f"{key}/own/{self.rank}"], [0])[0] if has_own else ""
        with making_sense(f"the answer to {name!r}"):
            own = json.loads(own_text) if has_own else None
        return Answer(
            common, own, xxhash.xxh3_128_hexdigest((text + own_text).encode()), lambda keys: self._more(key, keys)
        )

    def _more(self, key: str, keys: Sequence[str]) -> list[Any]:
        texts = self._read([f"{key}/more/{each}" for each in keys], [0] * len(keys))
        with making_sense("a part of rank 0's answer"):
            return [json.loads(text) for text in texts]

    def _who_is_missing(self, key: str, name: str, timeout_s: float) -> str:
        missing = [rank for rank in range(self.world_size) if not self._wait([f"{key}/say/{rank}"], 0.0)]
        named = ", ".join(map(str, missing[:_MOST_NAMED]))
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return (
            f"rank{'s' * (len(missing) > 1)} {named}{more} did not come to {name!r} of the start within {timeout_s:g} "
            "s: is every rank entering the guard?"
        )

    def put_once(self, texts: Mapping[str, str]) -> None:
        """Write texts that several ranks may have, by their digests: one of the ranks does. Before `say`."""
        mine = {f"piece/{digest}": text for digest, text in texts.items() if self._count(f"claim/{digest}") == 1}
        if mine:
            self._write(mine)

    def read_pieces(self, digests: Sequence[str]) -> dict[str, str]:
        """What was written with `put_once` before the last meeting. Raises UntrustedMessageError for another text."""
        if not self._wait([f"piece/{digest}" for digest in digests], _PIECE_S):
            raise UntrustedMessageError("a part of what the ranks have said is not in the store of the process group")
        texts = self._read([f"piece/{digest}" for digest in digests], [None] * len(digests))
        for digest, text in zip(digests, texts, strict=True):
            if xxhash.xxh3_128_hexdigest(text.encode()) != digest:
                raise UntrustedMessageError("a part of what the ranks have said is not what its digest says")
        return dict(zip(digests, texts, strict=True))

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others, in place of what they wait for. Never raises; blocks for seconds at
        most."""
        if self._told:
            return
        self._told = True
        key = f"round{self._round}"
        try:
            self._write_first(f"{key}/answer", _failure_text(self.rank, error))
            self._ring(f"{key}/bell")
            heard = self._count(f"{key}/heard")
            end = time.monotonic() + _HEARD_S
            while heard < self.world_size and time.monotonic() < end:
                time.sleep(_POLL_S)
                heard = self._heard(f"{key}/heard")
        except Exception as problem:
            logger.debug("the other ranks cannot be told of %r: %s", error, problem)

    @abstractmethod
    def _heard(self, key: str) -> int:
        """What `_count` has counted."""


class Part:
    """One thing that the ranks tell each other in a meeting. Each rank has one; rank 0's also merges."""

    name = ""
    """The same on all ranks."""

    def say(self) -> Any:
        """This rank's value, JSON-able."""
        return None

    def merge(self, said: Sequence[Any]) -> Merged:
        """On rank 0, of all ranks' values in their order. Whatever does not make sense may raise ValueError, KeyError,
        TypeError..., see `validation.making_sense`."""
        return Merged(None)

    def hear(self, answer: Answer) -> None:
        """On every rank, rank 0 included."""


class _Gathers(Protocol):
    def gather(self, name: str, value: Any, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> Answer: ...


def meet(exchange: _Gathers, name: str, parts: Sequence[Part], *, timeout_s: float = START_TIMEOUT_S) -> Answer:
    """One meeting for several parts; rank 0 merges them in their order. Main thread, all ranks together; raises what
    `Gathering.gather` raises, and what hearing a part raises."""
    answer = exchange.gather(name, value_of(parts), lambda said: merged(parts, said), timeout_s=timeout_s)
    hear_all(parts, answer)
    return answer


def value_of(parts: Sequence[Part]) -> dict[str, Any]:
    """What a rank says for all `parts`."""
    return {part.name: part.say() for part in parts}


def merged(parts: Sequence[Part], said: Sequence[Any]) -> Merged:
    """Rank 0's answer for all `parts`."""
    answers = {part.name: part.merge([each[part.name] for each in said]) for part in parts}
    own = {name: each.own for name, each in answers.items() if each.own is not None}
    return Merged(
        {name: each.common for name, each in answers.items()},
        [{name: each[rank] for name, each in own.items()} for rank in range(len(said))] if own else None,
        {key: content for each in answers.values() for key, content in each.more.items()},
    )


def hear_all(parts: Sequence[Part], answer: Answer) -> None:
    """Give every part its part of the answer."""
    for part in parts:
        with making_sense(f"the answer to {part.name!r}"):
            own = None if answer.own is None else answer.own.get(part.name)
            part.hear(replace(answer, common=answer.common[part.name], own=own))


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


def _dump(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _failure_text(rank: int, error: BaseException) -> str:
    return _FAILED + _dump([rank, type(error).__name__, str(error)[:_MOST_CHARACTERS]])


def _error_of(text: str) -> MindxError:
    """What another rank's error is here: of the same class where it is one of ours, so that a program that catches it
    does so on every rank; else a PeerStartError."""
    try:
        rank, name, message = json.loads(text)
        rank = int(rank)
    except (ValueError, TypeError):
        rank, name, message = -1, "", text
    name, message = printable(str(name), 200), printable(str(message), _MOST_CHARACTERS)
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, CheckpointError | UsageError | UntrustedMessageError):
        return kind(f"rank {rank}: {message}")
    if kind is UnsupportedStateError:
        return UnsupportedStateError(f"rank {rank}", message)
    return PeerStartError(rank, f"{name}: {message}" if message else name)
