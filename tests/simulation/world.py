"""A world of processes and threads that is a function of its seed: clock, scheduler, locks, sockets.

The code under test is the package's own, as it is. `World.replaced` puts stand-ins into its modules for `threading`,
`time`, `queue`, `socket`, `select` and ``os._exit``; whatever starts a thread, waits, sleeps or reads the clock then
does so here. Threads are greenlets. One runs at a time, and gives way wherever it could meet another one (a lock, an
event, a queue, a socket, the store); the seed says which one goes on. The clock stands still while any thread can run
and jumps to the next deadline when none can, so a grace period of 30 s costs no time.

A thread can be cut off between any two such points: `Process.kill`. Interleavings inside of them are not played.

A thread that waits on topics (`Topic`) is looked at when one of them has changed; any other one before each switch.
"""

from __future__ import annotations

import heapq
import select
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import isfunction
from random import Random
from threading import get_ident
from types import ModuleType
from typing import Any, NoReturn, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Process", "Readable", "Stuck", "Topic", "World"]

_PARTS = "alarm", "agreement", "cluster", "guard", "core", "capture.update_gate"
_PREFIXES = tuple(f"mindx_elastic.{part}" for part in _PARTS)
_NEVER = float("inf")
_STEP_S = 1e-6
"""What a switch takes: time passes, and no two moments are the same."""


class Stuck(AssertionError):
    """Threads wait, and nothing will ever wake them; or the schedule does not end."""


class Topic:
    """Something that threads wait for. Whatever changes it tells them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.waiters: dict[_Thread, None] = {}

    def tell(self) -> None:
        """Those that wait look again whether they can go on."""
        if self.waiters:
            self._world.candidates.extend(self.waiters)


class Readable(Protocol):
    """A socket or pipe."""

    topic: Topic

    def is_readable(self) -> bool: ...


class Clock:
    """What a machine shows as the time of day."""

    ahead_s = 0.0


class Process:
    """One process of the job."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_alive = True
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.end_topic = Topic(world)
        self.thaws_at = 0.0
        """`frozen_until`."""
        self.threads: dict[_Thread, None] = {}
        self.clock = Clock()
        """Of its machine."""
        self.main: _Thread | None = None
        self.on_end: list[Callable[[], None]] = []
        self.signals: list[int] = []
        """They have come, and their handlers have not run yet. Those run in the main thread, when it waits next."""
        self.handle: Callable[[int], None] | None = None

    @property
    def frozen_until(self) -> float:
        """None of its threads runs before: a machine that swaps, a debugger, a paused container."""
        return self.thaws_at

    @frozen_until.setter
    def frozen_until(self, until: float) -> None:
        self.thaws_at = until
        self.world.at(until, lambda: self.world.candidates.extend(self.threads))

    def take_signal(self, signum: int) -> None:
        """One for which it has a handler."""
        self.signals.append(signum)
        self.world.candidates.extend(() if self.main is None else (self.main,))

    def start(self, run: Callable[[], int]) -> None:
        """Run the main thread; the process ends with what `run` returns."""
        self.main = _Thread(self.world, target=lambda: self.end(run()), name=f"{self.name} main", process=self)
        self.world.num_running += self.is_alive
        self.main.start()

    def run_beside(self, run: Callable[[], object]) -> None:
        """Run a thread; the world does not wait for the end of this process."""
        _Thread(self.world, target=run, name=self.name, process=self).start()

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
            self.world.num_running -= self.main is not None
            self.end_topic.tell()
            self.world.note(f"{self.name} ends with {code}")
            for callback in self.on_end:
                callback()


