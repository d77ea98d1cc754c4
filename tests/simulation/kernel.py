"""What an agent asks of the kernel, in a simulated world: process numbers, signals, pipes, descriptors of processes.

`Kernel.stand_ins` take the places of `os`, `select` and `signal` in the agent's modules. A process that takes no
signals by a handler ends by them, as by default. What starts a process is the world's; files are the real ones.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

from mindx_elastic.core.posix import ProcessStat
from tests.simulation.world import Process, Topic, World

__all__ = ["Child", "Kernel"]

_FIRST_FD = 1 << 20
"""Above all real ones."""
_HARMLESS = (signal.SIGURG, signal.SIGCHLD, signal.SIGCONT)


class Child:
    """`subprocess.Popen`."""

    def __init__(self, pid: int, process: Process) -> None:
        self.pid, self.process = pid, process
        self.hears: Callable[[int], bool] | None = None
        """Takes a signal of this process; False: the process has no handler for it. None: it has none at all."""
        self.heard: list[tuple[float, int]] = []
        """The signals that it was sent, each with its time."""
        self.is_stopped = False

    def poll(self) -> int | None:
        return self.process.exit_code

    returncode = property(poll)

    def kill(self) -> None:
        self.process.kill()

    def freeze(self, length_s: float) -> None:
        """Stopped, and continued so much later."""
        world = self.process.world
        self.process.frozen_until, self.is_stopped = world.now + length_s, True
        world.at(self.process.frozen_until, lambda: setattr(self, "is_stopped", False))


class _Pipe:
    def __init__(self, world: World) -> None:
        self.topic = Topic(world)
        self.buffer, self.has_writer = bytearray(), True

    def put(self, data: Iterable[int]) -> None:
        self.buffer.extend(data)
        self.topic.tell()

    @property
    def events(self) -> int:
        return (select.POLLIN if self.buffer else 0) | (0 if self.has_writer else select.POLLHUP)


class _Pidfd:
    def __init__(self, process: Process) -> None:
        self._process, self.topic = process, process.end_topic

    @property
    def events(self) -> int:
        return 0 if self._process.is_alive else select.POLLIN


class Kernel:
    """One for all machines of the job: process numbers are unique."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.children: dict[int, Child] = {}
        self._fds: dict[int, _Pipe | _Pidfd] = {}
        self._writers: dict[int, _Pipe] = {}
        self._handlers: dict[Process, dict[int, Any]] = {}
        self._wakeups: dict[Process, int] = {}
        self.stand_ins = {"os": _Os(self), "select": _Select(self), "signal": _Signal(self)}

    def fork(self, name: str, make: Callable[[int], Process] | None = None) -> Child:
        """A new process, which has yet to be started; `make`: of this process number."""
        pid = 100 + len(self.children)
        child = Child(pid, Process(self.world, name) if make is None else make(pid))
        if self.world.process is not None:
            child.process.clock = self.world.process.clock
        self.children[child.pid] = child
        return child

    def kill(self, pid: int, signum: int) -> None:
        """As ``os.kill``."""
        child = self.children[pid]
        process = child.process
        if not process.is_alive:
            raise ProcessLookupError(pid)
        child.heard.append((self.world.now, signum))
        handlers = self._handlers.get(process, {})
        if signum == signal.SIGKILL:
            process.kill()
        elif callable(handlers.get(signum)):
            process.take_signal(signum)
            if (writer := self._writers.get(self._wakeups.get(process, -1))) is not None:
                writer.put([signum])
        elif handlers.get(signum) is signal.SIG_IGN or (signum in _HARMLESS and child.hears is None):
            pass
        elif (child.hears is None or not child.hears(signum)) and signum not in _HARMLESS:
            process.end(-signum)

    # --- in place of what `core.posix` reads in /proc ---

    def open_pidfd(self, pid: int) -> int:
        return self._add(_Pidfd(self.children[pid].process))

    def read_stat(self, pid: int) -> ProcessStat:
        child = self.children[pid]
        state = "Z" if not child.process.is_alive else "T" if child.is_stopped else "S"
        return ProcessStat(state=state, session=pid, flags=0, started=str(pid))

    def members_of(self, sessions: Collection[int]) -> list[int]:
        return []

    def thread_pidfds(self, pid: int) -> list[int]:
        return []

    def catches(self, pid: int, signum: int) -> bool:
        return self.children[pid].hears is not None

    def _add(self, what: _Pipe | _Pidfd) -> int:
        fd = _FIRST_FD + self.world.number()
        self._fds[fd] = what
        return fd


