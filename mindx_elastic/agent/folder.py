"""The agent's private folder: where its workers' pages and its orders to them lie.

::

    {base}/mindx-elastic-{uid}/agent-{pid}-{random}/     mode 700
        agent.json                                       who: pid, start time, process-id namespace
        control.json                                     the newest order, see `agent_link`
        rank_{r}.page                                    see `status_page`
        job.key                                          of a job of one node, see `agreement.job_key`

Removed at the agent's end. What a killed agent left is removed by the next one of the same user: its process is gone,
or its process id belongs to a process that started at another time. Folders of agents in other process-id namespaces
(containers that share /dev/shm) are left alone; nothing here can say whether they live.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.job_key import write_key_file
from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import has_ended, is_alive, is_own_folder, read_json_object
from mindx_elastic.core.status_page import read_page
from mindx_elastic.memory.arena import make_user_folder, user_folders

__all__ = ["AgentFolder", "remove_dead_folders"]

_IDENTITY, _KEY = "agent.json", "job.key"
_PREFIX = "agent-"


class AgentFolder:
    """Create it in the main thread; `remove` it at the end."""

    def __init__(self, base: Path) -> None:
        """base: a memory file system, as a rule /dev/shm. Raises OSError when there is no place for it, nor in the
        temporary folder.
        """
        identity = own_identity()
        try:
            self.path = _create(base)
        except OSError as error:
            fallback = Path(tempfile.gettempdir())
            logger.warning("%s cannot be used (%s); the workers' pages go to %s", base, error.strerror, fallback)
            self.path = _create(fallback)
        (self.path / _IDENTITY).write_text(identity)
        for parent in user_folders(self.path.parent.parent):
            remove_dead_folders(parent)
        self._sequence = 0

    def order(self, kind: str, reason: str, *, grace_s: float, exit_code: int) -> None:
        """Write an order to the workers; they look at it when they get `agent_link.CONTROL_SIGNAL`. Raises OSError."""
        self._sequence += 1
        content = {"kind": kind, "reason": reason, "grace_s": grace_s, "exit_code": exit_code, "seq": self._sequence}
        temp = self.path / f".control.{self._sequence}"
        temp.write_text(json.dumps(content))
        os.replace(temp, self.path / "control.json")

    def make_key(self) -> Path:
        """A new secret for the workers to seal their messages with. Once. Raises OSError."""
        path = self.path / _KEY
        write_key_file(path)
        return path

    def forget_workers(self) -> None:
        """Before new workers start: the pages and orders of the old ones."""
        for path in [*self.path.glob("rank_*.page"), self.path / "control.json"]:
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Never raises: what is left is the next agent's to clean."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other agents, or arenas, are still there
            self.path.parent.rmdir()


def remove_dead_folders(parent: Path) -> list[Path]:
    """Remove the folders of this user's dead agents below `parent` and return them. Never raises."""
    own = json.loads(own_identity())
    removed = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            if not is_own_folder(folder) or not _is_dead(read_json_object(folder / _IDENTITY), own):
                continue
            pages = [read_page(page) for page in folder.glob("rank_*.page")]
            if not any(page and is_alive(page.pid, time.time()) for page in pages):  # workers may still be saving
                shutil.rmtree(folder)
                removed.append(folder)
                logger.debug("removed %s, left by an agent that was killed", folder)
    return removed


def _create(base: Path) -> Path:
    for _ in range(5):  # the last rank of another job may take the empty parent away in between
        with suppress(FileNotFoundError):
            folder = make_user_folder(base) / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            return folder
        if not base.is_dir():
            break
    raise FileNotFoundError(2, "No such file or directory", str(base))


def _is_dead(agent: dict[str, Any], own: dict[str, Any]) -> bool:
    pid, started, space = agent.get("pid"), agent.get("started"), agent.get("space")
    if not isinstance(pid, int) or not space or space != own["space"]:
        return False
    return has_ended(pid, str(started))
