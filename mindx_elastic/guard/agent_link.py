"""A worker's connection to its agent: whether it lives, its orders, the status page that it reads, stacks on demand.

`mindx-elastic run` sets the environment for it. Without an agent there is no `AgentLink`, and nothing else in a worker
depends on one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.config import AgentInfo, RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import ProcessStat, open_pidfd, read_json_object, read_stat
from mindx_elastic.core.status_page import StatusPage, WorkerPhase, page_path
from mindx_elastic.errors import ArenaError
from mindx_elastic.memory.agent_folder import CONTROL_FILE, PAUSE_FILE, STACK_SIGNAL
from mindx_elastic.memory.folders import MAKER_FILE

__all__ = ["AgentLink", "between_steps"]

_stacks_fd = -1  # where this process writes its stacks, until it ends


@contextmanager
def between_steps(page: StatusPage) -> Iterator[None]:
    """Training thread: code between two steps runs inside; the agent that reads `page` must not take it for a hang."""
    before, guarded = page.phase, (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)
    for_agent = before in guarded  # else a stop has begun

    def change(phase: int) -> None:
        if for_agent and page.phase in guarded:
            page.set(boundary_ns=time.monotonic_ns() if page.started else 0)
            page.set(phase=phase)

    change(WorkerPhase.BETWEEN)
    try:
        yield
    finally:
        change(before)


class AgentLink:
    """One per guard. Open it in the main thread; close it when the guard is left."""

    def __init__(self, info: AgentInfo, ranks: RankInfo, *, page: StatusPage | None = None) -> None:
        """`page`: of this process's guard before, which it goes on with. Raises ArenaError when the agent's folder
        cannot be used."""
        self.stays = False
        """The guard is left to be entered again in a moment."""
        self._folder, self._rank = info.folder, ranks.rank
        self._parent = os.getppid()
        self._known: dict[int, str] = {}
        """Start times of the parent and the agent, by process id; the same one where no script stands between."""
        self._was_gone = False
        self._remember(self._parent, read_stat(self._parent))
        self._find_agent(info)
        self.agent_fd = -1
        """Readable once the agent is gone; -1 where that cannot be watched."""
        if info.pid in self._known:
            with suppress(OSError):
                self.agent_fd = open_pidfd(info.pid, self._known[info.pid])
        self._seen: dict[str, int] = {}
        """Numbers of the newest orders, by their files."""
        try:
            self.page = page or StatusPage(page_path(info.folder, ranks.rank))
        except OSError as error:
            raise ArenaError(f"{info.folder}: the agent's folder cannot be used: {error}", path=info.folder) from error
        if info.run_dir is not None:
            self._register_stacks(info.run_dir / "stacks", f"attempt_{info.attempt}_rank_{ranks.rank}.txt")

    def _find_agent(self, info: AgentInfo) -> None:
        """Learn which process the agent is. Its number may mean nothing here (another process-id namespace), or belong
        to somebody else by now (it was killed before this)."""
        found = read_stat(info.pid) if info.pid > 0 else None
        identity: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            content = read_json_object(self._folder / MAKER_FILE)
            identity = content if content.get("pid") == info.pid else {}
        if identity and identity.get("space") != json.loads(own_identity())["space"]:
            return
        if identity and (found is None or found.is_ending or found.started != identity.get("started")):
            self._was_gone = read_stat(os.getpid()) is not None  # else /proc does not tell
            return
        self._remember(info.pid, found)

    def _remember(self, pid: int, found: ProcessStat | None) -> None:
        if found is not None:
            self._known[pid] = found.started

    def _register_stacks(self, folder: Path, name: str) -> None:
        global _stacks_fd
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            logger.warning("stacks of a hang cannot be written to %s (%s)", folder, error)
            return
        if _stacks_fd < 0:
            # What the interpreter puts back when it ends: a late request for a stack must not kill the process.
            with suppress(OSError, ValueError):
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        # In C, without the interpreter: a rank that is stuck shows where.
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
        if _stacks_fd >= 0:
            os.close(_stacks_fd)  # of an earlier guard of this process
        _stacks_fd = fd

    def enter(self, step: int | None, run_id: str, arena: Path | None, directory: Path) -> None:
        """The state is back and training begins. `directory`: where it saves."""
        self.page.set_text("run_id", run_id)
        self.page.set_text("arena", "" if arena is None else str(arena))
        self.page.set_text("directory", str(directory))
        self.page.set(step=step or 0, entered_ns=time.monotonic_ns(), asked_code=-1, phase=WorkerPhase.TRAINING)

    def orders(self) -> list[dict[str, Any]]:
        """Watcher thread, after `CONTROL_SIGNAL`: the agent's order and that of a command, as far as they are new."""
        found = []
        for name in (CONTROL_FILE, PAUSE_FILE):
            with suppress(OSError, ValueError):
                content = read_json_object(self._folder / name)
                sequence = content.get("seq")
                is_order = isinstance(content.get("kind"), str) and "reason" in content
                if is_order and isinstance(sequence, int) and sequence != self._seen.get(name):
                    self._seen[name] = sequence
                    found.append(content)
        return found

    def is_orphan(self) -> bool:
        """Whether the agent is gone, or the process that started this one. Any thread.

        The kernel sends the SIGTERM of `agent.child` when the *thread* dies that started this process. While other
        threads of the dying agent still exist, one of them adopts this process, so the parent's number stays the same
        for some milliseconds: look at the parent's own state.
        """
        if self._was_gone or os.getppid() != self._parent:
            return True
        for pid, started in self._known.items():
            found = read_stat(pid)
            if found is None or found.is_ending or found.started != started:
                return True
        return False

    def close(self) -> None:
        """After the watcher has stopped.

        The process can still be asked for its stacks, because code after the training may hang, too.
        """
        if self.agent_fd >= 0:
            os.close(self.agent_fd)
        if self.stays:
            self.page.set(phase=WorkerPhase.STARTING)
            return
        self.page.set(phase=WorkerPhase.LEFT)
