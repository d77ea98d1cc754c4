"""A notice that this machine is about to be taken away, in a file that somebody writes: ``{"stop": true, ...}``.

=============  ===============================================================================================
key            value
=============  ===============================================================================================
``stop``       true: it will be taken away
``deadline``   when: ``2026-01-02T03:04:05Z``, or unix seconds; may be missing
``seconds``    in place of it: so long after the file was written
``reason``     for people; may be missing
=============  ===============================================================================================

Rejected: to ask the clouds' metadata services from here. They change, need tokens and time-outs, and are out of the
reach of many containers; the loop of a shell that asks one and writes this file has five lines (``docs/platforms.md``).
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from mindx_elastic.config import MIN_GRACE_S
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.values import real
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.config_map import parse_json_object, read_text
from mindx_elastic.platforms.flag_file import process_started_at

__all__ = ["NoticeFile", "StopNotice", "notice_path"]

_MOST_AHEAD_S = 86400.0
_STALE_S = 300.0  # a machine that lives on for so long after its end was not taken away
_RESERVE_S = 2.0  # for the agent itself, when the workers are gone


class StopNotice(NamedTuple):
    """A notice that counts."""

    reason: str
    grace_s: float | None
    """How long the workers may take from now on; None: no deadline is known."""


def notice_path(text: str) -> Path:
    """The file that ``--notice`` names, which may come later. Raises UsageError where its folder does not exist."""
    path = Path(text).absolute()
    if "/" not in text or not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--notice {printable(text)}: give the path of a file with a / in it, in a folder that exists")
    return path


class NoticeFile:
    """Looks for the notice while the job runs. One thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._started_at = path, process_started_at()
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
                self._warn(f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error))
        if self._found is None:
            return None
        reason, deadline = self._found
        left_s = None if deadline is None else deadline - time.time()
        if left_s is None or left_s <= 0:  # clocks differ: it counts, but for how long cannot be told
            return StopNotice(reason, None)
        return StopNotice(reason, max(MIN_GRACE_S, left_s - min(_RESERVE_S, left_s / 4)))

    def _read(self) -> tuple[str, float | None] | None:
        text, written = read_text(self._path)
        content = parse_json_object(text) if text.strip() else {"stop": False}
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
        return f"notice file {self._path}{text}", deadline

    def _warn(self, problem: str) -> None:
        if problem != self._warned:
            self._warned = problem
            logger.warning("notice file %s %s; it stops nothing until it changes", self._path, printable(problem, 300))


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
