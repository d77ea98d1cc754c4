"""Starts the runs of a proof: forked from a zygote, in fresh interpreters, or under the agent; and ends them.

All of them lead sessions of their own, so that what a run leaves behind can be ended with it, and end when this process
does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.agent import child
from mindx_elastic.core.posix import members_of
from mindx_elastic.prove import zygote

__all__ = ["FreshProcess", "Process", "Request", "Zygote"]

_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One process to start."""

    command: Sequence[str]
    """The script, or ``-m`` and a module, and the arguments."""
    env: Mapping[str, str]
    log: Path
    """For what it prints."""
    notes: Path | None
    """For what the script does, see `script`; None: the command is a launcher, whose workers note it."""
    launches: bool = False
    """The command is the agent: it must get the time to end its workers."""

    @property
    def death(self) -> int:
        """The signal that it gets when this process dies, and first of all when it is ended."""
        return signal.SIGTERM if self.launches else signal.SIGKILL


class Process:
    """A started run."""

    def __init__(self, pid: int, request: Request) -> None:
        self.pid, self._request = pid, request

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal that ended it; None: it runs."""
        raise NotImplementedError

    def end(self) -> None:
        """End it and what it has left behind, if need be."""
        if self._request.launches and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._wait(_END_S)
        left = [self.pid, *members_of({self.pid})] if self.poll() is None else list(members_of({self.pid}))
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._wait(_END_S)

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)


class FreshProcess(Process):
    """A fresh interpreter."""

    def __init__(self, request: Request) -> None:
        shim = [sys.executable, "-I", "-S", str(Path(child.__file__).resolve()), str(os.getpid())]
        wrapper = [] if request.notes is None else ["-m", "mindx_elastic.prove.script"]
        with open(request.log, "ab") as log:
            self._popen = subprocess.Popen(
                [*shim, sys.executable, *wrapper, *request.command],
                # A line must be seen at once: silence counts as hanging.
                env={**request.env, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        super().__init__(self._popen.pid, request)

    def poll(self) -> int | None:
        return self._popen.poll()


class _ForkedProcess(Process):
    def __init__(self, server: Zygote, pid: int, request: Request) -> None:
        super().__init__(pid, request)
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and (answer := self._server.hear(0.0)) is not None:
            self._code = int(answer.get("code", 1))
        return self._code


class Zygote:
    """A process that forks, see `zygote`; its import goes on while this process does something else."""

    def __init__(self, env: Mapping[str, str], log: Path, *, launches: bool = False) -> None:
        """`launches`: what it forks are launchers, each with a process of its own to fork workers from."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, zygote.MOST_BYTES)
        with open(log, "ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", zygote.COMMAND, str(theirs.fileno()), *[zygote.LAUNCHES] * launches],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self.pid = self._popen.pid
        self._log = log

    def problem(self, folder: Path | None = None) -> str:
        """Why it is of no use; empty: it is ready. Waits for that; once. `folder`: the first on the script's path. Its
        modules go before those that are imported already."""
        answer = self.hear(None)
        if answer is None:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return f"its process has ended: {lines[-1] if lines else f'exit code {self._popen.wait()}'}"
        if folder is not None and (own := _shadowing(folder, answer["modules"])) and not answer["problem"]:
            return f"{folder} has modules of its own with the names of others: {', '.join(own)}"
        return str(answer["problem"])

    def start(self, request: Request) -> Process:
        """Fork a process for the request; the one before must have ended."""
        content = {
            "command": list(request.command),
            "env": dict(request.env),
            "cwd": os.getcwd(),
            "log": str(request.log),
            "notes": None if request.notes is None else str(request.notes),
            "death": int(request.death),
        }
        self._channel.send(json.dumps(content).encode())
        answer = self.hear(None)
        if answer is None:
            raise RuntimeError(f"the process that forks has ended: see {self._log}")
        return _ForkedProcess(self, int(answer["pid"]), request)

    def hear(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next answer; None: there is none yet, or the process is gone."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return None
        message = self._channel.recv(zygote.MOST_BYTES)
        if not message:
            return None if timeout_s is None else {"code": 1}
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        """End it at once; it may be in the middle of its import. What it has forked has ended, or dies with it."""
        self._channel.close()
        self._popen.kill()
        self._popen.wait()


def _shadowing(folder: Path, imported: Mapping[str, str | None]) -> list[str]:
    """Names of modules in `folder` that are `imported` from elsewhere."""
    own = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py", ".so")} & set(imported)
    return sorted(name for name in own if not Path(imported[name] or "/").is_relative_to(folder))
