"""Starts one run: forked from a process that has imported torch, or in a fresh interpreter; and ends it.

Each run leads its own session, so that what it leaves behind can be ended with it, and ends when this process
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mindx_elastic.agent import child
from mindx_elastic.agent.zygote import ForkedWorker, Zygote
from mindx_elastic.core.posix import members_of

__all__ = ["ProvedProcess", "start_forked", "start_fresh"]

_END_S = 10.0


class ProvedProcess:
    """A started run. Main thread."""

    def __init__(self, worker: ForkedWorker | subprocess.Popen[bytes]) -> None:
        self._worker = worker
        self.pid = worker.pid

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal that ended it; None: it runs."""
        return self._worker.poll()

    def end(self, *, gently: bool) -> None:
        """End it and what it has left behind, if need be. `gently`: it is the agent, which must get the time to end its
        workers."""
        if gently and self.poll() is None:
            self._worker.terminate()
            self._wait()
        left = [self.pid, *members_of({self.pid})] if self.poll() is None else list(members_of({self.pid}))
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + _END_S
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)


def start_forked(zygote: Zygote, command: Sequence[str], env: Mapping[str, str], log: Path) -> ProvedProcess:
    """`command`: the script, or ``-m`` and a module, and the arguments. `log`: for what it prints. Raises ZygoteError:
    a fork would not be as good as a fresh interpreter."""
    return ProvedProcess(zygote.fork(env, command=[sys.executable, *command], stdout=str(log), stderr=str(log)))


def start_fresh(command: Sequence[str], env: Mapping[str, str], log: Path) -> ProvedProcess:
    """As `start_forked`."""
    with open(log, "ab") as file:
        popen = subprocess.Popen(
            [*child.shim(), sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return ProvedProcess(popen)
