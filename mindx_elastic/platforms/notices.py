"""A notice that this machine is about to be taken away: of a cloud, or in a file: ``{"stop": true, ...}``.

=============  ===============================================================================================
key            value
=============  ===============================================================================================
``stop``       true: it will be taken away
``deadline``   when: ``2026-01-02T03:04:05Z``, or unix seconds; may be missing
``seconds``    in place of it: so long after the file was written
``reason``     for people; may be missing
=============  ===============================================================================================

A source never decides by guess: what it does not understand is named and stops nothing. What clouds' metadata services
say is put into these words:

=========  ==================================================================  =======  =============
cloud      asked                                                               every    usual notice
=========  ==================================================================  =======  =============
``aws``    ``/latest/meta-data/spot/instance-action`` (IMDSv2, with a token)   5 s      120 s
``gce``    ``/computeMetadata/v1/instance/preempted``                          1 s      30 s
``azure``  ``/metadata/scheduledevents``: ``Preempt`` and ``Terminate``        1 s      30 s
=========  ==================================================================  =======  =============

The formats are those of the public pages "Spot Instance interruption notices" (Amazon EC2 User Guide), "Spot VMs"
(Compute Engine) and "Scheduled Events for Linux VMs" (Azure).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from mindx_elastic.config import MIN_GRACE_S
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import process_started_at
from mindx_elastic.core.printable import printable
from mindx_elastic.core.values import real
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.small_files import parse_json_object, read_text

__all__ = ["NoticeWatch", "StopNotice", "check_notice"]

_MOST_AHEAD_S = 86400.0
_STALE_S = 300.0  # a machine that lives on for so long after its end was not taken away
_RESERVE_S = 2.0  # for the agent itself, when the workers are gone


class StopNotice(NamedTuple):
    """A notice that counts."""

    reason: str
    grace_s: float | None
    """How long the workers may take from now on; None: no deadline is known."""


def check_notice(text: str) -> str:
    """`text` of ``--notice``: a cloud's word (``aws=http://[fd00:ec2::254]``: at another address), or the path of a
    file, which may come later; made absolute. Raises UsageError where it is neither, or there is no such folder."""
    word, equals, base = text.partition("=")
    if word in _CLOUDS:
        if equals and not base.startswith(("http://", "https://")):
            raise UsageError(f"--notice {printable(text)}: give {word}, or {word}=http://HOST of its metadata service")
        return text
    path = Path(text).absolute()
    if "/" not in text or not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--notice {printable(text)}: give {', '.join(_CLOUDS)}, or the path of a file with a / in it, in a folder "
            "that exists"
        )
    return str(path)


class NoticeWatch:
    """Looks for the notice while the job runs. One thread."""

    def __init__(self, notice: str) -> None:
        """notice: as `check_notice` returns it."""
        word, _, base = notice.partition("=")
        self._name = word if word in _CLOUDS else f"notice file {notice}"
        self._source: Callable[[], tuple[dict[str, Any], float]] = (
            _Cloud(word, base.rstrip("/") or _METADATA).read if word in _CLOUDS else partial(_read_file, Path(notice))
        )
        self._started_at = process_started_at()
        self._found: tuple[str, float | None] | None = None
        """Reason and deadline (unix seconds; None: not known) of the first notice that counts."""
        self._warned = ""

    def poll(self) -> StopNotice | None:
        """The first notice that counts, with the time that is left now; the same at each call. What cannot be
        understood is named, and stops nothing. Never raises."""
        if self._found is None:
            try:
                self._found = self._read()
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                self._warn(f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error))
        if self._found is None:
            return None
        reason, deadline = self._found
        left_s = None if deadline is None else deadline - time.time()
        if left_s is None or left_s <= 0:  # clocks differ: it counts, but for how long cannot be told
            return StopNotice(reason, None)
        return StopNotice(reason, max(MIN_GRACE_S, left_s - min(_RESERVE_S, left_s / 4)))

    def _read(self) -> tuple[str, float | None] | None:
        content, written = self._source()
        if not isinstance(content.get("stop"), bool):
            raise ValueError('has no "stop": true or false')
        if not content["stop"]:
            return None
        at, seconds = content.get("deadline"), content.get("seconds")
        if at is None and seconds is not None:
            at = written + found if (found := real(seconds)) is not None else seconds
        deadline = None if at is None else _moment(at)
        if deadline is not None and deadline < time.time() - _STALE_S:
            raise ValueError("is over since minutes")
        if deadline is None and written < self._started_at:
            raise ValueError("is from before this start")
        why = content.get("reason")
        text = f": {printable(why, 200)}" if isinstance(why, str) and why else ""
        return f"{self._name}{text}", deadline

    def _warn(self, problem: str) -> None:
        if problem != self._warned:
            self._warned = problem
            logger.warning("--notice: %s %s; this stops nothing", self._name, printable(problem, 300))


def _read_file(path: Path) -> tuple[dict[str, Any], float]:
    """What it says, and when it was written."""
    text, status = read_text(path)
    return parse_json_object(text) if text.strip() else {"stop": False}, status.st_mtime


def _moment(value: object) -> float:
    """Unix seconds of ``2026-01-02T03:04:05Z`` or of a number. Raises ValueError."""
    found = real(value)
    if found is None and isinstance(value, str):
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
            found = moment.timestamp() if moment.tzinfo else None
    if found is None or found > time.time() + _MOST_AHEAD_S:
        raise ValueError(f"names no time with a zone within a day: {printable(value, 60)!r}")
    return found


# --- clouds ---


_METADATA = "http://169.254.169.254"
"""Where the services of all three are."""
_TIMEOUT_S = 2.0
_MAX_BYTES = 64 << 10
_NO_NOTICE: dict[str, Any] = {"stop": False}
_open = build_opener(ProxyHandler({})).open  # a proxy has its own machine's metadata
_Ask = Callable[..., str]
"""Called with a path, headers and perhaps a method: the text that the service answers."""


def _aws(ask: _Ask) -> dict[str, Any]:
    token = ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        content = parse_json_object(
            ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token.strip()})
        )
    except HTTPError as error:
        if error.code == 404:
            return _NO_NOTICE
        raise
    if content.get("action") not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"names the action {content.get('action')!r}")
    return {"stop": True, "deadline": content.get("time", ""), "reason": content["action"]}


def _gce(ask: _Ask) -> dict[str, Any]:
    word = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
    if word not in ("TRUE", "FALSE"):
        raise ValueError(f"says {word[:60]!r} in place of TRUE or FALSE")
    return {"stop": word == "TRUE", "seconds": 30, "reason": "preempted"}


def _azure(ask: _Ask) -> dict[str, Any]:
    headers = {"Metadata": "true"}
    events = parse_json_object(ask("/metadata/scheduledevents?api-version=2020-07-01", headers)).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("has no list of Events")
    events = [event for event in events if event.get("EventType") in ("Preempt", "Terminate")]
    if not events:
        return _NO_NOTICE
    own = ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers).strip().lower()
    for event in events:  # all machines of a scale set may hear of the events of each
        if own and own in [str(each).lower() for each in event.get("Resources") or ()]:
            begins = event.get("NotBefore")  # empty once it has begun
            try:
                deadline = parsedate_to_datetime(begins).timestamp() if begins else None
            except (TypeError, ValueError):
                raise ValueError(f"names no time in NotBefore: {begins!r:.60}") from None
            return {"stop": True, "deadline": deadline, "reason": event["EventType"]}
    return _NO_NOTICE


_CLOUDS: dict[str, tuple[Callable[[_Ask], dict[str, Any]], float]] = {
    "aws": (_aws, 5.0),
    "gce": (_gce, 1.0),
    "azure": (_azure, 1.0),
}
"""How each is asked, and every how many seconds. Raises OSError or ValueError for what is no answer."""


class _Cloud:
    """Asks in a thread, because a service may hang. `read` is for another thread."""

    def __init__(self, name: str, base: str) -> None:
        """name: one of `_CLOUDS`. base: ``http://HOST`` of the metadata service."""
        self._base, (self._look, self._period_s) = base, _CLOUDS[name]
        self._said: tuple[dict[str, Any], float] = _NO_NOTICE, 0.0
        self._error: OSError | ValueError | None = None
        threading.Thread(target=self._watch, name="mindx-notice", daemon=True).start()

    def read(self) -> tuple[dict[str, Any], float]:
        """The newest answer as a notice, and since when (unix seconds) it has been one. Raises OSError or ValueError
        where the service does not answer, or not as expected."""
        if self._error is not None:
            raise self._error
        return self._said

    def _watch(self) -> None:
        while True:
            try:
                said, error = self._look(self._ask), None
                if said["stop"] != self._said[0]["stop"]:
                    self._said = said, time.time()
            except (OSError, ValueError, TypeError, HTTPException) as raised:
                error = raised if isinstance(raised, OSError | ValueError) else ValueError(f"answers {raised!r}")
            self._error = error
            time.sleep(self._period_s)

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        with _open(Request(self._base + path, headers=dict(headers), method=method), timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_MAX_BYTES).decode(errors="replace"))
