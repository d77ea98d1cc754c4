"""The ranks' rounds of pausing: at which boundary all of them wait, and when they go on.

A pause is given to one rank and must reach all. The orders of a job are numbered: odd ones pause, even ones go on, and
each comes after the one before it. So two ranks that pass on the same order write the same one, a second `pause` in a
pause changes nothing, and a rank that has missed some orders needs only the newest.

============================  ======================================================================================
``pause/{n}``                 order n (compare-and-set): why it was given, one line
``pause/{n}/offer/{rank}``    the boundary at which that rank can wait
``pause/{n}/count``           how many ranks have offered; whoever makes it full decides: the largest offer
``pause/{n}/decision``        the decision (compare-and-set)
``pause/{n}/here``            how many ranks wait at it; whoever makes it full sets ``all_here``
============================  ======================================================================================

Each news rings every rank's bell (`store_exchange`). No call waits for another rank, so the thread that hears alarms is
never held up; a round that does not come to its end is ended by the next order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.agreement.stop_step import MAX_CELL, Decision, check_decision, parse_decision, parse_offer
from mindx_elastic.core.printable import printable

__all__ = ["LocalPauseRounds", "PauseNews", "PauseRounds", "PauseStore", "StorePauseRounds"]

_T = TypeVar("_T")
_MAX_REASON = 300
_TRIES = 4  # to take a cell back from a stranger who writes into it


@dataclass(frozen=True, slots=True)
class PauseNews:
    """What is known of the newest order."""

    number: int = 0
    """Odd: a pause; 0: no order was given yet."""
    reason: str = ""
    decision: Decision | None = None
    """Of a pause; None: not every rank has made its offer yet."""
    all_here: bool = False
    """Every rank waits."""

    @property
    def is_pause(self) -> bool:
        return bool(self.number % 2)


class PauseRounds(Protocol):
    """Port between a rank's pauses and what carries them. Watcher thread; raises what a lost store raises."""

    def listen(self, on_news: Callable[[], None]) -> None:
        """Before the exchange listens: call `on_news` when another rank has news, in a thread of the exchange."""

    def order(self, number: int, reason: str) -> None:
        """Give order `number`, unless a rank has given it already."""

    def offer(self, number: int, step: int) -> None:
        """This rank can wait at boundary `step`. Once an order."""

    def arrive(self, number: int) -> None:
        """This rank waits at the boundary that was decided. Once an order."""

    def news(self) -> PauseNews:
        """What is known now."""


class LocalPauseRounds:
    """A job of one rank."""

    def __init__(self) -> None:
        self._news = PauseNews()

    def listen(self, on_news: Callable[[], None]) -> None:
        pass

    def order(self, number: int, reason: str) -> None:
        if number > self._news.number:
            self._news = PauseNews(number, reason)

    def offer(self, number: int, step: int) -> None:
        self._news = PauseNews(number, self._news.reason, Decision(step))

    def arrive(self, number: int) -> None:
        self._news = PauseNews(number, self._news.reason, self._news.decision, all_here=True)

    def news(self) -> PauseNews:
        return self._news


