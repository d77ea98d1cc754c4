"""Starts one run: forked from a process that has imported torch, or in a fresh interpreter; and ends it.

Each run leads a session of its own, so that what it leaves behind can be ended with it, and ends when this process
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
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.agent import child
from mindx_elastic.agent.zygote import ForkedWorker, Zygote
from mindx_elastic.core.posix import members_of

__all__ = ["Process", "Request", "start_forked", "start_fresh"]

_END_S = 10.0
_SCRIPT = "mindx_elastic.prove.script"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One process to start."""

    command: Sequence[str]
    """The script, or ``-m`` and a module, and the arguments."""
    env: Mapping[str, str]
    log: Path
    """For what it prints."""
    launches: bool = False
    """The command is the agent, whose workers note what the script does (see `script`). It must get the time to end
    them."""


class Process:
    """A started run. Main thread."""

    def __init__(self, worker: ForkedWorker | subprocess.Popen[bytes], *, launches: bool) -> None:
        """`launches`: see `Request`."""
        self._worker, self._launches = worker, launches
        self.pid = worker.pid

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal that ended it; None: it runs."""
        return self._worker.poll()

    def end(self) -> None:
        """End it and what it has left behind, if need be."""
        if self._launches and self.poll() is None:
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


def start_forked(zygote: Zygote, request: Request) -> Process:
    """Raises ZygoteError: a fork would not be as good as a fresh interpreter."""
    hook = "" if request.launches else f"{_SCRIPT}:listen"
    command, log = [sys.executable, *request.command], str(request.log)
    return Process(
        zygote.fork(request.env, command=command, stdout=log, stderr=log, hook=hook), launches=request.launches
    )


def start_fresh(request: Request) -> Process:
    shim = [sys.executable, "-I", "-S", str(Path(child.__file__).resolve()), str(os.getpid())]
    wrapper = [] if request.launches else ["-m", _SCRIPT]
    with open(request.log, "ab") as log:
        popen = subprocess.Popen(
            [*shim, sys.executable, *wrapper, *request.command],
            env=request.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Process(popen, launches=request.launches)
