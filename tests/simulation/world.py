"""A world of processes and threads that is a function of its seed: clock, scheduler, locks, sockets.

The code under test is the package's own, as it is. `World.replaced` puts stand-ins into its modules for `threading`,
`time`, `queue`, `socket`, `select` and ``os._exit``; whatever starts a thread, waits, sleeps or reads the clock then
does so here. Threads are greenlets. One runs at a time, and gives way wherever it could meet another one (a lock, an
event, a queue, a socket, the store); the seed says which one goes on. The clock stands still while any thread can run
and jumps to the next deadline when none can, so a grace period of 30 s costs no time.

A thread can be cut off between any two such points: `Process.kill`. Interleavings inside of them are not played.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NoReturn, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Process", "Readable", "Stuck", "World"]

_PARTS = "alarm", "agreement", "cluster", "guard", "core", "capture.update_gate"
_PREFIXES = tuple(f"mindx_elastic.{part}" for part in _PARTS)
_STEP_S = 1e-6
"""What a switch takes: time passes, and no two moments are the same."""


class Stuck(AssertionError):
    """Threads wait, and nothing will ever wake them; or the schedule does not end."""


class Readable(Protocol):
    """A socket or pipe."""

    def is_readable(self) -> bool: ...


class Process:
    """One process of the job."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_alive = True
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.frozen_until = 0.0
        """None of its threads runs before: a machine that swaps, a debugger, a paused container."""
        self.main: _Thread | None = None
        self.on_end: list[Callable[[], None]] = []
        self.signals: list[int] = []
        """They have come, and their handlers have not run yet. Those run in the main thread, when it waits next."""
        self.handle: Callable[[int], None] | None = None

    def start(self, run: Callable[[], int]) -> None:
        """Run the main thread; the process ends with what `run` returns."""
        self.main = _Thread(self.world, target=lambda: self.end(run()), name=f"{self.name} main", process=self)
        self.main.start()

    def exit(self, code: int) -> NoReturn:
        """As ``os._exit``, in a thread of this process."""
        self.end(code)
        raise GreenletExit

    def kill(self) -> None:
        """As SIGKILL, from outside."""
        if self.is_alive:
            self.end(-9)

    def end(self, code: int) -> None:
        if self.is_alive:
            self.is_alive, self.exit_code, self.ended_at = False, code, self.world.now
            self.world._forget([thread for thread in self.world._threads if thread.process is self])
            self.world.note(f"{self.name} ends with {code}")
            for callback in self.on_end:
                callback()