class _Os:
    """`os`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def _exit(self, code: int) -> NoReturn:
        process = self._kernel.world.process
        assert process is not None
        process.exit(code)

    def getpid(self) -> int:
        process = self._kernel.world.process
        return next((pid for pid, child in self._kernel.children.items() if child.process is process), 1)

    def kill(self, pid: int, signum: int) -> None:
        self._kernel.kill(pid, signum)

    killpg = kill

    def waitid(self, kind: int, pid: int, options: int) -> Any:
        code = self._kernel.children[pid].process.exit_code
        if code is None:
            return None
        return SimpleNamespace(si_code=os.CLD_EXITED if code >= 0 else os.CLD_KILLED)

    def pipe2(self, flags: int) -> tuple[int, int]:
        pipe = _Pipe(self._kernel.world)
        reader, writer = self._kernel._add(pipe), _FIRST_FD + self._kernel.world.number()
        self._kernel._writers[writer] = pipe
        return reader, writer

    def read(self, fd: int, size: int) -> bytes:
        pipe = self._kernel._fds.get(fd)
        if not isinstance(pipe, _Pipe):
            return os.read(fd, size)
        if not pipe.buffer:
            raise BlockingIOError
        data = bytes(pipe.buffer[:size])
        del pipe.buffer[:size]
        return data

    def write(self, fd: int, data: bytes) -> int:
        if fd < _FIRST_FD:
            return os.write(fd, data)
        self._kernel._writers[fd].put(data)
        return len(data)

    def close(self, fd: int) -> None:
        if fd < _FIRST_FD:
            os.close(fd)
        elif fd in self._kernel._writers:
            pipe = self._kernel._writers.pop(fd)
            pipe.has_writer = False
            pipe.topic.tell()
        else:
            del self._kernel._fds[fd]


class _Poll:
    """`select.poll`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._wanted: dict[int, int] = {}

    def register(self, what: Any, events: int = select.POLLIN) -> None:
        self._wanted[what if isinstance(what, int) else what.fileno()] = events | select.POLLHUP

    def _find(self, fd: int) -> Any:
        """A pipe, a process, or a socket of the network."""
        return self._kernel._fds.get(fd) or self._kernel.world.descriptors.get(fd)

    def _ready(self) -> list[tuple[int, int]]:
        return [(fd, found) for fd, wanted in self._wanted.items() if (found := self._events(self._find(fd)) & wanted)]

    def _events(self, what: Any) -> int:
        if isinstance(what, _Pipe | _Pidfd):
            return what.events
        return select.POLLIN if what is not None and what.is_readable() else 0

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        topics = [found.topic for fd in self._wanted if (found := self._find(fd)) is not None]
        self._kernel.world.wait(lambda: bool(self._ready()), timeout_s, on=topics)
        return self._ready()


class _Select:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def poll(self) -> _Poll:
        return _Poll(self._kernel)


class _Signal:
    """`signal`: handlers and the wake-up descriptor of each process."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def _process(self) -> Process:
        process = self._kernel.world.process
        assert process is not None
        return process

    def getsignal(self, signum: int) -> Any:
        return self._kernel._handlers.get(self._process, {}).get(signum, signal.SIG_DFL)

    def signal(self, signum: int, handler: Any) -> Any:
        before, process = self.getsignal(signum), self._process
        self._kernel._handlers.setdefault(process, {})[signum] = handler
        process.handle = lambda number: self.getsignal(number)(number, None)
        return before

    def set_wakeup_fd(self, fd: int, *, warn_on_full_buffer: bool = True) -> int:
        before = self._kernel._wakeups.get(self._process, -1)
        self._kernel._wakeups[self._process] = fd
        return before
