"""The meetings of a start: each rank sends a value, rank 0 merges them, every rank gets the answer; or all fail.

While a job starts, the ranks meet a few times: which ranks there are, what each has found on its disks, whether the
chosen files could be read. In a meeting (a *round*) each rank publishes one value. Rank 0 waits for all of them, merges
them with a pure function, and answers: one text for all ranks and, where the merge returns them, one text for each rank
alone. So each rank reads two keys at any size of the job, and all ranks together move O(ranks) bytes. Keys, all under
``start/``:

==============================  ==========================================================================
``round{n}/say/{rank}``         the rank's value: the name of the meeting, a line end, JSON
``round{n}/count``              how many ranks have published; the last one sets ``round{n}/bell``, for rank 0
``round{n}/own/{rank}``         rank 0's answer for that rank alone
``round{n}/answer``             the answer (compare-and-set): JSON, or ``!`` and the error of a rank
``round{n}/heard``              how many ranks have read an error
``session``                     rank 0 begins the start with it (`sealed`), and with a key the others wait for it;
                                or the error of a rank that has failed before (compare-and-set)
``round{n}/more/{key}``         parts of an answer that a rank may ask for later (`Answer.more`)
``piece/{digest}``              large values that several ranks have, written once; ``claim/{digest}`` counts them
==============================  ==========================================================================

A rank that fails between two meetings writes its error into the answer of the next one and sets the bell: the other
ranks raise that error at once, also those that are waiting already. The answer is one key, so that all ranks come to
the same outcome. A rank that fails in its wait (Ctrl-C) takes the answer of that meeting, or of the next one if rank 0
was first.

Rejected: every rank reads the values of all ranks (the first design: the total grew with the square of the ranks, 23 GB
at 1,024); a tree of ranks (rank 0 spends 5 s on a whole start of 16,384 ranks, and each level adds ranks that can
fail); a key "a rank has failed" next to the answer (ranks can read two keys in two orders).

::

    with all_or_none(exchange):                 # around all code that may fail on one rank
        ...
        answer = exchange.gather("here", value, merge)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import xxhash

from mindx_elastic import errors
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.agreement.validation import making_sense
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.errors import (
    CheckpointError,
    MindxError,
    PeerStartError,
    UnmanagedStateError,
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
    "Store",
    "all_or_none",
    "hear_all",
    "is_missing_key",
    "meet",
    "merged",
    "value_of",
]

START_TIMEOUT_S = 1800.0
"""How long a rank waits for the others in a meeting of the start. Verifying hundreds of GB on a slow disk takes
minutes, and not the same time on each rank."""
_ANSWER_S = 60.0
"""How much longer the others wait than rank 0, whose error names the missing ranks."""
_QUIET_S = 60.0
"""After so long a rank says for whom it waits at the entry of its guard."""
_FAILED = "!"
_SESSION = "start/session"
_HEARD_S = 3.0
"""How long a failed rank waits for the others to read its error: its process may host the store, and when it ends the
launcher ends the others."""
_POLL_S = 0.02
_PIECE_S = 60.0  # its author has written it before its value
_KEYS_AT_ONCE = 4096  # in one message to the store
_MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class Merged:
    """Rank 0's answer to the values of all ranks. JSON-able."""

    common: Any
    """For every rank; keep it small, all of them read it."""
    own: Sequence[Any] | None = None
    """One value for each rank alone, in rank order; None: there are none."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Values that ranks may ask for later, by key."""


class Answer(NamedTuple):
    """The answer as one rank receives it."""

    common: Any
    own: Any
    more: Callable[[Sequence[str]], list[Any]]
    """Reads values of `Merged.more` by their keys. Main thread; raises what reading the store raises."""


Merge = Callable[[list[Any]], Merged]


