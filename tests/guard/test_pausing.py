"""Several ranks in one process that are paused and resumed at random, with real threads and a real store."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import StatusPage, WorkerPhase, page_path, read_page
from mindx_elastic.guard.pausing import Pauses
from mindx_elastic.memory.agent_folder import PAUSE, RESUME
from tests.agreement.test_store_exchange import connections
from tests.harness import wait_until

_LONG_S = 300.0
"""What a machine at ten times its load keeps."""


class Course:
    """When the training of all ranks ends. They are told inside of their barrier, so that all end at the same step."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, action=self._tell)
        self.wanted = self.last = 1 << 60

    def _tell(self) -> None:
        self.last = self.wanted


class Rank:
    """Watcher, gate and training thread of one rank; each step ends with a barrier of all, as an all-reduce does."""

    def __init__(self, number: int, exchange: Exchange, course: Course, folder: Path) -> None:
        self.path = page_path(folder, number)
        self.page = StatusPage(self.path)
        self.page.set(phase=WorkerPhase.TRAINING)
        self.gate, self.course = StepGate(), course
        self.watcher = Watcher(lambda signum: None)
        self.finished = False
        self.pauses = Pauses(
            self.gate,
            exchange,
            self.watcher,
            EventLog(folder / "events.jsonl"),
            self.page,
            rank=number,
            why_not=lambda: "finished" if self.finished else None,
        )
        post = self.watcher.post
        exchange.listen(lambda content: None, lambda order: post(lambda: self.pauses.hear_order(order)))
        self.watcher.start()
        self.stops = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.orders = itertools.count(1)
        self.told = 0

    def _train(self) -> None:
        for step in itertools.count(1):
            self.course.barrier.wait(_LONG_S)
            last = self.course.last
            self.page.pass_boundary(step)
            if self.gate.arrive(step):
                self.pauses.wait()
            if step >= last:
                self.finished = True
                self.watcher.post(self.pauses.hear_end)
                return

    def hear(self, kind: str) -> None:
        number = self.told = next(self.orders)
        self.watcher.post(lambda: self.pauses.hear(kind, "test", number))

    def has_heard(self) -> bool:
        """An order that it has not heard yet could undo a later one of another rank."""
        found = read_page(self.path)
        assert found is not None
        return found.pause_heard >= self.told

    def all_paused(self) -> int:
        found = read_page(self.path)
        assert found is not None
        return found.paused_step if found.all_paused else -1


@contextmanager
def job(num_ranks: int, folder: Path) -> Iterator[list[Rank]]:
    with connections() as connect:
        exchanges: list[Exchange] = [Exchange()]
        if num_ranks > 1:
            exchanges = [StoreExchange(connect, rank=r, world_size=num_ranks) for r in range(num_ranks)]
        course = Course(num_ranks)
        ranks = [Rank(number, exchange, course, folder) for number, exchange in enumerate(exchanges)]
        for rank in ranks:
            rank.thread.start()
        try:
            yield ranks
        finally:
            course.barrier.abort()
            for rank, exchange in zip(ranks, exchanges, strict=True):
                rank.gate.resume()
                rank.thread.join(_LONG_S)
                rank.watcher.stop()
                exchange.close()
                rank.page.close()


def is_last_pause(ranks: list[Rank]) -> bool:
    """Whether all wait in the pause behind which no order is left. One that they waited in before, or an order that is
    still on its way, is not the last: whoever has passed that one on has left the pause before it."""
    if not all(rank.has_heard() for rank in ranks):
        return False
    numbers = {page.all_paused for rank in ranks if (page := read_page(rank.path)) is not None}
    return len(numbers) == 1 and numbers != {0}


def finish(ranks: list[Rank]) -> None:
    ranks[0].course.wanted = max(rank.gate.step for rank in ranks) + 1000
    for rank in ranks:
        rank.thread.join(120)
        assert not rank.thread.is_alive(), "a rank still waits"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_orders_in_any_order_end_with_all_ranks_in_one_pause(num_ranks: int, tmp_path: Path) -> None:
    """Pause and resume at random, to random ranks, without waiting; whatever comes of it, the last order holds."""
    chance = random.Random(7)
    with job(num_ranks, tmp_path) as ranks:
        for _ in range(12):
            for _ in range(chance.randint(1, 12)):
                chance.choice(ranks).hear(chance.choice([PAUSE, RESUME]))
            for rank in ranks:
                rank.hear(PAUSE)
            wait_until(lambda: is_last_pause(ranks), "the pause")
            (step,) = {rank.all_paused() for rank in ranks}
            assert {rank.gate.step for rank in ranks} == {step}
            for rank in ranks:
                rank.hear(RESUME)
            wait_until(lambda: not any(rank.gate.waits_at(0) for rank in ranks), "the training going on")
        finish(ranks)


def test_a_pause_that_meets_the_end_of_the_training_leaves_no_rank_waiting(tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        with job(2, folder) as ranks:
            ranks[0].course.wanted = max(rank.gate.step for rank in ranks) + 20 + number
            ranks[0].hear(PAUSE)
            wait_until(
                lambda: (
                    all(rank.all_paused() >= 0 for rank in ranks) or not any(rank.thread.is_alive() for rank in ranks)
                ),
                "a pause or the end",
                _LONG_S,
            )
            ranks[1].hear(RESUME)
            for rank in ranks:
                rank.thread.join(_LONG_S)
                assert not rank.thread.is_alive()
