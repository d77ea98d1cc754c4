"""Which agents are alive, whatever was heard of them and when. `tests/simulation` has several nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.failure_detector import (
    BACK_S,
    SILENCE_S,
    STANDSTILL_S,
    FailureDetector,
    Lost,
)

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("greet", "word", "word", "bye", "end", "look", "nothing")),
        st.floats(0.0, 1.5 * SILENCE_S),
        st.booleans(),
    ),
    max_size=40,
)


class Listener:
    """A detector, one agent, and what has truly happened to it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.detector = FailureDetector(self.now)
        self.connection = 0
        self.told = self.looked = self.now
        """When something last spoke for the agent; when the listener last looked."""
        self.has_left = self.is_known = False

    def wait(self, seconds: float, *, looks: bool) -> None:
        """The listener looks twice a second meanwhile, or stands still."""
        end = self.now + seconds
        while looks and self.now < end:
            self.now = min(end, self.now + STANDSTILL_S / 4)
            self.look()
        self.now = end

    def look(self) -> None:
        self.detector.look(self.now)
        if self.now - self.looked > STANDSTILL_S:
            self.told = self.now
        self.looked = self.now

    def do(self, what: str) -> None:
        """What has come is read, and then the listener looks."""
        if what == "nothing":
            return
        if what == "greet":
            self.connection, self.is_known = self.detector.greet(1, self.now, name="m", ranks=(2, 3)), True
            self.told = self.now
        elif what != "look" and self.connection:
            if what == "end":
                self.detector.end(1, self.now, connection=self.connection)
                self.connection = 0
            else:
                self.detector.hear(1, self.now, goodbye=what == "bye")
                self.has_left = self.has_left or what == "bye"
            self.told = self.now
        self.look()

    @property
    def lost(self) -> list[Lost]:
        return self.detector.lost()


@given(EVENTS)
def test_an_agent_is_lost_when_nothing_spoke_for_it_for_so_long_while_the_listener_read(events: Any) -> None:
    one = Listener()
    for what, seconds, looks in events:
        one.wait(seconds, looks=looks)
        one.do(what)
        patience_s = SILENCE_S if one.connection else BACK_S
        is_lost = one.is_known and not one.has_left and one.looked - one.told >= patience_s
        assert bool(one.lost) == is_lost
        for lost in one.lost:
            assert (lost.node, lost.ranks, lost.is_silent) == (1, (2, 3), bool(one.connection))
            assert lost.for_s == pytest.approx(one.looked - one.told)
        assert one.detector.connected == ([1] if one.connection else [])


def test_the_end_of_an_older_connection_says_nothing() -> None:
    """A reset that only one side has heard of yet."""
    one = Listener()
    one.do("greet")
    first = one.connection
    one.do("greet")
    one.detector.end(1, one.now, connection=first)
    assert one.detector.connected == [1]
    one.wait(2 * BACK_S, looks=True)
    assert not one.lost
