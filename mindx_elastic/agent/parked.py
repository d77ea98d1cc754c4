"""Processes that outlive their attempt: survivors that go on as ranks of the next one, which has fewer.

A process that waits (`rejoin.parking`) has ended as far as its attempt is concerned. It stays until the next attempt
starts, where it is taken in the place of a fork. What is not taken ends. Main thread only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mindx_elastic.agent.workers import Process
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import read_json_object
from mindx_elastic.rejoin.parking import Keeps, note_path, order_path, write_file

__all__ = ["ParkedProcesses"]

_END_S = 5.0


class ParkedProcesses:
    """One per agent of a job that may go on with fewer ranks in place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.keeps: Keeps | None = None
        """What the survivors of the present attempt were told; None: nothing."""
        self._waiting: dict[int, Process] = {}
        self._next: dict[int, Process] = {}
        """By local rank of the next attempt."""

    @property
    def is_ready(self) -> bool:
        """The next attempt goes on with living processes."""
        return bool(self._next)

    def code_of(self, rank: int, process: Process) -> int | None:
        """The exit code of a worker that waits; None: it does not."""
        if self.keeps is None or not (path := note_path(self._folder, process.pid)).exists():
            return None
        try:
            code = int(read_json_object(path)["code"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self._waiting[rank] = process
        return code

    @property
    def pids(self) -> set[int]:
        """Of those that wait."""
        return {process.pid for process in self._waiting.values()}

    def settle(self, size: int) -> bool:
        """All workers have ended or wait. `size`: of the next attempt. Whether all that it needs wait; else they end,
        and it is started anew."""
        keeps, waiting = self.keeps, self._waiting
        self.keeps, self._waiting = None, {}
        if keeps is None:
            return False
        alive = {rank: process for rank, process in waiting.items() if process.poll() is None}
        if keeps.size == size and alive.keys() == keeps.ranks.keys():
            self._next = {keeps.ranks[rank]: process for rank, process in alive.items()}
            return True
        logger.warning(
            "ranks %s wait to go on with fewer, and %s would have to: the job is restarted",
            *(sorted(alive) or "none", sorted(keeps.ranks)),
        )
        self._end(alive)
        return False

    def take(self, local_rank: int, env: Mapping[str, str], stdout: str, stderr: str) -> Process | None:
        """The living process that becomes this worker; None: there is none. `stdout`, `stderr`: files that it goes on
        writing to. Raises OSError."""
        process = self._next.get(local_rank)
        if process is None:
            return None
        note_path(self._folder, process.pid).unlink(missing_ok=True)
        write_file(order_path(self._folder, process.pid), {"env": dict(env), "stdout": stdout, "stderr": stderr})
        del self._next[local_rank]
        return process

    def close(self) -> None:
        """End what has not been taken."""
        self._end({**self._waiting, **self._next})
        self.keeps, self._waiting, self._next = None, {}, {}

    def _end(self, processes: Mapping[int, Process]) -> None:
        for process in processes.values():
            with suppress(OSError):
                write_file(order_path(self._folder, process.pid), {})
        until = time.monotonic() + _END_S
        for process in processes.values():
            while process.poll() is None:
                if time.monotonic() > until:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.002)
            for path in (note_path(self._folder, process.pid), order_path(self._folder, process.pid)):
                path.unlink(missing_ok=True)
