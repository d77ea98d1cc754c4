"""Notices that this machine is about to be taken away: what clouds, a URL or a file say, and how they are asked.

==================  ==================================================================  ============  ==================
source              asked                                                               every         usual notice
==================  ==================================================================  ============  ==================
``aws``             ``/latest/meta-data/spot/instance-action`` (IMDSv2, with a token)   5 s           120 s
``gce``             ``/computeMetadata/v1/instance/preempted``                          1 s           30 s
``azure``           ``/metadata/scheduledevents``: ``Preempt`` and ``Terminate``        1 s           30 s
a URL, a file       ``{"stop": true, "deadline": ..., "seconds": ..., "reason": ...}``  2 s           none is named
==================  ==================================================================  ============  ==================

The clouds' formats are those of their public pages: "Spot Instance interruption notices" (Amazon EC2 User Guide), "Spot
VMs" (Compute Engine), "Scheduled Events for Linux VMs" (Azure).

A source never decides by guess: what it does not understand is a ValueError, which is named and stops nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from mindx_elastic.config import MIN_GRACE_S
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.values import real
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.flag_file import process_started_at
from mindx_elastic.platforms.small_files import read_regular

__all__ = ["CLOUDS", "Notice", "NoticeAnswer", "NoticeWatch", "Source", "StopNotice", "ask", "open_source"]

_METADATA = "http://169.254.169.254"
_TIMEOUT_S = 2.0
_MAX_BYTES = 64 << 10
_MAX_REASON = 200
_TOKEN_S = 21600
_AZURE_HEADERS = {"Metadata": "true"}
_MOST_AHEAD_S = 86400.0
_SILENT_S = 30.0  # a look that takes longer is named: each part of it has a limit, but a server may send drop by drop
_STALE_S = 300.0  # a machine that lives on for so long after its end was not taken away
_RESERVE_S = 2.0  # for the agent itself, when the workers are gone
_MOST_SAID = 5  # different lines about one source; one that says something else each time would fill the log


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The machine will be taken away."""

    reason: str
    """One line for a person."""
    deadline: float | None
    """Unix seconds; None: it is not known."""
    written: float | None = None
    """When it was written, unix seconds, where it could be left over from another run (a file); None: it is current."""


@dataclass(frozen=True)
class NoticeAnswer:
    """What an HTTP server has answered."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Source(Protocol):
    """One place where a notice may appear. Used by one thread."""

    name: str
    """For people."""
    period_s: float

    def look(self) -> Notice | None:
        """The notice, if there is one now. Raises OSError or ValueError where that cannot be told."""
        ...


def ask(url: str, headers: Mapping[str, str], method: str = "GET") -> NoticeAnswer:
    """Send one request, without proxies (they have their own machine's metadata) and redirects (a metadata service
    does not redirect); at most `_MAX_BYTES` are read. Any status is an answer. Raises OSError or ValueError."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    with closing(kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request(method, target, headers=headers)
            with connection.getresponse() as response:
                body = response.read(_MAX_BYTES + 1)
        except HTTPException as error:
            if isinstance(error, OSError):
                raise
            raise ValueError(f"no HTTP ({type(error).__name__})") from None
    if len(body) > _MAX_BYTES:
        raise ValueError(f"an answer of more than {_MAX_BYTES >> 10} KiB")
    return NoticeAnswer(response.status, body, {name.lower(): value for name, value in response.headers.items()})


def _expect(answer: NoticeAnswer, what: str, *none: int) -> bytes | None:
    """The body of a good answer; None for a status that says that there is nothing. Raises ValueError for others."""
    if answer.status in none:
        return None
    if answer.status != 200:
        hint = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
        raise ValueError(f"{what} answers with status {answer.status}{hint}")
    return answer.body


def _json(body: bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not JSON: {printable(body[:60].decode(errors='replace'))!r}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what} is not a JSON object")
    return content


def _moment(value: object, what: str) -> float:
    """Unix seconds of ``2026-01-02T03:04:05Z`` or of a number. Raises ValueError."""
    found = real(value)
    if found is None and isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
            found = moment.timestamp() if moment.tzinfo else None
        except (ValueError, OverflowError):
            found = None
    if found is None:
        raise ValueError(f"{what} is not a time with a zone: {printable(value, 60)!r}")
    if found > time.time() + _MOST_AHEAD_S:
        raise ValueError(f"{what} is more than a day ahead: {printable(value, 60)!r}")
    return found


def _at(deadline: float) -> str:
    return datetime.fromtimestamp(deadline, timezone.utc).strftime("%H:%M:%S UTC")


