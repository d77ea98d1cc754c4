"""The network of a simulated world: TCP connections that are slow, cut, reset, or lost in one direction; and what else
a process that has sockets needs of its system: selectors, signals.

Bytes arrive in order, in pieces, each after a random delay. A process that is frozen still receives: its kernel does.
What is sent over a cut way arrives when the cut ends. When a process ends, the other end of its connections hears it,
unless the way there is cut.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from tests.simulation.world import Process, Topic, World

__all__ = ["Machine", "Network"]

_ROOM = 1500
"""Bytes that a connection takes before the other end has read them."""
_FIN, _RESET = "fin", "reset"


class Machine(Process):
    """A process with an address, a process id and signals."""

    def __init__(self, network: Network, name: str, *, node: str, pid: int, host: str) -> None:
        """`node`: its name on the network; `host`: the name of the computer."""
        super().__init__(network.world, name)
        self.node, self.pid, self.host = node, pid, host
        self.handlers: dict[int, Callable[[int, FrameType | None], object] | int] = {}
        self.on_end.append(lambda: network.drop(self))

    def signal(self, number: int) -> None:
        """As the kernel delivers it."""
        if not self.is_alive:
            return
        handler = self.handlers.get(number, signal.SIG_DFL)
        if not callable(handler):
            self.end(-number)
            return
        handler(number, None)


class _Stream:
    """One end of a connection."""

    other: _Stream

    def __init__(self, network: Network, process: Machine, address: tuple[str, int]) -> None:
        self._network, self._world, self.process, self._address = network, network.world, process, address
        self._fd = self._world.number()
        self._world.descriptors[self._fd] = self
        self.topic = Topic(self._world)
        self._buffer = bytearray()
        self._flight: deque[bytes | str] = deque()
        """On the way to the other end."""
        self._held = 0
        self._next_at = 0.0
        self._timeout_s: float | None = None
        self._error: OSError | None = None
        self._at_end = self._has_shut = self.is_closed = self._has_vanished = False
        self.user_timeout_s = float("inf")

    # --- as a socket ---

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if option == socket.TCP_USER_TIMEOUT:
            self.user_timeout_s = value / 1000

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def send(self, data: bytes) -> int:
        self._await(self.is_writable)
        if self._error is not None:
            raise self._error
        count = min(len(data), self._room(), self._world.random.choice((40, 300, _ROOM)))
        self._put(bytes(data[:count]))
        self._network.messages += 1
        self._world.give_way()
        return count

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def recv(self, size: int) -> bytes:
        self._await(self.is_readable)
        if self._buffer:
            count = min(size, self._world.random.choice((40, 300, _ROOM)))
            data = bytes(self._buffer[:count])
            del self._buffer[:count]
            self.other.topic.tell()
            self._world.give_way()
            return data
        if self._error is not None:
            raise self._error
        return b""

    def shutdown(self, how: int) -> None:
        if self._error is not None:
            raise self._error
        self._has_shut = True
        self._put(_FIN)

    def close(self) -> None:
        """As TCP: what was not read is answered with a reset, by which what was sent last can be lost."""
        if self.is_closed:
            return
        self.is_closed = True
        self._world.descriptors.pop(self._fd, None)
        if self._error is not None:
            return
        if self._buffer:
            if self._world.random.random() < 0.5:
                self._flight.clear()
            self._put(_RESET)
        elif not self._has_shut:
            self._put(_FIN)

    def vanish(self) -> None:
        """Its machine has lost its power: the other end hears nothing any more."""
        self.close()
        self._flight.clear()
        self._has_vanished = True

    # --- as the system sees it ---

    def is_readable(self) -> bool:
        return bool(self._buffer) or self._at_end or self._error is not None

    def is_writable(self) -> bool:
        return self._error is not None or self._room() > 0

    def _room(self) -> int:
        return _ROOM - sum(len(each) for each in self._flight) - len(self.other._buffer)

    def _await(self, condition: Callable[[], bool]) -> None:
        if self.is_closed:
            raise OSError("the socket is closed")
        if self._timeout_s == 0.0:
            if not condition():
                raise BlockingIOError
        elif not self._world.wait(condition, self._timeout_s, on=(self.topic,)):
            raise TimeoutError("timed out")

    def _put(self, what: bytes | str) -> None:
        self._flight.append(what)
        self._next_at = max(self._next_at, self._world.now + self._network.delay())
        self._world.at(self._next_at, self._arrive)

    def _arrive(self) -> None:
        if self._network.is_cut(self.process.node, self.other.process.node):
            self._held += 1
        elif self._flight:
            self.other._take(self._flight.popleft())
        if self.is_closed and not self._flight:
            self._network.streams.pop(self, None)

    def release(self) -> None:
        """The way to the other end is free again."""
        for _ in range(self._held):
            self._world.at(self._world.now + self._network.delay(), self._arrive)
        self._held = 0

    def _take(self, what: bytes | str) -> None:
        if self._has_vanished:
            late = self._world.now + min(self.other.user_timeout_s, 1e6)
            self._world.at(late, lambda: self.other.fail(TimeoutError(110, "timed out")))
        elif what == _RESET:
            self.fail(ConnectionResetError(104, "Connection reset by peer"))
        elif self.is_closed or self._error is not None:
            if what != _FIN:
                self._put(_RESET)
        elif isinstance(what, bytes):
            self._buffer += what
        else:
            self._at_end = True
        self.topic.tell()

    def fail(self, error: OSError) -> None:
        self._error = self._error or error
        self._flight.clear()
        if self._world.random.random() < 0.5:
            self._buffer.clear()
        self.topic.tell()
        self.other.topic.tell()


class _Listener:
    """A socket that waits for connections."""

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        self._network, self._world, self._address = network, network.world, address
        if address in network.listeners:
            raise OSError(98, "Address already in use")
        network.listeners[address] = self
        self._fd = self._world.number()
        self._world.descriptors[self._fd] = self
        self.topic = Topic(self._world)
        self.process = network.process()
        self.backlog: deque[_Stream] = deque()

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def accept(self) -> tuple[_Stream, tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError
        stream = self.backlog.popleft()
        return stream, stream.other.getsockname()

    def is_readable(self) -> bool:
        return bool(self.backlog)

    def close(self) -> None:
        self._world.descriptors.pop(self._fd, None)
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for stream in self.backlog:
            stream.close()


class Network:
    """All connections of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slowest_s = 0.002
        self.messages = 0
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.streams: dict[_Stream, None] = {}
        self._cut: dict[tuple[str, str], int] = {}
        self._away_until: dict[str, float] = {}

    def delay(self) -> float:
        return self.world.random.uniform(0.0, self.slowest_s)

    def process(self) -> Machine:
        """The one that runs."""
        process = self.world.process
        assert isinstance(process, Machine)
        return process

    def listen(self, address: tuple[str, int]) -> _Listener:
        """In the process that runs."""
        return _Listener(self, address)

    def names(self) -> Mapping[str, Mapping[str, object]]:
        """For `World.replaced`."""
        return {
            "socket": {
                "create_connection": self.connect,
                "create_server": lambda address, **_: self.listen(address),
                "getaddrinfo": lambda *address, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)],
                "gethostname": lambda: self.process().host,
            },
            "os": {
                "getpid": lambda: self.process().pid,
                "register_at_fork": lambda **_: None,
            },
            "selectors": {"DefaultSelector": lambda: _Selector(self.world)},
            "signal": {
                "signal": self._handle,
                "getsignal": lambda number: self.process().handlers.get(number, signal.SIG_DFL),
            },
            "secrets": {"token_hex": lambda count: f"{self.world.random.getrandbits(8 * count):0{2 * count}x}"},
        }

    def connect(self, address: tuple[str, int], timeout: float) -> _Stream:
        """As ``socket.create_connection``."""
        world, process, node = self.world, self.process(), address[0]
        end = world.now + timeout

        world.sleep(self.delay())
        pause_s = 1.0  # Linux asks again so much later, and then twice as much
        while (
            self.is_cut(process.node, node)
            or self.is_cut(node, process.node)
            or (address not in self.listeners and world.now < self._away_until.get(node, 0.0))
        ):
            world.sleep(min(pause_s, end - world.now))
            if world.now >= end:
                raise TimeoutError("timed out")
            pause_s *= 2
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        near = _Stream(self, process, (f"10.0.0.{process.pid % 250}", world.number() % 60000))
        near.other = far = _Stream(self, listener.process, address)
        far.other = near
        self.streams |= {near: None, far: None}
        listener.backlog.append(far)
        listener.topic.tell()
        world.sleep(self.delay())
        return near

    # --- faults ---

    def is_cut(self, sender: str, receiver: str) -> bool:
        return bool(self._cut.get((sender, receiver)))

    def cut(self, sender: str, receiver: str, length_s: float) -> None:
        """Nothing that `sender` sends arrives there for so long."""
        way = sender, receiver
        self._cut[way] = self._cut.get(way, 0) + 1
        self.world.at(self.world.now + length_s, lambda: self._mend(way))
        for stream in self._between(*way) + self._between(receiver, sender):
            if stream.user_timeout_s < length_s:
                late = self.world.now + stream.user_timeout_s
                self.world.at(late, lambda stream=stream: stream.fail(TimeoutError(110, "timed out")))  # type: ignore[misc]

    def _mend(self, way: tuple[str, str]) -> None:
        self._cut[way] -= 1
        if not self._cut[way]:
            for stream in self._between(*way):
                stream.release()

    def _between(self, sender: str, receiver: str) -> list[_Stream]:
        return [s for s in self.streams if (s.process.node, s.other.process.node) == (sender, receiver)]

    def reset(self, node: str) -> None:
        """A middlebox forgets all connections of `node`."""
        for stream in list(self.streams):
            if node in (stream.process.node, stream.other.process.node):
                stream.fail(ConnectionResetError(104, "Connection reset by peer"))

    def vanish(self, process: Machine, length_s: float) -> None:
        """Its machine loses its power, for so long."""
        self._away_until[process.node] = self.world.now + length_s
        for stream in list(self.streams):
            if stream.process is process:
                stream.vanish()
        process.kill()

    def drop(self, process: Machine) -> None:
        """It has ended: its system closes what it had."""
        for listener in list(self.listeners.values()):
            if listener.process is process:
                listener.close()
        for stream in list(self.streams):
            if stream.process is process:
                stream.close()

    # --- signals ---

    def _handle(self, number: int, handler: Any) -> Any:
        handlers = self.process().handlers
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before


class _Selector:
    """`selectors.DefaultSelector`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, what: Any, events: int, data: object = None) -> None:
        fd = what if isinstance(what, int) else what.fileno()
        self._keys[fd] = selectors.SelectorKey(what, fd, events, data)

    def modify(self, what: Any, events: int, data: object = None) -> None:
        self.register(what, events, data)

    def unregister(self, what: Any) -> None:
        del self._keys[what.fileno()]

    def get_key(self, what: Any) -> selectors.SelectorKey:
        return self._keys[what.fileno()]

    def close(self) -> None:
        self._keys = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        topics = [self._world.descriptors[fd].topic for fd in self._keys]
        self._world.wait(lambda: any(map(self._is_ready, self._keys.values())), timeout, on=topics)
        found = [(key, key.events) for key in self._keys.values() if self._is_ready(key)]
        self._world.random.shuffle(found)
        return found

    def _is_ready(self, key: selectors.SelectorKey) -> bool:
        what: Any = self._world.descriptors[key.fd]
        return what.is_readable() or bool(key.events & selectors.EVENT_WRITE and what.is_writable())
