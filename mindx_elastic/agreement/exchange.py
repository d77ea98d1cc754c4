"""Carries requests, offers and decisions over the process group's c10d store.

Keys, all under one prefix per attempt and guard:

==========================  =====================================================================
``request``                 the first stop request (compare-and-set), JSON
``bell/{rank}``             rung once: wakes that rank's listener, which sleeps in `store.wait`
``{round}/offer/{rank}``    a step, ``cannot`` or ``left``
``{round}/count``           how many ranks have offered; whoever makes it full concludes
``{round}/decision``        the decision cell (compare-and-set), JSON
``stop/known``, ``all_know``  how many ranks know that all have finished
==========================  =====================================================================

O(1) store operations a rank and round, O(ranks) for the one that concludes. The store is used through connections of
our own (`clone`): a client blocked in `wait` holds its connection's lock and would stall torch's own use of it.

One bell a rank, and not one for all, lets a rank that ends wake its own listener.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from mindx_elastic.agreement.gather import Gathering
from mindx_elastic.agreement.stop_step import (
    FINISHED,
    LEFT,
    Decision,
    End,
    Offer,
    StopRound,
    parse_decision,
    parse_offer,
)
from mindx_elastic.events import logger
from mindx_elastic.ready_thread import ReadyThread

__all__ = ["Exchange", "LocalExchange", "Store", "StoreExchange"]

_T = TypeVar("_T")
_NOTHING = Decision(None)
_ANSWER_S = 1.0  # a store on the job's own network answers in a millisecond
_KNOWN_S = 5.0  # every rank waits for the same decision; only a killed one never says that it knows
_FOREVER = timedelta(days=365)  # a wait that times out prints a C++ warning; the bell ends it instead


class Store(Protocol):
    """The part of `torch.distributed.Store` that we use."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


