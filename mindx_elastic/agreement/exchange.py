"""What carries the messages between ranks. `Exchange` is that of a job of one rank; `StoreExchange` that of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mindx_elastic.agreement.gather import START_TIMEOUT_S, Answer, Merge
from mindx_elastic.agreement.stop_step import FINISHED, Decision, Offer, conclude
from mindx_elastic.alarm.alarm import StopRequest

__all__ = ["Exchange", "PauseRequest"]


class PauseRequest(NamedTuple):
    """To pause, or to go on. The orders of a job are numbered, and each comes after the one before it: two ranks that
    pass on the same order write the same one, a second pause in a pause changes nothing, and a rank that has missed
    some orders needs only the newest."""

    number: int = 0
    """Odd: wait at the next boundary; even: go on. 0: none was given."""
    reason: str = ""

    @property
    def is_pause(self) -> bool:
        return bool(self.number % 2)


class Exchange:
    """What a guard and its ranks tell each other, in a job of one rank; `StoreExchange` does it for several.

    Called from the watcher thread unless said otherwise.
    """

    def __init__(self) -> None:
        self.gone: Callable[[], Sequence[int]] = lambda: ()
        """The ranks whose processes are gone. A round is not waited for if one of them has offered nothing in it. Any
        thread; asked while a rank waits for a decision."""
        self._values: dict[str, str] = {}
        self._offers: dict[str, Offer] = {}
        self._order = PauseRequest()

    @property
    def is_sealed(self) -> bool:
        """Whether what the others say is known to come from them: no one else can write it."""
        return True

    def listen(
        self,
        on_request: Callable[[StopRequest], None],
        on_order: Callable[[PauseRequest], None] = lambda order: None,
    ) -> None:
        """Call `on_request` (in a thread of the exchange) once some rank has asked for a stop, and `on_order` for a
        newer order of another rank.
        """

    def request(self, mine: StopRequest) -> StopRequest:
        """Ask every rank to stop; returns the request that won, this one or an earlier one."""
        return mine

    def order(self, *, pause: bool, reason: str) -> PauseRequest:
        """Order all ranks to pause, or to go on, unless the newest order says so already. Returns the newest one. Never
        blocks long; raises what a lost store raises."""
        if self._order.is_pause != pause:
            self._order = PauseRequest(self._order.number + 1, reason)
        return self._order

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        """Take part in round `name`; never blocks longer than about `timeout_s` seconds, never raises."""
        return conclude([offer])

    def announce(self, name: str, offer: Offer, *, is_stop: bool = True) -> None:
        """Make an offer for round `name` without waiting for its decision, unless one was made already. Any thread.
        `is_stop`: a store that does not answer now is not asked again."""
        self._offers.setdefault(name, offer)

    def decided(self, name: str) -> Decision | None:
        """What round `name` has led to, in which this rank has made an offer; None: nothing yet. Never blocks long;
        raises what a lost store raises."""
        return conclude([self._offers[name]]) if name in self._offers else None

    def finish(self, step: int, timeout_s: float) -> Decision:
        """Training thread: this rank has reached its end, boundary `step`. `FINISHED`, or what an alarm has led to."""
        return FINISHED

    def leave(self) -> None:
        """This rank has finished training; later rounds need not wait for it."""

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that it is done with training, so that its process may end."""
        return False

    def abandon(self, reason: str, *more: str) -> None:
        """A rank is dead: the open rounds of a stop, and `more`, are decided, every rank acts alone. Never blocks long,
        never raises."""

    def hear_death(self, rank: int) -> None:
        """The process of `rank` is gone, and the store with it, if it was the host. Any thread."""

    def tell(self, name: str, value: str) -> bool:
        """After the start: make `value` known to all ranks. Any thread, never blocks long, never raises. False: the
        store has not taken it."""
        self._values[name] = value
        return True

    def try_collect(self, name: str, ranks: Sequence[int] | None = None) -> list[str] | None:
        """The values of all ranks, or of `ranks`, if they are all there by now. Any thread, never blocks long.

        Raises when the store is gone; UntrustedMessageError for a value that its rank has not written.
        """
        return [self._values[name]]

    # --- the start: main thread, all ranks together, see `gather` ---

    def gather(self, name: str, value: Any, merge: Merge, *, timeout_s: float = START_TIMEOUT_S) -> Answer:
        """One meeting."""
        merged = merge([_as_read(value)])
        own = None if merged.own is None else _as_read(merged.own[0])
        return Answer(_as_read(merged.common), own, lambda keys: [_as_read(merged.more[key]) for key in keys])

    def put_once(self, texts: Mapping[str, str]) -> None:
        """Large values of a meeting, by their digests."""
        self._values.update(texts)

    def read_pieces(self, digests: Sequence[str]) -> dict[str, str]:
        """What `put_once` has written."""
        return {digest: self._values[digest] for digest in digests}

    def fail(self, error: BaseException) -> None:
        """This rank cannot start."""

    def derive(self, text: str) -> str:
        """What all ranks of the job can make of `text` and no one else; `text` itself where that cannot be."""
        return text

    def close(self) -> None:
        """End the listener. Main thread."""


def _as_read(content: Any) -> Any:
    """As another rank would read it."""
    return json.loads(json.dumps(content))
