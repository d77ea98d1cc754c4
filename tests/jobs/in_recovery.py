"""Faults at the stages of a recovery in place, inside of the process that takes part in it.

``WHO:STAGE:WHAT``. WHO is ``new`` (a process that takes a dead rank's place) or the number of a survivor. STAGE is one
of `STAGES`. WHAT is a signal to the process itself (``kill``, ``stop``, ``usr1``: a SIGUSR1, and wait until it was
heard; ``usr1-now``: without waiting), ``term`` or ``terms`` (one or two SIGTERMs to the agent), ``agent`` (SIGKILL to
the agent), or ``flag`` (the job's flag file). Each happens once in a job and prints ``MEANWHILE who stage``.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.config import RejoinSettings
from mindx_elastic.rejoin import groups
from mindx_elastic.rejoin.member import Member
from mindx_elastic.start.in_place import InPlacePart

__all__ = ["STAGES", "InRecovery"]

STAGES = ("start", "guard", "leave", "out", "donate", "connect", "closed", "restore", "ready")
"""The program's first line behind its rank and its last one before the guard (of a new process); before a survivor
agrees, before the reports are read, before the state is given away, before the new connections, when a survivor has all
and closes its guard, before the state is taken, and before the training goes on."""
_PLACES = (
    (Member, "leave", "leave"),
    (Member, "_verdict", "out"),
    (Member, "_donate", "donate"),
    (groups, "connect", "connect"),
    (Member, "closed", "closed"),
    (InPlacePart, "follow", "restore"),
    (Member, "entered", "ready"),
)


class InRecovery:
    """One per process. `at` is called by the job for the first two stages."""

    def __init__(self, orders: Sequence[str], rank: int, directory: Path) -> None:
        self._folder, self._rank = directory / "faults", rank
        self._orders = [tuple(order.split(":")) for order in orders]
        if self._orders:
            self._folder.mkdir(parents=True, exist_ok=True)
            for owner, name, stage in _PLACES:
                self._watch(owner, name, stage)

    def _watch(self, owner: Any, name: str, stage: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*arguments: Any, **named: Any) -> Any:
            self.at(stage)
            return original(*arguments, **named)

        setattr(owner, name, watched)

    def at(self, stage: str) -> None:
        for who, where, what in self._orders:
            if where == stage and who == self._name():
                try:
                    (self._folder / f"in-{who}-{stage}-{what}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.write(1, f"MEANWHILE {who} {stage} {what}\n".encode())
                self._do(what)

    def _name(self) -> str:
        return "new" if RejoinSettings.from_env().generation else str(self._rank)

    def _do(self, what: str) -> None:
        agent = int(os.environ["MINDX_AGENT_PID"])
        if what in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
        elif what == "usr1-now":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif what == "usr1":
            self._send_and_wait(signal.SIGUSR1)
        elif what in ("term", "terms"):
            for _ in range(2 if what == "terms" else 1):
                os.kill(agent, signal.SIGTERM)
        elif what == "agent":
            os.kill(agent, signal.SIGKILL)
        else:
            (self._folder.parent / "graceful_exit.json").write_text('{"GracefulExit": 1}')

    @staticmethod
    def _send_and_wait(signum: signal.Signals) -> None:
        heard = threading.Event()

        class Look(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if f"{signum.name} heard" in record.getMessage():
                    heard.set()

        look = Look()
        logger = logging.getLogger("mindx_elastic")
        logger.addHandler(look)
        os.kill(os.getpid(), signum)
        assert heard.wait(100.0), f"{signum.name} was not heard"
        logger.removeHandler(look)