class Exchange(Protocol):
    """Port between the guard and whatever carries its messages.

    Called from the watcher thread unless said otherwise.
    """

    def listen(self, on_request: Callable[[dict[str, Any]], None]) -> None:
        """Call `on_request` (in a thread of the exchange) once some rank has asked for a stop."""

    def request(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Ask every rank to stop; returns the request that won, this one or an earlier one."""

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        """Take part in round `name`; never blocks longer than about `timeout_s` seconds, never raises."""

    def announce(self, name: str, offer: Offer) -> None:
        """Make an offer for round `name` without waiting for its decision, unless one was made already. Any thread."""

    def finish(self, step: int, timeout_s: float) -> Decision:
        """Training thread: this rank has reached its end, boundary `step`. `FINISHED`, or what an alarm has led to."""

    def leave(self) -> None:
        """This rank has finished training; later rounds need not wait for it."""

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that it is done with training, so that its process may end."""

    def abandon(self, reason: str) -> None:
        """A rank is dead: open rounds are decided, every rank acts alone. Never blocks long, never raises."""

    def hear_death(self, rank: int) -> None:
        """The process of `rank` is gone, and the store with it, if it was the host. Any thread."""

    def publish(self, name: str, value: str) -> None:
        """Start-up, main thread: make `value` known to all ranks."""

    def collect(self, name: str, timeout_s: float) -> list[str]:
        """Start-up, main thread: the values of all ranks, in rank order. Raises TimeoutError naming who is missing."""

    def try_collect(self, name: str) -> list[str] | None:
        """The values of all ranks if they are all there by now. Any thread, never blocks long.

        Raises when the store is gone.
        """

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Start-up, main thread, all ranks together: see `agreement.gather`."""

    def fail(self, error: BaseException) -> None:
        """Start-up, main thread: this rank cannot start; see `agreement.gather`."""

    def close(self) -> None:
        """End the listener. Main thread."""


class LocalExchange(Gathering):
    """A job of one rank: nobody to ask."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._first: dict[str, Any] | None = None

    def listen(self, on_request: Callable[[dict[str, Any]], None]) -> None:
        pass

    def request(self, content: Mapping[str, Any]) -> dict[str, Any]:
        if self._first is None:
            self._first = dict(content)
        return self._first

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        round_ = StopRound(0, 1)
        round_.offer()
        return round_.decide(round_.propose([offer]))

    def announce(self, name: str, offer: Offer) -> None:
        pass

    def finish(self, step: int, timeout_s: float) -> Decision:
        return FINISHED

    def leave(self) -> None:
        pass

    def has_left(self, rank: int) -> bool:
        return False

    def abandon(self, reason: str) -> None:
        pass

    def hear_death(self, rank: int) -> None:
        pass

    def publish(self, name: str, value: str) -> None:
        self._values[name] = value

    def collect(self, name: str, timeout_s: float) -> list[str]:
        return [self._values[name]]

    def try_collect(self, name: str) -> list[str] | None:
        return [self._values[name]]

    def close(self) -> None:
        pass


class StoreExchange(Gathering):
    """An exchange over a c10d store.

    `connect` gives a new, independent connection to the store each time it is called (see `clone` in torch). Raises
    what `connect` raises; after that a lost store never raises out of `decide`, `request` or `leave`: the rank acts
    alone.
    """

    def __init__(
        self, connect: Callable[[], Store], *, rank: int, world_size: int, host_rank: int | None = None
    ) -> None:
        """`host_rank`: the rank whose process hosts the store; None: none of them."""
        self.rank, self.world_size = rank, world_size
        self._host_rank = host_rank
        self._store = connect()
        self._lock = threading.Lock()  # main thread (exceptions, leaving) and watcher share the connection
        self._bell = connect()
        self._waiter = connect()  # waits for decisions without the lock: the other thread must not wait with it
        self._closed = self._lost = False
        self._listener: threading.Thread | None = None
        self._offered: set[str] = set()
        self._callers = [ReadyThread("mindx-store"), ReadyThread("mindx-store")]  # the watcher's, the training thread's
        self._choosing = threading.Lock()

    def listen(self, on_request: Callable[[dict[str, Any]], None]) -> None:
        def run() -> None:
            try:
                self._bell.wait([f"bell/{self.rank}"], _FOREVER)
                if self._closed:
                    return
                content = json.loads(self._bell.get("request"))
            except Exception as error:
                # The store's host is gone: a peer has died or the job is over. Collectives will tell the main thread.
                logger.debug("listener of rank %d ended: %s", self.rank, error)
                return
            on_request(content)

        self._listener = threading.Thread(target=run, name="mindx-listener", daemon=True)
        self._listener.start()
        for caller in self._callers:  # now: a dying process may have no room for another thread
            caller.start()

    def request(self, content: Mapping[str, Any]) -> dict[str, Any]:
        mine = dict(content)

        def ask() -> dict[str, Any]:
            with self._lock:
                won = json.loads(self._store.compare_set("request", "", json.dumps(mine)))
                ranks = range(self.world_size)
                self._store.multi_set([f"bell/{r}" for r in ranks], ["1" for _ in ranks])
            return dict(won)

        try:
            return self._bounded(ask, _ANSWER_S)
        except Exception as error:
            logger.warning("the stop request could not be told to the other ranks (%s); this rank acts alone", error)
            return mine

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        try:
            return self._bounded(lambda: self._decide(name, offer, timeout_s), timeout_s + _ANSWER_S)
        except Exception as error:
            return Decision(None, f"the store of the process group does not answer ({type(error).__name__})")

    def _decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        round_ = StopRound(self.rank, self.world_size)
        with self._lock:
            # The training thread may have made this rank's offer already (`finish`); it is the same one offer.
            full = name not in self._offered and self._offer(name, offer)
            round_.offer()
            if full:
                return round_.decide(self._settle(name, round_.propose(self._all_offers(name))))
        try:
            self._waiter.wait([f"{name}/decision"], timedelta(seconds=max(0.01, timeout_s)))
        except Exception:
            proposal = round_.time_out()
        else:
            proposal = _NOTHING  # the cell is set: whatever is proposed now loses
        with self._lock:
            return round_.decide(self._settle(name, proposal))

    def announce(self, name: str, offer: Offer) -> None:
        def tell() -> None:
            with self._lock:
                if name not in self._offered and self._offer(name, offer):
                    self._settle(name, StopRound(self.rank, self.world_size).propose(self._all_offers(name)))

        try:
            self._bounded(tell, _ANSWER_S)
        except Exception as error:
            logger.debug("rank %d could not announce %s for %s: %s", self.rank, offer, name, error)

    def finish(self, step: int, timeout_s: float) -> Decision:
        decision = self.decide("stop", End(step), timeout_s)
        if decision == FINISHED:
            # Whoever hosts the store must not end before all the others have read this.
            try:
                self._bounded(self._wait_until_all_know, _KNOWN_S + _ANSWER_S)
            except Exception as error:
                logger.debug("rank %d does not know whether all ranks have finished: %s", self.rank, error)
        return decision

    def _wait_until_all_know(self) -> None:
        with self._lock:
            if self._store.add("stop/known", 1) == self.world_size:
                self._store.set("stop/all_know", "1")
                return
        self._waiter.wait(["stop/all_know"], timedelta(seconds=_KNOWN_S))

    def leave(self) -> None:
        self.announce("stop", LEFT)
        self.announce("salvage", LEFT)

    def has_left(self, rank: int) -> bool:
        def ask() -> bool:
            with self._lock:
                key = f"stop/offer/{rank}"
                return self._store.check([key]) and self._store.get(key).decode().partition(":")[0] in (LEFT, "end")

        try:
            return self._bounded(ask, _ANSWER_S)
        except Exception:
            return False

    def abandon(self, reason: str) -> None:
        def settle() -> None:
            with self._lock:
                for name in ("stop", "salvage"):
                    self._settle(name, Decision(None, reason))

        try:
            self._bounded(settle, _ANSWER_S)
        except Exception as error:
            logger.debug("rank %d could not end the open rounds: %s", self.rank, error)

    def hear_death(self, rank: int) -> None:
        self._lost |= rank == self._host_rank  # each further call would print a page of C++ frames

    def publish(self, name: str, value: str) -> None:
        with self._lock:
            self._store.set(f"start/{name}/{self.rank}", value)

    def collect(self, name: str, timeout_s: float) -> list[str]:
        keys = [f"start/{name}/{r}" for r in range(self.world_size)]
        with self._lock:
            try:
                self._store.wait(keys, timedelta(seconds=timeout_s))
            except Exception as error:
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout_s:g} s for every rank's {name!r} at the start of training; "
                    f"is every rank entering the guard? ({error})"
                ) from error
            return [value.decode() for value in self._store.multi_get(keys)]

    def try_collect(self, name: str) -> list[str] | None:
        keys = [f"start/{name}/{r}" for r in range(self.world_size)]

        def ask() -> list[str] | None:
            with self._lock:
                return [v.decode() for v in self._store.multi_get(keys)] if self._store.check(keys) else None

        # In the middle of a training: a store that is slow now may be asked again when it matters.
        return self._bounded(ask, _ANSWER_S, give_up=False)

    def close(self) -> None:
        self._closed = True
        try:
            self._bounded(lambda: self._store.set(f"bell/{self.rank}", "1"), _ANSWER_S)
        except Exception as error:
            logger.debug("rank %d could not ring its own bell: %s", self.rank, error)
        for caller in self._callers:
            caller.close(0.0 if caller.busy else 2.0)
        if self._listener is not None:
            self._listener.join(timeout=2.0)

    def _bounded(self, work: Callable[[], _T], timeout_s: float, *, give_up: bool = True) -> _T:
        """Run a store call in one of our ready threads, and wait `timeout_s` seconds at most.

        Store calls other than `wait` have no time-out: with the store's host frozen or cut off they would hold the
        watcher past the deadline. A store that has not answered once is not asked again. Raises TimeoutError or the
        call's error.
        """
        if self._lost:
            raise TimeoutError("the store did not answer before")
        with self._choosing:
            caller = next((c for c in self._callers if not c.busy), None)
            if caller is None:  # both wait for a slow answer (`try_collect` does not give the store up)
                self._callers.append(caller := ReadyThread("mindx-store"))
            job = caller.submit(work)
        try:
            return job.wait(timeout_s)
        except TimeoutError:
            if job.done.is_set():
                raise  # the call's own
            self._lost = give_up
            raise TimeoutError(f"the store did not answer in {timeout_s:g} s") from None

    def _offer(self, name: str, offer: Offer) -> bool:
        """Publish an offer; True when it was the last one missing."""
        self._offered.add(name)
        self._store.set(f"{name}/offer/{self.rank}", str(offer))
        return self._store.add(f"{name}/count", 1) == self.world_size

    def _all_offers(self, name: str) -> list[Offer]:
        keys = [f"{name}/offer/{r}" for r in range(self.world_size)]
        return [parse_offer(value.decode()) for value in self._store.multi_get(keys)]

    def _settle(self, name: str, proposal: Decision) -> Decision:
        """Try to put `proposal` into the decision cell; whatever the cell holds afterwards is the decision."""
        return parse_decision(self._store.compare_set(f"{name}/decision", "", proposal.encode()).decode())
