from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.guard.save_clock import SaveClock


class MemoryStore:
    """A c10d store in one process; a wait for an absent key fails at once unless `patient`."""

    def __init__(self, *, patient: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.reads = 0
        self._changed = threading.Condition()
        self._patient = patient

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        self.reads += 1
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: keys[0] in self.values, 10 if self._patient else 0):
                raise TimeoutError(f"{keys[0]} is not there")

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_alone_it_follows_the_clock() -> None:
    hand = HandClock()
    clock = SaveClock(10, now=hand)
    due = []
    for step in range(1, 31):
        hand.now += 1
        if clock.due(step):
            due.append(step)
    assert due == [10, 20, 30]


@given(
    speeds=st.lists(st.floats(0.001, 5), min_size=30, max_size=200),
    seconds=st.floats(0.5, 60),
    start=st.integers(0, 1000),
)
def test_all_ranks_save_the_same_steps(speeds: list[float], seconds: float, start: int) -> None:
    hand, store = HandClock(), MemoryStore()
    first = SaveClock(seconds, rank=0, store=store, now=hand)
    others = [SaveClock(seconds, rank=rank, store=store) for rank in (1, 2)]
    for step, speed in enumerate(speeds, start=start + 1):
        hand.now += speed
        wanted = first.due(step)
        assert [clock.due(step) for clock in others] == [wanted, wanted]


def test_checks_are_rare_and_saves_not_late() -> None:
    hand, store = HandClock(), MemoryStore()
    first, other = SaveClock(60, rank=0, store=store, now=hand), SaveClock(60, rank=1, store=store)
    saved = []
    for step in range(1, 60_001):
        hand.now += 0.01
        if first.due(step):
            saved.append(step)
        other.due(step)
    assert len(saved) in (9, 10)
    assert all(6000 <= b - a <= 6010 for a, b in zip([0, *saved], saved, strict=False))
    assert store.reads < 20 * len(saved)


def test_a_lost_store_ends_saving_by_time_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock = SaveClock(1, rank=1, store=MemoryStore())
    assert not any(clock.due(step) for step in range(1, 10))
    assert caplog.text.count("no longer saves by the clock") == 1


def test_ranks_at_different_steps_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    SaveClock(1, rank=0, store=store).due(5)
    assert not SaveClock(1, rank=1, store=store).due(6)
    assert "rank 0 looked at the clock at step 5, rank 1 at step 6" in caplog.text


def test_a_slower_rank_zero_is_waited_for() -> None:
    hand, store = HandClock(), MemoryStore(patient=True)
    first, other = SaveClock(1, rank=0, store=store, now=hand), SaveClock(1, rank=1, store=store)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(other.due(1)))
    thread.start()
    hand.now += 5
    assert first.due(1)
    thread.join(10)
    assert answers == [True]


_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from mindx_elastic.guard.save_clock import open_clock
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=300), wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
clock = open_clock(1e-9, rank, 2)
print("DUE", clock.due(1), clock._broken, flush=True)
dist.barrier()
"""


def test_nodes_that_count_restarts_differently_meet() -> None:
    """One node's agent has restarted its workers, the other one's has only met again: they count for themselves."""
    ranks = []
    port = 0
    try:
        for rank, restarts in enumerate(("0", "1")):
            env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": restarts, "OMP_NUM_THREADS": "1"}
            env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            command = [sys.executable, "-c", _RANK, str(rank), str(port)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            ranks.append(process)
            assert process.stdout is not None
            port = int(process.stdout.readline())
        said = [process.communicate(timeout=120)[0].strip() for process in ranks]  # the clock's own bound is 10 minutes
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said == ["DUE True False"] * 2
