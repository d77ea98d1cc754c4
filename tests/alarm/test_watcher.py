"""The watcher thread: what it hears, in which order, and that nothing makes it deaf."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from mindx_elastic.alarm.watcher import Watcher

WAIT_S = 120.0


class Ears:
    """Collects what a watcher hears."""

    def __init__(self) -> None:
        self.signals: SimpleQueue[int] = SimpleQueue()
        self.watcher = Watcher(self.signals.put)

    def settle(self) -> None:
        """Wait until everything that was posted and written before has been run."""
        done = threading.Event()
        self.watcher.post(done.set)
        assert done.wait(WAIT_S)


@pytest.fixture
def ears() -> Iterator[Ears]:
    ears = Ears()
    ears.watcher.start()
    yield ears
    ears.watcher.stop()


def test_a_callback_that_raises_is_logged_and_the_thread_lives_on(ears: Ears, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("injected")

    looks: SimpleQueue[int] = SimpleQueue()

    def look() -> None:
        looks.put(1)
        raise ValueError("injected")

    ears.watcher.post(fail)
    ears.watcher.call_at(0.0, fail)
    ears.watcher.every(0.01, look)
    assert [looks.get(timeout=WAIT_S) for _ in range(3)] == [1, 1, 1]
    ears.settle()
    assert {r.exc_info[1].args for r in caplog.records if r.exc_info and r.exc_info[1]} == {("injected",)}
    os.write(ears.watcher.wakeup_fd, bytes([15]))
    assert ears.signals.get(timeout=WAIT_S) == 15


def test_a_full_descriptor_blocks_nobody_and_loses_no_post(ears: Ears) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        leave.wait(WAIT_S)

    def fill() -> None:
        while True:
            os.write(ears.watcher.wakeup_fd, bytes([10]) * 4096)

    ears.watcher.post(hold)
    assert entered.wait(WAIT_S)
    with pytest.raises(BlockingIOError):
        fill()
    ran = threading.Event()
    ears.watcher.post(ran.set)
    leave.set()
    assert ran.wait(WAIT_S)


def test_stop_finishes_the_callback_in_progress_and_drops_the_rest() -> None:
    ears, ran = Ears(), []
    ears.watcher.start()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        leave.wait(WAIT_S)
        ran.append("first")

    ears.watcher.post(hold)
    assert entered.wait(WAIT_S)
    ears.watcher.post(lambda: ran.append("second"))
    stopper = threading.Thread(target=ears.watcher.stop)
    stopper.start()
    while not ears.watcher._stopping:
        pass  # set by the first line of stop()
    leave.set()
    stopper.join(WAIT_S)
    assert ran == ["first"]
