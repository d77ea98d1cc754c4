"""The last resort: a thread that saves and leaves in time when everything else that should do so is stuck.

It sleeps from the guard's entry on, and an alarm arms it. It waits for no store, no log, no lock that a stuck thread
may hold. What lies between an alarm and the end of the process, and what bounds it:

==============================  ===========================================  =======================================
wait                            of                                           bound
==============================  ===========================================  =======================================
the signal is read              watcher: a callback that hangs (a flag or    this thread sees that it lies unread,
                                fault file on a hanging file system)         and takes the alarm over
the event log                   all                                          0.5 s, once (`EventLog.write_aside`)
log lines, a full stderr        watcher, this thread                         0.25 s, once (`LogRelay`)
telling the others, agreeing    watcher, training thread: the store          1 s; a third of the grace period; a store
                                                                             that did not answer is not asked again
the step gate                   training thread                              the deadline
the update gate                 watcher: an update that does not end         a quarter of what is left
                                training thread: readers                     none: the watcher or this thread saves
a periodic save in progress     who saves                                    a third of what is left; this thread: 0
**the claim to save**           watcher, training thread                     none, so it is taken away from a thread
                                                                             that has not begun to write in time
lock of the stop's phases       all                                          held over assignments only
reading the state               who saves: `state_dict` of the program,      none: the state cannot be had otherwise
                                the accelerator's queue
the disk                        who saves                                    none: a file that is cut off helps nobody
copies, moves, hooks after it   who saves                                    thirds of what is left
closing (loader workers,        training thread                              this thread ends the process 0.2 s before
snapshots in progress), the                                                  the deadline
interpreter's end (log
handlers' locks)
last words (flush, children)    watcher, this thread                         1 s, then 0.1 s
==============================  ===========================================  =======================================

So what remains are the disk and the state itself. While a file is being written nobody is ended, as before.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.deadline import Deadline
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import logger

if TYPE_CHECKING:
    from mindx_elastic.guard.stopper import Stopper

__all__ = ["LastResort"]

_UNHEARD_S = 5.0  # a watcher on a busy machine is late; one that hangs is later
_AGAIN_S = 0.1
_LEAVE_S = 0.2  # before the deadline; the watcher does it a moment earlier
_BEGIN_S = 0.45  # before the deadline: nobody has begun, whoever it was meant to be


class LastResort:
    """One per guard. `arm` and `watch_signals` from any thread; all else runs in its own thread."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._stopper: Stopper | None = None
        self._alarm_of: Callable[[int], Alarm | None] = lambda signum: None
        self._alarm: Alarm | None = None
        self._save_at = math.inf
        self._unread_since: float | None = None
        self._closed = False
        self._exiting = threading.Event()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._receiver, select.EPOLLIN)
        # Edge-triggered: one wake-up for each arrival, whether the watcher has read it or not.
        self._poll.register(watcher.receiver_fd, select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._run, name="mindx-last-resort", daemon=True)

    @property
    def ident(self) -> int | None:
        """Thread identifier, None before `start`."""
        return self._thread.ident

    def start(self, stopper: Stopper) -> None:
        """Main thread, at entry. Raises RuntimeError when the process can have no more threads."""
        self._stopper = stopper
        self._thread.start()

    def watch_signals(self, alarm_of: Callable[[int], Alarm | None]) -> None:
        """`alarm_of`: which alarm a signal is if nobody else hears it; None: none. Must not block."""
        self._alarm_of = alarm_of

    def arm(self, alarm: Alarm, save_at: float) -> None:
        """Any thread: from `save_at` (`time.monotonic` seconds) on it saves if nobody has begun to."""
        self._save_at, self._alarm = save_at, alarm
        self._wake()

    def stop(self) -> None:
        """Main thread: end the thread, after a save of its own.

        After a graceful stop it lingers until the deadline, as the signal handlers do: should the interpreter's end
        hang (it takes the locks of log handlers), it ends the process.
        """
        self._closed = True
        self._wake()
        alarm = self._alarm
        if alarm is not None and self._stopper is not None and self._stopper.coming_out:
            self._thread.name = "lingering-last-resort"
            atexit.register(self._exiting.set)
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _linger(self, alarm: Alarm) -> None:
        time.sleep(max(0.0, alarm.deadline.at - _LEAVE_S - time.monotonic()))
        if self._exiting.is_set():
            os._exit(alarm.exit_code)
        atexit.unregister(self._exiting.set)

    def _close(self) -> None:
        self._poll.close()
        self._receiver.close()
        self._sender.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._sender.send(b"\0")

    def _run(self) -> None:
        pause: float | None = None
        while not self._closed:
            self._poll.poll(pause)
            with suppress(OSError):
                self._receiver.recv(4096)
            try:
                pause = None if self._closed else self._look()
            except Exception:
                logger.exception("the last resort met an unexpected error; it goes on watching")
                pause = _AGAIN_S
        alarm = self._alarm
        if alarm is not None and self._stopper is not None and self._stopper.coming_out:
            self._close()
            self._linger(alarm)

    def _look(self) -> float | None:
        """Do what it is time for; returns for how many seconds to sleep at most."""
        stopper = self._stopper
        assert stopper is not None
        if stopper.finished:
            return None
        if self._alarm is None:
            return self._look_for_signals(stopper)
        alarm, now = self._alarm, time.monotonic()
        if stopper.state.is_settled:
            if alarm.kind in ("exception", "peer") and stopper.is_leaving:
                return None  # nobody has set a time by which it must be gone
            left = alarm.deadline.at - _LEAVE_S - now
            if left <= 0:
                stopper.leave_behind(alarm)
            return max(0.0, left)
        if now < self._save_at:
            return self._save_at - now
        if stopper.is_stuck(_AGAIN_S) or now >= alarm.deadline.at - _BEGIN_S:
            stopper.save_as_last_resort(alarm)
            return 0.0 if stopper.state.is_settled else _AGAIN_S
        return _AGAIN_S

    def _look_for_signals(self, stopper: Stopper) -> float | None:
        unheard = self._watcher.unheard()
        if not unheard:
            self._unread_since = None
            return None
        now = time.monotonic()
        if self._unread_since is None:
            self._unread_since = now
        waited_s = now - self._unread_since
        alarm = next(filter(None, map(self._alarm_of, unheard)), None)
        if alarm is None:
            return _AGAIN_S
        patience_s = min(_UNHEARD_S, alarm.deadline.grace_s / 4)
        if waited_s < patience_s:
            return min(_AGAIN_S, patience_s - waited_s)
        grace_s = alarm.deadline.grace_s
        heard = Alarm(
            alarm.kind,
            alarm.reason,
            Deadline(self._unread_since + grace_s, grace_s),
            alarm.exit_code,
            origin=alarm.origin,
            signum=alarm.signum,
        )
        stopper.take_over_alarm(heard)
        return 0.0
