"""The store of a process group in a simulated world: slow, cut off, frozen, or gone with its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from tests.simulation.world import Process, Topic, World

__all__ = ["Connection", "SimulatedStore"]


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
        if not self.host.is_alive:
            raise DistNetworkError("recvVector failed: Connection reset by peer")


class Connection:
    """One client's. The part of `torch.distributed.Store` that the package uses; one call at a time, as with torch."""

    def __init__(self, store: SimulatedStore, *, timeout_s: float = 300.0) -> None:
        """timeout_s: what is waited for a key that is read."""
        self._store, self._timeout = store, timedelta(seconds=timeout_s)

    def set(self, key: str, value: str, /) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str], /) -> None:
        self._store.ask(lambda: self._store.values.update(zip(keys, map(str.encode, values), strict=True)))

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
        sums: list[int] = []

        def add() -> None:
            sums.append(int(self._store.values.get(key, b"0")) + amount)
            self._store.values[key] = str(sums[0]).encode()

        self._store.ask(add)
        return sums[0]

    def check(self, keys: Sequence[str], /) -> bool:
        found: list[bool] = []
        self._store.ask(lambda: found.append(all(key in self._store.values for key in keys)))
        return found[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes:
        """As the TCP store: without a value the answer is the expectation, and only an empty one sets it."""
        wanted = expected.encode() if isinstance(expected, str) else expected
        found: list[bytes] = []

        def compare() -> None:
            values = self._store.values
            if (key in values and values[key] == wanted) or (key not in values and not wanted):
                values[key] = desired.encode()
            found.append(values.get(key, wanted))

        self._store.ask(compare)
        return found[0]

    def delete_key(self, key: str, /) -> bool:
        found: list[bool] = []
        self._store.ask(lambda: found.append(self._store.values.pop(key, None) is not None))
        return found[0]

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
