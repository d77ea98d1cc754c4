"""What is simulated behaves as the real thing: one suite, which both of them pass.

The package calls the standard library's own `threading`, `time`, `queue`, `socket`, `select`, `selectors`, `signal` and
`os`, and torch's store: these are its ports. A difference that is found here is a defect of the simulation.
"""

from __future__ import annotations

import os
import queue
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.simulation.store import Connection, SimulatedStore
from tests.simulation.system import System
from tests.simulation.world import Process, World

HERE = "127.0.0.1"


class Real:
    """This process, and others that it forks."""

    threading, time, queue, socket = threading, time, queue, socket
    select, selectors, signal, os = select, selectors, signal, os

    def run(self, play: Callable[[], None]) -> None:
        play()

    def fork(self, play: Callable[[], object]) -> int:
        """A process that runs `play`, and ends with 0."""
        if not (pid := os.fork()):
            try:
                play()
                sys.stderr.flush()
                os._exit(0)
            finally:
                os._exit(99)
        return pid

    def pidfd(self, pid: int) -> int:
        return os.pidfd_open(pid)

    def store(self, timeout_s: float) -> tuple[int, Any]:
        """The process that hosts it, and a connection."""
        reader, writer = os.pipe()

        def host() -> None:
            server = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(server.port).encode())
            time.sleep(60)

        pid = self.fork(host)
        return pid, dist.TCPStore(HERE, int(os.read(reader, 10)), timeout=timedelta(seconds=timeout_s))


class Simulated:
    """A world."""

    def __init__(self) -> None:
        self.world = World(1)
        self.system = System(self.world)
        vars(self).update(self.world.modules(self.system.stand_ins))

    def run(self, play: Callable[[], None]) -> None:
        try:
            Process(self.world, "main", node=HERE, host="here").start(lambda: self._ends_well(play))
            self.world.run(until=self.world.now + 100)
        finally:
            self.world.close()

    def fork(self, play: Callable[[], object]) -> int:
        child = Process(self.world, "child", node=HERE, host="here")
        child.start(lambda: self._ends_well(play))
        return child.pid

    def _ends_well(self, play: Callable[[], object]) -> int:
        play()
        return 0

    def pidfd(self, pid: int) -> int:
        return self.system.open_pidfd(pid)

    def store(self, timeout_s: float) -> tuple[int, Any]:
        host = Process(self.world, "host of the store", node=HERE, host="here")
        host.start(lambda: self._ends_well(lambda: self.world.sleep(60)))
        return host.pid, Connection(SimulatedStore(self.world, host), timeout_s=timeout_s)


@pytest.fixture(params=[Real, Simulated], ids=["real", "simulated"])
def place(request: pytest.FixtureRequest) -> Any:
    return request.param()


Played = Callable[[Any], None]


def in_place(play: Played) -> Played:
    """A test that runs in a process of its place."""

    def test(place: Any) -> None:
        place.run(lambda: play(place))

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


def ends_with(place: Any, pid: int) -> int:
    """The exit code of a child, when it has one: a signal's is negative."""
    fd = place.pidfd(pid)
    poll = place.select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(30_000) == [(fd, select.POLLIN)]
    end = place.os.waitid(os.P_PID, pid, os.WEXITED)
    place.os.close(fd)
    return int(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def repeated(call: Callable[[], object], place: Any) -> None:
    """Until it fails."""
    for _ in range(1000):
        call()
        place.time.sleep(0.001)


def connection(place: Any) -> tuple[Any, Any, Any]:
    """The listener, and both ends."""
    listener = place.socket.create_server((HERE, 0))
    listener.settimeout(5)
    near = place.socket.create_connection(listener.getsockname(), timeout=5)
    far, _ = listener.accept()
    far.settimeout(5)
    return listener, near, far


def receive(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := stream.recv(size - len(data))):
        data += more
    return data


# --- threads and the clock ---


@in_place
def test_a_wait_ends_at_its_time_and_not_before(place: Any) -> None:
    event, condition, lock = place.threading.Event(), place.threading.Condition(), place.threading.Lock()
    lock.acquire()
    waits: list[Callable[[], Any]] = [
        lambda: event.wait(0.02),
        lambda: condition.wait(0.02),
        lambda: condition.wait_for(lambda: False, 0.02),
        lambda: lock.acquire(timeout=0.02),
        lambda: place.time.sleep(0.02),
        lambda: place.select.poll().poll(20),
    ]
    for wait in waits:
        began = place.time.monotonic()
        with condition:
            assert not wait()
        assert 0.0199 < place.time.monotonic() - began < 5


@in_place
def test_a_thread_is_woken_by_what_it_waits_for(place: Any) -> None:
    event, condition, items, seen = place.threading.Event(), place.threading.Condition(), place.queue.SimpleQueue(), []

    def wait() -> None:
        seen.append(event.wait(30))
        seen.append(items.get())
        with condition:
            seen.append(condition.wait_for(lambda: len(seen) > 2, 30))

    thread = place.threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.01)
    assert thread.is_alive() and not seen
    event.set()
    items.put("one")
    while len(seen) < 2:
        place.time.sleep(0.001)
    with condition:
        seen.append("told")
        condition.notify_all()
    thread.join(30)
    assert seen == [True, "one", "told", True] and not thread.is_alive()


