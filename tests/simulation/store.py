"""The store of a process group in a simulated world: slow, cut off, frozen, or gone with its host.

Torch's client speaks TCP, asks once and never connects again. So a request is neither doubled nor overtaken by a later
one of its connection, and a store that comes back empty is seen by new processes only: to all others it is lost
(`SimulatedStore.lose`). Requests of several connections come in any order. `doubles_until` doubles all the same: what
our side writes must bear it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError

from tests.simulation.world import Process, Topic, World

__all__ = ["Connection", "SimulatedStore"]

_T = TypeVar("_T")
_LATE_S = 0.5


class SimulatedStore:
    """What the host keeps. Each message takes a moment, and may take longer."""

    def __init__(self, world: World, host: Process, *, slowest_s: float = 0.002) -> None:
        self.world, self.host = world, host
        self.values: dict[str, bytes] = {}
        self.slowest_s = slowest_s
        self.hangs_until = 0.0
        """It answers nobody before, though its host lives."""
        self.cut_off: set[Process] = set()
        """Their messages, and the answers to them, do not arrive any more."""
        self.messages = 0
        self.topic = Topic(world)
        """Its values."""
        self.is_broken = False
        """All its connections are."""
        self.doubles_until = 0.0
        """What writes comes again before, and late."""
        self.num_doubled = 0

    def lose(self) -> None:
        """Its host's program starts again: it comes back empty, to which no connection of now leads."""
        self.is_broken = True
        self.topic.tell()

    def ask(self, act: Callable[[], object]) -> None:
        """One message and its answer, of the running thread. Raises where the host is gone; never returns where it
        does not answer."""
        world, process = self.world, self.world.process
        assert process is not None
        self.messages += 1
        world.sleep(world.random.uniform(0.0, self.slowest_s), is_interruptible=False)
        self._arrive(process)
        act()  # the host does it at once, and the answer may still be lost
        self.topic.tell()
        world.sleep(world.random.uniform(0.0, self.slowest_s), is_interruptible=False)
        self._arrive(process)

    def hang(self, until: float) -> None:
        self.hangs_until = until

    def cut(self, process: Process) -> None:
        self.cut_off.add(process)

    def mend(self, process: Process) -> None:
        self.cut_off.discard(process)
        self.topic.tell()

    def _arrive(self, process: Process) -> None:
        def silent_s() -> float:
            return max(self.host.frozen_until, self.hangs_until) - self.world.now

        def answers() -> bool:
            return process not in self.cut_off and silent_s() <= 0

        while not answers():
            limit_s = silent_s() if process not in self.cut_off else None
            self.world.wait(answers, limit_s, on=(self.topic,), is_interruptible=False)
        if not self.host.is_alive or self.is_broken:
            raise DistNetworkError("recvVector failed: Connection reset by peer")


class Connection:
    """One client's. The part of `torch.distributed.Store` that the package uses; one call at a time, as with torch."""

    def __init__(self, store: SimulatedStore, *, timeout_s: float = 300.0) -> None:
        """timeout_s: what is waited for a key that is read."""
        self._store, self._timeout = store, timedelta(seconds=timeout_s)

    def set(self, key: str, value: str, /) -> None:
        self.multi_set([key], [value])

    def _write(self, act: Callable[[], _T]) -> _T:
        """One message; returns what `act` does."""
        store, found = self._store, list[_T]()
        store.ask(lambda: found.append(act()))
        if isinstance(store, SimulatedStore) and store.world.now < store.doubles_until:
            store.num_doubled += 1
            late = store.world.now + store.world.random.uniform(0.0, _LATE_S)
            store.world.at(late, act)
            store.world.at(late, store.topic.tell)
        return found[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str], /) -> None:
        self._write(lambda: self._store.values.update(zip(keys, map(str.encode, values), strict=True)))

    def get(self, key: str, /) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        found: list[bytes] = []

        def read() -> None:
            found.extend(self._store.values[key] for key in keys if key in self._store.values)

        self._store.ask(read)
        if len(found) < len(keys):
            self.wait(keys, self._timeout)
            found.clear()
            self._store.ask(read)
        return found

    def add(self, key: str, amount: int, /) -> int:
        def add() -> int:
            found = int(self._store.values.get(key, b"0")) + amount
            self._store.values[key] = str(found).encode()
            return found

        return self._write(add)

    def check(self, keys: Sequence[str], /) -> bool:
        found: list[bool] = []
        self._store.ask(lambda: found.append(all(key in self._store.values for key in keys)))
        return found[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes:
        """As the TCP store: without a value the answer is the expectation, and only an empty one sets it."""
        wanted = expected.encode() if isinstance(expected, str) else expected

        def compare() -> bytes:
            values = self._store.values
            if (key in values and values[key] == wanted) or (key not in values and not wanted):
                values[key] = desired.encode()
            return values.get(key, wanted)

        return self._write(compare)

    def delete_key(self, key: str, /) -> bool:
        return self._write(lambda: self._store.values.pop(key, None) is not None)

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        store, world = self._store, self._store.world
        end = world.now + timeout.total_seconds()

        def is_there() -> bool:
            return all(key in store.values for key in keys)

        store.ask(lambda: None)
        topics = store.topic, store.host.topic
        is_over = lambda: is_there() or store.is_broken or not store.host.is_alive  # noqa: E731
        if not world.wait(is_over, end - world.now, on=topics):
            raise DistStoreError("wait timeout")
        store.ask(lambda: None)
        if not is_there():
            raise DistStoreError("wait timeout")
