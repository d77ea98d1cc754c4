"""What a notice file says, and what cannot be taken for a notice."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.notices import NoticeFile, StopNotice, notice_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notice.json"


def iso(seconds_ahead: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds_ahead, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def grace_s(found: StopNotice | None) -> float:
    assert found is not None and found.grace_s is not None
    return found.grace_s


def test_a_file_that_comes_later_counts_from_its_writing_and_goes_on_counting(path: Path) -> None:
    watch = NoticeFile(notice_path(str(path)))
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
        assert 90 < grace_s(NoticeFile(path).poll()) <= 98


@pytest.mark.parametrize("content", [{}, {"deadline": -10.0}], ids=str)
def test_a_notice_whose_time_cannot_be_told_counts(path: Path, content: dict[str, float]) -> None:
    watch = NoticeFile(path)
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
        (json.dumps({"stop": True, "deadline": iso(3e7)}), "names no time"),
        (json.dumps({"stop": True, "deadline": iso(-1000)}), "is over since minutes"),
    ],
)
def test_what_is_no_notice_is_named_once_and_stops_nothing(
    path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(text)
    watch = NoticeFile(path)
    assert watch.poll() is None and watch.poll() is None
    (line,) = caplog.messages
    assert said.split(".*")[0] in line


def test_a_notice_from_before_this_start_without_a_deadline_stops_nothing(path: Path) -> None:
    path.write_text('{"stop": true}')
    os.utime(path, (1.0, 1.0))
    assert NoticeFile(path).poll() is None


@pytest.mark.parametrize("text", ["", "aws", "http://host/notice", "/no/such/f", "/tmp"])
def test_what_names_no_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--notice"):
        notice_path(text)
