"""The state machine of a stop: one alarm, one claim, one outcome."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import StopRequest
from mindx_elastic.core.status_page import StatusPage, read_page
from mindx_elastic.errors import GracefulExit, SaveError
from mindx_elastic.guard.stop_save import StopPhase
from tests.guard.stopper_parts import Parts
from tests.harness import events

Make = Callable[..., Parts]


def test_a_second_alarm_changes_nothing(parts: Parts) -> None:
    parts.stopper.hear_signal(signal.SIGTERM)
    first = parts.stopper.alarm
    parts.stopper.hear_signal(signal.SIGINT)
    parts.stopper.hear(parts.stopper.alarms.of_flag(Path("flag.json")))
    parts.stopper.hear(parts.stopper.alarms.of_request("enough", 0))
    parts.stopper.hear(
        parts.stopper.alarms.of_peer(StopRequest(kind="signal", reason="x", exit_code=1, origin=1, grace_left_s=1))
    )
    assert parts.stopper.alarm is first
    assert [e["outcome"] for e in events(parts.directory, "alarm")] == ["stopping", "already stopping"]


def test_a_signal_in_a_stop_for_a_death_stops_the_job(make_parts: Make, tmp_path: Path) -> None:
    """The agent reads it from the page: else it would start the job again."""
    path = tmp_path / "rank_0.page"
    with closing(StatusPage(path)) as page:
        parts = make_parts(page=page)
        parts.stopper.stop(parts.stopper.alarms.of_death([1]))
        parts.stopper.hear_signal(signal.SIGTERM)
        status = read_page(path)
    assert status is not None and (status.asked_code, status.reason) == (143, "SIGTERM, after: rank 1 is gone")


@pytest.mark.parametrize("before", ["nothing", "SIGTERM"])
def test_a_recovery_that_comes_to_nothing_in_mid_update_does_not_wait_for_a_boundary(
    make_parts: Make, before: str
) -> None:
    """The training thread has left its loop; the watcher must not expect it at the next boundary."""
    parts = make_parts(grace_s=3600.0)  # to wait for one would be more than this test has
    parts.gate.begin_update()
    parts.gate.end_update()
    if before == "SIGTERM":  # it has ended the recovery
        parts.stopper.hear_signal(signal.SIGTERM)
    parts.stopper.stop_for_death()
    assert (parts.stopper.phase, parts.files()) == (StopPhase.FAILED, [])
    assert parts.stopper.exit().code == (143 if before == "SIGTERM" else 75)


def raise_save_error(*args: Any, **more: Any) -> Any:
    raise SaveError("injected")


def raise_anything(*args: Any, **more: Any) -> Any:
    raise ZeroDivisionError("injected")


@pytest.mark.parametrize("error", [raise_save_error, raise_anything])
def test_a_save_that_fails_still_leaves(parts: Parts, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    monkeypatch.setattr(parts.saver, "save_dying", error)
    parts.stopper.hear_signal(signal.SIGTERM)
    assert parts.reach(6)
    with pytest.raises(GracefulExit) as caught:
        parts.stopper.at_limit(is_cut=True)
    assert (caught.value.code, caught.value.step, caught.value.path) == (143, None, None)
    assert parts.stopper.phase is StopPhase.FAILED
    assert parts.stopper.save.failure is not None and "injected" in parts.stopper.save.failure


def test_what_comes_after_the_save_gets_the_deadline_and_may_fail(
    make_parts: Make, caplog: pytest.LogCaptureFixture
) -> None:
    deadlines: list[float] = []

    def export(at: float) -> None:
        deadlines.append(at)
        raise RuntimeError("injected")

    parts = make_parts(after_save=export)
    parts.stopper.after_save()
    assert deadlines == [], "nothing was saved yet"
    parts.steps.leave_step()
    parts.stopper.hear_signal(signal.SIGTERM)
    parts.stopper.after_save()
    assert parts.stopper.alarm is not None and deadlines == [parts.stopper.alarm.deadline.at]
    assert "after the checkpoint: RuntimeError: injected" in caplog.text
