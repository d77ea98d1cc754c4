"""The exchange over a real TCPStore, one connection set a rank."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agreement import gather, store_exchange
from mindx_elastic.agreement.exchange import PauseRequest
from mindx_elastic.agreement.gather import Merged, Store
from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.agreement.stop_step import Decision, End, Offer
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.alarm.alarm import StopRequest
from mindx_elastic.errors import UntrustedMessageError, UsageError

_jobs = itertools.count()
_idle: list[Any] = []


@functools.cache
def _server() -> Any:
    """One for all tests, to which connections are cloned."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def _connect(server: Any) -> Any:
    if hasattr(server, "clone"):
        return server.clone()
    return dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)  # torch 2.6


@contextmanager
def connections(timeout_s: float = 30) -> Iterator[Callable[[], Any]]:
    """What gives a test its connections, all under one prefix of its own.

    The next test uses them again: to open one takes 5 s now and then.
    """
    prefix, used = f"test{next(_jobs)}", []

    def connect() -> Any:
        store = _idle.pop() if _idle else _connect(_server())
        store.set_timeout(timedelta(seconds=timeout_s))
        used.append(store)
        return dist.PrefixStore(prefix, store)

    yield connect
    _idle.extend(used)


@contextmanager
def exchanges(world_size: int, key: bytes | None = None) -> Iterator[tuple[list[StoreExchange], Callable[[], Any]]]:
    """Those of all ranks of a job, and what gives others connections."""
    with connections() as connect:
        ranks = [
            StoreExchange(connect, rank=r, world_size=world_size, seal=Seal(key, "mindx/0/0", r))
            for r in range(world_size)
        ]
        yield ranks, connect
        for exchange in ranks:
            exchange.close()


@pytest.fixture
def ranks() -> Iterator[list[StoreExchange]]:
    with exchanges(3) as (found, _):
        yield found


def request(reason: str, origin: int = 0) -> StopRequest:
    return StopRequest(kind="request", reason=reason, origin=origin, exit_code=0, grace_left_s=30.0)


def decide(ranks: list[StoreExchange], offers: dict[int, Offer], timeout_s: float) -> dict[int, Decision]:
    decisions: dict[int, Decision] = {}

    def run(rank: int) -> None:
        decisions[rank] = ranks[rank].decide("stop", offers[rank], timeout_s)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in offers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return decisions


class SlowToTakeARequest:
    """A connection on which the stop request is held up until the test lets it through."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked, self.let_through = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        if key == "request":
            self.asked.set()
            assert self.let_through.wait(60)
        found: bytes = self._store.compare_set(key, expected, desired)
        return found


def test_a_rank_whose_request_takes_the_store_long_still_agrees_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where thousands of ranks ask at once; it gave the store up, and all others waited for its offer in vain."""
    monkeypatch.setattr(store_exchange, "_ANSWER_S", 0.1)
    monkeypatch.setattr(store_exchange, "_LATE_ANSWERS", 600)
    with connections() as connect:
        slow = SlowToTakeARequest(connect())
        own = iter([slow, connect(), connect()])
        ranks = [
            StoreExchange(lambda: next(own), rank=0, world_size=2),
            StoreExchange(connect, rank=1, world_size=2),
        ]
        try:
            mine = request("SIGTERM", 0)
            assert ranks[0].request(mine) == mine
            assert slow.asked.is_set() and not slow.let_through.is_set()
            slow.let_through.set()
            assert {decision.step for decision in decide(ranks, {0: 5, 1: 6}, 60).values()} == {6}
        finally:
            slow.let_through.set()
            for exchange in ranks:
                exchange.close()


def test_who_has_left(ranks: list[StoreExchange]) -> None:
    assert not any(ranks[0].has_left(rank) for rank in range(3))
    ranks[1].leave()
    ranks[2].announce("stop", End(9))
    ranks[0].announce("stop", 9)
    assert [ranks[0].has_left(rank) for rank in range(3)] == [False, True, True]


class FrozenStore:
    """Its host is stopped or cut off: no call ever comes back."""

    def __init__(self) -> None:
        self.thaw = threading.Event()

    def _hang(self, *args: object) -> Any:
        self.thaw.wait()
        raise ConnectionError("the test is over")

    set = get = add = wait = check = compare_set = delete_key = multi_get = multi_set = _hang


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreExchange]:
    monkeypatch.setattr("mindx_elastic.agreement.store_exchange._ANSWER_S", 0.1)
    store: Store = FrozenStore()
    assert isinstance(store, FrozenStore)
    exchange = StoreExchange(lambda: store, rank=0, world_size=2)
    yield exchange
    store.thaw.set()
    exchange.close()
    for thread in threading.enumerate():
        if thread.name == "mindx-store":
            thread.join(30)


