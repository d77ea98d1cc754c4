"""What processes ask of their system, in a simulated world: process numbers, signals, pipes, descriptors, polling.

`System.stand_ins` take the places of `os`, `select`, `selectors`, `signal`, `socket` and `secrets`: what the package
calls is its port, and the suite of `test_contracts` runs with these and with the real ones. A process that takes no
signals by a handler ends by them, as by default. What starts a process is the world's; files are the real ones.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import signal
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from greenlet import GreenletExit

from mindx_elastic.core.posix import ProcessStat
from tests.simulation.network import LocalEnd, Network
from tests.simulation.world import FIRST_FD, File, Process, World

__all__ = ["System"]

_HARMLESS = (signal.SIGURG, signal.SIGCHLD, signal.SIGCONT)


class System:
    """One for all machines of the job: process numbers are unique."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.network = Network(world)
        self.stand_ins = {
            "os": _Os(self),
            "select": _Select(self),
            "selectors": _Selectors(self),
            "signal": _Signal(self),
            "socket": self.network.sockets,
            "secrets": _Secrets(self),
        }

    @property
    def process(self) -> Process:
        """The one that runs."""
        process = self.world.process
        assert process is not None
        return process

    def kill(self, pid: int, signum: int) -> None:
        """As ``os.kill``, also from outside."""
        process = self.world.processes.get(pid)
        if process is None or not process.is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if signum == 0:
            return
        process.heard.append((self.world.now, signum))
        handler = process.handlers.get(signum, signal.SIG_DFL)
        if signum == signal.SIGKILL:
            process.kill()
        elif callable(handler):
            process.signals.append(signum)
            self.world.candidates.extend(() if process.main is None else (process.main,))
            if process.wakeup_fd >= 0:
                self.write(process.wakeup_fd, bytes([signum]))
        elif handler is signal.SIG_IGN or (signum in _HARMLESS and process.hears is None):
            pass
        elif (process.hears is None or not process.hears(signum)) and signum not in _HARMLESS:
            process.end(-signum)

    def tell(self, process: Process, signum: int) -> None:
        """A signal from outside, to a process that may have ended."""
        if process.is_alive:
            self.kill(process.pid, signum)

    def find(self, fd: int) -> Any:
        """Raises OSError, or ends the running thread where its process has ended."""
        found = self.world.descriptors.get(fd)
        if found is None and (self.world.is_closed or not self.process.is_alive):
            raise GreenletExit
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def write(self, fd: int, data: bytes) -> int:
        return int(self.find(fd).send(data))

    # --- in place of what `core.posix` reads in /proc ---

    def open_pidfd(self, pid: int) -> int:
        return _Pidfd(self.world.processes[pid]).fd

    def read_stat(self, pid: int) -> ProcessStat:
        process = self.world.processes[pid]
        state = "Z" if not process.is_alive else "T" if process.is_stopped else "S"
        return ProcessStat(state=state, session=pid, flags=0, started=str(pid))

    def members_of(self, sessions: Collection[int]) -> list[int]:
        return []

    def thread_pidfds(self, pid: int) -> list[int]:
        return []

    def catches(self, pid: int, signum: int) -> bool:
        return self.world.processes[pid].hears is not None


class _Pidfd(File):
    def __init__(self, process: Process) -> None:
        super().__init__(process.world)
        self._process, self.topic = process, process.topic

    def events(self, wanted: int) -> int:
        return 0 if self._process.is_alive else wanted & select.POLLIN


class _Os:
    """`os`."""

    def __init__(self, system: System) -> None:
        self._system = system

    def _exit(self, code: int) -> NoReturn:
        self._system.process.exit(code)

    def getpid(self) -> int:
        process = self._system.world.process
        return 1 if process is None else process.pid

    def kill(self, pid: int, signum: int) -> None:
        self._system.kill(pid, signum)
        self._system.world.give_way()

    killpg = kill

    def register_at_fork(self, **_: object) -> None:
        pass

    def waitid(self, kind: int, pid: int, options: int) -> Any:
        process = self._system.world.processes[pid]
        code = process.exit_code
        if code is None:
            return None
        is_exit = code >= 0
        return SimpleNamespace(si_code=os.CLD_EXITED if is_exit else os.CLD_KILLED, si_status=abs(code))

    def pipe2(self, flags: int) -> tuple[int, int]:
        reader, writer = LocalEnd.pair(self._system.world, is_pipe=True)
        return reader.fd, writer.fd

    def read(self, fd: int, size: int) -> bytes:
        return os.read(fd, size) if fd < FIRST_FD else bytes(self._system.find(fd).recv(size))

    def write(self, fd: int, data: bytes) -> int:
        return os.write(fd, data) if fd < FIRST_FD else self._system.write(fd, data)

    def close(self, fd: int) -> None:
        if fd < FIRST_FD:
            os.close(fd)
        else:
            self._system.find(fd).close()