class PauseStore(Protocol):
    """The part of a store that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


class StorePauseRounds:
    """The rounds over a c10d store, see the module."""

    FIRST = "pause/1"
    """Is there once a pause was ever ordered; a ring before that is not about pauses."""

    def __init__(
        self,
        run: Callable[[Callable[[], object]], object],
        store: PauseStore,
        seal: Seal,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """`run` calls a function that uses `store`, alone, and gives up waiting for it after a moment."""
        self._run, self._store, self._seal = run, store, seal
        self._rank, self._world_size = rank, world_size
        self._newest = PauseNews()
        self._mine: tuple[int, int] = (0, 0)  # the newest order that this rank has made an offer for, and the offer
        self._told_here = 0
        self._on_news: Callable[[], None] = lambda: None

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def hear_ring(self) -> None:
        """The listener: this rank's bell has rung."""
        self._on_news()

    def order(self, number: int, reason: str) -> None:
        key = f"pause/{number}"
        message = self._seal.close(key, printable(reason, _MAX_REASON))

        def give() -> None:
            self._put(key, message, lambda found: self._seal.open(key, found, limit=MAX_CELL))
            self._ring()

        self._run(give)

    def offer(self, number: int, step: int) -> None:
        if self._mine[0] == number:
            return
        self._mine = (number, step)  # before it is counted: an offer that is counted twice would end the round early

        def tell() -> None:
            name = f"pause/{number}"
            key = f"{name}/offer/{self._rank}"
            self._store.set(key, self._seal.close(key, str(step)))
            if self._store.add(f"{name}/count", 1) == self._world_size:
                message = self._seal.close(f"{name}/decision", self._conclude(name).encode())
                self._put(f"{name}/decision", message, lambda found: self._decision(number, found))
                self._ring()

        self._run(tell)

    def _conclude(self, name: str) -> Decision:
        keys = [f"{name}/offer/{rank}" for rank in range(self._world_size)]
        steps = []
        for rank, (key, message) in enumerate(zip(keys, self._store.multi_get(keys), strict=True)):
            try:
                offer = parse_offer(self._seal.open(key, message, author=rank, limit=MAX_CELL))
            except ValueError as error:
                return Decision(None, f"the boundary of rank {rank} cannot be read: {error}")
            if not isinstance(offer, int):
                return Decision(None, f"rank {rank} names no boundary")
            steps.append(offer)
        return Decision(max(steps))

    def arrive(self, number: int) -> None:
        if self._told_here >= number:
            return
        self._told_here = number

        def tell() -> None:
            name = f"pause/{number}"
            if self._store.add(f"{name}/here", 1) == self._world_size:
                key = f"{name}/all_here"
                self._store.set(key, self._seal.close(key, "1"))
                self._ring()

        self._run(tell)

    def news(self) -> PauseNews:
        def look() -> None:
            newest = self._newest
            while self._store.check([f"pause/{newest.number + 1}"]):
                key = f"pause/{newest.number + 1}"
                newest = PauseNews(newest.number + 1, self._seal.open(key, self._store.get(key), limit=MAX_CELL))
            if newest.is_pause:
                newest = self._of_pause(newest)
            self._newest = newest

        self._run(look)
        return self._newest

    def _of_pause(self, newest: PauseNews) -> PauseNews:
        name, decision, here = f"pause/{newest.number}", newest.decision, newest.all_here
        if decision is None and self._mine[0] == newest.number and self._store.check([f"{name}/decision"]):
            decision = self._decision(newest.number, self._store.get(f"{name}/decision"))
        key = f"{name}/all_here"
        if decision is not None and not here and self._store.check([key]):
            here = self._seal.open(key, self._store.get(key), limit=MAX_CELL) == "1"
        return PauseNews(newest.number, newest.reason, decision, here)

    def _decision(self, number: int, message: bytes) -> Decision:
        """Raises NotOursError for what is not a decision that can follow from this rank's offer."""
        try:
            decision = parse_decision(self._seal.open(f"pause/{number}/decision", message, limit=MAX_CELL))
            return check_decision(decision, self._mine[1], trusted=self._seal.is_keyed)
        except ValueError as error:
            raise NotOursError(str(error)) from None

    def _put(self, key: str, message: str, check: Callable[[bytes], _T]) -> _T:
        """Try to put `message` into the cell `key`; the valid content that it has afterwards. Raises NotOursError."""
        found: bytes | str = ""
        for tries_left in reversed(range(_TRIES)):
            found = self._store.compare_set(key, found, message)
            try:
                return check(found)
            except NotOursError:
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _ring(self) -> None:
        ranks = range(self._world_size)
        self._store.multi_set([f"bell/{rank}" for rank in ranks], ["1" for _ in ranks])
