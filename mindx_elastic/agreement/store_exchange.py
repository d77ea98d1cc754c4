"""Carries requests, offers and decisions over the process group's c10d store.

Keys, all under one prefix per attempt and guard:

==========================  =====================================================================
``request``                 the first stop request (compare-and-set), JSON
``request/others``          how many ranks have asked for a stop and not been the first
``bell/{rank}``             rung once: wakes that rank's listener, which sleeps in `store.wait`
``{round}/offer/{rank}``    a step, ``cannot`` or ``left``
``{round}/count``           how many ranks have offered; the rank that completes it concludes
``{round}/decision``        the decision cell (compare-and-set), JSON
``start/round{n}/...``      the meetings of a start, see `gather`
``told/{name}/{rank}``      what the ranks tell each other later
``pause/{n}``               order n to pause or to go on (compare-and-set): why it was given; its
                            rounds are ``pause/{n}`` (where to wait) and ``pause/{n}/here`` (all do)
==========================  =====================================================================

All values but counters and bells are sealed where the job has a key (`sealed`). A value that no rank of this job can
have written is logged once and not obeyed: a rank goes on listening; a cell with such a value counts as empty; a round
without sound offers ends with each rank acting alone. So a stranger who can write to the store can delay or prevent an
agreement (a firewall must keep strangers out), but cannot make a rank ignore a stop.

A stop costs a rank six messages to the store where one rank has heard the alarm, seven or eight where all have;
O(ranks) values are written or read only by the one that concludes, and by the two that ring. We use connections of our
own (`clone`): a client blocked in `wait` holds its connection's lock and would stall torch's own use of it.

Each rank has its own bell, so that a rank that ends can wake its own listener.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from mindx_elastic.agreement.exchange import Exchange, PauseRequest
from mindx_elastic.agreement.gather import Gathering, Store, is_missing_key
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.agreement.stop_step import (
    FINISHED,
    LEFT,
    MAX_CELL,
    Decision,
    End,
    Offer,
    check_decision,
    conclude,
    parse_decision,
    parse_offer,
)
from mindx_elastic.alarm.alarm import MAX_REQUEST, StopRequest
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.ready_thread import ReadyThread, ThreadTask

__all__ = ["StoreExchange"]

_T = TypeVar("_T")
_ANSWER_S = 1.0  # a store on the job's own network answers in a millisecond
_BURST_S = 0.0005  # and for each rank: one thread serves them all, and in a stop they come at once
_LATE_ANSWERS = 2  # times as long as this a call may be late before the store is given up in a stop
_ABSENT = "?"
_MAX_REASON = 300
_KNOWN_S = 5.0  # every rank waits for the same decision; only a killed one never says that it knows
_FOREVER = timedelta(days=365)  # a wait that times out prints a C++ warning; the bell ends it instead
_TRIES = 4  # to take a cell back from a stranger who writes into it
_LOOK_AGAIN_S = 0.05
_LOOK_BURST_S = 0.0001  # and for each rank: of a death, all that know of it ask the store at each look
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 2.0


class StoreExchange(Gathering, Exchange):
    """An exchange over a c10d store.

    `connect` gives a new, independent connection to the store each time it is called (see `clone` in torch). Raises
    what `connect` raises; after that a lost store never raises out of `decide`, `request` or `leave`: the rank acts
    alone.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        world_size: int,
        host_rank: int | None = None,
        seal: Seal | None = None,
        give_back: Callable[[Sequence[Store]], None] = lambda stores: None,
    ) -> None:
        """`host_rank`: the rank whose process hosts the store; None: none of them. `seal`: None: nothing is sealed.

        `give_back` is called at the end, with connections that nothing uses any more.
        """
        Exchange.__init__(self)
        seal = Seal(None, "", rank) if seal is None else seal
        Gathering.__init__(self, connect(), seal, rank=rank, world_size=world_size)
        self._give_back = give_back
        self._host_rank = host_rank
        self._bell = connect()
        self._waiter = connect()  # waits for decisions without the lock: the other thread must not wait with it
        self._closed = threading.Event()
        self._lost = False
        self._late: ThreadTask[Any] | None = None
        self._won: StopRequest | None = None
        self._listener: threading.Thread | None = None
        self._callers = [ReadyThread("mindx-store"), ReadyThread("mindx-store")]  # the watcher's, the training thread's
        self._choosing = threading.Lock()
        self._warned: set[str] = set()
        self._on_order: Callable[[PauseRequest], None] = lambda order: None

    @property
    def _answer_s(self) -> float:
        """How long the store may take for one answer while all ranks ask it."""
        return _ANSWER_S + _BURST_S * self.world_size

    @property
    def is_sealed(self) -> bool:
        return self.seal.is_keyed

    def derive(self, text: str) -> str:
        return self.seal.derive(text)

    def listen(
        self,
        on_request: Callable[[StopRequest], None],
        on_order: Callable[[PauseRequest], None] = lambda order: None,
    ) -> None:
        self._on_order = on_order

        def run() -> None:
            try:
                request = self._wait_for_request()
            except Exception as error:
                # The store's host is gone: a peer has died or the job is over. Collectives will tell the main thread.
                logger.debug("listener of rank %d ended: %s", self.rank, error)
                return
            if request is not None:
                on_request(request)

        self._listener = threading.Thread(target=run, name="mindx-listener", daemon=True)
        self._listener.start()
        for caller in self._callers:  # now: a dying process may have no room for another thread
            caller.start()

    def _wait_for_request(self) -> StopRequest | None:
        """The first valid request; None when the exchange is closed. Raises what a lost store raises.

        A stranger may ring, or write something else in place of the request: the listener goes on listening.
        """
        bell, pause_s = f"bell/{self.rank}", 0.1
        while True:
            self._bell.wait([bell], _FOREVER)
            if self._won is not None and not self._closed.is_set():  # this rank has asked itself, and knows the answer
                return self._won
            content = None if self._closed.is_set() else self._find_request()
            if content is None and not self._closed.is_set():
                if self._hear_order():
                    self._closed.wait(_LEAST_PAUSE_S)
                else:
                    self._warn_of_stranger(bell, NotOursError("it rings without a stop request"))
                    self._closed.wait(pause_s)
                    pause_s = min(_MOST_PAUSE_S, 2 * pause_s)
                self._bell.delete_key(bell)
                if not self._closed.is_set():  # what is written from now on rings again; this has come meanwhile
                    self._hear_order()
                    content = self._find_request()
            if self._closed.is_set() or content is not None:
                return content

    def _peek(self, store: Store, key: str) -> bytes | None:
        """What the cell `key` holds, by one message: `get` sends two. None: nothing."""
        found = store.compare_set(key, _ABSENT, _ABSENT)  # writes nothing, whatever is there
        return None if found == _ABSENT.encode() else found

    def _find_request(self) -> StopRequest | None:
        if (message := self._peek(self._bell, "request")) is None:
            return None
        try:
            return self._open_request(message)
        except NotOursError as error:
            self._warn_of_stranger("request", error)
        return None

    def _hear_order(self) -> bool:
        """The listener: tell of an order that is newer than the known one. Returns whether one was ever given."""
        before = self._order
        if self._newest_order(self._bell).number > before.number:
            self._on_order(self._order)
        return self._order.number > 0

    def _newest_order(self, store: Store) -> PauseRequest:
        newest = self._order
        while (message := self._peek(store, key := f"pause/{newest.number + 1}")) is not None:
            try:
                newest = PauseRequest(newest.number + 1, self.seal.open(key, message, limit=MAX_CELL))
            except NotOursError as error:
                self._warn_of_stranger(key, error)
                break
        if newest.number > self._order.number:
            self._order = newest
        return self._order

    def order(self, *, pause: bool, reason: str) -> PauseRequest:
        def give() -> PauseRequest:
            with self._lock:
                newest = self._newest_order(self._store)
                if newest.is_pause == pause:
                    return newest
                key = f"pause/{newest.number + 1}"
                message = self.seal.close(key, printable(reason, _MAX_REASON))
                self._put_first(key, message, lambda found: self.seal.open(key, found, limit=MAX_CELL))
                self._ring_all()
                return self._newest_order(self._store)

        # In the middle of a training: a store that is slow now may be asked again when a stop needs it.
        return self._bounded(give, self._answer_s, give_up=False)

    def _put_first(self, key: str, message: str, check: Callable[[bytes], _T]) -> _T | None:
        """Put `message` into the cell `key` unless a rank of this job has been there first. Returns what `check` makes
        of the cell's content; None: a stranger writes there again and again."""
        found = b""
        for _ in range(_TRIES):
            found = self._store.compare_set(key, found, message)
            try:
                return check(found)
            except ValueError as error:
                self._warn_of_stranger(key, error)
        return None

    def _ring_all(self) -> None:
        ranks = range(self.world_size)
        self._store.multi_set([f"bell/{r}" for r in ranks], ["1" for _ in ranks])

    def _open_request(self, message: bytes) -> StopRequest:
        """Raises NotOursError."""
        text = self.seal.open("request", message, limit=MAX_REQUEST)
        try:
            return StopRequest.decode(text, self.world_size)
        except ValueError as error:
            raise NotOursError(str(error)) from None

    def request(self, mine: StopRequest) -> StopRequest:
        message = self.seal.close("request", mine.encode())

        def ask() -> StopRequest:
            with self._lock:
                found = self._put_first(
                    "request", message, lambda found: (self._open_request(found), found == message.encode())
                )
                won, is_mine = found or (None, False)
                self._won = won
                # Where a launcher signals all ranks, all of them ask: ranks squared, if each rang all bells. The winner
                # rings, and the first other one, should the winner die before it does.
                if won is None or is_mine or self._store.add("request/others", 1) == 1:
                    self._ring_all()
            return mine if won is None else won

        try:
            # A store that is only slow takes the request later: `decide` says when to give it up. A rank that gave it
            # up here would make no offer, and all others would wait for that in vain.
            return self._bounded(ask, self._answer_s, give_up=False)
        except Exception as error:
            logger.warning("the store of the process group has not answered the stop request: %s", error)
            return mine

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        # A call that is still under way holds the connection: without it there is no offer.
        if self._late is not None and not self._late.done.wait(min(timeout_s, _LATE_ANSWERS * self._answer_s)):
            self._lost = True
        try:
            return self._bounded(
                lambda: self._decide(name, offer, timeout_s),
                timeout_s + self._answer_s,
                meanwhile=lambda: self._look_for_deaths(name),
            )
        except Exception as error:
            return Decision(None, f"the store of the process group does not answer ({type(error).__name__})")

    def _look_for_deaths(self, name: str) -> bool:
        """While this rank waits for a decision: end the open rounds if a rank is dead that has made no offer. One that
        has made it may have saved and left. False: that is done."""
        dead = [rank for rank in self.gone() if not self._has_offered(name, rank)]
        if dead:
            self.abandon(f"{rank_list(dead)} {'is' if len(dead) == 1 else 'are'} gone", name)
        return not dead

    def _has_offered(self, name: str, rank: int) -> bool:
        try:
            return self._offer_of(name, rank) is not None
        except Exception:
            return True  # it is not known, and the round has its own time-out

    def _offer_of(self, name: str, rank: int) -> Offer | None:
        """What a rank has offered in a round; None: nothing. Raises what a lost store raises, and NotOursError."""
        key = f"{name}/offer/{rank}"

        def ask() -> Offer | None:
            with self._lock:
                return self._open_offer(key, self._store.get(key), rank) if self._store.check([key]) else None

        return self._bounded(ask, self._answer_s, give_up=False)

    def _decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        end = time.monotonic() + timeout_s
        with self._lock:
            # The training thread may have made this rank's offer already (`finish`); it is the same one offer.
            full = name not in self._offers and self._offer(name, offer)
            if full and (proposal := self._proposal(name)) is not None:
                return self._settle(name, proposal)
        with suppress(Exception):
            self._waiter.wait([f"{name}/decision"], timedelta(seconds=max(0.01, timeout_s)))
            while True:
                with self._lock:
                    found = self._look(name)
                if found is not None:
                    return found
                if time.monotonic() + _LOOK_AGAIN_S > end:
                    break
                time.sleep(_LOOK_AGAIN_S)  # a stranger's value is there; a rank may still replace it
        with self._lock:
            # The rank that reached the full count may have read a stranger's values; or no rank did, because a
            # stranger has changed the count. So look for the offers themselves before acting alone.
            keys = [f"{name}/offer/{r}" for r in range(self.world_size)]
            proposal = self._proposal(name) if self._store.check(keys) else None
            return self._settle(
                name, proposal or Decision(None, f"rank {self.rank} did not hear from every rank in time")
            )

    def announce(self, name: str, offer: Offer, *, is_stop: bool = True) -> None:
        def tell() -> None:
            with self._lock:
                if name not in self._offers and self._offer(name, offer):
                    proposal = self._proposal(name)
                    if proposal is not None:
                        self._settle(name, proposal)

        try:
            self._bounded(tell, self._answer_s, give_up=is_stop)
        except Exception as error:
            logger.debug("rank %d could not announce %s for %s: %s", self.rank, offer, name, error)

    def decided(self, name: str) -> Decision | None:
        def look() -> Decision | None:
            with self._lock:
                return self._look(name)

        return self._bounded(look, self._answer_s, give_up=False)

    def finish(self, step: int, timeout_s: float) -> Decision:
        decision = self.decide("stop", End(step), timeout_s)
        if decision == FINISHED:
            # The rank that hosts the store must not end before all others have read this.
            self.decide("known", step, _KNOWN_S)
        return decision

    def leave(self) -> None:
        self.announce("stop", LEFT)
        self.announce("salvage", LEFT)

    def has_left(self, rank: int) -> bool:
        try:
            offer = self._offer_of("stop", rank)
        except Exception:
            return False
        return offer == LEFT or isinstance(offer, End)

    def abandon(self, reason: str, *more: str) -> None:
        def settle() -> None:
            with self._lock:
                for name in dict.fromkeys(("stop", "salvage", *more)):
                    self._settle(name, Decision(None, reason))

        try:
            self._bounded(settle, self._answer_s)
        except Exception as error:
            logger.debug("rank %d could not end the open rounds: %s", self.rank, error)

    def hear_death(self, rank: int) -> None:
        self._lost |= rank == self._host_rank  # each further call would print a page of C++ frames

    # --- what the ranks tell each other later ---

    def tell(self, name: str, value: str) -> bool:
        try:
            # Also in the middle of a training: a store that is slow now may be asked again when it matters.
            self._bounded(lambda: self._write({f"told/{name}/{self.rank}": value}), self._answer_s, give_up=False)
        except Exception as error:
            logger.debug("rank %d could not tell the others its %r: %s", self.rank, name, error)
            return False
        return True

    def try_collect(self, name: str, ranks: Sequence[int] | None = None) -> list[str] | None:
        ranks = range(self.world_size) if ranks is None else ranks
        keys = [f"told/{name}/{r}" for r in ranks]

        def ask() -> list[str] | None:
            return self._read(keys, ranks) if self._wait(keys, 0.0) else None

        # In the middle of a training: a store that is slow now may be asked again when it matters.
        return self._bounded(ask, self._answer_s, give_up=False)

    def close(self) -> None:
        self._closed.set()
        try:
            self._bounded(lambda: self._store.set(f"bell/{self.rank}", "1"), self._answer_s)
        except Exception as error:
            logger.debug("rank %d could not ring its own bell: %s", self.rank, error)
        is_idle = not self._lost and not any(caller.busy for caller in self._callers)
        for caller in self._callers:
            caller.close(0.0 if caller.busy else 2.0)
        if self._listener is not None:
            self._listener.join(timeout=2.0)
            is_idle = is_idle and not self._listener.is_alive()
        if is_idle:
            self._lost = True  # a late call from another thread does not use them any more
            self._give_back([self._store, self._bell, self._waiter])

    def _bounded(
        self,
        work: Callable[[], _T],
        timeout_s: float,
        *,
        give_up: bool = True,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Run a store call in one of our ready threads, and wait `timeout_s` seconds at most.

        Store calls other than `wait` have no time-out: with the store's host frozen or cut off they would hold the
        watcher past the deadline. A store that has not answered once is not asked again. `meanwhile` is called now and
        then while this waits, until it returns False. Raises TimeoutError or the call's error.
        """
        if self._lost:
            raise TimeoutError("the store did not answer before")
        with self._choosing:
            caller = next((c for c in self._callers if not c.busy), None)
            if caller is None:  # both wait for a slow answer (`try_collect` does not give the store up)
                self._callers.append(caller := ReadyThread("mindx-store"))
            job = caller.submit(work)
        end, look_s = time.monotonic() + timeout_s, max(_LOOK_AGAIN_S, _LOOK_BURST_S * self.world_size)
        while not job.done.wait(look_s) and time.monotonic() < end and meanwhile():
            pass
        try:
            return job.wait(end - time.monotonic())
        except TimeoutError:
            if job.done.is_set():
                return job.wait(0.0)  # it ended in this moment, or has raised an error of this kind itself
            self._lost, self._late = self._lost or give_up, job
            raise TimeoutError(f"the store did not answer in {timeout_s:g} s") from None

    def _offer(self, name: str, offer: Offer) -> bool:
        """Publish an offer. Returns whether it was the last one missing."""
        self._offers[name] = offer
        key = f"{name}/offer/{self.rank}"
        self._store.set(key, self.seal.close(key, str(offer)))
        return self._store.add(f"{name}/count", 1) == self.world_size

    def _open_offer(self, key: str, message: bytes, author: int) -> Offer:
        """Raises ValueError."""
        return parse_offer(self.seal.open(key, message, author=author, limit=MAX_CELL))

    def _proposal(self, name: str) -> Decision | None:
        """The decision that follows from all offers; None: not all of them were written by their ranks."""
        keys = [f"{name}/offer/{r}" for r in range(self.world_size)]
        mine = self._offers[name]
        offers = []
        try:
            values = self._store.multi_get(keys)
        except Exception as error:
            if not is_missing_key(error):
                raise
            self._warn_of_stranger(f"{name}/count", NotOursError("it is not the number of offers"))
            return None
        for rank, (key, value) in enumerate(zip(keys, values, strict=True)):
            try:
                # This rank's own offer is not read back.
                offers.append(mine if rank == self.rank else self._open_offer(key, value, rank))
            except ValueError as error:
                self._warn_of_stranger(key, error)
                return None
        try:
            return check_decision(conclude(offers), mine, trusted=self.is_sealed)
        except ValueError as error:
            return Decision(None, f"what the ranks have offered is not possible: {error}")

    def _look(self, name: str) -> Decision | None:
        """The decision in the cell; None: it is empty, or what it holds cannot be a decision of this job."""
        if (message := self._peek(self._store, f"{name}/decision")) is None:
            return None
        try:
            return self._read_decision(name, message)
        except ValueError as error:
            self._warn_of_stranger(f"{name}/decision", error)
            return None

    def _read_decision(self, name: str, message: bytes) -> Decision:
        """Raises ValueError for what cannot be a decision of this job."""
        decision = parse_decision(self.seal.open(f"{name}/decision", message, limit=MAX_CELL))
        mine = self._offers.get(name)
        return decision if mine is None else check_decision(decision, mine, trusted=self.is_sealed)

    def _settle(self, name: str, proposal: Decision) -> Decision:
        """Try to put `proposal` into the decision cell. Returns the valid decision that it holds afterwards."""
        key = f"{name}/decision"
        message = self.seal.close(key, proposal.encode())
        found = self._put_first(key, message, lambda found: self._read_decision(name, found))
        return found or Decision(None, f"a stranger writes to {key!r} in the store of the process group")

    def _warn_of_stranger(self, key: str, error: ValueError) -> None:
        """Once a key: a stranger may write it again and again."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(
                "%r in the store of the process group holds a value that no rank of this job has written (%s); it is "
                "not obeyed. Another program writes to the store: close its port to other users and machines",
                key,
                error,
            )