def _poll(world: World, wanted: Sequence[tuple[int, File]], timeout_s: float | None) -> list[tuple[int, int]]:
    """`wanted`: events that are waited for, and of what. Returns descriptors, and the events that are there."""

    def is_ready() -> bool:
        for mask, file in wanted:  # noqa: SIM110 (a generator takes twice as long)
            if file.events(mask):
                return True
        return False

    world.wait(is_ready, timeout_s, on=[file.topic for _, file in wanted])
    return [(file.fd, found) for mask, file in wanted if (found := file.events(mask))]


class _Poll:
    """`select.poll`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._masks: dict[int, int] = {}

    def register(self, what: Any, events: int = select.POLLIN | select.POLLOUT) -> None:
        self._masks[what if isinstance(what, int) else what.fileno()] = events | select.POLLHUP | select.POLLERR

    def unregister(self, what: Any) -> None:
        del self._masks[what if isinstance(what, int) else what.fileno()]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        descriptors = self._system.world.descriptors
        if unknown := self._masks.keys() - descriptors.keys():
            return [(fd, select.POLLNVAL) for fd in unknown]
        wanted = [(mask, descriptors[fd]) for fd, mask in self._masks.items()]
        return _poll(self._system.world, wanted, None if timeout_ms is None else timeout_ms / 1000)


class _Select:
    """`select`."""

    def __init__(self, system: System) -> None:
        self._system = system

    def poll(self) -> _Poll:
        return _Poll(self._system)


class _Selector:
    """`selectors.DefaultSelector`."""

    def __init__(self, system: System) -> None:
        self._world = system.world
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, what: Any, events: int, data: object = None) -> None:
        fd = what if isinstance(what, int) else what.fileno()
        self._keys[fd] = selectors.SelectorKey(what, fd, events, data)

    modify = register

    def unregister(self, what: Any) -> None:
        fd = what if isinstance(what, int) else what.fileno()
        self._keys = {known: key for known, key in self._keys.items() if known != fd and key.fileobj is not what}

    def get_key(self, what: Any) -> selectors.SelectorKey:
        return self._keys[what.fileno()]

    def close(self) -> None:
        self._keys = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        descriptors, ends = self._world.descriptors, select.POLLHUP | select.POLLERR
        wanted = []
        for fd, key in self._keys.items():
            if fd in descriptors:
                reads = select.POLLIN if key.events & selectors.EVENT_READ else 0
                writes = select.POLLOUT if key.events & selectors.EVENT_WRITE else 0
                wanted.append((reads | writes | ends, descriptors[fd]))
        found = []
        for fd, mask in _poll(self._world, wanted, timeout):
            key = self._keys[fd]
            reads = selectors.EVENT_READ if mask & ~select.POLLOUT else 0
            writes = selectors.EVENT_WRITE if mask & ~select.POLLIN else 0
            found.append((key, key.events & (reads | writes)))
        self._world.random.shuffle(found)
        return found


class _Selectors:
    """`selectors`."""

    def __init__(self, system: System) -> None:
        self._system = system

    def DefaultSelector(self) -> _Selector:  # noqa: N802
        return _Selector(self._system)


class _Signal:
    """`signal`: handlers and the wake-up descriptor of each process."""

    def __init__(self, system: System) -> None:
        self._system = system

    def getsignal(self, signum: int) -> Any:
        return self._system.process.handlers.get(signum, signal.SIG_DFL)

    def signal(self, signum: int, handler: Any) -> Any:
        before = self.getsignal(signum)
        self._system.process.handlers[signum] = handler
        return before

    def set_wakeup_fd(self, fd: int, *, warn_on_full_buffer: bool = True) -> int:
        process = self._system.process
        before, process.wakeup_fd = process.wakeup_fd, fd
        return before


class _Secrets:
    """`secrets`."""

    def __init__(self, system: System) -> None:
        self._random = system.world.random

    def token_hex(self, count: int) -> str:
        return f"{self._random.getrandbits(8 * count):0{2 * count}x}"
