"""What a metadata service, a URL or a file says, and what cannot be taken for a notice."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms import notices
from mindx_elastic.platforms.notices import Notice, NoticeWatch, open_source
from tests.metadata_server import (
    AWS_ACTION,
    AZURE_EVENTS,
    AZURE_NAME,
    GCE,
    MetadataServer,
    hang,
    reply,
)

GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as found:
        yield found


def iso(seconds_ahead: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds_ahead, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def azure_event(kind: str = "Preempt", resources: tuple[str, ...] = ("vm-1",), ahead_s: float | None = 30.0) -> str:
    moment = datetime.fromtimestamp(time.time() + (ahead_s or 0.0), timezone.utc)
    begins = "" if ahead_s is None else format_datetime(moment, usegmt=True)
    status = "Started" if ahead_s is None else "Scheduled"
    event = {"EventId": "e", "EventType": kind, "Resources": list(resources), "EventStatus": status}
    return json.dumps({"DocumentIncarnation": 2, "Events": [{**event, "NotBefore": begins}]})


def left_s(notice: Notice | None) -> float:
    assert notice is not None and notice.deadline is not None
    return notice.deadline - time.time()


def test_aws_before_and_with_a_notice(server: MetadataServer) -> None:
    source = open_source(f"aws={server.base}")
    assert source.look() is None
    server.answers[AWS_ACTION] = reply(json.dumps({"action": "terminate", "time": iso(120)}))
    notice = source.look()
    assert 100 < left_s(notice) <= 120 and notice and "terminate" in notice.reason
    assert sum("token" in request for request in server.requests) == 1, "the token is kept"


def test_aws_takes_a_new_token_when_the_old_one_has_expired(server: MetadataServer) -> None:
    source = open_source(f"aws={server.base}")
    assert source.look() is None
    server.token = "another"
    assert source.look() is None


def test_gce(server: MetadataServer) -> None:
    source = open_source(f"gce={server.base}/")
    server.answers[GCE] = reply("FALSE", headers=GOOGLE)
    assert source.look() is None
    server.answers[GCE] = reply("TRUE\n", headers=GOOGLE)
    first, second = source.look(), source.look()
    assert 20 < left_s(first) <= 30 and first == second, "the time runs from the first sight"


def test_azure_hears_its_own_events(server: MetadataServer) -> None:
    source = open_source(f"azure={server.base}")
    server.answers[AZURE_NAME] = reply("vm-1")
    for harmless in (
        '{"DocumentIncarnation": 1, "Events": []}',
        azure_event("Freeze"),
        azure_event(resources=("vm-2", "vm-11")),
    ):
        server.answers[AZURE_EVENTS] = reply(harmless)
        assert source.look() is None, harmless
    server.answers[AZURE_EVENTS] = reply(azure_event("Terminate", ("vm-2", "VM-1"), 600.0))
    assert 500 < left_s(source.look()) <= 600
    server.answers[AZURE_EVENTS] = reply(azure_event(ahead_s=None))
    notice = source.look()
    assert notice is not None and notice.deadline is None, "it has begun"


def test_a_url(server: MetadataServer) -> None:
    source = open_source(f"{server.base}/notice?token=secret")
    assert "secret" not in source.name
    for nothing in (reply(status=404), reply(status=204), reply(""), reply('{"stop": false}')):
        server.answers["/notice"] = nothing
        assert source.look() is None
    server.answers["/notice"] = reply('{"stop": true, "seconds": 60, "reason": "maintenance\\u001b[0m"}')
    first, second = source.look(), source.look()
    assert 50 < left_s(first) <= 60 and first == second
    assert first is not None and first.reason.endswith("/notice: maintenance\\x1b[0m")
    server.answers["/notice"] = reply(json.dumps({"stop": True, "deadline": iso(90)}))
    assert 80 < left_s(source.look()) <= 90


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    source = open_source(str(path))
    assert source.look() is None
    path.write_text("")
    assert source.look() is None
    path.write_text('{"stop": true, "seconds": 60}')
    os.utime(path, (time.time() - 10,) * 2)
    notice = source.look()
    assert 40 < left_s(notice) <= 50, "the seconds count from its writing"


BAD = {
    "another status": (reply("oops", 500), "status 500"),
    "a redirect": (reply(status=302, headers={"Location": "http://127.0.0.1:9/"}), "status 302"),
    "too much": (reply(b"x" * 100_000), "64 KiB"),
    "not HTTP": (lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n"), "no HTTP"),
    "cut off": (lambda handler: None, "."),
    "a time of a year ahead": (
        reply(
            json.dumps(
                {
                    "action": "stop",
                    "time": iso(3e7),
                    "stop": True,
                    "deadline": iso(3e7),
                    "Events": [{"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": iso(3e7)}],
                }
            )
        ),
        ".",
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize(("word", "path"), [("aws", AWS_ACTION), ("azure", AZURE_EVENTS), ("gce", GCE), ("", "/n")])
def test_what_is_no_notice_is_an_error_and_none(server: MetadataServer, what: str, word: str, path: str) -> None:
    server.answers = {AZURE_NAME: reply("vm-1"), path: BAD[what][0]}
    source = open_source(f"{word}={server.base}" if word else f"{server.base}{path}")
    said = "header" if word == "gce" and "JSON" in BAD[what][1] else BAD[what][1]
    with pytest.raises((OSError, ValueError), match=said):
        source.look()


def test_azure_without_the_name_of_the_machine_stops_nothing(server: MetadataServer) -> None:
    server.answers[AZURE_EVENTS] = reply(azure_event())
    with pytest.raises(ValueError, match="compute/name answers with status 404"):
        open_source(f"azure={server.base}").look()


def test_a_server_that_hangs_is_left(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_TIMEOUT_S", 0.2)
    server.answers[GCE] = hang
    with pytest.raises(OSError, match="timed out"):
        open_source(f"gce={server.base}").look()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gcp",
        "aws=ftp://x",
        "http://h:99999/",
        "/no/such/f",
    ],
)
def test_what_names_no_source_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--notice"):
        open_source(text)


class Told:
    """A source that says what it is told to."""

    name, period_s = "told", 0.001

    def __init__(self, look: Callable[[], Notice | None]) -> None:
        self._look = look
        self.twice, self._count = threading.Event(), 0

    def look(self) -> Notice | None:
        self._count += 1
        if self._count > 2:
            self.twice.set()
        return self._look()


def watch(look: Callable[[], Notice | None]) -> NoticeWatch:
    source = Told(look)
    made = NoticeWatch([source]).start()
    assert source.twice.wait(60)
    made.close()
    return made


def test_the_time_that_is_left_becomes_the_grace_period() -> None:
    notice = Notice(reason="r", deadline=time.time() + 100)
    watching = watch(lambda: notice)
    found = watching.poll()
    assert found is not None and found.grace_s is not None and 90 < found.grace_s <= 98


@pytest.mark.parametrize("deadline", [None, -10.0])
def test_a_notice_whose_time_cannot_be_told_counts(deadline: float | None) -> None:
    at = None if deadline is None else time.time() + deadline
    found = watch(lambda: Notice(reason="r", deadline=at)).poll()
    assert found is not None and found.grace_s is None


@pytest.mark.parametrize(
    ("notice", "said"),
    [
        (Notice(reason="r", deadline=time.time() - 1000), "is over since minutes"),
        (Notice(reason="r", deadline=None, written=1.0), "from before this start"),
    ],
)
def test_a_notice_that_is_left_over_stops_nothing(
    notice: Notice, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch(lambda: notice).poll() is None
    assert sum(said in line for line in caplog.messages) == 1, "once"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a defect"),
    ],
)
def test_an_error_is_named_once_and_stops_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Notice | None:
        raise error

    watching = watch(fail)
    assert watching.poll() is None
    assert len(caplog.messages) == 1 and "told" in caplog.messages[0]


def test_a_source_that_never_comes_back_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindx_elastic.platforms.notices._SILENT_S", 0.0)
    inside, release = threading.Event(), threading.Event()

    class Stuck:
        name, period_s = "stuck", 0.001

        def look(self) -> Notice | None:
            inside.set()
            release.wait(60)
            return None

    watching = NoticeWatch([Stuck()]).start()
    assert inside.wait(60)
    assert watching.poll() is None and watching.poll() is None
    watching.close()
    release.set()
    assert len(caplog.messages) == 1 and "stuck: has not answered" in caplog.messages[0]
