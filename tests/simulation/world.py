"""A world of processes and threads that is a function of its seed: clock, scheduler, locks.

The code under test is the package's own, as it is. `World.replaced` puts stand-ins into its modules: for `threading`,
`time` and `queue` those of this file, for `os`, `select`, `selectors`, `signal` and `socket` those of `system`. What
starts a thread, waits, sleeps or reads the clock then does so here. Threads are greenlets. One runs at a time, and
gives way wherever it could meet another one (a lock, an event, a queue, a socket, the store); the seed says which one
goes on. The clock stands still while any thread can run and jumps to the next deadline when none can, so a grace
period of 30 s costs no time.

A thread can be cut off between any two such points: `Process.kill`. Interleavings inside of them are not played. A
thread that waits is looked at when one of the topics (`Topic`) that it waits on has changed.
"""

from __future__ import annotations

import heapq
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from inspect import isfunction
from random import Random
from threading import active_count, get_ident
from types import ModuleType
from typing import Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["FIRST_FD", "File", "Process", "Stuck", "Topic", "World", "instead_of"]

_PARTS = "alarm", "agreement", "cluster", "guard", "core", "capture.update_gate"
_PREFIXES = tuple(f"mindx_elastic.{part}" for part in _PARTS)
_NEVER = float("inf")
FIRST_FD = 1 << 20
"""Descriptors from here on are a world's."""
_TURNS = 0.25
"""How often a thread gives way before it takes a free lock."""
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


class File:
    """What the running process has a descriptor of, and can poll: a socket, a pipe, a process."""

    def __init__(self, world: World, owner: Process | None = None) -> None:
        """`owner`: the process whose it is, if that is not the running one."""
        self.world, self.topic = world, Topic(world)
        self.fd, self.is_closed = FIRST_FD + world.number(), False
        self.owner = owner or world.process
        world.descriptors[self.fd] = self
        if self.owner is not None:
            self.owner.files[self.fd] = self

    def fileno(self) -> int:
        return -1 if self.is_closed else self.fd

    def events(self, wanted: int) -> int:
        """Those of `wanted` that are there, as `select.poll` gives them."""
        return 0

    def close(self) -> None:
        self.is_closed = True
        self.world.descriptors.pop(self.fd, None)
        if self.owner is not None:
            self.owner.files.pop(self.fd, None)


class Clock:
    """What a machine shows as the time of day."""

    ahead_s = 0.0