@pytest.mark.parametrize(
    "call",
    [
        lambda exchange: exchange.decide("stop", 3, 0.1),
        lambda exchange: exchange.finish(3, 0.1),
        lambda exchange: exchange.request(request("x")),
        lambda exchange: exchange.announce("stop", 3),
        lambda exchange: exchange.leave(),
        lambda exchange: exchange.has_left(1),
        lambda exchange: exchange.abandon("rank 1 is gone"),
        lambda exchange: exchange.close(),
    ],
    ids=["decide", "finish", "request", "announce", "leave", "has_left", "abandon", "close"],
)
def test_a_store_that_never_answers_holds_nobody(
    frozen: StoreExchange, call: Callable[[StoreExchange], object]
) -> None:
    call(frozen)  # a call that is held meets the time limit of the test
    assert frozen.decide("salvage", 3, 600).step is None, "not asked again"
    assert frozen.request(request("x")) == request("x")
    frozen.close()


def test_a_store_that_is_slow_in_mid_training_is_asked_again_at_the_stop(frozen: StoreExchange) -> None:
    with pytest.raises(TimeoutError):
        frozen.try_collect("every")
    assert not frozen.tell("every", "1")
    assert not frozen._lost


class Attacked:
    """Three ranks with a key, or without, and the store's own client for whoever is not one of them."""

    def __init__(self, ranks: list[StoreExchange], stranger: Any) -> None:
        self.ranks, self.stranger = ranks, stranger
        for exchange in ranks:
            exchange.say("first", f"of {exchange.rank}")
        ranks[0].preside("first", Merged)
        for exchange in ranks:
            assert exchange.hear("first").common == ["of 0", "of 1", "of 2"]


KEY = b"0123456789abcdef"
with_and_without_key = pytest.mark.parametrize("key", [KEY, None], ids=["keyed", "without a key"])


@contextmanager
def attack(key: bytes | None) -> Iterator[Attacked]:
    with exchanges(3, key) as (ranks, connect):
        yield Attacked(ranks, connect())