class World:
    """All of it. `run` plays until no process is left."""

    def __init__(self, seed: int, *, most_switches: int = 20_000) -> None:
        """`most_switches`: in a simulated second; with more of them, threads are busy for nothing."""
        self.random = Random(seed)
        self.now = 1000.0
        self.story: list[tuple[float, str]] = []
        """What happened, for people."""
        self.thread: _Thread | None = None
        """The running one; None: the world itself."""
        self.candidates: list[_Thread] = []
        """Threads that may be able to go on."""
        self._others: list[_Thread] = []
        """Threads that wait on no topic: they may always be able to go on."""
        self._deadlines: list[tuple[float, int, _Thread]] = []
        """A heap of the ends of waits, past ones among them."""
        self.switches = 0
        self._most_switches, self._counted, self._counted_at = most_switches, 0, self.now
        self._until = _NEVER
        self._hub = getcurrent()
        self._started: list[_Thread] = []
        self.num_running = 0
        """Processes whose main thread has not ended."""
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
    def process(self) -> Process | None:
        return None if self.thread is None else self.thread.process

    # --- the scheduler ---

    def run(self, until: float) -> None:
        """Until every process has ended. Raises Stuck where that does not come before `until`."""
        self._until = until
        while self.num_running:
            while self._events and self._events[0][0] <= self.now:
                self._due.append(heapq.heappop(self._events)[2])
            if self.switches >= self._counted + self._most_switches:
                if self.now < self._counted_at + 1.0:
                    raise Stuck(f"{self._most_switches} switches in {self.now - self._counted_at:.3f} s: some are busy")
                self._counted, self._counted_at = self.switches, self.now
            if self._due:
                self._due.pop(self.random.randrange(len(self._due)))()
            elif (thread := self._next()) is not None:
                thread.greenlet.switch()
                self.thread = None
            elif self._events and self._events[0][0] <= until:
                self.now = max(self.now, self._events[0][0])
            elif self.switches < self._counted + self._most_switches:
                waiting = ", ".join(sorted(thread.name for thread in self._started if not thread.is_over))
                raise Stuck(f"after {self.now - 1000:.1f} s: {waiting} wait for ever")

    def _next(self) -> _Thread | None:
        """The thread that goes on, as the seed says; the clock moves where none can before. None: the world itself has
        something to do first."""
        events, deadlines, candidates = self._events, self._deadlines, self.candidates
        if self._due or self.switches >= self._counted + self._most_switches:
            return None
        while not events or events[0][0] > self.now:
            while deadlines and deadlines[0][0] <= self.now:
                candidates.append(heapq.heappop(deadlines)[2])
            if (found := self._any_ready()) is not None:
                self.switches += 1
                self.now += _STEP_S
                return found
            while deadlines and deadlines[0][2].deadline != deadlines[0][0]:
                heapq.heappop(deadlines)  # that wait is over
            if not deadlines or deadlines[0][0] > self._until or (events and events[0][0] <= deadlines[0][0]):
                return None
            self.now = max(self.now, deadlines[0][0])
        return None

    def _any_ready(self) -> _Thread | None:
        """One that can go on, as the seed says. Candidates that cannot are none any more."""
        now, random, candidates, others = self.now, self.random.random, self.candidates, self._others
        first = int(random() * (len(candidates) + len(others))) - len(candidates) if others else -1
        if first >= 0:
            for thread in others[first:] + others[:first]:
                if thread.can_go_on(now):
                    return thread
        while candidates:
            place = int(random() * len(candidates))
            thread, last = candidates[place], candidates.pop()
            if last is not thread:
                candidates[place] = last
            if thread.can_go_on(now):
                return thread
        for thread in others if first < 0 else ():
            if thread.can_go_on(now):
                return thread
        return None

    def wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        is_interruptible: bool = True,
        on: Sequence[Topic] | None = None,
    ) -> bool:
        """Let others run until `condition` holds or the time is over; returns whether it holds. A signal to the process
        of a main thread is handled in between, but not where it waits inside of C++. `on`: what is told when the
        condition may have changed; None: nothing may be, and it is looked at before each switch."""
        thread = self.thread
        if thread is None:
            assert condition(), "the world itself cannot wait"
            return True
        until = _NEVER if timeout_s is None else self.now + max(0.0, timeout_s)
        process = thread.process
        if process.handle is not None and is_interruptible and thread is process.main:
            signals = process.signals
            self._let_others_run(thread, lambda: condition() or bool(signals), until, on)
            while signals:
                process.handle(signals.pop(0))
                self._let_others_run(thread, lambda: condition() or bool(signals), until, on)
        else:
            self._let_others_run(thread, condition, until, on)
        return condition()

    def _let_others_run(
        self, thread: _Thread, condition: Callable[[], bool], until: float, on: Sequence[Topic] | None
    ) -> None:
        """Until the running `thread` can go on."""
        if self.is_closed or not thread.process.is_alive:
            raise GreenletExit
        thread.condition, thread.deadline = condition, until
        if on is None:
            self._others.append(thread)
        elif thread.can_go_on(self.now):
            self.candidates.append(thread)
        if until < _NEVER:
            self._num_events += 1
            heapq.heappush(self._deadlines, (until, self._num_events, thread))
        found = self._next()
        if found is not thread:
            for topic in on or ():
                topic.waiters[thread] = None
            (self._hub if found is None else found.greenlet).switch()
            self.thread = thread
            for topic in on or ():
                topic.waiters.pop(thread, None)
            if self.is_closed or not thread.process.is_alive:
                raise GreenletExit
        if on is None:
            self._others.remove(thread)

    def give_way(self) -> None:
        """A point at which another thread may go on."""
        if self.thread is not None and not self.is_closed:
            self.wait(_always, on=())

    def sleep(self, seconds: float, *, is_interruptible: bool = True) -> None:
        self.wait(_never, seconds, is_interruptible=is_interruptible, on=())

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
        names = {name: _functions(instead) for name, instead in own.items()} | (
            {name: {**_functions(own.get(name)), **found} for name, found in (more or {}).items()}
        )
        found = {name: _Either(sys.modules[name], instead) for name, instead in names.items()}
        changed = []
        for module, attribute, standard in _users_of(frozenset(found), prefixes, len(sys.modules)):
            if vars(module)[attribute] is standard:
                setattr(module, attribute, found[attribute])
                changed.append((module, attribute, standard))
        try:
            yield
        finally:
            self.close()
            for module, attribute, standard in changed:
                setattr(module, attribute, standard)