class Process:
    """One process of the job; for who has started it, its `subprocess.Popen`."""

    def __init__(self, world: World, name: str, *, node: str = "", host: str = "", pid: int | None = None) -> None:
        """`node`: its name on the network; `host`: the name of the computer; `pid`: of the process that it replaces."""
        self.world, self.name, self.node, self.host = world, name, node, host
        self.pid = 100 + len(world.processes) if pid is None else pid
        world.processes[self.pid] = self
        self.is_alive = True
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.topic = Topic(world)
        """Its end."""
        self.thaws_at = 0.0
        """`frozen_until`."""
        self.is_stopped = False
        self.threads: dict[_Thread, None] = {}
        self.clock = world.clocks.setdefault(host, Clock())
        """Of its machine."""
        self.main: _Thread | None = None
        self.on_end: list[Callable[[], None]] = []
        self.files: dict[int, File] = {}
        """What its system closes at its end."""
        self.handlers: dict[int, Any] = {}
        self.wakeup_fd = -1
        self.signals: list[int] = []
        """They have come, and their handlers have not run yet. Those run in the main thread, when it waits next."""
        self.hears: Callable[[int], bool] | None = None
        """In place of a handler: takes a signal; False: the process has none for it."""
        self.heard: list[tuple[float, int]] = []
        """The signals that it was sent, each with its time."""

    @property
    def frozen_until(self) -> float:
        """None of its threads runs before: a machine that swaps, a debugger, a paused container."""
        return self.thaws_at

    @frozen_until.setter
    def frozen_until(self, until: float) -> None:
        self.thaws_at = until
        self.world.at(until, lambda: self.world.candidates.extend(self.threads))

    def freeze(self, length_s: float) -> None:
        """Stopped, and continued so much later."""
        self.frozen_until, self.is_stopped = self.world.now + length_s, True
        self.world.at(self.frozen_until, lambda: setattr(self, "is_stopped", False))

    def poll(self) -> int | None:
        return self.exit_code

    returncode = property(poll)

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
            self.end(-signal.SIGKILL)

    def end(self, code: int) -> None:
        if self.is_alive:
            self.is_alive, self.exit_code, self.ended_at = False, code, self.world.now
            self.world.num_running -= self.main is not None
            self.topic.tell()
            self.world.note(f"{self.name} ends with {code}")
            for file in list(self.files.values()):
                file.close()
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
        self.clocks: dict[str, Clock] = {}
        """Of computers, by their names."""
        self.processes: dict[int, Process] = {}
        self.descriptors: dict[int, File] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        """A heap of what is to happen, and when."""
        self._due: list[Callable[[], object]] = []
        self._num_events = 0
        self._failure: Exception | None = None
        self.is_closed = False

    def note(self, text: str) -> None:
        self.story.append((self.now, text))

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def at(self, when: float, act: Callable[[], object]) -> None:
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
        thread = self._next()
        while thread is not None:
            found = thread.greenlet.switch()
            self.thread = None
            thread = found if isinstance(found, _Thread) else self._next()
        if self._failure is not None:
            raise self._failure
        if self.num_running:
            waiting = ", ".join(sorted(thread.name for thread in self._started if not thread.is_over))
            raise Stuck(f"after {self.now - 1000:.1f} s: {waiting} wait for ever")

    def _next(self) -> _Thread | None:
        """The thread that goes on, as the seed says, after what happens before; the clock moves where none can. None:
        it is over."""
        events, deadlines, candidates, random = self._events, self._deadlines, self.candidates, self.random.random
        while self.num_running and self._failure is None:
            now = self.now
            while events and events[0][0] <= now:
                self._due.append(heapq.heappop(events)[2])
            if self._due:
                self._happen(self._due.pop(int(random() * len(self._due))))
                continue
            while deadlines and deadlines[0][0] <= now:
                when, _, thread = heapq.heappop(deadlines)
                if thread.deadline == when:  # else that wait is over
                    candidates.append(thread)
            while candidates:
                place = int(random() * len(candidates))
                thread, last = candidates[place], candidates.pop()
                if last is not thread:
                    candidates[place] = last
                if thread.can_go_on(now):
                    self._count()
                    return thread
            while deadlines and deadlines[0][2].deadline != deadlines[0][0]:
                heapq.heappop(deadlines)
            soon = deadlines[0][0] if deadlines else _NEVER
            if events and events[0][0] < soon:
                soon = events[0][0]
            if soon > self._until:
                return None
            self.now = soon
        return None

    def _happen(self, act: Callable[[], object]) -> None:
        """In whatever thread notices that it is time; an error of the simulation must not meet the handlers of that."""
        before, self.thread = self.thread, None
        try:
            act()
        except Exception as error:
            self._failure = error
        self.thread = before

    def _count(self) -> None:
        """A thread goes on."""
        self.now += _STEP_S
        self.switches += 1
        if self.switches >= self._counted + self._most_switches:
            if self.now < self._counted_at + 1.0:
                busy_s = self.now - self._counted_at
                self._failure = Stuck(f"{self._most_switches} switches in {busy_s:.3f} s: some are busy")
            self._counted, self._counted_at = self.switches, self.now

    def wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        on: Sequence[Topic] = (),
        is_interruptible: bool = True,
    ) -> bool:
        """Let others run until `condition` holds or the time is over; returns whether it holds. `on`: what is told when
        the condition may have changed. A signal to the process of a main thread is handled in between, but not where
        it waits inside of C++."""
        thread = self.thread
        if thread is None:
            assert condition(), "the world itself cannot wait"
            return True
        process = thread.process
        if self.is_closed or not process.is_alive:
            raise GreenletExit
        thread.signals = signals = process.signals if is_interruptible and thread is process.main else ()
        if not self.candidates and not signals and self._is_alone(process) and condition():
            self._count()
            return True
        until = _NEVER if timeout_s is None else self.now + timeout_s
        self._let_others_run(thread, condition, until, on)
        while signals:
            process.handlers[signum := process.signals.pop(0)](signum, None)
            thread.signals = signals
            self._let_others_run(thread, condition, until, on)
        return condition()

    def _is_alone(self, process: Process) -> bool:
        """Nothing is to happen now but what the running thread of `process` does."""
        now, events, deadlines = self.now, self._events, self._deadlines
        return (
            (not events or events[0][0] > now)
            and (not deadlines or deadlines[0][0] > now)
            and not self._due
            and process.thaws_at <= now
        )

    def _let_others_run(
        self, thread: _Thread, condition: Callable[[], bool], until: float, on: Sequence[Topic]
    ) -> None:
        """Until the running `thread` can go on."""
        thread.condition, thread.deadline = condition, until
        if thread.can_go_on(self.now):
            self.candidates.append(thread)
        for topic in on:
            topic.waiters[thread] = None
        if until < _NEVER:
            self._num_events += 1
            heapq.heappush(self._deadlines, (until, self._num_events, thread))
        found = self._next()
        if found is not thread:
            if found is None or not found.greenlet:  # a greenlet begins as deep in calls as who begins it is: the hub
                self._hub.switch(found)
            else:
                found.greenlet.switch()
            self.thread = thread
        for topic in on:
            topic.waiters.pop(thread, None)
        if self.is_closed or not thread.process.is_alive:
            raise GreenletExit

    def give_way(self) -> None:
        """A point at which another thread may go on."""
        if self.thread is not None and not self.is_closed:
            self.wait(_always)

    def sleep(self, seconds: float, *, is_interruptible: bool = True) -> None:
        self.wait(_never, seconds, is_interruptible=is_interruptible)

    def close(self) -> None:
        """Unwind what is left of all threads, so that nothing of this world outlives it."""
        self.is_closed = True
        for thread in self._started:
            thread.unwind()

    # --- the stand-ins ---

    def modules(self, stand_ins: Mapping[str, object]) -> dict[str, Any]:
        """What a module of the package finds in the places of the standard ones, by their names."""
        own = {"threading": _Threading(self), "time": _Time(self), "queue": _Queues(self), **stand_ins}
        return {name: _Either(import_module(name), _functions(instead)) for name, instead in own.items()}

    @contextmanager
    def replaced(self, stand_ins: Mapping[str, object], *, prefixes: tuple[str, ...] = _PREFIXES) -> Iterator[None]:
        """The modules whose names begin so use this world, and `stand_ins`, by the name of the standard module. Closes
        the world at the end."""
        found = self.modules(stand_ins)
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


