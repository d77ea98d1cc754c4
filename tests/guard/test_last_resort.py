"""The thread that ends the process in time when the other threads are stuck."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from greenlet import greenlet

from mindx_elastic.guard.last_resort import is_program_over
from tests.guard.stopper_parts import Parts


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_stop_that_is_held_up_ends_shortly_before_its_deadline(
    make_parts: Callable[..., Parts],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_claimed: bool,
) -> None:
    parts, ended, codes = make_parts(grace_s=1.0), threading.Event(), list[int]()

    def end(code: int, relay: object) -> None:
        codes.append(code)
        parts.stopper.dismiss()  # the process would be gone
        ended.set()

    monkeypatch.setattr("mindx_elastic.guard.stopper.end_process", end)
    parts.last_resort.start(parts.stopper)
    alarm = parts.stopper.alarms.of_signal(signal.SIGTERM)
    assert parts.stopper.accept(alarm)
    parts.last_resort.arm(alarm)
    if is_claimed:
        assert parts.stopper.claim()
    assert ended.wait(60)
    assert codes == [143] and time.monotonic() > alarm.deadline.at - 0.3
    assert parts.files() == [] and "the save is held up; leaving with exit code 143" in caplog.text


def test_a_program_that_goes_on_in_a_greenlet_is_not_over() -> None:
    """Its outermost frame is another one than at the stop."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_program_over).result()
        assert not greenlet(lambda: pool.submit(is_program_over).result()).switch()