@lru_cache(8)
def _users_of(
    names: Collection[str], prefixes: tuple[str, ...], num_modules: int
) -> list[tuple[ModuleType, str, ModuleType]]:
    """The modules that are loaded and whose names begin so, and which of the standard modules `names` each has."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(prefixes)]
    standards = [(name, sys.modules[name]) for name in sorted(names)]
    return [(each, name, found) for each in modules for name, found in standards if vars(each).get(name) is found]


def _functions(instead: object) -> dict[str, object]:
    """What a stand-in has in place of a standard module's."""
    return {name: getattr(instead, name) for name, what in vars(type(instead)).items() if isfunction(what)}


class _Either:
    """What a module of the package finds in the place of `standard`: with `names` in it, but only in the thread of the
    world.

    A guard of an earlier test may still linger in a thread of this process; that one meets the real clock.
    """

    def __init__(self, standard: ModuleType, names: Mapping[str, object]) -> None:
        self._standard = vars(standard)
        self._names = {**self._standard, **names}
        self._ident = get_ident()

    def __getattr__(self, name: str) -> Any:
        try:
            return (self._names if get_ident() == self._ident else self._standard)[name]
        except KeyError:
            raise AttributeError(name) from None


def _always() -> bool:
    return True


def _never() -> bool:
    return False


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
        self.ident: int | None = None
        self.condition: Callable[[], bool] = _always
        self.deadline = _NEVER
        self.has_ended = False
        self._target, self._args = target, args
        self.greenlet = greenlet(self._run, world._hub)

    def start(self) -> None:
        self.ident = self.world.number()
        self.process.threads[self] = None
        self.world._started.append(self)
        self.world.candidates.append(self)
        self.world.give_way()

    def _run(self) -> None:
        self.world.thread = self
        try:
            self._target(*self._args)
        finally:
            self.has_ended = True
            del self.process.threads[self]

    @property
    def is_over(self) -> bool:
        return self.has_ended or not self.process.is_alive

    def can_go_on(self, now: float) -> bool:
        process = self.process
        is_kept = not process.is_alive or process.thaws_at > now or self.has_ended
        return not is_kept and (self.deadline <= now or self.condition())

    def is_alive(self) -> bool:
        return self.ident is not None and not self.is_over

    def join(self, timeout: float | None = None) -> None:
        if not self.world.is_closed:
            self.world.wait(lambda: self.is_over, timeout)

    def unwind(self) -> None:
        if self.greenlet.gr_frame is not None:
            self.world.thread = self
            self.greenlet.throw(GreenletExit)
            self.world.thread = None


class _Lock:
    """`threading.Lock`; with `reentrant` `threading.RLock`."""

    def __init__(self, world: World, *, reentrant: bool = False) -> None:
        self._world, self._reentrant = world, reentrant
        self._owner: object = None
        self._count = 0
        self._topic = (Topic(world),)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.thread
        if self._reentrant and self._count and self._owner is me:
            self._count += 1
            return True
        if not blocking and self._count:
            return False
        if blocking and not self._world.wait(self._is_free, None if timeout < 0 else timeout, on=self._topic):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        assert self._count or self._world.is_closed, "released a lock that nobody has"
        self._count = max(0, self._count - 1)
        self._topic[0].tell()

    def _is_free(self) -> bool:
        return self._count == 0

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
        self._topic = (Topic(world),)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        notified = [False]
        self._waiters.append(notified)
        self._lock.release()
        try:
            return self._world.wait(lambda: notified[0], timeout, on=self._topic)
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
        self._topic[0].tell()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._flag = world, False
        self._topic = (Topic(world),)

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._topic[0].tell()
        self._world.give_way()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.wait(self.is_set, timeout, on=self._topic)


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


class _Time:
    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        process = self._world.process
        return 1.8e9 + self._world.now + (0.0 if process is None else process.clock.ahead_s)

    def monotonic_ns(self) -> int:
        return int(self._world.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)


class _SimpleQueue:
    def __init__(self, world: World) -> None:
        self._world, self._items = world, deque[Any]()
        self._topic = (Topic(world),)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._topic[0].tell()
        self._world.give_way()

    def get(self) -> Any:
        self._world.wait(lambda: bool(self._items), on=self._topic)
        return self._items.popleft()


class _Queues:
    def __init__(self, world: World) -> None:
        self._world = world

    def SimpleQueue(self) -> _SimpleQueue:  # noqa: N802
        return _SimpleQueue(self._world)


class _Socket:
    """One end of a pair that does not block."""

    def __init__(self, world: World) -> None:
        self._world, self._fd = world, world.number()
        self.buffer = bytearray()
        self.topic = Topic(world)
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
        self.other.topic.tell()
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
            on=[descriptors[fd].topic for fd in self._fds],
        )
        return [(fd, select.POLLIN) for fd in self._readable()]


class _Select:
    def __init__(self, world: World) -> None:
        self._world = world

    def poll(self) -> _Poll:
        return _Poll(self._world)


class _Os:
    def __init__(self, world: World) -> None:
        self._world = world

    def _exit(self, code: int) -> NoReturn:
        process = self._world.process
        assert process is not None
        process.exit(code)