@in_place
def test_a_lock_has_one_owner(place: Any) -> None:
    lock, again = place.threading.Lock(), place.threading.RLock()
    with lock, again, again:
        assert not lock.acquire(blocking=False)
        taken: list[bool] = []
        thread = place.threading.Thread(target=lambda: taken.append(again.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert taken == [False]
    assert lock.acquire(blocking=False)
    lock.release()
    for release in (lock.release, again.release, place.threading.Condition().notify):
        with pytest.raises(RuntimeError):
            release()


# --- connections ---


@in_place
def test_what_is_sent_arrives_in_order_and_then_the_end(place: Any) -> None:
    listener, near, far = connection(place)
    near.sendall(bytes(range(250)) * 4)
    near.shutdown(socket.SHUT_WR)
    assert receive(far, 2_000) == bytes(range(250)) * 4
    with pytest.raises(BrokenPipeError):
        near.send(b"more")
    far.sendall(b"answer")
    far.close()
    assert receive(near, 100) == b"answer" and near.recv(1) == b""
    near.close()
    listener.close()


@in_place
def test_a_connection_that_is_reset_says_so_once(place: Any) -> None:
    listener, near, far = connection(place)
    near.sendall(b"never read")
    poll = place.select.poll()
    poll.register(far, select.POLLIN)
    poll.poll(5_000)
    far.close()
    with pytest.raises(ConnectionResetError):
        near.recv(1)
    assert near.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        near.send(b"more")
    near.close()
    listener.close()


@in_place
def test_who_writes_to_one_that_has_closed_hears_it_from_the_second_write(place: Any) -> None:
    listener, near, far = connection(place)
    far.close()
    assert near.recv(1) == b""
    assert near.send(b"x") == 1
    with pytest.raises(BrokenPipeError):
        repeated(lambda: near.send(b"x"), place)
    assert near.recv(1) == b""
    near.close()
    listener.close()


@in_place
def test_what_cannot_be_had_now_is_an_error_by_its_kind(place: Any) -> None:
    listener, near, far = connection(place)
    near.settimeout(0.02)
    with pytest.raises(TimeoutError):
        near.recv(1)
    with pytest.raises(TimeoutError):
        near.sendall(bytes(64 << 20))
    near.setblocking(False)
    calls: list[Callable[[], Any]] = [lambda: near.recv(1), lambda: near.send(bytes(64 << 20))]
    for call in calls:
        with pytest.raises(BlockingIOError):
            call()
    address = listener.getsockname()
    with pytest.raises(OSError, match="in use"):
        place.socket.create_server(address)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        place.socket.create_connection(address, timeout=5)
    near.close()
    far.close()
    assert near.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        near.recv(1)


@in_place
def test_a_selector_names_what_is_ready(place: Any) -> None:
    listener, near, far = connection(place)
    selector = place.selectors.DefaultSelector()
    selector.register(near, selectors.EVENT_READ, "near")
    assert selector.select(0.01) == []
    far.send(b"x")
    assert [(key.data, events) for key, events in selector.select(5)] == [("near", selectors.EVENT_READ)]
    assert near.recv(9) == b"x"
    selector.modify(near, selectors.EVENT_READ | selectors.EVENT_WRITE, "both")
    assert [(key.data, events) for key, events in selector.select(5)] == [("both", selectors.EVENT_WRITE)]
    far.close()
    selector.modify(near, selectors.EVENT_READ, "end")
    assert [key.data for key, _ in selector.select(5)] == ["end"]
    selector.unregister(near)
    assert selector.select(0.01) == []
    selector.close()
    near.close()
    listener.close()


# --- processes ---


@in_place
def test_a_process_ends_with_its_code_or_its_signal(place: Any) -> None:
    assert ends_with(place, place.fork(lambda: place.os._exit(7))) == 7
    for signum in (signal.SIGKILL, signal.SIGTERM):
        child = place.fork(lambda: place.time.sleep(60))
        place.os.kill(child, signum)
        assert ends_with(place, child) == -signum
        with pytest.raises(ProcessLookupError):
            place.os.kill(child, 0)


@in_place
def test_a_killed_process_closes_what_it_had(place: Any) -> None:
    listener = place.socket.create_server((HERE, 0))
    listener.settimeout(5)

    def connect() -> None:
        stream = place.socket.create_connection(listener.getsockname(), timeout=5)
        place.time.sleep(60)
        stream.close()

    child = place.fork(connect)
    far, _ = listener.accept()
    far.settimeout(5)
    place.os.kill(child, signal.SIGKILL)
    assert far.recv(1) == b"" and ends_with(place, child) == -signal.SIGKILL
    far.close()
    listener.close()


@in_place
def test_a_handler_runs_in_the_midst_of_a_wait_which_lasts_as_long(place: Any) -> None:
    heard: list[int] = []
    reader, writer = place.os.pipe2(os.O_NONBLOCK)
    before = place.signal.signal(signal.SIGUSR2, lambda signum, _: heard.append(signum))
    old = place.signal.set_wakeup_fd(writer)
    me, began = place.os.getpid(), place.time.monotonic()
    place.threading.Thread(target=lambda: place.os.kill(me, signal.SIGUSR2)).start()
    place.time.sleep(0.05)
    assert heard == [signal.SIGUSR2] and place.time.monotonic() - began > 0.0499
    assert place.os.read(reader, 9) == bytes([signal.SIGUSR2])
    assert place.signal.set_wakeup_fd(old) == writer
    place.signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    place.os.kill(me, signal.SIGUSR2)
    assert place.signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN and len(heard) == 1
    place.signal.signal(signal.SIGUSR2, before)
    place.os.close(reader)
    place.os.close(writer)


@in_place
def test_a_pipe_holds_what_is_written_and_tells_of_both_ends(place: Any) -> None:
    reader, writer = place.os.pipe2(os.O_NONBLOCK)
    poll = place.select.poll()
    poll.register(reader, select.POLLIN)
    assert poll.poll(0) == []
    with pytest.raises(BlockingIOError):
        place.os.read(reader, 1)
    with pytest.raises(BlockingIOError):
        repeated(lambda: place.os.write(writer, bytes(1000)), place)
    assert poll.poll(0) == [(reader, select.POLLIN)]
    while len(place.os.read(reader, 1 << 16)) == 1 << 16:
        pass
    place.os.close(writer)
    assert poll.poll(0) == [(reader, select.POLLHUP)] and place.os.read(reader, 1) == b""
    place.os.close(reader)
    reader, writer = place.os.pipe2(os.O_NONBLOCK)
    place.os.close(reader)
    with pytest.raises(BrokenPipeError):
        place.os.write(writer, b"x")
    place.os.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        place.os.close(writer)


# --- torch's store ---


@in_place
def test_the_store_keeps_what_is_set(place: Any) -> None:
    host, store = place.store(5)
    store.set("a", "1")
    store.multi_set(["b", "c"], ["2", "3"])
    assert store.multi_get(["a", "c"]) == [b"1", b"3"] and store.get("b") == b"2"
    assert (store.check(["a", "b"]), store.check(["a", "d"])) == (True, False)
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    assert (store.delete_key("a"), store.delete_key("a"), store.check(["a"])) == (True, False, False)
    swapped = [store.compare_set("x", *pair) for pair in (("y", "1"), ("", "2"), ("", "3"), ("1", "4"), ("2", "5"))]
    assert swapped == [b"y", b"2", b"2", b"2", b"5"]
    store.wait(["b", "x"], timedelta(seconds=1))
    place.os.kill(host, signal.SIGKILL)
    assert ends_with(place, host) == -signal.SIGKILL


@in_place
def test_a_key_that_does_not_come_is_waited_for(place: Any) -> None:
    host, store = place.store(0.05)
    soon = timedelta(seconds=0.05)
    calls: list[Callable[[], Any]] = [
        lambda: store.get("a"),
        lambda: store.multi_get(["a"]),
        lambda: store.wait(["a"], soon),
    ]
    for call in calls:
        began = place.time.monotonic()
        with pytest.raises(dist.DistStoreError):
            call()
        assert 0.049 < place.time.monotonic() - began < 5
    store.set("a", "1")
    assert store.get("a") == b"1"
    place.os.kill(host, signal.SIGKILL)
    assert ends_with(place, host) == -signal.SIGKILL


@in_place
def test_a_store_whose_host_is_gone_fails_with_an_error_of_the_network(place: Any) -> None:
    host, store = place.store(5)
    store.set("a", "1")
    place.os.kill(host, signal.SIGKILL)
    assert ends_with(place, host) == -signal.SIGKILL
    soon = timedelta(seconds=1)
    calls: list[Callable[[], Any]] = [  # a `set` waits for no answer, and may be gone before the end is seen
        lambda: store.get("a"),
        lambda: store.wait(["b"], soon),
    ]
    for call in calls:
        with pytest.raises(dist.DistNetworkError):
            call()
