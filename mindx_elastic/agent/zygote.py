"""Forks workers from a process that has imported torch: a new one is there in milliseconds, not seconds.

`Zygote` is the agent's side; `zygote_process` is what runs there, and says how a fork becomes the agent's child. What
a fork cannot have as a fresh interpreter would, a `ZygoteError` says, and the agent starts a fresh interpreter: another
environment than the zygote's, but for the variables of each worker (`is_own_variable`), another interpreter, ``-c``, a
script that is not a Python file, a script whose folder has a module of the same name as one of torch's.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.zygote_process import COMMAND, MOST_BYTES, READY, is_own_variable
from mindx_elastic.core.posix import read_stat

__all__ = ["WORKER_DEFAULTS", "ForkedWorker", "Zygote", "ZygoteError"]

WORKER_DEFAULTS: Mapping[str, str] = {
    # Not 1, as torch's agent sets: torch then aborts a communicator whose peer has died, and the update after it runs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "PYTHONHASHSEED": "0",  # sets of strings in the same order, on each node and in each attempt
}
"""What the agent gives its workers where the user has not set it, and so its zygote, too."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_FORK_S = 10.0
"""A fork takes milliseconds; one that takes so long never comes."""
_POLL_S = 0.005


class ZygoteError(RuntimeError):
    """No worker can be forked; the text says why."""


class ForkedWorker:
    """As `subprocess.Popen` of the command, as far as the agent uses it. Main thread only."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, list(args)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal that ended it; None: it runs. Reaps the process."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 1  # somebody else has reaped it, and nothing can say how it ended
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """One process that forks. Main thread only: workers and zygote get their death signals when the *thread* ends that
    has started the zygote."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """`command`: the workers' command line: interpreter, its options, script or ``-m`` and module, arguments.
        `env`: their environment, as far as it is the same for all. A worker gets a SIGTERM when this process dies.
        """
        self._interpreter, self._script = _split(command)
        self._env = _shared(env)
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self.problem = "" if self._script else "the workers' command is neither a Python file nor -m and a module"
        """Why no worker can be forked; empty: it can, or the imports still go on. As of the last `wait`."""

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        return 0 if self._popen is None else self._popen.pid

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Wait for the imports, at most so long; whether `fork` can be called."""
        channel = self._channel
        if channel is not None and select.select([channel], [], [], 0.0 if self._is_ready else timeout_s)[0]:
            said = b""
            with suppress(OSError):
                said = channel.recv(MOST_BYTES)
            if said == READY:
                self._is_ready = True
            else:
                self._end(said.decode(errors="replace"))
        return self._is_ready

    def start(self) -> None:
        """Start the process; its imports go on while this one does something else."""
        if self.problem or self._popen is not None:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_FORK_S)
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    # What it does not read, the script's words, `ps` shows of it and of the workers.
                    [*self._interpreter, "-c", COMMAND, str(os.getpid()), str(theirs.fileno()), *self._script],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self._end(f"its process cannot be started: {error}")

    def fork(
        self,
        env: Mapping[str, str],
        *,
        command: Sequence[str] | None = None,
        stdout: str | int = "",
        stderr: str | int = "",
        hook: str = "",
    ) -> ForkedWorker:
        """A new worker, in a new session.

        `env`: its whole environment. `command`: where it differs from the zygote's, in the script's arguments.
        `stdout`, `stderr`: a file to append to or a descriptor; empty: this process's own. `hook`: ``module:function``,
        called in the worker before the script. Raises ZygoteError.
        """
        if not self.wait():
            raise ZygoteError(self.problem or "the zygote is not ready yet")
        interpreter, script = (self._interpreter, self._script) if command is None else _split(command)
        if not script or interpreter != self._interpreter:
            raise ZygoteError("the worker's command is another one than the zygote's")
        shared = _shared(env)
        for name in sorted(shared.keys() | self._env.keys()):
            if shared.get(name) != self._env.get(name):
                raise ZygoteError(f"the worker's {name} differs from the zygote's, and imports may have read it")
        request = {
            "interpreter": interpreter,
            "command": script,
            "env": {name: value for name, value in env.items() if name not in shared},
            "cwd": os.getcwd(),
            "hook": hook,
        }
        try:
            with ExitStack() as opened, _subreaper():
                outputs = [_open(where, own, opened) for own, where in ((1, stdout), (2, stderr))]
                return ForkedWorker(self._fork(json.dumps(request).encode(), [0, *outputs]), [*interpreter, *script])
        except OSError as error:
            raise ZygoteError(f"{type(error).__name__}: {error}") from error

    def _fork(self, request: bytes, descriptors: Sequence[int]) -> int:
        """The worker waits for the last word: a fork that this process has given up must not run."""
        assert self._channel is not None
        mine, theirs = socket.socketpair()
        with mine:
            mine.settimeout(_FORK_S)
            with theirs:
                socket.send_fds(self._channel, [request], [theirs.fileno(), *descriptors])
            answer = mine.recv(MOST_BYTES).decode(errors="replace")
            if answer and not answer.isdigit():
                raise ZygoteError(answer)
            stat = read_stat(int(answer)) if answer else None
            if stat is None or stat.state in ("Z", "X"):
                with suppress(ChildProcessError, ValueError):
                    os.waitpid(int(answer), os.WNOHANG)
                raise ZygoteError("the forked process has ended before it was the worker")
            with suppress(OSError):  # else it has just been killed, which its exit code says
                mine.sendall(READY)
        return int(answer)

    def close(self) -> None:
        """End the process at once. The workers that it has forked live on."""
        self._end("it was closed")

    def _end(self, problem: str) -> None:
        """It forks no more: it says why, or has ended."""
        self._is_ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):
                problem = problem or f"its process has ended: exit code {self._popen.wait(1.0)}"
            self._popen.kill()
            self._popen.wait()
            self._popen = None
        self.problem = self.problem or problem


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not is_own_variable(name)}


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its option (-u, from torch), and the script or ``-m`` with the arguments; the latter empty
    where the command is none that can be forked."""
    index = 2 if list(command[1:2]) == ["-u"] else 1
    script = list(command[index:])
    is_script = bool(script) and not script[0].startswith("-") and _is_source(Path(script[0]))
    is_module = script[:1] == ["-m"] and len(script) > 1
    if list(command[:1]) != [sys.executable] or not (is_script or is_module):
        return list(command), []
    return list(command[:index]), script


def _is_source(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".pyc", ".pyo") and not zipfile.is_zipfile(path)


def _open(where: str | int, own: int, opened: ExitStack) -> int:
    if isinstance(where, int):
        return where
    if where == "":
        return own
    fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    opened.callback(os.close, fd)
    return fd


@contextmanager
def _subreaper() -> Iterator[None]:
    """This process adopts the orphans among what descends from it; afterwards, as before."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ZygoteError("the kernel does not let the agent adopt workers")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
