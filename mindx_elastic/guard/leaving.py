"""The way out: a process whose state is settled is gone by its deadline, whatever its training thread does."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.guard.log_relay import LogRelay
from mindx_elastic.guard.stop_phase import FINAL, StopPhase

__all__ = ["LAST_MOMENT_S", "WayOut", "end_process"]

LAST_MOMENT_S = 0.3  # before the deadline: leave, or be killed with nothing said
_PATIENCE_S = 3.0  # how long a settled rank waits for its training thread to come out by itself
_RECHECK_S = 1.0
_FLUSH_S = 1.0


class WayOut:
    """One per stopper. The training thread calls `come_out`, sets `dismissed`; watcher and last resort do the rest."""

    def __init__(
        self,
        watcher: Watcher,
        events: EventLog,
        phase: Callable[[], StopPhase],
        relay: LogRelay | None = None,
    ) -> None:
        self._watcher, self._events, self._phase, self._relay = watcher, events, phase, relay
        self.coming_out = False
        """The training thread is leaving by itself, perhaps exporting the network on its way."""
        self.dismissed = False
        """The job has finished; nobody has to leave."""

    def come_out(self, alarm: Alarm) -> None:
        """Training thread: it leaves by itself now. The others wait for its end to start anew, so it ends quickly."""
        self.coming_out = True
        if alarm.kind == "peer":
            atexit.register(_end_quickly)

    def guard_deadline(self, alarm: Alarm) -> None:
        """From now on: gone shortly before the alarm's deadline."""
        self._watcher.call_at(alarm.deadline.at - LAST_MOMENT_S, lambda: self._at_deadline(alarm))

    def leave_soon(self, alarm: Alarm) -> None:
        """The state is settled beside the training thread: give it a moment to come out by itself."""
        latest = alarm.deadline.at - LAST_MOMENT_S
        self._watcher.call_at(min(time.monotonic() + _PATIENCE_S, latest), lambda: self._lose_patience(alarm))

    def _at_deadline(self, alarm: Alarm) -> None:
        if self._phase() in FINAL:
            self._leave(alarm)
        elif self._phase() is StopPhase.SAVING:
            # Whoever set the grace period may wait a little longer; a file that is cut off helps nobody.
            self._watcher.call_at(time.monotonic() + _RECHECK_S, lambda: self._at_deadline(alarm))

    def _lose_patience(self, alarm: Alarm) -> None:
        if not self.coming_out:
            self._leave(alarm)

    def _leave(self, alarm: Alarm) -> None:
        if self.dismissed:
            return
        logger.warning("the training thread does not come back; leaving with exit code %d", alarm.exit_code)
        self._events.emit("exit", reason=alarm.reason, outcome=str(alarm.exit_code))
        end_process(alarm.exit_code, self._relay)

    def leave_now(self, alarm: Alarm) -> None:
        """Last resort: as `guard_deadline` does, should the watcher hang."""
        self._leave(alarm)


def _end_quickly() -> None:
    """Take the interpreter's end from 0.7 s of work to 0.15 s.

    It would look several times for cycles among all that torch has imported. The program's own code runs as ever; what
    only a cycle holds is left to the system, but for files, which are flushed.
    """
    for item in gc.get_objects():
        if type(item) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, or its other end is
                item.flush()
    gc.freeze()


def end_process(exit_code: int, relay: LogRelay | None = None) -> None:
    """Kill the children (loader workers), flush what was printed and logged, and leave. Any thread; never returns.

    Flushing may hang (a full pipe, a lock of a thread that hangs in it): `relay` bounds it.
    """
    for child in multiprocessing.active_children():
        child.kill()
    if relay is not None:
        relay.flush(_FLUSH_S)
    else:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe must not keep a dying process
                stream.flush()
        logging.shutdown()
    os._exit(exit_code)
