"""The store of torch's rendezvous is lost with its host: what agents do at the endpoint when another one is there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mindx_elastic.agent.endpoint import AGREED, Finder, Found, Kept, address_of, identify, is_adopted, move, remember
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous, agree_on_highest, reconnect
from mindx_elastic.agent.vacancies import Seeker, keys_of_agents, round_store
from mindx_elastic.rejoin.belonging import Deed
from tests.agent.test_vacancies import in_thread
from tests.harness import wait_until
from tests.system.test_agent import free_port

KEPT = Kept(0, {"mindx/restarts": b"0"}, {"mindx-elastic/job/nodes": b"2"})


class Endpoint:
    """One port, with one store after the other, and the agents that use it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.store: Any = None
        self.handlers: list[Any] = []
        self.finders: list[Finder] = []

    def host(self) -> None:
        """A new store, in the place of the one before."""
        self.store = None
        for handler in self.handlers:
            handler._stop_heartbeats()
        self.store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)

    def handler(self, nodes: tuple[int, int] = (2, 2)) -> Any:
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "job")
        made: Any = DynamicRendezvousHandler.from_backend("job", store, backend, *nodes)
        object.__setattr__(made._settings, "keep_alive_interval", timedelta(seconds=1))
        made._state_holder._cache_duration = 0
        self.handlers.append(made)
        return made

    def meet(self) -> tuple[list[Any], str]:
        """Two agents, by their numbers, and the name of the store in which they have met."""
        both = [self.handler(), self.handler()]
        waits = [in_thread(handler.next_rendezvous) for handler in both]
        for thread, _ in waits:
            thread.join(60)
        by_number = sorted(both, key=lambda handler: int(handler._state_holder.state.participants[handler._this_node]))
        return by_number, identify(self.store, "job")

    def find(
        self, handler: Any, identity: str, *, generation: int = 1, is_sure: bool = True, scope: str = "s"
    ) -> Finder:
        finder = Finder(
            handler,
            run_id="job",
            identity=identity,
            scope=scope,
            generation=generation,
            node=1,
            lost=[0],
            kept=lambda: KEPT,
            is_sure=lambda: is_sure,
        )
        self.finders.append(finder.start())
        return finder

    def close(self) -> None:
        for finder in self.finders:
            finder.stop()
        for handler in self.handlers:
            handler._stop_heartbeats()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    made.host()
    yield made
    made.close()


def outcome(finder: Finder) -> Found:
    wait_until(lambda: finder.found is not None, "what the endpoint means", 60)
    assert finder.found is not None
    return finder.found


def test_a_survivor_adopts_the_new_store_and_a_new_node_finds_itself_in_front_of_it(endpoint: Endpoint) -> None:
    """Although that has come first, and waits for enough others to begin."""
    (_, survivor), identity = endpoint.meet()
    endpoint.host()
    new: Any = endpoint.handler()
    late = HostedStoreRendezvous(new)
    seeker = Seeker(new, lambda place: True, lambda place: "")
    thread, met = in_thread(seeker.next_rendezvous)
    wait_until(lambda: new._this_node in new._state_holder.state.participants, "the new node's wait", 60)
    found = outcome(endpoint.find(survivor, identity))
    assert found.deed is Deed.CLAIM and found.identity == identify(endpoint.store, "job") != identity
    move(survivor, found)
    assert survivor.num_nodes_waiting() == 0
    state = survivor._state_holder.state
    assert is_adopted(state) and state.participants == {survivor._this_node: 1}
    assert round_store(survivor).get("mindx/restarts") == b"0"
    assert endpoint.store.get("mindx-elastic/job/nodes") == b"2"
    began = state.last_heartbeats[survivor._this_node]

    def lives() -> bool:
        survivor.num_nodes_waiting()
        return bool(survivor._state_holder.state.last_heartbeats[survivor._this_node] > began)

    wait_until(lives, "its heartbeats in the new store", 60)
    assert thread.is_alive() and not met, "it waits for a place"
    assert late.shutdown(), "a node that has none does not close the rendezvous of the others"
    assert not survivor.is_closed()
    survivor.set_closed()
    thread.join(60)


def test_the_second_survivor_follows_and_stale_ones_do_not(endpoint: Endpoint) -> None:
    (_, survivor), identity = endpoint.meet()
    endpoint.host()
    assert outcome(endpoint.find(survivor, identity, generation=2)).deed is Deed.CLAIM
    assert outcome(endpoint.find(survivor, identity, generation=2)).deed is Deed.CLAIM
    assert outcome(endpoint.find(survivor, identity, generation=2, is_sure=False)).deed is Deed.READ
    assert outcome(endpoint.find(survivor, identity, generation=1)).deed is Deed.OUT
    assert outcome(endpoint.find(survivor, identity, generation=3)).deed is Deed.RESTART
    assert outcome(endpoint.find(survivor, identity, generation=2, scope="t")).deed is Deed.RESTART


