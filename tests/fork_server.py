"""Forks the processes that tests start from one that has imported torch: a fresh one spends 3 s on that, which is most
of a short job.

What is forked runs its script or module as ``__main__`` like a fresh interpreter: with its own arguments, environment,
folder, session and random numbers, and none of this package imported. It is a real process to signals. What a launcher
starts in a session of its own (torchrun its workers, the agent its zygote) is forked from a copy that the launcher has
of the server, and is its child; what other processes start are fresh interpreters.
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
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import IO, Any

__all__ = ["ForkedChild", "ForkedProcess", "fork_child", "serve"]

_ROOT = Path(__file__).parents[1]
_SERVER = """
import tests.fork_server as server
try:
    exec(server.serve())
finally:
    __import__("sys").modules["tests.fork_server"].note_end()
"""
_MOST = 1 << 20  # bytes of a request: the environment, mostly
_LOOK_S = 0.01
_ABOVE = 512  # where descriptors are put aside while they change their numbers
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_lock = threading.Lock()


class ForkedProcess:
    """As `subprocess.Popen` of ``python ARGUMENTS``, with a session of its own, and both outputs in one pipe if none is
    given."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: Path | None = None,
        outputs: tuple[int, int] | None = None,
    ) -> None:
        request = json.dumps({"arguments": [*arguments], "env": dict(env), "cwd": str(cwd or os.getcwd())}).encode()
        read, write = os.pipe()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server, self._said = _server()
        with _lock:
            socket.send_fds(server, [request], [*(outputs or (write, write)), theirs.fileno()])
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
    requests, tests = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    jobs: dict[int, socket.socket] = {}
    while True:
        for _ in select.select([requests], [], [], _LOOK_S if jobs else None)[0]:
            message, descriptors, _, _ = socket.recv_fds(requests, _MOST, 16)
            if not message:
                os._exit(0)  # what still runs is not ours to end
            request = json.loads(message)
            if "numbers" in request:
                if _fork_orphan(descriptors):
                    for other in jobs.values():
                        other.close()
                    return _prepare(**_become_child(request, descriptors, requests, tests))
                continue
            *outputs, status = descriptors
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for number, output in enumerate(outputs, start=1):
                    os.dup2(output, number)
                for descriptor in descriptors:
                    os.close(descriptor)
                for other in (requests, *jobs.values()):
                    other.close()
                return _prepare(**request)
            for output in outputs:
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
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
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


# --- children of other processes than the server ---


def fork_child(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = True,
) -> ForkedChild:
    """As `subprocess.Popen` of ``python ...`` in a new session, without pipes: it is a child of this process."""
    assert args[0] == sys.executable and start_new_session
    numbers = [0, 1, 2, *pass_fds]
    request = {"arguments": args[1:], "env": dict(env), "cwd": os.getcwd(), "numbers": numbers}
    with open(os.devnull) as null, _lock:
        given = [null if stream == subprocess.DEVNULL else stream for stream in (stdin, stdout, stderr)]
        streams = [number if stream is None else stream for number, stream in enumerate(given)]
        descriptors = [each if isinstance(each, int) else each.fileno() for each in (*streams, *pass_fds)]
        forks = _copy or _server()[0]
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        socket.send_fds(forks, [json.dumps(request).encode()], descriptors)
        pid = int(forks.recv(32))
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return ForkedChild(args, pid)


class ForkedChild(ForkedProcess):
    """What `fork_child` has started."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = [*args], pid, None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            else:
                time.sleep(_LOOK_S)
        return self.returncode


_copy: socket.socket | None = None
"""In a launcher: the connection to the copy of the server that is its child, and so can fork children for it."""


def _fork_copy() -> dict[str, Any] | None:
    """From here on this process has a copy, and `subprocess.Popen` of ``python ...`` in a new session is `fork_child`.
    None here; in what the copy forks: what it is to become."""
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
    while True:
        message, descriptors, _, _ = socket.recv_fds(theirs, _MOST, 16)
        if not message:
            os._exit(0)
        if _fork_orphan(descriptors):
            return _become_child(json.loads(message), descriptors, theirs, launcher)


def _popen(cls: type, args: Sequence[str] = (), *more: Any, start_new_session: bool = False, **how: Any) -> Any:
    """``subprocess.Popen.__new__`` in a launcher."""
    if start_new_session and args[0] == sys.executable and args[1] != "-I":
        return fork_child(args, **how)
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
