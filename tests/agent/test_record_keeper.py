"""Small records of other nodes' ranks come over real connections, and are kept."""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from mindx_elastic.agent import rendezvous
from mindx_elastic.agent.record_keeper import RecordKeeper
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous
from mindx_elastic.core.frames import frame
from mindx_elastic.rejoin.small_records import Courier
from tests.harness import wait_until

KEY = b"a key of some length, for tests only"


@pytest.fixture
def keeper() -> Iterator[RecordKeeper]:
    made = RecordKeeper("scope", KEY)
    yield made
    made.close()


def courier_to(keeper: RecordKeeper, rank: int, key: bytes = KEY) -> Courier:
    return Courier(("127.0.0.1", keeper.port), "scope", key, rank)


def test_what_a_rank_sends_outlives_it(keeper: RecordKeeper) -> None:
    for process in range(2):  # the second one takes the place of the first
        courier = courier_to(keeper, 3)
        courier.send("run", 2, 7 + process, b"state", forecast=False, trusted=True, pinned=False)
        courier.close()
        wait_until(lambda process=process: len(keeper.records_of(3)) == 1 + process, "the record")
    assert [(each.step, each.content) for each in keeper.records_of(3)] == [(7, b"state"), (8, b"state")]
    assert keeper.ranks_kept == [3] and keeper.records_of(4) == []


def test_strangers_are_no_ranks(keeper: RecordKeeper) -> None:
    courier_to(keeper, 2, b"another key, which is long enough too").close()
    with closing(socket.create_connection(("127.0.0.1", keeper.port))) as stranger:
        stranger.sendall(frame(b'{"rank": 2}'))
        stranger.settimeout(20)
        assert stranger.recv(10) == b""
    assert not keeper.ranks_kept


def test_ranks_leave_descriptors_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(20, 40)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    keeper = RecordKeeper("scope", KEY)
    assert limits == [(20, 40), (40, 40)]
    couriers = [courier_to(keeper, rank) for rank in range(25)]
    wait_until(lambda: keeper._num_refused == 5, "all greetings")
    assert keeper._num_ranks == 20
    for courier in couriers:
        courier.close()
    wait_until(lambda: keeper._num_ranks == 0, "their ends")
    keeper.close()


def test_connections_that_cannot_be_accepted_do_not_keep_the_thread_busy() -> None:
    def accept() -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    keeper: Any = RecordKeeper.__new__(RecordKeeper)
    keeper._server, keeper._stopping = SimpleNamespace(accept=accept), threading.Event()
    began = time.monotonic()
    assert [keeper._accept() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began >= 0.5


# --- the nodes meet ---


def meeting(node: int, num_nodes: int, store: Any = None, root: Any = None) -> HostedStoreRendezvous:
    info = RendezvousInfo(store or dist.HashStore(), node, num_nodes, RendezvousStoreInfo("127.0.0.1", 0))
    own = SimpleNamespace(addr="127.0.0.1")
    inner: Any = SimpleNamespace(
        next_rendezvous=lambda: info, get_run_id=lambda: "job", _store=root or dist.HashStore(), _this_node=own
    )
    return HostedStoreRendezvous(inner)


def test_a_meeting_that_is_tried_again_leaves_no_keeper_behind() -> None:
    handler = meeting(0, 2)
    handler.next_rendezvous()
    first = handler.records
    handler.next_rendezvous()
    assert first is not None and handler.records is not None and handler.records is not first
    assert not first._thread.is_alive() and first._server.fileno() == -1
    handler.close_round()
    assert handler.records is None


def test_all_nodes_learn_who_keeps_records_and_the_name_of_the_job() -> None:
    store, root = dist.HashStore(), dist.HashStore()
    handlers = [meeting(node, 4, store, root) for node in range(4)]
    for handler in handlers:
        handler.next_rendezvous()
    ports = [handler.records.port for handler in handlers if handler.records is not None]
    told = " ".join(f"{node}=127.0.0.1:{port}" for node, port in enumerate(ports))
    assert len(ports) == 3 and {handler.find_keepers(4) for handler in handlers} == {told}
    (name,) = {handler.identify() for handler in handlers}
    assert len(name) == 16
    for handler in handlers:
        handler.close_round()


def test_a_store_that_does_not_answer_holds_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    answers = threading.Event()
    handler = meeting(0, 2, root=SimpleNamespace(compare_set=lambda *arguments: answers.wait()))
    handler.next_rendezvous()
    assert handler.identify() == "" and handler.find_keepers(2) == "", "the thread is still in the store"
    answers.set()
    handler.close_round()
