"""How a worker of a dynamic cluster ends: it tells the scheduler, or starts over in place.

When another rank has died and MS_ENABLE_RECOVERY is 1, this process has saved its last boundary (its guard does that)
and its training cannot go on. It does not end: it starts its program again with ``exec``, as the same process with the
same pid, stdout and variables, and waits in `cluster.init` until the dead rank was started again. So only the dead
process has to be started by hand.

What cannot be carried over ``exec`` is closed first: descriptors that C code has opened, loader workers, signal
handlers. Code that was registered with ``atexit`` before `cluster.init` was called does not run.

An exit code cannot be read at the interpreter's end. What a guard's stop has noted counts (`core.stop_cause`), then the
exception that has ended the program, then the code given to `sys.exit`, which is noted for that.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from mindx_elastic.alarm.exit_codes import EXIT_ERROR, EXIT_TEMPORARY
from mindx_elastic.alarm.peers import report_death
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.connection import SchedulerConnection
from mindx_elastic.core.events import logger
from mindx_elastic.core.same_program import SameProgram
from mindx_elastic.core.stop_cause import StopCause, add_last_act, flush_output, noted_stop_cause

__all__ = ["WorkerEnd"]

_STOPS = ("signal", "flag", "request", "fault")
_PATIENCE_S = 2.5  # until the scheduler tells of a death on another machine: see `Limits.reconnect_s`
_DONE_S = 30.0  # for a scheduler that is being started again: to a later one this process would have died
_UNGUARDED_S = 10.0  # for a program without a guard to end by itself, when the job is over
_ANEW = "MINDX_CLUSTER_ANEW"
"""How often in a row this process has started over because of a broken connection, of which no death was the cause."""
_MOST_ANEW = 5
_OF_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


class WorkerEnd:
    """One per worker process."""

    def __init__(self, connection: SchedulerConnection, env: Mapping[str, str]) -> None:
        """`env`: the environment with which the program was started. Main thread, before the program has changed
        anything that ``exec`` should not carry over, and before the connection is begun."""
        self._connection, self._env = connection, dict(env)
        number = env.get(_ANEW, "")
        self._num_anew = int(number) if number.isdecimal() else 0
        self._recovery = connection.settings.recovery
        self._program = SameProgram()
        self._code: object = None
        self._once = threading.Lock()
        self._is_joining = True
        self._pid = os.getpid()
        connection.on_break = self.hear

    def watch(self) -> None:
        """From now on the scheduler is told how this process ends. Main thread."""
        self._before = getattr(sys, "last_value", None)
        self._exit, sys.exit = sys.exit, self._note_exit
        atexit.register(self._at_exit)
        add_last_act(self._last_act)

    def has_joined(self) -> None:
        """torch's process group is there. Main thread."""
        self._is_joining = False

    def hear(self, message: messages.News | messages.Over | messages.Dead) -> None:
        """The group cannot go on. In the connection's thread; does not block."""
        match message:
            case messages.News(missing=(rank, *_)):
                # Without a guard the program's own collectives fail. torch's start of a process group does not: it
                # waits half an hour for a rank that has died before it was there.
                if not report_death(rank) and self._is_joining:
                    threading.Thread(target=self._join_again, name="mindx-cluster-join", daemon=True).start()
            case messages.Over(why=why, rank=rank):
                from mindx_elastic.guard.active import request_stop

                # The guard saves and leaves; a program without one is ended after a while.
                if not (report_death(rank) if rank is not None else request_stop(why, EXIT_TEMPORARY)):
                    threading.Thread(target=self._end_soon, name="mindx-cluster-end", daemon=True).start()
            case messages.Dead(why):
                # Nothing is saved: the others have gone on from what this process has given them, or from files.
                logger.warning("%s; this process starts over in place (pid %d)", why, self._pid)
                self._begin_anew()

    def _join_again(self) -> None:
        with self._once:
            self._follow("", EXIT_TEMPORARY)

    def _end_soon(self) -> None:
        time.sleep(_UNGUARDED_S)
        logger.error("leaving with exit code %d: %s", EXIT_TEMPORARY, self._connection.broken)
        flush_output()
        os._exit(EXIT_TEMPORARY)

    # --- the end ---

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._code = status
        raise SystemExit(status)

    def _at_exit(self) -> None:
        """Main thread, at the interpreter's end."""
        if os.getpid() != self._pid:
            return  # a forked child
        with self._once:
            self._conclude(noted_stop_cause())

    def _last_act(self) -> None:
        """Any thread: the process ends with a stuck training thread."""
        if os.getpid() == self._pid and self._once.acquire(blocking=False):
            self._conclude(noted_stop_cause())

    def _conclude(self, leaving: StopCause | None) -> None:
        connection = self._connection
        error = getattr(sys, "last_value", None)
        error = None if error is self._before else error
        if leaving is not None and leaving.kind in _STOPS:
            connection.leave("left", leaving.code, leaving.reason)
        elif leaving is not None and not (leaving.kind == "exception" and leaving.is_own):
            self._follow(leaving.reason, leaving.code)  # another rank was killed or has failed
        elif error is not None:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, RuntimeError) and connection.wait_until_broken(_PATIENCE_S):
                self._follow(text, EXIT_TEMPORARY)
            elif self._recovery and connection.over is None and _is_of_others(error) and self._num_anew < _MOST_ANEW:
                # The scheduler may be gone as well, or has not seen it yet.
                self._env[_ANEW] = str(self._num_anew + 1)
                self._follow(text, EXIT_TEMPORARY)
            else:
                connection.leave("failed", EXIT_ERROR, text)
        elif code := _code_of(self._code):
            connection.leave("failed", code, f"exit code {code}")
        else:
            connection.leave("done", 0, "", timeout_s=_DONE_S)

    def _follow(self, why: str, code: int) -> None:
        """The training of this process could not go on because of another one."""
        connection = self._connection
        told = connection.wait_until_broken(_PATIENCE_S)  # which rank it was, and why
        if not self._recovery or connection.over is not None:
            connection.leave("failed", code, told or why)
            return
        if told:
            self._env.pop(_ANEW, None)
        logger.warning("%s; this process starts over in place (pid %d) and waits", told or why, self._pid)
        connection.leave("away", code, told or why)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Replace this process's program by itself. Does not return, unless the system refuses it."""
        logging.shutdown()
        env = self._env
        if self._connection.node_id:
            env = {**env, "MS_NODE_ID": self._connection.node_id}
        try:
            self._program.begin_again(env)
        except OSError as error:
            logger.error("this process cannot start over in place (%s); start it again with the same variables", error)
            flush_output()
            os._exit(EXIT_TEMPORARY)


def _is_of_others(error: BaseException) -> bool:
    """Whether a collective or the store has failed because the other end is gone."""
    return type(error).__name__ == "DistNetworkError" or any(text in str(error) for text in _OF_A_PEER)


def _code_of(status: object) -> int:
    """What `sys.exit` makes of its argument."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else EXIT_ERROR