@contextmanager
def instead_of(stand_ins: Mapping[Any, Mapping[str, object]]) -> Iterator[None]:
    """What modules have by these names, for a while."""
    before = [(module, name, getattr(module, name)) for module, names in stand_ins.items() for name in names]
    for module, names in stand_ins.items():
        for name, instead in names.items():
            setattr(module, name, instead)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


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
        if active_count() == 1:
            vars(self).update(self._names)  # a tenth of the time of a schedule went into `__getattr__`

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
        self.signals: Sequence[int] = ()
        """Those that wake it up."""
        self._topic = Topic(world)
        """Its end."""
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
            self._topic.tell()

    @property
    def is_over(self) -> bool:
        return self.has_ended or not self.process.is_alive

    def can_go_on(self, now: float) -> bool:
        process = self.process
        if not process.is_alive or process.thaws_at > now or self.has_ended:
            return False
        return self.deadline <= now or self.condition() or bool(self.signals)

    def is_alive(self) -> bool:
        return self.ident is not None and not self.is_over

    def join(self, timeout: float | None = None) -> None:
        if not self.world.is_closed:
            self.world.wait(lambda: self.is_over, timeout, on=(self._topic, self.process.topic))

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
        world, me = self._world, self._world.thread
        if self._reentrant and self._count and self._owner is me:
            self._count += 1
            return True
        if not blocking and self._count:
            return False
        # Many locks are taken and few are fought for: at one that is free, another thread goes on now and then.
        meets = self._count or world.is_closed or world.random.random() < _TURNS
        if meets and blocking and not world.wait(self._is_free, None if timeout < 0 else timeout, on=self._topic):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if not self.is_held() and not self._world.is_closed:
            raise RuntimeError("release unlocked lock")
        self._count = max(0, self._count - 1)
        self._topic[0].tell()

    def is_held(self) -> bool:
        """By the running thread; one that is not reentrant by any."""
        return self._count > 0 and (not self._reentrant or self._owner is self._world.thread)

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
        if not self._lock.is_held() and not self._world.is_closed:
            raise RuntimeError("cannot notify on un-acquired lock")
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