class _Aws:
    name, period_s = "aws", 5.0
    _ACTION = "/latest/meta-data/spot/instance-action"

    def __init__(self, base: str) -> None:
        self._base, self._token = base, ""

    def look(self) -> Notice | None:
        body = self._get(self._ACTION)
        if body is None:
            return None
        content = _json(body, "spot/instance-action")
        action = content.get("action")
        if action not in ("terminate", "stop", "hibernate"):
            raise ValueError(f"spot/instance-action has the action {printable(action, 60)!r}")
        deadline = _moment(content.get("time"), "the time of spot/instance-action")
        return Notice(reason=f"AWS: {action} at {_at(deadline)}", deadline=deadline)

    def _get(self, path: str) -> bytes | None:
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            answer = ask(self._base + path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._token = ""  # it has expired
        return _expect(answer, path, 404)

    def _new_token(self) -> str:
        path = "/latest/api/token"
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = (_expect(ask(self._base + path, headers, "PUT"), path) or b"").decode("latin-1").strip()
        if not token or not token.isascii() or not token.isprintable() or len(token) > 1024:
            raise ValueError(f"{path} gives no token")
        return token


class _Gce:
    name, period_s = "gce", 1.0
    _PATH = "/computeMetadata/v1/instance/preempted"
    _USUAL_S = 30.0

    def __init__(self, base: str) -> None:
        self._base = base
        self._seen: float | None = None

    def look(self) -> Notice | None:
        answer = ask(self._base + self._PATH, {"Metadata-Flavor": "Google"})
        word = (_expect(answer, self._PATH) or b"").strip().upper()
        if answer.headers.get("metadata-flavor") != "Google":
            raise ValueError("the answer has no header Metadata-Flavor: Google, so it is not Google's")
        if word not in (b"TRUE", b"FALSE"):
            raise ValueError(f"instance/preempted is {printable(word[:60].decode(errors='replace'))!r}")
        if word == b"FALSE":
            self._seen = None
            return None
        self._seen = self._seen or time.time()
        return Notice(reason="GCE: preempted", deadline=self._seen + self._USUAL_S)


class _Azure:
    name, period_s = "azure", 1.0
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _USUAL_S = 30.0

    def __init__(self, base: str) -> None:
        self._base, self._own = base, ""

    def look(self) -> Notice | None:
        body = _expect(ask(self._base + self._EVENTS, _AZURE_HEADERS), "scheduledevents") or b""
        events = _json(body, "scheduledevents").get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError("scheduledevents has no list of Events")
        for event in events:
            if event.get("EventType") in ("Preempt", "Terminate") and self._is_ours(event):
                return self._notice(event)
        return None

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """All machines of a scale set may hear of the events of each."""
        resources = event.get("Resources")
        if not isinstance(resources, list):
            raise ValueError(f"a {event['EventType']} event names no Resources")
        if not self._own:
            body = _expect(ask(self._base + self._NAME, _AZURE_HEADERS), "instance/compute/name") or b""
            self._own = body.decode(errors="replace").strip()
        return self._own.lower() in [str(each).lower() for each in resources] if self._own else False

    def _notice(self, event: dict[str, Any]) -> Notice:
        what, begins = str(event["EventType"]), event.get("NotBefore")
        if not begins:  # it has started
            return Notice(reason=f"Azure: {what} of {printable(self._own, 60)} has begun", deadline=None)
        try:
            moment = parsedate_to_datetime(str(begins))
            moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
            deadline = _moment(moment.timestamp(), "NotBefore")
        except (TypeError, ValueError, IndexError, OverflowError):
            raise ValueError(f"NotBefore is not a time within a day: {printable(begins, 60)!r}") from None
        return Notice(reason=f"Azure: {what} of {printable(self._own, 60)} at {_at(deadline)}", deadline=deadline)


def _own_notice(body: bytes, name: str, *, written: float | None) -> Notice | None:
    """Our own format; `seconds` counts from `written`, or from now."""
    content = _json(body, "the notice")
    stop = content.get("stop")
    if not isinstance(stop, bool):
        raise ValueError('the notice has no "stop": true or false')
    if not stop:
        return None
    deadline, seconds = content.get("deadline"), content.get("seconds")
    if deadline is not None:
        deadline = _moment(deadline, '"deadline"')
    elif seconds is not None:
        found = real(seconds)
        if found is None or not 0 < found <= _MOST_AHEAD_S:
            raise ValueError(f'"seconds" is not a number from 0 to {_MOST_AHEAD_S:g}: {printable(seconds, 60)!r}')
        deadline = (time.time() if written is None else written) + found
    why = content.get("reason")
    text = f": {printable(why, _MAX_REASON)}" if isinstance(why, str) and why else ""
    return Notice(reason=f"{name}{text}", deadline=deadline, written=written)


class _Url:
    period_s = 2.0

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold a secret
        self._url = url
        self._seen: tuple[bytes, Notice] | None = None

    def look(self) -> Notice | None:
        body = _expect(ask(self._url, {"Accept": "application/json"}), "it", 204, 404)
        if not body or not body.strip():
            self._seen = None
            return None
        if self._seen is None or self._seen[0] != body:  # "seconds" counts from its first appearance
            notice = _own_notice(body, self.name, written=None)
            self._seen = None if notice is None else (body, notice)
        return None if self._seen is None else self._seen[1]


class _File:
    period_s = 1.0

    def __init__(self, path: Path) -> None:
        self.name, self._path = f"notice file {path}", path

    def look(self) -> Notice | None:
        try:
            body, status = read_regular(self._path, _MAX_BYTES, follow_links=True)
        except FileNotFoundError:
            return None
        return _own_notice(body, self.name, written=status.st_mtime) if body.strip() else None


CLOUDS: dict[str, Callable[[str], Source]] = {
    "aws": _Aws,
    "gce": _Gce,
    "azure": _Azure,
}
"""The source for each word of ``--notice``, made from the address of the metadata service."""


def open_source(text: str) -> Source:
    """The source that a ``--notice`` names: a word of `CLOUDS` (``aws=http://[fd00:ec2::254]``: at another address), a
    URL, or the path of a file. Asks nothing yet. Raises UsageError."""
    word, equals, base = text.partition("=")
    if word in CLOUDS:
        return CLOUDS[word](_checked_url(base, text).rstrip("/") if equals else _METADATA)
    if "://" in text:
        return _Url(_checked_url(text, text))
    if "/" not in text:
        raise UsageError(
            f"--notice {text}: give {', '.join(CLOUDS)}, a URL (http://...), or the path of a file with a / in it"
        )
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--notice {text}: the folder {path.parent} does not exist; make it, the file may come later")
    return _File(path)


def _checked_url(url: str, text: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"--notice {printable(text)}: give http://HOST[:PORT]... or https://..., without a user in it")
    return url


@dataclass(frozen=True)
class StopNotice:
    """A notice that counts."""

    reason: str
    grace_s: float | None
    """How long the workers may take from now on; None: no deadline is known."""


class NoticeWatch:
    """Asks the sources while the job runs. `poll` and `close` belong to one thread.

    One thread a source, so that one that hangs keeps no other from being heard. The agent's main thread only looks at
    what the threads have found.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self._started_at = process_started_at()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._found: Notice | None = None
        self._looking_since: dict[Source, float] = {}
        self._said: dict[str, set[str]] = {}

    def start(self) -> NoticeWatch:
        for source in self._sources:
            threading.Thread(target=self._watch, args=(source,), name="mindx-notice", daemon=True).start()
        return self

    def close(self) -> None:
        """Asks nothing any more. Does not wait: a request may hang."""
        self._closing.set()

    def poll(self) -> StopNotice | None:
        """The first notice that counts, with the time that is left now; the same at each call. Names sources that do
        not answer. Never raises."""
        with self._lock:
            found, looking = self._found, dict(self._looking_since)
        for source, since in looking.items():
            if time.monotonic() - since > _SILENT_S:
                self._say(source.name, f"has not answered for {_SILENT_S:g} s")
        if found is None:
            return None
        left_s = None if found.deadline is None else found.deadline - time.time()
        if left_s is None or left_s <= 0:  # clocks differ: it counts, but for how long cannot be told
            return StopNotice(found.reason, None)
        return StopNotice(found.reason, max(MIN_GRACE_S, left_s - min(_RESERVE_S, left_s / 4)))

    def _watch(self, source: Source) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._looking_since[source] = time.monotonic()
            try:
                notice = source.look()
            except (OSError, ValueError) as error:
                notice = None
                self._say(source.name, printable(getattr(error, "reason", None) or error, 300))
            except Exception as error:  # a defect of ours; the thread must live on, for the notice may still come
                notice = None
                self._say(source.name, printable(f"{type(error).__name__}: {error}", 300))
            finally:
                with self._lock:
                    del self._looking_since[source]
            if notice is not None and not self._is_stale(source, notice):
                with self._lock:
                    self._found = self._found or notice
            self._closing.wait(source.period_s)

    def _is_stale(self, source: Source, notice: Notice) -> bool:
        """Whether it is left over: of a machine that this job has left, or of an end that did not come."""
        over = notice.deadline is not None and notice.deadline < time.time() - _STALE_S
        old = notice.deadline is None and notice.written is not None and notice.written < self._started_at
        if over:
            self._say(source.name, f"its notice ({notice.reason}) is over since minutes: taken as done", "")
        elif old:
            self._say(source.name, "its notice is from before this start: taken as done until it changes", "")
        return over or old

    def _say(self, name: str, what: str, then: str = "; it goes on being asked, and stops nothing by this") -> None:
        """Once each, and not without end. Any thread."""
        with self._lock:
            said = self._said.setdefault(name, set())
            if what in said or len(said) >= _MOST_SAID:
                return
            said.add(what)
            last = "; what else is wrong with it is not told" if len(said) == _MOST_SAID else ""
        logger.warning("%s", f"--notice: {name}: {what}{then}{last}")
