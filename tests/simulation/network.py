"""The network of a simulated world: TCP connections that are slow, cut, reset, or lost in one direction.

Bytes arrive in order, in pieces, each after a random delay. A process that is frozen still receives: its kernel does.
What is sent over a cut way arrives when the cut ends. When a process ends, the other end of its connections hears it,
unless the way there is cut. TCP neither doubles nor reorders within a connection; what a connection that was lost had
sent can arrive after what the next one says (`Network.leave_behind`).
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Callable

from tests.simulation.world import File, Process, World

__all__ = ["LocalEnd", "Network"]

_ROOM = 1500
"""Bytes that a connection takes before the other end has read them."""
_PIPE_BYTES = 1 << 16
_IN, _OUT, _ENDS = select.POLLIN, select.POLLOUT, select.POLLERR | select.POLLHUP
_FIN, _RESET = "fin", "reset"


class LocalEnd(File):
    """One end of a pipe, or of a pair of sockets, that does not block."""

    other: LocalEnd

    def __init__(self, world: World, *, reads: bool, writes: bool) -> None:
        super().__init__(world)
        self._reads, self._writes, self._buffer = reads, writes, bytearray()

    @classmethod
    def pair(cls, world: World, *, is_pipe: bool) -> tuple[LocalEnd, LocalEnd]:
        """Of a pipe the first one reads."""
        one, other = cls(world, reads=True, writes=not is_pipe), cls(world, reads=not is_pipe, writes=True)
        one.other, other.other = other, one
        return one, other

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def events(self, wanted: int) -> int:
        at_end = self.other.is_closed
        if not self._reads:
            return wanted & (select.POLLOUT | (select.POLLERR if at_end else 0))
        is_readable = self._buffer or (at_end and self._writes)
        return wanted & ((select.POLLIN if is_readable else 0) | (select.POLLHUP if at_end else 0))

    def send(self, data: bytes) -> int:
        if self.other.is_closed:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        content = data[: _PIPE_BYTES - len(self.other._buffer)]
        is_cut = len(content) < len(data) <= select.PIPE_BUF  # so much goes into a pipe whole or not at all
        if not content or (is_cut and not self._reads):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.other._buffer.extend(content)
        self.other.topic.tell()
        return len(content)

    def recv(self, size: int) -> bytes:
        if not self._buffer and not self.other.is_closed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def close(self) -> None:
        super().close()
        self.other.topic.tell()


class Stream(File):
    """One end of a connection."""

    other: Stream
    is_accepted = False
    """The other end has opened the connection."""

    def __init__(self, network: Network, process: Process, address: tuple[str, int]) -> None:
        super().__init__(network.world, process)
        self._network, self.process, self._address = network, process, address
        self._buffer = bytearray()
        self._flight: deque[bytes | str] = deque()
        """On the way to the other end."""
        self._held = 0
        self._next_at = 0.0
        self._timeout_s: float | None = None
        self._error: OSError | None = None
        """It is told once: what is read then is the end, and what is written finds a broken pipe."""
        self._at_end = self._has_shut = self._is_broken = self._has_vanished = self._is_left_behind = False
        self.user_timeout_s = float("inf")

    # --- as a socket ---

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        self._await(self._is_writable)
        self._raise_error()
        if self._is_broken or self._has_shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        count = min(len(data), self._room(), self.world.random.choice((40, 300, _ROOM)))
        self._put(bytes(data[:count]))
        self._network.messages += 1
        self.world.give_way()
        return count

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def recv(self, size: int) -> bytes:
        self._await(self._is_readable)
        if self._buffer:
            count = min(size, self.world.random.choice((40, 300, _ROOM)))
            data = bytes(self._buffer[:count])
            del self._buffer[:count]
            self.other.topic.tell()
            self.world.give_way()
            return data
        self._raise_error()
        return b""

    def shutdown(self, how: int) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._is_broken:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        if not self._has_shut:
            self._has_shut = True
            self._put(_FIN)

    def close(self) -> None:
        """As TCP: what was not read is answered with a reset, by which what was sent last can be lost."""
        if self.is_closed:
            return
        super().close()
        if self._is_broken:
            self._network.streams.pop(self, None)
        elif self._buffer:
            if self.world.random.random() < 0.5:
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

    def events(self, wanted: int) -> int:
        found = wanted & _ENDS if self._is_broken else 0
        if wanted & _IN and (self._buffer or self._at_end or self._is_broken):
            found |= _IN
        if wanted & _OUT and self._is_writable():
            found |= _OUT
        return found

    def _is_readable(self) -> bool:
        return bool(self._buffer) or self._at_end or self._is_broken

    def _is_writable(self) -> bool:
        return self._is_broken or self._room() > 0

    def _room(self) -> int:
        return _ROOM - sum(len(each) for each in self._flight) - len(self.other._buffer)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _await(self, condition: Callable[[], bool]) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._timeout_s == 0.0:
            if not condition():
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        elif not self.world.wait(condition, self._timeout_s, on=(self.topic,)):
            raise TimeoutError("timed out")

    def _put(self, what: bytes | str) -> None:
        self._flight.append(what)
        self._next_at = max(self._next_at, self.world.now + self._network.delay())
        self.world.at(self._next_at, self._arrive)

    def _arrive(self) -> None:
        if self._is_left_behind or self._network.is_cut(self.process.node, self.other.process.node):
            self._held += 1
        elif self._flight:
            self.other._take(self._flight.popleft())
        if self.is_closed and not self._flight:
            self._network.streams.pop(self, None)

    def leave_behind(self, notices_s: float, arrives_s: float) -> None:
        """See `Network.leave_behind`."""
        self._is_left_behind = True
        error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.world.at(self.world.now + notices_s, lambda: self.fail(error))
        self.world.at(self.world.now + arrives_s, self._catch_up)

    def _catch_up(self) -> None:
        self._is_left_behind = False
        self._network.num_late += self._is_broken and any(isinstance(each, bytes) for each in self._flight)
        self.release()

    def release(self) -> None:
        """The way to the other end is free again."""
        for _ in range(self._held):
            self.world.at(self.world.now + self._network.delay(), self._arrive)
        self._held = 0

    def _take(self, what: bytes | str) -> None:
        if self._has_vanished:
            late = self.world.now + min(self.other.user_timeout_s, 1e6)
            self.world.at(late, lambda: self.other.fail(TimeoutError(errno.ETIMEDOUT, "timed out")))
        elif what == _RESET and self._at_end:
            self.fail(None)  # it has read the end, and only who writes hears of it
        elif what == _RESET:
            self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        elif self.is_closed or self._is_broken:
            if what != _FIN:
                self._put(_RESET)
        elif isinstance(what, bytes):
            self._buffer += what
        else:
            self._at_end = True
        self.topic.tell()

    def fail(self, error: OSError | None) -> None:
        if self._is_broken:
            return
        self._error, self._is_broken = error, True
        if not self._is_left_behind:
            self._flight.clear()
        if self.world.random.random() < 0.5:
            self._buffer.clear()
        self.topic.tell()
        self.other.topic.tell()


class Listener(File):
    """A socket that waits for connections, in the running process."""

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        if address in network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        super().__init__(network.world)
        self._network, self._address = network, address
        network.listeners[address] = self
        self._timeout_s: float | None = None
        self.process = network.process()
        self.backlog: deque[Stream] = deque()

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def accept(self) -> tuple[Stream, tuple[str, int]]:
        if self._timeout_s == 0.0 and not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if not self.world.wait(lambda: bool(self.backlog), self._timeout_s, on=(self.topic,)):
            raise TimeoutError("timed out")
        stream = self.backlog.popleft()
        return stream, stream.other.getsockname()

    def events(self, wanted: int) -> int:
        return wanted & select.POLLIN if self.backlog else 0

    def close(self) -> None:
        super().close()
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
        self.num_late = 0
        """Connections of which something has arrived after their end."""
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.streams: dict[Stream, None] = {}
        self._cut: dict[tuple[str, str], int] = {}
        self._away_until: dict[str, float] = {}
        self.sockets = _Sockets(self)

    def delay(self) -> float:
        return self.world.random.uniform(0.0, self.slowest_s)

    def process(self) -> Process:
        """The one that runs."""
        process = self.world.process
        assert process is not None
        return process

    def listen(self, address: tuple[str, int]) -> Listener:
        """In the process that runs."""
        return Listener(self, address)

    def connect(self, address: tuple[str, int], timeout: float) -> Stream:
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
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        near = Stream(self, process, (f"10.0.0.{process.pid % 250}", world.number() % 60000))
        near.other = far = Stream(self, listener.process, address)
        far.other, far.is_accepted = near, True
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
                self.world.at(late, lambda stream=stream: stream.fail(TimeoutError(errno.ETIMEDOUT, "timed out")))  # type: ignore[misc]

    def _mend(self, way: tuple[str, str]) -> None:
        self._cut[way] -= 1
        if not self._cut[way]:
            for stream in self._between(*way):
                stream.release()

    def _between(self, sender: str, receiver: str) -> list[Stream]:
        return [s for s in self.streams if (s.process.node, s.other.process.node) == (sender, receiver)]

    def reset(self, node: str) -> None:
        """A middlebox forgets all connections of `node`."""
        for stream in list(self.streams):
            if node in (stream.process.node, stream.other.process.node):
                stream.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def leave_behind(self, node: str, notices_s: float, arrives_s: float) -> None:
        """A middlebox holds what comes over the connections that `node` has opened. It notices that and connects again;
        then they are let through: the other side hears an old message after newer ones, or the same one twice."""
        for stream in [each for each in self.streams if each.process.node == node and not each.is_accepted]:
            stream.leave_behind(notices_s, max(notices_s, arrives_s))

    def vanish(self, process: Process, length_s: float) -> None:
        """Its machine loses its power, for so long."""
        self._away_until[process.node] = self.world.now + length_s
        for stream in list(self.streams):
            if stream.process is process:
                stream.vanish()
        process.kill()


class _Sockets:
    """`socket`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def create_connection(self, address: tuple[str, int], timeout: float) -> Stream:
        return self._network.connect(address, timeout)

    def create_server(self, address: tuple[str, int], **_: object) -> Listener:
        return self._network.listen(address)

    def socketpair(self) -> tuple[LocalEnd, LocalEnd]:
        return LocalEnd.pair(self._network.world, is_pipe=False)

    def getaddrinfo(self, *address: object, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]

    def gethostname(self) -> str:
        return self._network.process().host
