"""The rounds of pausing over a real TCPStore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from mindx_elastic.agreement.pause_rounds import LocalPauseRounds, PauseNews, PauseRounds
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.agreement.stop_step import Decision
from mindx_elastic.agreement.store_exchange import StoreExchange
from tests.agreement.test_store_exchange import connections, request


@pytest.fixture(params=["plain", "sealed"])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[StoreExchange]]:
    key = None if request.param == "plain" else b"k" * 32
    with connections() as connect:
        exchanges = [StoreExchange(connect, rank=r, world_size=3, seal=Seal(key, "job", r)) for r in range(3)]
        yield exchanges
        for exchange in exchanges:
            exchange.close()


def test_all_ranks_wait_at_the_largest_offer(ranks: list[StoreExchange]) -> None:
    rounds = [exchange.pauses for exchange in ranks]
    rounds[1].order(1, "mindx-elastic pause")
    for rank, step in ((0, 5), (2, 6)):
        assert rounds[rank].news() == PauseNews(1, "mindx-elastic pause")
        rounds[rank].offer(1, step)
    assert rounds[0].news().decision is None
    rounds[1].offer(1, 5)
    assert {each.news().decision for each in rounds} == {Decision(6)}
    for each in rounds:
        assert not each.news().all_here
        each.arrive(1)
        each.arrive(1)  # twice counts once
    assert all(each.news().all_here for each in rounds)
    rounds[0].order(2, "mindx-elastic resume")
    assert {each.news() for each in rounds} == {PauseNews(2, "mindx-elastic resume")}


def test_an_order_is_given_once_whoever_gives_it(ranks: list[StoreExchange]) -> None:
    for rank, exchange in enumerate(ranks):
        exchange.pauses.order(1, f"by rank {rank}")
    assert {exchange.pauses.news().reason for exchange in ranks} == {"by rank 0"}


def test_a_rank_that_has_missed_orders_hears_the_newest(ranks: list[StoreExchange]) -> None:
    for number in range(1, 6):
        ranks[0].pauses.order(number, f"order {number}")
    assert ranks[2].pauses.news() == PauseNews(5, "order 5")


def test_every_rank_is_rung_for_each_news_and_a_stop_still_comes_through(ranks: list[StoreExchange]) -> None:
    heard = [threading.Semaphore(0) for _ in ranks]
    stops = [threading.Event() for _ in ranks]

    def listen(exchange: StoreExchange, news: threading.Semaphore, stop: threading.Event) -> None:
        exchange.pauses.listen(news.release)
        exchange.listen(lambda content: stop.set())

    for parts in zip(ranks, heard, stops, strict=True):
        listen(*parts)

    def until(condition: Callable[[PauseRounds], bool]) -> None:
        for exchange, news in zip(ranks, heard, strict=True):
            while not condition(exchange.pauses):
                assert news.acquire(timeout=60)

    for number in (1, 3, 5):
        ranks[0].pauses.order(number, "pause")
        until(lambda rounds, number=number: rounds.news().number == number)  # type: ignore[misc]
        for exchange in ranks:
            exchange.pauses.offer(number, 4)
        until(lambda rounds: rounds.news().decision == Decision(4))
        for exchange in ranks:
            exchange.pauses.arrive(number)
        until(lambda rounds: rounds.news().all_here)
        ranks[2].pauses.order(number + 1, "resume")
        until(lambda rounds, number=number: rounds.news().number == number + 1)  # type: ignore[misc]
    ranks[1].pauses.order(7, "pause")
    ranks[1].request(request("stop"))
    assert all(stop.wait(60) for stop in stops)


def test_a_strangers_order_is_not_obeyed(ranks: list[StoreExchange]) -> None:
    if not ranks[0].is_sealed:
        return
    ranks[0]._store.set("pause/1", "stop here")
    with pytest.raises(NotOursError):
        ranks[1].pauses.news()
    ranks[0].pauses.order(1, "ours")
    assert ranks[1].pauses.news() == PauseNews(1, "ours")
    for exchange in ranks[1:]:
        exchange.pauses.offer(1, 5)
    ranks[0]._store.set("pause/1/offer/1", "9")
    ranks[0].pauses.offer(1, 5)
    decision = ranks[0].pauses.news().decision
    assert decision is not None and decision.step is None and "rank 1" in decision.reason


def test_a_lost_store_raises(ranks: list[StoreExchange]) -> None:
    ranks[0]._lost = True
    with pytest.raises(TimeoutError):
        ranks[0].pauses.news()


def test_one_rank() -> None:
    rounds = LocalPauseRounds()
    rounds.order(1, "x")
    rounds.offer(1, 5)
    assert rounds.news() == PauseNews(1, "x", Decision(5))
    rounds.arrive(1)
    assert rounds.news().all_here and rounds.news().is_pause
    rounds.order(2, "y")
    assert rounds.news() == PauseNews(2, "y") and not rounds.news().is_pause
