"""Forks workers from a process that has imported what they import: a new one is there in milliseconds, not seconds.

`Zygote` is the agent's side; `zygote_process` is what runs there, and says how a fork becomes the agent's child. What
a fork cannot have as a fresh interpreter would, a `ZygoteError` says, and the agent starts a fresh interpreter:

* variables that are read when the interpreter starts or torch is imported, if they differ from the zygote's: Python
  tells which ones imports have read; those that C libraries read are known by their beginnings (`IMPORT_VARIABLES`);
* another interpreter, ``-c``, a script that is not a Python file, a script whose folder has a module of the same name
  as one of torch's;
* an import that starts a thread, opens a file, initialises CUDA, or reads a variable that each worker has its own value
  for.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.zygote_process import COMMAND, FORK, MOST_BYTES, OWN_VARIABLES, PRELOAD, READY
from mindx_elastic.core.posix import read_stat

__all__ = [
    "IMPORT_VARIABLES",
    "WORKER_DEFAULTS",
    "ForkedWorker",
    "Zygote",
    "ZygoteError",
]

IMPORT_VARIABLES = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_"),
    *("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_", "CUBLAS_", "NUMEXPR_"),
    *("PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
"""Beginnings of variables that the interpreter, the C library, torch and numpy read before the script runs."""
WORKER_DEFAULTS: Mapping[str, str] = {
    # Not 1, as torch's agent sets: torch then aborts a communicator whose peer has died, and the update after it runs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "PYTHONHASHSEED": "0",  # sets of strings in the same order, on each node and in each attempt
}
"""What the agent gives its workers where the user has not set it. Imports read it, so a zygote must have it, too."""
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
        self.stdin = self.stdout = self.stderr = None

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
        while self.poll() is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

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
        self._command, self._env = list(command), dict(env)
        for name in OWN_VARIABLES:
            self._env.pop(name, None)
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._said = -1
        self._problem = "" if self._script else _why_not(command)
        self.has_died = False
        """Its process has ended by itself, or was killed."""
        self._read: set[str] = set()
        self._is_ready = False

    @property
    def problem(self) -> str:
        """Why no worker can be forked; empty: it can, or the imports still go on."""
        self._hear()
        return self._problem

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        return 0 if self._popen is None else self._popen.pid

    def is_ready(self) -> bool:
        """Whether `fork` can be called. Costs a system call."""
        self._hear()
        return self._is_ready and not self._problem

    def wait(self, timeout_s: float) -> bool:
        """Wait for the imports, at most so long; whether `fork` can be called."""
        end = time.monotonic() + timeout_s
        while not self.is_ready() and not self._problem and self._channel is not None:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._channel], [], [], left)[0]:
                break
        return self.is_ready()

    def start(self) -> None:
        """Start the process; its imports go on while this one does something else."""
        if self._problem or self._popen is not None:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said = os.memfd_create("mindx-zygote")
        arguments = [*self._interpreter, "-c", COMMAND, str(os.getpid()), str(theirs.fileno())]
        padding = max(0, len("\0".join(self._command)) - len("\0".join(arguments)))
        try:
            self._popen = subprocess.Popen(
                [*arguments, *([" " * padding] if padding else [])],  # so that workers can show their own command line
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._problem = f"its process cannot be started: {error}"
        finally:
            theirs.close()

    def preload(self, names: Sequence[str]) -> None:
        """Have it import these modules, too, which a worker has imported, in this order. Only those are that come from
        the standard library or an installed package; the program's own are imported by each worker."""
        if self._problem or self._channel is None:
            return
        with suppress(OSError):
            self._ask(PRELOAD, [*names]).close()

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
        self._hear()
        if not self._is_ready or self._problem or self._channel is None:
            raise ZygoteError(self._problem or "the zygote is not ready yet")
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            raise ZygoteError("SIGCHLD is ignored, so that no exit code of a forked worker would be known")
        interpreter, script = (self._interpreter, self._script) if command is None else _split(command)
        if not script or interpreter != self._interpreter:
            raise ZygoteError("the worker's command is another one than the zygote's")
        self._check(env)
        opened: list[int] = []
        try:
            request = {
                "interpreter": interpreter,
                "command": script,
                "env": dict(env),
                "cwd": os.getcwd(),
                "hook": hook,
            }
            outputs = [_open(stdout, 1, opened), _open(stderr, 2, opened)]
            with _subreaper():
                pid = self._fork(request, [0, *outputs])
        except OSError as error:
            self._hear()
            raise ZygoteError(self._problem or f"{type(error).__name__}: {error}") from error
        finally:
            for fd in opened:
                os.close(fd)
        return ForkedWorker(pid, [*interpreter, *script])

    def close(self) -> None:
        """End the process at once. The workers that it has forked live on."""
        self._is_ready = False
        self._problem = self._problem or "it was closed"
        self._end()

    # --- small parts --------------------------------------------------------------------------------------------------

    def _fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with self._ask(FORK, request, descriptors) as stream:
            stream.settimeout(_FORK_S)
            answer = b""
            while not answer.endswith(b"\n"):
                part = stream.recv(1 << 12)
                if not part:
                    raise ZygoteError("the forked process has ended before it was the worker")
                answer += part
            if not answer.strip().isdigit():
                raise ZygoteError(answer.decode(errors="replace").strip())
            pid = int(answer)
            stat = read_stat(pid)
            if stat is None or stat.state in ("Z", "X"):
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                raise ZygoteError("the forked process has ended before it was the worker")
            with suppress(OSError):  # else it has just been killed, which its exit code says
                stream.sendall(READY)
        return pid

    def _ask(self, what: bytes, content: Any, descriptors: Sequence[int] = ()) -> socket.socket:
        """Send a request; the stream on which it is answered."""
        assert self._channel is not None
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                self._channel.settimeout(_FORK_S)
                socket.send_fds(self._channel, [what], [theirs.fileno(), *descriptors])
            mine.settimeout(_FORK_S)
            mine.sendall(json.dumps(content).encode() + b"\n")
        except BaseException:
            mine.close()
            raise
        return mine

    def _check(self, env: Mapping[str, str]) -> None:
        for name in sorted(env.keys() | self._env.keys()):
            if env.get(name) == self._env.get(name):
                continue
            if name.startswith(IMPORT_VARIABLES) or name in self._read or "*" in self._read:
                raise ZygoteError(f"the worker's {name} differs from the zygote's, and imports have read it")

    def _hear(self) -> None:
        """Take in what the process has reported."""
        while self._channel is not None and select.select([self._channel], [], [], 0)[0]:
            with suppress(OSError):
                if message := self._channel.recv(MOST_BYTES):
                    self._take_in(json.loads(message))
                    continue
            self._is_ready = False
            self.has_died = True
            self._problem = self._problem or f"its process has ended{self._last_words()}"
            self._end()

    def _take_in(self, report: Mapping[str, Any]) -> None:
        self._read = set(report["read"])
        self._is_ready = True
        self._problem = report["problem"]

    def _last_words(self) -> str:
        text = ""
        if self._said >= 0:
            text = os.pread(self._said, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        if not text and self._popen is not None:
            with suppress(subprocess.TimeoutExpired):
                text = f"exit code {self._popen.wait(1.0)}"
        return f": {text}" if text else ""

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None
        if self._said >= 0:
            os.close(self._said)
            self._said = -1


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


def _why_not(command: Sequence[str]) -> str:
    if not command or command[0] != sys.executable:
        return "the workers' program is not this Python"
    return "the workers' command is neither a Python file nor -m and a module"


def _open(where: str | int, own: int, opened: list[int]) -> int:
    if where == "":
        return own
    if isinstance(where, int):
        return where
    fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    opened.append(fd)
    return fd


@contextmanager
def _subreaper() -> Iterator[None]:
    """This process adopts the orphans among what descends from it; afterwards, as before."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
        raise ZygoteError("the kernel does not let the agent adopt workers")
    if not before.value and libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ZygoteError("the kernel does not let the agent adopt workers")
    try:
        yield
    finally:
        if not before.value:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
