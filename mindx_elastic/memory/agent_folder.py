"""The agent's private folder in shared memory: its workers' pages, and its orders to them.

::

    {base}/mindx-elastic-{uid}/agent-{pid}-{random}/     mode 700
        agent.json                                       who: pid, start time, process-id namespace
        control.json                                     the newest order, see `agent_link`
        pause.json                                       the order of a command, see `cli.pause`
        rank_{r}.page                                    see `status_page`
        job.key                                          of a job of one node, see `agreement.job_key`

Removed at the agent's end. The next agent of the same user removes what a killed one has left, at its start, and again
at its end: the workers may have been saving until then (`folders.remove_dead`).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

from mindx_elastic.agreement.job_key import write_key_file
from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.events import logger
from mindx_elastic.memory.folders import (
    MAKER_FILE,
    make_own_folder,
    make_private,
    remove_dead,
    remove_own,
)

__all__ = [
    "CONTROL_FILE",
    "CONTROL_SIGNAL",
    "PAUSE",
    "PAUSE_FILE",
    "RESUME",
    "STACK_SIGNAL",
    "AgentFolder",
    "LostFolderError",
]

CONTROL_FILE, PAUSE_FILE = "control.json", "pause.json"
CONTROL_SIGNAL = signal.SIGURG  # ignored by default: harmless to a worker that is about to leave its guard
STACK_SIGNAL = signal.SIGRTMAX - 2  # a worker writes the stacks of its threads
PAUSE, RESUME = "pause", "resume"
"""Kinds of orders; all others are kinds of alarms."""
_KEY = "job.key"


class LostFolderError(OSError):
    """The agent's folder is gone, and cannot be made again. Another agent uses another one."""


class AgentFolder:
    """Create it in the main thread; `remove` it at the end."""

    def __init__(self, base: Path) -> None:
        """base: a memory file system, as a rule /dev/shm; if it cannot be used, the temporary folder is. Raises OSError
        when neither can.
        """
        try:
            self.path = make_own_folder(base, "agent")
        except OSError as error:
            fallback = Path(tempfile.gettempdir())
            logger.warning(
                "%s cannot be used (%s); the workers' pages go to %s", base, error.strerror or error, fallback
            )
            self.path = make_own_folder(fallback, "agent")
        self._has_key = False
        remove_dead(self.path.parent)
        self._sequence = 0

    def order(self, kind: str, reason: str, *, grace_s: float, exit_code: int, extends: bool = False) -> None:
        """Write an order to the workers; they look at it when they get `CONTROL_SIGNAL`. `extends`: the workers may
        take `grace_s` also where that is longer than their own grace period. Raises OSError."""
        self._sequence += 1
        content = {"kind": kind, "reason": reason, "grace_s": grace_s, "exit_code": exit_code, "seq": self._sequence}
        if extends:
            content["extends"] = True
        temp = self.path / f".control.{self._sequence}"
        temp.write_text(json.dumps(content))
        os.replace(temp, self.path / CONTROL_FILE)

    def make_key(self) -> Path:
        """A new secret for the workers to seal their messages with. Once. Raises OSError."""
        path, self._has_key = self.path / _KEY, True
        write_key_file(path)
        return path

    def forget_workers(self) -> None:
        """Remove the pages and orders of the old workers, before new ones start. Make the folder once more where
        somebody has emptied the shared memory (systemd's RemoveIPC at a log-out). Raises LostFolderError, which names
        what is in the way."""
        self._make_again()
        for path in [*self.path.glob("rank_*.page"), self.path / CONTROL_FILE, self.path / PAUSE_FILE]:
            path.unlink(missing_ok=True)

    def _make_again(self) -> None:
        try:
            for folder in (self.path.parent, self.path):
                make_private(folder)
            has_key = not self._has_key or (self.path / _KEY).exists()
            if has_key and (self.path / MAKER_FILE).exists():
                return
            (self.path / MAKER_FILE).write_text(own_identity())
            if not has_key:
                self.make_key()
        except OSError as error:
            raise LostFolderError(f"the agent's folder was removed, and cannot be made again ({error})") from error
        told = "%s was emptied while the job ran: what only memory held is lost, and how far the ranks had come"
        logger.warning(f"{told}; the restart makes what it needs there again", self.path)

    def remove(self) -> None:
        """Never raises: the next agent removes what is left."""
        remove_dead(self.path.parent)
        remove_own(self.path)