class World:
    """All of it. `run` plays until no process is left."""

    def __init__(self, seed: int, *, most_switches: int = 200_000) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.story: list[tuple[float, str]] = []
        """What happened, for people."""
        self.switches = 0
        self._most_switches = most_switches
        self._hub = getcurrent()
        self._threads: list[_Thread] = []
        self._started: list[_Thread] = []
        self._numbers = 0
        self.descriptors: dict[int, Readable] = {}
        """What can be polled."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of what is to happen, and when."""
        self._due: list[Callable[[], None]] = []
        self._num_events = 0
        self.is_closed = False

    def note(self, text: str) -> None:
        self.story.append((self.now, text))

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let `act` happen at `when`: a fault, a message that arrives. It must not wait."""
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, act))

    @property
    def thread(self) -> _Thread | None:
        """The running one; None: the world itself."""
        current = getcurrent()
        return current.owner if isinstance(current, _Greenlet) else None

    @property
    def process(self) -> Process | None:
        thread = self.thread
        return None if thread is None else thread.process

    def _forget(self, threads: Iterable[_Thread]) -> None:
        for thread in threads:
            if thread in self._threads:
                self._threads.remove(thread)

    # --- the scheduler ---

    def run(self, until: float) -> None:
        """Until every process has ended. Raises Stuck where that does not come before `until`."""
        while any(thread.is_main for thread in self._threads):
            while self._events and self._events[0][0] <= self.now:
                self._due.append(heapq.heappop(self._events)[2])
            if self._due:
                self._due.pop(self.random.randrange(len(self._due)))()
            elif (thread := self._any_ready()) is not None:
                self.switches += 1
                self.now += _STEP_S
                thread.switch()
            else:
                later = [event[0] for event in self._events[:1]] + [thread.wakes_at for thread in self._threads]
                when = min(later, default=float("inf"))
                if when > until:
                    waiting = ", ".join(sorted(thread.name for thread in self._threads))
                    raise Stuck(f"after {self.now - 1000:.1f} s: {waiting} wait for ever")
                self.now = max(self.now, when)
            if self.switches > self._most_switches:
                raise Stuck(f"no end after {self.switches} switches")

    def _any_ready(self) -> _Thread | None:
        """One that can go on, as the seed says: the first one from a place at random on."""
        threads, now = self._threads, self.now
        first = int(self.random.random() * len(threads))
        for thread in itertools.chain(threads[first:], threads[:first]):
            if (thread.deadline <= now or thread.condition()) and thread.process.frozen_until <= now:
                return thread
        return None

    def wait(
        self, condition: Callable[[], bool], timeout_s: float | None = None, *, is_interruptible: bool = True
    ) -> bool:
        """Let others run until `condition` holds or the time is over; returns whether it holds. A signal to the process
        of a main thread is handled in between, but not where it waits inside of C++."""
        thread = self.thread
        if thread is None:
            assert condition(), "the world itself cannot wait"
            return True
        if self.is_closed or not thread.process.is_alive:
            raise GreenletExit
        process = thread.process
        hears = is_interruptible and process.handle is not None and thread is process.main
        until = thread.deadline = float("inf") if timeout_s is None else self.now + max(0.0, timeout_s)
        while True:
            thread.condition = (lambda: condition() or bool(process.signals)) if hears else condition
            self._hub.switch()
            if self.is_closed or not process.is_alive:
                raise GreenletExit
            if not hears or not process.signals:
                return condition()
            assert process.handle is not None
            process.handle(process.signals.pop(0))
            thread.deadline = until

    def give_way(self) -> None:
        """A point at which another thread may go on."""
        if self.thread is not None:
            self.wait(_always)

    def sleep(self, seconds: float, *, is_interruptible: bool = True) -> None:
        self.wait(_never, seconds, is_interruptible=is_interruptible)

    def close(self) -> None:
        """Unwind what is left of all threads, so that nothing of this world outlives it."""
        self.is_closed = True
        for thread in self._started:
            thread.unwind()

    # --- the stand-ins ---

    @contextmanager
    def replaced(
        self,
        more: Mapping[str, Mapping[str, object]] | None = None,
        *,
        prefixes: tuple[str, ...] = _PREFIXES,
        stand_ins: Mapping[str, object] | None = None,
    ) -> Iterator[None]:
        """The modules whose names begin so use this world. Closes it at the end. `more`: by module, further
        names in it. `stand_ins`: whole ones, by the name of the standard module."""
        own: dict[str, object] = {
            "threading": _Threading(self),
            "time": _Time(self),
            "queue": _Queues(self),
            "socket": _Sockets(self),
            "select": _Select(self),
            "os": _Os(self),
            **(stand_ins or {}),
        }
        more = more or {}
        replaced: dict[str, Any] = {name: sys.modules[name] for name in {**own, **more}}
        changed: list[tuple[Any, str, object]] = []
        for name, module in list(sys.modules.items()):
            if name.startswith(prefixes):
                for attribute, standard in replaced.items():
                    if vars(module).get(attribute) is standard:
                        found = _Either(own.get(attribute, standard), standard, more.get(attribute, {}))
                        setattr(module, attribute, found)
                        changed.append((module, attribute, standard))
        try:
            yield
        finally:
            self.close()
            for module, attribute, standard in changed:
                setattr(module, attribute, standard)


class _Either:
    """What a module of the package finds in the place of `standard`: `names` and `instead`, but only in the thread of
    the world.

    A guard of an earlier test may still linger in a thread of this process; that one meets the real clock.
    """

    def __init__(self, instead: object, standard: object, names: Mapping[str, object]) -> None:
        self._instead, self._standard, self._names = instead, standard, names
        self._ident = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._ident:
            return getattr(self._standard, name)
        return self._names[name] if name in self._names else getattr(self._instead, name)


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class _Greenlet(greenlet):
    owner: _Thread


class _Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        world: World,
        *,
        target: Callable[..., object],
        name: str = "",
        args: Sequence[Any] = (),
        daemon: bool | None = None,
        process: Process | None = None,
    ) -> None:
        owner = process or world.process
        assert owner is not None, "a thread belongs to a process"
        self.world, self.process, self.name, self.daemon = world, owner, name, daemon
        self.is_main = process is not None
        self.ident: int | None = None
        self.condition: Callable[[], bool] = _always
        self.deadline = float("inf")
        self._target, self._args = target, args
        self._greenlet = _Greenlet(self._run, world._hub)
        self._greenlet.owner = self

    def start(self) -> None:
        self.ident = self.world.number()
        self.world._threads.append(self)
        self.world._started.append(self)
        self.world.give_way()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self.world._forget([self])

    def switch(self) -> None:
        self._greenlet.switch()

    @property
    def is_over(self) -> bool:
        return self._greenlet.dead or not self.process.is_alive

    @property
    def wakes_at(self) -> float:
        """When time alone makes it ready."""
        frozen = self.process.frozen_until
        if frozen > self.world.now:
            return frozen
        return self.deadline

    def is_alive(self) -> bool:
        return self.ident is not None and not self.is_over

    def join(self, timeout: float | None = None) -> None:
        self.world.wait(lambda: self.is_over, timeout)

    def unwind(self) -> None:
        if self._greenlet.gr_frame is not None:
            self._greenlet.throw(GreenletExit)


class _Lock:
    """`threading.Lock`; with `reentrant` `threading.RLock`."""

    def __init__(self, world: World, *, reentrant: bool = False) -> None:
        self._world, self._reentrant = world, reentrant
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.thread
        if self._reentrant and self._count and self._owner is me:
            self._count += 1
            return True
        if not blocking and self._count:
            return False
        if blocking and not self._world.wait(self._is_free, None if timeout < 0 else timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        assert self._count or self._world.is_closed, "released a lock that nobody has"
        self._count = max(0, self._count - 1)

    def _is_free(self) -> bool:
        return self._count == 0

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    """`threading.Condition`."""

    def __init__(self, world: World, lock: _Lock | None = None) -> None:
        self._world = world
        self._lock = _Lock(world, reentrant=True) if lock is None else lock
        self._waiters: deque[list[bool]] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        notified = [False]
        self._waiters.append(notified)
        self._lock.release()
        try:
            return self._world.wait(lambda: notified[0], timeout)
        finally:
            if not notified[0] and notified in self._waiters:
                self._waiters.remove(notified)
            if not self._world.is_closed:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._world.now + timeout
        while not (found := predicate()):
            left = None if end is None else end - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._flag = world, False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._world.give_way()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.wait(self.is_set, timeout)


class _Threading:
    def __init__(self, world: World) -> None:
        self._world = world

    def Thread(self, **arguments: Any) -> _Thread:  # noqa: N802
        return _Thread(self._world, **arguments)

    def Lock(self) -> _Lock:  # noqa: N802
        return _Lock(self._world)

    def RLock(self) -> _Lock:  # noqa: N802
        return _Lock(self._world, reentrant=True)

    def Condition(self, lock: _Lock | None = None) -> _Condition:  # noqa: N802
        return _Condition(self._world, lock)

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self._world)

    def get_ident(self) -> int:
        thread = self._world.thread
        return 0 if thread is None or thread.ident is None else thread.ident

    def current_thread(self) -> Any:
        return self._world.thread

    def main_thread(self) -> Any:
        process = self._world.process
        return None if process is None else process.main

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Time:
    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        return 1.8e9 + self._world.now

    def monotonic_ns(self) -> int:
        return int(self._world.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _SimpleQueue:
    def __init__(self, world: World) -> None:
        self._world, self._items = world, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._world.give_way()

    def get(self) -> Any:
        self._world.wait(lambda: bool(self._items))
        return self._items.popleft()


class _Queues:
    def __init__(self, world: World) -> None:
        self._world = world

    def SimpleQueue(self) -> _SimpleQueue:  # noqa: N802
        return _SimpleQueue(self._world)

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)


class _Socket:
    """One end of a pair that does not block."""

    def __init__(self, world: World) -> None:
        self._world, self._fd = world, world.number()
        self.buffer = bytearray()
        self.other: _Socket | None = None
        world.descriptors[self._fd] = self

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def send(self, data: bytes) -> int:
        if self.other is None:
            raise OSError("closed")
        self.other.buffer += data
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self.buffer:
            raise BlockingIOError
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    def is_readable(self) -> bool:
        return bool(self.buffer)

    def close(self) -> None:
        self.other = None


class _Sockets:
    def __init__(self, world: World) -> None:
        self._world = world

    def socketpair(self) -> tuple[_Socket, _Socket]:
        one, other = _Socket(self._world), _Socket(self._world)
        one.other, other.other = other, one
        return one, other

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class _Poll:
    """`select.poll`, for reading."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fds: set[int] = set()

    def register(self, what: Any, events: int = select.POLLIN) -> None:
        self._fds.add(what if isinstance(what, int) else what.fileno())

    def unregister(self, what: Any) -> None:
        self._fds.remove(what if isinstance(what, int) else what.fileno())

    def _readable(self) -> list[int]:
        return [fd for fd in self._fds if self._world.descriptors[fd].is_readable()]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        descriptors = self._world.descriptors
        self._world.wait(
            lambda: any(descriptors[fd].is_readable() for fd in self._fds),
            None if timeout_ms is None else timeout_ms / 1000,
        )
        return [(fd, select.POLLIN) for fd in self._readable()]


class _Select:
    def __init__(self, world: World) -> None:
        self._world = world

    def poll(self) -> _Poll:
        return _Poll(self._world)

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class _Os:
    def __init__(self, world: World) -> None:
        self._world = world

    def _exit(self, code: int) -> NoReturn:
        process = self._world.process
        assert process is not None
        process.exit(code)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
