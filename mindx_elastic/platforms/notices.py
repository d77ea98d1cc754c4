"""A notice that this machine is about to be taken away: of a cloud (`clouds`), or in a file: ``{"stop": true, ...}``.

=============  ===============================================================================================
key            value
=============  ===============================================================================================
``stop``       true: it will be taken away
``deadline``   when: ``2026-01-02T03:04:05Z``, or unix seconds; may be missing
``seconds``    in place of it: so long after the file was written
``reason``     for people; may be missing
=============  ===============================================================================================

A source never decides by guess: what it does not understand is named and stops nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.config import MIN_GRACE_S
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.values import real
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.clouds import CLOUDS, METADATA, Cloud
from mindx_elastic.platforms.flag_file import process_started_at
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
    """`text` of ``--notice``: a word of `CLOUDS` (``aws=http://[fd00:ec2::254]``: at another address), or the path of a
    file, which may come later; made absolute. Raises UsageError where it is neither, or there is no such folder."""
    word, equals, base = text.partition("=")
    if word in CLOUDS:
        if equals and not base.startswith(("http://", "https://")):
            raise UsageError(f"--notice {printable(text)}: give {word}, or {word}=http://HOST of its metadata service")
        return text
    path = Path(text).absolute()
    if "/" not in text or not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--notice {printable(text)}: give {', '.join(CLOUDS)}, or the path of a file with a / in it, in a folder "
            "that exists"
        )
    return str(path)


class NoticeWatch:
    """Looks for the notice while the job runs. One thread."""

    def __init__(self, notice: str) -> None:
        """notice: as `check_notice` returns it."""
        word, _, base = notice.partition("=")
        self._name = word if word in CLOUDS else f"notice file {notice}"
        self._source: Callable[[], tuple[dict[str, Any], float]] = (
            Cloud(word, base.rstrip("/") or METADATA).read if word in CLOUDS else partial(_read_file, Path(notice))
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
    text, written = read_text(path)
    return parse_json_object(text) if text.strip() else {"stop": False}, written


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
