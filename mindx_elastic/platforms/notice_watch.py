"""Asks the sources of `notices` beside the job, and says when it must stop.

One thread a source, so that one that hangs keeps no other from being heard. The agent's main thread only looks at what
the threads have found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindx_elastic.config import MIN_GRACE_S
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.platforms.flag_file import process_started_at
from mindx_elastic.platforms.notices import Notice, Source

__all__ = ["NoticeWatch", "StopNotice"]

_SILENT_S = 30.0  # a look that takes longer is named: each part of it has a limit, but a server may send drop by drop
_STALE_S = 300.0  # a machine that lives on for so long after its end was not taken away
_RESERVE_S = 2.0  # for the agent itself, when the workers are gone
_MOST_SAID = 5  # different lines about one source; one that says something else each time would fill the log


@dataclass(frozen=True)
class StopNotice:
    """A notice that counts."""

    reason: str
    grace_s: float | None
    """How long the workers may take from now on; None: no deadline is known."""


class NoticeWatch:
    """`poll` and `close` belong to one thread."""

    def __init__(self, sources: Sequence[Source], *, on_notice: Callable[[], None] = lambda: None) -> None:
        """on_notice: called in a thread of this object, again and again while there is a notice that counts."""
        self._sources, self._on_notice = tuple(sources), on_notice
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
        """Asks nothing any more. Waits for nobody: a request may hang."""
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
            if self._found is not None:
                self._on_notice()
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
