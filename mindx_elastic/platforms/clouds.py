"""What clouds' metadata services say of this machine's end, in the words of a notice file (see `notices`).

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
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from mindx_elastic.platforms.small_files import parse_json_object

__all__ = ["CLOUDS", "METADATA", "Cloud"]

METADATA = "http://169.254.169.254"
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


CLOUDS: dict[str, tuple[Callable[[_Ask], dict[str, Any]], float]] = {
    "aws": (_aws, 5.0),
    "gce": (_gce, 1.0),
    "azure": (_azure, 1.0),
}
"""How each is asked, and every how many seconds. Raises OSError or ValueError for what is no answer."""


class Cloud:
    """Asks in a thread, because a service may hang. `read` is for another thread."""

    def __init__(self, name: str, base: str) -> None:
        """name: one of `CLOUDS`. base: ``http://HOST`` of the metadata service."""
        self._base, (self._look, self._period_s) = base, CLOUDS[name]
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
