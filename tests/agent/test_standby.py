"""An agent in front of torch's own rendezvous: when it goes in, when it waits, and what it finds there afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mindx_elastic.agent import standby
from mindx_elastic.agent.standby import NodePlace, Standby, offer, tell_nodes
from tests.harness import wait_until

_LIFE_S = 4.0
PLACE = NodePlace(
    name="n1",
    node=1,
    num_nodes=2,
    ranks=1,
    first=1,
    address="127.0.0.1",
    port=5,
    agent_port=6,
    scope="s1",
    generation=1,
    attempt=0,
)


class Meeting:
    """A rendezvous of this test, and the agents that come to it."""

    def __init__(self, nodes: tuple[int, int]) -> None:
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._nodes = nodes
        self.handlers: list[Any] = []

    def handler(self, *, silent: bool = False) -> Any:
        store = TCPStore("127.0.0.1", self._server.port, is_master=False, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "job")
        made: Any = DynamicRendezvousHandler.from_backend("job", store, backend, *self._nodes)
        object.__setattr__(made._settings, "keep_alive_interval", timedelta(seconds=1))
        made._state_holder._cache_duration = 0
        self.handlers.append(made)
        return made

    def standby(self, claim: Callable[[NodePlace], bool] = lambda place: True, **more: Any) -> Standby:
        return Standby(self.handler(), claim, more.pop("why_not", lambda place: ""), **more)

    @property
    def store(self) -> Any:
        return self.handlers[0]._store

    def all_meet(self, standbys: list[Standby]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda n=n, s=s: found.__setitem__(n, s.next_rendezvous()), daemon=True)
            for n, s in enumerate(standbys)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def close(self) -> None:
        for each in self.handlers:
            each._stop_heartbeats()


@pytest.fixture
def meeting() -> Any:
    made = Meeting((2, 2))
    yield made
    made.close()


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_node_takes_the_place_of_a_lost_one_in_torchs_rendezvous(meeting: Meeting) -> None:
    """Before that it stands by, although it has come to the same meeting: the others go on, and wait for nobody."""
    waits = threading.Event()
    late = meeting.standby(stand_by=waits.set)
    first, lost = meeting.standby(), meeting.standby()
    met = meeting.all_meet([first, lost])
    ranks = {met[number][1].rank: standby for number, standby in enumerate([first, lost])}
    assert sorted(ranks) == [0, 1] and all(found[0] is None for found in met.values())
    thread, found = in_thread(late.next_rendezvous)
    assert waits.wait(30) and not found
    dead: Any = ranks[1]._handler
    dead._stop_heartbeats()
    offer(meeting.store, "job", PLACE)
    thread.join(30)
    assert found == [(PLACE, None)]
    survivor: Any = ranks[0]._handler
    assert survivor.num_nodes_waiting() == 0
    state = survivor._state_holder.state
    assert state.complete and state.participants[late._handler._this_node] == 1  # type: ignore[attr-defined]
    assert len(state.participants) == 2 and dead._this_node not in state.participants
    own: Any = late._handler._this_node  # type: ignore[attr-defined]
    begun = survivor._state_holder.state.last_heartbeats[own]

    def has_lived() -> bool:
        survivor.num_nodes_waiting()
        return bool((survivor._state_holder.state.last_heartbeats[own] - begun).total_seconds() >= _LIFE_S)

    wait_until(has_lived, "the new node's heartbeats, for longer than a node without any would live")
    assert len(survivor._state_holder.state.participants) == 2
    # The next restart is a meeting as ever.
    offer(meeting.store, "job", None)
    met = meeting.all_meet([ranks[0], late])
    assert sorted(found[1].rank for found in met.values()) == [0, 1]


def test_a_node_that_torch_has_put_aside_comes_out_of_its_wait(meeting: Meeting) -> None:
    """It looked before the meeting was complete, and came to it as the third of two."""
    late = meeting.standby()
    before = late.seek
    calls = []

    def seek_once() -> Any:
        calls.append(1)
        return None if len(calls) == 1 else before()

    late.seek = seek_once  # type: ignore[method-assign]
    meeting.all_meet([meeting.standby(), meeting.standby()])
    thread, found = in_thread(late.next_rendezvous)
    wait_until(lambda: len(calls) == 2, "its second look")
    offer(meeting.store, "job", PLACE)
    thread.join(30)
    assert found == [(PLACE, None)]
    assert "sync" not in vars(late._handler._state_holder)  # type: ignore[attr-defined]


def test_a_place_that_cannot_be_taken_is_passed_once(meeting: Meeting) -> None:
    """And the rendezvous that is closed meanwhile ends the wait, as ever."""
    asked: list[str] = []

    def claim(place: NodePlace) -> bool:
        asked.append(place.name)
        if place.name == "n2":
            raise OSError("its store is gone")
        return False

    late = meeting.standby(claim, why_not=lambda place: "two processes" if place.ranks == 2 else "")
    met = [meeting.standby(), meeting.standby()]
    meeting.all_meet(met)
    thread, found = in_thread(late.next_rendezvous)
    for number, (name, ranks) in enumerate((("n1", 1), ("n2", 1), ("n3", 2))):
        offer(meeting.store, "job", replace(PLACE, name=name, ranks=ranks))
        wait_until(lambda number=number: len(late._passed) > number, f"a look at {name}")
    meeting.store.set("mindx-elastic/job/place", "nonsense")
    wait_until(lambda: len(late._passed) == 4, "a look at nonsense")
    assert not found
    met[0]._handler.shutdown()
    thread.join(30)
    assert isinstance(found[0], RendezvousClosedError) and asked == ["n1", "n2"]


def test_a_job_that_is_to_grow_lets_a_new_node_in() -> None:
    meeting = Meeting((1, 3))
    first = meeting.standby()
    first._handler.settings.timeout._last_call = first._handler.settings.timeout.join / 1000  # type: ignore[attr-defined]
    meeting.all_meet([first])
    tell_nodes(meeting.store, "job", 1)
    assert meeting.standby().seek() is None
    tell_nodes(meeting.store, "job", 2)  # one of two is lost: a place may be offered in a moment
    patience, standby._PATIENCE_S = standby._PATIENCE_S, 0.5
    try:
        began = time.monotonic()
        assert meeting.standby().seek() is None
        assert time.monotonic() - began >= 0.5
    finally:
        standby._PATIENCE_S = patience
    assert first.seek() is None, "it takes part already"
    meeting.close()


def test_a_place_is_read_as_it_was_written() -> None:
    assert NodePlace.from_json(PLACE.to_json()) == PLACE


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": -1},
        {"node": 3},
        {"ranks": 0},
        {"first": -1},
        {"generation": 0},
        {"scope": "../x"},
        {"attempt": -1},
        {"name": ""},
    ],
)
def test_a_place_that_makes_no_sense_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its|a place"):
        NodePlace.from_json(replace(PLACE, **wrong).to_json())