@pytest.fixture(params=[KEY, None], ids=["keyed", "without a key"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    with attack(request.param) as attacked:
        yield attacked


NONSENSE = [
    b"\xff\xfe",
    b"9" * (1 << 20),
    b'{"step": null, "reason": "every rank has finished training"}',
]


@pytest.mark.parametrize("planted", NONSENSE, ids=range(len(NONSENSE)))
def test_a_planted_decision_does_not_keep_the_ranks_from_theirs(attacked: Attacked, planted: bytes) -> None:
    attacked.stranger.set("stop/decision", planted)
    assert decide(attacked.ranks, {0: 5, 1: 6, 2: 5}, 30) == dict.fromkeys(range(3), Decision(6))


def test_a_planted_decision_that_is_sound_counts_only_without_a_key(attacked: Attacked) -> None:
    attacked.stranger.set("stop/decision", '{"step": 8, "reason": ""}')
    step = 6 if attacked.ranks[0].is_sealed else 8
    assert {d.step for d in decide(attacked.ranks, {0: 5, 1: 6, 2: 5}, 30).values()} == {step}


@pytest.mark.parametrize("count", [-100, 2])
def test_a_wrong_count_of_offers_costs_the_bound_and_not_the_agreement(attacked: Attacked, count: int) -> None:
    attacked.stranger.add("stop/count", count)
    assert decide(attacked.ranks, {0: 5, 1: 6, 2: 5}, 2.0) == dict.fromkeys(range(3), Decision(6))


def test_forged_offers_are_told_from_the_ranks_own(attacked: Attacked) -> None:
    """They are there before the ranks make theirs, and the count says so."""
    for rank in range(3):
        attacked.stranger.set(f"stop/offer/{rank}", str(10**9))
    attacked.stranger.add("stop/count", 2)
    decisions = decide(attacked.ranks, {0: 5, 1: 6, 2: 5}, 2.0)
    if attacked.ranks[0].is_sealed:
        assert decisions == dict.fromkeys(range(3), Decision(6))
    else:
        # Each alone, unless all have made theirs before one of them looked. Nobody runs to 10^9.
        assert {d.step for d in decisions.values()} in ({None}, {6})


@pytest.mark.parametrize("planted", [b"\xff", b'{"kind": "signal", "reason": "x", "exit_code": 0, "origin": 77}'])
def test_a_listener_goes_on_listening(attacked: Attacked, planted: bytes, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[StopRequest] = []
    done = threading.Event()

    def on_request(content: StopRequest) -> None:
        heard.append(content)
        done.set()

    attacked.ranks[1].listen(on_request)
    attacked.stranger.set("request", planted)
    attacked.stranger.set("bell/1", "1")
    while attacked.stranger.check(["bell/1"]):  # it was heard, and the bell is free again
        time.sleep(0.01)
    assert "'request' in the store of the process group holds a value that no rank" in caplog.text
    wanted = request("SIGTERM", 2)
    assert attacked.ranks[2].request(wanted) == wanted, "a planted one does not win"
    assert done.wait(30)
    assert heard == [wanted]


# --- orders to pause and to go on ---


def test_an_order_is_given_once_and_a_rank_that_has_missed_some_hears_the_newest(ranks: list[StoreExchange]) -> None:
    for rank, exchange in enumerate(ranks):
        assert exchange.order(pause=True, reason=f"by rank {rank}") == PauseRequest(1, "by rank 0")
    for number in (2, 3, 4):
        ranks[0].order(pause=number == 3, reason=f"order {number}")
    assert ranks[2].order(pause=False, reason="late") == PauseRequest(4, "order 4")


def test_a_strangers_order_is_not_obeyed(attacked: Attacked) -> None:
    if not attacked.ranks[0].is_sealed:
        return
    attacked.stranger.set("pause/1", "stop here")
    assert attacked.ranks[1].order(pause=False, reason="").number == 0
    assert attacked.ranks[0].order(pause=True, reason="ours") == PauseRequest(1, "ours")
    assert attacked.ranks[2].order(pause=True, reason="") == PauseRequest(1, "ours")


# --- a start that ends in its first meeting ---


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rank does not wait for the others to read its error."""
    monkeypatch.setattr(gather, "_HEARD_S", 0.05)


@pytest.mark.usefixtures("in_a_hurry")
@with_and_without_key
def test_a_rank_that_fails_when_rank_0_has_answered_the_first_values_is_heard(key: bytes | None) -> None:
    with exchanges(3, key) as (ranks, _):
        for exchange in ranks:
            exchange.say("here", exchange.rank)
        ranks[0].preside("here", Merged)
        ranks[1].fail(UsageError("no directory"))
        for rank in (2, 0):
            assert ranks[rank].hear("here").common == [0, 1, 2]
            with pytest.raises(UsageError, match=r"^rank 1: no directory$"):
                ranks[rank].gather("plan", rank, Merged, timeout_s=60.0)


@pytest.mark.usefixtures("in_a_hurry")
@pytest.mark.parametrize("key", [b"another key of 16", KEY], ids=["another key", "an earlier start"])
def test_a_failure_that_no_rank_of_this_start_has_written_is_not_heard(key: bytes) -> None:
    with exchanges(2, KEY) as (ranks, connect):
        for exchange in ranks:
            exchange.say("here", exchange.rank)

        def merge(said: list[int]) -> Merged:
            store = connect()
            failure = Seal(key, "mindx/0/0", 1).close("start/round0/answer", '!["1", "UsageError", "x"]')
            store.set("start/round0/answer", failure)
            store.get("start/round0/answer")  # `set` does not wait until the store has it
            return Merged(said)

        for call in (lambda: ranks[0].preside("here", merge), lambda: ranks[1].hear("here")):
            with pytest.raises(UntrustedMessageError, match="Give all ranks the same MINDX_JOB_KEY"):
                call()


@pytest.mark.usefixtures("in_a_hurry")
def test_who_fails_before_rank_0_has_come_is_heard_at_once() -> None:
    """Nothing may end a rank 0 that still downloads its data."""
    heard = []

    def come(exchange: StoreExchange) -> None:
        with pytest.raises(UsageError, match=r"^rank 1: no directory$"):
            exchange.gather("here", exchange.rank, Merged, timeout_s=60.0)
        heard.append(exchange.rank)

    with exchanges(3, KEY) as (ranks, _):
        waits = threading.Thread(target=come, args=(ranks[2],))
        waits.start()
        ranks[1].fail(UsageError("no directory"))
        waits.join(30)
        assert heard == [2]
        come(ranks[0])


def test_a_session_that_rank_0_has_not_begun_ends_the_start() -> None:
    with exchanges(2, KEY) as (ranks, connect):
        connect().set("start/session", Seal(KEY, "mindx/0/0", 0).begin("start/session"))
        with pytest.raises(UntrustedMessageError, match="it was there before rank 0"):
            ranks[0].say("here", 0)


def test_a_value_that_its_rank_has_not_written_is_named() -> None:
    with attack(KEY) as attacked:
        for exchange in reversed(attacked.ranks):
            assert attacked.ranks[1].try_collect("second") is None
            assert exchange.tell("second", f"of {exchange.rank}")
        while (found := attacked.ranks[1].try_collect("second")) is None:
            pass  # what one connection has written may come after what another one asks
        assert found == ["of 0", "of 1", "of 2"]
        attacked.stranger.set("told/second/1", "x")

        def collect() -> None:
            while attacked.ranks[0].try_collect("second"):
                pass

        with pytest.raises(UntrustedMessageError, match=r"'told/second/1' of rank 1 .*MINDX_JOB_KEY"):
            collect()


def test_an_end_that_a_stranger_offers_is_no_end(attacked: Attacked) -> None:
    attacked.stranger.set("stop/offer/1", "end:-5")
    attacked.stranger.set("stop/offer/2", "left" if attacked.ranks[0].is_sealed else "lefty")
    assert [attacked.ranks[0].has_left(rank) for rank in range(3)] == [False, False, False]
