"""The way out: when a process is ended from beside its training thread, and when it is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.deadline import Deadline
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import EventLog
from mindx_elastic.guard.leaving import LAST_MOMENT_S, WayOut
from mindx_elastic.guard.stop_phase import StopPhase


class Timers(Watcher):
    """Never started: keeps what was ordered for later, and the test says when it is time."""

    def __init__(self) -> None:
        super().__init__(lambda signum: None)
        self.ordered: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.ordered.append((when, callback))


class Leaving:
    """A way out with nobody to end."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        monkeypatch.setattr("mindx_elastic.guard.leaving.end_process", lambda code, relay: self.codes.append(code))
        self.timers = Timers()
        self.phase = StopPhase.SAVED
        self.way_out = WayOut(self.timers, EventLog(directory / "events.jsonl"), lambda: self.phase)
        self.alarm = Alarm("signal", "SIGTERM", Deadline.after(30.0), 143, origin=0, signum=15)

    def pass_time(self) -> None:
        for _, callback in [self.timers.ordered.pop(0) for _ in list(self.timers.ordered)]:
            callback()


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaving]:
    leaving = Leaving(tmp_path, monkeypatch)
    yield leaving
    leaving.timers.stop()


def test_a_thread_that_comes_out_is_waited_for_until_the_deadline(leaving: Leaving) -> None:
    leaving.way_out.leave_soon(leaving.alarm)
    ((soon, _),) = leaving.timers.ordered
    assert soon < time.monotonic() + 10 < leaving.alarm.deadline.at
    leaving.way_out.coming_out = True  # exporting its network, say
    leaving.pass_time()
    assert leaving.codes == []
    leaving.way_out.guard_deadline(leaving.alarm)
    assert leaving.timers.ordered[0][0] == pytest.approx(leaving.alarm.deadline.at - LAST_MOMENT_S)
    leaving.pass_time()
    assert leaving.codes == [143]


def test_a_thread_that_hangs_is_left_behind(leaving: Leaving) -> None:
    leaving.way_out.leave_soon(leaving.alarm)
    leaving.pass_time()
    assert leaving.codes == [143]


def test_a_job_that_has_finished_is_never_ended(leaving: Leaving) -> None:
    leaving.way_out.dismissed = True
    leaving.way_out.leave_soon(leaving.alarm)
    leaving.way_out.guard_deadline(leaving.alarm)
    leaving.pass_time()
    assert leaving.codes == []


def test_a_save_in_progress_is_not_cut_off(leaving: Leaving) -> None:
    leaving.phase = StopPhase.SAVING
    leaving.way_out.guard_deadline(leaving.alarm)
    leaving.pass_time()
    assert leaving.codes == [] and len(leaving.timers.ordered) == 1
    leaving.phase = StopPhase.SAVED
    leaving.pass_time()
    assert leaving.codes == [143]