class Store(Protocol):
    """The part of `torch.distributed.Store` that we use."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


def is_missing_key(error: Exception) -> bool:
    """Whether the store has answered that a key does not exist."""
    return type(error).__name__ == "DistStoreError"  # torch's, which this module does not import


class Gathering:
    """The part of an exchange that is used at the start, over the process group's store. Main thread, all ranks
    together."""

    def __init__(self, store: Store, seal: Seal, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.seal = rank, world_size, seal
        self._store = store
        self._lock = threading.Lock()  # main thread (exceptions, leaving) and watcher share the connection
        self._round = 0
        self._is_begun = False
        self._told = False
        self._failure: BaseException | None = None
        """What rank 0 has failed with in a meeting; and that meeting."""
        self._failed_key = ""

    # --- one round ---

    def gather(self, name: str, value: Any, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> Answer:
        """Publish `value` (JSON-able) in the next meeting and return the answer.

        `name`: of the meeting, for people; the same on all ranks. `merge`: called on rank 0 with the values of all
        ranks, in rank order.

        Raises the error with which another rank has failed since the last meeting (see `_error_of`), the error of
        `merge` on rank 0, UsageError when the ranks are not at the same point of the start, TimeoutError when a rank
        does not come.
        """
        self.say(name, value, timeout_s=timeout_s)
        if self.rank == 0:
            self.preside(name, merge, timeout_s=timeout_s)
        return self.hear(name, timeout_s=timeout_s)

    def say(self, name: str, value: Any, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """First part of `gather`: publish this rank's value. Before the first one a rank waits for rank 0."""
        if not self._has_session(timeout_s):
            raise TimeoutError(f"rank {self.rank} waited {timeout_s:g} s for rank 0 at {name!r} of the start")
        key = f"start/round{self._round}"
        self._write({f"{key}/say/{self.rank}": f"{name}\n{json.dumps(value, separators=(',', ':'))}"})
        if self._count(f"{key}/count") == self.world_size:
            self._ring(f"{key}/bell")

    def preside(self, name: str, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Second part of `gather`, on rank 0: merge and answer. Errors go into the answer; `hear` raises them."""
        key = f"start/round{self._round}"
        try:
            if not self._wait_aloud([f"{key}/bell"], timeout_s, lambda: self._missing(key)):
                raise TimeoutError(self._who_is_missing(key, name, timeout_s))
            keys = [f"{key}/say/{rank}" for rank in range(self.world_size)]
            if not self._wait(keys, 0.0):
                # A rank has failed and has written the answer; or another program has set the bell.
                if self._wait([f"{key}/answer"], 0.0):
                    return
                if not self._wait(keys, timeout_s):
                    raise TimeoutError(self._who_is_missing(key, name, timeout_s))
            said = [text.partition("\n") for text in self._read(keys, range(self.world_size))]
            for rank, (what, _, _) in enumerate(said):
                if what != name:
                    raise UsageError(
                        f"rank {rank} is at {printable(what, _MOST_CHARACTERS)!r} of its start and rank 0 at {name!r}: "
                        "give all ranks the same arguments and environment variables"
                    )
            with making_sense(f"what the ranks say of {name!r}"):
                values = [json.loads(text) for _, _, text in said]
            merged = merge(values)
        except BaseException as error:
            self._failure, self._failed_key = error, key
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

    def hear(self, name: str, *, timeout_s: float = START_TIMEOUT_S) -> Answer:
        """Last part of `gather`: wait for the answer and return it."""
        key = f"start/round{self._round}"
        if not self._wait([f"{key}/answer"], timeout_s + _ANSWER_S):
            raise TimeoutError(f"rank {self.rank} waited {timeout_s:g} s for rank 0 at {name!r} of the start")
        self._round += 1  # not before: a rank that gives up its wait takes the answer of this round
        (text,) = self._read([f"{key}/answer"], [None])
        if _is_failure(text) and self._failure is not None:
            raise self._failure  # rank 0's own; `fail` waits for the others to read it
        if _is_failure(text):
            raise self._hear_failure(key, text)
        with making_sense(f"the answer to {name!r}"):
            has_own, common = json.loads(text)
        own = None
        if has_own:
            (text,) = self._read([f"{key}/own/{self.rank}"], [0])
            with making_sense(f"the answer to {name!r}"):
                own = json.loads(text)
        return Answer(common, own, lambda keys: self._more(key, keys))

    def _hear_failure(self, key: str, text: str) -> MindxError:
        """The error that another rank has told all others in the meeting `key`."""
        self._told = True
        self._count(f"{key}/heard")
        return _error_of(text[len(_FAILED) :])

    def _more(self, key: str, keys: Sequence[str]) -> list[Any]:
        texts = self._read([f"{key}/more/{each}" for each in keys], [0] * len(keys))
        with making_sense("a part of rank 0's answer"):
            return [json.loads(text) for text in texts]

    def _who_is_missing(self, key: str, name: str, timeout_s: float) -> str:
        who = rank_list(self._missing(key))
        return f"{who} did not come to {name!r} of the start within {timeout_s:g} s: is every rank entering the guard?"

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._wait([f"{key}/say/{rank}"], 0.0)]

    def put_once(self, texts: Mapping[str, str]) -> None:
        """Write texts that several ranks may have, by their digests: one of these ranks writes each. Before `say`."""
        mine = [digest for digest in texts if self._count(f"start/claim/{digest}") == 1]
        if mine:
            self._write({f"start/piece/{digest}": texts[digest] for digest in mine})

    def read_pieces(self, digests: Sequence[str]) -> dict[str, str]:
        """Read what `put_once` wrote before the last meeting. Raises UntrustedMessageError if a digest differs."""
        if not self._wait([f"start/piece/{digest}" for digest in digests], _PIECE_S):
            raise UntrustedMessageError("a part of what the ranks have said is not in the store of the process group")
        texts = self._read([f"start/piece/{digest}" for digest in digests], [None] * len(digests))
        for digest, text in zip(digests, texts, strict=True):
            if xxhash.xxh3_128_hexdigest(text.encode()) != digest:
                raise UntrustedMessageError("a part of what the ranks have said is not what its digest says")
        return dict(zip(digests, texts, strict=True))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot continue: they get its error in place of the answer. Never raises;
        blocks for seconds at most."""
        if self._told:
            return
        self._told = True
        key = self._failed_key if error is self._failure else f"start/round{self._round}"
        text = _failure_text(self.rank, error)
        try:
            if self.rank == 0:
                with suppress(MindxError):
                    self._has_session(0.0)
            elif not self.seal.has_session:
                with suppress(NotOursError):  # the others find this rank's error there
                    self.seal.enter(_SESSION, self._set_first(_SESSION, text))
            if not _is_failure(self._write_first(f"{key}/answer", text)):
                # This rank has left its wait when rank 0 had answered (a Ctrl-C during a wait is raised at its end):
                # the others go on to the next meeting.
                key = f"start/round{self._round + 1}"
                self._write_first(f"{key}/answer", text)
            self._ring(f"{key}/bell")
            heard = self._count(f"{key}/heard")
            end = time.monotonic() + _HEARD_S
            while heard < self.world_size and time.monotonic() < end:
                time.sleep(_POLL_S)
                heard = self._count(f"{key}/heard", 0)
        except Exception as problem:
            logger.debug("the other ranks cannot be told of %r: %s", error, problem)

    # --- the store ---

    def _write(self, texts: Mapping[str, str]) -> None:
        """Set these keys."""
        messages = {key: self.seal.close(key, text) for key, text in texts.items()}
        with self._lock:
            for number in range(0, len(messages), _KEYS_AT_ONCE):
                keys = [*messages][number : number + _KEYS_AT_ONCE]
                self._store.multi_set(keys, [messages[key] for key in keys])

    def _write_first(self, key: str, text: str) -> str:
        """Set the key unless it is set; returns the value that it has then."""
        return self._open_from(key, self._set_first(key, text), None)

    def _set_first(self, key: str, text: str) -> bytes:
        with self._lock:
            return self._store.compare_set(key, "", self.seal.close(key, text))

    def _count(self, key: str, amount: int = 1) -> int:
        """Add to a counter, and return the sum."""
        with self._lock:
            return self._store.add(key, amount)

    def _ring(self, key: str) -> None:
        """Wake the process that waits for the key. Any writer of the store can ring: check what the bell announces."""
        with self._lock:
            self._store.set(key, "1")

    def _wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys are set within the time."""
        with self._lock:
            if timeout_s <= 0.0:
                return self._store.check([*keys])
            try:
                self._store.wait([*keys], timedelta(seconds=timeout_s))
            except Exception as error:
                if not is_missing_key(error):
                    raise
                return False
            return True

    def _read(self, keys: Sequence[str], authors: Sequence[int | None]) -> list[str]:
        """The texts of keys that are set, in their order. `authors`: the rank that must have written each; None: any
        rank. Raises UntrustedMessageError for a text of another author."""
        messages: list[bytes] = []
        with self._lock:
            for number in range(0, len(keys), _KEYS_AT_ONCE):
                messages += self._store.multi_get([*keys[number : number + _KEYS_AT_ONCE]])
        return [self._open_from(*each) for each in zip(keys, messages, authors, strict=True)]

    def _has_session(self, timeout_s: float) -> bool:
        """Bind this rank's messages to this start, which rank 0 begins. False: that did not come in time. Raises the
        error of a rank that has failed before."""
        if self.rank == 0 and not self._is_begun:
            own = self.seal.begin(_SESSION)
            with self._lock:
                found = self._store.compare_set(_SESSION, "", own)
            if found != own.encode():
                raise self._why_no_session(found, NotOursError("it was there before rank 0 has begun"))
            self._is_begun = True
        if self.seal.has_session:
            return True
        if not self._wait_aloud([_SESSION], timeout_s, lambda: [0]):
            return False
        with self._lock:
            message = self._store.get(_SESSION)
        try:
            self.seal.enter(_SESSION, message)
        except NotOursError as error:
            raise self._why_no_session(message, error) from None
        return True

    def _wait_aloud(self, keys: Sequence[str], timeout_s: float, missing: Callable[[], list[int]]) -> bool:
        """`_wait` for ranks that have not entered their guard yet; a long wait is told."""
        quiet_s = min(_QUIET_S, timeout_s)
        if self._wait(keys, quiet_s):
            return True
        if quiet_s < timeout_s and self._round == 0:
            logger.warning(
                "still waiting for %s: every rank has to enter its guard (%g s at most)",
                rank_list(missing()),
                timeout_s,
            )
        return self._wait(keys, timeout_s - quiet_s)

    def _why_no_session(self, message: bytes, error: NotOursError) -> MindxError:
        """What a rank raises that has found `message` in the place of rank 0's session."""
        with suppress(NotOursError):
            text = self.seal.open(_SESSION, message, early=True)
            if _is_failure(text):
                return self._hear_failure("start/round0", text)
        return UntrustedMessageError(self._complaint(_SESSION, 0, error))

    def _open_from(self, key: str, message: bytes, author: int | None) -> str:
        try:
            return self.seal.open(key, message, author=author)
        except NotOursError as error:
            raise UntrustedMessageError(self._complaint(key, author, error)) from None

    def _complaint(self, key: str, author: int | None, error: NotOursError) -> str:
        """What may be the cause."""
        whose = "" if author is None else f" of rank {author}"
        return (
            f"rank {self.rank}: {key!r}{whose} in the store of the process group was not written by this job: {error}. "
            "Give all ranks the same MINDX_JOB_KEY (or _FILE); if they have it, others reach the store's port"
        )


class Part:
    """One topic of a meeting. Each rank has an instance; that of rank 0 also merges."""

    name = ""
    """The same on all ranks."""
    only_decodes = True
    """`merge` does no more than read what was said: an error of python in it is the fault of what was said."""

    def say(self) -> Any:
        """This rank's value, JSON-able."""
        return None

    def merge(self, said: Sequence[Any]) -> Merged:
        """On rank 0: merge the values of all ranks, given in rank order. Malformed values may raise ValueError,
        KeyError, TypeError..., see `validation.making_sense`."""
        return Merged(None)

    def hear(self, answer: Answer) -> None:
        """Take the answer, on every rank including rank 0."""


class _Gathers(Protocol):
    def gather(self, name: str, value: Any, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> Answer: ...


def meet(exchange: _Gathers, name: str, parts: Sequence[Part], *, timeout_s: float = START_TIMEOUT_S) -> Answer:
    """Hold one meeting for several parts; rank 0 merges them in their order. Main thread, all ranks together; raises
    what `Gathering.gather` and `Part.hear` raise."""
    answer = exchange.gather(name, value_of(parts), lambda said: merged(parts, said), timeout_s=timeout_s)
    hear_all(parts, answer)
    return answer


def value_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A rank's value for all `parts`."""
    return {part.name: part.say() for part in parts}


def merged(parts: Sequence[Part], said: Sequence[Any]) -> Merged:
    """Rank 0's answer for all `parts`."""
    answers = {}
    for part in parts:
        with making_sense(f"what the ranks say of {part.name!r}") if part.only_decodes else nullcontext():
            answers[part.name] = part.merge([each[part.name] for each in said])
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
            part.hear(answer._replace(common=answer.common[part.name], own=own))


class _Fails(Protocol):
    def fail(self, error: BaseException) -> None: ...


@contextmanager
def all_or_none(exchange: _Fails) -> Iterator[None]:
    """Make an error inside an error of every rank, which it raises at its next `gather`. Main thread."""
    try:
        yield
    except BaseException as error:
        exchange.fail(error)
        raise


def _dump(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _is_failure(text: str) -> bool:
    """Whether an answer is the error of a rank."""
    return text.startswith(_FAILED)


def _failure_text(rank: int, error: BaseException) -> str:
    return _FAILED + _dump([rank, type(error).__name__, str(error)[:_MOST_CHARACTERS]])


def _error_of(text: str) -> MindxError:
    """Another rank's error as this rank raises it: of the same class if that is one of this package, so that a program
    catches it on every rank; else a PeerStartError."""
    try:
        rank, name, message = json.loads(text)
        rank = int(rank)
    except (ValueError, TypeError):
        rank, name, message = -1, "", text
    name, message = printable(str(name), 200), printable(str(message), _MOST_CHARACTERS)
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(
        kind, CheckpointError | UsageError | UntrustedMessageError | UnmanagedStateError
    ):
        return kind(f"rank {rank}: {message}")
    if kind is UnsupportedStateError:
        return UnsupportedStateError(f"rank {rank}", message)
    return PeerStartError(rank, f"{name}: {message}" if message else name)
