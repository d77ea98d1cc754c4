"""The last resort: a thread that ends the process in time when the other threads are stuck.

It sleeps from the guard's entry on; an alarm arms it. From then on it is what ends the process in time, whatever the
training thread and the watcher do. It waits for no store, no log and no lock that a stuck thread may hold. These are
all waits between an alarm and the end of the process, and their bounds:

==============================  ===========================================  =======================================
wait                            for                                          bound
==============================  ===========================================  =======================================
the event log                   all threads                                  0.5 s, once (`EventLog.write_aside`)
log lines, a full stderr        watcher, this thread                         0.25 s, once (`LogRelay`)
the stop request, agreeing      watcher, training thread: the store          1 s; a third of the grace period; a store
                                                                             that did not answer is not asked again
the step gate                   training thread                              the deadline
the update gate                 watcher: an update that does not end         a quarter of what is left
                                training thread: readers                     none: the watcher saves
a periodic save in progress     the saving thread                            a third of what is left
the claim to save               watcher, training thread                     none: this thread ends the process 0.2 s
                                                                             before the deadline
the lock of `StopState`         all threads                                  held over assignments only
reading the state               the saving thread: `state_dict` of the       none: there is no other way to the state
                                program, the accelerator's queue
the disk                        the saving thread                            none: a file that is cut off is useless
copies, moves, hooks after it   the saving thread                            thirds of what is left
the way out of the block        after a salvage; of a step that is played    3 s; 1.5 s: this thread ends the process
                                on and takes too long
closing (loader workers,        training thread                              this thread ends the process 0.2 s before
snapshots in progress), the                                                  the deadline
interpreter's end (log
handlers' locks)
the last flush, the children    watcher, this thread                         1 s, then 0.1 s
==============================  ===========================================  =======================================

Only the disk and the state itself have no bound. A process that is writing its file is not ended.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import suppress

from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.core.events import logger
from mindx_elastic.guard.stopper import Stopper

__all__ = ["LastResort", "is_program_over"]

_AGAIN_S = 0.1
_LEAVE_S = 0.2  # before the deadline


def is_program_over() -> bool:
    """Whether the interpreter is at its own end: it waits for pools and threads, and then runs the ``atexit`` code."""
    # Pools are waited for before the main thread counts as ended. Where a Python does not say so, the process lives as
    # long as such a pool does. Not by the main thread's frames: to go through them while it runs can crash Python 3.11.
    return not threading.main_thread().is_alive() or bool(vars(threading).get("_SHUTTING_DOWN"))


def _say_what_is_left(exit_code: int) -> None:
    """May hang in a full pipe."""
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    what = f"thread {names[0]!r}, no daemon, still runs" if names else "atexit code, or the interpreter's end, hangs"
    logger.warning("the stop is complete, and %s; leaving with exit code %d", what, exit_code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


class LastResort:
    """One per guard. `arm` and `leave_by` from any thread; all else runs in its own thread."""

    def __init__(self) -> None:
        self._stopper: Stopper | None = None
        self._is_main = True
        self._alarm: Alarm | None = None
        self._leave_at = math.inf
        self._why_leave = "the training thread does not come back"
        self._closed = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindx-last-resort", daemon=True)

    @property
    def ident(self) -> int | None:
        """Thread identifier, None before `start`."""
        return self._thread.ident

    def start(self, stopper: Stopper) -> None:
        """Training thread, at entry. Raises RuntimeError when the process can have no more threads."""
        self._stopper = stopper
        self._is_main = threading.current_thread() is threading.main_thread()
        self._thread.start()

    def arm(self, alarm: Alarm) -> None:
        """Any thread: end the process shortly before the deadline of `alarm`."""
        self._alarm = alarm
        self._woken.set()

    def leave_by(self, when: float, why: str) -> None:
        """Any thread: end the process at `when` (`time.monotonic` seconds), once the stop is settled, unless the
        training thread is on its way out by then. `why`: for the log."""
        self._leave_at, self._why_leave = when, why
        self._woken.set()

    def stop(self) -> None:
        """Main thread: end the thread.

        After a graceful stop it lingers until the deadline, as the signal handlers do. If the program is over then and
        the process is still there (a thread that is not a daemon, a busy pool, ``atexit`` code, the locks of log
        handlers), it ends the process.
        """
        self._closed = True
        self._woken.set()
        if self._lingers:
            self._thread.name = "lingering-last-resort"
            return
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def _lingers(self) -> bool:
        if self._alarm is None or self._stopper is None or not self._is_main:  # the process lives on
            return False
        return self._stopper.is_coming_out

    def _linger(self) -> None:
        assert self._alarm is not None
        time.sleep(max(0.0, self._alarm.deadline.at - _LEAVE_S - time.monotonic()))
        if not is_program_over():
            return  # it goes on after the stop
        with suppress(RuntimeError):  # no thread can be started any more
            last_words = threading.Thread(target=_say_what_is_left, args=(self._alarm.exit_code,), daemon=True)
            last_words.start()
            last_words.join(_LEAVE_S / 2)
        os._exit(self._alarm.exit_code)

    def _run(self) -> None:
        pause: float | None = None
        while not self._closed:
            self._woken.wait(pause)
            self._woken.clear()
            try:
                pause = None if self._closed else self._look()
            except Exception:
                logger.exception("unexpected error in the last resort; it goes on")
                pause = _AGAIN_S
        if self._lingers:
            self._linger()

    def _look(self) -> float | None:
        """End the process if it is time. Returns for how many seconds to sleep at most; None: until it is woken."""
        stopper, alarm = self._stopper, self._alarm
        if stopper is None or alarm is None or stopper.finished:
            return None
        is_settled = stopper.is_settled
        has_deadline = not (is_settled and alarm.kind in ("exception", "peer") and stopper.is_leaving)  # from outside
        latest = alarm.deadline.at - _LEAVE_S if has_deadline else math.inf
        if is_settled and not stopper.is_coming_out:
            latest = min(latest, self._leave_at)
        if (left := latest - time.monotonic()) > 0:
            return None if latest == math.inf else left
        if stopper.is_writing:
            return _AGAIN_S
        stopper.leave_behind(alarm, self._why_leave if is_settled else "the save is held up")
        return None
