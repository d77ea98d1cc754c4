"""What a notice file and the clouds say, and what cannot be taken for a notice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms import notices
from mindx_elastic.platforms.notices import NoticeWatch, StopNotice, check_notice
from tests.harness import wait_until
from tests.metadata_service import MetadataService


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notice.json"


def iso(seconds_ahead: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds_ahead, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def grace_s(found: StopNotice | None) -> float:
    assert found is not None and found.grace_s is not None
    return found.grace_s


def test_a_file_that_comes_later_counts_from_its_writing_and_goes_on_counting(path: Path) -> None:
    watch = NoticeWatch(check_notice(str(path)))
    for nothing in (None, "", '{"stop": false}'):
        if nothing is not None:
            path.write_text(nothing)
        assert watch.poll() is None
    path.write_text('{"stop": true, "seconds": 60, "reason": "maintenance\\u001b[0m"}')
    os.utime(path, (time.time() - 10,) * 2)
    found = watch.poll()
    assert 38 < grace_s(found) <= 48, "2 s are the agent's"
    assert found is not None and found.reason == f"notice file {path}: maintenance\\x1b[0m"
    path.unlink()
    assert 38 < grace_s(watch.poll()) <= 48, "the machine is as good as gone"


def test_the_time_that_is_left_becomes_the_grace_period(path: Path) -> None:
    for deadline in (iso(100), time.time() + 100):
        path.write_text(json.dumps({"stop": True, "deadline": deadline}))
        assert 90 < grace_s(NoticeWatch(str(path)).poll()) <= 98


@pytest.mark.parametrize("content", [{}, {"deadline": -10.0}], ids=str)
def test_a_notice_whose_time_cannot_be_told_counts(path: Path, content: dict[str, float]) -> None:
    watch = NoticeWatch(str(path))
    path.write_text(json.dumps({"stop": True} | {key: time.time() + value for key, value in content.items()}))
    found = watch.poll()
    assert found is not None and found.grace_s is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not readable JSON"),
        ("[]", "where an object"),
        ('{"stop": 1}', 'has no "stop": true or false'),
        ('{"stop": true, "seconds": "soon"}', "names no time.*soon"),
        ('{"stop": true, "deadline": "2026-01-02T03:04:05"}', "names no time"),
        # With names of their own: a time in its name would make a test another one in each worker of pytest.
        pytest.param(json.dumps({"stop": True, "deadline": iso(3e7)}), "names no time", id="a year ahead"),
        pytest.param(json.dumps({"stop": True, "deadline": iso(-1000)}), "is over since minutes", id="over"),
    ],
)
def test_what_is_no_notice_is_named_once_and_stops_nothing(
    path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(text)
    watch = NoticeWatch(str(path))
    assert watch.poll() is None and watch.poll() is None
    (line,) = caplog.messages
    assert said.split(".*")[0] in line


def test_a_notice_from_before_this_start_without_a_deadline_stops_nothing(path: Path) -> None:
    path.write_text('{"stop": true}')
    os.utime(path, (1.0, 1.0))
    assert NoticeWatch(str(path)).poll() is None


@pytest.mark.parametrize("text", ["", "aws=10.0.0.1", "ec2", "/no/such/f", "/tmp"])
def test_what_names_no_cloud_and_no_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--notice"):
        check_notice(text)


# --- clouds -----------------------------------------------------------------------------------------------------------


ACTION, EVENTS = "/latest/meta-data/spot/instance-action", "/metadata/scheduledevents"
PREEMPTED, NAME = "/computeMetadata/v1/instance/preempted", "/metadata/instance/compute/name"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    """Asked all the time, not every second."""
    monkeypatch.setattr(notices, "_CLOUDS", {name: (look, 0.02) for name, (look, _) in notices._CLOUDS.items()})
    with MetadataService() as server:
        yield server


def event(ours: bool = True, **more: object) -> str:
    begins = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100), usegmt=True)
    resources = ["Machine-7"] if ours else ["machine-8"]
    return json.dumps({"Events": [{"EventType": "Preempt", "Resources": resources, "NotBefore": begins} | more]})


@pytest.mark.parametrize(
    ("cloud", "answers", "reason", "seconds"),
    [
        ("aws", lambda: {ACTION: json.dumps({"action": "terminate", "time": iso(100)})}, "aws: terminate", 98),
        ("gce", lambda: {PREEMPTED: "TRUE"}, "gce: preempted", 28),
        ("azure", lambda: {NAME: "machine-7", EVENTS: event()}, "azure: Preempt", 98),
        ("azure", lambda: {NAME: "machine-7", EVENTS: event(NotBefore="")}, "azure: Preempt", None),
    ],
)
def test_a_clouds_notice_counts(
    service: MetadataService, cloud: str, answers: Callable[[], dict[str, str]], reason: str, seconds: float | None
) -> None:
    watch = NoticeWatch(check_notice(f"{cloud}={service.base}/"))
    service.wait_for_requests(1)
    assert watch.poll() is None
    service.answers = answers()  # times are of now: the collection may be minutes ago
    wait_until(watch.poll, "the notice")
    found = watch.poll()
    assert found is not None and found.reason == reason
    assert found.grace_s is None if seconds is None else seconds - 20 < grace_s(found) <= seconds
    service.answers = {}
    service.wait_for_requests(2)
    assert watch.poll() is not None, "the machine is as good as gone"


@pytest.mark.parametrize(
    ("cloud", "answers", "said"),
    [
        ("aws", {ACTION: json.dumps({"action": "rebalance", "time": iso(100)})}, "names the action 'rebalance'"),
        ("aws", {ACTION: json.dumps({"action": "stop"})}, "names no time"),
        ("aws", {ACTION: "<html>"}, "not readable JSON"),
        ("gce", {PREEMPTED: "maybe"}, "says 'maybe'"),
        ("gce", {}, "HTTP Error 404"),
        ("azure", {EVENTS: "{}"}, "has no list of Events"),
        ("azure", {NAME: "machine-7", EVENTS: event(NotBefore="soon")}, "names no time in NotBefore: 'soon'"),
        ("azure", {NAME: "machine-7", EVENTS: event(Resources=7)}, "answers"),
    ],
)
def test_what_a_cloud_says_otherwise_is_named_and_stops_nothing(
    service: MetadataService, cloud: str, answers: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    service.answers = answers
    watch = NoticeWatch(check_notice(f"{cloud}={service.base}"))

    def poll() -> bool:
        assert watch.poll() is None
        return bool(caplog.messages)

    wait_until(poll, "a line")
    assert said in caplog.messages[0] and caplog.messages[0].startswith(f"--notice: {cloud} ")


def test_another_machines_event_is_none_of_ours(service: MetadataService) -> None:
    service.answers = {NAME: "machine-7", EVENTS: event(ours=False)}
    watch = NoticeWatch(check_notice(f"azure={service.base}"))
    service.wait_for_requests(4)
    assert watch.poll() is None
