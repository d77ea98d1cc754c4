"""The thread that saves and leaves when the other threads are stuck, with a watcher that is really stuck."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from greenlet import greenlet

from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.guard.last_resort import is_program_over
from mindx_elastic.guard.stop_state import StopPhase
from tests.guard.stopper_parts import Parts
from tests.harness import wait_until


@pytest.fixture
def stuck(make_parts: Callable[..., Parts]) -> Iterator[Parts]:
    """A running last resort beside a watcher in a callback that does not return."""
    parts = make_parts(grace_s=2.0)
    hangs, go = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go.wait(120)

    parts.watcher.start()
    parts.watcher.post(hang)
    assert hangs.wait(60)
    parts.last_resort.start(parts.stopper)
    yield parts
    go.set()


def alarm_in(parts: Parts, seconds: float) -> Alarm:
    alarm = parts.stopper.alarms.of_signal(signal.SIGTERM)
    assert parts.stopper.state.accept(alarm)
    parts.last_resort.arm(alarm, time.monotonic() + seconds)
    return alarm


def test_a_signal_that_the_watcher_does_not_read_becomes_an_alarm(stuck: Parts) -> None:
    stuck.last_resort.watch_signals(stuck.stopper.alarms.of_signal)
    sent = time.monotonic()
    os.write(stuck.watcher.wakeup_fd, bytes([signal.SIGTERM]))
    wait_until(lambda: stuck.stopper.alarm is not None, "the alarm")
    alarm = stuck.stopper.alarm
    assert alarm is not None and (alarm.reason, alarm.exit_code) == ("SIGTERM", 143)
    assert alarm.deadline.at <= time.monotonic() + 2.0 and alarm.deadline.at >= sent + 2.0, "counted from its arrival"
    assert stuck.steps.at_limit(), "the training thread stops at the coming boundary"


def test_a_signal_that_is_not_the_guards_is_left_alone(stuck: Parts) -> None:
    asked = threading.Event()

    def alarm_of(signum: int) -> None:
        asked.set()

    stuck.last_resort.watch_signals(alarm_of)
    os.write(stuck.watcher.wakeup_fd, bytes([signal.SIGTERM]))
    assert asked.wait(60)
    assert stuck.stopper.phase is StopPhase.TRAINING


def test_it_saves_what_a_stuck_watcher_does_not(stuck: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int, relay: object) -> None:
        codes.append(code)
        stuck.stopper.dismiss()  # the process would be gone
        ended.set()

    monkeypatch.setattr("mindx_elastic.guard.stopper.end_process", end)
    alarm = alarm_in(stuck, 0.0)
    assert ended.wait(60)
    assert (stuck.stopper.phase, stuck.files()) == (StopPhase.SAVED, [5])
    assert codes == [143] and time.monotonic() > alarm.deadline.at - 0.3, "not before the deadline"


def test_without_an_alarm_it_sleeps(stuck: Parts) -> None:
    stuck.last_resort.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mindx-last-resort"]
    assert (stuck.stopper.phase, stuck.files()) == (StopPhase.TRAINING, [])


def test_a_program_that_goes_on_in_a_greenlet_is_not_over() -> None:
    """Its outermost frame is another one than at the stop."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_program_over).result()
        assert not greenlet(lambda: pool.submit(is_program_over).result()).switch()
