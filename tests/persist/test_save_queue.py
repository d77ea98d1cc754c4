"""Background saves: in order, two copies at most, and a failure ends nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mindx_elastic.persist.save_queue import SaveQueue
from tests.harness import wait_until


@pytest.fixture
def saves() -> Iterator[SaveQueue]:
    saves = SaveQueue()
    yield saves
    saves.close(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "mindx-persist"]


def submit(saves: SaveQueue, number: int, done: list[int], go: threading.Event) -> None:
    def save() -> bool:
        assert go.wait(60)
        done.append(number)
        return True

    saves.reserve()
    saves.submit(save)


def test_a_third_copy_waits_for_room(saves: SaveQueue) -> None:
    done: list[int] = []
    go = threading.Event()
    submit(saves, 0, done, go)
    submit(saves, 1, done, go)
    third = threading.Thread(target=submit, args=(saves, 2, done, go))
    third.start()
    assert not saves.drain(0.05) and third.is_alive()
    go.set()
    third.join(60)
    assert saves.drain(60) and done == [0, 1, 2]


def test_after_an_unexpected_error_the_next_save_is_done(saves: SaveQueue, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise ZeroDivisionError("injected")

    done: list[int] = []
    go = threading.Event()
    go.set()
    saves.reserve()
    saves.submit(fail)
    submit(saves, 1, done, go)
    assert saves.drain(60) and done == [1]
    wait_until(lambda: "unexpected error" in caplog.text, "the log line")


def test_a_save_that_hangs_is_left_behind() -> None:
    saves, done, go = SaveQueue(), list[int](), threading.Event()
    submit(saves, 0, done, go)
    saves.close(0.01)
    assert done == []
    go.set()
    saves.close(60)
    assert done == [0]
