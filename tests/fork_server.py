"""Forks the processes that tests start from one that has imported torch: a fresh one spends 3 s on that, which is most
of a short job.

What is forked runs its script or module as ``__main__`` like a fresh interpreter: with its own arguments, environment,
folder, session and random numbers, and none of this package imported. It is a real process to signals, and what it
starts itself (torchrun's workers, the agent's) are fresh interpreters.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import IO

__all__ = ["ForkedProcess", "serve"]

_ROOT = Path(__file__).parents[1]
_SERVER = "import tests.fork_server as server\nexec(server.serve())"
_MOST = 1 << 20  # bytes of a request: the environment, mostly
_LOOK_S = 0.01
_lock = threading.Lock()


class ForkedProcess:
    """As `subprocess.Popen` of ``python ARGUMENTS``, with both outputs in one pipe and a session of its own."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str]) -> None:
        request = json.dumps({"arguments": [*arguments], "env": env, "cwd": os.getcwd()}).encode()
        read, write = os.pipe()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server, self._said = _server()
        with _lock:
            socket.send_fds(server, [request], [write, theirs.fileno()])
        os.close(write)
        theirs.close()
        self.args = [sys.executable, *arguments]
        self.stdout: IO[str] = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115 - the caller's
        self.pid = self._hear()
        self.returncode: int | None = None

    def _hear(self) -> int:
        """The process id, which comes at once, or the exit code."""
        message = self._status.recv(32)
        if not message:
            raise RuntimeError(f"the fork server has ended:\n{self._said.read().decode()}")
        return int(message)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._hear()
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def clean_environment() -> dict[str, str]:
    """This process's, without what would change a job. Unbuffered, `print` writes a line in two parts, and the lines of
    several ranks run into each other."""
    foreign = ("MINDX_", "MS_", "TORCHELASTIC", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


@functools.cache
def _server() -> tuple[socket.socket, IO[bytes]]:
    """The connection to this process's server, which ends when it is closed, and what it has to say."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
    env = clean_environment()
    paths = filter(None, [str(_ROOT), env.get("PYTHONPATH")])
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(theirs.fileno())],
        env=env,
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # as in the jobs: Python's streams depend on what they are opened on
        stderr=subprocess.STDOUT,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    assert process.stdout is not None

    def end() -> None:
        mine.close()
        process.wait(60)

    atexit.register(end)
    return mine, process.stdout


def serve() -> CodeType:
    """Fork a process for each request; returns in these, with what they are to run. Never returns in the server."""
    import numpy as np
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor
    import torch.utils.data  # noqa: F401

    assert not any(name.startswith("mindx_elastic") for name in sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # else a collection, which each process makes at its end, copies the memory that it shares
    requests = socket.socket(fileno=int(sys.argv[1]))
    jobs: dict[int, socket.socket] = {}
    while True:
        for _ in select.select([requests], [], [], _LOOK_S if jobs else None)[0]:
            message, descriptors, _, _ = socket.recv_fds(requests, _MOST, 2)
            if not message:
                os._exit(0)  # what still runs is not ours to end
            output, status = descriptors
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                os.close(status)
                for other in (requests, *jobs.values()):
                    other.close()
                random.seed()
                np.random.seed()
                return _prepare(**json.loads(message))
            os.close(output)
            jobs[pid] = socket.socket(fileno=status)
            jobs[pid].send(str(pid).encode())
        while jobs:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with suppress(OSError), jobs.pop(pid) as job:
                job.send(str(os.waitstatus_to_exitcode(code)).encode())


def _prepare(arguments: list[str], env: dict[str, str], cwd: str) -> CodeType:
    """Make this process what ``python ARGUMENTS`` is before the first line of its script; returns its code."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None and spec.origin is not None, arguments[1]
        sys.path[0] = cwd
        sys.argv = [spec.origin, *arguments[2:]]
        main.__spec__ = spec
    else:
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
        sys.argv = [*arguments]
    main.__file__ = sys.argv[0]
    return compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec")
