"""Log lines of a stop: in order where they are read, and no thread waits where they are not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from mindx_elastic.core.events import logger
from mindx_elastic.guard.process_end import LogRelay
from tests.harness import wait_until


class Lines(logging.Handler):
    """Keeps the lines and the names of the threads that write them; hangs while `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str]] = []
        self.go = threading.Event()
        self.go.set()

    def emit(self, record: logging.LogRecord) -> None:
        assert self.go.wait(60)
        self.written.append((record.getMessage(), threading.current_thread().name))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger.addHandler(handler)
    yield handler
    handler.go.set()
    logger.removeHandler(handler)


@pytest.fixture
def relay(lines: Lines) -> Iterator[LogRelay]:
    relay = LogRelay()
    relay.open()
    yield relay
    lines.go.set()
    relay.close()


def test_before_a_stop_only_the_named_threads_hand_their_lines_over(relay: LogRelay, lines: Lines) -> None:
    own = threading.current_thread()
    logger.warning("one")
    relay.threads.add(own.ident)
    logger.warning("two")
    assert lines.written == [("one", own.name), ("two", "mindx-log")]


def test_during_a_stop_all_threads_do(relay: LogRelay, lines: Lines) -> None:
    relay.hurry = True
    for number in range(3):
        logger.warning("line %d", number)
    relay.flush(60.0)
    assert lines.written == [(f"line {number}", "mindx-log") for number in range(3)]


def test_a_pipe_that_is_not_read_costs_one_short_wait(relay: LogRelay, lines: Lines) -> None:
    relay.hurry = True
    lines.go.clear()
    logger.warning("first")
    for number in range(3000):  # a quarter of a second for each would be more than this test has
        logger.warning("%d", number)
    lines.go.set()
    wait_until(lambda: len(lines.written) == 3001, "the lines come once they are read")