def test_the_store_that_only_stood_still_is_used_again(endpoint: Endpoint) -> None:
    (_, survivor), identity = endpoint.meet()
    found = outcome(endpoint.find(survivor, identity, is_sure=False))
    assert found.deed is Deed.CLAIM and found.identity == identity
    assert len(found.holder.state.participants) == 2 and not is_adopted(found.holder.state)


def test_a_meeting_of_which_no_heartbeat_has_come_through_goes_on(endpoint: Endpoint) -> None:
    """The store's host has stood still for longer than torch waits for a heartbeat, and the node that was given up is
    the first that comes."""
    (given_up, survivor), identity = endpoint.meet()
    for handler in (given_up, survivor):
        handler._stop_heartbeats()

    def looks_dead() -> bool:
        given_up.num_nodes_waiting()
        return not given_up._state_holder.state.complete

    wait_until(looks_dead, "the end of both nodes' heartbeats", 60)
    seeker = Seeker(given_up, lambda place: True, lambda place: "")
    seeker.was_out = True
    thread, met = in_thread(seeker.next_rendezvous)
    wait_until(lambda: given_up._this_node in given_up._state_holder.state.participants, "a meeting of its own", 60)
    found = outcome(endpoint.find(survivor, identity))
    assert found.deed is Deed.CLAIM and found.identity == identity
    move(survivor, found)
    survivor.num_nodes_waiting()
    state = survivor._state_holder.state
    assert state.complete and state.round == KEPT.round and is_adopted(state)
    assert state.participants == {survivor._this_node: 1}
    wait_until(lambda: given_up._state_holder.state.complete, "it sees that the others go on", 60)
    assert thread.is_alive() and not met, "it waits for a place"
    survivor.set_closed()
    thread.join(60)


def test_who_is_not_sure_waits_for_one_that_is(endpoint: Endpoint) -> None:
    (_, survivor), identity = endpoint.meet()
    endpoint.host()
    unsure = endpoint.find(survivor, identity, is_sure=False)
    unsure._stopping.wait(1.0)
    assert unsure.found is None
    assert outcome(endpoint.find(survivor, identity)).deed is Deed.CLAIM
    assert outcome(unsure).deed is Deed.READ


def test_new_nodes_that_have_begun_are_left_alone(endpoint: Endpoint) -> None:
    (_, survivor), identity = endpoint.meet()
    endpoint.host()
    new, _ = endpoint.meet()
    assert outcome(endpoint.find(survivor, identity)).deed is Deed.RESTART
    assert new[0].num_nodes_waiting() == 0
    assert set(new[0]._state_holder.state.participants) == {each._this_node for each in new}


def test_an_attempt_does_not_go_over_to_another_store_by_itself(endpoint: Endpoint) -> None:
    (_, survivor), identity = endpoint.meet()
    hosted = HostedStoreRendezvous(survivor)
    endpoint.host()
    hosted.identity = identity
    assert not reconnect(hosted)
    hosted.identity = ""
    assert reconnect(hosted), "between two attempts it does"


def test_what_a_meeting_leaves_is_remembered(endpoint: Endpoint) -> None:
    (first, _), _ = endpoint.meet()
    store = round_store(first)
    store.set("mindx/restarts", "0")
    store.set("torchelastic/assigned_ranks/1", "x")
    keys = keys_of_agents("job", "s", 2)
    for key in keys:
        endpoint.store.set(key, "2")
    kept = remember(first, endpoint.store, keys, 2)
    assert kept.in_round == {"mindx/restarts": b"0", "torchelastic/assigned_ranks/1": b"x"}
    assert kept.in_root == dict.fromkeys(keys, b"2")
    assert address_of(first) == ("127.0.0.1", endpoint.port)


def test_a_store_of_another_kind_has_no_endpoint() -> None:
    other: Any = object()
    assert address_of(other) is None


def test_a_new_node_finds_all_that_was_agreed_on_in_another_store(endpoint: Endpoint) -> None:
    (first, second), _ = endpoint.meet()
    old, new = round_store(first), HashStore()
    group: Any = SimpleNamespace(store=old, group_rank=0, group_world_size=2)
    for count, what in enumerate(AGREED, 3):
        old.set(f"mindx/{what}/1", "0")
        assert agree_on_highest(group, what, count, 99) == count
    for key, value in remember(second, endpoint.store, (), 2).in_round.items():
        new.set(key, value.decode())
    new.set_timeout(timedelta(seconds=0.1))
    newcomer: Any = SimpleNamespace(store=new, group_rank=1, group_world_size=2)
    assert [agree_on_highest(newcomer, what, 1, 99) for what in AGREED] == [3, 4]
