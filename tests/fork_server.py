"""Forks the processes that tests start from one that has imported torch: a fresh one spends 3 s on that, which is most
of a short job.

What is forked runs its script or module as ``__main__`` like a fresh interpreter: with its own arguments, environment,
folder, session and random numbers, and none of this package imported. It is a real process to signals, and a child of
the process that starts it. What a launcher starts in a session of its own (torchrun its workers, the agent its zygote)
is forked from a copy that the launcher has of the server; what other processes start are fresh interpreters.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib.util
import io
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType
from typing import IO, Any

__all__ = ["ForkedProcess", "clean_environment", "serve"]

_ROOT = Path(__file__).parents[1]
_SERVER = """
import tests.fork_server as server
try:
    exec(server.serve())
finally:
    __import__("sys").modules["tests.fork_server"].note_end()
"""
_MOST = 1 << 20  # bytes of a request: the environment, mostly
_ABOVE = 512  # where descriptors are put aside while they change their numbers
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_lock = threading.Lock()


class ForkedProcess:
    """As `subprocess.Popen` of ``python ...`` in a new session, with text in the pipe of its output. Any thread."""

    def __init__(
        self,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
    ) -> None:
        assert args[0] == sys.executable and start_new_session
        self.args = [*map(str, args)]
        self.returncode: int | None = None
        self.stdout: Any = None
        with open(os.devnull, "r+b") as null, ExitStack() as theirs:
            if stdout == subprocess.PIPE:
                read, stdout = os.pipe()
                theirs.callback(os.close, stdout)
                self.stdout = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115 - the caller's
            given = [stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr]
            streams = [number if each is None else each for number, each in enumerate(given)]
            streams = [null if each == subprocess.DEVNULL else each for each in streams]
            descriptors = [each if isinstance(each, int) else each.fileno() for each in (*streams, *pass_fds)]
            request = {
                "arguments": self.args[1:],
                "env": dict(os.environ if env is None else env),
                "cwd": str(cwd or os.getcwd()),
                "numbers": [0, 1, 2, *pass_fds],
            }
            self.pid = _fork(json.dumps(request).encode(), descriptors)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # another thread has waited meanwhile
                ended = os.pidfd_open(self.pid)
                try:
                    if not select.select([ended], [], [], timeout)[0]:
                        raise subprocess.TimeoutExpired(self.args, timeout or 0)
                finally:
                    os.close(ended)
        with _lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
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


def _fork(request: bytes, descriptors: Sequence[int]) -> int:
    """The process id of a new child of this process, forked by the server, or by the copy of it that a launcher has."""
    with _lock:
        forks = _server()[0] if _copy is None else _copy
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(forks, [request], descriptors)
            pid = forks.recv(32)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    if not pid:
        raise RuntimeError(f"the fork server has ended:\n{_server()[1].read().decode()}")
    return int(pid)


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
    atexit.register(_leave_at_once)  # before the imports, which register what is to run before it
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor
    import torch.utils.data  # noqa: F401
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # It goes through all modules for the name of a method, for records that nobody reads.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    assert not any(name.startswith("mindx_elastic") for name in sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # else a collection, which each process makes at its end, copies the memory that it shares
    return _prepare(**_fork_for_requests(socket.socket(fileno=int(sys.argv[1])), os.getppid()))


def _fork_for_requests(requests: socket.socket, of: int) -> dict[str, Any]:
    """Fork a child of the process `of` for each request; returns in these, with what they are to become."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST, 16)
        if not message:
            os._exit(0)  # what still runs is not ours to end
        if _fork_orphan(descriptors):
            return _become_child(json.loads(message), descriptors, requests, of)


def _prepare(arguments: list[str], env: dict[str, str], cwd: str) -> CodeType:
    """Make this process what ``python ARGUMENTS`` is before the first line of its script; returns its code."""
    import numpy as np

    starts_others = {"torch.distributed.run", "prove", "drill"} & {*arguments[:3]} or env.get("MINDX_ZYGOTE") == "first"
    if arguments[0] == "-m" and starts_others:
        started = _fork_copy()
        if started is not None:
            return _prepare(**started)
    random.seed()
    np.random.seed()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    if arguments[0] == "-u" or env.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            # Lines, too: there is still a buffer below, which a fresh interpreter would not have.
            stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    arguments = arguments[arguments[0] == "-u" :]
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        return compile(arguments[1], "<string>", "exec")
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
        assert spec is not None and spec.origin is not None, arguments[1]
        sys.path[0] = cwd
        sys.argv = [spec.origin, *arguments[2:]]
        main.__spec__ = spec
    else:
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
        sys.argv = [*arguments]
    main.__file__ = sys.argv[0]
    return compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec")


_exit_code: int | None = None


def note_end() -> None:
    """The script has ended, well or with the exception that is being handled."""
    global _exit_code
    error = sys.exc_info()[1]
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if isinstance(code, int | None) and not isinstance(error, KeyboardInterrupt):
        _exit_code = (code or 0) & 0xFF


def _leave_at_once() -> None:
    """The last of all ``atexit`` code. The interpreter would free, object by object, what
    the server has imported, and so copy the memory that it shares: as much work as most jobs are."""
    if _exit_code is None:
        return
    for each in [sys.stdout, sys.stderr, *gc.get_objects()]:
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, or the other end of a pipe is
                each.flush()
    os._exit(_exit_code)


# --- launchers ---


_copy: socket.socket | None = None
"""In a launcher: the connection to the copy of the server that is its child, and so can fork children for it."""


def _fork_copy() -> dict[str, Any] | None:
    """From here on this process has a copy, and `subprocess.Popen` of ``python ...`` in a new session is a
    `ForkedProcess`. None here; in what the copy forks: what it is to become."""
    global _copy
    launcher = os.getpid()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _copy = mine
        subprocess.Popen.__new__ = _popen  # type: ignore[method-assign]
        return None
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    mine.close()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    return _fork_for_requests(theirs, launcher)


def _popen(cls: type, args: Sequence[str] = (), *more: Any, start_new_session: bool = False, **how: Any) -> Any:
    """``subprocess.Popen.__new__`` in a launcher."""
    if start_new_session and args[0] == sys.executable and args[1] != "-I":
        return ForkedProcess(args, **how)
    return object.__new__(cls)


def _fork_orphan(descriptors: Sequence[int]) -> bool:
    """Whether this is the new process, whose parent has ended; the descriptors are for that one."""
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        return True
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitpid(between, 0)
    return False


def _become_child(
    request: dict[str, Any], descriptors: Sequence[int], answer: socket.socket, of: int
) -> dict[str, Any]:
    """Give this orphan its session and its descriptors, once the process `of` has adopted it."""
    os.setsid()
    for _ in range(10_000):
        if os.getppid() == of:
            break
        time.sleep(0.001)
    else:
        os._exit(1)
    answer.send(str(os.getpid()).encode())
    answer.close()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
    os.closerange(3, _ABOVE)
    for number, descriptor in zip(request.pop("numbers"), aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return request


def _prctl(what: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(what, int(value), 0, 0, 0) == 0
