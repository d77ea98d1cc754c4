"""``--trainer-status``: tells Kubeflow Trainer how far a TrainJob is, for ``kubectl get trainjob`` and dashboards.

Trainer (2.2 and newer, with its feature gate TrainJobStatus) puts an HTTPS address, a token file and a certificate into
the environment of each pod. A POST with ``{"trainerStatus": {...}}`` replaces ``status.trainerStatus`` of the TrainJob:
``progressPercentage`` (0 to 100), ``estimatedRemainingSeconds``, ``metrics`` (names and values, both texts),
``lastUpdatedTime``. Source: Trainer's proposal 2779 and its server.

A thread sends; a server that hangs, refuses or is gone holds up nothing and is named once.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mindx_elastic.config import TrainerSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["JobProgress", "TrainerReporter", "status_body"]

PERIOD_S = 10.0
"""At most one request in so many seconds, and one at the end."""
_TIMEOUT_S, _CLOSE_S = 5.0, 6.0
_MOST_TOKEN_BYTES, _MOST_SECONDS = 1 << 16, (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """How far the job is."""

    step: int
    """Last step that rank 0 has passed; -1: none yet."""
    planned_steps: int = 0
    """Of the whole training; 0: not known."""
    step_s: float | None = None
    """Mean seconds of a step in this attempt; None: not known."""
    loss: float | None = None
    """Rank 0's newest; None: not known."""
    attempts: int = 1
    failures: int = 0
    steps_lost: int = 0
    is_finished: bool = False


def status_body(progress: JobProgress, now: float) -> dict[str, Any]:
    """What is sent at `now` (unix seconds). Pure."""
    step, planned = max(0, progress.step), progress.planned_steps
    found: dict[str, Any] = {"lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))}
    if progress.is_finished:
        found |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif planned > 0:
        found["progressPercentage"] = min(99, 100 * step // planned)  # 100: it is finished
        if progress.step_s is not None:
            left_s = max(0, planned - step) * progress.step_s
            found["estimatedRemainingSeconds"] = min(_MOST_SECONDS, math.ceil(left_s))
    metrics = {"step": str(step)}
    if planned > 0:
        metrics["totalSteps"] = str(planned)
    if progress.loss is not None:
        metrics["loss"] = f"{progress.loss:.6g}"
    metrics |= {"attempts": str(progress.attempts), "failures": str(progress.failures)}
    metrics["stepsLost"] = str(progress.steps_lost)
    found["metrics"] = [{"name": name, "value": value} for name, value in metrics.items()]
    return {"trainerStatus": found}


class TrainerReporter:
    """`note` and `close` belong to one thread."""

    def __init__(self, settings: TrainerSettings, *, period_s: float = PERIOD_S) -> None:
        """Raises UsageError when the environment does not say where to report to, or says what cannot be used."""
        self._settings, self._period_s = _checked(settings), period_s
        try:
            context = ssl.create_default_context(cafile=settings.ca_file or None)
        except OSError as error:  # SSLError is one
            raise UsageError(
                f"--trainer-status: KUBEFLOW_TRAINER_SERVER_CA_CERT={settings.ca_file} cannot be used: {error}"
            ) from error
        # No proxies: the token is meant for this server. No redirects, for the same reason.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
        )
        self._wake = threading.Condition()
        self._newest: JobProgress | None = None
        self._is_closing = False
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="mindx-trainer", daemon=True)
        self._thread.start()

    def note(self, progress: JobProgress) -> None:
        """How far the job is now. Waits for nothing."""
        with self._wake:
            if progress != self._newest:
                self._newest = progress
                self._wake.notify()

    def close(self) -> None:
        """Send what was noted last, unless that was done, and end; waits 6 s at most."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        sent: JobProgress | None = None
        due = 0.0
        while True:
            with self._wake:
                while not self._is_closing and (self._newest == sent or time.monotonic() < due):
                    self._wake.wait(None if self._newest == sent else max(0.0, due - time.monotonic()))
                newest, is_last = self._newest, self._is_closing
            if newest is not None and newest != sent:
                self._send(newest)
                sent, due = newest, time.monotonic() + self._period_s
            if is_last:
                return

    def _send(self, progress: JobProgress) -> None:
        try:
            data = json.dumps(status_body(progress, time.time())).encode()
            headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": "application/json"}
            request = urllib.request.Request(self._settings.url, data=data, headers=headers, method="POST")
            with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                reply.read(1 << 16)
        except urllib.error.HTTPError as error:
            with error:
                self._say(f"HTTP {error.code} {error.reason}")
        except Exception as error:  # also a defect of ours: the job does not depend on this
            reason = getattr(error, "reason", None) or error
            self._say(f"{type(error).__name__}: {reason}")

    def _token(self) -> str:
        """Read each time: the kubelet replaces it every hour."""
        with open(open_regular(self._settings.token_file, os.O_RDONLY, follow_link=True), "rb") as file:
            return file.read(_MOST_TOKEN_BYTES).decode("ascii").strip()

    def _say(self, problem: str) -> None:
        text = printable(problem, 300)
        if text not in self._said and len(self._said) < 20:
            self._said.add(text)
            logger.warning("--trainer-status: %s: %s", self._settings.url, text)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _checked(settings: TrainerSettings) -> TrainerSettings:
    names: Mapping[str, str] = {
        "KUBEFLOW_TRAINER_SERVER_URL": settings.url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": settings.token_file,
    }
    for name, value in names.items():
        if not value:
            raise UsageError(
                f"--trainer-status: {name} is not set. Kubeflow Trainer 2.2 sets it in the pods of a TrainJob where "
                "its feature gate TrainJobStatus is on; leave the option out elsewhere"
            )
    try:
        parts = urlsplit(settings.url)
        is_good = parts.scheme == "https" and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(
            f"--trainer-status: KUBEFLOW_TRAINER_SERVER_URL={settings.url!r:.200} is no https address; the token is "
            "sent to no other"
        )
    return settings
