"""A thread that was made in time: order, bounds, errors, forks."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator

import pytest

from mindx_elastic.core.ready_thread import ReadyThread

WAIT_S = 60.0


@pytest.fixture
def ready() -> Iterator[ReadyThread]:
    ready = ReadyThread("test-ready")
    ready.start()
    yield ready
    ready.close()


def test_it_gives_results_and_errors(ready: ReadyThread) -> None:
    assert ready.call(lambda: 7, WAIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        ready.call(lambda: 1 // 0, WAIT_S)
    assert ready.call(lambda: ready.call(lambda: 8, 0.0), WAIT_S) == 8, "called from itself"
    assert not ready.busy


def test_whoever_asks_waits_no_longer_than_the_bound(ready: ReadyThread) -> None:
    go, order = threading.Event(), list[int]()
    with pytest.raises(TimeoutError):
        ready.call(lambda: go.wait(WAIT_S), 0.01)
    late = ready.submit(lambda: order.append(1))
    assert ready.busy and ready.num_waiting == 2 and not late.done.is_set()
    go.set()
    late.wait(WAIT_S)
    assert order == [1]


def test_no_thread_is_made_for_a_call(ready: ReadyThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert ready.call(lambda: 1, WAIT_S) == 1


def test_a_forked_child_gets_a_thread_of_its_own(ready: ReadyThread) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(ready.call(lambda: 5, 15.0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert ready.call(lambda: 6, WAIT_S) == 6


def test_closing_leaves_a_thread_that_hangs_behind() -> None:
    ready, go = ReadyThread("test-ready"), threading.Event()
    job = ready.submit(lambda: go.wait(WAIT_S))
    ready.close(0.01)
    assert ready.call(lambda: 3, WAIT_S) == 3
    ready.close()
    go.set()
    job.wait(WAIT_S)
